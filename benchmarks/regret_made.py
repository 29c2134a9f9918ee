"""Generated cells of the regret grid: any number of instances, equal or not, with random lengths and arrivals.

A cell is named by its properties, e.g. `any-3-10%-mixed-burst`: instances, members, lengths, arrivals.

- members: `like`: equal; otherwise every second one has that much less (`1%`, `10%`) or more (`2x`, `4x`) memory than
  40 GB.
- lengths: `think`: long answers as of reasoning models; `chat`: answers of 400 tokens; `mixed`: nine short answers per
  long one.
- arrivals: `burst`: a third of the load, except for 40 s at the load; `ramp`: grows to the load over 90 s; `short`:
  half the load, except for 5 s at four times the load every 30 s.
- load: peak memory demand as a fraction of the capacity, if a token took 30 ms.

If the name ends in `-classes`, requests have the three priority classes in turn.
"""

import math
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from ballast.common.sampling import PriorityClass
from sim.hardware import Cluster, find_gpu, find_model, timings
from tools.bench.traces import Trace, TraceRequest

MODEL, _GPU = "Qwen2.5-14B", "A100-40G"
_TOKEN_S = 0.030
_SPAN_S = 120.0
_MEMORY = {"like": 1.0, "1%": 0.99, "10%": 0.9, "2x": 2.0, "4x": 4.0}
_MEAN_PROMPT = 500
_SAMPLED = 2000  # requests from which mean lengths are computed


@dataclass(frozen=True, slots=True)
class Made:
    instances: int
    members: str
    lengths: str
    arrivals: str
    load: float
    has_classes: bool = False

    @property
    def name(self) -> str:
        classes = "-classes" if self.has_classes else ""
        return f"any-{self.instances}-{self.members}-{self.lengths}-{self.arrivals}{classes}"

    @property
    def classes(self) -> tuple[PriorityClass, ...]:
        return tuple(PriorityClass) if self.has_classes else (PriorityClass.DEFAULT,)

    def cluster(self) -> Cluster:
        gpu = find_gpu(_GPU, "cluster")
        first = Cluster(gpu=gpu, gpu_count=self.instances, gpus_per_host=gpu.gpus_per_host)
        other_count = self.instances // 2
        if self.members == "like" or not other_count:
            return first
        size = round(gpu.memory_bytes * _MEMORY[self.members])
        other = gpu.model_copy(update={"name": f"{_GPU} x {_MEMORY[self.members]:g}", "memory_bytes": size})
        others = first.model_copy(update={"gpu": other, "gpu_count": other_count})
        return first.model_copy(update={"gpu_count": self.instances - other_count, "others": (others,)})

    def trace(self, draw: int) -> Trace:
        rng = random.Random(zlib.crc32(f"{self.name}-{draw}".encode()))
        sampled = [_lengths(self.lengths, random.Random(i)) for i in range(_SAMPLED)]
        held_s = sum((prompt + answer / 2) * answer * _TOKEN_S for prompt, answer in sampled) / _SAMPLED
        most_per_s = self.load * self._token_count() / held_s
        arrivals = list(_arrivals(self.arrivals, most_per_s, rng))
        requests = tuple([TraceRequest(at_s, *_lengths(self.lengths, rng)) for at_s in arrivals])
        return Trace(source=self.name, format="drawn", requests=requests, lengths="drawn")

    def _token_count(self) -> float:
        """KV capacity of all instances in tokens."""
        model, fraction = find_model(MODEL), timings().memory_fraction
        one = model.kv_bytes_per_token
        kinds = self.cluster().kinds
        return sum(k.gpu_count * (k.gpu.memory_bytes * fraction - model.parameter_bytes) for k in kinds) / one


def _lengths(kind: str, rng: random.Random) -> tuple[int, int]:
    """Tokens of a prompt and of its answer."""
    prompt = int(min(3000, max(20, rng.lognormvariate(math.log(_MEAN_PROMPT) - 0.32, 0.8))))
    if kind == "think":
        return prompt, int(min(5000, max(50, rng.lognormvariate(math.log(1000), 0.8))))
    if kind == "mixed":
        return prompt, rng.randint(3000, 6000) if rng.random() < 0.1 else rng.randint(30, 100)
    return prompt, int(min(3000, max(10, rng.lognormvariate(math.log(300), 0.8))))


def _arrivals(kind: str, most_per_s: float, rng: random.Random) -> Iterator[float]:
    """Arrival times of a Poisson process with a variable rate, by thinning."""
    peak_per_s = most_per_s * (4.0 if kind == "short" else 1.0)
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(peak_per_s)) < _SPAN_S:
        if rng.random() * peak_per_s < most_per_s * _share(kind, at_s):
            yield at_s


def _share(kind: str, at_s: float) -> float:
    """The rate at an instant, as a fraction of the load."""
    if kind == "burst":
        return 1.0 if 30.0 <= at_s < 70.0 else 0.33
    if kind == "ramp":
        return 0.2 + 0.8 * at_s / 90.0 if at_s < 90.0 else 0.3
    return 4.0 if at_s % 30.0 >= 25.0 else 0.5


MADE = {
    made.name: made
    for made in (
        Made(1, "like", "think", "burst", 2.0),
        Made(2, "like", "think", "burst", 2.4),
        Made(2, "1%", "mixed", "ramp", 2.4),
        Made(2, "4x", "think", "ramp", 1.8),
        Made(3, "like", "think", "burst", 3.0),
        Made(3, "10%", "mixed", "burst", 2.4),
        Made(3, "2x", "think", "ramp", 1.8),
        Made(3, "like", "chat", "short", 1.2),
        Made(5, "1%", "think", "ramp", 2.4),
        Made(5, "4x", "mixed", "burst", 1.6),
        Made(6, "like", "mixed", "burst", 2.4, has_classes=True),
        Made(6, "10%", "think", "short", 1.2),
        Made(12, "like", "mixed", "ramp", 2.0),
        Made(12, "2x", "think", "short", 1.0),
    )
}

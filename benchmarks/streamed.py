"""What streaming a lone instance's layers from host memory would gain according to the simulator's roofline.

    python -m benchmarks.streamed [--write]

Streaming is hidden as long as it takes no longer than a step. A batch has as many decodes as the KV memory holds, with
contexts of `_CONTEXT` tokens. Streamed layers need slots in device memory: two of a whole layer, or two of an eighth of
one, if layers are streamed in parts. `--write` puts the table into its page under benchmarks/results.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

from sim.cost import SimRoofline
from sim.hardware import Cluster, Gpu, ModelSpec, find_gpu, models, timings

PAGE = Path(__file__).parent / "results/2026-11-27-streamed-layers.md"
_CONTEXT = 1000
_EIGHTH = 0.125  # of a layer
_BUBBLES = 0.95  # fraction of a step during which both members of a pair compute
_TIMINGS = timings()

# Not in the catalogue: a fast link to host memory, and a card that a model almost fills.
_GH200 = find_gpu("H100-80G", "the table").model_copy(
    update={
        "name": "GH200-96G",
        "memory_bytes": 96 << 30,
        "memory_bytes_per_s": 4.0e12,
        "host_bytes_per_s": 450e9,
    }
)
_RTX5090 = find_gpu("RTX-4090", "the table").model_copy(
    update={
        "name": "RTX-5090-32G",
        "memory_bytes": 32 << 30,
        "flops_per_s": 209.5e12,
        "memory_bytes_per_s": 1.792e12,
        "host_bytes_per_s": 50e9,
    }
)
_CASES: tuple[tuple[str | Gpu, str], ...] = (
    ("A100-40G", "Qwen2.5-14B"),
    ("H100-80G", "Qwen3-32B"),
    ("L4", "Llama-3.1-8B"),
    ("L40S", "Llama-3.1-8B"),
    ("RTX-4090", "Llama-3.1-8B"),
    (_RTX5090, "Qwen2.5-14B"),
    (_GH200, "Qwen2.5-14B"),
    (_GH200, "Qwen3-32B"),
)


@dataclass(frozen=True, slots=True)
class Streaming:
    """The most tokens per second with streaming that is hidden behind the step."""

    net_layers: float  # streamed layers minus slots; KV gets their memory
    decode_count: int
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.decode_count / self.step_s


class StreamingInstance:
    """One instance on one GPU."""

    def __init__(self, gpu: Gpu, model: ModelSpec) -> None:
        model = model.model_copy(update={"gpus_per_instance": 1})
        self.gpu, self.model = gpu, model
        self._costs = SimRoofline(model, Cluster(gpu=gpu, gpu_count=1, gpus_per_host=1), _TIMINGS).costs
        self.memory_bytes = gpu.memory_bytes * _TIMINGS.memory_fraction
        self.kv_bytes = self.memory_bytes - model.parameter_bytes
        self.layer_s = model.layer_parameter_bytes / gpu.host_bytes_per_s

    def step_s(self, decode_count: int, streamed_layers: float) -> float:
        """Duration of a step that never waits for the link. Includes writing streamed layers into device memory."""
        written_s = streamed_layers * self.model.layer_parameter_bytes
        written_s /= self.gpu.memory_bytes_per_s * _TIMINGS.bandwidth_fraction
        work = self._costs.decodes(decode_count, decode_count * _CONTEXT)
        return work.on(self.model.layer_count, is_last=True) + written_s

    def decode_count(self, kv_bytes: float) -> int:
        return max(0, int(kv_bytes / self.model.kv_bytes_per_token / _CONTEXT))

    def best(self, slot_layers: float, quantum: float) -> Streaming:
        count = self.decode_count(self.kv_bytes)
        found = Streaming(0.0, max(1, count), self.step_s(max(1, count), 0.0))
        streamed = quantum
        while streamed < self.model.layer_count:
            net = streamed - slot_layers
            count = self.decode_count(self.kv_bytes + net * self.model.layer_parameter_bytes)
            if net > 0 and count:
                one = Streaming(net, count, self.step_s(count, streamed))
                if one.step_s < streamed * self.layer_s:
                    break
                found = max(found, one, key=lambda each: each.tokens_per_s)
            streamed += quantum
        return found

    def pair(self) -> tuple[float, float]:
        """KV and tokens/s of each member of a pair, relative to a lone instance."""
        kv_bytes = 2 * self.memory_bytes - self.model.parameter_bytes - self.model.other_parameter_bytes
        count, alone = self.decode_count(kv_bytes) // 2, self.best(0.0, self.model.layer_count)
        step_s = self.step_s(count, 0.0) / _BUBBLES + _TIMINGS.step_overhead_s
        return kv_bytes / 2 / self.kv_bytes, count / step_s / alone.tokens_per_s


def row(gpu: str | Gpu, name: str) -> str:
    card = StreamingInstance(find_gpu(gpu, "the table") if isinstance(gpu, str) else gpu, models()[name])
    if card.kv_bytes <= 0:
        return f"| {card.gpu.name}, {name} | does not fit | | | | |"
    alone = card.best(0.0, card.model.layer_count)
    whole, parts = card.best(2.0, 1.0), card.best(2 * _EIGHTH, _EIGHTH)
    gains = [one.net_layers * card.model.layer_parameter_bytes / card.kv_bytes for one in (whole, parts)]
    kv, tokens = card.pair()
    share = card.model.parameter_bytes / card.memory_bytes
    return (
        f"| {card.gpu.name}, {name} | {share:.2f} | {1e3 * card.layer_s:.1f} ms"
        f" | {alone.step_s / card.layer_s:.1f} | {gains[0]:+.0%}, {gains[1]:+.0%}"
        f" | {parts.tokens_per_s / alone.tokens_per_s - 1:+.0%} | {kv - 1:+.0%}, {tokens - 1:+.0%} |"
    )


def table() -> str:
    head = (
        "| GPU, model | parameters' share of the memory | a layer over the link | layers that hide behind a full step"
        " | KV: whole layers, parts | tokens/s: parts | a pair: KV, tokens/s of a member |"
    )
    return "\n".join([head, "|---" * 7 + "|", *(row(gpu, name) for gpu, name in _CASES)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into its page")
    found = table()
    print(found)
    if parser.parse_args().write:
        from benchmarks.quoting import quote

        quote(PAGE, "streamed", found)


if __name__ == "__main__":
    main()

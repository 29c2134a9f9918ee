"""Where the time of a decode step goes.

python -m benchmarks.engine_profile [--sequences N] [--context N]
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch, NewSequence, Slice
from services.worker.engine.load import Engine, load_engine
from tools.model.tiny import make_preset

_STEPS = 10


class DecodeLoop:
    """So many sequences of one length, decoding; the KV of their prompts is whatever the cache holds."""

    def __init__(self, engine: Engine, sequences: int, context_tokens: int) -> None:
        self._engine = engine
        self._positions = [context_tokens] * sequences
        self._tokens = [7] * sequences
        blocks_each = -(-(context_tokens + 4 * _STEPS) // engine.block_tokens)
        # Interleaved, so that no sequence has neighbouring blocks.
        self._tables = [tuple(i + sequences * at for at in range(blocks_each)) for i in range(sequences)]
        greedy = SamplingParams(temperature=0.0)
        added = tuple(NewSequence(i, (7,) * context_tokens, (), greedy) for i in range(sequences))
        engine.step(Batch(0, (), added, ()), [])

    def step(self) -> float:
        """Seconds that the engine took."""
        slices = tuple(
            Slice(i, position, (token,), True)
            for i, (position, token) in enumerate(zip(self._positions, self._tokens, strict=True))
        )
        result = self._engine.step(Batch(1, (), (), slices), self._tables)
        self._tokens = list(result.token_ids)
        self._positions = [position + 1 for position in self._positions]
        return result.execute_s

    def close(self) -> None:
        self._engine.step(Batch(2, tuple(range(len(self._positions))), (), ()), [])


def outside_torch_fraction(engine: Engine, sequences: int, context_tokens: int) -> float:
    """Share of a decode step in which no torch operator runs. The profiler itself lengthens that share."""
    loop = DecodeLoop(engine, sequences, context_tokens)
    fractions: list[float] = []
    for _ in range(3):
        loop.step()
    for _ in range(_STEPS):
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            elapsed_s = loop.step()
        roots = [event for event in recorded.events() or () if event.cpu_parent is None]
        fractions.append(1 - sum(event.cpu_time_total for event in roots) * 1e-6 / elapsed_s)
    loop.close()
    return sorted(fractions)[len(fractions) // 2]


def operator_table(engine: Engine, sequences: int, context_tokens: int) -> str:
    loop = DecodeLoop(engine, sequences, context_tokens)
    for _ in range(3):
        loop.step()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        times_s = sorted(loop.step() for _ in range(_STEPS))
    loop.close()
    table = recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=44)
    return f"{table}\nstep: best {times_s[0] * 1e3:.1f} ms, median {times_s[_STEPS // 2] * 1e3:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=160)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        model_dir = make_preset("bench", Path(folder) / "model")
        with load_engine(model_dir, dtype="float32", device_memory_bytes=1 << 30) as engine:
            print(operator_table(engine, arguments.sequences, arguments.context))
            outside = outside_torch_fraction(engine, arguments.sequences, arguments.context)
            print(f"outside of torch operators: {outside:.1%}")


if __name__ == "__main__":
    main()

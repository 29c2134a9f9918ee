"""What a decode step of a few rows takes, beside reading the model's parameters once.

    python -m benchmarks.decode_steps [--dtype float32] [--context N] [--rounds N]

A step of few rows has to read all parameters, and little else to do: 8 rows at most shall take 1.5 times as long as
reading. What is read is what lies in the engine's memory, in its order; how long that takes is the least that any of
three readers needs (sums and maxima of torch and NumPy). Processor time of one thread, the least of rounds in turn. The
exit status says whether the bound is kept.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine_profile import DecodeLoop
from services.worker.engine.load import Engine, load_engine
from services.worker.engine.parameters import HEAD
from tools.model.tiny import make_preset

ROWS = (1, 2, 4, 8)
BOUND = 1.5


def weights_of(engine: Engine) -> list[torch.Tensor]:
    """All that a step reads as a whole: no embedding that is only looked up."""
    parts = [engine.memory.parameters.layer(i) for i in range(engine.config.layer_count)]
    if engine.config.tied_embeddings:
        parts.append(engine.memory.parameters.part("embedding"))
    parts.append(engine.memory.parameters.part(HEAD))
    return [tensor for part in parts for tensor in part.values()]


def readers_of(weights: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    words = [tensor.reshape(-1).view(torch.int32) for tensor in weights]
    arrays = [tensor.numpy() for tensor in words]
    floats = [tensor.view(torch.float32) for tensor in words]
    return {
        "torch.sum": lambda: [tensor.sum() for tensor in floats],
        "torch.amax": lambda: [tensor.amax() for tensor in floats],
        "numpy.bitwise_or": lambda: [np.bitwise_or.reduce(array) for array in arrays],
    }


def timed_s(call: Callable[[], object]) -> float:
    started_s = time.thread_time()
    call()
    return time.thread_time() - started_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kernels", choices=("native", "torch"), default="native")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        model = make_preset("bench", Path(folder) / "model")
        with load_engine(
            model, dtype=arguments.dtype, device_memory_bytes=1 << 30, kernels=arguments.kernels
        ) as engine:
            weights = weights_of(engine)
            readers = readers_of(weights)
            reading_s = dict.fromkeys(readers, float("inf"))
            step_s = dict.fromkeys(ROWS, float("inf"))
            for rows in ROWS:
                loop = DecodeLoop(engine, rows, arguments.context)
                for _ in range(arguments.rounds):
                    for name, read in readers.items():
                        reading_s[name] = min(reading_s[name], timed_s(read))
                    step_s[rows] = min(step_s[rows], timed_s(loop.step))
                loop.close()
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    best_s = min(reading_s.values())
    print(f"{size / 1e6:.0f} MB of parameters, {arguments.dtype}, {arguments.context} tokens of context and more")
    for name, seconds in reading_s.items():
        print(f"- read by {name}: {seconds * 1e3:.2f} ms, {size / seconds / 1e9:.1f} GB/s")
    print("\n| rows | ms | times reading |\n|---|---|---|")
    for rows, seconds in step_s.items():
        print(f"| {rows} | {seconds * 1e3:.2f} | {seconds / best_s:.2f} |")
    worst = max(step_s.values()) / best_s
    print(
        f"\nAt most {ROWS[-1]} rows: {worst:.2f} times reading (at most {BOUND}: {'yes' if worst <= BOUND else 'NO'})"
    )
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())

"""What choosing the tokens of a step costs, with the compiled kernels and with torch's, in turn.

    python -m benchmarks.sampler [--rows N] [--rounds N]

Milliseconds of processor time for one step, the least of the rounds, one thread. Logits are flat (a normal
distribution) or peaked (twenty likely tokens above it). With 32 rows the compiled kernels are to stay below a bound
with temperature and top-p; the exit status says whether they do.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from ballast.common.sampling import SamplingParams
from services.worker.core.batch import NewSequence
from services.worker.engine.native.library import Kernels, native_kernels
from services.worker.engine.sampler import Sampler, SampleRow

BOUNDS_MS = {32_000: 2.0, 128_256: 6.0}  # vocabulary -> what 32 rows may take
BOUNDED = "temperature 0.8, top-p 0.95"
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.8": SamplingParams(temperature=0.8, seed=1),
    BOUNDED: SamplingParams(temperature=0.8, top_p=0.95, seed=1),
    "temperature 0.8, top-k 50, top-p 0.95": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1),
    "greedy, 5 logprobs": SamplingParams(temperature=0.0, logprobs=5),
    "greedy, frequency penalty": SamplingParams(temperature=0.0, frequency_penalty=0.5),
}


def make_logits(rows: int, vocabulary: int, *, peaked: bool) -> torch.Tensor:
    torch.manual_seed(0)
    if not peaked:
        return torch.randn(rows, vocabulary) * 3
    logits_RV = torch.randn(rows, vocabulary)
    logits_RV[:, :20] += torch.linspace(16, 10, 20)
    return logits_RV


def sampler_of(rows: int, vocabulary: int, sampling: SamplingParams, kernels: Kernels | None) -> Sampler:
    sampler = Sampler(vocabulary, (), torch.device("cpu"), kernels=kernels)
    for i in range(rows):
        sampler.add(NewSequence(i, (1, 2, 3), (), sampling))
    return sampler


def step_s(sampler: Sampler, rows: Sequence[SampleRow], logits_RV: torch.Tensor) -> float:
    given = logits_RV.clone()
    started_s = time.process_time()
    sampler.sample(rows, given)
    return time.process_time() - started_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    native = native_kernels()
    kinds = {"torch": None} | ({} if native is None else {native.isa: native})
    print("| vocabulary | logits | sampling | " + " | ".join(f"{kind}, ms" for kind in kinds) + " |")
    print("|---|---|---|" + "---|" * len(kinds))
    rows = [SampleRow(i, 5) for i in range(arguments.rows)]
    slowest_ms = dict.fromkeys(BOUNDS_MS, 0.0)
    for vocabulary in BOUNDS_MS:
        for shape in ("flat", "peaked"):
            logits_RV = make_logits(arguments.rows, vocabulary, peaked=shape == "peaked")
            for name, sampling in SETTINGS.items():
                samplers = [sampler_of(arguments.rows, vocabulary, sampling, kernels) for kernels in kinds.values()]
                rounds = [[step_s(s, rows, logits_RV) for s in samplers] for _ in range(arguments.rounds)]
                least_ms = [1e3 * min(column) for column in zip(*rounds, strict=True)]
                if name == BOUNDED:
                    slowest_ms[vocabulary] = max(slowest_ms[vocabulary], least_ms[-1])
                cells = " | ".join(f"{value:.2f}" for value in least_ms)
                print(f"| {vocabulary:,} | {shape} | {name} | {cells} |", flush=True)
    print()
    for vocabulary, bound_ms in BOUNDS_MS.items():
        print(
            f"{BOUNDED}, {arguments.rows} rows of {vocabulary:,}: {slowest_ms[vocabulary]:.2f} ms (bound: {bound_ms})"
        )
    kept = all(slowest_ms[vocabulary] <= bound_ms for vocabulary, bound_ms in BOUNDS_MS.items())
    return 0 if kept or native is None or arguments.rows > 32 else 1


if __name__ == "__main__":
    sys.exit(main())

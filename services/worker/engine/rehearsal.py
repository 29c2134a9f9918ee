"""Runs the largest possible steps before serving: triggers compilation and measures the GPU memory needed in
addition to parameters and KV.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch, NewSequence, Slice
from services.worker.engine.runner import ModelRunner

# Sampling parameters that need the most memory (logprobs keep the logits of every row) and all kernels of a GPU.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, seed=0, logprobs=1, repetition_penalty=1.1, logit_bias={0: 0.0})
_UNCHANGED = SamplingParams(temperature=1.0, top_p=0.9, seed=0)  # logits are drawn from in the model's dtype
_Tables = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Largest:
    """Maximum tokens and sequences of a step."""

    tokens: int
    sequences: int


class Meter(Protocol):
    """Measures the memory of a device."""

    @property
    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int: ...


class CudaMeter:
    def __init__(self, index: int) -> None:
        self._index = index

    @property
    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._index)[1]

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self._index)
        return torch.cuda.mem_get_info(self._index)[0]


def blocks_needed(largest: Largest, block_tokens: int, longest: int) -> int:
    """Number of blocks for the rehearsal. Sequences may share blocks, since their contents do not matter."""
    return -(-min(largest.tokens, longest) // block_tokens)


def rehearse(runner: ModelRunner, largest: Largest, block_tokens: int, longest: int) -> None:
    """Run the largest steps. The runner must have no sequences, and no block of its cache may be in use."""
    for batch, tables in _steps(largest, blocks_needed(largest, block_tokens, longest), longest, block_tokens):
        runner.step(batch, tables)
        runner.forget_all()


def _steps(largest: Largest, block_count: int, longest: int, block_tokens: int) -> Iterator[tuple[Batch, _Tables]]:
    chunks: list[int] = []
    while (left := largest.tokens - sum(chunks)) > 0 and len(chunks) < largest.sequences:
        chunks.append(min(left, longest))
    yield _step([(0, length) for length in chunks], tuple(range(block_count)))
    # Decodes with the longest possible contexts, which repeat one block: they are split, and the parts need memory.
    yield _step([(longest - 1, 1)] * min(largest.sequences, largest.tokens), (0,) * -(-longest // block_tokens))
    yield _step([(0, 1)], (0,), _UNCHANGED)


def _step(
    shares: list[tuple[int, int]], table: tuple[int, ...], sampling: SamplingParams = _SAMPLING
) -> tuple[Batch, _Tables]:
    """A batch with one sequence per share, given as (tokens before it, tokens computed), and its block tables."""
    slices = tuple(Slice(i, before, (0,) * length, True) for i, (before, length) in enumerate(shares))
    added = tuple(NewSequence(i, (0,) * length, (), sampling) for i, (_, length) in enumerate(shares))
    return Batch(0, (), added, slices), [table] * len(shares)


def fitting_budget(meter: Meter, utilization: float, beside_bytes: int) -> int:
    """Budget for parameters and KV: the `utilization` share of the device, as in vLLM, less `beside_bytes`."""
    return int(meter.total_bytes * utilization) - beside_bytes

"""The largest steps that there will be, run before anybody waits for one: what is compiled at its first use is compiled
then, and what memory a GPU needs beside parameters and KV is seen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch, NewSequence, Slice
from services.worker.engine.runner import ModelRunner

# What takes the most memory, as log-probabilities of every row are kept until its token is known, and all that a GPU
# compiles a kernel for.
_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, seed=0, logprobs=1, repetition_penalty=1.1, logit_bias={0: 0.0})
_Tables = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Largest:
    """What one step has at most."""

    tokens: int
    sequences: int


class Meter(Protocol):
    """What a device has."""

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
    """Sequences may share them: nobody reads what they say."""
    return -(-min(largest.tokens, longest) // block_tokens)


def rehearse(runner: ModelRunner, largest: Largest, block_tokens: int, longest: int) -> None:
    """The runner has no sequences, and no block of its cache is in use."""
    for batch, tables in _steps(largest, blocks_needed(largest, block_tokens, longest), longest, block_tokens):
        runner.step(batch, tables)
        runner.forget_all()


def _steps(largest: Largest, block_count: int, longest: int, block_tokens: int) -> Iterator[tuple[Batch, _Tables]]:
    chunks: list[int] = []
    while (left := largest.tokens - sum(chunks)) > 0 and len(chunks) < largest.sequences:
        chunks.append(min(left, longest))
    yield _step([(0, length) for length in chunks], tuple(range(block_count)))
    # Of the longest context that there may be, in one block over and over: it is split, and the parts take memory.
    yield _step([(longest - 1, 1)] * min(largest.sequences, largest.tokens), (0,) * -(-longest // block_tokens))


def _step(shares: list[tuple[int, int]], table: tuple[int, ...]) -> tuple[Batch, _Tables]:
    """Of tokens before and tokens computed, for each sequence."""
    slices = tuple(Slice(i, before, (0,) * length, True) for i, (before, length) in enumerate(shares))
    added = tuple(NewSequence(i, (0,) * length, (), _SAMPLING) for i, (_, length) in enumerate(shares))
    return Batch(0, (), added, slices), [table] * len(shares)


def fitting_budget(meter: Meter, utilization: float, beside_bytes: int) -> int:
    """For parameters and KV, where all of it together is to take so much of the device, as vLLM has it."""
    return int(meter.total_bytes * utilization) - beside_bytes

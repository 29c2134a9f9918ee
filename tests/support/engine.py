"""Drives an engine without a scheduler: a given number of sequences at once, in chunks, on shuffled blocks."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch, NewSequence, SequenceId, Slice, StepResult, TokenLogprobs
from services.worker.engine.load import Engine
from services.worker.engine.native.library import native_kernels
from services.worker.engine.packing import Packer

NEEDS_NATIVE = pytest.mark.skipif(native_kernels() is None, reason="the compiled kernels were not built (make setup)")
KERNELS = ("torch", pytest.param("native", marks=NEEDS_NATIVE))
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass
class Job:
    """A sequence to generate. `forced` tokens are fed back instead of those that the engine chose."""

    sequence_id: SequenceId
    prompt: tuple[int, ...]
    count: int
    sampling: SamplingParams = GREEDY
    output: tuple[int, ...] = ()  # generated earlier: the sequence resumes after it
    forced: tuple[int, ...] | None = None
    chosen: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs | None] = field(default_factory=list[TokenLogprobs | None])

    @property
    def tokens(self) -> tuple[int, ...]:
        """The whole sequence so far."""
        made = self.chosen if self.forced is None else self.forced[: len(self.chosen)]
        return self.prompt + self.output + tuple(made)


class BlockPool:
    """Allocates blocks in random order, so that paging errors change the results."""

    def __init__(self, block_count: int, block_tokens: int, seed: int = 0, first_block: int = 0) -> None:
        self._block_tokens = block_tokens
        self._free = list(range(first_block, first_block + block_count))
        random.Random(seed).shuffle(self._free)

    def take(self, tokens: int) -> tuple[int, ...]:
        count = -(-tokens // self._block_tokens)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count
        return tuple(taken)

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)


def generate(engine: Engine, jobs: Sequence[Job], *, at_once: int = 32, chunk_tokens: int = 512, seed: int = 0) -> None:
    """Runs the jobs to their ends, at most `at_once` at a time, and fills `chosen` and `logprobs` of each."""
    pool = BlockPool(engine.block_count, engine.block_tokens, seed, engine.memory.kv.window.first_block)
    waiting = list(reversed(jobs))
    running: dict[SequenceId, tuple[Job, tuple[int, ...]]] = {}
    done_tokens: dict[SequenceId, int] = {}  # sequence -> tokens with KV
    ended: list[SequenceId] = []
    step_id = 0
    while waiting or running:
        added: list[NewSequence] = []
        while waiting and len(running) < at_once:
            job = waiting.pop()
            tokens = len(job.prompt) + len(job.output) + job.count
            running[job.sequence_id] = (job, pool.take(tokens))
            done_tokens[job.sequence_id] = 0
            added.append(NewSequence(job.sequence_id, job.prompt, job.output, job.sampling))
        slices = [_slice(job, done_tokens[i], chunk_tokens) for i, (job, _) in running.items()]
        slices.sort(key=lambda part: len(part.token_ids) > 1)
        tables = [running[part.sequence_id][1] for part in slices]
        result = engine.step(Batch(step_id, tuple(ended), tuple(added), tuple(slices)), tables)
        for part in slices:
            done_tokens[part.sequence_id] += len(part.token_ids)
        _take_in(running, slices, result)
        ended = [i for i, (job, _) in running.items() if len(job.chosen) == job.count]
        for i in ended:
            pool.give_back(running.pop(i)[1])
        step_id += 1
    engine.step(Batch(step_id, tuple(ended), (), ()), [])


def _slice(job: Job, done: int, chunk_tokens: int) -> Slice:
    tokens = job.tokens
    end = min(len(tokens), done + chunk_tokens)
    return Slice(job.sequence_id, done, tokens[done:end], samples=end == len(tokens))


def _take_in(
    running: dict[SequenceId, tuple[Job, tuple[int, ...]]], slices: Sequence[Slice], result: StepResult
) -> None:
    sampling = [part.sequence_id for part in slices if part.samples]
    for i, token_id, logprobs in zip(sampling, result.token_ids, result.logprobs, strict=True):
        running[i][0].chosen.append(token_id)
        running[i][0].logprobs.append(logprobs)


@torch.inference_mode()
def forward(engine: Engine, slices: Sequence[Slice], tables: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits after every token of every slice: one tensor of shape [tokens, vocabulary] per slice."""
    packed = Packer(engine.block_tokens).pack(
        [Slice(s.sequence_id, s.first_position, s.token_ids, True) for s in slices], tables
    )
    hidden = engine.model.run_layers(
        engine.model.embed(torch.from_numpy(packed.token_ids_T), torch.from_numpy(packed.positions_T)),
        torch.from_numpy(packed.positions_T),
        engine.attention.prepare(packed),
        first_layer=0,
        last_layer=engine.config.layer_count,
    )
    logits = engine.model.logits(hidden).clone()
    lasts = packed.sample_rows.tolist()
    return [logits[last + 1 - len(s.token_ids) : last + 1] for s, last in zip(slices, lasts, strict=True)]

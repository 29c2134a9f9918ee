"""Times batches on stages of a loaded engine."""

import random
import time
from collections.abc import Callable, Sequence

import torch

from ballast.common.cost import Chunk
from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch, NewSequence, Slice
from services.worker.core.blocks import blocks_for
from services.worker.engine.load import Engine
from services.worker.policy.cost_fit import StageShape

_GREEDY = SamplingParams(temperature=0.0)
_VOCABULARY = 256


class StageTimer:
    """Runs batches of random tokens on random blocks of an idle engine.

    The duration of a batch is the minimum of several repetitions, because other load only adds time. It is the thread's
    processor time with one thread on a CPU, otherwise wall-clock time.
    """

    def __init__(self, engine: Engine, *, seed: int = 0) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._device = engine.memory.kv.layer(0).device
        alone = self._device.type == "cpu" and engine.threads == 1
        self._clock: Callable[[], float] = time.thread_time if alone else time.perf_counter
        self.clock = "processor time of the thread" if alone else "wall time"
        self._synchronise = engine.memory.pool.backend.synchronise

    def fill_kv(self, block_count: int) -> None:
        """Fill the first blocks with realistic values, because zeros might be faster."""
        for layer in range(self._engine.info.layer_count):
            kv = self._engine.memory.kv.layer(layer)[:block_count]
            kv.copy_(torch.randn(kv.shape[1:], device=self._device))  # float8 has no `normal_`

    def least_s(self, chunks: Sequence[Chunk], shape: StageShape, *, repetitions: int) -> float:
        """Return the minimum duration of a batch on a stage, over repetitions after a warm-up run."""
        layer_count = self._engine.info.layer_count
        first_layer = layer_count - shape.layer_count if shape.is_last else 0
        last_layer = first_layer + shape.layer_count
        tables = self._tables(chunks)
        slices = tuple(
            Slice(i, prefix, tuple(self._rng.randrange(_VOCABULARY) for _ in range(count)), samples=True)
            for i, (prefix, count) in enumerate(chunks)
        )
        hidden_TD = None if shape.is_first else self._hidden(sum(chunk.token_count for chunk in chunks))
        self._engine.step(Batch(0, (), tuple(NewSequence(i, (1,), (), _GREEDY) for i in range(len(chunks))), ()), ())
        batch = Batch(1, (), (), slices)
        times_s: list[float] = []
        for _ in range(1 + repetitions):
            given_TD = None if hidden_TD is None else hidden_TD.clone()
            self._synchronise()
            began_s = self._clock()
            self._engine.runner.run_stage(batch, tables, given_TD, first_layer=first_layer, last_layer=last_layer)
            self._synchronise()
            times_s.append(self._clock() - began_s)
        self._engine.step(Batch(2, tuple(range(len(chunks))), (), ()), ())
        return min(times_s[1:])

    def _tables(self, chunks: Sequence[Chunk]) -> list[tuple[int, ...]]:
        size = self._engine.block_tokens
        counts = [blocks_for(prefix + count, size) for prefix, count in chunks]
        blocks = self._rng.sample(range(sum(counts)), sum(counts))
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return [tuple(blocks[end - count : end]) for count, end in zip(counts, ends, strict=True)]

    def _hidden(self, tokens: int) -> torch.Tensor:
        zeros = torch.zeros(1, dtype=torch.int64, device=self._device)
        like = self._engine.model.embed(zeros, zeros)
        return torch.randn(tokens, like.shape[1], device=self._device).to(like.dtype)

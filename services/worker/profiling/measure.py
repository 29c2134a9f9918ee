"""Measures an engine over the grid, fits the cost model, and reports its errors on held-out batches."""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from ballast.common.errors import ConfigError
from services.worker.engine.load import Engine
from services.worker.policy.cost_fit import (
    CostForm,
    ErrorSummary,
    Sample,
    StageCosts,
    StageShape,
    errors_of,
    fit_stages,
    has_prefix,
    summarise,
)
from services.worker.profiling.grid import Batch, GridLimits, grid, held_out
from services.worker.profiling.stage_timer import StageTimer

_LEAST_SAMPLES = 24  # minimum for eleven coefficients
_LEAST_TOKENS = 32  # in the largest batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    batch_tokens: int = 512  # largest batch measured
    sequences: int = 64
    kv_tokens: int = 32_768  # KV tokens per batch, including prefixes
    visits: int = 3  # visits of each batch, in rounds over all batches; the minimum counts
    repetitions: int = 1  # runs per visit, after a warm-up run
    held_out_count: int = 20  # batches without prefix, and the same number with one
    layer_counts: tuple[int, ...] = ()  # stages measured in addition to the whole model; default: half of the layers
    seconds: float | None = None  # time limit; None: no limit
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    clock: str
    whole: StageShape
    samples: list[Sample]
    held_out: list[Sample]
    others: list[Sample]  # samples on the whole model that are used neither for the fit nor for the errors

    def fit(self, form: CostForm = CostForm.EXTENDED) -> StageCosts:
        return fit_stages(self.samples, form)

    def errors(self, costs: StageCosts, *, prefix: bool) -> ErrorSummary:
        return summarise(errors_of(costs, [s for s in self.held_out if has_prefix(s.chunks) == prefix]))


Report = Callable[[int, int, str], None]  # done, total, description


def quiet(done: int, total: int, what: str) -> None:
    """A `Report` that does nothing."""


def limits_of(engine: Engine, options: Options) -> GridLimits:
    """Return the requested maxima, limited by the engine's memory and model."""
    if options.batch_tokens < _LEAST_TOKENS:
        why = f"must be at least {_LEAST_TOKENS} for a profile, got {options.batch_tokens}"
        raise ConfigError("max_num_batched_tokens", why)
    if engine.info.max_model_len < _LEAST_TOKENS:
        why = f"must be at least {_LEAST_TOKENS} for a profile, got {engine.info.max_model_len}"
        raise ConfigError("max_model_len", why)
    # Every sequence may leave a block partly empty.
    room = (engine.block_count - options.sequences) * engine.block_tokens
    limits = GridLimits(
        batch_tokens=min(options.batch_tokens, engine.info.max_model_len, room // 2),
        sequences=options.sequences,
        model_len=engine.info.max_model_len,
        kv_tokens=min(options.kv_tokens, room),
    )
    if limits.batch_tokens < _LEAST_TOKENS:
        raise ConfigError(
            "device_memory_bytes",
            f"too small for a profile: KV of {engine.block_count * engine.block_tokens} tokens,"
            f" at least {2 * _LEAST_TOKENS + options.sequences * engine.block_tokens} are needed",
        )
    return limits


class _Use(Enum):
    FIT = auto()
    CHECK = auto()
    OTHER = auto()


class _Task(NamedTuple):
    chunks: Batch
    shape: StageShape
    use: _Use


def measure(engine: Engine, options: Options, report: Report = quiet, others: Sequence[Batch] = ()) -> Measured:
    """Measure batches on an otherwise idle engine, at least as many as a fit needs even beyond `options.seconds`.

    Batches are visited in rounds, mixed with held-out ones, so that temporary load on the machine affects all alike.
    """
    limits = limits_of(engine, options)
    timer = StageTimer(engine, seed=options.seed)
    timer.fill_kv(min(engine.block_count, limits.kv_tokens // engine.block_tokens + options.sequences))
    whole, parts = _shapes(engine.info.layer_count, options.layer_counts)
    tasks = _tasks(limits, whole, parts, options, others)
    least_s: dict[int, float] = {}  # index of the task -> minimum so far
    began_s, total = time.perf_counter(), options.visits * len(tasks)
    enough = _index_of_last_needed(tasks)
    for visit, (index, task) in itertools.product(range(options.visits), enumerate(tasks)):
        spent_s = time.perf_counter() - began_s
        if options.seconds is not None and spent_s > options.seconds and (visit or index > enough):
            break
        report(visit * len(tasks) + index, total, f"batches, round {visit + 1} of {options.visits}")
        took_s = timer.least_s(task.chunks, task.shape, repetitions=options.repetitions)
        least_s[index] = min(took_s, least_s.get(index, took_s))
    report(total, total, "batches")
    done = [(tasks[i], Sample(tasks[i].chunks, tasks[i].shape, took_s)) for i, took_s in least_s.items()]
    repetitions = f"least of {options.visits * options.repetitions} repetitions in {options.visits} rounds"
    return Measured(
        clock=f"{timer.clock}, {repetitions}",
        whole=whole,
        samples=[sample for task, sample in done if task.use is _Use.FIT],
        held_out=[sample for task, sample in done if task.use is _Use.CHECK],
        others=[sample for task, sample in done if task.use is _Use.OTHER],
    )


def _tasks(
    limits: GridLimits, whole: StageShape, parts: Sequence[StageShape], options: Options, others: Sequence[Batch]
) -> list[_Task]:
    rng = random.Random(options.seed)
    tasks = [_Task(chunks, shape, _Use.FIT) for chunks, shape in _with_shapes(grid(limits, rng), whole, parts)]
    for prefix in (False, True):
        kept = held_out(limits, rng, prefix=prefix, count=options.held_out_count)
        tasks += [_Task(chunks, shape, _Use.CHECK) for chunks, shape in _with_shapes(kept, whole, parts)]
    tasks += [_Task(chunks, whole, _Use.OTHER) for chunks in others if limits.allow(chunks)]
    rng.shuffle(tasks)
    return tasks


def _index_of_last_needed(tasks: Sequence[_Task]) -> int:
    fitted = [index for index, task in enumerate(tasks) if task.use is _Use.FIT]
    return fitted[min(_LEAST_SAMPLES, len(fitted)) - 1]


def _shapes(layer_count: int, wanted: Sequence[int]) -> tuple[StageShape, list[StageShape]]:
    """Return the shapes of the whole model and of the stages to measure."""
    if wrong := [count for count in wanted if not 1 <= count < layer_count]:
        raise ConfigError("layers", f"stages of {wrong[0]} layers: must be from 1 to {layer_count - 1}")
    counts = wanted or ([layer_count // 2] if layer_count > 1 else [])
    places = ((True, False), (False, False), (False, True))
    parts = [StageShape(count, first, last) for first, last in places for count in counts]
    return StageShape(layer_count, True, True), parts


def _with_shapes(
    batches: Sequence[Batch], whole: StageShape, parts: Sequence[StageShape]
) -> list[tuple[Batch, StageShape]]:
    """Return every batch on the whole model, and every second one also on one of the stages, which alternate."""
    pairs: list[tuple[Batch, StageShape]] = []
    for i, batch in enumerate(batches):
        pairs.append((batch, whole))
        if parts and i % 2:
            pairs.append((batch, parts[i // 2 % len(parts)]))
    return pairs

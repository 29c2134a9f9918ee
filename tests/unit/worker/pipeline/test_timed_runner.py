"""A timed runner returns the results of its inner runner, and records how long each kind of stage took."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ballast.common.sampling import SamplingParams
from services.worker.core.batch import Batch, NewSequence, Slice, StepResult
from services.worker.engine.load import Engine, load_engine
from services.worker.pipeline.stage_clock import Event, EventWatch, HostWatch
from services.worker.pipeline.timed_runner import TimedRunner
from services.worker.policy.cost_fit import StageShape
from services.worker.policy.online_cost import OnlineCost
from tools.model.tiny import make_tiny

TABLE = tuple(range(8))
FIRST = Batch(1, (), (NewSequence(1, tuple(range(100)), (), SamplingParams(temperature=0.0)),), ())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    model_dir = make_tiny("llama", tmp_path / "model", layers=2, vocab=320, max_len=256)
    with load_engine(model_dir, device_memory_bytes=16 << 20) as engine:
        yield engine


class Shapes(OnlineCost):
    """A cost model that records the shapes that were entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[StageShape] = []

    def enter(self, shape: StageShape) -> None:
        if shape not in self.entered:
            self.entered.append(shape)
        super().enter(shape)


def timed(engine: Engine, costs: OnlineCost) -> TimedRunner:
    """A runner on whose clock every step takes 6 ms."""
    ticks = itertools.count()
    return TimedRunner(engine.runner, costs, layer_count=2, watch=HostWatch(lambda: next(ticks) * 0.006))


def prefill(position: int = 0) -> Batch:
    return Batch(2, (), (), (Slice(1, position, tuple(range(100)), True),))


def test_results_are_unchanged_and_shapes_are_those_of_the_stages(engine: Engine) -> None:
    costs = Shapes()
    runner = timed(engine, costs)
    runner.run_stage(FIRST, (), None, first_layer=0, last_layer=2)
    whole = runner.run_stage(prefill(), (TABLE,), None, first_layer=0, last_layer=2)
    hidden = runner.run_stage(prefill(), (TABLE,), None, first_layer=0, last_layer=1)
    assert isinstance(hidden, torch.Tensor)
    halves = runner.run_stage(prefill(), (TABLE,), hidden, first_layer=1, last_layer=2)
    assert isinstance(whole, StepResult)
    assert isinstance(halves, StepResult)
    assert whole.token_ids == halves.token_ids
    assert costs.entered == [StageShape(2, True, True), StageShape(1, True, False), StageShape(1, False, True)]
    runner.forget_all()
    assert engine.runner.sequence_ids == ()


def test_not_every_short_step_is_recorded_and_empty_ones_never(engine: Engine) -> None:
    costs = OnlineCost()
    runner = timed(engine, costs)
    runner.run_stage(FIRST, (), None, first_layer=0, last_layer=2)
    assert costs.step_count == 0
    counts: list[int] = []
    for _ in range(8):
        runner.run_stage(prefill(), (TABLE,), None, first_layer=0, last_layer=2)
        counts.append(costs.step_count)
    assert counts == [0, 0, 1, 1, 1, 1, 2, 2]  # with the empty batch, 20 ms have passed in the third step
    for _ in range(8):
        runner.run_stage(Batch(3, (), (), ()), (), None, first_layer=0, last_layer=2)
    assert costs.step_count == 2


class Gpu:
    """A device that runs launches in order, each as soon as the previous one has ended."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.free_at_s = 0.0

    def record(self) -> "Moment":
        return Moment(self, max(self.free_at_s, self.now_s))

    def run(self, took_s: float) -> None:
        self.free_at_s = max(self.free_at_s, self.now_s) + took_s


class Moment:
    def __init__(self, gpu: Gpu, at_s: float) -> None:
        self._gpu, self.at_s = gpu, at_s

    def query(self) -> bool:
        return self._gpu.now_s >= self.at_s

    def elapsed_time(self, end_event: Event) -> float:
        assert isinstance(end_event, Moment)
        return (end_event.at_s - self.at_s) * 1e3


def test_a_gpus_stages_are_timed_by_their_execution_not_by_their_launch() -> None:
    gpu = Gpu()
    watch, told = EventWatch(gpu.record, lambda: gpu.now_s), list[tuple[float, float]]()
    for launched_at_s, took_s in ((1.0, 0.5), (1.1, 0.2), (3.0, 0.4), (9.0, 0.1)):
        gpu.now_s = launched_at_s
        assert watch.begin() == launched_at_s
        gpu.run(took_s)
        gpu.now_s += 0.001  # the time that a launch takes
        watch.end(lambda began_s, ended_s: told.append((began_s, ended_s)))
    expected = [(1.0, 1.5), (1.5, 1.7), (3.0, 3.4)]  # the last stage has not ended
    assert [pytest.approx(one) for one in expected] == told


def test_a_first_stage_on_a_gpu_reports_its_time_to_the_cost_model(engine: Engine) -> None:
    """On a GPU, `run_stage` returns at once, so timing the call would measure only the launch."""
    gpu, costs = Gpu(), OnlineCost()
    watch = EventWatch(gpu.record, lambda: gpu.now_s)

    class Launches:
        def run_stage(self, *given: Any, **layers: Any) -> Any:
            gpu.run(0.03)
            return engine.runner.run_stage(*given, **layers)

    runner = TimedRunner(cast(Any, Launches()), costs, layer_count=2, watch=watch)
    runner.run_stage(FIRST, (), None, first_layer=0, last_layer=2)
    for _ in range(4):
        gpu.now_s += 1.0
        runner.run_stage(prefill(), (TABLE,), None, first_layer=0, last_layer=1)
    assert costs.step_count == 3

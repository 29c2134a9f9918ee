"""A runner that times its stages gives what the runner gives, and tells what each kind of stage took."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ballast.common.sampling import SamplingParams
from ballast.model.tiny import make_tiny
from services.worker.core.batch import Batch, NewSequence, Slice, StepResult
from services.worker.engine.load import Engine, load_engine
from services.worker.pipeline.timed_runner import TimedRunner
from services.worker.policy.cost_fit import StageShape
from services.worker.policy.online_cost import OnlineCost

TABLE = tuple(range(8))
FIRST = Batch(1, (), (NewSequence(1, tuple(range(100)), (), SamplingParams(temperature=0.0)),), ())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    model_dir = make_tiny("llama", tmp_path / "model", layers=2, vocab=320, max_len=256)
    with load_engine(model_dir, device_memory_bytes=16 << 20) as engine:
        yield engine


class Shapes(OnlineCost):
    """Keeps the shapes that were entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[StageShape] = []

    def enter(self, shape: StageShape) -> None:
        if shape not in self.entered:
            self.entered.append(shape)
        super().enter(shape)


def timed(engine: Engine, costs: OnlineCost, device: str = "cpu") -> TimedRunner:
    """Every step takes 6 ms."""
    ticks = itertools.count()
    return TimedRunner(
        engine.runner, costs, layer_count=2, device=torch.device(device), clock=lambda: next(ticks) * 0.006
    )


def prefill(position: int = 0) -> Batch:
    return Batch(2, (), (), (Slice(1, position, tuple(range(100)), True),))


def test_results_are_the_runners_and_shapes_those_of_the_stages(engine: Engine) -> None:
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
    assert counts == [0, 0, 1, 1, 1, 1, 2, 2]  # with the empty batch's time, 20 ms are over in the third step
    for _ in range(8):
        runner.run_stage(Batch(3, (), (), ()), (), None, first_layer=0, last_layer=2)
    assert costs.step_count == 2


def test_a_gpu_tells_of_its_last_stage_only(engine: Engine) -> None:
    costs = OnlineCost()
    runner = timed(engine, costs, "cuda")  # the engine is on the CPU; only what is concluded from the device matters
    runner.run_stage(FIRST, (), None, first_layer=0, last_layer=2)
    for _ in range(30):
        runner.run_stage(prefill(), (TABLE,), None, first_layer=0, last_layer=1)
    assert costs.step_count == 0
    for _ in range(30):
        runner.run_stage(prefill(), (TABLE,), None, first_layer=0, last_layer=2)
    assert costs.step_count > 0

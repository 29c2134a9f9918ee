"""Runs stages and records their durations in the cost model. Used by the engine thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ballast.common.cost import Chunk
from services.worker.core.batch import Batch, LaunchedStep, StepResult
from services.worker.pipeline.background import never
from services.worker.pipeline.stage_clock import StageWatch
from services.worker.policy.cost_fit import StageShape
from services.worker.policy.online_cost import OnlineCost

if TYPE_CHECKING:
    import torch

    from services.worker.engine.runner import ModelRunner

# Execution time between two recorded steps. Recording takes some microseconds, and refitting after sixteen steps a
# third of a millisecond. With this interval that is a few parts in ten thousand, no matter how short the steps are.
_INTERVAL_S = 0.02


class TimedRunner:
    """A `StageEngine` (`pipeline.context`) that measures the steps of another one."""

    def __init__(
        self,
        runner: ModelRunner,
        costs: OnlineCost,
        *,
        layer_count: int,
        watch: StageWatch,
    ) -> None:
        self._runner = runner
        self._costs = costs
        self._layer_count = layer_count
        self._watch = watch
        self._since_s = 0.0
        self._shape: StageShape | None = None  # shape of the stage that ran last

    def run_stage(
        self,
        batch: Batch,
        block_tables: Sequence[Sequence[int]],
        hidden_TD: torch.Tensor | None,
        *,
        first_layer: int,
        last_layer: int,
        preempted: Callable[[], bool] = never,
    ) -> StepResult | torch.Tensor:
        self._watch.begin()
        out = self._runner.run_stage(
            batch, block_tables, hidden_TD, first_layer=first_layer, last_layer=last_layer, preempted=preempted
        )
        self._record(batch, StageShape(last_layer - first_layer, first_layer == 0, last_layer == self._layer_count))
        return out

    def launch(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> LaunchedStep:
        """See `ModelRunner.launch`."""
        self._watch.begin()
        launched = self._runner.launch(batch, block_tables)
        self._record(batch, StageShape(self._layer_count, True, True))
        return launched

    def _record(self, batch: Batch, shape: StageShape) -> None:
        self._costs.enter(shape)
        self._shape = shape

        def ran(began_s: float, ended_s: float) -> None:
            took_s = ended_s - began_s
            self._since_s += took_s
            if batch.slices and self._since_s >= _INTERVAL_S and self._shape == shape:
                self._since_s = 0.0
                self._costs.record((Chunk(s.first_position, len(s.token_ids)) for s in batch.slices), took_s)

        self._watch.end(ran)

    def forget_all(self) -> None:
        self._runner.forget_all()

"""Runs stages and tells the cost model what they took. Engine thread only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ballast.common.cost import Chunk
from services.worker.core.batch import Batch, StepResult
from services.worker.policy.cost_fit import StageShape
from services.worker.policy.online_cost import OnlineCost

if TYPE_CHECKING:
    import torch

    from services.worker.engine.runner import ModelRunner

# Of execution, between two steps that are recorded. To record one takes some microseconds, and to fit anew, after
# sixteen of them, a third of a millisecond: a few parts in ten thousand, however short the steps are.
_INTERVAL_S = 0.02


class TimedRunner:
    """A `StageEngine` (see `pipeline.stage_runner`)."""

    def __init__(
        self,
        runner: ModelRunner,
        costs: OnlineCost,
        *,
        layer_count: int,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._costs = costs
        self._layer_count = layer_count
        # On a GPU only the last stage waits for its results; how long the others take cannot be seen from here.
        self._sees_all = device.type == "cpu"
        self._clock = clock
        self._since_s = 0.0

    def run_stage(
        self,
        batch: Batch,
        block_tables: Sequence[Sequence[int]],
        hidden_TD: torch.Tensor | None,
        *,
        first_layer: int,
        last_layer: int,
    ) -> StepResult | torch.Tensor:
        began_s = self._clock()
        out = self._runner.run_stage(batch, block_tables, hidden_TD, first_layer=first_layer, last_layer=last_layer)
        took_s = self._clock() - began_s
        is_last = last_layer == self._layer_count
        self._costs.enter(StageShape(last_layer - first_layer, first_layer == 0, is_last))
        self._since_s += took_s
        if batch.slices and self._since_s >= _INTERVAL_S and (is_last or self._sees_all):
            self._since_s = 0.0
            self._costs.record((Chunk(s.first_position, len(s.token_ids)) for s in batch.slices), took_s)
        return out

    def forget_all(self) -> None:
        self._runner.forget_all()

"""Lockstep execution: rank 0 lays out the batch and samples, and all ranks compute."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.worker.core.batch import Batch, LaunchedStep, StepResult
from services.worker.engine.load import Engine
from services.worker.engine.lora import AdapterRows
from services.worker.engine.packing import InFlightTokens, PackedStep
from services.worker.engine.runner import ModelRunner
from services.worker.ranks.channel import RankLost, RunLayers
from services.worker.ranks.crew import Crew
from services.worker.ranks.group import RankGroup

_TOKENS = torch.int32  # dtype of token ids sent between ranks


@dataclass(frozen=True, slots=True)
class _RankedStep:
    """A launched step of all ranks."""

    launched: LaunchedStep
    group: RankGroup

    def collect(self) -> StepResult:
        """Wait for the device, so that results of an aborted all-reduce are never used."""
        result = self.launched.collect()
        self.group.require_whole()
        return result


class RankedRunner(ModelRunner):
    """The runner of rank 0."""

    def __init__(self, engine: Engine, crew: Crew, group: RankGroup) -> None:
        graphs, lora = engine.runner.graphs, engine.runner.lora
        super().__init__(engine.config, engine.model, engine.attention, engine.sampler, engine.memory.kv, graphs, lora)
        self._crew = crew
        self._group = group

    def run_stage(
        self,
        batch: Batch,
        block_tables: Sequence[Sequence[int]],
        hidden_TD: torch.Tensor | None,
        *,
        first_layer: int,
        last_layer: int,
        preempted: Callable[[], bool] | None = None,
    ) -> StepResult | torch.Tensor:
        """Execute a stage, and wait for the device, so that results of an aborted all-reduce are never used."""
        result = super().run_stage(
            batch, block_tables, hidden_TD, first_layer=first_layer, last_layer=last_layer, preempted=preempted
        )
        if isinstance(result, torch.Tensor) and result.is_cuda:
            torch.cuda.current_stream(result.device).synchronize()
        self._group.require_whole()
        return result

    def launch(self, batch: Batch, block_tables: Sequence[Sequence[int]]) -> LaunchedStep:
        return _RankedStep(super().launch(batch, block_tables), self._group)

    def compute(
        self, packed: PackedStep, hidden_TD: torch.Tensor | None, first_layer: int, last_layer: int
    ) -> torch.Tensor:
        shape = None
        if hidden_TD is not None:
            hidden_TD = hidden_TD.to(self._kv.layer(0).device).contiguous()
            shape = tuple(hidden_TD.shape)
        self._crew.tell(run_of(packed, shape, first_layer, last_layer, self._adapter_rows))
        try:
            if hidden_TD is not None:
                self._group.broadcast(hidden_TD)
            if packed.in_flight is not None:
                self._group.broadcast(packed.in_flight.token_ids_R.to(_TOKENS))
            return super().compute(packed, hidden_TD, first_layer, last_layer)
        except Exception as error:
            why = f"a step has failed that other ranks are executing: {error}"
            raise RankLost(self._crew.lost() or why) from error


def run_of(
    packed: PackedStep,
    hidden_shape: tuple[int, ...] | None,
    first_layer: int,
    last_layer: int,
    adapter_rows: AdapterRows = (),
) -> RunLayers:
    """Create the message for a step. It is mostly block tables, which are sent as 32-bit numbers."""
    narrow = replace(packed, decode_blocks_SW=packed.decode_blocks_SW.astype(np.int32), in_flight=None)
    in_flight = packed.in_flight
    awaited = None if in_flight is None else (in_flight.rows_L, in_flight.sources_L, len(in_flight.token_ids_R))
    return RunLayers(narrow, hidden_shape, first_layer, last_layer, awaited, adapter_rows)


@torch.inference_mode()
def follow(engine: Engine, group: RankGroup, run: RunLayers) -> None:
    """Execute another rank's part of a step."""
    hidden_TD, in_flight, device = None, None, engine.memory.kv.layer(0).device
    if run.hidden_shape is not None:
        hidden_TD = torch.empty(run.hidden_shape, dtype=engine.implementation.dtype, device=device)
        group.broadcast(hidden_TD)
    if run.awaited is not None:
        rows_L, sources_L, count = run.awaited
        in_flight = InFlightTokens(rows_L, sources_L, torch.empty(count, dtype=_TOKENS, device=device))
        group.broadcast(in_flight.token_ids_R)
    blocks_SW = run.packed.decode_blocks_SW.astype(np.int64)
    packed = replace(run.packed, decode_blocks_SW=blocks_SW, in_flight=in_flight)
    engine.memory.kv.guard(packed.blocks_end, range(run.first_layer, run.last_layer))
    engine.runner.use_adapters(run.adapter_rows)
    engine.runner.compute(packed, hidden_TD, run.first_layer, run.last_layer)

"""Batches through this member's stage: as they come, in their order, and on to whoever is next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ballast.common.errors import Unavailable
from ballast.common.ids import Epoch
from ballast.service.logs import get_logger
from services.worker.core.batch import Batch, StepResult
from services.worker.core.stage import StageBook
from services.worker.links.pace import StagePace
from services.worker.links.traffic import TrafficClass
from services.worker.pipeline.events import BatchArrived, ResultArrived
from services.worker.pipeline.links import Links
from services.worker.pipeline.precopy import PrecopyRun
from services.worker.pipeline.published import Published
from services.worker.pipeline.role import Role
from services.worker.pipeline.wire import Topic, batch_to_bytes, failure_to_bytes, result_to_bytes
from services.worker.shell import StepOutcome

if TYPE_CHECKING:
    import torch

_HEAD_BYTES = 2048  # longer heads of batches, prompts are in them, go before their hidden states


class StageEngine(Protocol):
    """The part of the engine that runs batches."""

    def run_stage(
        self,
        batch: Batch,
        block_tables: Sequence[Sequence[int]],
        hidden_TD: torch.Tensor | None,
        *,
        first_layer: int,
        last_layer: int,
    ) -> StepResult | torch.Tensor: ...

    def forget_all(self) -> None: ...


class StageRunner:
    """Of a leader as well, whose batches come from its own core: see `run`."""

    def __init__(
        self,
        role: Role,
        links: Links,
        engine: StageEngine,
        *,
        book: StageBook,
        published: Published,
        pace: StagePace,
        precopy: Callable[[], PrecopyRun | None],
        awaits_roster: Callable[[Epoch], bool],
        memory_is_awaited: Callable[[], bool],
    ) -> None:
        """`precopy` is told of every batch; `awaits_roster`: in that epoch nobody knows yet which blocks are free;
        `memory_is_awaited`, of a leader: requests have not been let in.
        """
        self._role = role
        self._links = links
        self._engine = engine
        self._book = book
        self._published = published
        self._pace = pace
        self._precopy = precopy
        self._awaits_roster = awaits_roster
        self._memory_is_awaited = memory_is_awaited
        self._early: list[BatchArrived] = []  # batches of a leader that is ahead of this member

    @property
    def usual_s(self) -> float:
        """What this stage has lately taken for a batch; 0 if it was never one."""
        return self._pace.stage_s or 0.0

    def run(self, batch: Batch, tables: Sequence[Sequence[int]], hidden_TD: torch.Tensor | None) -> StepOutcome | None:
        """This member's layers of a batch. None: it has gone on, or there is nothing to tell."""
        role, clock, precopy = self._role, self._published.clock, self._precopy()
        if precopy is not None:
            precopy.begins(batch)
        if role.leads and batch.slices:
            awaited = self._memory_is_awaited()
            batch = replace(batch, quiet_s=clock.take_quiet_s(), memory_is_awaited=awaited)
        began_s = time.monotonic()
        in_pipeline = bool(role.stages and batch.slices)
        if in_pipeline:
            self._pace.memory_is_awaited = batch.memory_is_awaited
            self._pace.begins(began_s)
        try:
            out = self._engine.run_stage(
                batch, tables, hidden_TD, first_layer=role.layers.start, last_layer=role.layers.stop
            )
        except Unavailable as error:  # who has KV that is on its way is gone: the group is lost, and that is told
            get_logger().error("attention elsewhere was not had", step_id=batch.step_id, why=str(error))
            return None
        except (RuntimeError, ValueError, IndexError) as error:
            return self._failed(batch, f"{type(error).__name__}: {error}")
        ended_s = time.monotonic()
        if in_pipeline:
            self._pace.ran(ended_s - began_s)
        if batch.slices:
            clock.ran(batch, role.epoch, began_s, ended_s)
        if precopy is not None:
            precopy.ran(batch)
        if not role.is_last:
            self._send_on(batch, None if isinstance(out, StepResult) else out)
            return None
        if not batch.slices:
            return None
        assert isinstance(out, StepResult)
        if role.leads:
            return StepOutcome(batch.step_id, out)
        self._tell_leader(result_to_bytes(out))
        return None

    def _send_on(self, batch: Batch, hidden_TD: torch.Tensor | None) -> None:
        to, head = self._role.next_stage, batch_to_bytes(batch)
        if len(head) > _HEAD_BYTES:
            self._links.send(to, TrafficClass.ACTIVATION, Topic.BATCH_HEAD, head)
            head = b""
        began_s, epoch, clock = time.monotonic(), self._role.epoch, self._published.clock
        sent = self._links.send(to, TrafficClass.ACTIVATION, Topic.BATCH, head, hidden_TD)
        if sent is not None and batch.slices:
            sent.add_done_callback(lambda _: clock.sent(batch, epoch, began_s, time.monotonic()))

    def _failed(self, batch: Batch, why: str) -> StepOutcome | None:
        get_logger().error("stage could not run a batch", step_id=batch.step_id, why=why)
        if self._role.leads:
            return StepOutcome(batch.step_id, None, why)
        self._tell_leader(failure_to_bytes(batch.step_id, why))
        return None

    def _tell_leader(self, result: bytes) -> None:
        self._links.send(self._role.leader, TrafficClass.ACTIVATION, Topic.RESULT, result)

    def arrived(self, event: BatchArrived) -> None:
        # Its leader has everybody's word but ours has not been carried out yet; or its roster, which comes another
        # way, has not come yet: it says which blocks are free.
        if event.epoch > self._role.epoch or self._awaits_roster(event.epoch):
            self._early.append(event)
            return
        if event.epoch < self._role.epoch or self._role.leads:
            self._published.stale_total += 1
            return
        self._published.clock.received(event.batch, event.epoch, event.arrived_s, event.receive_s)
        outcome = self.run(event.batch, self._book.apply(event.batch), event.hidden_TD)
        assert outcome is None

    def run_early(self) -> None:
        """Those whose time has come by now."""
        early, self._early = self._early, []
        for event in early:
            self.arrived(event)

    def outcome(self, event: ResultArrived) -> StepOutcome | None:
        """Leader: what the last stage says."""
        if event.epoch != self._role.epoch or not self._role.leads or not self._role.stages:
            self._published.stale_total += 1
            return None
        if isinstance(event.result, StepResult):
            return StepOutcome(event.result.step_id, event.result)
        step_id, why = event.result
        return StepOutcome(step_id, None, why)

    def forget_all(self) -> None:
        """What the engine keeps of sequences: their places change."""
        self._engine.forget_all()

    def abandon(self) -> None:
        """The group is no more, and its batches with it."""
        self._early = []
        self._engine.forget_all()

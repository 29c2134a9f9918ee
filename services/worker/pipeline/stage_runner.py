"""Runs batches through this member's stage, in order of arrival, and sends them to the next stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ballast.common.errors import InvariantViolation, Unavailable
from ballast.common.ids import Epoch
from ballast.service.logs import get_logger
from services.worker.core.batch import PREEMPTED, Batch, LaunchedStep, Preempted, SequenceId, StepResult
from services.worker.core.events import BlockCopy
from services.worker.core.swapping import block_copies
from services.worker.core.turns import LaunchedBatch, StepOutcome
from services.worker.links.pace import StagePace
from services.worker.pipeline.activations import ActivationLog
from services.worker.pipeline.background import never
from services.worker.pipeline.context import BlockCopier, Launch, MemberContext, StageEngine
from services.worker.pipeline.events import BatchArrived, ResultArrived
from services.worker.pipeline.stage_clock import StageWatch

if TYPE_CHECKING:
    import torch


class StageRunner:
    """Runs one member's stage. On a leader, batches are from its own core; see `run`."""

    def __init__(
        self,
        context: MemberContext,
        engine: StageEngine,
        copier: BlockCopier | None,
        *,
        pace: StagePace,
        watch: StageWatch,
        awaits_roster: Callable[[Epoch], bool],
        preempts: Callable[[], bool] = never,
        log: ActivationLog | None = None,
    ) -> None:
        """`awaits_roster(epoch)`: True until the roster that determines which blocks are free has arrived.
        `preempts()`: True if online work waits.
        """
        self._context = context
        self._role = context.role
        self._links = context.links
        self._engine = engine
        self._copier = copier
        self._copy_s: dict[int, float] = {}  # on a leader: copy times of steps in flight, on this stage
        self._published = context.published
        self._now = context.now
        self._pace = pace
        self._watch = watch
        self._awaits_roster = awaits_roster
        self._preempts = preempts
        self.launch: Launch | None = None  # launches batches of the whole model; None: they are executed synchronously
        self._log = log
        self._early: list[BatchArrived] = []  # batches of a leader that is ahead of this member

    def run(
        self,
        batch: Batch,
        tables: Sequence[Sequence[int]],
        hidden_TD: torch.Tensor | None,
        copies: Sequence[BlockCopy] = (),
    ) -> StepOutcome | LaunchedBatch | None:
        """Execute this member's layers of a batch. None: the batch was sent to the next stage, or has no result."""
        if not copies:
            return self._compute(batch, tables, hidden_TD)
        if self._copier is None:
            raise InvariantViolation("KV is to be swapped, but there is no host memory for it")
        self._copier.start(copies, self._role.layers)
        try:
            outcome = self._compute(batch, tables, hidden_TD)
        finally:
            copy_s = self._copier.finish()
        if isinstance(outcome, LaunchedBatch):
            return LaunchedBatch(outcome.step_id, lambda: _with_copies(outcome.collect(), copy_s))
        if outcome is not None:
            return _with_copies(outcome, copy_s)
        if self._role.leads and batch.slices:
            self._copy_s[batch.step_id] = copy_s
        return None

    def _compute(
        self, batch: Batch, tables: Sequence[Sequence[int]], hidden_TD: torch.Tensor | None
    ) -> StepOutcome | LaunchedBatch | None:
        role, clock = self._role, self._published.clock
        if role.leads and batch.slices:
            quiet_s, awaited = clock.take_quiet_s(), self._context.group_scheduler.memory_is_awaited
            if quiet_s or awaited:
                batch = replace(batch, quiet_s=quiet_s, memory_is_awaited=awaited)
        log = None if role.is_last else self._log
        if log is not None:
            log.tokens.follow(batch, self._context.book)
        began_s = self._watch.begin()
        in_pipeline = bool(role.stages and batch.slices)
        if in_pipeline:
            self._pace.memory_is_awaited = batch.memory_is_awaited
            self._pace.begins(began_s)
        try:
            first, last = role.layers.start, role.layers.stop
            launched, out = None, None
            if self.launch is not None and self._is_whole(batch):
                launched = self.launch(batch, tables)
            else:
                out = self._engine.run_stage(
                    batch, tables, hidden_TD, first_layer=first, last_layer=last, preempted=self._preempts
                )
        except Preempted:
            return self._not_run(batch, PREEMPTED)
        except Unavailable as error:  # a holder of KV is lost and with it the group, which is reported elsewhere
            get_logger().error("attention on another stage failed", step_id=batch.step_id, why=str(error))
            return None
        except (RuntimeError, ValueError, IndexError) as error:
            return self._failed(batch, f"{type(error).__name__}: {error}")
        epoch = role.epoch

        def ran(began_s: float, ended_s: float) -> None:
            if in_pipeline:
                self._pace.ran(ended_s - began_s)
            if batch.slices and self._role.epoch == epoch:
                clock.ran(batch, epoch, began_s, ended_s)

        self._watch.end(ran)
        if launched is not None:
            return LaunchedBatch(batch.step_id, partial(self._collect, batch, launched))
        if not role.is_last:
            hidden_TD = None if isinstance(out, StepResult) else out
            if log is not None and hidden_TD is not None:
                log.take(batch, tables, hidden_TD)
            self._send_on(batch, hidden_TD)
            return None
        if batch.failure:
            self._links.send_result((batch.step_id, batch.failure))
        if not batch.slices:
            return None
        assert isinstance(out, StepResult)
        if role.leads:
            return StepOutcome(batch.step_id, out)
        self._links.send_result(out)
        return None

    def _is_whole(self, batch: Batch) -> bool:
        """True if this stage computes the whole batch, without safepoints."""
        role = self._role
        return role.leads and role.is_last and bool(batch.slices) and not batch.safepoint_layers

    def _collect(self, batch: Batch, launched: LaunchedStep) -> StepOutcome:
        try:
            return StepOutcome(batch.step_id, launched.collect())
        except (RuntimeError, ValueError, IndexError) as error:
            get_logger().error("a batch has failed on the device", step_id=batch.step_id, why=str(error))
            return StepOutcome(batch.step_id, None, f"{type(error).__name__}: {error}")

    def _send_on(self, batch: Batch, hidden_TD: torch.Tensor | None) -> None:
        began_s, epoch, clock = self._now(), self._role.epoch, self._published.clock
        sent = self._links.pass_batch(batch, hidden_TD)
        if sent is not None and batch.slices:
            sent.add_done_callback(lambda _: clock.sent(batch, epoch, began_s, self._now()))

    def _failed(self, batch: Batch, why: str) -> StepOutcome | None:
        get_logger().error("stage could not run a batch", step_id=batch.step_id, why=why)
        return self._not_run(batch, why)

    def _not_run(self, batch: Batch, why: str) -> StepOutcome | None:
        if self._role.is_last:
            if self._role.leads:
                return StepOutcome(batch.step_id, None, why)
            self._links.send_result((batch.step_id, why))
        else:  # later stages only apply its additions and removals; the last one reports it in order
            self._send_on(replace(batch, slices=(), failure=why), None)
        return None

    def arrived(self, event: BatchArrived) -> None:
        # All members are ready, but this one has not taken up the epoch yet. Or the roster, which determines which
        # blocks are free and is sent over another link, has not arrived.
        if event.epoch > self._role.epoch or self._awaits_roster(event.epoch):
            self._early.append(event)
            return
        if event.epoch < self._role.epoch or self._role.leads:
            self._published.stale_total += 1
            return
        self._published.clock.received(event.batch, event.epoch, event.arrived_s, event.receive_s)
        tables = self._context.book.apply(event.batch)
        copies = block_copies(event.batch, self._context.book) if event.batch.copies else ()
        outcome = self.run(event.batch, tables, event.hidden_TD, copies)
        assert outcome is None

    def run_early(self) -> None:
        """Run the batches that arrived early and can run now."""
        early, self._early = self._early, []
        for event in early:
            self.arrived(event)

    def outcome(self, event: ResultArrived) -> StepOutcome | None:
        """On a leader: convert the last stage's result to the outcome of a batch; None if it is stale."""
        if event.epoch != self._role.epoch or not self._role.leads or not self._role.stages:
            self._published.stale_total += 1
            return None
        if isinstance(event.result, StepResult):
            outcome = StepOutcome(event.result.step_id, event.result)
        else:
            step_id, why = event.result
            outcome = StepOutcome(step_id, None, why)
        copy_s = self._copy_s.pop(outcome.step_id, None)
        return outcome if copy_s is None else _with_copies(outcome, copy_s)

    def forget(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop the engine's state of these sequences."""
        if sequence_ids:
            batch, layers = Batch(0, tuple(sequence_ids), (), ()), self._role.layers
            self._engine.run_stage(batch, (), None, first_layer=layers.start, last_layer=layers.stop)

    def forget_all(self) -> None:
        """Drop the engine's state of all sequences, because the layout changes."""
        self._engine.forget_all()

    def abandon(self) -> None:
        """Drop the batches of a lost group."""
        self._early = []
        self._copy_s.clear()
        self._engine.forget_all()


def _with_copies(outcome: StepOutcome, copy_s: float) -> StepOutcome:
    return outcome if outcome.result is None else replace(outcome, result=replace(outcome.result, copy_s=copy_s))

"""This worker in its group: runs its stage of every batch and carries transitions out. Engine thread only.

What decides is pure (`core.transition`, `core.worker`); here links, device memory and the engine do what they say.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import torch

from ballast.common.errors import BallastError, InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import Member as LayoutMember
from ballast.service.logs import get_logger
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core.batch import Batch, SequenceId, StepResult
from services.worker.core.blocks import blocks_for
from services.worker.core.events import (
    Adopted,
    CapacityChanged,
    Command,
    Execute,
    GroupLost,
    HandedOver,
    HandOver,
    KvArrived,
    KvLost,
    KvTravels,
    Removed,
    RoleChanged,
)
from services.worker.core.plan import Kind, Phase, Victim, members_of, part_of, transfers
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.stage import StageBook
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import (
    AbortRequested,
    BoundaryReached,
    Broken,
    CommitRequested,
    ConnectLinks,
    EpochEnded,
    ExpectKv,
    HandoverReceived,
    KvReceived,
    KvSent,
    Lead,
    Led,
    LinksUp,
    MemoryReady,
    PeerLost,
    PreparationFailed,
    PrepareMemory,
    Quiesce,
    ReleaseLost,
    Resume,
    SendEpochEnded,
    SendHandover,
    SendKv,
    SendKvComplete,
    SendRoster,
    TakenUp,
    TakeUp,
    UndoPreparation,
)
from services.worker.core.transition_messages import Command as TransitionCommand
from services.worker.core.transition_messages import Event as TransitionEvent
from services.worker.core.worker import WorkerCore
from services.worker.memory.device import DeviceMemory
from services.worker.pipeline.events import (
    BatchArrived,
    CapacityTold,
    HandoverArrived,
    KvAheadArrived,
    KvAheadAsked,
    KvAsked,
    LayerArrived,
    LayerAsked,
    LayerChecked,
    LinkMade,
    PieceSent,
    PlanReceived,
    ResultArrived,
    RoomGranted,
    RoomWithdrawn,
    RosterArrived,
    ShareTold,
    Told,
    Woken,
)
from services.worker.pipeline.exchange import KvExchange
from services.worker.pipeline.homecoming import Homecoming
from services.worker.pipeline.hub import Hub
from services.worker.pipeline.precopy import Place, PrecopyRun
from services.worker.pipeline.rescue import Rescue
from services.worker.pipeline.stage_clock import StageClock
from services.worker.pipeline.status import Progress
from services.worker.pipeline.wire import (
    Topic,
    batch_to_bytes,
    failure_to_bytes,
    result_to_bytes,
    roster_to_bytes,
    snapshot_to_proto,
)
from services.worker.shell import MemberEvent, StepOutcome
from services.worker.transport.link import Link
from services.worker.transport.plane import DataPlane
from services.worker.transport.traffic import TrafficClass

_LINK_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5.0
_KEPT_TRANSITIONS = 16
_BEFORE_COMMIT = (Phase.PREPARING, Phase.PREPARED)
_AFTER_COMMIT = (Phase.COMMITTING, Phase.EXCHANGING)
_META_BYTES = 2048  # longer bodies of messages without a tensor travel as one of bytes
_HEAD_BYTES = 2048  # longer heads of batches, prompts are in them, go before their hidden states

Answer = Command | StepOutcome


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


def _nothing() -> None:
    """Nobody waits for what is published."""


class GroupMember:
    """See `services.worker.shell.Member`."""

    def __init__(
        self,
        *,
        me: WorkerId,
        layer_count: int,
        core: WorkerCore,
        book: StageBook,
        memory: DeviceMemory,
        runner: StageEngine,
        plane: DataPlane,
        hub: Hub,
        read_layer: Callable[[int], None],
        max_running_count: int,
        post: Callable[[MemberEvent], None],
    ) -> None:
        """`read_layer` fills a layer's parameters from the checkpoint; called on a thread of its own."""
        self.me = me
        self._core = core
        self._book = book
        self._memory = memory
        self._runner = runner
        self._plane = plane
        self._hub = hub
        self._post = post
        self._layer_count = layer_count
        self._epoch = Epoch(0)  # of the layout that this worker plays its role in
        self._stages: tuple[LayoutMember, ...] = ()  # of its group; empty: alone
        self._first_layer, self._last_layer = 0, layer_count
        self._capacities: dict[WorkerId, int] = {}  # leader: stage -> blocks
        self._transition: Transition | None = None
        self._received: PlanReceived | None = None
        self._quiescing = False
        self._links_missing: set[WorkerId] = set()
        self._going: dict[WorkerId, tuple[SequenceSnapshot, ...]] = {}  # handed over, by the leader they go to
        self._coming: list[SequenceSnapshot] = []  # new leader: handed over to it
        self._room_epoch = Epoch(0)  # the restore for which the leader has granted room
        self._withdrawn_epoch = Epoch(0)  # the restore that the leader has given up
        self._limited_epoch = Epoch(0)  # leader: the restore whose end a stage must know, to be believed what it has
        self._limited: set[WorkerId] = set()  # leader: stages that have not said since what they have
        self._before_block_count = 0  # leader: what the group had then; 0: what it has is all there is
        self._told_capacities: dict[WorkerId, int] = {}  # with the handovers, perhaps before this worker's take-up
        self._homes: dict[WorkerId, int] = {}  # leader: blocks of the other stages when they hold all layers
        self._early: list[BatchArrived] = []  # batches of a leader that is ahead of this member
        self._answers: list[Answer] = []
        self._recomputed: tuple[SequenceId, ...] = ()  # new leader: victims for whom there is no room
        self._exchange: KvExchange | None = None  # of the transition under way
        self._precopy: PrecopyRun | None = None  # the same; of one that has ended until nothing is read for it
        self._max_running_count = max_running_count
        self._homecoming = Homecoming(
            layer_count, memory=memory, book=book, hub=hub, ask=self._ask_for_layer, read=read_layer, post=post
        )
        self._undoing = False  # a restore was aborted
        self._learning = False  # a drop is prepared: checksums are taken of what is to be given up
        self._rescue: Rescue | None = None  # a member of the group is gone
        self._progress: Progress | None = None
        self.progress: dict[Epoch, Progress] = {}  # what others may read: replaced, never changed
        self.on_publish: Callable[[], None] = _nothing  # called after that, on the engine thread
        self.stale_total = 0
        self.clock = StageClock()

    # ------------------------------------------------------------ what the shell calls

    @property
    def may_form(self) -> bool:
        return not self._quiescing

    @property
    def leads(self) -> bool:
        return not self._stages or self._stages[0].worker_id == self.me

    @property
    def newest_epoch(self) -> Epoch:
        """The highest that this worker has heard of: it takes part in no lower one."""
        return max(self.progress, default=Epoch(0))

    def handle(self, event: MemberEvent) -> list[Answer]:
        match event:
            case PlanReceived():
                self._receive(event)
            case Told(epoch=epoch, event=told):
                self._told(epoch, told)
            case BatchArrived():
                self._batch(event)
            case ResultArrived():
                self._result(event)
            case HandoverArrived():
                self._handover(event)
            case RosterArrived():
                if self._is_current(event.epoch):
                    for sequence_id in event.recomputed:  # their blocks are needed for those who keep their KV
                        self._book.release(sequence_id)
                    self._drive(event.event)
                    self._run_early()
            case KvAsked():
                if self._is_current(event.epoch):
                    self._the_exchange().asked(event)
            case CapacityTold():
                self._capacity_told(event)
            case LinkMade():
                self._link_made(event)
            case RoomGranted(epoch=epoch):
                self._room_is_granted(epoch)
            case RoomWithdrawn(epoch=epoch):
                self._room_is_withdrawn(epoch)
            case LayerAsked():
                self._layer_asked(event)
            case Woken():
                pass  # see `poll`
            case LayerArrived() | LayerChecked():
                self._layer_news(event)
            case ShareTold() | KvAheadAsked() | KvAheadArrived():
                if self._is_current(event.epoch):
                    self._the_precopy().handle(event, time.monotonic())
            case PieceSent():
                if self._is_current(event.epoch) and self._the_exchange().sent(event):
                    self._drive(KvSent(time.monotonic(), event.epoch, event.sequence_id, event.to))
            case _:
                raise InvariantViolation(f"{type(event).__name__} is not known here")
        return self._take_answers()

    def poll(self) -> list[Answer]:
        transition = self._transition
        if self.leads:
            has_work = bool(self._core.in_flight_count) or self._core.has_work
            self.clock.note_work(time.monotonic(), has_work=has_work)
        if self._quiescing and transition is not None and transition.phase is Phase.COMMITTING:
            boundary = not self._core.in_flight_count and not self._core.suspended_ids
            if boundary and transition.led_before:
                self._tell_removed()
                self._drive(BoundaryReached(time.monotonic(), transition.epoch))
        if self.leads and transition is not None and transition.plan.kind is Kind.RESTORE:
            self._lead_restore(transition)
        if self._homecoming.wants_room:
            self._take_room()
        if self._undoing:
            self._undo_restore()
        if self._rescue is not None and self._rescue.poll(time.monotonic(), self._grow_book):
            self._be_whole(self._rescue)
        if self._learning and not self._homecoming.reads_layers:
            self._learning = False
            if transition is not None:
                self._drive(MemoryReady(time.monotonic(), transition.epoch))
        if self._precopy is not None and transition is not None:
            self._copy_ahead(self._precopy, transition)
        return self._take_answers()

    def run(self, command: Execute | Removed) -> StepOutcome | None:
        tables = command.block_tables if isinstance(command, Execute) else ()
        return self._run_stage(command.batch, tables, None)

    def check(self) -> None:
        self._book.check()
        if self._transition is not None:
            self._transition.check()
        if self._precopy is not None:
            self._precopy.check()
        if self._book.block_count > self._memory.kv.block_count:
            raise InvariantViolation(
                f"{self._book.block_count} blocks in the book, {self._memory.kv.block_count} mapped"
            )

    def close(self) -> None:
        self._homecoming.close()
        self._plane.close()

    def _tell_removed(self) -> None:
        """What has ended since the last batch, while the stages still follow this leader: it would stay with them."""
        self._tell_capacity_to_core()

    def _take_answers(self) -> list[Answer]:
        answers, self._answers = self._answers, []
        return answers

    def _tell_core(self, commands: Iterable[Command]) -> None:
        """The core's answer to something told it here. The shell hears of it too: it forgets texts."""
        for command in commands:
            if isinstance(command, HandedOver):
                for to, snapshots in command.snapshots:
                    self._going[to] = snapshots
            elif isinstance(command, Removed):
                outcome = self.run(command)
                assert outcome is None or not command.batch.slices
            self._answers.append(command)

    # ------------------------------------------------------------ batches

    def _run_stage(
        self, batch: Batch, tables: Sequence[Sequence[int]], hidden_TD: torch.Tensor | None
    ) -> StepOutcome | None:
        """This member's layers of a batch, and on to whoever is next."""
        if self._precopy is not None:
            self._precopy.begins(batch)
        if self.leads and batch.slices:
            batch = replace(batch, quiet_s=self.clock.take_quiet_s())
        began_s = time.monotonic()
        try:
            out = self._runner.run_stage(
                batch, tables, hidden_TD, first_layer=self._first_layer, last_layer=self._last_layer
            )
        except (RuntimeError, ValueError, IndexError) as error:
            return self._failed(batch, f"{type(error).__name__}: {error}")
        if batch.slices:
            self.clock.ran(batch, self._epoch, began_s, time.monotonic())
        if self._precopy is not None:
            self._precopy.ran(batch)
        is_last = not self._stages or self._stages[-1].worker_id == self.me
        if is_last:
            if not batch.slices:
                return None
            assert isinstance(out, StepResult)
            if self.leads:
                return StepOutcome(batch.step_id, out)
            self._send(self._stages[0].worker_id, TrafficClass.ACTIVATION, Topic.RESULT, result_to_bytes(out))
            return None
        tensor = out if isinstance(out, torch.Tensor) else None
        head = batch_to_bytes(batch)
        if len(head) > _HEAD_BYTES:
            self._send(self._next_stage(), TrafficClass.ACTIVATION, Topic.BATCH_HEAD, head)
            head = b""
        began_s, epoch = time.monotonic(), self._epoch
        sent = self._send(self._next_stage(), TrafficClass.ACTIVATION, Topic.BATCH, head, tensor)
        if sent is not None and batch.slices:
            sent.add_done_callback(lambda _: self.clock.sent(batch, epoch, began_s, time.monotonic()))
        return None

    def _failed(self, batch: Batch, why: str) -> StepOutcome | None:
        get_logger().error("stage could not run a batch", step_id=batch.step_id, why=why)
        if self.leads:
            return StepOutcome(batch.step_id, None, why)
        self._send(
            self._stages[0].worker_id, TrafficClass.ACTIVATION, Topic.RESULT, failure_to_bytes(batch.step_id, why)
        )
        return None

    def _next_stage(self) -> WorkerId:
        index = next(i for i, stage in enumerate(self._stages) if stage.worker_id == self.me)
        return self._stages[index + 1].worker_id

    def _batch(self, event: BatchArrived) -> None:
        transition = self._transition
        # Its leader has everybody's word but ours has not been carried out yet; or its roster, which comes another
        # way, has not come yet: it says which blocks are free.
        early = transition is not None and transition.epoch == event.epoch and transition.awaits_roster
        if event.epoch > self._epoch or early:
            self._early.append(event)
            return
        if event.epoch < self._epoch or self.leads:
            self.stale_total += 1
            return
        self.clock.received(event.batch, event.epoch, event.arrived_s, event.receive_s)
        outcome = self._run_stage(event.batch, self._book.apply(event.batch), event.hidden_TD)
        assert outcome is None

    def _run_early(self) -> None:
        early, self._early = self._early, []
        for event in early:
            self._batch(event)

    def _result(self, event: ResultArrived) -> None:
        if event.epoch != self._epoch or not self.leads or not self._stages:
            self.stale_total += 1
        elif isinstance(event.result, StepResult):
            self._answers.append(StepOutcome(event.result.step_id, event.result))
        else:
            step_id, why = event.result
            self._answers.append(StepOutcome(step_id, None, why))

    def _send(
        self,
        to: WorkerId,
        traffic: TrafficClass,
        topic: Topic,
        meta: bytes,
        tensor: torch.Tensor | None = None,
        stream: int = 0,
        epoch: Epoch | None = None,
    ) -> Future[None] | None:
        """Delivered, or the link ends, which is told as an event of its own: no message is missing in between. The
        future is done when it has left this side.
        """
        link = self._link(to, epoch)
        if link is None:
            return None
        try:
            if tensor is None and len(meta) > _META_BYTES:
                tensor, meta = torch.frombuffer(bytearray(meta), dtype=torch.uint8), b""
            return link.send(traffic, topic, meta=meta, tensor=tensor, stream=stream, timeout_s=_SEND_TIMEOUT_S)
        except BallastError as error:
            get_logger().error("message to a member was not sent", to=to, topic=topic.name, why=str(error))
            link.give_up(f"{topic.name} could not be sent: {error}")
            return None

    def _link(self, to: WorkerId, epoch: Epoch | None = None) -> Link | None:
        return self._plane.link(to, self._epoch if epoch is None else epoch)

    # ------------------------------------------------------------ transitions

    def _receive(self, event: PlanReceived) -> None:
        plan, current = event.plan, self._transition
        if plan.epoch <= self.newest_epoch:
            return  # the same once more, or an old one
        if self._rescue is not None:
            return
        if part_of(plan, self.me) is None:
            return
        if current is not None and current.phase in _BEFORE_COMMIT:  # whoever has planned it has forgotten it
            why = f"epoch {plan.epoch} is to be prepared"
            self._drive(AbortRequested(time.monotonic(), current.epoch, why))
        if self._undoing or (current is not None and current.phase in _AFTER_COMMIT):
            return  # one after the other: the planner asks again
        if self._precopy is not None and not self._precopy.idle:
            return  # what is read for it must not be unmapped
        self._learning = False
        self._transition = Transition(self.me, plan)
        self._received = event
        self._progress = Progress(plan.epoch, time.monotonic(), block_count_before=self._book.block_count)
        self._going, self._coming, self._told_capacities = {}, [], {}
        precopy = self._precopy = self._make_precopy(self._transition, self._progress)
        self._exchange = KvExchange(
            self._transition,
            self._progress,
            kv=self._memory.kv,
            book=self._book,
            hub=self._hub,
            link=lambda to: self._link(to),
            ask=self._ask_for_kv,
            copied=precopy.copied_blocks,
            post=self._post,
        )
        self._execute(self._transition.begin())
        self._publish()

    def _told(self, epoch: Epoch, event: TransitionEvent) -> None:
        transition = self._transition
        if isinstance(event, PeerLost):
            self._peer_lost(epoch, event)
            return
        if transition is None or transition.epoch != epoch:
            self.stale_total += 1
            return
        match event:
            case EpochEnded():
                self._pass_on_epoch_end(epoch)
            case CommitRequested() if transition.phase is Phase.PREPARED:
                self._note_commit()
            case KvReceived(sequence_id=sequence_id, source=source):
                if not self._the_exchange().is_last_piece(sequence_id, source):
                    return
            case _:
                pass
        self._drive(event)

    def _peer_lost(self, epoch: Epoch, event: PeerLost) -> None:
        """Before a commit this ends the preparation; a member of the group in force takes the group with it."""
        if self._rescue is not None:
            return
        in_group = epoch == self._epoch and any(stage.worker_id == event.peer for stage in self._stages)
        if self._transition is not None and (self._transition.epoch == epoch or in_group):
            self._drive(event)
        if in_group and self._rescue is None:
            self._break_up(self._epoch, event.peer, event.why)

    def _break_up(self, epoch: Epoch, peer: WorkerId, why: str) -> None:
        """All requests end, for dispatchers to replay; then the missing layers are taken back."""
        get_logger().error("a member of the group is gone", peer=peer, why=why, epoch=epoch)
        now_s, exchange, precopy = time.monotonic(), self._exchange, self._precopy
        self._plane.retire(Epoch(max(epoch, self._epoch) + 1))
        self._hub.kv.clear()
        if precopy is not None:
            precopy.end()
        self._stages, self._transition, self._exchange, self._precopy = (), None, None, None
        self._quiescing = self._undoing = self._learning = False
        self._going, self._coming, self._early = {}, [], []
        self._tell_core(self._core.handle(GroupLost(now_s)))
        self._tell_core(self._core.handle(RoleChanged(now_s, leads=False)))
        for sequence_id in self._book.sequence_ids:
            self._book.release(sequence_id)
        self._runner.forget_all()
        progress = self._progress or Progress(epoch, now_s, block_count_before=self._book.block_count)
        progress.why = f"{peer}: {why}"
        self._rescue = Rescue(
            epoch,
            progress,
            self._homecoming,
            quiet=lambda: (
                not self._hub.receives and (exchange is None or exchange.idle) and (precopy is None or precopy.idle)
            ),
            kept=range(self._first_layer, self._last_layer),
            began_s=now_s,
        )
        self._publish_as(epoch, Phase.FAILED)

    def _be_whole(self, rescue: Rescue) -> None:
        """Every layer is here again: this worker leads itself."""
        self._rescue = None
        self._first_layer, self._last_layer = 0, self._layer_count
        self._capacities = {self.me: self._book.block_count}
        now_s = time.monotonic()
        self._tell_core(self._core.handle(RoleChanged(now_s, leads=True)))
        self._tell_core(self._core.handle(CapacityChanged(now_s, self._book.block_count)))
        rescue.progress.block_count_after = self._book.block_count
        self._publish_as(rescue.epoch, Phase.DONE)

    def _drive(self, event: TransitionEvent) -> None:
        if self._transition is None:
            return
        progress = self._counted()
        if isinstance(event, LinksUp):
            progress.links_s = event.at_s - progress.began_s
        elif isinstance(event, MemoryReady) and not progress.memory_s:
            progress.memory_s = event.at_s - progress.began_s
        self._execute(self._transition.handle(event))
        self._publish()

    def _execute(self, commands: Iterable[TransitionCommand]) -> None:
        for command in commands:
            match command:
                case ConnectLinks(epoch=epoch, peers=peers):
                    self._connect(epoch, peers)
                case PrepareMemory():
                    self._prepare_memory()
                case UndoPreparation(plan=plan):
                    self._the_precopy().end()
                    self._quiescing = False
                    self._undoing = plan.kind is Kind.RESTORE
                    if self._undoing and self.leads:
                        self._pass_on_withdrawal(plan.epoch)
                case Quiesce():
                    self._quiescing = True
                    self._note_commit()
                case SendEpochEnded(epoch=epoch):
                    self._pass_on_epoch_end(epoch)
                case TakeUp():
                    self._take_up()
                case SendHandover(epoch=epoch, to=to):
                    self._send_handover(epoch, to)
                case Lead(victims=victims):
                    self._lead(victims)
                case SendRoster(epoch=epoch, victims=victims, to=to):
                    for member in to:
                        body = roster_to_bytes(epoch, victims, self._recomputed)
                        self._send(member, TrafficClass.CONTROL, Topic.ROSTER, body)
                case SendKv():
                    self._the_exchange().send(command)
                case ExpectKv():
                    self._the_exchange().expect(command)
                case SendKvComplete(sequence_id=sequence_id, to=to):
                    self._send(to, TrafficClass.CONTROL, Topic.KV_COMPLETE, b"", stream=sequence_id)
                case Resume(sequence_id=sequence_id):
                    self._resume(sequence_id)
                case ReleaseLost():
                    self._release_lost()
                case Broken(peer=peer, why=why):
                    self._break_up(self._current().epoch, peer, why)

    # ------------------------------------------------------------ prepare

    def _connect(self, epoch: Epoch, peers: tuple[WorkerId, ...]) -> None:
        assert self._received is not None
        self._links_missing = set(peers)
        for peer in peers:
            future = self._plane.warm(peer, self._received.data_addresses[peer], epoch, timeout_s=_LINK_TIMEOUT_S)
            future.add_done_callback(lambda f, p=peer: self._post(LinkMade(epoch, p, f)))
        if not peers:
            self._post(Told(epoch, LinksUp(time.monotonic(), epoch)))

    def _link_made(self, event: LinkMade) -> None:
        if not self._is_current(event.epoch):  # of a plan that was given up: the links of this one may be missing yet
            return
        error = event.link.exception()
        now_s = time.monotonic()
        if error is not None:
            self._told(event.epoch, PreparationFailed(now_s, event.epoch, f"no link to {event.peer}: {error}"))
            return
        self._links_missing.discard(event.peer)
        if not self._links_missing:
            self._told(event.epoch, LinksUp(now_s, event.epoch))

    def _why_unfit(self, transition: Transition) -> str:
        """Why this worker cannot take part, whatever memory there is."""
        if transition.plan.kind is Kind.RESTORE and transition.epoch <= self._withdrawn_epoch:
            return f"the leader has given epoch {transition.epoch} up"
        base = transition.part.old
        if base is None:
            return ""
        whole = ((self.me, self._first_layer, self._last_layer),)
        is_ = tuple((m.worker_id, m.first_layer, m.last_layer) for m in self._stages) or whole
        taken_for = tuple((m.worker_id, m.first_layer, m.last_layer) for m in base.members)
        return "" if is_ == taken_for else f"{self.me} is a member of {is_}, and the plan takes that for {taken_for}"

    def _why_too_long(self) -> str:
        """Why the group must stay: a request that it runs would end with an error in a member of its own.

        A batch in flight may still add a token to it, and the next batch wants room for one more.
        """
        longest, home = self._core.longest_token_count, self._smallest_home() * self._memory.kv.shape.block_tokens
        if longest + 2 <= home:
            return ""
        return f"a request has {longest} tokens, and a member has room for {home} without its group"

    def _prepare_memory(self) -> None:
        transition = self._current()
        if why := self._why_unfit(transition):
            self._post(Told(transition.epoch, PreparationFailed(time.monotonic(), transition.epoch, why)))
            return
        if transition.plan.kind is Kind.RESTORE:
            self._counted().block_count_after = self._memory.home_block_count
            if why := self._why_too_long():
                self._post(Told(transition.epoch, PreparationFailed(time.monotonic(), transition.epoch, why)))
                return
            assert self._received is not None
            self._homecoming.begin(transition.epoch, self._received.sources, self._counted())
            if self.leads:
                self._limit(self._smallest_home())
            return
        stage = next(m for m in transition.part.new.members if m.worker_id == self.me)
        lacking = set(range(stage.first_layer, stage.last_layer)) - set(self._memory.parameters.held_layers)
        if lacking:
            why = f"{self.me} does not hold layers {sorted(lacking)}, which it is to execute"
            self._post(Told(transition.epoch, PreparationFailed(time.monotonic(), transition.epoch, why)))
            return
        dropped = self._layers_lost()
        progress = self._counted()
        progress.block_count_after = self._memory.blocks_after_drop(dropped)
        self._homecoming.learn(dropped)
        self._learning = True  # see `poll`

    # ------------------------------------------------------------ commit

    def _note_commit(self) -> None:
        progress = self._counted()
        progress.commit_at_s = progress.commit_at_s or time.monotonic()

    def _pass_on_epoch_end(self, epoch: Epoch) -> None:
        """Down the old pipeline, behind the last batch: so it goes as an activation, on the old layout's link."""
        if self._stages and self._stages[-1].worker_id != self.me:
            self._send(self._next_stage(), TrafficClass.ACTIVATION, Topic.EPOCH_ENDED, b"", stream=epoch)

    def _take_up(self) -> None:
        """Between two batches: sequences change hands, memory is moved, and the role is another one."""
        transition, now_s = self._current(), time.monotonic()
        self._note_commit()
        new = transition.part.new
        own: tuple[Victim, ...] = ()
        if transition.led_before:
            own = self._hand_over(transition, now_s)
        self._the_precopy().end()
        self._runner.forget_all()
        self._remap(transition)
        stage = next(m for m in new.members if m.worker_id == self.me)
        self._first_layer, self._last_layer = stage.first_layer, stage.last_layer
        self._stages = new.members if len(new.members) > 1 else ()
        self._epoch = transition.epoch
        self.clock.begin_layout()
        self._capacities = {self.me: self._book.block_count}
        self._limited_epoch, self._limited, self._before_block_count = (
            Epoch(0),
            set(),
            0,
        )  # no restore of this group yet
        self._tell_core(self._core.handle(RoleChanged(now_s, self.leads, len(new.members))))
        self._quiescing = self.leads  # a leader forms batches once all members are ready
        transition.own_victims(own)
        progress = self._counted()
        progress.taken_up_at_s = time.monotonic()
        progress.boundary_wait_s = progress.taken_up_at_s - progress.commit_at_s - progress.remap_s
        get_logger().info("layout taken up", epoch=transition.epoch, **progress.until_taken_up())
        self._drive(TakenUp(time.monotonic(), transition.epoch))
        self._run_early()

    def _hand_over(self, transition: Transition, now_s: float) -> tuple[Victim, ...]:
        """What this worker has led goes to the leader of its new group; if that is itself, its victims stay."""
        if transition.plan.kind is Kind.RESTORE:
            return self._deal_out(transition, now_s)
        leader = transition.part.new.leader.worker_id
        if leader != self.me:
            self._tell_core(self._core.handle(HandOver(now_s, leader)))
            return ()
        return tuple(Victim(sequence_id, count, self.me) for sequence_id, count in sorted(self._core.kv_tokens.items()))

    def _deal_out(self, transition: Transition, now_s: float) -> tuple[Victim, ...]:
        """Every member becomes a leader of its own and gets its share of the sequences."""
        placed = self._the_precopy().destinations(self._core.placements())
        going = {sequence_id: to for sequence_id, to in placed.items() if to != self.me}
        self._tell_core(self._core.handle(HandOver(now_s, going)))
        return tuple(Victim(i, count, self.me) for i, count in sorted(self._core.kv_tokens.items()))

    def _layers_lost(self) -> list[int]:
        stage = next(m for m in self._current().part.new.members if m.worker_id == self.me)
        held = self._memory.parameters.held_layers
        return [layer for layer in held if not stage.first_layer <= layer < stage.last_layer]

    def _remap(self, transition: Transition) -> None:
        lost, began_s = self._layers_lost(), time.perf_counter()
        progress = self._counted()
        progress.freed_parameter_bytes = (
            sum(self._memory.parameters.extents_of(layer) for layer in lost) * self._memory.pool.extent_bytes
        )
        self._grow_book(self._memory.drop_layers(lost))
        progress.remap_s += time.perf_counter() - began_s

    def _grow_book(self, block_count: int) -> None:
        self._book.grow(block_count - self._book.block_count)

    def _send_handover(self, epoch: Epoch, to: WorkerId) -> None:
        snapshots = self._going.pop(to, ())
        body = pb.Handover(
            epoch=epoch,
            sequences=[snapshot_to_proto(snapshot) for snapshot in snapshots],
            block_count=self._book.block_count,
            home_block_count=self._memory.home_block_count,
        )
        self._send(to, TrafficClass.CONTROL, Topic.HANDOVER, body.SerializeToString())

    def _handover(self, event: HandoverArrived) -> None:
        transition = self._transition
        if transition is None or transition.epoch != event.epoch or event.source in self._told_capacities:
            self.stale_total += 1
            return
        self._coming.extend(event.snapshots)
        self._told_capacities[event.source] = event.block_count
        self._homes[event.source] = event.home_block_count
        victims = tuple(
            Victim(s.sequence_id, s.computed_tokens, event.source) for s in event.snapshots if s.computed_tokens
        )
        self._told(event.epoch, HandoverReceived(time.monotonic(), event.epoch, event.source, victims))

    def _lead(self, victims: tuple[Victim, ...]) -> None:
        """All members are ready. Whoever finds no room in the smallest stage starts over; the youngest first."""
        transition, now_s = self._current(), time.monotonic()
        alive = self._core.kv_tokens  # own ones may have ended since they were counted
        gone_ids = {v.sequence_id for v in victims if v.old_leader == self.me} - alive.keys()
        victims = tuple(v for v in victims if v.sequence_id not in gone_ids)
        members = members_of(transition.part.new)
        self._capacities |= {peer: count for peer, count in self._told_capacities.items() if peer in members}
        capacity = min(self._capacities.values())
        lent = 0 if self._stages else self._foreign_block_count()
        kept, lost = self._fitting(victims, capacity - lent)
        moving = frozenset(v.sequence_id for v in kept if transfers(transition.plan, v, self.me))
        own = frozenset(v.sequence_id for v in victims if v.old_leader == self.me)
        lost_ids = frozenset(v.sequence_id for v in lost)
        self._tell_core(self._core.handle(KvTravels(now_s, own)))
        self._tell_core(self._core.handle(CapacityChanged(now_s, capacity, lent)))
        for sequence_id in sorted(own & lost_ids):
            self._tell_core(self._core.handle(KvLost(now_s, sequence_id)))
        adopted = Adopted(now_s, tuple(self._coming), moving - own, lost_ids - own, last=True)
        self._tell_core(self._core.handle(adopted))
        self._coming = []
        for sequence_id in sorted(lost_ids):  # for those who keep their KV
            self._book.release(sequence_id)
        self._recomputed = tuple(sorted(lost_ids | gone_ids))
        self._quiescing = False
        progress = self._counted()
        progress.victim_count, progress.victims_recomputed = len(victims), len(lost)
        progress.victims_waiting = len(kept)
        self._drive(Led(now_s, transition.epoch, kept))

    def _foreign_block_count(self) -> int:
        """Blocks of sequences that others lead now, still here because their KV is being sent."""
        mine = {*self._core.sequence_ids, *(snapshot.sequence_id for snapshot in self._coming)}
        return sum(len(self._book.table(i)) for i in self._book.sequence_ids if i not in mine)

    def _fitting(self, victims: tuple[Victim, ...], capacity: int) -> tuple[tuple[Victim, ...], tuple[Victim, ...]]:
        size = self._memory.kv.shape.block_tokens
        kept: list[Victim] = []
        lost: list[Victim] = []
        used = 0
        for victim in sorted(victims, key=lambda v: v.sequence_id):
            blocks = blocks_for(victim.computed_tokens + 1, size)
            if used + blocks <= capacity:
                used += blocks
                kept.append(victim)
            else:
                lost.append(victim)
        return tuple(kept), tuple(lost)

    # ------------------------------------------------------------ exchange

    def _resume(self, sequence_id: SequenceId) -> None:
        now_s, progress = time.monotonic(), self._counted()
        progress.victims_waiting -= 1
        progress.note_stall(now_s - progress.commit_at_s)
        self._tell_core(self._core.handle(KvArrived(now_s, sequence_id)))

    def _release_lost(self) -> None:
        progress, began_s = self._counted(), time.perf_counter()
        if not self._stages:  # alone: what the group has shared out to others leaves nothing here
            mine = {*self._core.sequence_ids, *self._core.suspended_ids}
            for sequence_id in self._book.sequence_ids:
                if sequence_id not in mine:
                    self._book.release(sequence_id)
        self._grow_book(self._memory.release_retired())
        progress.remap_s += time.perf_counter() - began_s
        progress.exchange_s = time.monotonic() - progress.taken_up_at_s
        progress.block_count_after = self._book.block_count
        self._tell_capacity()
        self._plane.retire(self._epoch)

    def _tell_capacity(self) -> None:
        withdrawn, block_count = self._withdrawn_epoch, self._book.block_count
        if self.leads:
            self._capacity_told(CapacityTold(self._epoch, self.me, block_count, withdrawn))
        else:
            body = pb.Capacity(epoch=withdrawn, block_count=block_count).SerializeToString()
            self._send(self._stages[0].worker_id, TrafficClass.CONTROL, Topic.CAPACITY, body)

    def _capacity_told(self, event: CapacityTold) -> None:
        known = event.source == self.me or any(stage.worker_id == event.source for stage in self._stages)
        early = event.source != self.me and event.withdrawn < self._limited_epoch  # it may yet make room, or has done
        if event.epoch != self._epoch or not self.leads or not known or early or self._rescue is not None:
            self.stale_total += 1
            return
        self._capacities[event.source] = event.block_count
        self._limited.discard(event.source)
        if not self._limited:
            self._before_block_count = 0
        self._tell_capacity_to_core()

    def _tell_capacity_to_core(self) -> None:
        capacity = min(self._capacities.values(), default=self._book.block_count)
        changed = CapacityChanged(time.monotonic(), capacity, before_block_count=self._before_block_count)
        self._tell_core(self._core.handle(changed))

    # ------------------------------------------------------------ restore

    def _smallest_home(self) -> int:
        """What every member of the group has when it holds all layers."""
        others = [self._homes[s.worker_id] for s in self._stages if s.worker_id in self._homes]
        return min([self._memory.home_block_count, *others])

    def _limit(self, block_count: int) -> None:
        """Leader: the group is about to have so many blocks; nothing is counted on beyond them from now on."""
        self._limited_epoch = self._current().epoch
        self._before_block_count = max(self._before_block_count, min(self._capacities.values(), default=0))
        self._capacities = {stage.worker_id: block_count for stage in self._stages} or {self.me: block_count}
        self._limited = set(self._capacities)
        self._tell_capacity_to_core()

    def _lead_restore(self, transition: Transition) -> None:
        if transition.phase in _BEFORE_COMMIT and (why := self._why_too_long()):
            self._drive(PreparationFailed(time.monotonic(), transition.epoch, why))
        wanted = transition.phase is Phase.PREPARING and self._homecoming.wants_room and not self._links_missing
        if wanted and self._core.settled:  # nobody holds or will take a block beyond the limit
            self._room_is_granted(transition.epoch)

    def _room_is_granted(self, epoch: Epoch) -> None:
        """Told down the pipeline, behind all batches."""
        if self._stages and self._stages[-1].worker_id != self.me:
            self._send(self._next_stage(), TrafficClass.ACTIVATION, Topic.ROOM, b"", stream=epoch)
        self._room_epoch = max(self._room_epoch, epoch)
        self._take_room()

    def _pass_on_withdrawal(self, epoch: Epoch) -> None:
        """Down the pipeline, behind the grant of room if there was one."""
        if self._stages and self._stages[-1].worker_id != self.me:
            self._send(self._next_stage(), TrafficClass.ACTIVATION, Topic.ROOM_WITHDRAWN, b"", stream=epoch)
        self._withdrawn_epoch = max(self._withdrawn_epoch, epoch)

    def _room_is_withdrawn(self, epoch: Epoch) -> None:
        """Follower: what it has from now on, it has for good, and the leader may count on it."""
        if self.leads:
            self.stale_total += 1
            return
        self._pass_on_withdrawal(epoch)
        transition = self._transition
        if transition is not None and transition.epoch == epoch:
            self._drive(PreparationFailed(time.monotonic(), epoch, "the leader has given it up"))
        if not self._undoing:  # else it is said then
            self._tell_capacity()

    def _take_room(self) -> None:
        transition = self._transition
        if transition is None or transition.epoch != self._room_epoch or transition.phase is not Phase.PREPARING:
            return  # the leader's word may come before the planner's
        if self._homecoming.wants_room and not self._links_missing:  # else peers could not be asked for layers
            self._homecoming.make_room()
            self._after_pull(transition)

    def _ask_for_layer(self, peer: WorkerId, epoch: Epoch, layer: int) -> bool:
        if self._link(peer, epoch) is None:
            return False
        self._send(peer, TrafficClass.CONTROL, Topic.LAYER_WANTED, b"", stream=layer, epoch=epoch)
        return True

    def _layer_asked(self, event: LayerAsked) -> None:
        link, transition = event.link, self._transition
        if transition is not None and transition.epoch == event.epoch and transition.phase in _BEFORE_COMMIT:
            self._homecoming.serve(link, event, range(self._first_layer, self._last_layer))
        else:
            self._homecoming.refuse(link, event)

    def _layer_news(self, event: LayerArrived | LayerChecked) -> None:
        transition = self._transition
        if not self._homecoming.handle(event):
            return
        if transition is None or transition.phase is not Phase.PREPARING:
            return
        self._after_pull(transition)

    def _after_pull(self, transition: Transition) -> None:
        now_s = time.monotonic()
        if self._homecoming.failure:
            self._drive(PreparationFailed(now_s, transition.epoch, self._homecoming.failure))
        elif self._homecoming.complete and not self._the_precopy().is_ready:
            self._the_precopy().ready(now_s)  # and MemoryReady when enough has been copied: see `poll`
        else:
            self._publish()

    def _make_precopy(self, transition: Transition, progress: Progress) -> PrecopyRun:
        epoch = transition.epoch
        where = Place(self.me, transition.plan, self.leads, self._smallest_home(), self._max_running_count)
        return PrecopyRun(
            where,
            progress,
            kv=self._memory.kv,
            book=self._book,
            hub=self._hub,
            tell=lambda to, topic, body, i: self._send(to, TrafficClass.CONTROL, topic, body, stream=i, epoch=epoch),
            synchronise=self._memory.pool.backend.synchronise,
            post=self._post,
        )

    def _copy_ahead(self, precopy: PrecopyRun, transition: Transition) -> None:
        now_s = time.monotonic()
        precopy.poll(now_s, self._core.placements)
        if transition.phase is Phase.PREPARING and precopy.enough(now_s):
            self._drive(MemoryReady(now_s, transition.epoch))

    def _ask_for_kv(self, source: WorkerId, sequence_id: SequenceId, first_block: int) -> None:
        body = pb.KvWanted(first_block=first_block).SerializeToString()
        self._send(source, TrafficClass.CONTROL, Topic.KV_WANTED, body, stream=sequence_id)

    def _undo_restore(self) -> None:
        """The burst is back: layers are given up again, once nothing writes into them any more."""
        if not self._the_precopy().idle:
            return
        block_count = self._homecoming.undo(range(self._first_layer, self._last_layer))
        if block_count is not None:
            self._undoing = False
            self._grow_book(block_count)
            self._tell_capacity()

    # ------------------------------------------------------------ what others may read

    def _is_current(self, epoch: Epoch) -> bool:
        current = self._transition is not None and self._transition.epoch == epoch
        self.stale_total += not current
        return current

    def _the_exchange(self) -> KvExchange:
        if self._exchange is None:
            raise InvariantViolation("KV is exchanged and no transition is under way")
        return self._exchange

    def _the_precopy(self) -> PrecopyRun:
        if self._precopy is None:
            raise InvariantViolation("KV is copied ahead and no transition is under way")
        return self._precopy

    def _current(self) -> Transition:
        if self._transition is None:
            raise InvariantViolation("no transition is under way")
        return self._transition

    def _counted(self) -> Progress:
        assert self._progress is not None, "set with the transition"
        return self._progress

    def _publish(self) -> None:
        """A group that is lost takes its transition with it: then there is nothing to tell here."""
        if self._transition is not None:
            self._counted().why = self._transition.why
            self._publish_as(self._transition.epoch, self._transition.phase)

    def _publish_as(self, epoch: Epoch, phase: Phase) -> None:
        progress = self._counted()
        if progress.phase is not phase:
            self.clock.note_transition(time.monotonic(), epoch, phase.name.lower())
        progress.phase = phase
        if progress.phase is Phase.PREPARED and not progress.prepare_s:
            progress.prepare_s = time.monotonic() - progress.began_s
        published = dict(list(self.progress.items())[-_KEPT_TRANSITIONS:])
        published[epoch] = replace(progress)
        self.progress = published
        self.on_publish()

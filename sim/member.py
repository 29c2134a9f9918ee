"""An instance's place in its group: carries transitions out on memory that is only numbers.

The counterpart of `services.worker.pipeline.driver`, which does the same with tensors, links and threads. What
decides is the production code of `core.transition` and `core.worker`; order and content of what they are told must be
as there. Failures of members are not modelled yet.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.transition import Phase, TransitionKind
from services.worker.core.batch import SequenceId
from services.worker.core.events import Command, Event, HandedOver, KvArrived, Removed, RoleChanged
from services.worker.core.leading import Decision
from services.worker.core.plan import Plan, Victim, part_of
from services.worker.core.retired import RetiredTables
from services.worker.core.room import Room, RoomSizes
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.stage import StageBook
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import (
    BoundaryReached,
    Broken,
    CommitRequested,
    ConnectLinks,
    EpochEnded,
    ExpectKv,
    HandoverReceived,
    KvCompleteReceived,
    Lead,
    LeadWave,
    Led,
    LinksUp,
    MemoryReady,
    PreparationFailed,
    PrepareMemory,
    Quiesce,
    ReleaseLost,
    ReleaseSent,
    Resume,
    RosterReceived,
    SendEpochEnded,
    SendHandover,
    SendKv,
    SendKvComplete,
    SendRoster,
    SendWaveDone,
    TakenUp,
    TakeUp,
    UndoPreparation,
    WaveDone,
)
from services.worker.core.transition_messages import Command as TransitionCommand
from services.worker.core.transition_messages import Event as TransitionEvent
from services.worker.core.worker import WorkerCore
from services.worker.pipeline.status import Progress
from sim.capacity import Capacities
from sim.clock import Clock
from sim.exchange import Exchange
from sim.handover import Handover
from sim.hardware import Timings
from sim.homecoming import Homecoming
from sim.memory import VirtualMemory
from sim.network import Network
from sim.restoring import Restoring
from sim.role import Role, own_layers
from sim.voice import Voice

Sources = dict[int, tuple[WorkerId, ...]]  # layer -> who has it, in the order to be asked

Spend = Callable[[float, Callable[[], None]], None]

_UNDER_WAY = (Phase.PREPARING, Phase.PREPARED, Phase.COMMITTING, Phase.EXCHANGING)
_KEPT_TRANSITIONS = 16


class Peer(Protocol):
    """An instance, as the planner and the world see it. `post` puts something into its engine's inbox."""

    member: "GroupMember"

    def post(self, act: Callable[[], None]) -> None: ...


class GroupMember:
    """All methods are called from the instance's own turns, in virtual time."""

    def __init__(
        self,
        *,
        me: WorkerId,
        core: WorkerCore,
        book: StageBook,
        memory: VirtualMemory,
        clock: Clock,
        network: Network,
        timings: Timings,
        peers: dict[WorkerId, Peer],
        max_running_count: int,
        block_tokens: int,
        spend: Spend,
    ) -> None:
        """`peers` of the whole cluster, this one included. `spend`: the engine is busy for so long, then it goes on."""
        self.me = me
        self.book = book
        self.memory = memory
        self.role = Role(me, memory.geometry.layer_count)
        self._core = core
        self._clock = clock
        self._network = network
        self._timings = timings
        self._block_tokens = block_tokens
        self._spend = spend
        self._voice = Voice(self.role, peers, clock, network)
        self._capacities = Capacities(self.role, self._voice, clock, book, memory, self._feed)
        homecoming = self._homecoming = Homecoming(
            memory=memory, book=book, clock=clock, network=network, timings=timings, me=me, spend=spend
        )
        self._handover = Handover(
            self.role,
            self._voice,
            self._capacities,
            clock=clock,
            core=core,
            book=book,
            memory=memory,
            max_running_count=max_running_count,
            block_tokens=block_tokens,
            tell=self._feed,
            stay=homecoming.arrange,
        )
        self._restoring = Restoring(
            self.role,
            self._voice,
            self._capacities,
            homecoming,
            clock=clock,
            core=core,
            book=book,
            memory=memory,
            under_way=lambda: self._transition,
            drive=self._drive,
            publish=self._publish,
        )
        self._transition: Transition | None = None
        self._sources: Sources = {}
        self._patient = False
        self._quiescing = False
        self._exchange: Exchange | None = None
        self._progress: Progress | None = None
        self.progress: dict[Epoch, Progress] = {}
        self.answers: list[Command] = []
        self.pass_on: Callable[[Removed], None] = lambda _: None  # set by the instance, as the next
        self.roster_came: Callable[[], None] = lambda: None

    # ------------------------------------------------------------ what the instance asks

    @property
    def may_form(self) -> bool:
        return not self._quiescing

    @property
    def at_rest(self) -> bool:
        """Whether `poll` has nothing to wait for."""
        return not self._quiescing and self._restoring.at_rest

    def is_early(self, epoch: Epoch) -> bool:
        """Of a batch: its leader has everybody's word but this member's has not been carried out yet; or its roster,
        which comes another way and says which blocks are free, is not here.
        """
        transition = self._transition
        awaits_roster = transition is not None and transition.epoch == epoch and transition.awaits_roster
        return epoch > self.role.epoch or awaits_roster

    def poll(self) -> None:
        """Between two turns: whatever waits for a step boundary or for room."""
        transition = self._transition
        if self._quiescing and transition is not None and transition.phase is Phase.COMMITTING:
            boundary = not self._core.in_flight_count and not self._core.suspended_ids
            if boundary and transition.led_before:
                # What has ended since the last batch, while the stages still follow this leader.
                self._capacities.tell_smallest()
                self._drive(BoundaryReached(self._clock.now_s, transition.epoch))
        self._restoring.poll(self._transition)

    def check(self) -> None:
        """Of the book the core takes care, which is told of the same one."""
        self.memory.check()
        if self._transition is not None:
            self._transition.check()
        if self.book.block_count > self.memory.block_count:
            raise InvariantViolation(f"{self.book.block_count} blocks in the book, {self.memory.block_count} mapped")
        executed = set(self.role.layers)
        if not executed <= self.memory.held:
            raise InvariantViolation(
                f"{self.me} executes {sorted(executed - self.memory.held)}, which it does not hold"
            )

    # ------------------------------------------------------------ what the planner asks

    def prepare(self, plan: Plan, sources: Sources, *, patient: bool = False) -> None:
        current = self._transition
        if plan.epoch <= max(self.progress, default=Epoch(0)):
            return
        if current is not None and current.phase in _UNDER_WAY:
            return
        if part_of(plan, self.me) is None or self._restoring.undoing:
            return
        if plan.kind is TransitionKind.RESTORE and not self._restoring.may_begin:
            return
        self._transition = Transition(self.me, plan)
        self._sources, self._patient = sources, patient
        self._progress = Progress(epoch=plan.epoch, began_s=self._clock.now_s, block_count_before=self.book.block_count)
        self._handover.begin()
        self._restoring.plan()
        self._exchange = Exchange(
            self._transition,
            self._progress,
            book=self.book,
            block_bytes=self.memory.geometry.block_bytes,
            block_tokens=self._block_tokens,
            network=self._network,
            tell=self._voice.tell,
            post=self._voice.post,
            drive=self._drive,
        )
        self._execute(self._transition.begin())
        self._publish()

    def told(self, epoch: Epoch, event: TransitionEvent) -> None:
        """A word of the planner, of another member, or of the network, for the transition of that epoch."""
        transition = self._transition
        if transition is None or transition.epoch != epoch:
            return
        if isinstance(event, EpochEnded):
            self._pass_on_epoch_end(epoch)
        elif isinstance(event, CommitRequested) and transition.phase is Phase.PREPARED:
            self._note_commit()
        self._drive(event)

    # ------------------------------------------------------------ what other members say

    def handover(
        self, epoch: Epoch, source: WorkerId, snapshots: tuple[SequenceSnapshot, ...], counts: tuple[int, int]
    ) -> None:
        """`counts` of the sender's blocks: now, and once nothing is left to be sent."""
        if not self._is_current(epoch) or self._handover.has_come_from(source):
            return
        victims = self._handover.came(source, snapshots, counts)
        self.told(epoch, HandoverReceived(self._clock.now_s, epoch, source, victims))

    def roster(self, roster: RosterReceived, recomputed: tuple[SequenceId, ...]) -> None:
        if not self._is_current(roster.epoch):
            return
        for sequence_id in recomputed:  # their blocks are needed for those who keep their KV
            self.book.release(sequence_id)
        self._handover.forget_retired(recomputed)
        self._drive(roster)
        self.roster_came()

    def later_roster(self, roster: RosterReceived, recomputed: tuple[SequenceId, ...]) -> None:
        if not self._is_current(roster.epoch):
            return
        self._handover.pass_wave_on(roster, recomputed)
        self._handover.forget_retired(recomputed)
        self._drive(roster)

    def kv_asked(self, epoch: Epoch, sequence_id: SequenceId, peer: WorkerId) -> None:
        if self._is_current(epoch):
            self._the_exchange().asked(sequence_id, peer)

    def kv_came(self, epoch: Epoch, sequence_id: SequenceId, source: WorkerId) -> None:
        if self._is_current(epoch):
            self._the_exchange().came(sequence_id, source)

    def kv_gone(self, epoch: Epoch, sequence_id: SequenceId, to: WorkerId, size_bytes: int) -> None:
        if self._is_current(epoch):
            self._the_exchange().gone(sequence_id, to, size_bytes)

    def capacity_told(
        self, epoch: Epoch, source: WorkerId, block_count: int, sizes: RoomSizes, withdrawn: Epoch
    ) -> None:
        self._capacities.told(epoch, source, block_count, sizes, withdrawn)

    def room_is_granted(self, epoch: Epoch, room: Room) -> None:
        self._restoring.room_is_granted(epoch, room)

    def layers_are_back(self, epoch: Epoch, stage: WorkerId) -> None:
        self._restoring.layers_are_back(epoch, stage)

    def room_is_withdrawn(self, epoch: Epoch) -> None:
        self._restoring.room_is_withdrawn(epoch)

    # ------------------------------------------------------------ transitions

    def _drive(self, event: TransitionEvent) -> None:
        if self._transition is None:
            return
        self._execute(self._transition.handle(event))
        self._publish()

    def _execute(self, commands: Iterable[TransitionCommand]) -> None:
        for command in commands:
            match command:
                case ConnectLinks(epoch=epoch):
                    self._voice.later(self._timings.link_connect_s, lambda e=epoch: self._linked(e))
                case PrepareMemory():
                    self._prepare_memory()
                case UndoPreparation(plan=plan):
                    self._quiescing = False
                    self._restoring.give_up(plan)
                case Quiesce():
                    self._quiescing = True
                    self._note_commit()
                case SendEpochEnded(epoch=epoch):
                    self._pass_on_epoch_end(epoch)
                case TakeUp():
                    self._take_up()
                case SendHandover(epoch=epoch, to=to):
                    self._handover.send(epoch, to)
                case Lead(victims=victims):
                    self._lead(victims)
                case LeadWave(wave=wave):
                    self._drive_led(self._handover.lead_on(self._counted()), wave)
                case SendRoster():
                    self._handover.send_roster(command)
                case SendKv():
                    self._the_exchange().send(command)
                case ExpectKv():
                    self._the_exchange().expect(command)
                case SendKvComplete(epoch=epoch, sequence_id=sequence_id, to=to):
                    event = KvCompleteReceived(self._clock.now_s, epoch, sequence_id, self.me)
                    self._voice.tell(to, lambda m, e=epoch, k=event: m.told(e, k))
                case Resume(sequence_id=sequence_id):
                    self._resume(sequence_id)
                case ReleaseSent():
                    self._release_sent()
                case SendWaveDone(epoch=epoch, wave=wave, to=to):
                    done = WaveDone(self._clock.now_s, epoch, self.me, wave)
                    self._voice.tell(to, lambda m, e=epoch, d=done: m.told(e, d))
                case ReleaseLost():
                    self._release_lost()
                case Broken(peer=peer, why=why):
                    raise InvariantViolation(f"{self.me} loses {peer}: {why}; losses are not simulated yet")

    def _feed(self, event: Event) -> None:
        for command in self._core.handle(event):
            if isinstance(command, HandedOver):
                self._handover.handed_over(command)
            elif isinstance(command, Removed):
                self.pass_on(command)
            else:
                self.answers.append(command)

    def _pass_on_epoch_end(self, epoch: Epoch) -> None:
        """Down the old pipeline, behind the last batch."""
        event = EpochEnded(self._clock.now_s, epoch, self.role.leader)
        self._voice.pass_on(lambda m: m.told(epoch, event))

    # ------------------------------------------------------------ prepare

    def _linked(self, epoch: Epoch) -> None:
        if self._is_current(epoch):
            self._restoring.links_are_up()
            self._drive(LinksUp(self._clock.now_s, epoch))

    def _prepare_memory(self) -> None:
        transition, now_s = self._current(), self._clock.now_s
        if transition.plan.kind is TransitionKind.RESTORE:
            self._prepare_restore(transition)
            return
        dropped, rate = self._layers_lost(), self._timings.checksum_bytes_per_s
        self._counted().block_count_after = self.memory.blocks_after_drop(dropped)
        learn_s = len(dropped) * self.memory.layer_bytes / rate if rate else 0.0
        ready = MemoryReady(now_s, transition.epoch)
        self._voice.later(learn_s, lambda: self.told(transition.epoch, ready))

    def _prepare_restore(self, transition: Transition) -> None:
        epoch, why = transition.epoch, self._restoring.why_not(transition.epoch)
        if not why:
            self._counted().block_count_after = self.memory.home_block_count
            why = self._restoring.why_too_long()
        if why:
            failed = PreparationFailed(self._clock.now_s, epoch, why)
            self._voice.later(0.0, lambda: self.told(epoch, failed))
        else:
            self._restoring.begin(epoch, self._sources, self._counted(), patient=self._patient)

    # ------------------------------------------------------------ commit

    def _note_commit(self) -> None:
        progress = self._counted()
        progress.commit_at_s = progress.commit_at_s or self._clock.now_s

    def _take_up(self) -> None:
        transition, now_s, role = self._current(), self._clock.now_s, self.role
        self._note_commit()
        new = transition.part.new
        own = self._handover.give(transition) if transition.led_before else ()
        self._restoring.commit()
        ending = self.book.split is not None
        final = self.memory.home_block_count if ending else self.memory.blocks_after_drop(self._layers_lost())
        self._handover.note_final(final)
        self._remap()
        role.take_up(transition.epoch, new)
        self._capacities.begin()
        self._feed(RoleChanged(now_s, role.leads, len(new.members)))
        self._quiescing = role.leads  # a leader forms batches once all members are ready
        transition.own_victims(own)
        progress = self._counted()
        progress.boundary_wait_s = now_s - progress.commit_at_s
        self._busy_remapping(progress, self._taken_up)

    def _taken_up(self) -> None:
        self._counted().taken_up_at_s = self._clock.now_s
        self._drive(TakenUp(self._clock.now_s, self._current().epoch))

    def _layers_lost(self) -> list[int]:
        kept = own_layers(self.me, self._current().part.new)
        return [layer for layer in sorted(self.memory.held) if layer not in kept]

    def _remap(self) -> None:
        lost, progress = self._layers_lost(), self._counted()
        progress.freed_parameter_bytes = len(lost) * self.memory.layer_bytes
        if self.book.split is not None:  # the end of a restore: layers get their KV when all has been sent
            return
        block_count = self.memory.drop_layers(lost)
        if self.memory.retired:
            retired = self._handover.retired = RetiredTables(self.book)
            block_count = self.memory.shrink_retired(retired.used_end)
        self._grow_book(block_count)

    def _busy_remapping(self, progress: Progress, then: Callable[[], None]) -> None:
        progress.remap_s += self._timings.remap_s
        self._spend(self._timings.remap_s, then)

    def _grow_book(self, block_count: int) -> None:
        self.book.grow(block_count - self.book.block_count)

    def _lead(self, victims: tuple[Victim, ...]) -> None:
        decision = self._handover.lead(self._current(), victims, self._counted())
        self._quiescing = False
        self._drive_led(decision, 0)

    def _drive_led(self, decision: Decision, wave: int) -> None:
        now_s, epoch = self._clock.now_s, self._current().epoch
        self._drive(Led(now_s, epoch, decision.wave.admitted, wave, decision.wave.last))

    # ------------------------------------------------------------ exchange

    def _resume(self, sequence_id: SequenceId) -> None:
        now_s, progress = self._clock.now_s, self._counted()
        progress.victims_waiting -= 1
        progress.note_stall(now_s - progress.commit_at_s)
        self._feed(KvArrived(now_s, sequence_id))

    def _release_sent(self) -> None:
        """Room for the next wave. What is left moves together: that is as fast as the memory, so it takes no time."""
        retired = self._handover.retired
        if retired is None:
            return
        retired.forget(self._the_exchange().take_sent())
        retired.compact()
        self._grow_book(self.memory.shrink_retired(retired.used_end))
        self._tell_capacity()

    def _release_lost(self) -> None:
        progress = self._counted()
        self._handover.retired = None
        if not self.role.stages:  # alone: what the group has shared out to others leaves nothing here
            mine = {*self._core.sequence_ids, *self._core.suspended_ids}
            for sequence_id in self.book.sequence_ids:
                if sequence_id not in mine:
                    self.book.release(sequence_id)
        if self._homecoming.level() is None:
            self._grow_book(self.memory.release_retired())
        progress.exchange_s = self._clock.now_s - progress.taken_up_at_s
        progress.block_count_after = self.book.block_count
        self._busy_remapping(progress, self._tell_capacity)

    def _tell_capacity(self) -> None:
        self._capacities.tell_leader(self._restoring.withdrawn_epoch)

    # ------------------------------------------------------------ what there must be

    def _is_current(self, epoch: Epoch) -> bool:
        return self._transition is not None and self._transition.epoch == epoch

    def _the_exchange(self) -> Exchange:
        if self._exchange is None:
            raise InvariantViolation("KV is exchanged and no transition is under way")
        return self._exchange

    def _current(self) -> Transition:
        if self._transition is None:
            raise InvariantViolation("no transition is under way")
        return self._transition

    def _counted(self) -> Progress:
        assert self._progress is not None, "set with the transition"
        return self._progress

    def _publish(self) -> None:
        transition, progress = self._transition, self._counted()
        if transition is None:
            return
        progress.why, progress.phase = transition.why, transition.phase
        if progress.phase is Phase.PREPARED and not progress.prepare_s:
            progress.prepare_s = self._clock.now_s - progress.began_s
        published = dict(list(self.progress.items())[-_KEPT_TRANSITIONS:])
        published[transition.epoch] = replace(progress)
        self.progress = published

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
from ballast.common.layout import Member as LayoutMember
from services.worker.core.batch import SequenceId
from services.worker.core.events import (
    CapacityChanged,
    Command,
    Event,
    HandedOver,
    HandOver,
    KvArrived,
    Removed,
    RoleChanged,
)
from services.worker.core.leading import Decision, Leading
from services.worker.core.plan import Kind, Phase, Plan, Victim, group_of, members_of, part_of
from services.worker.core.retired import RetiredTables
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
    Land,
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
    SendKvLanded,
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
from services.worker.policy.placement import MemberView, place
from sim.clock import Clock
from sim.exchange import Exchange
from sim.hardware import Timings
from sim.homecoming import Homecoming
from sim.memory import VirtualMemory
from sim.network import Network

Sources = dict[int, tuple[WorkerId, ...]]  # layer -> who has it, in the order to be asked

Spend = Callable[[float, Callable[[], None]], None]

_CONTROL_BYTES = 1024
_TOKEN_BYTES = 4
_UNDER_WAY = (Phase.PREPARING, Phase.PREPARED, Phase.COMMITTING, Phase.EXCHANGING)
_BEFORE_COMMIT = (Phase.PREPARING, Phase.PREPARED)
_KEPT_TRANSITIONS = 16


class Peer(Protocol):
    """Another instance, as a member sees it. `post` puts something into its engine's inbox."""

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
        self._core = core
        self._clock = clock
        self._network = network
        self._timings = timings
        self._peers = peers
        self._max_running_count = max_running_count
        self._block_tokens = block_tokens
        self._spend = spend
        layer_count = memory.geometry.layer_count
        self.epoch = Epoch(0)  # of the layout that this instance plays its role in
        self.stages: tuple[LayoutMember, ...] = ()  # of its group; empty: alone
        self.first_layer, self.last_layer = 0, layer_count
        self._layer_count = layer_count
        self._capacities: dict[WorkerId, int] = {}  # leader: stage -> blocks
        self._transition: Transition | None = None
        self._quiescing = False
        self._going: dict[WorkerId, tuple[SequenceSnapshot, ...]] = {}
        self._coming: list[SequenceSnapshot] = []
        self._told_capacities: dict[WorkerId, int] = {}
        self._in_the_end: dict[WorkerId, int] = {}  # leader: stage -> blocks once nothing is left to be sent
        self._leading: Leading | None = None  # leader: of the transition under way
        self._retired: RetiredTables | None = None  # of layers given up whose KV is being sent
        self._room_epoch = Epoch(0)  # the restore for which the leader has granted room
        self._withdrawn_epoch = Epoch(0)  # the restore that the leader has given up
        self._limited_epoch = Epoch(0)  # leader: the restore whose end a stage must know, to be believed what it has
        self._recomputed: tuple[SequenceId, ...] = ()
        self._exchange: Exchange | None = None
        self._links_up = False
        self._homecoming = Homecoming(
            memory=memory, book=book, clock=clock, network=network, timings=timings, me=me, spend=spend
        )
        self._undoing = False
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
        return not (self._quiescing or self._undoing or self._homecoming.wants_room)

    @property
    def leads(self) -> bool:
        return not self.stages or self.stages[0].worker_id == self.me

    @property
    def is_last(self) -> bool:
        return not self.stages or self.stages[-1].worker_id == self.me

    @property
    def next_stage(self) -> WorkerId:
        index = next(i for i, stage in enumerate(self.stages) if stage.worker_id == self.me)
        return self.stages[index + 1].worker_id

    def is_early(self, epoch: Epoch) -> bool:
        """Of a batch: its leader has everybody's word but this member's has not been carried out yet; or its roster,
        which comes another way and says which blocks are free, is not here.
        """
        transition = self._transition
        awaits_roster = transition is not None and transition.epoch == epoch and transition.awaits_roster
        return epoch > self.epoch or awaits_roster

    @property
    def layer_count(self) -> int:
        """That it executes."""
        return self.last_layer - self.first_layer

    def poll(self) -> None:
        """Between two turns: whatever waits for a step boundary or for room."""
        transition = self._transition
        if self._quiescing and transition is not None and transition.phase is Phase.COMMITTING:
            boundary = not self._core.in_flight_count and not self._core.suspended_ids
            if boundary and transition.led_before:
                self._tell_removed()
                self._drive(BoundaryReached(self._clock.now_s, transition.epoch))
        wanted = self._homecoming.wants_room and self.leads and self._links_up
        if wanted and self._core.settled:
            self._room_is_granted(self._current().epoch)
        elif self._homecoming.wants_room:
            self._take_room()
        if self._undoing:
            self._undo_restore()

    def check(self) -> None:
        """Of the book the core takes care, which is told of the same one."""
        self.memory.check()
        if self._transition is not None:
            self._transition.check()
        if self.book.block_count > self.memory.block_count:
            raise InvariantViolation(f"{self.book.block_count} blocks in the book, {self.memory.block_count} mapped")
        executed = set(range(self.first_layer, self.last_layer))
        if not executed <= self.memory.held:
            raise InvariantViolation(
                f"{self.me} executes {sorted(executed - self.memory.held)}, which it does not hold"
            )

    # ------------------------------------------------------------ what the planner asks

    def prepare(self, plan: Plan, sources: Sources) -> None:
        current = self._transition
        if plan.epoch <= max(self.progress, default=Epoch(0)):
            return
        if current is not None and current.phase in _UNDER_WAY:
            return
        if part_of(plan, self.me) is None or self._undoing:
            return
        self._transition = Transition(self.me, plan)
        self._sources = sources
        self._progress = Progress(plan.epoch, self._clock.now_s, block_count_before=self.book.block_count)
        self._going, self._coming, self._told_capacities = {}, [], {}
        self._in_the_end, self._leading = {}, None
        self._links_up = False
        self._exchange = Exchange(
            self._transition,
            self._progress,
            book=self.book,
            block_bytes=self.memory.geometry.block_bytes,
            block_tokens=self._block_tokens,
            network=self._network,
            tell=self._tell,
            post=self._post,
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
                    self._later(self._timings.link_connect_s, lambda e=epoch: self._linked(e))
                case PrepareMemory():
                    self._prepare_memory()
                case UndoPreparation(plan=plan):
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
                case LeadWave(wave=wave):
                    self._lead_on(wave)
                case SendRoster():
                    self._send_roster(command)
                case SendKv():
                    self._the_exchange().send(command)
                case ExpectKv():
                    self._the_exchange().expect(command)
                case SendKvComplete(epoch=epoch, sequence_id=sequence_id, to=to):
                    event = KvCompleteReceived(self._clock.now_s, epoch, sequence_id, self.me)
                    self._tell(to, lambda m, e=epoch, k=event: m.told(e, k))
                case Resume(sequence_id=sequence_id):
                    self._resume(sequence_id)
                case ReleaseSent():
                    self._release_sent()
                case SendWaveDone(epoch=epoch, wave=wave, to=to):
                    done = WaveDone(self._clock.now_s, epoch, self.me, wave)
                    self._tell(to, lambda m, e=epoch, d=done: m.told(e, d))
                case ReleaseLost():
                    self._release_lost()
                case Broken(peer=peer, why=why):
                    raise InvariantViolation(f"{self.me} loses {peer}: {why}; losses are not simulated yet")
                case SendKvLanded() | Land():
                    raise InvariantViolation(f"{self.me}: {command}; live exchange is not simulated yet")

    def _tell(self, to: WorkerId, say: Callable[["GroupMember"], None], size_bytes: int = _CONTROL_BYTES) -> None:
        peer = self._peers[to]
        label = f"tell {self.me}>{to}".encode()
        self._network.send(self.me, to, size_bytes, label, lambda: peer.post(lambda: say(peer.member)))

    def _post(self, to: WorkerId, say: Callable[["GroupMember"], None]) -> None:
        peer = self._peers[to]
        peer.post(lambda: say(peer.member))

    def _later(self, delay_s: float, act: Callable[[], None]) -> None:
        """As a thread of its own does: posted when it has ended."""
        me = self._peers[self.me]
        self._clock.after(delay_s, f"{self.me} later".encode(), lambda: me.post(act))

    def _tell_core(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, HandedOver):
                for to, snapshots in command.snapshots:
                    self._going[to] = snapshots
            elif isinstance(command, Removed):
                self.pass_on(command)
            else:
                self.answers.append(command)

    # ------------------------------------------------------------ prepare

    def _linked(self, epoch: Epoch) -> None:
        if self._transition is not None and self._transition.epoch == epoch:
            self._links_up = True
            self._drive(LinksUp(self._clock.now_s, epoch))

    def _prepare_memory(self) -> None:
        transition, now_s = self._current(), self._clock.now_s
        if transition.plan.kind is Kind.RESTORE:
            if transition.epoch <= self._withdrawn_epoch:
                why = f"the leader has given epoch {transition.epoch} up"
                self._later(0.0, lambda: self.told(transition.epoch, PreparationFailed(now_s, transition.epoch, why)))
                return
            home = self._counted().block_count_after = self.memory.home_block_count
            largest = max((view.block_count for view in self._core.placements()), default=0)
            if largest > home:
                why = f"a request holds {largest} blocks, more than the {home} there are without its group"
                failed = PreparationFailed(now_s, transition.epoch, why)
                self._later(0.0, lambda: self.told(transition.epoch, failed))
                return
            self._homecoming.begin(transition.epoch, self._sources, self._counted())
            if self.leads:
                self._limit(home)
            return
        dropped = self._layers_lost()
        self._counted().block_count_after = self.memory.blocks_after_drop(dropped)
        learn_s = 0.0
        if self._timings.checksum_bytes_per_s:
            learn_s = len(dropped) * self.memory.layer_bytes / self._timings.checksum_bytes_per_s
        ready = MemoryReady(now_s, transition.epoch)
        self._later(learn_s, lambda: self.told(transition.epoch, ready))

    # ------------------------------------------------------------ commit

    def _note_commit(self) -> None:
        progress = self._counted()
        progress.commit_at_s = progress.commit_at_s or self._clock.now_s

    def _tell_removed(self) -> None:
        capacity = min(self._capacities.values(), default=self.book.block_count)
        self._feed(CapacityChanged(self._clock.now_s, capacity))

    def _feed(self, event: Event) -> None:
        self._tell_core(self._core.handle(event))

    def _pass_on_epoch_end(self, epoch: Epoch) -> None:
        """Down the old pipeline, behind the last batch."""
        if not self.is_last:
            event = EpochEnded(self._clock.now_s, epoch, self.stages[0].worker_id)
            self._tell(self.next_stage, lambda m: m.told(epoch, event))

    def _take_up(self) -> None:
        transition, now_s = self._current(), self._clock.now_s
        self._note_commit()
        new = transition.part.new
        own: tuple[Victim, ...] = ()
        if transition.led_before:
            own = self._hand_over(transition, now_s)
        self._in_the_end[self.me] = self.memory.blocks_after_drop(self._layers_lost())
        self._remap()
        stage = next(m for m in new.members if m.worker_id == self.me)
        self.first_layer, self.last_layer = stage.first_layer, stage.last_layer
        self.stages = new.members if len(new.members) > 1 else ()
        self.epoch = transition.epoch
        self._capacities = {self.me: self.book.block_count}
        self._limited_epoch = Epoch(0)  # no restore of this group yet
        self._tell_core(self._core.handle(RoleChanged(now_s, self.leads, len(new.members))))
        self._quiescing = self.leads  # a leader forms batches once all members are ready
        transition.own_victims(own)
        progress = self._counted()
        progress.boundary_wait_s = now_s - progress.commit_at_s
        self._busy_remapping(progress, self._taken_up)

    def _taken_up(self) -> None:
        self._counted().taken_up_at_s = self._clock.now_s
        self._drive(TakenUp(self._clock.now_s, self._current().epoch))

    def _hand_over(self, transition: Transition, now_s: float) -> tuple[Victim, ...]:
        if transition.plan.kind is Kind.RESTORE:
            return self._deal_out(transition, now_s)
        leader = transition.part.new.leader.worker_id
        if leader != self.me:
            self._tell_core(self._core.handle(HandOver(now_s, leader)))
            return ()
        return tuple(Victim(sequence_id, count, self.me) for sequence_id, count in sorted(self._core.kv_tokens.items()))

    def _deal_out(self, transition: Transition, now_s: float) -> tuple[Victim, ...]:
        leaders = sorted({_leader_of(transition, w) for w in members_of(transition.part.old)})
        views = [MemberView(leader, self.memory.home_block_count, self._max_running_count) for leader in leaders]
        placed = place(self._core.placements(), views)
        going = {sequence_id: to for sequence_id, to in placed.items() if to != self.me}
        self._tell_core(self._core.handle(HandOver(now_s, going)))
        return tuple(Victim(i, count, self.me) for i, count in sorted(self._core.kv_tokens.items()))

    def _layers_lost(self) -> list[int]:
        stage = next(m for m in self._current().part.new.members if m.worker_id == self.me)
        return [layer for layer in sorted(self.memory.held) if not stage.first_layer <= layer < stage.last_layer]

    def _remap(self) -> None:
        lost, progress = self._layers_lost(), self._counted()
        progress.freed_parameter_bytes = len(lost) * self.memory.layer_bytes
        block_count = self.memory.drop_layers(lost)
        if self.memory.retired:
            self._retired = RetiredTables(self.book)
            block_count = self.memory.shrink_retired(self._retired.used_end)
        self._grow_book(block_count)

    def _busy_remapping(self, progress: Progress, then: Callable[[], None]) -> None:
        progress.remap_s += self._timings.remap_s
        self._spend(self._timings.remap_s, then)

    def _grow_book(self, block_count: int) -> None:
        self.book.grow(block_count - self.book.block_count)

    def _send_handover(self, epoch: Epoch, to: WorkerId) -> None:
        snapshots = self._going.pop(to, ())
        size_bytes = _CONTROL_BYTES + sum(
            _TOKEN_BYTES * (len(s.prompt_token_ids) + len(s.output_token_ids)) for s in snapshots
        )
        counts = self.book.block_count, self._in_the_end[self.me]
        self._tell(to, lambda m: m.handover(epoch, self.me, snapshots, counts), size_bytes)

    def handover(
        self, epoch: Epoch, source: WorkerId, snapshots: tuple[SequenceSnapshot, ...], counts: tuple[int, int]
    ) -> None:
        """`counts` of the sender's blocks: now, and once nothing is left to be sent."""
        transition = self._transition
        if transition is None or transition.epoch != epoch or source in self._told_capacities:
            return
        self._coming.extend(snapshots)
        self._told_capacities[source], self._in_the_end[source] = counts
        victims = tuple(Victim(s.sequence_id, s.computed_tokens, source) for s in snapshots if s.computed_tokens)
        self.told(epoch, HandoverReceived(self._clock.now_s, epoch, source, victims))

    def _send_roster(self, command: SendRoster) -> None:
        roster = RosterReceived(
            self._clock.now_s, command.epoch, self.me, command.victims, command.wave, last=command.last
        )
        recomputed = self._recomputed
        if command.wave:
            self._pass_wave_on(roster, recomputed)
            return
        for name in command.to:
            self._tell(name, lambda m: m.roster(roster, recomputed))

    def _pass_wave_on(self, roster: RosterReceived, recomputed: tuple[SequenceId, ...]) -> None:
        """Down the pipeline, behind the batches that have freed the blocks which it takes."""
        if not self.is_last:
            self._tell(self.next_stage, lambda m: m.later_roster(roster, recomputed))

    def roster(self, roster: RosterReceived, recomputed: tuple[SequenceId, ...]) -> None:
        if self._transition is None or self._transition.epoch != roster.epoch:
            return
        for sequence_id in recomputed:  # their blocks are needed for those who keep their KV
            self.book.release(sequence_id)
        self._forget_retired(recomputed)
        self._drive(roster)
        self.roster_came()

    def later_roster(self, roster: RosterReceived, recomputed: tuple[SequenceId, ...]) -> None:
        if self._transition is None or self._transition.epoch != roster.epoch:
            return
        self._pass_wave_on(roster, recomputed)
        self._forget_retired(recomputed)
        self._drive(roster)

    def _forget_retired(self, sequence_ids: tuple[SequenceId, ...]) -> None:
        if self._retired is not None:
            self._retired.forget(sequence_ids)

    def _lead(self, victims: tuple[Victim, ...]) -> None:
        transition, now_s = self._current(), self._clock.now_s
        members = members_of(transition.part.new)
        self._capacities |= {peer: count for peer, count in self._told_capacities.items() if peer in members}
        in_the_end = {peer: count for peer, count in self._in_the_end.items() if peer in members}
        lent = 0 if self.stages else self._foreign_block_count()
        self._leading = Leading(self.me, transition.plan, transition.part, self._core, self._block_tokens)
        decision = self._leading.lead(now_s, victims, self._coming, self._capacities, in_the_end, lent)
        progress = self._counted()
        progress.victim_count, progress.victims_waiting = decision.victim_count, decision.victim_count
        self._carry_out(decision)
        self._coming = []
        for sequence_id in decision.recomputed:  # for those who keep their KV
            self.book.release(sequence_id)
        self._quiescing = False
        self._drive(Led(now_s, transition.epoch, decision.wave.admitted, last=decision.wave.last))

    def _lead_on(self, wave: int) -> None:
        assert self._leading is not None, "victims have been led before"
        now_s = self._clock.now_s
        decision = self._leading.lead_on(now_s, self._capacities)
        self._carry_out(decision)
        self._drive(Led(now_s, self._current().epoch, decision.wave.admitted, wave, decision.wave.last))

    def _carry_out(self, decision: Decision) -> None:
        for event in decision.events:
            self._feed(event)
        self._recomputed = decision.recomputed
        self._forget_retired(decision.recomputed)
        progress = self._counted()
        progress.waves += 1
        progress.victims_recomputed += len(decision.wave.lost)
        progress.victims_waiting -= len(decision.wave.lost)

    def _foreign_block_count(self) -> int:
        mine = {*self._core.sequence_ids, *(snapshot.sequence_id for snapshot in self._coming)}
        return sum(len(self.book.table(i)) for i in self.book.sequence_ids if i not in mine)

    # ------------------------------------------------------------ exchange

    def kv_asked(self, epoch: Epoch, sequence_id: SequenceId, peer: WorkerId) -> None:
        if self._transition is not None and self._transition.epoch == epoch:
            self._the_exchange().asked(sequence_id, peer)

    def kv_came(self, epoch: Epoch, sequence_id: SequenceId, source: WorkerId) -> None:
        if self._transition is not None and self._transition.epoch == epoch:
            self._the_exchange().came(sequence_id, source)

    def kv_gone(self, epoch: Epoch, sequence_id: SequenceId, to: WorkerId, size_bytes: int) -> None:
        if self._transition is not None and self._transition.epoch == epoch:
            self._the_exchange().gone(sequence_id, to, size_bytes)

    def _resume(self, sequence_id: SequenceId) -> None:
        now_s, progress = self._clock.now_s, self._counted()
        progress.victims_waiting -= 1
        progress.note_stall(now_s - progress.commit_at_s)
        self._tell_core(self._core.handle(KvArrived(now_s, sequence_id)))

    def _release_sent(self) -> None:
        """Room for the next wave. What is left moves together: that is as fast as the memory, so it takes no time."""
        if self._retired is None:
            return
        self._retired.forget(self._the_exchange().take_sent())
        self._retired.compact()
        self._grow_book(self.memory.shrink_retired(self._retired.used_end))
        self._tell_capacity()

    def _release_lost(self) -> None:
        progress = self._counted()
        self._retired = None
        if not self.stages:  # alone: what the group has shared out to others leaves nothing here
            mine = {*self._core.sequence_ids, *self._core.suspended_ids}
            for sequence_id in self.book.sequence_ids:
                if sequence_id not in mine:
                    self.book.release(sequence_id)
        self._grow_book(self.memory.release_retired())
        progress.exchange_s = self._clock.now_s - progress.taken_up_at_s
        progress.block_count_after = self.book.block_count
        self._busy_remapping(progress, self._tell_capacity)

    def _tell_capacity(self) -> None:
        epoch, count, withdrawn = self.epoch, self.book.block_count, self._withdrawn_epoch
        if self.leads:
            self.capacity_told(epoch, self.me, count, withdrawn)
        else:
            self._tell(self.stages[0].worker_id, lambda m: m.capacity_told(epoch, self.me, count, withdrawn))

    def capacity_told(self, epoch: Epoch, source: WorkerId, block_count: int, withdrawn: Epoch) -> None:
        known = source == self.me or any(stage.worker_id == source for stage in self.stages)
        early = source != self.me and withdrawn < self._limited_epoch  # it may yet make room, or has done
        if epoch != self.epoch or not self.leads or not known or early:
            return
        self._capacities[source] = block_count
        now_s, capacity = self._clock.now_s, min(self._capacities.values())
        leading = self._leading
        self._feed(CapacityChanged(now_s, capacity) if leading is None else leading.capacity(now_s, self._capacities))

    # ------------------------------------------------------------ restore

    def _limit(self, block_count: int) -> None:
        self._limited_epoch = self._current().epoch
        self._capacities = {stage.worker_id: block_count for stage in self.stages} or {self.me: block_count}
        self._tell_core(self._core.handle(CapacityChanged(self._clock.now_s, block_count)))

    def _room_is_granted(self, epoch: Epoch) -> None:
        if not self.is_last:
            self._tell(self.next_stage, lambda m: m._room_is_granted(epoch))
        self._room_epoch = max(self._room_epoch, epoch)
        self._take_room()

    def _pass_on_withdrawal(self, epoch: Epoch) -> None:
        """Down the pipeline, behind the grant of room if there was one."""
        if not self.is_last:
            self._tell(self.next_stage, lambda m: m._room_is_withdrawn(epoch))
        self._withdrawn_epoch = max(self._withdrawn_epoch, epoch)

    def _room_is_withdrawn(self, epoch: Epoch) -> None:
        """Follower: what it has from now on, it has for good, and the leader may count on it."""
        if self.leads:
            return
        self._pass_on_withdrawal(epoch)
        transition = self._transition
        if transition is not None and transition.epoch == epoch:
            self._drive(PreparationFailed(self._clock.now_s, epoch, "the leader has given it up"))
        if not self._undoing:  # else it is said then
            self._tell_capacity()

    def _take_room(self) -> None:
        transition = self._transition
        if transition is None or transition.epoch != self._room_epoch or transition.phase is not Phase.PREPARING:
            return
        if self._homecoming.wants_room and self._links_up:
            self._homecoming.make_room(self._layer_came)
            self._after_pull(transition)

    def _layer_came(self, epoch: Epoch, layer: int) -> None:
        """From the network's side: posted, as a thread of the transport does."""
        self._peers[self.me].post(lambda: self._layer_is_here(epoch, layer))

    def _layer_is_here(self, epoch: Epoch, layer: int) -> None:
        transition = self._transition
        if not self._homecoming.arrived(epoch, layer, self._layer_came):
            return
        if transition is not None and transition.phase is Phase.PREPARING:
            self._after_pull(transition)

    def _after_pull(self, transition: Transition) -> None:
        if self._homecoming.complete:
            self._drive(MemoryReady(self._clock.now_s, transition.epoch))
        else:
            self._publish()

    def _undo_restore(self) -> None:
        """The burst is back: layers are given up again, once nothing writes into them any more."""
        block_count = self._homecoming.undo(range(self.first_layer, self.last_layer))
        if block_count is not None:
            self._undoing = False
            self._grow_book(block_count)
            self._tell_capacity()

    # ------------------------------------------------------------ what others may read

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


def _leader_of(transition: Transition, worker_id: WorkerId) -> WorkerId:
    group = group_of(transition.plan.target, worker_id)
    if group is None:
        raise InvariantViolation(f"{worker_id} is in no group of epoch {transition.epoch}")
    return group.leader.worker_id

"""One worker's part in a change of the layout: prepare, commit at a step boundary, exchange, done.

Rule 1: everything that decides about a transition is here; the shell connects links, moves memory and KV, and reports.
Rule 2: every message may come twice, late or never. An event that does not fit the phase changes nothing.

A drop and a merge of pipelines are the same thing: they exchange KV at a boundary. In a restore each member is a whole
worker from the commit on, and the old group comes to its end beside that; the KV of what is left in it then is
exchanged likewise.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import group_of, members_of
from ballast.common.transition import Phase
from services.worker.core.phases import BEFORE_COMMIT, check_step
from services.worker.core.plan import Plan, SequenceId, Victim, part_of, transfers
from services.worker.core.transition_messages import (
    AbortRequested,
    BoundaryReached,
    Broken,
    CloseSeat,
    Command,
    CommitRequested,
    ConnectLinks,
    Empty,
    EpochEnded,
    Event,
    ExpectKv,
    GiveWay,
    GroupEnded,
    HandoverReceived,
    KvCompleteReceived,
    KvReceived,
    KvSent,
    Lead,
    LeadWave,
    Led,
    LinksUp,
    MemoryReady,
    PeerLost,
    PreparationFailed,
    PrepareMemory,
    PrepareRequested,
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


@dataclass(slots=True)
class _Progress:
    """What is still to happen in one transition."""

    begun: bool = False
    links_up: bool = False
    memory_ready: bool = False
    boundary: bool = False  # own batches, if it led
    epoch_ended: bool = False  # word of the old leader, if it followed
    taken_up: bool = False
    closed_seat: bool = False  # of the group that dissolves
    lost: set[WorkerId] = field(default_factory=set)  # members of that group, since the commit
    handovers: dict[WorkerId, tuple[Victim, ...]] = field(default_factory=dict)  # sender -> its victims
    waves: dict[WorkerId, int] = field(default_factory=dict)  # new leader -> its waves that have been handled
    closed: set[WorkerId] = field(default_factory=set)  # new leaders whose last wave is among them
    waves_left: dict[WorkerId, int] = field(default_factory=dict)  # new leader -> the wave it was last told to be done
    wave_missing: set[WorkerId] = field(default_factory=set)  # leader: stages that are not through with its wave
    outgoing: set[tuple[SequenceId, WorkerId]] = field(default_factory=set)
    incoming: dict[SequenceId, set[WorkerId]] = field(default_factory=dict)  # victim -> sources not yet done
    stages_missing: dict[SequenceId, set[WorkerId]] = field(default_factory=dict)  # leader: victim -> stages
    early_complete: set[tuple[SequenceId, WorkerId]] = field(default_factory=set)
    led: bool = False
    own_victims: tuple[Victim, ...] = ()  # sequences that this worker has led and goes on leading, with their KV


class Transition:
    """One worker and one plan. `handle` is the only method that changes anything."""

    def __init__(self, me: WorkerId, plan: Plan) -> None:
        part = part_of(plan, me)
        if part is None:
            raise InvariantViolation(f"{me} has no part in epoch {plan.epoch}")
        self.me = me
        self.plan = plan
        self.part = part
        self.phase = Phase.PREPARING
        self.why = ""
        self._is = _Progress()

    @property
    def epoch(self) -> Epoch:
        return self.plan.epoch

    @property
    def lost(self) -> Collection[WorkerId]:
        """Members of the group that dissolves, since the commit."""
        return self._is.lost

    @property
    def leads(self) -> bool:
        return self.part.new.leader.worker_id == self.me

    @property
    def led_before(self) -> bool:
        return self.part.old is not None and self.part.old.leader.worker_id == self.me

    @property
    def awaits_roster(self) -> bool:
        """Its group's leader has not said yet whose KV stays."""
        return self.phase is Phase.EXCHANGING and self.part.new.leader.worker_id not in self._is.waves

    def handle(self, event: Event) -> list[Command]:
        before = self.phase
        commands = self._handle(event)
        if self.phase is not before:
            check_step(before, self.phase)
        return commands

    def _handle(self, event: Event) -> list[Command]:
        match event:
            case PrepareRequested():
                return self._begin()
            case LinksUp():
                self._is.links_up = True
                return self._maybe_prepared()
            case MemoryReady():
                self._is.memory_ready = True
                return self._maybe_prepared()
            case PreparationFailed(why=why):
                return self._fail(why)
            case AbortRequested(why=why):
                return self._abort(why)
            case CommitRequested():
                return self._commit()
            case BoundaryReached():
                return self._boundary()
            case GroupEnded(own_victims=own_victims):
                return self._group_ended(own_victims)
            case EpochEnded():
                self._is.epoch_ended = True
                return self._maybe_close() if self.part.dissolves else self._maybe_take_up()
            case TakenUp(own_victims=own_victims):
                return self._taken_up(own_victims)
            case HandoverReceived(source=source, victims=victims):
                self._is.handovers.setdefault(source, victims)
                return self._maybe_lead()
            case RosterReceived(source=source, victims=victims, wave=wave, last=last):
                return self._roster(source, victims, wave, last)
            case Led(victims=victims, wave=wave, last=last):
                return self._led(victims, wave, last)
            case WaveDone(source=source, wave=wave):
                return self._wave_done(source, wave)
            case KvSent(sequence_id=sequence_id, to=to):
                self._is.outgoing.discard((sequence_id, to))
                return self._maybe_done()
            case KvReceived(sequence_id=sequence_id, source=source):
                return self._kv_received(sequence_id, source)
            case KvCompleteReceived(sequence_id=sequence_id, source=source):
                return self._stage_complete(sequence_id, source)
            case PeerLost(peer=peer, why=why):
                return self._peer_lost(peer, why)

    # ------------------------------------------------------------ before commit

    def _begin(self) -> list[Command]:
        if self._is.begun:
            return []  # the same plan once more
        self._is.begun = True
        return [ConnectLinks(self.epoch, self.part.peers), PrepareMemory(self.plan)]

    def _maybe_prepared(self) -> list[Command]:
        if self.phase is Phase.PREPARING and self._is.links_up and self._is.memory_ready:
            self.phase = Phase.PREPARED
        return []

    def _fail(self, why: str) -> list[Command]:
        if self.phase not in BEFORE_COMMIT:
            return []
        self.phase, self.why = Phase.FAILED, why
        return [UndoPreparation(self.plan)]

    def _abort(self, why: str) -> list[Command]:
        if self.phase is Phase.FAILED:
            self.phase = Phase.ABORTED
            return []
        if self.phase is Phase.EXCHANGING and self.part.dissolves:
            return [GiveWay(self.epoch)]
        if self.phase not in BEFORE_COMMIT:
            return []
        self.phase, self.why = Phase.ABORTED, why
        return [UndoPreparation(self.plan)]

    # ------------------------------------------------------------ commit

    def _commit(self) -> list[Command]:
        if self.phase is not Phase.PREPARED:
            return []
        self.phase = Phase.COMMITTING
        if self.part.dissolves:
            self._is.taken_up = True
            return [TakeUp(self.plan)]
        if self.led_before:
            return [Quiesce(self.epoch)]
        return self._maybe_take_up()

    def _boundary(self) -> list[Command]:
        if self.phase is not Phase.COMMITTING or self._is.boundary:
            return []
        self._is.boundary = True
        followers = tuple(w for w in members_of(self.part.old) if w != self.me)
        told: list[Command] = [SendEpochEnded(self.epoch, followers)] if followers else []
        return told + self._maybe_take_up()

    def _maybe_take_up(self) -> list[Command]:
        """An old leader waits for its own batches, a follower for its leader's word; a newcomer for nothing."""
        if self.phase is not Phase.COMMITTING or self._is.taken_up:
            return []
        ready = self._is.boundary if self.led_before else self._is.epoch_ended or self.part.old is None
        if not ready:
            return []
        self._is.taken_up = True
        return [TakeUp(self.plan)]

    def _taken_up(self, own_victims: tuple[Victim, ...]) -> list[Command]:
        if self.phase is not Phase.COMMITTING:
            return []
        self._is.own_victims = own_victims
        self.phase = Phase.EXCHANGING
        if self.part.dissolves:
            return self._maybe_close()
        commands: list[Command] = [SendHandover(self.epoch, to) for to in self.part.handovers_to]
        return commands + self._maybe_lead()

    # ------------------------------------------------------------ the end of a group that dissolves

    def _group_ended(self, own_victims: tuple[Victim, ...]) -> list[Command]:
        """The leader that was has nothing left in it."""
        is_ = self._is
        if self.phase is not Phase.EXCHANGING or not self.part.dissolves or is_.epoch_ended:
            return []
        is_.epoch_ended, is_.own_victims = True, own_victims
        followers = tuple(w for w in members_of(self.part.old) if w != self.me)
        told: list[Command] = [SendEpochEnded(self.epoch, followers)]
        return told + self._maybe_close()

    def _maybe_close(self) -> list[Command]:
        """Its leader's word may come before this member's commit."""
        is_ = self._is
        if self.phase is not Phase.EXCHANGING or is_.closed_seat or not (is_.epoch_ended or is_.lost):
            return []
        if is_.lost and self.led_before and not is_.epoch_ended:
            return [Empty(self.epoch)]
        is_.closed_seat = True
        commands: list[Command] = [CloseSeat(self.epoch)]
        commands += [SendHandover(self.epoch, to) for to in self.part.handovers_to if to not in is_.lost]
        return commands + self._maybe_lead() + self._maybe_done()

    def _maybe_lead(self) -> list[Command]:
        is_ = self._is
        if self.phase is not Phase.EXCHANGING or not self.leads or is_.led:
            return []
        if self.part.dissolves and not is_.closed_seat:
            return []
        if set(self.part.handovers_from) - set(is_.handovers) - is_.lost:
            return []
        is_.led = True
        victims = is_.own_victims + tuple(v for sender in sorted(is_.handovers) for v in is_.handovers[sender])
        return [Lead(self.epoch, victims)]

    def _led(self, victims: tuple[Victim, ...], wave: int, last: bool) -> list[Command]:
        is_ = self._is
        if self.phase is not Phase.EXCHANGING or not is_.led or wave != is_.waves.get(self.me, 0):
            return []
        is_.wave_missing = set() if last else set(members_of(self.part.new))
        for victim in victims:
            stages = {to for _, to, _, _ in transfers(self.plan, victim, self.me)}
            stages -= {s for i, s in is_.early_complete if i == victim.sequence_id}
            if stages:
                is_.stages_missing[victim.sequence_id] = stages
        commands: list[Command] = [SendRoster(self.epoch, victims, self.part.roster_to, wave, last)]
        commands += [Resume(self.epoch, v.sequence_id) for v in victims if v.sequence_id not in is_.stages_missing]
        return commands + self._roster(self.me, victims, wave, last)

    # ------------------------------------------------------------ exchange

    def _roster(self, source: WorkerId, victims: tuple[Victim, ...], wave: int, last: bool) -> list[Command]:
        is_ = self._is
        if wave != is_.waves.get(source, 0) or source in is_.closed or source not in self.part.rosters_from:
            return []
        if self.phase is Phase.FAILED or source in is_.lost:
            return []  # a member was lost; what the others still say of it comes to nothing
        if self.phase is not Phase.EXCHANGING:
            raise InvariantViolation(f"{self.me} got a roster of epoch {self.epoch} while {self.phase}")
        is_.waves[source] = wave + 1
        if last:
            is_.closed.add(source)
        commands: list[Command] = []
        for victim in victims:
            moves = transfers(self.plan, victim, source)
            coming = tuple(hop for hop in moves if hop.taker == self.me)
            if self.me in members_of(group_of(self.plan.target, source)):
                commands.append(ExpectKv(self.epoch, victim, coming))
            if coming:
                is_.incoming[victim.sequence_id] = {hop.giver for hop in coming}
            going = [hop for hop in moves if hop.giver == self.me]
            is_.outgoing.update((victim.sequence_id, hop.taker) for hop in going)
            commands += [SendKv(self.epoch, victim, hop) for hop in going]
        return commands + self._maybe_done()

    def _kv_received(self, sequence_id: SequenceId, source: WorkerId) -> list[Command]:
        waiting = self._is.incoming.get(sequence_id)
        if waiting is None:
            return []
        waiting.discard(source)
        if waiting:
            return []
        del self._is.incoming[sequence_id]
        return self._complete(sequence_id) + self._maybe_done()

    def _complete(self, sequence_id: SequenceId) -> list[Command]:
        """The victim may go on, as far as this stage is concerned."""
        leader = self.part.new.leader.worker_id
        if leader != self.me:
            return [SendKvComplete(self.epoch, sequence_id, leader)]
        return self._stage_complete(sequence_id, self.me)

    def _stage_complete(self, sequence_id: SequenceId, stage: WorkerId) -> list[Command]:
        missing = self._is.stages_missing.get(sequence_id)
        if missing is None:
            self._is.early_complete.add((sequence_id, stage))
            return []
        missing.discard(stage)
        if missing:
            return []
        del self._is.stages_missing[sequence_id]
        return [Resume(self.epoch, sequence_id), *self._maybe_done()]

    def _maybe_done(self) -> list[Command]:
        is_ = self._is
        open_ = is_.outgoing or is_.incoming or is_.stages_missing or (self.leads and not is_.led)
        open_ = open_ or (self.part.dissolves and not is_.closed_seat)
        rosters = set(self.part.rosters_from) - is_.lost
        if self.phase is not Phase.EXCHANGING or open_ or rosters - is_.waves.keys():
            return []
        if rosters - is_.closed:
            return self._leave_wave()
        self.phase = Phase.DONE
        return [ReleaseLost(self.plan)]

    def _leave_wave(self) -> list[Command]:
        """Nothing of the waves so far is on its way here, and others follow."""
        is_, commands = self._is, list[Command]()
        for leader in self.part.rosters_from:
            wave = is_.waves[leader] - 1
            if leader in is_.closed or is_.waves_left.get(leader, -1) == wave:
                continue
            is_.waves_left[leader] = wave
            commands += [ReleaseSent(self.plan)] if not commands else []
            commands += (
                self._wave_done(self.me, wave) if leader == self.me else [SendWaveDone(self.epoch, wave, leader)]
            )
        return commands

    def _wave_done(self, stage: WorkerId, wave: int) -> list[Command]:
        is_ = self._is
        if self.phase is not Phase.EXCHANGING or stage not in is_.wave_missing or wave + 1 != is_.waves.get(self.me, 0):
            return []
        is_.wave_missing.discard(stage)
        return [] if is_.wave_missing else [LeadWave(self.epoch, wave + 1)]

    # ------------------------------------------------------------ failure

    def _waits_for_kv_of(self, peer: WorkerId) -> bool:
        """Some of a victim's KV is to come from there, and may be being written into its blocks."""
        return any(peer in sources for sources in self._is.incoming.values())

    def _peer_lost(self, peer: WorkerId, why: str) -> list[Command]:
        if peer not in self.part.peers:
            return []
        if self.phase in BEFORE_COMMIT:
            return self._fail(f"{peer}: {why}")
        if self.phase is Phase.EXCHANGING and self.part.dissolves and not self._waits_for_kv_of(peer):
            is_ = self._is
            is_.lost.add(peer)
            is_.outgoing = {(sequence_id, to) for sequence_id, to in is_.outgoing if to != peer}
            return self._maybe_close() + self._maybe_lead() + self._maybe_done()
        if self.phase in (Phase.COMMITTING, Phase.EXCHANGING):
            self.phase, self.why = Phase.FAILED, f"{peer}: {why}"
            return [Broken(peer, why)]
        return []

    def check(self) -> None:
        """Raise InvariantViolation if what is done contradicts what is open."""
        is_ = self._is
        if self.phase is Phase.DONE and (is_.outgoing or is_.incoming or is_.stages_missing):
            raise InvariantViolation(f"{self.me}: epoch {self.epoch} is done with KV still on its way")
        if self.phase is Phase.DONE and set(self.part.rosters_from) - is_.closed - is_.lost:
            raise InvariantViolation(f"{self.me}: epoch {self.epoch} is done and victims wait")
        ended = is_.boundary if self.led_before else is_.epoch_ended or self.part.old is None
        if is_.taken_up and not (ended or self.part.dissolves):
            raise InvariantViolation(f"{self.me}: epoch {self.epoch} was taken up inside a step")
        if self.phase in (Phase.PREPARING, Phase.ABORTED) and is_.taken_up:
            raise InvariantViolation(f"{self.me}: epoch {self.epoch} is {self.phase} after it was taken up")

"""One member's state in a transition, and its reactions to events (pure). The tables in `core.phases` say which
reaction applies when.

A drop and a merge of pipelines are handled alike: they exchange KV at a boundary. In a restore each member serves alone
from the commit on, and the old group drains at the same time; the KV of its remaining sequences is exchanged at its
end.
"""

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import group_of, members_of
from services.worker.core import transition_messages as t
from services.worker.core.draining import Draining
from services.worker.core.plan import Plan, SequenceId, Victim, part_of, refills, transfers

Commands = list[t.Command]


class TransitionState:
    """State of a member in a transition. Methods that return commands handle an event; methods that return a bool are
    conditions in the tables.
    """

    def __init__(self, me: WorkerId, plan: Plan) -> None:
        part = part_of(plan, me)
        if part is None:
            raise InvariantViolation(f"{me} has no part in epoch {plan.epoch}")
        self.me = me
        self.plan = plan
        self.part = part
        self.why = ""
        self.links_up = False
        self.memory_ready = False
        self.room_blocks: int | None = None  # in a restore: blocks that the group keeps; None: not granted yet
        self.undone = False  # True in a restore: layers loaded before an abort have been dropped again
        self.epoch_ended = False  # True: the old leader has announced the end of its batches, for which followers wait
        self.kept: tuple[Victim, ...] = ()  # if a stage was lost: see EpochEnded
        self.draining: Draining | None = None  # in a restore: the old group, from the commit on
        self.lost: set[WorkerId] = set()  # members of the draining group lost since the commit
        self.own_victims: tuple[Victim, ...] = ()  # sequences that this worker continues to lead
        self.handovers: dict[WorkerId, tuple[Victim, ...]] = {}  # member -> sequences that it has handed over
        self.waves: dict[WorkerId, int] = {}  # new leader -> number of its waves handled
        self.closed: set[WorkerId] = set()  # new leaders that have announced their last wave
        self._waves_left: dict[WorkerId, int] = {}  # new leader -> last wave reported to it as completed
        self._wave_missing: set[WorkerId] = set()  # on a leader: stages that have not completed its wave
        self._outgoing: set[tuple[SequenceId, WorkerId]] = set()
        self._incoming: dict[SequenceId, set[WorkerId]] = {}  # sequence -> members that have not sent its KV
        self._stages_missing: dict[SequenceId, set[WorkerId]] = {}  # on a leader: sequence -> stages without all its KV
        self._donors: dict[SequenceId, SequenceId] = {}  # on a leader: sequence -> its donor, if its KV is sent, too

    @property
    def epoch(self) -> Epoch:
        return self.plan.epoch

    @property
    def leads(self) -> bool:
        return self.part.new.leader.worker_id == self.me

    @property
    def led_before(self) -> bool:
        return self.part.old is not None and self.part.old.leader.worker_id == self.me

    # ------------------------------------------------------------ before the commit

    def begin(self, event: t.PrepareRequested) -> Commands:
        self.room_blocks = event.room_blocks
        return [t.ConnectLinks(self.epoch, self.part.peers), t.PrepareMemory(self.plan)]

    def note_links(self, _: t.LinksUp) -> Commands:
        self.links_up = True
        return []

    def note_memory(self, _: t.MemoryReady) -> Commands:
        self.memory_ready = True
        return []

    def prepared(self) -> bool:
        return self.links_up and self.memory_ready

    def fail(self, event: t.PreparationFailed | t.AbortRequested | t.PeerLost) -> Commands:
        self.why = f"{event.peer}: {event.why}" if isinstance(event, t.PeerLost) else event.why
        return [t.WithdrawRoom(self.epoch)] if self.part.dissolves and self.led_before else []

    def note_abort(self, _: t.AbortRequested) -> Commands:
        return []

    def is_undone(self, _: t.AbortRequested) -> bool:
        return self.undone

    def note_undone(self, _: t.LayersGivenUp) -> Commands:
        self.undone = True
        return [t.ReportRoom(self.epoch)]

    def is_peer(self, event: t.PeerLost) -> bool:
        return event.peer in self.part.peers

    # ------------------------------------------------------------ restore: room and layers

    def is_leader(self, _: t.LinksUp) -> bool:
        return self.led_before

    def note_room(self, event: t.GroupLimited | t.RoomGranted) -> Commands:
        self.room_blocks = event.block_count
        return []

    def grant_room(self, _: t.LimitHeld) -> Commands:
        return [t.GrantRoom(self.epoch, self._room()), *self.load_layers()]

    def has_room(self) -> bool:
        return self.room_blocks is not None

    def load_layers(self) -> Commands:
        return [t.LoadLayers(self.epoch, self._room())]

    def shrink_group(self, event: t.RoomGranted) -> Commands:
        return [t.ShrinkGroup(self.epoch, event.block_count)]

    def _room(self) -> int:
        if self.room_blocks is None:
            raise InvariantViolation(f"{self.me}: no room has been granted in epoch {self.epoch}")
        return self.room_blocks

    # ------------------------------------------------------------ the commit

    def quiesce(self, _: t.CommitRequested) -> Commands:
        return [t.Quiesce(self.epoch)] if self.led_before else []

    def end_epoch(self, _: t.BoundaryReached) -> Commands:
        return [*self._epoch_ends(), *self.take_up()]

    def may_follow(self) -> bool:
        """True if this follower's old leader has announced the end of its batches. A new member has no old leader."""
        return not self.led_before and (self.epoch_ended or self.part.old is None)

    def take_up(self, _: t.CommitRequested | None = None) -> Commands:
        return [t.TakeUp(self.plan)]

    def is_to_lead(self, _: t.TakenUp) -> bool:
        return self.leads

    def hand_over(self, event: t.TakenUp) -> Commands:
        return [*self.note_own(event), *self._handovers()]

    def note_own(self, event: t.TakenUp) -> Commands:
        self.own_victims, self.draining = event.own_victims, event.draining
        return []

    def note_end(self, event: t.EpochEnded) -> Commands:
        self.epoch_ended, self.kept = True, event.kept
        return []

    def _epoch_ends(self) -> Commands:
        followers = tuple(w for w in members_of(self.part.old) if w not in {self.me, *self.part.lost})
        return [t.SendEpochEnded(self.epoch, followers)] if followers else []

    def _handovers(self) -> Commands:
        return [t.SendHandover(self.epoch, to) for to in self.part.handovers_to if to not in self.lost]

    # ------------------------------------------------------------ end of a draining group

    def yield_to_changes(self, _: t.AbortRequested) -> Commands:
        """Make the draining group hand over its running sequences now."""
        if self.draining is not None:
            self.draining.hurried = True
        return []

    def end_group(self, _: t.GroupEnded) -> Commands:
        """End the draining group, whose old leader has handed over all sequences."""
        self.epoch_ended = True
        if self.draining is not None:
            self.own_victims = self.draining.own_victims
        return self._epoch_ends()

    def group_ended(self) -> bool:
        """True if the draining group has ended. If a member is lost, followers end it at once, but a leader first hands
        over all sequences.
        """
        return self.epoch_ended or (bool(self.lost) and not self.led_before)

    def close(self) -> Commands:
        return [t.CloseSeat(self.epoch), *self._handovers()]

    def empty(self, event: t.PeerLost) -> Commands:
        self.lose(event)
        return [t.Empty(self.epoch)] if self.led_before else []

    def lose(self, event: t.PeerLost) -> Commands:
        """Stop waiting for messages of a lost member, and for the end of transfers to it."""
        self.lost.add(event.peer)
        self._outgoing = {(sequence_id, to) for sequence_id, to in self._outgoing if to != event.peer}
        return []

    def awaits_kv_of(self, event: t.PeerLost) -> bool:
        """True if KV of a sequence is expected from that member, so that a write may be under way."""
        return any(event.peer in sources for sources in self._incoming.values())

    def break_up(self, event: t.PeerLost) -> Commands:
        self.why = f"{event.peer}: {event.why}"
        return [t.Broken(event.peer, event.why)]

    # ------------------------------------------------------------ leading the new group

    def note_handover(self, event: t.HandoverReceived) -> Commands:
        self.handovers.setdefault(event.source, event.victims)
        return []

    def all_handed_over(self) -> bool:
        return not set(self.part.handovers_from) - set(self.handovers) - self.lost

    def lead(self) -> Commands:
        handed_over = tuple(v for sender in sorted(self.handovers) for v in self.handovers[sender])
        return [t.Lead(self.epoch, self.own_victims + handed_over)]

    def is_own_wave(self, event: t.Led) -> bool:
        return self.leads and event.wave == self.waves.get(self.me, 0)

    def led(self, event: t.Led) -> Commands:
        self._wave_missing = set() if event.last else set(members_of(self.part.new))
        for victim in event.victims:
            stages = {hop.taker for find in (transfers, refills) for hop in find(self.plan, victim, self.me)}
            if stages:
                self._stages_missing[victim.sequence_id] = stages
            if victim.donor in self._stages_missing:
                self._donors[victim.sequence_id] = victim.donor
        commands: Commands = [t.SendRoster(self.epoch, event.victims, self.part.roster_to, event.wave, event.last)]
        at_once = [v for v in event.victims if v.sequence_id not in self._stages_missing]
        commands += [t.Resume(self.epoch, victim.sequence_id) for victim in at_once]
        return commands + self._exchange(self.me, event.victims, event.wave, event.last)

    # ------------------------------------------------------------ exchange

    def is_next_roster(self, event: t.RosterReceived) -> bool:
        """True if this is the next roster of that leader. Rosters of a lost member are ignored."""
        known = event.source in self.part.rosters_from and event.source not in self.closed | self.lost
        return known and event.wave == self.waves.get(event.source, 0)

    def refuse_roster(self, event: t.RosterReceived) -> Commands:
        raise InvariantViolation(f"{self.me} got a roster of epoch {self.epoch} from {event.source} before its take-up")

    def take_roster(self, event: t.RosterReceived) -> Commands:
        return self._exchange(event.source, event.victims, event.wave, event.last)

    def _exchange(self, source: WorkerId, victims: tuple[Victim, ...], wave: int, last: bool) -> Commands:
        self.waves[source] = wave + 1
        if last:
            self.closed.add(source)
        commands: Commands = []
        for victim in victims:
            moves = transfers(self.plan, victim, source)
            coming = tuple(hop for hop in moves if hop.taker == self.me)
            if self.me in members_of(group_of(self.plan.target, source)):
                commands.append(t.ExpectKv(self.epoch, victim, coming))
            refilled = [hop for hop in refills(self.plan, victim, source) if hop.taker == self.me]
            commands += [t.RefillKv(self.epoch, victim, hop.giver) for hop in refilled]
            if coming or refilled:
                self._incoming[victim.sequence_id] = {hop.giver for hop in (*coming, *refilled)}
            going = [hop for hop in moves if hop.giver == self.me]
            self._outgoing.update((victim.sequence_id, hop.taker) for hop in going)
            commands += [t.SendKv(self.epoch, victim, hop) for hop in going]
        return commands

    def note_sent(self, event: t.KvSent) -> Commands:
        self._outgoing.discard((event.sequence_id, event.to))
        return []

    def take_kv(self, event: t.KvReceived) -> Commands:
        waiting = self._incoming.get(event.sequence_id)
        if waiting is None:
            return []
        waiting.discard(event.source)
        if waiting:
            return []
        del self._incoming[event.sequence_id]
        leader = self.part.new.leader.worker_id
        if leader != self.me:
            return [t.SendKvComplete(self.epoch, event.sequence_id, leader)]
        return self._stage_complete(event.sequence_id, self.me)

    def note_complete(self, event: t.KvCompleteReceived) -> Commands:
        return self._stage_complete(event.sequence_id, event.source)

    def _stage_complete(self, sequence_id: SequenceId, stage: WorkerId) -> Commands:
        missing = self._stages_missing.get(sequence_id)
        if missing is None:
            return []
        missing.discard(stage)
        return self._complete(sequence_id)

    def _complete(self, sequence_id: SequenceId) -> Commands:
        """Resume the sequence if all its KV is here, and then the sequences that share blocks with it."""
        if self._stages_missing[sequence_id] or self._donors.get(sequence_id) in self._stages_missing:
            return []
        del self._stages_missing[sequence_id]
        commands: Commands = [t.Resume(self.epoch, sequence_id)]
        for other_id in [other_id for other_id, donor in self._donors.items() if donor == sequence_id]:
            del self._donors[other_id]
            commands += self._complete(other_id)
        return commands

    # ------------------------------------------------------------ end of a wave and of the transition

    @property
    def _rosters_from(self) -> set[WorkerId]:
        return set(self.part.rosters_from) - self.lost

    def _nothing_travels(self) -> bool:
        """True if no transfer is under way: every new leader has sent at least one roster, and all KV of its sequences
        has arrived.
        """
        on_its_way = self._outgoing or self._incoming or self._stages_missing
        return not on_its_way and self._rosters_from <= self.waves.keys()

    def _waves_to_leave(self) -> list[tuple[WorkerId, int]]:
        """New leaders with further waves, each with its wave that has ended here but was not reported to it yet."""
        going_on = [leader for leader in self.part.rosters_from if leader not in self.closed]
        waves = [(leader, self.waves[leader] - 1) for leader in going_on if leader in self.waves]
        return [(leader, wave) for leader, wave in waves if self._waves_left.get(leader, -1) != wave]

    def wave_is_over(self) -> bool:
        return self._nothing_travels() and bool(self._waves_to_leave())

    def leave_wave(self) -> Commands:
        commands: Commands = [t.ReleaseSent(self.plan)]
        for leader, wave in self._waves_to_leave():
            self._waves_left[leader] = wave
            commands += self._wave_done(self.me) if leader == self.me else [t.SendWaveDone(self.epoch, wave, leader)]
        return commands

    def is_in_wave(self, event: t.WaveDone) -> bool:
        return event.source in self._wave_missing and event.wave + 1 == self.waves.get(self.me, 0)

    def note_wave_done(self, event: t.WaveDone) -> Commands:
        return self._wave_done(event.source)

    def _wave_done(self, stage: WorkerId) -> Commands:
        self._wave_missing.discard(stage)
        return [] if self._wave_missing else [t.LeadWave(self.epoch, self.waves[self.me])]

    def is_done(self) -> bool:
        return self._nothing_travels() and self._rosters_from <= self.closed

    def release(self) -> Commands:
        return [t.ReleaseLost(self.plan)]

    def check_done(self) -> None:
        if self._outgoing or self._incoming or self._stages_missing:
            raise InvariantViolation(f"{self.me}: epoch {self.epoch} is done while KV is still being transferred")
        if self._rosters_from - self.closed:
            raise InvariantViolation(f"{self.me}: epoch {self.epoch} is done, but victims wait")

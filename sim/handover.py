"""Sequences that change hands in a transition: the counterpart of `services.worker.pipeline.handover`."""

from collections.abc import Callable, Collection

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import group_of, members_of
from ballast.common.transition import TransitionKind
from services.worker.core.batch import SequenceId
from services.worker.core.events import Event, HandedOver, HandOver
from services.worker.core.leading import Decision, Leading
from services.worker.core.plan import Victim
from services.worker.core.retired import RetiredTables
from services.worker.core.room import lent_count
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.stage import StageBook
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import RosterReceived, SendRoster
from services.worker.core.worker import WorkerCore
from services.worker.pipeline.status import Progress
from services.worker.policy.placement import MemberView, place
from sim.capacity import Capacities
from sim.clock import Clock
from sim.memory import VirtualMemory
from sim.role import Role
from sim.voice import CONTROL_BYTES, Voice

_TOKEN_BYTES = 4


class Handover:
    """`begin` with every plan."""

    def __init__(
        self,
        role: Role,
        voice: Voice,
        capacities: Capacities,
        *,
        clock: Clock,
        core: WorkerCore,
        book: StageBook,
        memory: VirtualMemory,
        max_running_count: int,
        block_tokens: int,
        tell: Callable[[Event], None],
        stay: Callable[[Collection[SequenceId]], None],
    ) -> None:
        """`core` is only read; `tell` tells it something, and gives `handed_over` what it answers to that. `stay` moves
        blocks of sequences to where all layers have KV.
        """
        self._role = role
        self._voice = voice
        self._capacities = capacities
        self._clock = clock
        self._core = core
        self._book = book
        self._memory = memory
        self._max_running_count = max_running_count
        self._block_tokens = block_tokens
        self._tell = tell
        self._stay = stay
        self._going: dict[WorkerId, tuple[SequenceSnapshot, ...]] = {}  # by the leader they go to
        self._coming: list[SequenceSnapshot] = []  # new leader: handed over to it
        self._told_counts: dict[WorkerId, int] = {}  # blocks of those who have
        self._final_counts: dict[WorkerId, int] = {}  # once nothing is left to be sent
        self._recomputed: tuple[SequenceId, ...] = ()  # new leader: victims for whom there is no room
        self.retired: RetiredTables | None = None  # of layers given up whose KV is being sent

    def begin(self) -> None:
        self._going, self._coming, self._told_counts, self._final_counts = {}, [], {}, {}
        self._capacities.leading = None

    def note_final(self, block_count: int) -> None:
        """What this instance is going to have once nothing is left to be sent."""
        self._final_counts[self._role.me] = block_count

    # ------------------------------------------------------------ as the leader before

    def give(self, transition: Transition) -> tuple[Victim, ...]:
        """What this instance has led goes to its new leaders. Returns the victims that it goes on leading itself."""
        now_s = self._clock.now_s
        if transition.plan.kind is TransitionKind.RESTORE:
            self._tell(HandOver(now_s, self._dealt_out(transition)))
            return self._own_victims()
        leader = transition.part.new.leader.worker_id
        if leader == self._role.me:
            return self._own_victims()
        self._tell(HandOver(now_s, leader))
        return ()

    def _dealt_out(self, transition: Transition) -> dict[SequenceId, WorkerId]:
        leaders = sorted({_leader_of(transition, w) for w in members_of(transition.part.old)})
        narrow = self._capacities.smallest_narrow
        views = [MemberView(leader, narrow, self._max_running_count) for leader in leaders]
        placed = place(self._core.placements(), views)
        return {sequence_id: to for sequence_id, to in placed.items() if to != self._role.me}

    def _own_victims(self) -> tuple[Victim, ...]:
        return tuple(Victim(i, count, self._role.me) for i, count in sorted(self._core.kv_tokens.items()))

    def handed_over(self, command: HandedOver) -> None:
        for to, snapshots in command.snapshots:
            self._going[to] = snapshots

    def send(self, epoch: Epoch, to: WorkerId) -> None:
        me, snapshots = self._role.me, self._going.pop(to, ())
        size_bytes = CONTROL_BYTES + sum(
            _TOKEN_BYTES * (len(s.prompt_token_ids) + len(s.output_token_ids)) for s in snapshots
        )
        counts = self._book.block_count, self._final_counts[me]
        self._voice.tell(to, lambda m: m.handover(epoch, me, snapshots, counts), size_bytes)

    # ------------------------------------------------------------ as the leader to come

    def has_come_from(self, source: WorkerId) -> bool:
        return source in self._told_counts

    def came(
        self, source: WorkerId, snapshots: tuple[SequenceSnapshot, ...], counts: tuple[int, int]
    ) -> tuple[Victim, ...]:
        """`counts` of the sender's blocks: now, and once nothing is left to be sent."""
        self._coming.extend(snapshots)
        self._told_counts[source], self._final_counts[source] = counts
        return tuple(Victim(s.sequence_id, s.computed_tokens, source) for s in snapshots if s.computed_tokens)

    def lead(self, transition: Transition, victims: tuple[Victim, ...], progress: Progress) -> Decision:
        """All members are ready. Who finds no room in the smallest stage waits for it, or starts over."""
        members = members_of(transition.part.new)
        self._capacities.add({peer: count for peer, count in self._told_counts.items() if peer in members})
        in_the_end = {peer: count for peer, count in self._final_counts.items() if peer in members}
        mine = {*self._core.sequence_ids, *(snapshot.sequence_id for snapshot in self._coming)}
        self._stay(mine)
        lent = 0 if self._role.stages else lent_count(self._book, self._memory.home_block_count, mine)
        leading = Leading(self._role.me, transition.plan, transition.part, self._core, self._block_tokens)
        self._capacities.leading = leading
        decision = leading.lead(self._clock.now_s, victims, self._coming, self._capacities.counts, in_the_end, lent)
        progress.victim_count, progress.victims_waiting = decision.victim_count, decision.victim_count
        self._carry_out(decision, progress)
        self._coming = []
        for sequence_id in decision.recomputed:  # for those who keep their KV
            self._book.release(sequence_id)
        self._stay(mine.difference(decision.recomputed))  # which may have been in their way
        return decision

    def lead_on(self, progress: Progress) -> Decision:
        """All members are through with the wave before, and have told what room they have."""
        leading = self._capacities.leading
        if leading is None:
            raise InvariantViolation("a wave is over and no victims have been led")
        decision = leading.lead_on(self._clock.now_s, self._capacities.counts)
        self._carry_out(decision, progress)
        return decision

    def _carry_out(self, decision: Decision, progress: Progress) -> None:
        for event in decision.events:
            self._tell(event)
        self._recomputed = decision.recomputed
        self.forget_retired(decision.recomputed)
        progress.waves += 1
        progress.victims_recomputed += len(decision.wave.lost)
        progress.victims_waiting -= len(decision.wave.lost)

    # ------------------------------------------------------------ rosters

    def send_roster(self, command: SendRoster) -> None:
        roster = RosterReceived(
            self._clock.now_s, command.epoch, self._role.me, command.victims, command.wave, last=command.last
        )
        recomputed = self._recomputed
        if command.wave:
            self.pass_wave_on(roster, recomputed)
            return
        for name in command.to:
            self._voice.tell(name, lambda m: m.roster(roster, recomputed))

    def pass_wave_on(self, roster: RosterReceived, recomputed: tuple[SequenceId, ...]) -> None:
        """Behind the batches that have freed the blocks which it takes."""
        self._voice.pass_on(lambda m: m.later_roster(roster, recomputed))

    def forget_retired(self, sequence_ids: tuple[SequenceId, ...]) -> None:
        if self.retired is not None:
            self.retired.forget(sequence_ids)


def _leader_of(transition: Transition, worker_id: WorkerId) -> WorkerId:
    group = group_of(transition.plan.target, worker_id)
    if group is None:
        raise InvariantViolation(f"{worker_id} is in no group of epoch {transition.epoch}")
    return group.leader.worker_id

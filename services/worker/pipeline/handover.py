"""Sequences that change hands in a transition: who goes where, who has come, and who keeps their KV."""

from collections.abc import Mapping, Sequence

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import members_of
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.events import Adopted, HandedOver, HandOver, KvAdmitted, KvLost, OfLeaving
from services.worker.core.leading import Decision, Leading
from services.worker.core.plan import Victim
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import SendRoster
from services.worker.links.traffic import TrafficClass
from services.worker.pipeline.capacity import Capacities
from services.worker.pipeline.events import HandoverArrived
from services.worker.pipeline.ground import Ground
from services.worker.pipeline.status import Progress
from services.worker.pipeline.wire import Topic, roster_to_bytes, snapshot_to_proto


class Handover:
    """`begin` with every plan."""

    def __init__(
        self,
        ground: Ground,
        capacities: Capacities,
    ) -> None:
        self._role = ground.role
        self._links = ground.links
        self._capacities = capacities
        self._ground = ground
        self._memory = ground.memory
        self._tell = ground.answers.tell
        self._going: dict[WorkerId, tuple[SequenceSnapshot, ...]] = {}  # by the leader they go to
        self._coming: list[SequenceSnapshot] = []  # new leader: handed over to it
        self._by_tokens: list[SequenceSnapshot] = []  # likewise, of a group that dissolves
        self._told_counts: dict[WorkerId, int] = {}  # blocks of those who have, perhaps before this worker's take-up
        self._final_counts: dict[WorkerId, int] = {}  # when all KV of layers given up has been sent
        self._recomputed: tuple[SequenceId, ...] = ()  # new leader: victims for whom there is no room
        self._leading: Leading | None = None

    def begin(self) -> None:
        self._going, self._coming, self._told_counts, self._final_counts = {}, [], {}, {}
        self._leading = None
        self._by_tokens = []

    def note_final(self, block_count: int) -> None:
        """What this worker is going to have when all KV of layers given up has been sent."""
        self._final_counts[self._role.me] = block_count

    # ------------------------------------------------------------ as the leader before

    def give(self, leader: WorkerId, now_s: float) -> tuple[Victim, ...]:
        """What this worker has led goes to the leader of its new group; if that is itself, its victims stay."""
        if leader == self._role.me:
            return self._own_victims()
        self._hand_over(HandOver(now_s, leader))
        return ()

    def _hand_over(self, event: HandOver | OfLeaving) -> None:
        for command in self._tell(event):
            if isinstance(command, HandedOver):
                self._going |= dict(command.snapshots)

    def send_away(self, epoch: Epoch, going: Mapping[SequenceId, WorkerId], now_s: float) -> None:
        """Some of a group that dissolves go to their new leaders, by their tokens; others may follow."""
        self._hand_over(OfLeaving(now_s, HandOver(now_s, going, by_tokens=True)))
        for to in sorted(self._going):
            self.send(epoch, to, more=True)

    def _own_victims(self) -> tuple[Victim, ...]:
        return tuple(Victim(i, count, self._role.me) for i, count in sorted(self._ground.lane.kv_tokens.items()))

    def send(self, epoch: Epoch, to: WorkerId, *, more: bool = False) -> None:
        body = pb.Handover(
            epoch=epoch,
            sequences=[snapshot_to_proto(snapshot) for snapshot in self._going.pop(to, ())],
            block_count=self._ground.book.block_count,
            final_block_count=self._final_counts.get(self._role.me, 0),
            more=more,
        )
        self._links.send(to, TrafficClass.CONTROL, Topic.HANDOVER, body.SerializeToString())

    # ------------------------------------------------------------ as the leader to come

    def give_leaving(self, going: Mapping[SequenceId, WorkerId], now_s: float) -> None:
        """The sequences that are left in a group that dissolves go to their new leaders, with their KV."""
        if going:
            self._hand_over(OfLeaving(now_s, HandOver(now_s, going)))

    def lead_alone(self, victims: Sequence[Victim], now_s: float, *, complete: bool) -> tuple[Victim, ...]:
        """All members are ready: takes in what has come of the group that dissolves. Returns the victims that keep
        their KV: if that is `complete`, those for which there is room. What this worker has led itself comes first.
        """
        lane, tokens = self._ground.lane, self._memory.kv.shape.block_tokens
        mine, alive = {v.sequence_id: v for v in victims if v.old_leader == self._role.me}, set(lane.sequence_ids)
        counts = {s.sequence_id: s.token_count for s in lane.sequences if s.sequence_id in mine.keys() & alive}
        for snapshot in sorted(self._coming, key=lambda s: (s.priority.rank, -s.age_s)):
            counts[snapshot.sequence_id] = len(snapshot.prompt_token_ids) + len(snapshot.output_token_ids)
        # What has left the lane holds its blocks until the next batch.
        free_blocks = min(lane.free_block_count, self._ground.book.free_count) if complete else -1
        with_kv, kept = {v.sequence_id: v for v in victims}, list[Victim]()
        for sequence_id, count in counts.items():
            if sequence_id in with_kv and (need := blocks_for(count + 1, tokens)) <= free_blocks:
                free_blocks -= need
                kept.append(with_kv[sequence_id])
        kept_ids = frozenset(victim.sequence_id for victim in kept)
        lost_ids = frozenset(with_kv) - kept_ids
        coming, self._coming = tuple(self._coming), []
        self._recomputed = tuple(sorted(lost_ids))
        for sequence_id in sorted(mine.keys() - kept_ids):
            self._tell(KvLost(now_s, sequence_id))
        self._tell(KvAdmitted(now_s, kept_ids & mine.keys()))
        self._tell(Adopted(now_s, coming, kept_ids, lost_ids, last=True))
        return tuple(sorted(kept, key=lambda victim: victim.sequence_id))

    def adopt_by_tokens(self, now_s: float) -> None:
        """Takes in the sequences that have come of a group that dissolves: they are computed anew."""
        coming, self._by_tokens = tuple(self._by_tokens), []
        if coming:
            self._tell(Adopted(now_s, coming, by_tokens=True))

    def some_came(self, event: HandoverArrived) -> None:
        """Others follow."""
        self._by_tokens.extend(event.snapshots)

    def has_come_from(self, source: WorkerId) -> bool:
        return source in self._told_counts

    def came(self, event: HandoverArrived) -> tuple[Victim, ...]:
        self._coming.extend(event.snapshots)
        self._told_counts[event.source] = event.block_count
        self._final_counts[event.source] = event.final_block_count
        return tuple(
            Victim(s.sequence_id, s.computed_tokens, event.source) for s in event.snapshots if s.computed_tokens
        )

    def lead(self, transition: Transition, victims: Sequence[Victim], progress: Progress, now_s: float) -> Decision:
        """All members are ready. Who finds no room in the smallest stage waits for it, or starts over."""
        members = members_of(transition.part.new)
        self._capacities.add({peer: count for peer, count in self._told_counts.items() if peer in members})
        in_the_end = {peer: count for peer, count in self._final_counts.items() if peer in members}
        size = self._memory.kv.shape.block_tokens
        leading = self._leading = Leading(self._role.me, transition.plan, transition.part, self._ground.lane, size)
        decision = leading.lead(now_s, victims, self._coming, self._capacities.counts, in_the_end)
        self._capacities.leading = leading
        progress.victim_count = progress.victims_waiting = decision.victim_count
        self._carry_out(decision, progress)
        self._coming = []
        for sequence_id in decision.recomputed:  # for those who keep their KV
            self._ground.book.release(sequence_id)
        return decision

    def lead_on(self, progress: Progress, now_s: float) -> Decision:
        """All members are through with the wave before, and have told what room they have."""
        if self._leading is None:
            raise InvariantViolation("a wave is over and no victims have been led")
        decision = self._leading.lead_on(now_s, self._capacities.counts)
        self._carry_out(decision, progress)
        return decision

    def _carry_out(self, decision: Decision, progress: Progress) -> None:
        for event in decision.events:
            self._tell(event)
        self._recomputed = decision.recomputed
        progress.waves += 1
        progress.victims_recomputed += len(decision.wave.lost)
        progress.victims_waiting -= len(decision.wave.lost)

    def send_roster(self, roster: SendRoster) -> None:
        if roster.wave:
            self.pass_wave_on(roster.epoch, roster.victims, self._recomputed, roster.wave, last=roster.last)
            return
        body = roster_to_bytes(roster.epoch, roster.victims, self._recomputed, 0, last=roster.last)
        for member in roster.to:
            self._links.send(member, TrafficClass.CONTROL, Topic.ROSTER, body)

    def pass_wave_on(
        self,
        epoch: Epoch,
        victims: tuple[Victim, ...],
        recomputed: tuple[SequenceId, ...],
        wave: int,
        *,
        last: bool,
    ) -> None:
        """Down the pipeline, behind the batches that have freed the blocks which this wave takes."""
        if not self._role.is_last:
            body = roster_to_bytes(epoch, victims, recomputed, wave, last=last)
            self._links.send(self._role.next_stage, TrafficClass.ACTIVATION, Topic.WAVE, body)

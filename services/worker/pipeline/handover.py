"""Sequences that change leaders in a transition: which leave, which arrive, and which keep their KV."""

from collections.abc import Iterable, Sequence

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import members_of
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.events import Adopted, HandedOver, HandOver, OfLeaving, RoomWanted
from services.worker.core.logged import LoggedTokens
from services.worker.core.plan import Victim
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import SendRoster
from services.worker.core.waves import Decision, Leading
from services.worker.links.traffic import TrafficClass
from services.worker.pipeline.context import MemberContext
from services.worker.pipeline.events import HandoverArrived
from services.worker.pipeline.progress import TransitionProgress
from services.worker.pipeline.wire import SNAPSHOT, Topic, roster_to_bytes


class Handover:
    """Handovers of one plan; `begin` resets this object for the next one."""

    def __init__(self, context: MemberContext) -> None:
        self._role = context.role
        self._links = context.links
        self._context = context
        self._memory = context.memory
        self._tell = context.answers.tell
        self._going: dict[WorkerId, tuple[SequenceSnapshot, ...]] = {}  # new leader -> sequences to hand over to it
        self._coming: list[SequenceSnapshot] = []  # on a new leader: sequences handed over to it
        self._by_tokens: list[SequenceSnapshot] = []  # on a new leader: sequences of a draining group, without KV
        self._told_counts: dict[WorkerId, int] = {}  # member -> its blocks, as reported
        self._final_counts: dict[WorkerId, int] = {}  # member -> its blocks once KV of dropped layers has been sent
        self._recomputed: tuple[SequenceId, ...] = ()  # on a new leader: sequences to be recomputed
        self._leading: Leading | None = None
        self._lacking: set[SequenceId] = set()  # sequences that a stand-in cannot continue; on a leader: of all members

    def begin(self) -> None:
        self._going, self._coming, self._told_counts, self._final_counts = {}, [], {}, {}
        self._leading = None
        self._by_tokens = []
        self._lacking = set()

    def keep_only(self, transition: Transition, log: LoggedTokens | None, *, gives: bool) -> None:
        """Release the blocks of batches that were lost with a stage, and of sequences that have ended since. Called
        before the take-up that replaces the stage. `gives`: the stand-in computes from this worker's log.
        """
        kept = self._own_victims() if transition.led_before else transition.kept
        size, book = self._memory.kv.shape.block_tokens, self._context.book
        tokens = {victim.sequence_id: victim.computed_tokens for victim in kept}
        for sequence_id, count in tokens.items():
            logged = not gives or (log is not None and log.covers(book, sequence_id, count))
            if len(book.table(sequence_id)) * size < count or not logged:
                self._lacking.add(sequence_id)
        for sequence_id in book.sequence_ids:
            book.trim(sequence_id, tokens.get(sequence_id, 0))
        if log is not None:
            log.forget_numbers()

    def end_for(self, epoch: Epoch, followers: Iterable[WorkerId]) -> None:
        """Notify each follower of a broken pipeline directly that the epoch has ended, and which sequences are kept."""
        body = roster_to_bytes(SendRoster(epoch, self._own_victims(), ()), ())
        for to in followers:
            self._links.send(to, TrafficClass.CONTROL, Topic.EPOCH_ENDED, body, stream=epoch)

    def note_final(self, block_count: int) -> None:
        """Record the number of blocks that this worker will have once all KV of dropped layers has been sent."""
        self._final_counts[self._role.me] = block_count

    # ------------------------------------------------------------ the old leader

    def give(self, leader: WorkerId, now_s: float) -> tuple[Victim, ...]:
        """Hand over this worker's sequences to the leader of its new group, or keep them if it is that leader."""
        if leader == self._role.me:
            return self._own_victims()
        self._hand_over(HandOver(now_s, leader))
        return ()

    def _hand_over(self, event: HandOver | OfLeaving) -> None:
        for command in self._tell(event):
            if isinstance(command, HandedOver):
                self._going |= dict(command.snapshots)

    def send_away(self, epoch: Epoch, event: OfLeaving) -> None:
        """Hand over sequences of a draining group. Those without KV are sent at once, and more may follow; those with
        KV are sent by the next `send`.
        """
        self._hand_over(event)
        for to in sorted(self._going) if isinstance(event.event, HandOver) and event.event.by_tokens else ():
            self.send(epoch, to, more=True)

    def _own_victims(self) -> tuple[Victim, ...]:
        return self._context.group_scheduler.own_victims(self._role.me)

    def send(self, epoch: Epoch, to: WorkerId, *, more: bool = False) -> None:
        body = pb.Handover(
            epoch=epoch,
            sequences=[SNAPSHOT.message(snapshot) for snapshot in self._going.pop(to, ())],
            block_count=self._context.book.block_count,
            final_block_count=self._final_counts.get(self._role.me, 0),
            more=more,
            lacking=sorted(self._lacking),
        )
        self._links.send(to, TrafficClass.CONTROL, Topic.HANDOVER, body.SerializeToString())

    # ------------------------------------------------------------ the new leader

    def adopt_by_tokens(self, now_s: float) -> None:
        """Adopt sequences of a draining group for recomputation."""
        coming, self._by_tokens = tuple(self._by_tokens), []
        if coming:
            self._tell(Adopted(now_s, coming))

    def on_partial_handover(self, event: HandoverArrived) -> None:
        """Record sequences of a draining group, which hands over in several parts."""
        self._by_tokens.extend(event.snapshots)

    def is_complete_from(self, source: WorkerId) -> bool:
        return source in self._told_counts

    def came(self, event: HandoverArrived) -> tuple[Victim, ...]:
        self._coming.extend(event.snapshots)
        self._told_counts[event.source] = event.block_count
        self._final_counts[event.source] = event.final_block_count
        self._lacking.update(event.lacking)
        return tuple(
            Victim(s.sequence_id, s.computed_tokens, event.source, s.shared_blocks)
            for s in event.snapshots
            if s.computed_tokens
        )

    def lead(
        self, transition: Transition, victims: Sequence[Victim], progress: TransitionProgress, now_s: float
    ) -> Decision:
        """Adopt the sequences when all members are ready. Those without room on the smallest stage wait for it, or are
        recomputed.
        """
        group_scheduler, book, size = (
            self._context.group_scheduler,
            self._context.book,
            self._memory.kv.shape.block_tokens,
        )
        leading = self._leading = Leading(self._role.me, transition.plan, transition.part, group_scheduler, size)
        if transition.part.dissolves:
            # Ended sequences still hold their blocks until the next batch, and retained prefixes are evicted.
            wanted = sum(blocks_for(victim.computed_tokens, size) for victim in victims)
            self._tell(RoomWanted(now_s, wanted))
            free_blocks = -1 if transition.lost else min(group_scheduler.free_block_count, book.free_count)
            decision = leading.lead_alone(now_s, victims, self._coming, free_blocks)
            progress.halted_at_s = now_s
        else:
            members = members_of(transition.part.new)
            counts = self._context.room.counts
            counts |= {peer: count for peer, count in self._told_counts.items() if peer in members}
            in_the_end = {peer: count for peer, count in self._final_counts.items() if peer in members}
            decision = leading.lead(now_s, victims, self._coming, counts, in_the_end, self._lacking)
            progress.victim_count, progress.waves = decision.victim_count, 1
        progress.victims_waiting = decision.victim_count
        self._context.room.leading = leading
        self._carry_out(decision, progress)
        self._coming = []
        for sequence_id in decision.recomputed:  # release their blocks for sequences that keep their KV
            book.release(sequence_id)
        return decision

    def lead_on(self, progress: TransitionProgress, now_s: float) -> Decision:
        """Lead the next wave, once all members have completed the previous one and reported their capacity."""
        if self._leading is None:
            raise InvariantViolation("a wave has ended, but no victims were led")
        decision = self._leading.lead_on(now_s, self._context.room.counts)
        progress.waves += 1
        self._carry_out(decision, progress)
        return decision

    def _carry_out(self, decision: Decision, progress: TransitionProgress) -> None:
        for event in decision.events:
            self._tell(event)
        self._recomputed = decision.recomputed
        progress.victims_recomputed += len(decision.wave.lost)
        progress.victims_waiting -= len(decision.wave.lost)

    def send_roster(self, roster: SendRoster) -> None:
        """Send a roster. The first is sent to each member, later ones down the pipeline after the batches that free
        blocks.
        """
        body = roster_to_bytes(roster, self._recomputed)
        if roster.wave:
            self._links.pass_down(Topic.WAVE, body)
            return
        for member in roster.to:
            self._links.send(member, TrafficClass.CONTROL, Topic.ROSTER, body)

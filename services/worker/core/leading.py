"""What the leader of a new group tells its core about victims: which keep KV, which wait for room, which start over.

`core.waves` decides; here is what it means for the core, in the order in which the core has to hear it. Its lane is
only read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ballast.common.ids import WorkerId
from ballast.common.layout import members_of
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.events import (
    AdmissionLimited,
    Adopted,
    CapacityChanged,
    Event,
    KvAdmitted,
    KvLost,
    KvTravels,
)
from services.worker.core.lane import Lane
from services.worker.core.plan import Part, Plan, Victim, transfers
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.waves import Wave, Waves, may_wait, standing_of


@dataclass(frozen=True, slots=True)
class Decision:
    wave: Wave
    events: tuple[Event, ...]  # for the core
    recomputed: tuple[SequenceId, ...]  # KV of these is needed no more: those that start over, and that have ended
    victim_count: int


class Leading:
    """The leader's part in one transition: `lead`, then `lead_on` whenever all members are through with a wave."""

    def __init__(self, me: WorkerId, plan: Plan, part: Part, lane: Lane, block_tokens: int) -> None:
        self._me = me
        self._plan = plan
        self._members = members_of(part.new)
        self._may_wait = may_wait(plan, part)
        self._lane = lane
        self._block_tokens = block_tokens
        self._waves = Waves(self._members, ())
        self._in_the_end = 0  # blocks of the smallest stage

    @property
    def waiting_ids(self) -> frozenset[SequenceId]:
        return self._waves.waiting_ids

    def lead(
        self,
        now_s: float,
        victims: Sequence[Victim],
        coming: Sequence[SequenceSnapshot],
        counts: Mapping[WorkerId, int],
        counts_in_the_end: Mapping[WorkerId, int],
    ) -> Decision:
        """All members are ready. `counts`: blocks of each stage, now and when nothing is left to be sent."""
        alive = self._lane.kv_tokens  # own ones may have ended since they were counted
        gone_ids = {v.sequence_id for v in victims if v.old_leader == self._me} - alive.keys()
        present = [v for v in victims if v.sequence_id not in gone_ids]
        self._in_the_end = min((counts_in_the_end if self._may_wait else counts).values())
        weights = {
            **self._lane.weights(),
            **{snapshot.sequence_id: self._weight(snapshot, now_s) for snapshot in coming},
        }
        standings = [
            standing_of(self._plan, victim, self._members, *weights[victim.sequence_id], self._block_tokens)
            for victim in present
        ]
        self._waves = Waves(self._members, standings)
        wave = self._waves.first(counts, self._in_the_end)
        waiting, lost_ids = self._waves.waiting_ids, {v.sequence_id for v in wave.lost}
        kept = [v for v in present if v.sequence_id not in lost_ids]
        moving = frozenset(v.sequence_id for v in kept if transfers(self._plan, v, self._me)) | waiting
        own = frozenset(v.sequence_id for v in present if v.old_leader == self._me)
        events: list[Event] = [
            AdmissionLimited(now_s, None if wave.last else 0),
            KvTravels(now_s, own, waiting & own),
            self.capacity(now_s, counts),
            *(KvLost(now_s, sequence_id) for sequence_id in sorted(own & lost_ids)),
            Adopted(now_s, tuple(coming), moving - own, frozenset(lost_ids - own), True, waiting - own),
        ]
        return Decision(wave, tuple(events), tuple(sorted(lost_ids | gone_ids)), len(present))

    def lead_on(self, now_s: float, counts: Mapping[WorkerId, int]) -> Decision:
        """The room of the waves so far has been given back; nothing travels."""
        gone = self._waves.waiting_ids - set(self._lane.sequence_ids)
        wave = self._waves.next(counts, self._lane.reserved_block_count, gone)
        lost_ids = sorted(v.sequence_id for v in wave.lost)
        events: list[Event] = [
            *(KvLost(now_s, sequence_id) for sequence_id in lost_ids),
            self.capacity(now_s, counts),  # and the stages hear what is free
            KvAdmitted(now_s, frozenset(v.sequence_id for v in wave.admitted)),
        ]
        if wave.last:
            events.append(AdmissionLimited(now_s, None))
        return Decision(wave, tuple(events), tuple(lost_ids), 0)

    def capacity(self, now_s: float, counts: Mapping[WorkerId, int]) -> CapacityChanged:
        """What there is, less what those that wait hold on some stages."""
        smallest, held_blocks = self._waves.lent_blocks(counts)
        before = self._in_the_end if self._waves.waiting_ids else 0
        return CapacityChanged(now_s, smallest, held_blocks, before)

    def _weight(self, snapshot: SequenceSnapshot, now_s: float) -> tuple[int, float, int]:
        """See `Lane.weights`."""
        token_count = len(snapshot.prompt_token_ids) + len(snapshot.output_token_ids)
        return snapshot.priority.rank, now_s - snapshot.age_s, blocks_for(token_count, self._block_tokens)

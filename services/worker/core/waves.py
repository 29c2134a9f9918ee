"""Admission of running sequences to a new group, in waves bounded by free blocks (pure).

A sender needs the memory of KV until the KV has been sent. After a drop at full memory all KV fits in the end, but not
while it is stored twice, so sequences move in waves. Those of the first wave reserve blocks at once. The others are
suspended, and their KV stays in place; meanwhile they hold blocks on stages that keep some of their layers. When a wave
has been sent and received, its senders free its room, and as many other sequences as fit form the next wave. No KV is
being transferred between two waves, so all counts are exact.

Every wave makes progress: if no sequence fits, the last in the order of service drops its KV and is recomputed.
Sequences that would not fit in the end are dropped at once, in the order of `policy.preemption`: the latest arrival of
the lowest class first.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from ballast.common.layout import group_of, members_of
from ballast.common.transition import TransitionKind
from services.worker.core.batch import BlockNumber, SequenceId
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
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.plan import Plan, PlanPart, Victim, refills, shared_numbers, transfers
from services.worker.core.snapshot import SequenceSnapshot

_SPARE_BLOCKS = 1  # per sequence of a wave, for tokens that it generates while others wait


@dataclass(frozen=True, slots=True)
class MovedSequence:
    """A sequence to be moved, as its new leader sees it."""

    victim: Victim
    rank: int  # rank of its priority class; a higher rank is less important
    arrival: tuple[float, SequenceId]
    need_blocks: int  # blocks on every stage of the group once admitted, without those in `shared`
    held_blocks: int  # blocks on each of `holders` until it is admitted, without those in `shared`
    holders: frozenset[WorkerId]  # stages of the group on which it has blocks already
    shared: frozenset[BlockNumber] = frozenset()  # blocks counted once on every stage, even while it waits

    @property
    def order(self) -> tuple[int, tuple[float, SequenceId]]:
        return self.rank, self.arrival


def standing_of(
    plan: Plan,
    victim: Victim,
    members: Collection[WorkerId],
    rank: int,
    arrival_s: float,
    need_blocks: int,
    size: int,
    shared: Collection[BlockNumber] = (),
) -> MovedSequence:
    """Return the victim as its new leader sees it. `members`: of the new group; `size`: tokens of a block."""
    old = members_of(group_of(plan.base, victim.old_leader))
    held_blocks = blocks_for(victim.computed_tokens, size) - len(shared)
    need_blocks = max(need_blocks - len(shared), held_blocks)
    holders = frozenset(old) & frozenset(members)
    return MovedSequence(
        victim, rank, (arrival_s, victim.sequence_id), need_blocks, held_blocks, holders, frozenset(shared)
    )


def may_wait(plan: Plan, part: PlanPart) -> bool:
    """True if a second wave is possible: members drop layers, and all holders of KV are stages of the new group."""
    return plan.kind is TransitionKind.DROP and set(part.roster_to) <= set(members_of(part.new))


@dataclass(frozen=True, slots=True)
class Wave:
    """Waiting sequences that are admitted now, and those that are recomputed. `last`: none waits afterwards."""

    admitted: tuple[Victim, ...]
    lost: tuple[Victim, ...]
    last: bool


class Waves:
    """The sequences that move to one new group, on its leader. Call `first`, then `next` whenever a wave has ended."""

    def __init__(self, stages: Sequence[WorkerId], standings: Iterable[MovedSequence]) -> None:
        self._stages = tuple(stages)
        self._waiting = sorted(standings, key=lambda standing: standing.order)

    @property
    def waiting_ids(self) -> frozenset[SequenceId]:
        return frozenset(standing.victim.sequence_id for standing in self._waiting)

    def lent_blocks(self, counts: Mapping[WorkerId, int]) -> tuple[int, int]:
        """Return the number of blocks of the smallest stage, and how many of them waiting sequences withhold from the
        group.
        """
        held = self._held()
        smallest = min(counts[stage] for stage in self._stages)
        return smallest, smallest - min(counts[stage] - held[stage] for stage in self._stages)

    def first(self, counts: Mapping[WorkerId, int], in_the_end: int) -> Wave:
        """Admit the first wave. `counts`: blocks of each stage; `in_the_end`: blocks of the smallest stage once all KV
        has been sent. A second wave is possible only if that exceeds `counts`.
        """
        kept: list[MovedSequence] = []
        lost: list[Victim] = []
        left, shared = max(in_the_end, min(counts.values())), set[BlockNumber]()
        for standing in self._waiting:
            need_blocks = standing.need_blocks + len(standing.shared - shared)
            if need_blocks <= left:
                left -= need_blocks
                shared |= standing.shared
                kept.append(standing)
            else:
                lost.append(standing.victim)
        self._waiting = kept
        admitted = self._admit(self._room(counts, len(shared)))
        if in_the_end <= min(counts.values()) and self._waiting:
            raise InvariantViolation(f"{len(self._waiting)} victims would fit in the end, but do not fit now")
        return Wave(admitted, tuple(lost), not self._waiting)

    def next(self, counts: Mapping[WorkerId, int], reserved_blocks: int, gone: Collection[SequenceId]) -> Wave:
        """Admit the next wave. `reserved_blocks`: blocks of all running sequences, and shared blocks of waiting ones,
        on every stage; `gone`: waiting sequences that have ended.
        """
        lost = [standing.victim for standing in self._waiting if standing.victim.sequence_id in gone]
        self._waiting = [standing for standing in self._waiting if standing.victim.sequence_id not in gone]
        admitted = self._admit(self._room(counts, reserved_blocks))
        if not admitted and self._waiting:
            lost.append(self._waiting.pop().victim)
            admitted = self._admit(self._room(counts, reserved_blocks))
        return Wave(admitted, tuple(lost), not self._waiting)

    def _held(self) -> dict[WorkerId, int]:
        held = dict.fromkeys(self._stages, 0)
        for standing in self._waiting:
            for stage in standing.holders:
                held[stage] += standing.held_blocks
        return held

    def _room(self, counts: Mapping[WorkerId, int], taken_blocks: int) -> dict[WorkerId, int]:
        held = self._held()
        return {stage: counts[stage] - held[stage] - taken_blocks for stage in self._stages}

    def _admit(self, room: Mapping[WorkerId, int]) -> tuple[Victim, ...]:
        """Admit all waiting sequences if they fit. Otherwise admit some, with blocks to spare, or else at least one, if
        any fits.
        """
        for spare_blocks, enough in ((0, len(self._waiting)), (_SPARE_BLOCKS, 1), (0, 1)):
            found = self._fitting(room, spare_blocks)
            if len(found) >= enough:
                break
        chosen = {standing.victim.sequence_id for standing in found}
        self._waiting = [standing for standing in self._waiting if standing.victim.sequence_id not in chosen]
        return tuple(sorted((standing.victim for standing in found), key=lambda victim: victim.sequence_id))

    def _fitting(self, room: Mapping[WorkerId, int], spare_blocks: int) -> list[MovedSequence]:
        left, found = dict(room), list[MovedSequence]()
        for standing in self._waiting:
            taken = {
                stage: standing.need_blocks + spare_blocks - (standing.held_blocks if stage in standing.holders else 0)
                for stage in self._stages
            }
            if all(taken[stage] <= left[stage] for stage in self._stages):
                found.append(standing)
                for stage in self._stages:
                    left[stage] -= taken[stage]
        return found

    def check(self, counts: Mapping[WorkerId, int]) -> None:
        """Raise InvariantViolation if waiting sequences hold more blocks than there are."""
        for stage, held_blocks in self._held().items():
            if held_blocks > counts[stage]:
                raise InvariantViolation(f"{stage}: {held_blocks} of {counts[stage]} are held by waiting sequences")


@dataclass(frozen=True, slots=True)
class Decision:
    wave: Wave
    events: tuple[Event, ...]  # events for the core, in this order
    recomputed: tuple[SequenceId, ...]  # sequences recomputed or ended, whose KV is not needed
    victim_count: int


class Leading:
    """Decides which moved sequences of a new group keep their KV, wait for room or are recomputed. The decisions are
    events, in the order in which the leader's core must handle them. In a drop, `lead` is called first, then `lead_on`
    whenever all members have completed a wave. For a worker that serves alone after a draining group, `lead_alone` is
    called. The methods only read the group.
    """

    def __init__(
        self, me: WorkerId, plan: Plan, part: PlanPart, group_scheduler: GroupScheduler, block_tokens: int
    ) -> None:
        self._me = me
        self._plan = plan
        self._part = part
        self._members = members_of(part.new)
        self._may_wait = may_wait(plan, part)
        self._group_scheduler = group_scheduler
        self._block_tokens = block_tokens
        self._waves = Waves(self._members, ())
        self._in_the_end = 0  # blocks of the smallest stage once all KV has been sent

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
        lacking: Collection[SequenceId] = (),
    ) -> Decision:
        """Decide about the first wave, when all members are ready. `counts`, `counts_in_the_end`: blocks of each stage,
        now and once all KV has been sent. `lacking`: sequences for which a stage lacks KV, or the activations that a
        stand-in needs.
        """
        alive = self._group_scheduler.kv_tokens  # own sequences may have ended since they were counted
        gone_ids = {v.sequence_id for v in victims if v.old_leader == self._me} - alive.keys()
        present = [v for v in victims if v.sequence_id not in gone_ids]
        self._in_the_end = min((counts_in_the_end if self._may_wait else counts).values())
        without = self._without_kv(present, lacking)
        weights = {
            **self._group_scheduler.weights(),
            **{snapshot.sequence_id: self._weight(snapshot, now_s) for snapshot in coming},
        }
        shared = self._shared(victim for victim in present if victim.sequence_id not in without)
        standings = [
            standing_of(
                self._plan,
                victim,
                self._members,
                *weights[victim.sequence_id],
                self._block_tokens,
                shared.get(victim.sequence_id, ()),
            )
            for victim in present
        ]
        self._waves = Waves(self._members, (one for one in standings if one.victim.sequence_id not in without))
        wave = self._waves.first(counts, self._in_the_end)
        wave = replace(wave, lost=(*wave.lost, *(v for v in present if v.sequence_id in without)))
        waiting, lost_ids = self._waves.waiting_ids, {v.sequence_id for v in wave.lost}
        kept = [v for v in present if v.sequence_id not in lost_ids]
        shared = {sequence_id: numbers for sequence_id, numbers in shared.items() if sequence_id not in lost_ids}
        moved = (v for v in kept if transfers(self._plan, v, self._me) or refills(self._plan, v, self._me))
        moving = frozenset(v.sequence_id for v in moved) | waiting
        own = frozenset(v.sequence_id for v in present if v.old_leader == self._me)
        events: list[Event] = [
            AdmissionLimited(now_s, None if wave.last else 0),
            KvTravels(now_s, own, waiting & own, shared),
            self.capacity(now_s, counts),
            *(KvLost(now_s, sequence_id) for sequence_id in sorted(own & lost_ids)),
            Adopted(now_s, tuple(coming), moving - own, frozenset(lost_ids - own), True, waiting - own, shared=shared),
        ]
        return Decision(wave, tuple(events), tuple(sorted(lost_ids | gone_ids)), len(present))

    def lead_on(self, now_s: float, counts: Mapping[WorkerId, int]) -> Decision:
        """Decide about the next wave, once all members have freed the room of earlier ones and no KV is in transit."""
        gone = self._waves.waiting_ids - set(self._group_scheduler.sequence_ids)
        wave = self._waves.next(counts, self._group_scheduler.reserved_block_count, gone)
        lost_ids = sorted(v.sequence_id for v in wave.lost)
        events: list[Event] = [
            *(KvLost(now_s, sequence_id) for sequence_id in lost_ids),
            self.capacity(now_s, counts),  # notifies the stages of the free blocks
            KvAdmitted(now_s, frozenset(v.sequence_id for v in wave.admitted)),
        ]
        if wave.last:
            events.append(AdmissionLimited(now_s, None))
        return Decision(wave, tuple(events), tuple(lost_ids), 0)

    def lead_alone(
        self, now_s: float, victims: Sequence[Victim], coming: Sequence[SequenceSnapshot], free_blocks: int
    ) -> Decision:
        """Decide when all members are ready. Own sequences precede those handed over to this worker."""
        mine, alive = (
            {v.sequence_id for v in victims if v.old_leader == self._me},
            set(self._group_scheduler.sequence_ids),
        )
        counts = {
            s.sequence_id: s.token_count for s in self._group_scheduler.sequences if s.sequence_id in mine & alive
        }
        for snapshot in sorted(coming, key=lambda s: (s.priority.rank, -s.age_s)):
            counts[snapshot.sequence_id] = snapshot.token_count
        with_kv, kept = {v.sequence_id: v for v in victims}, dict[SequenceId, Victim]()
        shared, counted = self._shared(victims), set[BlockNumber]()
        for sequence_id, count in counts.items():
            numbers = shared.get(sequence_id, ())
            need = blocks_for(count + 1, self._block_tokens) - len(counted.intersection(numbers))
            if sequence_id in with_kv and need <= free_blocks:
                free_blocks -= need
                counted.update(numbers)
                kept[sequence_id] = with_kv[sequence_id]
        shared = {sequence_id: numbers for sequence_id, numbers in shared.items() if sequence_id in kept}
        kept_ids, lost_ids = frozenset(kept), frozenset(with_kv) - kept.keys()
        events: list[Event] = [
            *(KvLost(now_s, sequence_id) for sequence_id in sorted(mine & lost_ids)),
            KvAdmitted(now_s, kept_ids & mine, shared),
            Adopted(now_s, tuple(coming), kept_ids, lost_ids, last=True, shared=shared),
        ]
        lost = tuple(with_kv[sequence_id] for sequence_id in sorted(lost_ids))
        wave = Wave(tuple(kept[sequence_id] for sequence_id in sorted(kept)), lost, last=True)
        return Decision(wave, tuple(events), tuple(sorted(lost_ids)), len(victims))

    def _shared(self, victims: Iterable[Victim]) -> dict[SequenceId, tuple[BlockNumber, ...]]:
        """Numbers of shared blocks of victims; empty with a stand-in, which computes each sequence's KV separately."""
        return shared_numbers(() if self._part.lost else victims, self._plan.epoch)

    def _without_kv(self, victims: Iterable[Victim], lacking: Collection[SequenceId]) -> frozenset[SequenceId]:
        """Return the ids of own sequences whose lost KV a stand-in cannot compute: those in `lacking`, those with an
        adapter, which it does not have, and those whose prompt logprobs one engine has to compute.
        """
        if not self._part.lost:
            return frozenset()
        able = {s.sequence_id for s in self._group_scheduler.sequences if not (s.sampling.adapter or s.scores_prompt)}
        own = [v.sequence_id for v in victims if v.old_leader == self._me]
        return frozenset(i for i in own if i not in able or i in lacking)

    def capacity(self, now_s: float, counts: Mapping[WorkerId, int]) -> CapacityChanged:
        """Return the group's number of blocks. Those held on some stages by waiting sequences count as lent."""
        smallest, held_blocks = self._waves.lent_blocks(counts)
        before = self._in_the_end if self._waves.waiting_ids else 0
        return CapacityChanged(now_s, smallest, held_blocks, before)

    def _weight(self, snapshot: SequenceSnapshot, now_s: float) -> tuple[int, float, int]:
        """See `GroupScheduler.weights`."""
        return snapshot.priority.rank, now_s - snapshot.age_s, blocks_for(snapshot.token_count, self._block_tokens)

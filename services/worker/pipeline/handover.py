"""Sequences that change hands in a transition: who goes where, who has come, and who keeps their KV."""

from collections.abc import Callable, Mapping, Sequence

from ballast.common.ids import Epoch, WorkerId
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.events import (
    Adopted,
    CapacityChanged,
    Command,
    Event,
    HandedOver,
    HandOver,
    KvLost,
    KvTravels,
)
from services.worker.core.plan import Victim, members_of, transfers
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.stage import StageBook
from services.worker.core.transition import Transition
from services.worker.core.worker import WorkerCore
from services.worker.memory.device import DeviceMemory
from services.worker.pipeline.capacity import Capacities
from services.worker.pipeline.events import HandoverArrived
from services.worker.pipeline.links import Links
from services.worker.pipeline.role import Role
from services.worker.pipeline.status import Progress
from services.worker.pipeline.wire import Topic, roster_to_bytes, snapshot_to_proto
from services.worker.transport.traffic import TrafficClass


class Handover:
    """`begin` with every plan."""

    def __init__(
        self,
        role: Role,
        links: Links,
        capacities: Capacities,
        *,
        core: WorkerCore,
        book: StageBook,
        memory: DeviceMemory,
        tell: Callable[[Event], list[Command]],
    ) -> None:
        """`core` is only read; `tell` tells it something."""
        self._role = role
        self._links = links
        self._capacities = capacities
        self._core = core
        self._book = book
        self._memory = memory
        self._tell = tell
        self._going: dict[WorkerId, tuple[SequenceSnapshot, ...]] = {}  # by the leader they go to
        self._coming: list[SequenceSnapshot] = []  # new leader: handed over to it
        self._told_counts: dict[WorkerId, int] = {}  # blocks of those who have, perhaps before this worker's take-up
        self._recomputed: tuple[SequenceId, ...] = ()  # new leader: victims for whom there is no room

    def begin(self) -> None:
        self._going, self._coming, self._told_counts = {}, [], {}

    # ------------------------------------------------------------ as the leader before

    def give(self, leader: WorkerId, now_s: float) -> tuple[Victim, ...]:
        """What this worker has led goes to the leader of its new group; if that is itself, its victims stay."""
        if leader == self._role.me:
            return self._own_victims()
        self._hand_over(HandOver(now_s, leader))
        return ()

    def deal_out(self, placed: Mapping[SequenceId, WorkerId], now_s: float) -> tuple[Victim, ...]:
        """Every member becomes a leader of its own and gets its share of the sequences."""
        going = {sequence_id: to for sequence_id, to in placed.items() if to != self._role.me}
        self._hand_over(HandOver(now_s, going))
        return self._own_victims()

    def _hand_over(self, event: HandOver) -> None:
        for command in self._tell(event):
            if isinstance(command, HandedOver):
                self._going |= dict(command.snapshots)

    def _own_victims(self) -> tuple[Victim, ...]:
        return tuple(Victim(i, count, self._role.me) for i, count in sorted(self._core.kv_tokens.items()))

    def send(self, epoch: Epoch, to: WorkerId) -> None:
        body = pb.Handover(
            epoch=epoch,
            sequences=[snapshot_to_proto(snapshot) for snapshot in self._going.pop(to, ())],
            block_count=self._book.block_count,
            home_block_count=self._memory.home_block_count,
        )
        self._links.send(to, TrafficClass.CONTROL, Topic.HANDOVER, body.SerializeToString())

    # ------------------------------------------------------------ as the leader to come

    def has_come_from(self, source: WorkerId) -> bool:
        return source in self._told_counts

    def came(self, event: HandoverArrived) -> tuple[Victim, ...]:
        self._coming.extend(event.snapshots)
        self._told_counts[event.source] = event.block_count
        self._capacities.note_home(event.source, event.home_block_count)
        return tuple(
            Victim(s.sequence_id, s.computed_tokens, event.source) for s in event.snapshots if s.computed_tokens
        )

    def lead(
        self, transition: Transition, victims: Sequence[Victim], progress: Progress, now_s: float
    ) -> tuple[Victim, ...]:
        """All members are ready. Whoever finds no room in the smallest stage starts over; the youngest first.

        Returns those who keep their KV.
        """
        me = self._role.me
        alive = self._core.kv_tokens  # own ones may have ended since they were counted
        gone_ids = {v.sequence_id for v in victims if v.old_leader == me} - alive.keys()
        victims = [v for v in victims if v.sequence_id not in gone_ids]
        members = members_of(transition.part.new)
        self._capacities.add({peer: count for peer, count in self._told_counts.items() if peer in members})
        capacity = self._capacities.smallest
        lent = 0 if self._role.stages else self._foreign_block_count()
        kept, lost = _fitting(victims, capacity - lent, self._memory.kv.shape.block_tokens)
        moving = frozenset(v.sequence_id for v in kept if transfers(transition.plan, v, me))
        own = frozenset(v.sequence_id for v in victims if v.old_leader == me)
        lost_ids = frozenset(v.sequence_id for v in lost)
        self._tell(KvTravels(now_s, own))
        self._tell(CapacityChanged(now_s, capacity, lent))
        for sequence_id in sorted(own & lost_ids):
            self._tell(KvLost(now_s, sequence_id))
        self._tell(Adopted(now_s, tuple(self._coming), moving - own, lost_ids - own, last=True))
        self._coming = []
        for sequence_id in sorted(lost_ids):  # for those who keep their KV
            self._book.release(sequence_id)
        self._recomputed = tuple(sorted(lost_ids | gone_ids))
        progress.victim_count, progress.victims_recomputed = len(victims), len(lost)
        progress.victims_waiting = len(kept)
        return kept

    def _foreign_block_count(self) -> int:
        """Blocks of sequences that others lead now, still here because their KV is being sent."""
        mine = {*self._core.sequence_ids, *(snapshot.sequence_id for snapshot in self._coming)}
        return sum(len(self._book.table(i)) for i in self._book.sequence_ids if i not in mine)

    def send_roster(self, epoch: Epoch, victims: tuple[Victim, ...], to: Sequence[WorkerId]) -> None:
        body = roster_to_bytes(epoch, victims, self._recomputed)
        for member in to:
            self._links.send(member, TrafficClass.CONTROL, Topic.ROSTER, body)


def _fitting(
    victims: Sequence[Victim], block_count: int, block_tokens: int
) -> tuple[tuple[Victim, ...], tuple[Victim, ...]]:
    """Who fits, and who does not."""
    kept: list[Victim] = []
    lost: list[Victim] = []
    used = 0
    for victim in sorted(victims, key=lambda v: v.sequence_id):
        blocks = blocks_for(victim.computed_tokens + 1, block_tokens)
        if used + blocks <= block_count:
            used += blocks
            kept.append(victim)
        else:
            lost.append(victim)
    return tuple(kept), tuple(lost)

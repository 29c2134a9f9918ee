"""Assigns sequences to members when a group dissolves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ballast.common.ids import WorkerId


@dataclass(frozen=True, slots=True)
class PlacementView:
    """A sequence to be placed."""

    sequence_id: int
    block_count: int  # blocks that it holds, or would need
    running: bool  # True: takes one of the running places


@dataclass(frozen=True, slots=True)
class MemberView:
    worker_id: WorkerId
    block_count: int  # free blocks after the group has dissolved
    running_count: int  # free running places


def place(
    sequences: Sequence[PlacementView],
    members: Sequence[MemberView],
    chosen: Mapping[int, WorkerId] = MappingProxyType({}),
) -> dict[int, WorkerId]:
    """Return the member for every sequence. Larger sequences are placed first, each on the member with the most free
    blocks.

    The fullest member then exceeds the emptiest by at most one sequence. A running sequence that fits on no member is
    assigned to the one with the most room, and recomputed later. `chosen`: members that already have some of a
    sequence's KV, which are preferred while they have room.
    """
    left_blocks = [member.block_count for member in members]
    left_places = [member.running_count for member in members]
    index_of = {member.worker_id: i for i, member in enumerate(members)}
    placed: dict[int, WorkerId] = {}

    def fits(view: PlacementView, i: int) -> bool:
        return not view.running or (left_places[i] > 0 and left_blocks[i] >= view.block_count)

    def put(view: PlacementView, i: int) -> None:
        left_blocks[i] -= view.block_count
        left_places[i] -= view.running
        placed[view.sequence_id] = members[i].worker_id

    def best(view: PlacementView) -> int:
        return max(range(len(members)), key=lambda i: (fits(view, i), left_blocks[i], left_places[i], -i))

    ordered = sorted(sequences, key=lambda v: (not v.running, -v.block_count, v.sequence_id))
    for view in ordered:
        i = index_of.get(chosen.get(view.sequence_id, _NOBODY))
        if i is not None and fits(view, i):
            put(view, i)
    for view in ordered:
        if view.sequence_id not in placed:
            put(view, best(view))
    return placed


_NOBODY = WorkerId("")

"""Which member takes which sequence when a group dissolves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ballast.common.ids import WorkerId


@dataclass(frozen=True, slots=True)
class PlacementView:
    """A sequence that looks for a place."""

    sequence_id: int
    block_count: int  # that it holds, or would need if it waits
    running: bool  # takes a place among the running ones


@dataclass(frozen=True, slots=True)
class MemberView:
    worker_id: WorkerId
    block_count: int  # free for them when the group has dissolved
    running_count: int  # places for running sequences


def place(
    sequences: Sequence[PlacementView],
    members: Sequence[MemberView],
    chosen: Mapping[int, WorkerId] = MappingProxyType({}),
) -> dict[int, WorkerId]:
    """Every sequence's member. The largest goes first, always to where most blocks are left.

    That leaves the fullest member at most one sequence above the emptiest. Where no member has a place for a running
    sequence it still goes to the one with most room, which computes it again later. `chosen` says where some of their
    KV has been copied to: they go there as long as there is room, before all others.
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

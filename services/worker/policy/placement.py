"""Which member takes which sequence when a group dissolves."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def place(sequences: Sequence[PlacementView], members: Sequence[MemberView]) -> dict[int, WorkerId]:
    """Every sequence's member. The largest goes first, always to where most blocks are left.

    That leaves the fullest member at most one sequence above the emptiest. Where no member has a place for a running
    sequence it still goes to the one with most room, which computes it again later.
    """
    left_blocks = [member.block_count for member in members]
    left_places = [member.running_count for member in members]
    placed: dict[int, WorkerId] = {}
    for view in sorted(sequences, key=lambda v: (not v.running, -v.block_count, v.sequence_id)):
        best = max(
            range(len(members)),
            key=lambda i: (
                not view.running or (left_places[i] > 0 and left_blocks[i] >= view.block_count),
                left_blocks[i],
                left_places[i],
                -i,
            ),
        )
        left_blocks[best] -= view.block_count
        left_places[best] -= view.running
        placed[view.sequence_id] = members[best].worker_id
    return placed

"""How a group that dissolves gives its memory to the members' own sequences, and when what is left in it goes."""

from collections.abc import Sequence

LEAVES_WITHIN_S = 10.0  # from the commit on; what then still runs in the group goes to a member with its KV
# Times as long without any that leaves, where there is no room for that: it is computed anew then. Long, unless the
# member that has led the group is short of memory.
_PATIENCE, _PATIENCE_IF_SHORT = 60, 12
ROOM_SHARE = 0.75  # of a member's memory: the rest is for what it has begun by itself
STEPS = 8  # in which the group gives up its blocks: each makes every stage move some
# Kept for each sequence that runs, to grow into: one that finds no room is computed anew. A long one has outlived most,
# and a share of its length is kept if that is more.
_AHEAD_TOKENS, AHEAD_SHARE = 256, 0.5


def tightened(limit_blocks: int, first_blocks: int, reserved_blocks: int, running_count: int, block_tokens: int) -> int:
    """The blocks that the group keeps, of the `first_blocks` that it began with and the `limit_blocks` it has now."""
    step_blocks = max(1, first_blocks // STEPS)
    ahead_blocks = max(-(-_AHEAD_TOKENS // block_tokens) * running_count, int(AHEAD_SHARE * reserved_blocks))
    needed_blocks = reserved_blocks + ahead_blocks
    return min(limit_blocks, -(-needed_blocks // step_blocks) * step_blocks)


def over_at_s(
    began_s: float, left_s: float, reserved_blocks: int, stages: Sequence[tuple[float, int]], *, is_short: bool
) -> float:
    """When what still runs goes to the members. A stage then holds its part of the layers of all of that, and beside it
    all layers of what comes to it, its part of the sequences; until there is room for both, the group goes on for as
    long as requests leave it.

    Args:
        began_s: The commit.
        left_s: When a request left it last.
        reserved_blocks: Of the group, in the layers of any stage.
        stages: Of each the share of the layers that it has in the group, and its member's blocks in all layers.
        is_short: Requests wait for memory beside the group.
    """
    all_blocks = sum(home_blocks for _, home_blocks in stages)
    fits = all(
        reserved_blocks * (share + home_blocks / all_blocks) <= ROOM_SHARE * home_blocks
        for share, home_blocks in stages
    )
    if fits:
        return began_s if is_short else began_s + LEAVES_WITHIN_S
    return left_s + LEAVES_WITHIN_S * (_PATIENCE_IF_SHORT if is_short else _PATIENCE)

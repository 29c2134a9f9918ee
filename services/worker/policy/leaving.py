"""Rules by which a draining group releases memory to its members and hands over its remaining sequences."""

from collections.abc import Sequence

LEAVES_WITHIN_S = 10.0  # time after the commit at which sequences that still run move to a member with their KV
# If there is no room for their KV, sequences are recomputed once no request has ended for this multiple of
# LEAVES_WITHIN_S. It is large, unless requests wait for memory on the member that led the group.
_PATIENCE, _PATIENCE_IF_SHORT = 60, 12
ROOM_SHARE = 0.75  # fraction of a member's memory for them; the rest is for its own new sequences
STEPS = 8  # number of steps in which the group releases its blocks; each step moves some blocks on every stage
# Tokens reserved for the growth of each running sequence, because a sequence that finds no free block is recomputed.
# Long sequences tend to continue for long, so a fraction of the length is reserved if that is more.
_AHEAD_TOKENS, AHEAD_SHARE = 256, 0.5


def tightened(limit_blocks: int, first_blocks: int, reserved_blocks: int, running_count: int, block_tokens: int) -> int:
    """Return the number of blocks that the group keeps, given its `first_blocks` at the commit and its current
    `limit_blocks`.
    """
    step_blocks = max(1, first_blocks // STEPS)
    ahead_blocks = max(-(-_AHEAD_TOKENS // block_tokens) * running_count, int(AHEAD_SHARE * reserved_blocks))
    needed_blocks = reserved_blocks + ahead_blocks
    return min(limit_blocks, -(-needed_blocks // step_blocks) * step_blocks)


def over_at_s(
    began_s: float, left_s: float, reserved_blocks: int, stages: Sequence[tuple[float, int]], *, is_short: bool
) -> float:
    """Return the time at which running sequences are handed over to the members. Each stage then holds the KV of all
    sequences in its own layers, and the KV of the sequences that it receives in all layers. Until there is room for
    both, the group continues as long as requests end.

    Args:
        began_s: Time of the commit.
        left_s: Time at which the last request ended.
        reserved_blocks: Of the group, in the layers of any stage.
        stages: For each stage, its fraction of the layers, and its member's blocks with all layers.
        is_short: Whether requests outside the group wait for memory.
    """
    all_blocks = sum(home_blocks for _, home_blocks in stages)
    fits = all(
        reserved_blocks * (share + home_blocks / all_blocks) <= ROOM_SHARE * home_blocks
        for share, home_blocks in stages
    )
    if fits:
        return began_s if is_short else began_s + LEAVES_WITHIN_S
    return left_s + LEAVES_WITHIN_S * (_PATIENCE_IF_SHORT if is_short else _PATIENCE)

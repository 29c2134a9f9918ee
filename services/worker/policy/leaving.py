"""How a group that dissolves gives its memory to the members' own sequences, and when what is left in it goes."""

LEAVES_WITHIN_S = 10.0  # from the commit on; what then still runs in the group goes to a member with its KV
_PATIENCE = 3  # times as long while there is no room for that: what finds none is computed anew
_ROOM_SHARE = 0.75  # of a member's memory: the rest is for what it has begun by itself
_STEPS = 8  # in which the group gives up its blocks: each makes every stage move some
_AHEAD_TOKENS = 256  # kept for each sequence that runs, to grow into: one that finds no room is computed anew


def tightened(limit_blocks: int, first_blocks: int, reserved_blocks: int, running_count: int, block_tokens: int) -> int:
    """The blocks that the group keeps, of the `first_blocks` that it began with and the `limit_blocks` it has now."""
    step_blocks = max(1, first_blocks // _STEPS)
    needed_blocks = reserved_blocks - (-_AHEAD_TOKENS // block_tokens) * running_count
    return min(limit_blocks, -(-needed_blocks // step_blocks) * step_blocks)


def is_over(waited_s: float, reserved_blocks: int, home_blocks: int, stage_count: int) -> bool:
    """Whether what still runs goes to the members: a stage then holds its part of the layers of all of that, and beside
    it all layers of what comes to it, its part of the sequences.

    Args:
        waited_s: Since the commit.
        reserved_blocks: Of the group, in the layers of any stage.
        home_blocks: Of a member in all layers, the one with the fewest.
    """
    fits = 2 * reserved_blocks <= _ROOM_SHARE * home_blocks * stage_count
    return waited_s >= LEAVES_WITHIN_S * (1 if fits else _PATIENCE)


def looks_again_s(waited_s: float) -> float | None:
    """After how many seconds from the commit on time alone may have changed that; None: not any more."""
    return next((s for s in (LEAVES_WITHIN_S, LEAVES_WITHIN_S * _PATIENCE) if waited_s < s), None)

"""How a group that dissolves gives its memory to the members' own sequences, and when what is left in it goes."""

LEAVES_WITHIN_S = 10.0  # from the commit on; what then still runs in the group goes to a member with its KV
_STEPS = 8  # in which the group gives up its blocks: each makes every stage move some
_AHEAD_TOKENS = 256  # kept for each sequence that runs, to grow into: one that finds no room is computed anew


def tightened(limit_blocks: int, first_blocks: int, reserved_blocks: int, running_count: int, block_tokens: int) -> int:
    """The blocks that the group keeps, of the `first_blocks` that it began with and the `limit_blocks` it has now."""
    step_blocks = max(1, first_blocks // _STEPS)
    needed_blocks = reserved_blocks - (-_AHEAD_TOKENS // block_tokens) * running_count
    return min(limit_blocks, -(-needed_blocks // step_blocks) * step_blocks)

"""When a waiting sequence may start: on the KV need of its whole prompt, never on that of its first chunk."""

import math
from dataclasses import dataclass

PROMPT_STEPS = 2  # full batches, in each stage


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """Counts of the group. In a pipeline the blocks are the minimum over its stages."""

    block_count: int
    free_block_count: int
    running_count: int
    max_running_count: int


def admits(view: AdmissionView, need_block_count: int, reserve_fraction: float) -> bool:
    """Whether the sequence at the head of the waiting line may start now.

    A share of the blocks is kept free for the growth of what runs already: without it a newcomer takes the last
    block and is thrown out again one step later. An idle instance gives everything.
    """
    if view.running_count >= view.max_running_count:
        return False
    kept_block_count = reserved(view.block_count, reserve_fraction) if view.running_count else 0
    return need_block_count + kept_block_count <= view.free_block_count


def most_prompt_tokens(max_batch_tokens: int, stage_count: int) -> int:
    """So many tokens of prompts may have been let in and be in no batch yet. Less would leave batches unfilled until
    the next requests come; more would be computed much later, and might be somewhere else before.
    """
    return PROMPT_STEPS * max_batch_tokens * stage_count


def reserved(block_count: int, reserve_fraction: float) -> int:
    """Blocks that are for no newcomer while anything runs. Whoever places requests here has to know of them."""
    return math.ceil(block_count * reserve_fraction)

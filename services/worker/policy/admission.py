"""Admission: decides when a waiting sequence may start. It counts the KV of the whole prompt, not only of the first
chunk.
"""

import math
from dataclasses import dataclass

PROMPT_STEPS = 2  # full batches of admitted prompt tokens per stage


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """Counts of the group. In a pipeline the blocks are the minimum over its stages."""

    block_count: int
    free_block_count: int
    running_count: int
    max_running_count: int


def admits(view: AdmissionView, need_block_count: int, reserve_fraction: float) -> bool:
    """True if the sequence at the head of the waiting queue may start now.

    A fraction of the blocks is reserved for the growth of running sequences. Otherwise a new sequence would take the
    last block and be preempted one step later. An idle instance uses all blocks.
    """
    if view.running_count >= view.max_running_count:
        return False
    kept_block_count = reserved(view.block_count, reserve_fraction) if view.running_count else 0
    return need_block_count + kept_block_count <= view.free_block_count


def most_prompt_tokens(max_batch_tokens: int, stage_count: int) -> int:
    """Maximum admitted prompt tokens that are in no batch yet. Fewer would leave batches unfilled until further
    requests arrive. More would be computed much later, and might be placed on another worker in the meantime.
    """
    return PROMPT_STEPS * max_batch_tokens * stage_count


def reserved(block_count: int, reserve_fraction: float) -> int:
    """Return the number of blocks that no new sequence gets while others run. The dispatcher's placement accounts for
    them as well.
    """
    return math.ceil(block_count * reserve_fraction)

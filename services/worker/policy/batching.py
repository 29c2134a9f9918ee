"""Forms batches by token counts: decodes first, then prefill chunks that share the remaining token budget.

A policy takes and returns plain numbers. Alternatives (microbatches of equal cost, a budget from an SLO) are functions
with the same signature.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A running sequence with more than one token without KV."""

    rank: int  # rank of its priority class; 0 is served first
    computed_tokens: int
    remaining_tokens: int
    caller: int = 0


def chunk_prefills(decode_count: int, prefills: Sequence[PrefillView], budget_tokens: int) -> list[int]:
    """Return the tokens of each of `prefills` in this step, aligned with it; 0 leaves a sequence out.

    `prefills` are in order of service (class, then arrival). Each decode takes one token of the budget before any
    chunk. Half of the rest is for the first prefill, so that a long prompt always progresses. The other half is for the
    other prefills, ordered by class and then by how close they are to the first token, so that short prompts do not
    wait for a long one; callers alternate. Tokens that one half leaves unused are added to the other.
    """
    chunks = [0] * len(prefills)
    left_tokens = budget_tokens - decode_count
    if not prefills or left_tokens <= 0:
        return chunks
    head = prefills[0]
    if len(prefills) == 1:
        chunks[0] = min(head.remaining_tokens, left_tokens)
        return chunks
    chunks[0] = min(head.remaining_tokens, (left_tokens + 1) // 2)
    left_tokens -= chunks[0]
    for index in _in_turn(prefills):
        if left_tokens == 0:
            return chunks
        chunks[index] = min(prefills[index].remaining_tokens, left_tokens)
        left_tokens -= chunks[index]
    chunks[0] += min(head.remaining_tokens - chunks[0], left_tokens)
    return chunks


def _in_turn(prefills: Sequence[PrefillView]) -> list[int]:
    """Return the indices of all prefills but the first in fair order: by class, then by when each would end if its
    caller had the whole budget.
    """
    done: Counter[int] = Counter()  # caller -> tokens
    turns: list[tuple[int, int, int, int]] = []
    for i in sorted(range(1, len(prefills)), key=lambda i: (prefills[i].rank, prefills[i].remaining_tokens, i)):
        one = prefills[i]
        done[one.caller] += one.remaining_tokens
        turns.append((one.rank, done[one.caller], one.remaining_tokens, i))
    return [turn[-1] for turn in sorted(turns)]

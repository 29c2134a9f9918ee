"""Splits prompts so that a microbatch has a given cost according to the cost model."""

import math
from typing import NamedTuple

from ballast.common.cost import CostModel


class SequenceWork(NamedTuple):
    """Uncomputed tokens of a sequence. A decode has one."""

    prefix_tokens: int  # tokens whose KV is already computed
    token_count: int


def added_s(cost: CostModel, prefix_tokens: int, token_count: int) -> float:
    """Return the cost that a chunk adds to a batch of more than KNEE_TOKENS tokens. Inlined, because it is a hot
    spot.
    """
    pairs = token_count * (prefix_tokens + 0.5 * (token_count + 1))
    own_s = cost.attention_s * pairs + (cost.token_s + cost.beyond_s) * token_count
    return own_s + cost.chunk_s - cost.shared_s + cost.prefix_s * prefix_tokens


def tokens_within(cost: CostModel, prefix_tokens: int, room_s: float) -> float:
    """Return the length of a chunk that adds `room_s` to a batch: equation 1 solved for the number of tokens. 0: not
    even one token fits.
    """
    room_s -= cost.joining_s(prefix_tokens)
    if room_s <= 0.0:
        return 0.0
    half = cost.attention_s / 2
    linear = cost.attention_s * (prefix_tokens + 0.5) + cost.token_s + cost.beyond_s
    root = math.sqrt(linear * linear + 4.0 * half * room_s) + linear
    return 2.0 * room_s / root if root > 0.0 else math.inf


def cut(cost: CostModel, work: SequenceWork, room_s: float, min_tokens: int) -> int:
    """Return the length of the chunk of `work` whose cost is closest to `room_s`. Neither the chunk nor the remainder
    is shorter than `min_tokens`.

    0 if leaving the sequence out is closer to `room_s`.
    """
    prefix, count = work
    tokens = tokens_within(cost, prefix, room_s)
    if tokens >= count:
        return count
    whole = math.floor(tokens)
    over_s = added_s(cost, prefix, whole + 1) - room_s
    under_s = room_s - (added_s(cost, prefix, whole) if whole else 0.0)
    chosen = whole + 1 if over_s < under_s else whole
    if min_tokens <= chosen <= count - min_tokens or chosen == count:
        return chosen
    ends = [0, count]
    if count >= 2 * min_tokens:
        ends += [min_tokens, count - min_tokens]
    return min(ends, key=lambda n: (abs((added_s(cost, prefix, n) if n else 0.0) - room_s), n))

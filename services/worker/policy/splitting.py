"""A backlog cut into microbatches: figures 9 to 11 of KunServe (EuroSys '26, section 4.3), and what to hold beside it.

All of them take work in its order and cut at most one sequence where a microbatch ends, so that the chunks of a
sequence are in successive microbatches (in later ones, where decodes leave no room for the smallest chunk). Decodes
cannot be cut and need no order: they are dealt out first.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from services.worker.policy.cost import Chunk, CostModel


class Work(NamedTuple):
    """What is left to compute of a sequence; a decode if it is one token."""

    prefix_tokens: int  # have their KV already
    token_count: int


Microbatch = list[tuple[int, int]]  # (index of the work, tokens)


def added_s(cost: CostModel, prefix_tokens: int, token_count: int) -> float:
    """What a chunk adds to a batch of more tokens than KNEE_TOKENS. Written out, as this is where the time goes."""
    pairs = token_count * (prefix_tokens + 0.5 * (token_count + 1))
    own_s = cost.attention_s * pairs + (cost.token_s + cost.beyond_s) * token_count
    return own_s + cost.chunk_s - cost.shared_s + cost.prefix_s * prefix_tokens


def tokens_within(cost: CostModel, prefix_tokens: int, room_s: float) -> float:
    """How long a chunk is that adds `room_s` to a batch: equation 1 solved for the tokens. 0 if there is none."""
    room_s -= cost.joining_s(prefix_tokens)
    if room_s <= 0.0:
        return 0.0
    half = cost.attention_s / 2
    linear = cost.attention_s * (prefix_tokens + 0.5) + cost.token_s + cost.beyond_s
    root = math.sqrt(linear * linear + 4.0 * half * room_s) + linear
    return 2.0 * room_s / root if root > 0.0 else math.inf


def cut(cost: CostModel, work: Work, room_s: float, min_tokens: int) -> int:
    """So many tokens of `work` come nearest to `room_s`; neither they nor the rest are fewer than `min_tokens`.

    0 if nothing comes nearer than a chunk of that size.
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


# ---------------------------------------------------------------- figure 11


class _Piece(NamedTuple):
    place: int  # in the work given
    work: Work


def by_halving(work: Sequence[Work], cost: CostModel, batch_count: int, min_tokens: int = 1) -> list[Microbatch]:
    """Two parts of equal cost, and each of them again (figure 11), all to the same depth; where `batch_count` is not a
    power of two, in proportion to the microbatches that a part becomes.
    """
    found: list[list[_Piece]] = []

    def halve(pieces: list[_Piece], count: int) -> None:
        if count == 1:
            found.append(pieces)
            return
        first, rest = _split(pieces, cost, (count // 2) / count, min_tokens)
        halve(first, count // 2)
        halve(rest, count - count // 2)

    halve([_Piece(i, w) for i, w in enumerate(work) if w.token_count > 1], batch_count)
    batches = [[(p.place, p.work.token_count) for p in pieces] for pieces in found]
    loads_s = [math.fsum(added_s(cost, *p.work) for p in pieces) for pieces in found]
    deal_decodes(work, cost, batches, loads_s)
    return [batch for batch in batches if batch]


def _split(
    pieces: list[_Piece], cost: CostModel, fraction: float, min_tokens: int
) -> tuple[list[_Piece], list[_Piece]]:
    """Two parts, the first of which costs `fraction` of the whole."""
    room_s = fraction * math.fsum(added_s(cost, *p.work) for p in pieces)
    for at, (index, piece) in enumerate(pieces):
        whole_s = added_s(cost, *piece)
        if whole_s <= room_s:
            room_s -= whole_s
            continue
        count = cut(cost, piece, room_s, min_tokens)
        first, rest = pieces[:at], pieces[at + 1 :]
        if count:
            first = [*first, _Piece(index, Work(piece.prefix_tokens, count))]
        if count < piece.token_count:
            rest = [_Piece(index, Work(piece.prefix_tokens + count, piece.token_count - count)), *rest]
        return first, rest
    return pieces, []


# ---------------------------------------------------------------- filling


def by_filling(work: Sequence[Work], cost: CostModel, batch_count: int, min_tokens: int = 1) -> list[Microbatch]:
    """Each microbatch takes work until it costs an equal share of what is left, the cuts to come included."""
    batches: list[Microbatch] = [[] for _ in range(batch_count)]
    loads_s = [0.0] * batch_count
    deal_decodes(work, cost, batches, loads_s)
    queue = [_Piece(i, w) for i, w in enumerate(work) if w.token_count > 1]
    queue.reverse()
    left_s = math.fsum(loads_s) + math.fsum(added_s(cost, *p.work) for p in queue)
    cut_s = cost.joining_s(_middle_tokens(queue))
    for at, batch in enumerate(batches):
        left_count = batch_count - at
        room_s = (left_s + (left_count - 1) * cut_s) / left_count - loads_s[at]
        left_s -= loads_s[at] + _fill(batch, queue, cost, math.inf if left_count == 1 else room_s, min_tokens)
    return [batch for batch in batches if batch]


def _middle_tokens(pieces: Sequence[_Piece]) -> int:
    """The prefix that a chunk has on average if one begins at any token."""
    weight = sum(w.token_count for _, w in pieces)
    return sum(w.token_count * (w.prefix_tokens + w.token_count // 2) for _, w in pieces) // weight if weight else 0


def _fill(batch: Microbatch, queue: list[_Piece], cost: CostModel, room_s: float, min_tokens: int) -> float:
    """Takes from the end of `queue`. Returns by how much less is left."""
    taken_s = 0.0
    while queue:
        index, piece = queue[-1]
        whole_s = added_s(cost, *piece)
        if whole_s <= room_s - taken_s:
            count = piece.token_count
        elif (count := cut(cost, piece, room_s - taken_s, min_tokens)) == 0:
            return taken_s
        queue.pop()
        batch.append((index, count))
        if count == piece.token_count:
            taken_s += whole_s
            continue
        rest = Work(piece.prefix_tokens + count, piece.token_count - count)
        queue.append(_Piece(index, rest))
        return taken_s + whole_s - added_s(cost, *rest)
    return taken_s


# ---------------------------------------------------------------- the baseline


def by_tokens(work: Sequence[Work], batch_count: int) -> list[Microbatch]:
    """Equal numbers of tokens: what chunked prefill does without a cost model."""
    total = sum(w.token_count for w in work)
    batches: list[Microbatch] = []
    room = 0
    for index, (_, count) in enumerate(work):
        while count:
            if room == 0:
                at = len(batches)
                room = total * (at + 1) // batch_count - total * at // batch_count
                batches.append([])
                if room == 0:
                    continue
            part = min(count, room)
            batches[-1].append((index, part))
            count -= part
            room -= part
    return [batch for batch in batches if batch]


# ---------------------------------------------------------------- what they come to


def deal_decodes(work: Sequence[Work], cost: CostModel, batches: list[Microbatch], loads_s: list[float]) -> None:
    """The dearest first, each to the batch that costs least so far; changes both lists."""
    decodes = [(added_s(cost, *w), i) for i, w in enumerate(work) if w.token_count == 1]
    for one_s, index in sorted(decodes, key=lambda d: (-d[0], d[1])):
        at = min(range(len(batches)), key=lambda k: (loads_s[k], k))
        batches[at].append((index, 1))
        loads_s[at] += one_s


def batch_costs_s(work: Sequence[Work], batches: Sequence[Microbatch], cost: CostModel) -> list[float]:
    done = [w.prefix_tokens for w in work]
    costs: list[float] = []
    for batch in batches:
        costs.append(cost.batch_cost_s(Chunk(done[i], n) for i, n in batch))
        for i, n in batch:
            done[i] += n
    return costs


def makespan_s(costs_s: Sequence[float], stage_count: int) -> float:
    """Of microbatches that pass through equal stages, of which as many as there are stages are under way at a time.

    For two stages this is equation 4 of the second arXiv version's appendix A.
    """
    free_at_s = [0.0] * stage_count
    out_at_s: list[float] = []
    for index, cost_s in enumerate(costs_s):
        at_s = out_at_s[index - stage_count] if index >= stage_count else 0.0
        for stage in range(stage_count):
            at_s = max(at_s, free_at_s[stage]) + cost_s
            free_at_s[stage] = at_s
        out_at_s.append(at_s)
    return free_at_s[-1]


def makespan_bound_s(work: Sequence[Work], batch_count: int, stage_count: int, cost: CostModel) -> float:
    """No way to cut `work` into `batch_count` microbatches takes less: as if equal parts needed no cuts.

    Cutting leaves the pairs of equation 1 as they are and adds a chunk each time (the reading of its prefix, too, is
    not counted here); there are at least as many chunks as there is work, and as there are microbatches.
    """
    cut_s = cost.chunk_s - cost.shared_s
    total_s = math.fsum(added_s(cost, *w) for w in work) + max(0, batch_count - len(work)) * cut_s
    total_s += batch_count * cost.shared_s
    return total_s * (batch_count + stage_count - 1) / batch_count

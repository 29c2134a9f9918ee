"""Microbatches of equal cost, formed one at a time from the whole backlog (KunServe, EuroSys '26, section 4.3).

The backlog changes with each completed microbatch, because requests arrive, end and are preempted. It is therefore
evaluated for each microbatch, and only the next one is formed, by filling it. For a constant backlog this is as close
to the optimum as the recursive halving of figure 11 (benchmarks/results: microbatching).

Unlike with token counts, successive chunks of a prompt may be in flight at the same time. A stage executes batches in
order, so the KV of a chunk is available when the next one runs, and a single prompt keeps all stages busy.
"""

import math
from collections.abc import Callable

from ballast.common.cost import CostModel
from services.worker.policy.microbatching import MicrobatchCandidate, Microbatching, PipelineView, Share, by_token_count
from services.worker.policy.splitting import SequenceWork, added_s, cut

MIN_CHUNK_TOKENS = 16  # smaller chunks cost more than the better balance saves
# Rounds of the pipeline over which running prompts are spread while others wait for memory. If requests are admitted
# whenever others end, 8 instead of 1 reduces bubbles from 18 to 10 % on two stages and from 28 to 13 % on four, and the
# mean TTFT from 6.2 to 5.8 s (simulated; 4 is in between, 16 is no better).
_RESERVE = 8
# Attention cost per token of a full microbatch, relative to the backlog's average. A smaller value makes microbatches
# more numerous and more equal in cost. With 0.4, two stages had as few bubbles, but executed 2 % longer
# (benchmarks/results: pipeline bubbles).
_ATTENTION = 0.8
_AHEAD = 1  # microbatches in flight beyond one per stage; see `_Former._ahead_pays`
_LEAST = 0.2  # maximum fixed cost of an additional microbatch, as a fraction of the microbatch's cost
_CRUMB = 0.1  # fraction by which a chunk may exceed its share in order to finish the prompt
# If a batch splits a prompt anyway, its number of tokens is rounded to one of this many values between n and 2n: a CPU
# pads its matrix products to these values (`engine.kernels.padded_rows`), and a GPU to whole tiles. Without rounding,
# 2 % of the rows are padding.
_COUNTS_PER_OCTAVE = 16
_OVERHEAD = 0.1  # maximum fraction of the fixed cost in a microbatch without decodes


def lookahead(model: Callable[[], CostModel | None]) -> Microbatching:
    """Microbatching by equal cost. `model` is called for each microbatch, because the cost model is refitted while the
    worker runs. While it returns None, microbatches are formed by token count.
    """

    def form(view: PipelineView) -> Share:
        cost = model()
        if cost is not None:
            return _Former(view, cost).form()
        return by_token_count(view) if view.in_flight_count < view.stage_count else []

    return Microbatching(form, _AHEAD)


class _Former:
    def __init__(self, view: PipelineView, cost: CostModel) -> None:
        self._view = view
        self._cost = cost
        self._least_s = cost.shared_s + cost.many_s  # fixed cost of any batch
        self._decodes: list[int] = []
        self._prefills: list[tuple[int, float]] = []  # (index, cost of the remaining tokens)
        self._decode_count = 0
        self._all_decodes_s = 0.0  # cost of all decodes of one round of the pipeline
        self._left_s, self._left_tokens = 0.0, 0  # cost and number of prompt tokens that are not dispatched yet
        self._prefill_s = 0.0  # cost of prompt tokens that are not dispatched yet or in flight
        for index, candidate in enumerate(view.candidates):
            self._look_at(index, candidate)
        self._count = view.stage_count + _AHEAD  # microbatches in flight
        if not self._ahead_pays():
            self._count = view.stage_count

    def _ahead_pays(self) -> bool:
        """True if one more microbatch than stages is worthwhile. Each stage then has the next one ready when one ends,
        which hides the round trip to the leader, but every round has the fixed cost of one more batch.
        """
        if not (self._view.waiting_count and self._prefills):
            return False
        batch_s = self._least_s + self._all_decodes_s / self._count + self._prefill_part_s()
        return self._least_s <= batch_s * _LEAST

    def _look_at(self, index: int, c: MicrobatchCandidate) -> None:
        in_flight = c.step_id > self._view.completed_step_id
        left, cost = c.token_count - c.dispatched_tokens, self._cost
        if c.token_count - c.computed_tokens == 1:
            self._decode_count += 1
            self._all_decodes_s += added_s(cost, c.computed_tokens, 1)
            if left and c.has_room:
                self._decodes.append(index)
            return
        if in_flight:
            self._prefill_s += added_s(cost, c.computed_tokens, c.dispatched_tokens - c.computed_tokens)
        if left:
            rest_s = added_s(cost, c.dispatched_tokens, left)
            self._prefill_s += rest_s
            self._left_s += rest_s - cost.joining_s(c.dispatched_tokens)
            self._left_tokens += left
            if c.has_room:
                self._prefills.append((index, rest_s))

    def form(self) -> Share:
        if self._view.in_flight_count >= self._count:
            return []
        share, taken_s = self._take_decodes()
        if not self._prefills:
            return share
        room_s = self._all_decodes_s / self._count + self._prefill_part_s() - taken_s
        room_tokens = min(self._view.max_batch_tokens - len(share), self._view.max_prompt_tokens)
        chunks = self._take_chunks(room_s, room_tokens)
        if not chunks and room_tokens:  # otherwise the first prompt would progress only after all others
            index, _ = self._prefills[0]
            c = self._view.candidates[index]
            chunks = [(index, min(c.token_count - c.dispatched_tokens, MIN_CHUNK_TOKENS, room_tokens))]
        return share + self._rounded(chunks, len(share))

    def _rounded(self, chunks: Share, decode_count: int) -> Share:
        """Return the chunks, with the chunk of a split prompt changed by a few tokens to avoid padded rows."""
        total = decode_count + sum(count for _, count in chunks)
        grain = (1 << (total - 1).bit_length()) // (2 * _COUNTS_PER_OCTAVE)
        if grain <= 1:
            return chunks
        most = min(self._view.max_batch_tokens, decode_count + self._view.max_prompt_tokens)
        wanted = min((total + grain // 2) // grain, most // grain) * grain
        for at in range(len(chunks) - 1, -1, -1):
            index, count = chunks[at]
            c = self._view.candidates[index]
            left = c.token_count - c.dispatched_tokens
            if count < left and MIN_CHUNK_TOKENS <= count + wanted - total <= left - MIN_CHUNK_TOKENS:
                return [*chunks[:at], (index, count + wanted - total), *chunks[at + 1 :]]
        return chunks

    def _prefill_part_s(self) -> float:
        """Prefill cost added to a stage's share of the decodes. While other requests wait for memory, running prompts
        are spread over more microbatches than are in flight. Requests are admitted one by one as others end, so without
        a reserve some microbatches would have much prefill and some none.
        """
        view, full_s = self._view, self._full_s()
        batch_count = self._count * (_RESERVE if view.lacks_room else 1)
        # Decodes in each microbatch amortise its fixed cost.
        have_decodes = self._decode_count >= self._count
        least_s = 0.0 if have_decodes else self._least_s / _OVERHEAD
        # Decodes with long contexts may cost more than a full batch of prompts. Prompts then get the tokens that
        # decodes leave, like in a lone instance. Otherwise they would hardly progress, no matter how much memory is
        # free.
        left_tokens = max(0.0, view.max_batch_tokens - self._decode_count / self._count)
        left_s = (self._cost.token_s + self._cost.beyond_s) * left_tokens
        most_s = max(full_s - self._all_decodes_s / self._count, left_s, least_s)
        if full_s == 0.0:
            return self._prefill_s
        return min(most_s, max(self._prefill_s / batch_count, least_s))

    def _full_s(self) -> float:
        """Cost of a full batch whose attention is a little below the backlog's average (`_ATTENTION`). With the
        average, microbatches of short prompts would reach their token limit before they cost as much as others.
        """
        token_s = self._cost.token_s + self._cost.beyond_s
        attention_s = max(0.0, self._left_s / self._left_tokens - token_s) if self._left_tokens else 0.0
        return (token_s + _ATTENTION * attention_s) * self._view.max_batch_tokens

    def _take_decodes(self) -> tuple[Share, float]:
        """Return one stage's share of the decodes by cost, and that cost. Decodes that wait longest are first."""
        candidates, cost = self._view.candidates, self._cost
        share_s, taken_s = self._all_decodes_s / self._count, 0.0
        share: Share = []
        for index in sorted(self._decodes, key=lambda i: candidates[i].step_id):
            enough = taken_s >= share_s * (1 - 1e-9) or len(share) == self._view.max_batch_tokens
            if share and enough:
                break
            share.append((index, 1))
            taken_s += added_s(cost, candidates[index].computed_tokens, 1)
        return share, taken_s

    def _take_chunks(self, room_s: float, room_tokens: int) -> Share:
        """Return prompt chunks that cost about `room_s`. Half of that is for the first prompt, so that a long one
        always progresses. Other prompts follow by class and then by how close they are to their first token, so that
        short prompts do not wait for a long one.
        """
        candidates = self._view.candidates
        (head, head_s), others = self._prefills[0], self._prefills[1:]
        others.sort(key=lambda p: (candidates[p[0]].rank, p[1], p[0]))
        left_s = room_s
        found: Share = []
        limits_s = [max(room_s / 2, room_s - math.fsum(rest_s for _, rest_s in others)), *(room_s for _ in others)]
        for (index, rest_s), limit_s in zip([(head, head_s), *others], limits_s, strict=True):
            if left_s <= 0.0 or room_tokens <= 0:
                break
            c = candidates[index]
            work = SequenceWork(c.dispatched_tokens, c.token_count - c.dispatched_tokens)
            count = self._cut(work, rest_s, min(left_s, limit_s), room_tokens)
            if count:
                found.append((index, count))
                room_tokens -= count
                left_s -= rest_s if count == work.token_count else added_s(self._cost, work.prefix_tokens, count)
        return found

    def _cut(self, work: SequenceWork, rest_s: float, room_s: float, room_tokens: int) -> int:
        if rest_s <= room_s * (1 + _CRUMB):
            return min(room_tokens, work.token_count)
        return min(room_tokens, cut(self._cost, work, room_s, MIN_CHUNK_TOKENS))

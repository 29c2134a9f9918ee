"""Microbatches of equal cost out of the whole backlog (KunServe, EuroSys '26, section 4.3), formed one at a time.

What circulates in a pipeline changes with every microbatch that lands: requests come, end, are preempted. So the
backlog is looked at anew each time, and of its parts only the next one is formed, by filling. For a backlog that stands
still that comes as near to the bound as the recursive halving of figure 11 (benchmarks/results: microbatching).

Unlike with token counts, successive chunks of a prompt may be in flight at once. A stage takes batches in their order,
so the KV of the one is there when the next one comes, and a lone prompt keeps all stages busy.
"""

import math
from collections.abc import Callable

from ballast.common.cost import CostModel
from services.worker.policy.microbatching import Candidate, Microbatching, PipelineView, Share, by_token_count
from services.worker.policy.splitting import Work, added_s, cut

MIN_CHUNK_TOKENS = 16  # a smaller piece of a prompt costs more than the balance that it brings
_PREFILL = 0.25  # of a full microbatch, so much prefill is in it however many decodes there are
# Trips through the pipeline that the prompts which run are spread over while others wait for room. Where requests are
# let in as others end, 8 takes bubbles from 18 to 10 % on two stages and from 28 to 13 % on four compared with 1, and
# the mean time to the first token from 6.2 to 5.8 s (a model in virtual time; 4 is between, 16 no better).
_RESERVE = 8
# Of the average. Less makes microbatches of more equal cost, and more of them: with 0.4 two stages had as few bubbles,
# and 2 % more to execute (benchmarks/results: pipeline bubbles).
_ATTENTION = 0.8
_AHEAD = 1  # microbatches in flight beyond one for each stage, while others wait and
_LEAST = 0.2  # of a microbatch is the most that is due to its being one, and not to what is in it
_CRUMB = 0.1  # of a prompt's part: it takes so much more if nothing is left then
# Numbers of tokens between n and 2n that a batch has where a prompt is cut anyway: a CPU pads its matrix products to
# these (`engine.kernels.padded_rows`), and a GPU to tiles. Rows in between are computed and of no use, 2 % of them.
_COUNTS_PER_OCTAVE = 16
_OVERHEAD = 0.1  # a microbatch without decodes is so long that what it costs at least is not more than this part of it


def lookahead(model: Callable[[], CostModel | None]) -> Microbatching:
    """Asks for the cost model each time, as it is fitted anew while the worker runs; without one, by token count."""

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
        self._least_s = cost.shared_s + cost.many_s  # of any batch
        self._decodes: list[int] = []
        self._prefills: list[tuple[int, float]] = []  # with what the rest of them costs
        self._decode_count = 0
        self._all_decodes_s = 0.0  # of one trip through the pipeline
        self._left_s, self._left_tokens = 0.0, 0  # of prompts
        self._prefill_s = 0.0  # of what is left, and of what is in flight
        for index, candidate in enumerate(view.candidates):
            self._look_at(index, candidate)
        self._count = view.stage_count + _AHEAD  # of microbatches that circulate
        if not self._ahead_pays():
            self._count = view.stage_count

    def _ahead_pays(self) -> bool:
        """With one microbatch more than stages the next one lies ready wherever a stage is through with one: what
        passes until it has gone back to the leader and come out anew is hidden. Every trip costs a batch more, though.
        """
        if not (self._view.waiting_count and self._prefills):
            return False
        batch_s = self._least_s + self._all_decodes_s / self._count + self._prefill_part_s()
        return self._least_s <= batch_s * _LEAST

    def _look_at(self, index: int, c: Candidate) -> None:
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
        if not chunks and room_tokens:  # or the first in line would get on only when the others have ended
            index, _ = self._prefills[0]
            c = self._view.candidates[index]
            chunks = [(index, min(c.token_count - c.dispatched_tokens, MIN_CHUNK_TOKENS, room_tokens))]
        return share + self._rounded(chunks, len(share))

    def _rounded(self, chunks: Share, decode_count: int) -> Share:
        """With a few tokens more or fewer of a prompt that is cut, so that no rows are computed for nothing."""
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
        """What goes beside a stage's share of the decodes. While others wait for room, the prompts that run are spread
        over more microbatches than are in flight: requests that end let new ones in bit by bit, and without a reserve
        there would be microbatches with much prefill and some with none.
        """
        view, full_s = self._view, self._full_s()
        batch_count = self._count * (_RESERVE if view.lacks_room else 1)
        # Where each microbatch has decodes, they pay what it costs at least.
        have_decodes = self._decode_count >= self._count
        least_s = 0.0 if have_decodes else self._least_s / _OVERHEAD
        most_s = max(full_s - self._all_decodes_s / self._count, full_s * _PREFILL, least_s)
        if most_s == 0.0:
            return self._prefill_s
        return min(most_s, max(self._prefill_s / batch_count, least_s))

    def _full_s(self) -> float:
        """What a full batch takes if its tokens have less to attend to than those of the backlog on average. Above
        that, microbatches of short prompts would reach the bound of their tokens before they cost as much as others.
        """
        token_s = self._cost.token_s + self._cost.beyond_s
        attention_s = max(0.0, self._left_s / self._left_tokens - token_s) if self._left_tokens else 0.0
        return (token_s + _ATTENTION * attention_s) * self._view.max_batch_tokens

    def _take_decodes(self) -> tuple[Share, float]:
        """A stage's share of them by cost, who has waited longest first."""
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
        """Half of the room is for the first in line, so that a long prompt always gets on; then the one nearest to its
        first token first within a class, so that short prompts do not wait for a long one.
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
            work = Work(c.dispatched_tokens, c.token_count - c.dispatched_tokens)
            count = self._cut(work, rest_s, min(left_s, limit_s), room_tokens)
            if count:
                found.append((index, count))
                room_tokens -= count
                left_s -= rest_s if count == work.token_count else added_s(self._cost, work.prefix_tokens, count)
        return found

    def _cut(self, work: Work, rest_s: float, room_s: float, room_tokens: int) -> int:
        if rest_s <= room_s * (1 + _CRUMB):
            return min(room_tokens, work.token_count)
        return min(room_tokens, cut(self._cost, work, room_s, MIN_CHUNK_TOKENS))

"""Delivers the tokens of a step to clients and counts them. Offline answers are counted separately."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

from services.dispatcher.core.events import Command, Deliver, StepReceived
from services.dispatcher.core.fleet import Fleet, Worker
from services.dispatcher.core.story import Recent
from services.dispatcher.core.tracked import Tracked
from services.dispatcher.core.traffic import TrafficCounter

# A named tuple's own constructor takes twice as long, and one `Deliver` is made for each token.
_New = Callable[[type[Deliver], tuple[object, ...]], Deliver]
_new: _New = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

# Histogram buckets of inter-token latency: the same as in vLLM, for comparable dashboards.
GAP_BOUNDS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class Relay:
    def __init__(self, fleet: Fleet, traffic: TrafficCounter) -> None:
        self.recent = Recent()  # TTFTs of online answers
        self.token_count = 0  # received tokens, except those of offline answers
        self.offline_token_count = 0
        self.stale_count = 0  # messages about unknown handles
        self.gap_counts = [0] * (len(GAP_BOUNDS_S) + 1)  # inter-token latencies of online answers, by bucket
        self.gap_total_s = 0.0
        self._fleet = fleet
        self._traffic = traffic

    def deliver(self, worker: Worker, event: StepReceived, commands: list[Command]) -> None:
        """Append a `Deliver` to `commands` for each known handle, and count its tokens."""
        one_each = len(event.handles) == len(event.token_ids) == event.token_counts.count(1)
        give = self._deliver_one_each if one_each and not (event.texts or event.logprobs) else self._give
        give(worker, event, commands)

    def _give(self, worker: Worker, event: StepReceived, commands: list[Command]) -> None:
        token_end = logprob_end = later_count = offline_count = stale_token_count = 0
        texts, token_ids, logprobs = event.texts, event.token_ids, event.logprobs
        at_s, placed, counts, took_s = event.at_s, worker.placed, event.token_counts, 0.0
        last_gap_s, bucket = -1.0, 0
        for index, handle in enumerate(event.handles):
            token_begin, token_end = token_end, token_end + counts[index]
            if handle not in placed:
                self.stale_count += 1
                stale_token_count += token_end - token_begin
                if handle in worker.departed:
                    logprob_end += token_end - token_begin
                continue
            tracked = placed[handle]
            new_ids = token_ids[token_begin:token_end]
            text = ""
            if texts:
                text = texts[index]
                tracked.text_chars += len(text)
            request = tracked.request
            new_logprobs: Sequence[object] = ()
            if logprobs and request.sampling.logprobs is not None:
                logprob_begin, logprob_end = logprob_end, logprob_end + len(new_ids)
                new_logprobs = logprobs[logprob_begin:logprob_end]
            if new_ids:
                is_first = tracked.awaits_token and self._take_first_token(tracked, at_s)
                gap_s = at_s - tracked.last_token_at_s
                if tracked.offline:
                    offline_count += len(new_ids)
                else:
                    took_s += gap_s
                    later_count += len(new_ids) - is_first
                    if not is_first:
                        if gap_s != last_gap_s:  # most sequences of a batch have the same gap
                            last_gap_s, bucket = gap_s, bisect_left(GAP_BOUNDS_S, gap_s)
                        self.gap_counts[bucket] += 1
                if gap_s > tracked.longest_gap_s:
                    tracked.longest_gap_s, tracked.longest_gap_token = gap_s, len(tracked.output_token_ids)
                tracked.last_token_at_s = at_s
            tracked.output_token_ids += new_ids
            commands.append(_new(Deliver, (request.request_id, new_ids, text, new_logprobs)))
        self._count_tokens(len(token_ids) - stale_token_count, offline_count, later_count, took_s)

    def _count_tokens(self, token_count: int, offline_count: int, later_count: int, took_s: float) -> None:
        self._traffic.went_on(later_count, took_s)
        self.gap_total_s += took_s
        self.offline_token_count += offline_count
        self.token_count += token_count - offline_count

    def _deliver_one_each(self, worker: Worker, event: StepReceived, commands: list[Command]) -> None:
        """Fast path of `deliver` for most messages: one token for each handle and nothing else."""
        at_s, placed, add, stale_count = event.at_s, worker.placed, commands.append, self.stale_count
        took_s, later_count, offline_count, gap_counts = 0.0, 0, 0, self.gap_counts
        last_gap_s, bucket = -1.0, 0
        for handle, token_id in zip(event.handles, event.token_ids, strict=True):
            if handle not in placed:
                self.stale_count += 1
                continue
            tracked = placed[handle]
            is_first = tracked.awaits_token and self._take_first_token(tracked, at_s)
            gap_s = at_s - tracked.last_token_at_s
            if tracked.offline:
                offline_count += 1
            elif not is_first:
                took_s += gap_s
                later_count += 1
                if gap_s != last_gap_s:
                    last_gap_s, bucket = gap_s, bisect_left(GAP_BOUNDS_S, gap_s)
                gap_counts[bucket] += 1
            if gap_s > tracked.longest_gap_s:
                tracked.longest_gap_s, tracked.longest_gap_token = gap_s, len(tracked.output_token_ids)
            tracked.last_token_at_s = at_s
            tracked.output_token_ids.append(token_id)
            add(_new(Deliver, (tracked.request.request_id, (token_id,), "", ())))
        stale_count = self.stale_count - stale_count
        self._count_tokens(len(event.token_ids) - stale_count, offline_count, later_count, took_s)

    def _take_first_token(self, tracked: Tracked, at_s: float) -> bool:
        """Handle the first token of a placement. Returns True if it is also the first of the request."""
        if (is_first := tracked.first_token_at_s is None) and not tracked.offline:
            self._traffic.began(tracked.request.request_id, at_s)
        words = "" if (layout := self._fleet.layout) is None else f"epoch {layout.epoch}, {layout.reason}"
        tracked.take_first_token(at_s, self.recent, words)
        return is_first

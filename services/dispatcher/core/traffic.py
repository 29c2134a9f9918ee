"""Statistics of arrivals and answer lengths, for the planner's predictions."""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ballast.common.errors import InvariantViolation
from ballast.common.ids import RequestId
from ballast.common.traffic import (
    LENGTH_COUNTS,
    MINUTE_S,
    RECENT_S,
    WAIT_COUNTS,
    WINDOW_S,
    LongDemand,
    Traffic,
    length_index,
    wait_index,
)

_BIN_S = 2.0
_BINS_PER_SPAN = int(RECENT_S / _BIN_S)
_SPAN_COUNT = int(WINDOW_S / RECENT_S)
# A burst begins with a bin of more than _BURST times the calm count plus _CHANCE standard deviations. It counts if it
# exceeds the calm count by _SURE standard deviations. Its end is unknown once it is _LONGER times as long as the
# longest earlier burst.
_BURST, _CHANCE, _SURE, _LONGER = 2.0, 2.0, 4.0, 1.5
_INTERVAL_S = 0.25  # interval of reads while only tokens arrive; shorter than the monitor's timeout of an entry


_NONE = LongDemand()


class _Bursts(NamedTuple):
    """See `Traffic.burst_s`."""

    since_s: float
    each_s: float
    per_s: float


_UNKNOWN = _Bursts(0.0, 0.0, 0.0)


@dataclass(slots=True)
class _TimeBin:
    index: int  # index of the bin, in units of _BIN_S since time 0
    arrived_count: int = 0
    arrived_tokens: int = 0
    ended_count: int = 0
    ended_tokens: int = 0
    arrived_lengths: Counter[int] = field(default_factory=Counter[int])  # `length_index` -> number of requests


@dataclass(slots=True)
class _TrafficSums:
    """Sums over bins, relative to the newest one."""

    newest: int
    last: int  # index of the last bin, which is summed separately
    spans: list[int]  # arrived requests in each RECENT_S, newest first
    minute_count: int = 0
    minute_tokens: int = 0
    ended_count: int = 0
    ended_tokens: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * LENGTH_COUNTS)
    bursts: "_Bursts" = field(default_factory=lambda: _UNKNOWN)

    def add(self, one: _TimeBin) -> None:
        age = self.newest - one.index
        if age * _BIN_S >= WINDOW_S:
            return
        if age // _BINS_PER_SPAN < len(self.spans):
            self.spans[age // _BINS_PER_SPAN] += one.arrived_count
        if age * _BIN_S < MINUTE_S:
            self.minute_count += one.arrived_count
            self.minute_tokens += one.arrived_tokens
            for index, count in one.arrived_lengths.items():
                self.lengths[index] += count
        self.ended_count += one.ended_count
        self.ended_tokens += one.ended_tokens


class TrafficCounter:
    """Counts arrivals and ended answers in bins of two seconds over WINDOW_S, skipping empty bins; delivered tokens are
    counted as running totals.
    """

    def __init__(self) -> None:
        self._first_counts = [0] * WAIT_COUNTS
        self._later_count = 0
        self._later_s = 0.0
        self._open_tokens = 0
        self._change_count = 0  # number of arrivals, first tokens, endings, and requests that became long
        self._read = (0, 0)  # (change count, queued requests) at the last `read`
        self._read_at_s = -math.inf
        self._bins = deque[_TimeBin]()
        self._since_s: float | None = None  # arrival of the first request
        self._closed = _TrafficSums(-1, -1, [])  # sums of all bins but the last, the only one that changes
        self._waiting: dict[RequestId, float] = {}  # requests without a token -> arrival, in order

    def arrived(self, request_id: RequestId, at_s: float, token_count: int, made_count: int = 0) -> None:
        """Count an arrived request. `made_count`: number of tokens that its answer already has; with 0 it awaits its
        first token.
        """
        self._change_count += 1
        if not made_count:
            self._waiting[request_id] = at_s
        self._open_tokens += made_count
        if self._since_s is None:
            self._since_s = at_s
        here = self._bin(at_s)
        here.arrived_count += 1
        here.arrived_tokens += token_count
        here.arrived_lengths[length_index(token_count)] += 1

    def long_arrived(self, made_count: int) -> None:
        """Count only the tokens in the answer of a long request, which is not ordinary traffic."""
        self._open_tokens += made_count

    def mark_long(self, request_id: RequestId) -> None:
        """Remove a request that has become long from those that await their first token."""
        self._change_count += 1
        self._waiting.pop(request_id, None)

    def ended(self, at_s: float, token_count: int) -> None:
        """Count a complete answer of `token_count` tokens."""
        here = self._bin(at_s)
        here.ended_count += 1
        here.ended_tokens += token_count

    def began(self, request_id: RequestId, at_s: float) -> None:
        """Count the first token of a request, and how long the request waited for it."""
        self._change_count += 1
        if (since_s := self._waiting.pop(request_id, None)) is not None:
            self._first_counts[wait_index(at_s - since_s)] += 1
        self._open_tokens += 1

    def left(self, request_id: RequestId, made_count: int) -> None:
        """Remove an ended request whose answer has `made_count` tokens."""
        self._change_count += 1
        self._waiting.pop(request_id, None)
        self._open_tokens -= made_count

    def went_on(self, token_count: int, took_s: float) -> None:
        """Count later tokens of answers. `took_s`: sum of their inter-token latencies."""
        self._later_count += token_count
        self._later_s += took_s
        self._open_tokens += token_count

    def _bin(self, at_s: float) -> _TimeBin:
        index = int(at_s // _BIN_S)
        if not self._bins or self._bins[-1].index < index:
            self._bins.append(_TimeBin(index))
            while self._bins[0].index <= index - int(WINDOW_S / _BIN_S):
                self._bins.popleft()
        return self._bins[-1]

    def carries_changes(self, at_s: float, queued_count: int) -> bool:
        """True if a request has arrived, begun, ended or left the queue since the last `read`, or if the last `read` is
        at least `_INTERVAL_S` ago.
        """
        return self._read != (self._change_count, queued_count) or at_s - self._read_at_s >= _INTERVAL_S

    def read(self, at_s: float, queued_count: int, queued_tokens: int, long: LongDemand = _NONE) -> Traffic:
        """Return the traffic counted so far, together with the waiting demand: number of requests, their tokens, and
        long requests.
        """
        self._read, self._read_at_s = (self._change_count, queued_count), at_s
        known_s = 0.0 if self._since_s is None else min(WINDOW_S, at_s - self._since_s)
        sums = self._sums(int(at_s // _BIN_S), int(max(MINUTE_S, known_s) / RECENT_S))
        return Traffic(
            queued_count=queued_count,
            queued_tokens=queued_tokens,
            recent_count=sums.spans[0],
            minute_count=sums.minute_count,
            minute_tokens=sums.minute_tokens,
            calm_per_s=_calm(sums.spans) / RECENT_S,
            ended_count=sums.ended_count,
            ended_tokens=sums.ended_tokens,
            open_tokens=self._open_tokens,
            known_s=known_s,
            oldest_wait_s=max(0.0, at_s - next(iter(self._waiting.values()), at_s)),
            burst_since_s=sums.bursts.since_s,
            burst_s=sums.bursts.each_s,
            burst_per_s=sums.bursts.per_s,
            first_counts=_told(self._first_counts),
            later_count=self._later_count,
            later_s=self._later_s,
            long=long,
            prompt_counts=_told(sums.lengths),
        )

    def _sums(self, newest: int, span_count: int) -> _TrafficSums:
        """Return the sums over all bins. `span_count`: number of spans of RECENT_S for which arrivals are counted."""
        last = self._bins[-1].index if self._bins else -1
        closed = self._closed
        if (closed.newest, closed.last, len(closed.spans)) != (newest, last, span_count):
            closed = self._closed = _TrafficSums(newest, last, [0] * span_count)
            for one in islice(self._bins, max(0, len(self._bins) - 1)):
                closed.add(one)
            counts = {one.index: one.arrived_count for one in self._bins if one.index < newest}
            closed.bursts = _bursts(counts, newest, _calm(closed.spans) / _BINS_PER_SPAN)
        sums = _TrafficSums(
            newest,
            last,
            closed.spans.copy(),
            closed.minute_count,
            closed.minute_tokens,
            closed.ended_count,
            closed.ended_tokens,
            closed.lengths.copy(),
            closed.bursts,
        )
        if self._bins:
            sums.add(self._bins[-1])
        return sums

    def check(self, waiting: Set[RequestId], open_tokens: int) -> None:
        """Raise InvariantViolation unless the bins are ordered and few, `waiting` are the requests counted as having no
        token, and the running answers have `open_tokens` tokens.
        """
        if self._open_tokens != open_tokens:
            raise InvariantViolation(f"open answers have {open_tokens} tokens, but {self._open_tokens} were counted")
        if self._waiting.keys() != waiting:
            raise InvariantViolation(f"waiting requests are counted wrongly: {sorted(self._waiting.keys() ^ waiting)}")
        indices = [one.index for one in self._bins]
        if indices != sorted(set(indices)) or len(indices) > WINDOW_S / _BIN_S:
            raise InvariantViolation(f"bins of traffic are out of order, or too many: {indices}")


def _told(counts: list[int]) -> tuple[int, ...]:
    """Return the counts without trailing zeros."""
    end = len(counts)
    while end and not counts[end - 1]:
        end -= 1
    return tuple(counts[:end])


def _bursts(counts: Mapping[int, int], newest: int, calm_count: float) -> _Bursts:
    """Return the latest burst, if it is recent and others preceded it; otherwise it is unknown. A burst that has not
    ended is expected to be as long as the mean of the earlier ones, and to last at least to the end of the current bin.
    It is also unknown if it is already much longer than earlier ones.

    Args:
        counts: Requests by complete bin.
        newest: The current bin.
        calm_count: Requests in a calm bin.
    """
    deviation = math.sqrt(calm_count + 1.0)
    least, calm = _BURST * calm_count + _CHANCE * deviation, calm_count + deviation
    found, begin, end, total = list[tuple[int, int, int]](), 0, 0, 0  # bursts: first bin, number of bins, requests
    for index in range(newest - int(WINDOW_S / _BIN_S), newest + 1):
        count = counts.get(index, 0)
        if end and (index == newest or index - end >= _BINS_PER_SPAN):  # shorter dips by chance do not end a burst
            usual = calm_count * (end - begin)
            if total > usual + _SURE * math.sqrt(usual + 1.0):
                found.append((begin, end - begin, total))
            end = 0
        if index < newest and count > (calm if end == index else least):
            begin, total = (begin, total) if end else (index, 0)
            end, total = index + 1, total + count
    if len(found) < 2 or sum(found[-1][:2]) < newest - _BINS_PER_SPAN:
        return _UNKNOWN
    begin, last, _ = found[-1]
    lengths, is_on = [length for _, length, _ in found[:-1]], begin + last == newest
    if is_on and last > _LONGER * max(lengths):
        return _UNKNOWN
    each = max(sum(lengths) / len(lengths), last + 1.0) if is_on else float(last)
    rate = sum(total for *_, total in found) / sum(length for _, length, _ in found) / _BIN_S
    return _Bursts(_BIN_S * (newest - begin), _BIN_S * each, rate)


def _calm(counts: Sequence[int]) -> int:
    """Return the median of the spans' counts in WINDOW_S. Spans before the first request are assumed to be as calm as
    the calmest tenth, because otherwise a burst that lasts for half of the known time would count as calm.
    """
    ordered = sorted(counts)
    unknown = [ordered[len(ordered) // 10]] * (_SPAN_COUNT - len(ordered))
    return sorted([*ordered, *unknown])[_SPAN_COUNT // 2]

"""Recent traffic of a cluster, and speeds of its instances: the input of the planner's predictions."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import zip_longest

from ballast.common.cost import Chunk, CostModel

_LEAST_STEP_S, _MOST_STEP_S = 1e-6, 60.0  # whatever the model and the machine are
_OLD_NUMBERS = 11  # of a version that did not know how long bursts last
_MOST = 1 << 50  # of any number that somebody writes: thousands of them add up to less than an int64
RECENT_S, MINUTE_S, WINDOW_S = 10.0, 60.0, 300.0
# Waits for first tokens are counted up to these, and beyond the last: a quarter apart, 20 ms to 8 minutes.
_WAITS_S = tuple(0.02 * 1.25**i for i in range(46))
WAIT_COUNTS = len(_WAITS_S) + 1
# Prompts are counted by their tokens up to these: a quarter apart, 16 to 900,000.
_LENGTHS = tuple(16 * 1.25**i for i in range(50))
LENGTH_COUNTS = len(_LENGTHS) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LongDemand:
    """Requests waiting for a group that holds them, as no single instance does."""

    count: int = 0
    need_tokens: int = 0  # of the largest, with the expected rest of its answer
    prompt_tokens: int = 0  # tokens of these requests' prompts that are yet to be computed
    wait_s: float = 0.0  # of the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Counters of dispatchers, which can be summed."""

    queued_count: int = 0  # requests on no worker
    queued_tokens: int = 0  # of their prompts, and of what earlier attempts have generated
    recent_count: int = 0  # requests that came in the last RECENT_S
    minute_count: int = 0  # in the last MINUTE_S
    minute_tokens: int = 0  # prompt tokens of these
    calm_per_s: float = 0.0  # requests; the median of spans of RECENT_S in WINDOW_S
    ended_count: int = 0  # answers that ended in the last WINDOW_S
    ended_tokens: int = 0  # tokens of these
    open_tokens: int = 0  # so far, of answers that have not ended
    known_s: float = 0.0  # observed time, at most WINDOW_S
    oldest_wait_s: float = 0.0  # of the requests that have had no token yet, wherever they are
    burst_left_s: float = 0.0  # for how much longer the present rate lasts, by bursts in WINDOW_S; 0: unknown
    # Requests that have ever had a first token, by the `wait_index` of their wait; zeros at the end are left out.
    first_counts: tuple[int, ...] = ()
    later_count: int = 0  # tokens ever, after the first ones
    later_s: float = 0.0  # that these took, each from the one before
    # Requests of the last minute, by the `length_index` of their prompt; zeros at the end are left out.
    prompt_counts: tuple[int, ...] = ()
    long: LongDemand = LongDemand()  # in no other number here but those of answers

    @property
    def is_idle(self) -> bool:
        return not (self.queued_count or self.minute_count or self.ended_count or self.calm_per_s or self.long.count)

    def is_believable(self, max_model_len: int) -> bool:
        """False if mean lengths exceed the model's limits."""
        told = (
            (self.queued_tokens, self.queued_count),
            (self.minute_tokens, self.minute_count),
            (self.ended_tokens, self.ended_count),
        )
        return all(tokens <= max_model_len * count for tokens, count in told)

    def prompt_quantile(self, share: float) -> float | None:
        """Quantile of the last minute's prompt lengths; None if there were none."""
        return _quantile(self.prompt_counts, share, _LENGTHS)


def write_traffic(traffic: Traffic) -> str:
    """The form in the state server: all fields as numbers, in order."""
    *own, long = astuple(traffic)
    return " ".join(map(_written, (*own, *long)))


def _written(value: float | tuple[int, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def read_traffic(text: str) -> Traffic:
    """
    Raises:
        ValueError: the value is not in this form; another version may have written it.
    """
    words = text.split(" ")
    if words[-1].endswith("]"):  # of a version that knew no long requests
        words += ["0"] * 4
    *numbers, firsts, later, later_s, prompts, long_count, need, prompt, long_wait = words
    if len(numbers) == _OLD_NUMBERS:
        numbers = [*numbers, "0"]
    queued, queued_tokens, recent, minute, minute_tokens, calm, ended, ended_tokens, going_on, known, oldest, left = (
        numbers
    )
    counts = [
        int(value)
        for value in (queued, queued_tokens, recent, minute, minute_tokens, ended, ended_tokens, going_on, later)
    ]
    counts += [int(value) for value in (long_count, need, prompt)]
    rates = [float(value) for value in (calm, known, oldest, later_s, long_wait, left)]
    first_counts, prompt_counts = (
        [int(value) for value in word[1:-1].split(",") if value] for word in (firsts, prompts)
    )
    told = (*counts, *rates, *first_counts, *prompt_counts)
    too_many = len(first_counts) > WAIT_COUNTS or len(prompt_counts) > LENGTH_COUNTS
    if too_many or not all(0 <= value <= _MOST for value in told):
        raise ValueError(f"no counts and rates: {text}")
    return Traffic(
        queued_count=counts[0],
        queued_tokens=counts[1],
        recent_count=counts[2],
        minute_count=counts[3],
        minute_tokens=counts[4],
        calm_per_s=rates[0],
        ended_count=counts[5],
        ended_tokens=counts[6],
        known_s=rates[1],
        oldest_wait_s=rates[2],
        burst_left_s=rates[5],
        first_counts=tuple(first_counts),
        open_tokens=counts[7],
        later_count=counts[8],
        later_s=rates[3],
        prompt_counts=tuple(prompt_counts),
        long=LongDemand(count=counts[9], need_tokens=counts[10], prompt_tokens=counts[11], wait_s=rates[4]),
    )


def sum_traffic(parts: Iterable[Traffic]) -> Traffic:
    """The traffic of several dispatchers together. Calm rates are added too, which is near that of the sum."""
    listed = list(parts)
    return Traffic(
        queued_count=sum(p.queued_count for p in listed),
        queued_tokens=sum(p.queued_tokens for p in listed),
        recent_count=sum(p.recent_count for p in listed),
        minute_count=sum(p.minute_count for p in listed),
        minute_tokens=sum(p.minute_tokens for p in listed),
        calm_per_s=math.fsum(p.calm_per_s for p in listed),
        ended_count=sum(p.ended_count for p in listed),
        ended_tokens=sum(p.ended_tokens for p in listed),
        open_tokens=sum(p.open_tokens for p in listed),
        known_s=max((p.known_s for p in listed), default=0.0),
        oldest_wait_s=max((p.oldest_wait_s for p in listed), default=0.0),
        burst_left_s=max((p.burst_left_s for p in listed), default=0.0),
        first_counts=tuple(map(sum, zip_longest(*(p.first_counts for p in listed), fillvalue=0))),
        later_count=sum(p.later_count for p in listed),
        later_s=math.fsum(p.later_s for p in listed),
        prompt_counts=tuple(map(sum, zip_longest(*(p.prompt_counts for p in listed), fillvalue=0))),
        long=_sum_long([p.long for p in listed]),
    )


def _sum_long(parts: Sequence[LongDemand]) -> LongDemand:
    largest = max(parts, key=lambda part: part.need_tokens, default=LongDemand())
    wait_s = max((part.wait_s for part in parts), default=0.0)
    return replace(largest, count=sum(part.count for part in parts), wait_s=wait_s)


def wait_index(wait_s: float) -> int:
    """Which of `WAIT_COUNTS` a wait counts for."""
    return bisect_left(_WAITS_S, wait_s)


def length_index(token_count: int) -> int:
    """Which of `LENGTH_COUNTS` a prompt counts for."""
    return bisect_left(_LENGTHS, token_count)


@dataclass(frozen=True, slots=True)
class Served:
    """Waits and token times between two reads of the traffic."""

    first_count: int  # requests that had their first token
    ttft_p99_s: float | None  # of these requests; None where there are none
    tpot_s: float | None  # mean over the tokens after the first ones
    token_count: int = 0  # first ones and others


def served_between(before: Traffic, after: Traffic) -> Served | None:
    """None: a dispatcher is lost, with its counters."""
    pairs = list(zip_longest(before.first_counts, after.first_counts, fillvalue=0))
    counts = [later - earlier for earlier, later in pairs]
    tokens, took_s = after.later_count - before.later_count, after.later_s - before.later_s
    if min([tokens, *counts]) < 0 or took_s < 0.0:
        return None
    return Served(
        sum(counts), _quantile(counts, 0.99, _WAITS_S), took_s / tokens if tokens else None, sum(counts) + tokens
    )


def _quantile(counts: Sequence[int], share: float, bounds: Sequence[float]) -> float | None:
    """Within a class all are taken to be spread evenly; beyond the last bound they are at it. None: there are none."""
    wanted = share * sum(counts)
    if wanted <= 0.0:
        return None
    for index, count in enumerate(counts):
        if wanted <= count:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[min(index, len(bounds) - 1)] - low) * wanted / count
        wanted -= count
    return bounds[-1]


@dataclass(frozen=True, slots=True)
class Pace:
    """Batch costs of an instance with `layer_count` layers, learnt from its steps."""

    cost: CostModel
    layer_count: int
    max_batch_tokens: int

    @property
    def is_believable(self) -> bool:
        """False: a step of one token takes a minute, or no time."""
        one_s = self.cost.chunk_cost_s(Chunk(0, 1))
        return self.layer_count > 0 and _LEAST_STEP_S <= one_s <= _MOST_STEP_S

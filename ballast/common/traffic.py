"""What clients have asked of a cluster lately, and how fast its instances are: what an outlook is made from."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from ballast.common.cost import CostModel

_MOST = 1 << 50  # of any number that somebody writes: thousands of them add up to less than an int64
RECENT_S, MINUTE_S, WINDOW_S = 10.0, 60.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Counts of dispatchers, which add up."""

    queued_count: int = 0  # requests that no worker knows of yet
    queued_tokens: int = 0  # of their prompts, and of what earlier attempts have generated
    recent_count: int = 0  # requests that came in the last RECENT_S
    minute_count: int = 0  # in the last MINUTE_S
    minute_tokens: int = 0  # prompt tokens of these
    calm_per_s: float = 0.0  # requests; the median of spans of RECENT_S in the last WINDOW_S
    ended_count: int = 0  # answers that ended in the last WINDOW_S
    ended_tokens: int = 0  # tokens of these
    known_s: float = 0.0  # for so long it has been counted, at most WINDOW_S

    @property
    def is_idle(self) -> bool:
        return not (self.queued_count or self.minute_count or self.ended_count or self.calm_per_s)


def write_traffic(traffic: Traffic) -> str:
    """As it stands in the state server: its numbers in order."""
    return " ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in astuple(traffic))


def read_traffic(text: str) -> Traffic:
    """
    Raises:
        ValueError: another version has written it, or nobody of ours.
    """
    queued, queued_tokens, recent, minute, minute_tokens, calm, ended, ended_tokens, known = text.split(" ")
    counts = [int(value) for value in (queued, queued_tokens, recent, minute, minute_tokens, ended, ended_tokens)]
    rates = [float(value) for value in (calm, known)]
    if not all(0 <= value <= _MOST for value in (*counts, *rates)):
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
    )


def sum_traffic(parts: Iterable[Traffic]) -> Traffic:
    """The traffic of several dispatchers together. Medians are added too, which is near the median of the sum."""
    listed = list(parts)
    calm_per_s = 0.0
    for part in listed:  # `sum` of floats depends on the version of Python
        calm_per_s += part.calm_per_s
    return Traffic(
        queued_count=sum(p.queued_count for p in listed),
        queued_tokens=sum(p.queued_tokens for p in listed),
        recent_count=sum(p.recent_count for p in listed),
        minute_count=sum(p.minute_count for p in listed),
        minute_tokens=sum(p.minute_tokens for p in listed),
        calm_per_s=calm_per_s,
        ended_count=sum(p.ended_count for p in listed),
        ended_tokens=sum(p.ended_tokens for p in listed),
        known_s=max((p.known_s for p in listed), default=0.0),
    )


@dataclass(frozen=True, slots=True)
class Pace:
    """What a batch costs an instance that executes so many layers, as it has learnt from its own steps."""

    cost: CostModel
    layer_count: int
    max_batch_tokens: int

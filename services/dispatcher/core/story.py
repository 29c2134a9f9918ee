"""The history of a request, for the access log and `ballast why`. Its length is limited per request."""

import enum
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

_MAX_MOMENTS: Final = 64  # maximum moments stored per request; later ones are only counted
_RECENT_COUNT: Final = 4096


class What(enum.StrEnum):
    WAITING = "waiting"  # no worker had room at its arrival
    PLACED = "placed"  # placed on a worker
    MOVED = "moved"  # handed over from one worker to another
    MOVING = "moving"  # handed over to a worker whose stream is not open yet
    STRANDED = "stranded"  # its new worker could not be reached: back to the backlog
    FIRST_TOKEN = "first_token"
    RESUMED = "resumed"  # first token after a change of worker
    LOST = "lost"  # its worker was lost, or failed: back to the backlog
    SENT_BACK = "sent_back"  # refused by the worker: no room
    RECALLED = "recalled"  # recalled from a worker's queue
    TAKEN_OVER = "taken_over"  # arrived with tokens generated at another dispatcher


class Moment(NamedTuple):
    at_s: float
    what: What
    token_count: int  # tokens of the answer so far
    worker_id: str = ""
    detail: str = ""
    gap_s: float = 0.0  # for RESUMED: time since the previous token


class Story:
    """The history of one request."""

    __slots__ = ("left_out_count", "moments")

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.left_out_count = 0

    def add(self, moment: Moment) -> None:
        if len(self.moments) < _MAX_MOMENTS:
            self.moments.append(moment)
        else:
            self.left_out_count += 1


class Recent:
    """The most recent times to first token."""

    def __init__(self) -> None:
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=_RECENT_COUNT)  # (time, TTFT)

    def add(self, at_s: float, ttft_s: float) -> None:
        self._ttfts.append((at_s, ttft_s))

    def ttfts_s(self, since_s: float) -> Sequence[float]:
        return [ttft_s for at_s, ttft_s in self._ttfts if at_s >= since_s]

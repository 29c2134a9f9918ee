"""What has become of a request, moment by moment: for the access log and `ballast why`. Bounded for each request."""

import enum
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

_MAX_MOMENTS: Final = 64  # of one request; what comes later is counted only
_RECENT_COUNT: Final = 4096


class What(enum.StrEnum):
    WAITING = "waiting"  # nobody could take it when it came
    PLACED = "placed"  # on a worker
    MOVED = "moved"  # a worker went on with what another had handed over
    MOVING = "moving"  # handed over to a worker to which there is no stream yet
    STRANDED = "stranded"  # that worker could not be reached: back to the backlog
    FIRST_TOKEN = "first_token"
    RESUMED = "resumed"  # the first token after it has changed its place
    LOST = "lost"  # with its worker, or by an error there: back to the backlog
    SENT_BACK = "sent_back"  # the worker had no room after all
    RECALLED = "recalled"  # it waited on a worker while another one had room
    TAKEN_OVER = "taken_over"  # its client goes on with it here: another dispatcher has died


class Moment(NamedTuple):
    at_s: float
    what: What
    token_count: int  # of the answer, so far
    worker_id: str = ""
    detail: str = ""
    gap_s: float = 0.0  # resumed: since the token before


class Story:
    """The moments of one request."""

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
    """Times of the last first tokens, for those who look at the cluster now."""

    def __init__(self) -> None:
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=_RECENT_COUNT)  # (when, how long it took)

    def add(self, at_s: float, ttft_s: float) -> None:
        self._ttfts.append((at_s, ttft_s))

    def ttfts_s(self, since_s: float) -> Sequence[float]:
        return [ttft_s for at_s, ttft_s in self._ttfts if at_s >= since_s]

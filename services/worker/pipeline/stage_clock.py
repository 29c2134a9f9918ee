"""Where a stage's time goes, and a window of what it has done.

A stage is busy while it executes. It is idle while it does not although its leader has work: that is the bubble. The
leader knows when it has none and says with each batch how long that was, so that followers do not take quiet times for
bubbles. All times are of this process' clock; what crosses the wire is durations.
"""

from collections import deque
from dataclasses import dataclass
from threading import Lock
from typing import Literal, NamedTuple

from services.worker.core.batch import Batch

SPANS = 8192

Kind = Literal["run", "send", "receive", "transition"]


class Span(NamedTuple):
    began_s: float
    ended_s: float  # as it began: an instant
    kind: Kind
    epoch: int
    step_id: int
    token_count: int
    what: str = ""  # of a transition: its phase


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds since the start of the worker."""

    busy_s: float
    idle_s: float
    network_s: float  # part of `idle_s`: while the batch that ended the idleness was coming in
    send_s: float  # activations between their handing over to the link and the memory they leave
    steps: int

    @property
    def bubble_fraction(self) -> float:
        return self.idle_s / (self.busy_s + self.idle_s) if self.busy_s else 0.0


class StageClock:
    """Told by the engine thread; `sent` by links, and `times` and `spans` may be read by others."""

    def __init__(self) -> None:
        self._busy_s = self._idle_s = self._network_s = self._send_s = 0.0
        self._steps = 0
        self._ended_s: float | None = None  # of the batch before, in this layout
        self._quiet_since_s: float | None = None  # leader: it has no work
        self._quiet_s = 0.0  # leader: such time since the batch before
        self._spans: deque[Span] = deque(maxlen=SPANS)
        self._send_lock = Lock()

    # ------------------------------------------------------------ leader

    def note_work(self, at_s: float, *, has_work: bool) -> None:
        if has_work and self._quiet_since_s is not None:
            self._quiet_s += at_s - self._quiet_since_s
            self._quiet_since_s = None
        elif not has_work and self._quiet_since_s is None:
            self._quiet_since_s = at_s

    def take_quiet_s(self) -> float:
        """Since the batch before."""
        quiet_s, self._quiet_s = self._quiet_s, 0.0
        return quiet_s

    # ------------------------------------------------------------ every stage

    def begin_layout(self) -> None:
        """What lies between two layouts is a transition and not a bubble."""
        self._ended_s = self._quiet_since_s = None
        self._quiet_s = 0.0

    def note_transition(self, at_s: float, epoch: int, phase: str) -> None:
        self._spans.append(Span(at_s, at_s, "transition", epoch, 0, 0, phase))

    def received(self, batch: Batch, epoch: int, arrived_s: float, receive_s: float) -> None:
        """The network needed so long for the batch, which is run next. Counted as far as the stage was idle."""
        if self._ended_s is not None and batch.slices:
            self._network_s += max(0.0, arrived_s - max(self._ended_s, arrived_s - receive_s))
        self._spans.append(Span(arrived_s - receive_s, arrived_s, "receive", epoch, batch.step_id, _tokens(batch)))

    def ran(self, batch: Batch, epoch: int, began_s: float, ended_s: float) -> None:
        if self._ended_s is not None:
            self._idle_s += max(0.0, began_s - self._ended_s - batch.quiet_s)
        self._busy_s += ended_s - began_s
        self._ended_s = ended_s
        self._steps += 1
        self._spans.append(Span(began_s, ended_s, "run", epoch, batch.step_id, _tokens(batch)))

    def sent(self, batch: Batch, epoch: int, began_s: float, ended_s: float) -> None:
        with self._send_lock:
            self._send_s += ended_s - began_s
        self._spans.append(Span(began_s, ended_s, "send", epoch, batch.step_id, _tokens(batch)))

    # ------------------------------------------------------------ anybody

    @property
    def times(self) -> StageTimes:
        return StageTimes(self._busy_s, self._idle_s, self._network_s, self._send_s, self._steps)

    def spans(self) -> list[Span]:
        """The latest, at most SPANS, in the order of their ends."""
        return list(self._spans)


def _tokens(batch: Batch) -> int:
    return sum(len(part.token_ids) for part in batch.slices)

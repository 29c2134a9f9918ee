"""Busy and idle time of a stage, and its recent spans.

A stage is busy while it executes. It is idle (a pipeline bubble) while it does not execute although its leader has
work. With each batch the leader sends how long it had no work, so that followers do not count that time as a bubble.
Times refer to this process's clock; only durations are sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, cast

from services.worker.core.batch import Batch

if TYPE_CHECKING:
    import torch


SPANS = 8192

Kind = Literal["run", "send", "receive", "transition"]


class BusySpan(NamedTuple):
    began_s: float
    ended_s: float
    kind: Kind
    epoch: int
    step_id: int
    token_count: int
    what: str = ""  # phase, in a span of a transition


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Totals since the worker started; times in seconds."""

    busy_s: float
    idle_s: float
    network_s: float  # part of `idle_s` that was spent receiving the next batch
    send_s: float  # from queueing activations on the link to sending their last byte
    steps: int

    @property
    def bubble_fraction(self) -> float:
        return self.idle_s / (self.busy_s + self.idle_s) if self.busy_s else 0.0


class StageClock:
    """Counts a stage's busy and idle time. The engine thread updates it and links call `sent`; other threads may read
    `times` and `spans`.
    """

    def __init__(self) -> None:
        self._busy_s = self._idle_s = self._network_s = self._send_s = 0.0
        self._steps = 0
        self._ended_s: float | None = None  # end of the previous batch in this layout
        self._quiet_since_s: float | None = None  # on a leader: time since which it has had no work
        self._quiet_s = 0.0  # on a leader: seconds without work since the previous batch
        self._spans: deque[BusySpan] = deque(maxlen=SPANS)
        self._send_lock = Lock()

    # ------------------------------------------------------------ leader

    def note_work(self, at_s: float, *, has_work: bool) -> None:
        if has_work and self._quiet_since_s is not None:
            self._quiet_s += at_s - self._quiet_since_s
            self._quiet_since_s = None
        elif not has_work and self._quiet_since_s is None:
            self._quiet_since_s = at_s

    def take_quiet_s(self) -> float:
        """Return the time without work since the previous batch (seconds), and reset it."""
        quiet_s, self._quiet_s = self._quiet_s, 0.0
        return quiet_s

    # ------------------------------------------------------------ every stage

    def begin_layout(self) -> None:
        """Start over with a new layout, so that the transition does not count as a pipeline bubble."""
        self._ended_s = self._quiet_since_s = None
        self._quiet_s = 0.0

    def note_transition(self, at_s: float, epoch: int, phase: str) -> None:
        self._spans.append(BusySpan(at_s, at_s, "transition", epoch, 0, 0, phase))

    def received(self, batch: Batch, epoch: int, arrived_s: float, receive_s: float) -> None:
        """Record the reception of the next batch, which counts as network time while the stage is idle."""
        if self._ended_s is not None and batch.slices:
            self._network_s += max(0.0, arrived_s - max(self._ended_s, arrived_s - receive_s))
        self._spans.append(BusySpan(arrived_s - receive_s, arrived_s, "receive", epoch, batch.step_id, _tokens(batch)))

    def ran(self, batch: Batch, epoch: int, began_s: float, ended_s: float) -> None:
        if self._ended_s is not None:
            self._idle_s += max(0.0, began_s - self._ended_s - batch.quiet_s)
        self._busy_s += ended_s - began_s
        self._ended_s = ended_s
        self._steps += 1
        self._spans.append(BusySpan(began_s, ended_s, "run", epoch, batch.step_id, _tokens(batch)))

    def sent(self, batch: Batch, epoch: int, began_s: float, ended_s: float) -> None:
        with self._send_lock:
            self._send_s += ended_s - began_s
        self._spans.append(BusySpan(began_s, ended_s, "send", epoch, batch.step_id, _tokens(batch)))

    # ------------------------------------------------------------ any thread

    @property
    def times(self) -> StageTimes:
        return StageTimes(self._busy_s, self._idle_s, self._network_s, self._send_s, self._steps)

    def spans(self) -> list[BusySpan]:
        """The latest spans, at most SPANS, in the order of their ends."""
        return list(self._spans)


def _tokens(batch: Batch) -> int:
    return sum(len(part.token_ids) for part in batch.slices)


Told = Callable[[float, float], None]  # called with begin and end


class StageWatch(Protocol):
    """Measures when the stages executed by one thread begin and end."""

    def begin(self) -> float:
        """Record that a stage is about to run. Returns the current time (seconds)."""
        ...

    def end(self, told: Told) -> None:
        """Record that the stage has run or was launched. `told` is called now or by a later `begin` or `end`."""
        ...


class HostWatch:
    """A `StageWatch` for synchronous execution."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._began_s = 0.0

    def begin(self) -> float:
        self._began_s = self._now()
        return self._began_s

    def end(self, told: Told) -> None:
        told(self._began_s, self._now())


class Event(Protocol):
    """An event on a device's stream, like `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Event, /) -> float:
        """Return the milliseconds from this event to `end_event`."""
        ...


@dataclass(frozen=True, slots=True)
class _Launched:
    began: Event
    ended: Event
    told: Told


class EventWatch:
    """A `StageWatch` for asynchronous execution, which notices completed events when the next stage is launched."""

    def __init__(self, record: Callable[[], Event], now: Callable[[], float]) -> None:
        """`record()`: records an event behind all work launched so far."""
        self._record = record
        self._now = now
        self._launched: deque[_Launched] = deque()
        self._began: Event | None = None
        self._known: tuple[Event, float] | None = None  # a recent event whose time is known

    def begin(self) -> float:
        self._report_ended()
        self._began, at_s = self._record(), self._now()
        if not self._launched:  # the device is idle and reaches the event at once
            self._known = (self._began, at_s)
        return at_s

    def end(self, told: Told) -> None:
        assert self._began is not None
        self._launched.append(_Launched(self._began, self._record(), told))
        self._report_ended()

    def _report_ended(self) -> None:
        while self._launched and self._launched[0].ended.query():
            stage = self._launched.popleft()
            assert self._known is not None
            known, at_s = self._known
            began_s = at_s + known.elapsed_time(stage.began) / 1e3
            ended_s = began_s + stage.began.elapsed_time(stage.ended) / 1e3
            self._known = (stage.ended, ended_s)
            stage.told(began_s, ended_s)


def watch_for(device: torch.device, now: Callable[[], float]) -> StageWatch:
    if device.type == "cpu":
        return HostWatch(now)
    import torch

    def record() -> Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return cast("Event", event)  # only events of the same type are passed

    return EventWatch(record, now)

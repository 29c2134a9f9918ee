"""Where a stage's time goes, and a window of what it has done.

A stage is busy while it executes. It is idle while it does not although its leader has work: that is the bubble. The
leader knows when it has none and says with each batch how long that was, so that followers do not take quiet times for
bubbles. All times are of this process' clock; what crosses the wire is durations.
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


Told = Callable[[float, float], None]  # when it began and ended


class StageWatch(Protocol):
    """Of one thread that runs stages."""

    def begin(self) -> float:
        """A stage is about to be run. The time by the clock."""
        ...

    def end(self, told: Told) -> None:
        """It has been run, or been launched: `told` is called now, or by a later `begin` or `end`, in order."""
        ...


class HostWatch:
    """What has been run is over."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._began_s = 0.0

    def begin(self) -> float:
        self._began_s = self._now()
        return self._began_s

    def end(self, told: Told) -> None:
        told(self._began_s, self._now())


class Event(Protocol):
    """A moment in the work of a device, as `torch.cuda.Event` is."""

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Event, /) -> float:
        """Milliseconds."""
        ...


@dataclass(frozen=True, slots=True)
class _Launched:
    began: Event
    ended: Event
    told: Told


class EventWatch:
    """Nobody waits for the device: what has ended is seen when the next stage is launched."""

    def __init__(self, record: Callable[[], Event], now: Callable[[], float]) -> None:
        """`record`: an event behind all that has been launched."""
        self._record = record
        self._now = now
        self._launched: deque[_Launched] = deque()
        self._began: Event | None = None
        self._known: tuple[Event, float] | None = None  # an event of which the time is known: one not long ago

    def begin(self) -> float:
        self._tell_ended()
        self._began, at_s = self._record(), self._now()
        if not self._launched:  # the device has nothing to do, and comes by at once
            self._known = (self._began, at_s)
        return at_s

    def end(self, told: Told) -> None:
        assert self._began is not None
        self._launched.append(_Launched(self._began, self._record(), told))
        self._tell_ended()

    def _tell_ended(self) -> None:
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
        return cast("Event", event)  # it takes no other event than one of its kind

    return EventWatch(record, now)

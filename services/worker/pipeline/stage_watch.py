"""When a stage began and ended. A GPU is only told what to do, and does it later: there events say when it has."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch

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

"""How fast a stage and its links are, and how large chunks should be for that. No threads, no clock."""

from collections import deque
from dataclasses import dataclass

_STAGE_SHARE = 1 / 8  # of a new measurement in the mean: some ten steps are remembered
_LATE_SHARE = 0.25  # of a stage's time
_BESIDE_ACTIVATIONS = 2  # chunks in flight
_MEASURED_CHUNKS = 16
_MEASUREMENTS = 8


@dataclass(slots=True)
class StagePace:
    """What links need to know of the stage that sends activations over them. One per worker.

    Written by the engine thread, read by the links' threads, which may see a moment in between.
    """

    stage_s: float | None = None  # what it takes lately; None: this worker is not a stage, or has not executed yet
    due_at_s: float | None = None  # when the activation of the batch that is executed is expected; None: of no batch
    memory_is_awaited: bool = False  # requests have not been let in: parameters that come end that

    def is_late(self, at_s: float) -> bool:
        """The activation that was expected is so late that nobody knows when it will come."""
        return self.due_at_s is None or self.stage_s is None or at_s > self.due_at_s + _LATE_SHARE * self.stage_s

    def begins(self, at_s: float) -> None:
        if self.stage_s is not None:
            self.due_at_s = at_s + self.stage_s

    def ran(self, took_s: float) -> None:
        self.due_at_s = None
        self.stage_s = took_s if self.stage_s is None else self.stage_s + _STAGE_SHARE * (took_s - self.stage_s)


class ChunkSize:
    """Chunks of one link: two of them take about as long as the stage executes (EuroSys '26, section 4.2).

    Two are in flight while activations flow, as one alone would leave the link idle between its end and the next. So an
    activation finds at most a stage's time of bulk before it. While none flow, more are in flight. There is a least
    size: below it chunks cost wake-ups and not bandwidth, and a link that seems slow because of them would get smaller
    ones still.
    """

    def __init__(
        self, start_bytes: int, window_chunks: int, least_bytes: int, most_bytes: int, rate_bytes_per_s: float | None
    ) -> None:
        """`start_bytes` until speed and stage are known; `rate_bytes_per_s` is what a profile knows of the link."""
        self._start_bytes = start_bytes
        self._window_chunks = window_chunks
        self._beside_activations = min(_BESIDE_ACTIVATIONS, window_chunks)
        self._least_bytes = least_bytes
        self._most_bytes = most_bytes
        self._rates: deque[float] = deque([] if rate_bytes_per_s is None else [rate_bytes_per_s], _MEASUREMENTS)
        self._chunks, self._bytes, self._seconds = 0, 0, 0.0  # of the measurement under way

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Rate of bulk that waits for nothing: the best of some measurements, as what else runs only adds time."""
        return max(self._rates, default=None)

    def moved(self, size_bytes: int, took_s: float) -> None:
        """A chunk has left, so long after the one before it or after it was posted, without standing back between."""
        self._chunks += 1
        self._bytes += size_bytes
        self._seconds += took_s
        if self._chunks >= _MEASURED_CHUNKS and self._seconds > 0:  # they end in bursts: one alone says little
            self._rates.append(self._bytes / self._seconds)
            self._chunks, self._bytes, self._seconds = 0, 0, 0.0

    def bytes_for(self, stage_s: float | None) -> int:
        """Bytes of one chunk."""
        rate = self.rate_bytes_per_s
        if stage_s is None or rate is None:
            return self._start_bytes
        wanted_bytes = int(rate * stage_s / self._beside_activations)
        return min(max(wanted_bytes, self._least_bytes), self._most_bytes)

    def window_for(self, *, activations_flow: bool) -> int:
        """Chunks in flight."""
        return self._beside_activations if activations_flow else self._window_chunks

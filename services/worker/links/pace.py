"""Measured speed of a stage and its links, and the resulting chunk sizes. No threads, no clock."""

from collections import deque
from dataclasses import dataclass

_STAGE_SHARE = 1 / 8  # weight of a new measurement in the moving average, which covers about ten steps
_LATE_SHARE = 0.25  # fraction of a stage's time after which an activation counts as late
_BESIDE_ACTIVATIONS = 2  # chunks in flight while activations are sent
_MEASURED_CHUNKS = 16
_MEASUREMENTS = 8


@dataclass(slots=True)
class StagePace:
    """State of the stage that sends activations over the links. One per worker.

    Written by the engine thread, read by link threads, which may see an intermediate state.
    """

    stage_s: float | None = None  # recent duration of a step; None: no stage, or no step was executed yet
    due_at_s: float | None = None  # when the running batch's activation is expected; None: no batch runs
    memory_is_awaited: bool = False  # True: requests wait for memory that is available once parameters are loaded

    def is_late(self, at_s: float) -> bool:
        """True if the expected activation is so late that its time is unpredictable."""
        return self.due_at_s is None or self.stage_s is None or at_s > self.due_at_s + _LATE_SHARE * self.stage_s

    def begins(self, at_s: float) -> None:
        if self.stage_s is not None:
            self.due_at_s = at_s + self.stage_s

    def ran(self, took_s: float) -> None:
        self.due_at_s = None
        self.stage_s = took_s if self.stage_s is None else self.stage_s + _STAGE_SHARE * (took_s - self.stage_s)


class ChunkSize:
    """Chunk size of one link: two chunks take about as long as the stage executes (EuroSys '26, section 4.2).

    Two chunks are in flight while activations are sent, because a single one would leave the link idle in between. An
    activation therefore waits for bulk for at most the time of a stage. At other times more chunks are in flight. The
    minimum size prevents a feedback loop: small chunks cost wake-ups, which make the link seem slow, which would make
    chunks even smaller.
    """

    def __init__(
        self, start_bytes: int, window_chunks: int, least_bytes: int, most_bytes: int, rate_bytes_per_s: float | None
    ) -> None:
        """`start_bytes`: size while the speeds of link and stage are unknown; `rate_bytes_per_s`: the link's speed from
        a profile.
        """
        self._start_bytes = start_bytes
        self._window_chunks = window_chunks
        self._beside_activations = min(_BESIDE_ACTIVATIONS, window_chunks)
        self._least_bytes = least_bytes
        self._most_bytes = most_bytes
        self._rates: deque[float] = deque([] if rate_bytes_per_s is None else [rate_bytes_per_s], _MEASUREMENTS)
        self._chunks, self._bytes, self._seconds = 0, 0, 0.0  # sums of the current measurement

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Rate of bulk that is not held back: the maximum over several measurements, because other load only slows it
        down.
        """
        return max(self._rates, default=None)

    def moved(self, size_bytes: int, took_s: float) -> None:
        """Record a chunk that was sent without a hold, `took_s` after the previous one or after it was posted."""
        self._chunks += 1
        self._bytes += size_bytes
        self._seconds += took_s
        if self._chunks >= _MEASURED_CHUNKS and self._seconds > 0:  # completions arrive in bursts
            self._rates.append(self._bytes / self._seconds)
            self._chunks, self._bytes, self._seconds = 0, 0, 0.0

    def bytes_for(self, stage_s: float | None) -> int:
        """Return the chunk size of the link while a step of the stage takes `stage_s`; None: unknown."""
        rate = self.rate_bytes_per_s
        if stage_s is None or rate is None:
            return self._start_bytes
        wanted_bytes = int(rate * stage_s / self._beside_activations)
        return min(max(wanted_bytes, self._least_bytes), self._most_bytes)

    def window_for(self, *, activations_flow: bool) -> int:
        """Maximum number of chunks in flight."""
        return self._beside_activations if activations_flow else self._window_chunks

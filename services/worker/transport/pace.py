"""How fast a stage and its links are, and how large chunks should be for that. No threads, no clock."""

from dataclasses import dataclass

_STAGE_SHARE = 1 / 8  # of a new measurement in the mean: some ten steps are remembered
_REMEMBERED_CHUNKS = 16


@dataclass(slots=True)
class StagePace:
    """What links need to know of the stage that sends activations over them. One per worker.

    Written by the engine thread, read by the links' threads, which may see a moment in between.
    """

    stage_s: float | None = None  # what it takes lately; None: this worker is not a stage, or has not executed yet
    due_at_s: float | None = None  # when the activation of the batch that is executed is expected; None: of no batch

    def begins(self, at_s: float) -> None:
        if self.stage_s is not None:
            self.due_at_s = at_s + self.stage_s

    def ran(self, took_s: float) -> None:
        self.due_at_s = None
        self.stage_s = took_s if self.stage_s is None else self.stage_s + _STAGE_SHARE * (took_s - self.stage_s)


class ChunkSize:
    """Chunks of one link: those in flight together take about as long as the stage executes (EuroSys '26, section 4.2).

    So an activation finds at most one stage's time of bulk before it, whatever the link's speed, while several chunks
    in flight keep the link busy.
    """

    def __init__(
        self, start_bytes: int, window_chunks: int, least_bytes: int, most_bytes: int, rate_bytes_per_s: float | None
    ) -> None:
        """`start_bytes` until speed and stage are known; `rate_bytes_per_s` is what a profile knows of the link."""
        self._start_bytes = start_bytes
        self._window_chunks = window_chunks
        self._least_bytes = least_bytes
        self._most_bytes = most_bytes
        self._rate = rate_bytes_per_s
        self._seen_bytes = self._seen_s = 0.0

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Of bulk that has nothing to wait for."""
        return self._rate

    def moved(self, size_bytes: int, took_s: float) -> None:
        """So much has left in so long, without standing back in between."""
        keep = 1 - 1 / _REMEMBERED_CHUNKS
        self._seen_bytes = self._seen_bytes * keep + size_bytes
        self._seen_s = self._seen_s * keep + took_s
        if self._seen_s > 0:
            self._rate = self._seen_bytes / self._seen_s

    def bytes_for(self, stage_s: float | None) -> int:
        """Of one chunk."""
        if stage_s is None or self._rate is None:
            return self._start_bytes
        wanted = int(self._rate * stage_s / self._window_chunks)
        return min(max(wanted, self._least_bytes), self._most_bytes)

    def window_for(self, stage_s: float | None) -> int:
        """Chunks in flight: fewer where the least size of a chunk already takes its share of a stage's time."""
        if stage_s is None or self._rate is None:
            return self._window_chunks
        return min(max(int(self._rate * stage_s / self.bytes_for(stage_s)), 1), self._window_chunks)

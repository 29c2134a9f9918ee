"""A thread for what takes long and nobody waits for: destroying process groups, closing links of old epochs."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread


class Reaper:
    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # at most two entries per link
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def close(self, timeout_s: float) -> bool:
        """Do what is queued, then end. False: not done in time."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

"""A thread for slow clean-up: destroying process groups and closing links of old epochs."""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

from ballast.service.logs import get_logger


class Reaper:
    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # at most two entries per link
        self._lock = Lock()
        self._closed = False
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work` on the reaper's thread. If the reaper is closed, run it on the calling thread, because links of
        old epochs may end after the reaper.
        """
        with self._lock:
            if not self._closed:
                self._work.put(work)
                return
        _do(work)

    def close(self, timeout_s: float) -> bool:
        """Finish the queue and end. Returns False if the queue was not finished in time."""
        with self._lock:
            self._closed = True
            self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            _do(work)
            del work  # the reference would keep the last link alive


def _do(work: Callable[[], None]) -> None:
    """Run `work` and log any error, so that the other links are still closed."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - as above
        get_logger().error("a link was not closed cleanly", why=f"{type(error).__name__}: {error}")

"""Stops one thread of another process while its other threads run, like an engine that hangs in a step.

It works on Linux, for processes that this one may debug (ptrace): usually those that it has started. All calls must
come from the same thread, which becomes the tracer.
"""

import contextlib
import ctypes
import os
import platform
from pathlib import Path
from typing import Final, Self

_SEIZE: Final = 0x4206
_INTERRUPT: Final = 0x4207
_DETACH: Final = 17
_WAIT_FOR_THREADS: Final = 0x40000000  # the flag __WALL of waitpid


class StoppedThread:
    """A stopped thread. Call `go_on` even if the process has been killed, because its parent cannot reap it before
    that.
    """

    def __init__(self, thread_id: int) -> None:
        """Stop the thread.

        Raises:
            OSError: there is no such thread, or no permission to stop it.
        """
        self._thread_id = thread_id
        _ptrace(_SEIZE, thread_id)
        try:
            _ptrace(_INTERRUPT, thread_id)
            os.waitpid(thread_id, _WAIT_FOR_THREADS)
        except OSError:
            self.go_on()
            raise

    @classmethod
    def named(cls, pid: int, name: str) -> Self | None:
        """Stop the first thread with this name of a process; None if there is none, or it cannot be stopped."""
        with contextlib.suppress(OSError):
            for thread_id in sorted(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()):
                if Path(f"/proc/{pid}/task/{thread_id}/comm").read_text().strip() == name:
                    return cls(thread_id)
        return None

    def go_on(self) -> None:
        try:
            _ptrace(_DETACH, self._thread_id)
        except OSError:  # the process was killed: the tracer must reap the thread
            with contextlib.suppress(OSError):
                os.waitpid(self._thread_id, _WAIT_FOR_THREADS | os.WNOHANG)


def _ptrace(request: int, thread_id: int) -> None:
    if platform.system() != "Linux":
        raise OSError("threads can be stopped on Linux only")
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.restype = ctypes.c_long
    library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if library.ptrace(request, thread_id, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

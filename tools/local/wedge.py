"""Stops one thread of another process, while its others go on: as an engine does that hangs in a step.

Linux only, for processes that this one has started, or with the right to debug them (ptrace). All calls must come from
the same thread, the one that becomes the tracer.
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
_WAIT_FOR_THREADS: Final = 0x40000000  # __WALL


class StoppedThread:
    """`go_on` must be called, also if the process has been killed meanwhile: it cannot be waited for before."""

    def __init__(self, thread_id: int) -> None:
        """
        Raises:
            OSError: there is no such thread, or no right to stop it.
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
        """The first thread of that name. None: there is none, or it cannot be stopped here."""
        with contextlib.suppress(OSError):
            for thread_id in sorted(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()):
                if Path(f"/proc/{pid}/task/{thread_id}/comm").read_text().strip() == name:
                    return cls(thread_id)
        return None

    def go_on(self) -> None:
        try:
            _ptrace(_DETACH, self._thread_id)
        except OSError:  # killed: nobody else can take note of its end
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

"""Huge pages under the objects of large simulations.

Those of a thousand instances lie in a hundred thousand pages of 4 KiB: more than a processor remembers the places of,
and a virtual machine looks each up twice. Linux puts huge pages under them by itself only where all programs get them;
where each has to ask, this does.
"""

import ctypes
import mmap
import re
import sys
from collections.abc import Callable
from pathlib import Path

_LEAST_BYTES = 128 << 20  # resident; below it there is nothing to gain
_GROWTH_BYTES = 64 << 20  # since the last time
_HUGE_BYTES = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1: now, and not when the kernel comes by
# Private, writable, of no file: what allocators have. "start-end rw-p offset device inode name"
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *(?:\[heap\])?$", re.MULTILINE)


class HugePages:
    """One for each process. `look` now and then: asks for huge pages where it has grown; nothing on other systems."""

    def __init__(self) -> None:
        self.asked_bytes = 0  # the last time
        self._resident_bytes = 0  # at that time
        self._advise = _madvise() if sys.platform == "linux" else None

    def look(self) -> None:
        if self._advise is None:
            return
        if _resident_bytes() < max(_LEAST_BYTES, self._resident_bytes + _GROWTH_BYTES):
            return
        self.asked_bytes = 0
        for found in _ANONYMOUS.finditer(Path("/proc/self/maps").read_text()):
            begin = -(-int(found[1], 16) // _HUGE_BYTES) * _HUGE_BYTES
            size = int(found[2], 16) // _HUGE_BYTES * _HUGE_BYTES - begin
            if size > 0 and self._advise(begin, size, mmap.MADV_HUGEPAGE) == 0:
                self._advise(begin, size, _COLLAPSE)  # an older kernel does not know it, and comes by
                self.asked_bytes += size
        self._resident_bytes = _resident_bytes()  # now: huge pages are whole also where little was in use


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _madvise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise.restype = ctypes.c_int
    return advise

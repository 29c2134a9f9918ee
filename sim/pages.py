"""Huge pages for large simulations.

A thousand instances occupy a hundred thousand pages of 4 KiB, more than the TLB holds, and TLB misses are costly in
virtual machines. If Linux provides huge pages only on request, this module requests them.
"""

import ctypes
import mmap
import re
import sys
from collections.abc import Callable
from pathlib import Path

_LEAST_BYTES = 128 << 20  # resident size below which there is no gain
_GROWTH_BYTES = 64 << 20  # growth since the last request
_HUGE_BYTES = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1: synchronous
# Anonymous private writable mappings, as used by allocators. "start-end rw-p offset device inode name"
_ANONYMOUS = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *(?:\[heap\])?$", re.MULTILINE)


class HugePages:
    """Requests huge pages after growth of the process; call `look` periodically, once per process. No effect on other
    systems.
    """

    def __init__(self) -> None:
        self.asked_bytes = 0  # bytes requested last
        self._resident_bytes = 0  # resident size at that time
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
                self._advise(begin, size, _COLLAPSE)  # older kernels ignore it and collapse later
                self.asked_bytes += size
        self._resident_bytes = _resident_bytes()  # after the request, which increases it


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _madvise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise.restype = ctypes.c_int
    return advise

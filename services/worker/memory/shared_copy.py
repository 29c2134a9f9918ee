"""One copy of a model's parameters in a host's memory, mapped by all its workers.

    ROOT/<digest>/maker.lock       held by the worker that makes it
    ROOT/<digest>/parameters.bin   all parts, consecutively, in device layout
    ROOT/<digest>/manifest.json    parts with offsets, sums and checksums; written last: it marks completeness

An incomplete copy is never used: bytes are written under a temporary name and renamed when complete. If a worker is
killed while it writes, the kernel releases its lock and the next worker removes the bytes. Workers that use the copy
hold a shared lock on the file; the last one removes it.

Sums are verified while copying, which costs hardly more than the copy. The checksums, which are compared with those of
other workers, were computed by the worker that read the checkpoint (`ParameterStore.layer_checksum`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from ballast.common.errors import ConfigError
from ballast.service.logs import get_logger

ROOT = Path("/dev/shm/ballast")
_PIECE_BYTES = 1 << 18  # fits into a processor's cache between copying and summing
_MASK = (1 << 64) - 1
_LEFT_FRACTION = 0.1  # fraction of the host's memory that stays available
_LOCK, _BYTES, _MANIFEST = "maker.lock", "parameters.bin", "manifest.json"


class SharedPart(NamedTuple):
    offset_bytes: int
    size_bytes: int
    fast_sum: int
    checksum: str  # hexadecimal


class Copied(NamedTuple):
    """One part of a parameter store, to be copied to host memory."""

    name: str
    pieces: Sequence[torch.Tensor]
    checksum: bytes


def copy_summed(target: torch.Tensor, source: torch.Tensor) -> int:
    """Copy the bytes between contiguous tensors of equal size, at least one of them in host memory. Returns the sum of
    the bytes' words, which depends on the order of pieces.
    """
    to, of = (one.reshape(-1).view(torch.uint8) for one in (target, source))
    host = (of if of.device.type == "cpu" else to).numpy()
    total, both_here = 0, to.device.type == of.device.type == "cpu"
    here = to.numpy() if both_here else None
    if here is None:
        to.copy_(of)
    for number, start in enumerate(range(0, len(host), _PIECE_BYTES)):
        piece = host[start : start + _PIECE_BYTES]
        if here is not None:
            here[start : start + _PIECE_BYTES] = of.numpy()[start : start + _PIECE_BYTES]
        whole = len(piece) // 8 * 8
        total += (number + 1) * (int(np.add.reduce(piece[:whole].view(np.uint64))) + int(piece[whole:].sum()))
    return total & _MASK


class SharedCopy:
    """A complete copy, mapped for reading. Thread-safe."""

    def __init__(self, folder: Path, parts: Mapping[str, SharedPart], fd: int) -> None:
        """`fd`: the file with the bytes, with a shared lock on it."""
        self._folder, self._fd = folder, fd
        self.parts = parts
        self._map: mmap.mmap | None = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)  # private: torch wants to write
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.size_bytes = len(self._bytes)

    def fill(self, name: str, pieces: Sequence[torch.Tensor]) -> bool:
        """Copy a part to the device. Returns False if the part is missing, or was damaged after the copy was made."""
        part = self.parts.get(name)
        if part is None or part.size_bytes != sum(piece.nbytes for piece in pieces):
            return False
        at, total = part.offset_bytes, 0
        for piece in pieces:
            total = _mixed(total, copy_summed(piece, self._bytes[at : at + piece.nbytes]))
            at += piece.nbytes
        if total != part.fast_sum:
            get_logger().error("host copy is damaged and not used", part=name, folder=str(self._folder))
            return False
        return True

    def close(self) -> None:
        """Close the mapping. The last user removes the copy. Idempotent."""
        if self._map is None:
            return
        self._map = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(OSError):  # other workers hold the lock, or wait for it
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock_fd = os.open(self._folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in (_MANIFEST, _BYTES, _LOCK):
                    (self._folder / name).unlink(missing_ok=True)
                self._folder.rmdir()
            finally:
                os.close(lock_fd)
        os.close(self._fd)


class Maker:
    """The exclusive right to make a copy, for which other workers wait."""

    def __init__(self, folder: Path, lock_fd: int) -> None:
        self._folder, self._lock_fd = folder, lock_fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the right, unless this worker has made the copy."""
        self.give_up()

    def give_up(self) -> None:
        """Let the other workers stop waiting. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = -1

    def make(self, parts: Sequence[Copied]) -> SharedCopy | None:
        """Make the copy. Returns None if the host has too little memory, which is not an error."""
        size_bytes = sum(piece.nbytes for part in parts for piece in part.pieces)
        under_way, manifest = (self._folder / f"{name}.{os.getpid()}" for name in (_BYTES, _MANIFEST))
        fd = os.open(under_way, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)  # so that no write can fail
            with mmap.mmap(fd, size_bytes) as mapped:
                found = _write(mapped, parts)
            fcntl.flock(fd, fcntl.LOCK_SH)
            under_way.rename(self._folder / _BYTES)
            manifest.write_text(json.dumps(found))
            manifest.rename(self._folder / _MANIFEST)
        except OSError as error:
            get_logger().warning("no host copy is made", size_bytes=size_bytes, why=str(error))
            for left in (under_way, self._folder / _BYTES, manifest):
                left.unlink(missing_ok=True)
            os.close(fd)
            return None
        return SharedCopy(self._folder, found, fd)


def _write(mapped: mmap.mmap, parts: Sequence[Copied]) -> dict[str, SharedPart]:
    memory, found, at = torch.frombuffer(mapped, dtype=torch.uint8), dict[str, SharedPart](), 0
    for part in parts:
        begin, total = at, 0
        for piece in part.pieces:
            total = _mixed(total, copy_summed(memory[at : at + piece.nbytes], piece))
            at += piece.nbytes
        found[part.name] = SharedPart(begin, at - begin, total, part.checksum.hex())
    del memory
    return found


def _mixed(total: int, of_piece: int) -> int:
    return (total * 31 + of_piece) & _MASK


def open_copy(root: Path, digest: str) -> SharedCopy | Maker:
    """Return the copy, or the right to make it. Waits while another worker makes it.

    Raises:
        OSError: the folder cannot be created.
    """
    folder = root / digest
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            lock_fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # the last user has just removed it
            continue
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        if not _is_current_file(folder / _LOCK, lock_fd):
            os.close(lock_fd)
            continue
        copy = _mapped(folder)
        if copy is None:
            for left in folder.glob("*.bin*"):  # left by a killed worker, or inconsistent with the manifest
                left.unlink(missing_ok=True)
            return Maker(folder, lock_fd)
        os.close(lock_fd)
        return copy


def _mapped(folder: Path) -> SharedCopy | None:
    try:
        told: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())  # Any: JSON
        parts = {
            name: SharedPart(int(at), int(size), int(total), str(sha)) for name, (at, size, total, sha) in told.items()
        }
        fd = os.open(folder / _BYTES, os.O_RDONLY)
    except (OSError, ValueError, TypeError, IndexError, KeyError):
        return None
    fcntl.flock(fd, fcntl.LOCK_SH)
    size_bytes = sum(part.size_bytes for part in parts.values())
    if not _is_current_file(folder / _BYTES, fd) or os.fstat(fd).st_size != size_bytes:
        os.close(fd)
        return None
    return SharedCopy(folder, parts, fd)


def _is_current_file(path: Path, fd: int) -> bool:
    """True if the open file `fd` is still the one at `path`."""
    try:
        there, here = path.stat(), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def why_no_room(root: Path, size_bytes: int, budget_bytes: int | None) -> str:
    """Return the reason for not making a copy of this size; empty: it fits. `budget_bytes`: its limit; None: the memory
    that the host can spare.
    """
    if budget_bytes is not None and size_bytes > budget_bytes:
        return f"it takes {size_bytes:,} bytes, more than --host-copy allows ({budget_bytes:,})"
    there = next((folder for folder in (root, *root.parents) if folder.exists()), Path("/"))
    space = os.statvfs(there)
    free_bytes = space.f_bavail * space.f_frsize
    if size_bytes > free_bytes:
        return f"{there} has {free_bytes:,} bytes free, the copy takes {size_bytes:,}: enlarge the container's /dev/shm"
    total_bytes, available_bytes = host_memory()
    if budget_bytes is None and available_bytes - size_bytes < _LEFT_FRACTION * total_bytes:
        return f"the host has {available_bytes:,} bytes of memory available, but the copy takes {size_bytes:,}"
    return ""


def host_memory() -> tuple[int, int]:
    """(total, available) bytes of the host's memory."""
    found = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(found[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total, available


def budget_of(setting: str) -> int | None:
    """Parse the byte limit from the value of --host-copy, other than off. None: auto.

    Raises:
        ConfigError: the value is not auto, off or a number of bytes.
    """
    if setting == "auto":
        return None
    if not (setting.isascii() and setting.isdigit()):
        raise ConfigError("host_copy", f"must be auto, off or a number of bytes, got {setting!r}")
    return int(setting)

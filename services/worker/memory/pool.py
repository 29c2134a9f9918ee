"""Accounting of one device's memory: a budget of equal extents, and the address ranges into which they are mapped.

Every extent is either free, or has a purpose and is mapped in exactly one range of that purpose (I3). The pool and its
ranges are used by the engine thread only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.common.load import MemoryReport
from services.worker.memory.backend import ExtentRun, MemoryBackend


class Purpose(IntEnum):
    """Use of an extent; the value is stored per extent."""

    PARAMETERS = 1
    KV = 2


_FREE = 0
_IS_OWNED = b"\x00" + b"\x01" * 255  # owner -> 1 unless it is _FREE


class PhysicalPool:
    """Owns the budget. Bytes beyond the last whole extent cannot be mapped; they count as free."""

    def __init__(self, backend: MemoryBackend, budget_bytes: int, extent_bytes: int) -> None:
        if extent_bytes <= 0 or extent_bytes % backend.granularity_bytes:
            raise ConfigError(
                "extent_bytes", f"must be a positive multiple of {backend.granularity_bytes}, got {extent_bytes}"
            )
        if budget_bytes < extent_bytes:
            raise ConfigError("device_memory_bytes", f"{budget_bytes} is less than one extent of {extent_bytes} bytes")
        backend.create(extent_bytes, budget_bytes // extent_bytes)
        self.backend = backend
        self.budget_bytes = budget_bytes
        self.extent_bytes = extent_bytes
        self.extent_count = budget_bytes // extent_bytes
        self._owners = bytearray(self.extent_count)  # extent -> _FREE or its Purpose
        self._free: list[ExtentRun] = [ExtentRun(0, self.extent_count)]  # ascending, never adjacent
        self._taken = dict.fromkeys(Purpose, 0)  # purpose -> extents
        self._ranges: list[VirtualRange] = []
        self._reserved: list[tuple[int, int]] = []  # (address, size), each released as a whole
        self._closed = False
        self._given_up: list[ExtentRun] = []  # free extents whose memory has been returned to the device
        self._changes: list[_PoolChange] = []
        self._report: MemoryReport | None = None  # None: changed since it was last created
        self._checked: MemoryReport | None = None  # the report as of the last check

    @property
    def free_count(self) -> int:
        return self.extent_count - sum(self._taken.values())

    def taken_count(self, purpose: Purpose) -> int:
        return self._taken[purpose]

    def extents_for(self, size_bytes: int) -> int:
        """Number of extents needed for `size_bytes` bytes."""
        return -(-size_bytes // self.extent_bytes)

    def reserve(self, name: str, purpose: Purpose, extent_count: int) -> VirtualRange:
        """Reserve a range for up to `extent_count` extents, with none mapped. It lives as long as the pool."""
        [made] = self.reserve_windows(name, purpose, extent_count, count=1)
        return made

    def reserve_windows(
        self, name: str, purpose: Purpose, extent_count: int, count: int = 2
    ) -> tuple[VirtualRange, ...]:
        """Reserve adjacent ranges of the same size, so that one tensor can cover all of them."""
        size_bytes = max(1, extent_count) * self.extent_bytes
        address = self.backend.reserve(count * size_bytes)
        self._reserved.append((address, count * size_bytes))
        made = tuple(VirtualRange(self, name, purpose, address + i * size_bytes, size_bytes) for i in range(count))
        self._ranges += made
        return made

    def take(self, purpose: Purpose, count: int) -> list[ExtentRun]:
        """Take free extents in as few runs as possible, from the lowest runs that fit.

        Raises:
            InvariantViolation: fewer than `count` are free; callers check `free_count` first.
        """
        if count and self._given_up:
            raise InvariantViolation(f"{count} extents requested for {purpose.name}, but free memory was returned")
        if count > self.free_count:
            raise InvariantViolation(f"{count} extents requested for {purpose.name}, but {self.free_count} are free")
        taken: list[ExtentRun] = []
        while count:
            fitting = next((run for run in self._free if run.count >= count), None)
            source = fitting or max(self._free, key=lambda run: (run.count, -run.first))
            part = ExtentRun(source.first, min(count, source.count))
            self._own(purpose, source, part)
            taken.append(part)
            count -= part.count
        return sorted(taken)

    def give_back(self, purpose: Purpose, runs: Iterable[ExtentRun]) -> None:
        """Return unmapped extents to the pool."""
        self._report = None
        for run in runs:
            if self._owners.count(purpose, run.first, run.end) != run.count:
                raise InvariantViolation(f"extents {run} are returned by {purpose.name}, which does not own them all")
            self._owners[run.first : run.end] = bytes(run.count)
            self._taken[purpose] -= run.count
            self._insert_free(run)

    def give_up_free(self) -> None:
        """Return the memory of all free extents to the device. No extent can be taken until `take_back`. Idempotent."""
        if not self._given_up:
            self.backend.give_up(self._free)
            self._given_up = list(self._free)

    @property
    def has_given_up(self) -> bool:
        return bool(self._given_up)

    def take_back(self, files: Iterable[int] | None = None) -> None:
        """Allocate the returned memory again. `files`: see `MemoryBackend.take_back`. Idempotent.

        Raises:
            ConfigError: the device lacks the memory; nothing has changed.
        """
        self.backend.take_back(self._given_up, files)
        self._given_up = []

    def begin(self) -> None:
        """Start recording changes for `undo`."""
        self._changes.clear()

    def undo(self) -> None:
        """Undo the changes of ranges since `begin`. They then have the same extents again, with the same bytes unless
        these were written to.
        """
        while self._changes:
            change = self._changes[-1]
            if change.grown:
                self.give_back(change.owner.purpose, change.owner.unmap_tail(sum(run.count for run in change.runs)))
            else:
                change.owner.map_tail(change.runs)
                self._retake(change.owner.purpose, change.runs)
            self._changes.pop()

    def changed(self, owner: VirtualRange, runs: Sequence[ExtentRun], *, grown: bool) -> None:
        self._changes.append(_PoolChange(owner, runs, grown))

    def report(self) -> MemoryReport:
        """Return the bytes of the budget by purpose. Every step calls this, so the same object is returned until the
        pool changes.
        """
        report = self._report
        if report is None:
            report = self._report = self._make_report()
        return report

    def _make_report(self) -> MemoryReport:
        parameter_bytes = self._taken[Purpose.PARAMETERS] * self.extent_bytes
        kv_bytes = self._taken[Purpose.KV] * self.extent_bytes
        return MemoryReport(
            budget_bytes=self.budget_bytes,
            parameter_bytes=parameter_bytes,
            kv_bytes=kv_bytes,
            free_bytes=self.budget_bytes - parameter_bytes - kv_bytes,
            extent_bytes=self.extent_bytes,
        )

    def check(self) -> None:
        """Raise InvariantViolation unless owners, ranges and free list agree (I3).

        Call it only between operations, because extents that are taken but not yet mapped count as leaked. Without a
        change since the last call it checks nothing.
        """
        if (report := self.report()) is self._checked:
            return
        report.check()
        expected = bytearray(self.extent_count)
        for owner in self._ranges:
            for run in owner.runs:
                taken = expected[run.first : run.end]
                if taken.count(_FREE) != run.count:
                    extent = run.first + next(i for i, purpose in enumerate(taken) if purpose != _FREE)
                    raise InvariantViolation(f"extent {extent} is mapped twice", story=self._story(extent))
                expected[run.first : run.end] = bytes([owner.purpose]) * run.count
        if expected != self._owners:
            extent = next(i for i in range(self.extent_count) if expected[i] != self._owners[i])
            why = "leaked" if expected[extent] == _FREE else "mapped by a range that does not own it"
            raise InvariantViolation(f"extent {extent} is {why}", story=self._story(extent))
        for purpose in Purpose:
            if expected.count(purpose) != self._taken[purpose]:
                raise InvariantViolation(
                    f"{purpose.name}: {self._taken[purpose]} counted, but {expected.count(purpose)} mapped"
                )
        self._check_free_list()
        self._checked = report

    def close(self) -> None:
        """Unmap everything and return the memory. Tensors over a range must not be used afterwards."""
        if self._closed:
            return
        self._closed = True
        for owner in self._ranges:
            owner.release()
        for address, size_bytes in self._reserved:
            self.backend.release(address, size_bytes)
        self.backend.close()

    def _retake(self, purpose: Purpose, runs: Iterable[ExtentRun]) -> None:
        """Take specific free extents."""
        for run in runs:
            self._own(purpose, next(free for free in self._free if free.first <= run.first < free.end), run)

    def _own(self, purpose: Purpose, source: ExtentRun, part: ExtentRun) -> None:
        """Mark a part of a free run as owned."""
        at = bisect_left(self._free, source)
        rest = (ExtentRun(source.first, part.first - source.first), ExtentRun(part.end, source.end - part.end))
        self._free[at : at + 1] = [run for run in rest if run.count]
        self._owners[part.first : part.end] = bytes([purpose]) * part.count
        self._taken[purpose] += part.count
        self._report = None

    def _insert_free(self, run: ExtentRun) -> None:
        at = bisect_left(self._free, run)
        first, end, low, high = run.first, run.end, at, at
        if at > 0 and self._free[at - 1].end == run.first:
            first, low = self._free[at - 1].first, at - 1
        if at < len(self._free) and self._free[at].first == run.end:
            end, high = self._free[at].end, at + 1
        self._free[low:high] = [ExtentRun(first, end - first)]

    def _check_free_list(self) -> None:
        listed = bytearray(b"\x01") * self.extent_count
        for run in self._free:
            listed[run.first : run.end] = bytes(run.count)
        if self._owners.translate(_IS_OWNED) != listed:
            raise InvariantViolation(f"the list of free extents is wrong: {self._free}")
        for one, other in zip(self._free, self._free[1:], strict=False):
            if one.end >= other.first:
                raise InvariantViolation(f"free runs {one} and {other} overlap or must be joined")

    def _story(self, extent: int) -> list[str]:
        owner = self._owners[extent]
        booked = Purpose(owner).name if owner else "free"
        holders = [r.name for r in self._ranges if any(run.first <= extent < run.end for run in r.runs)]
        return [f"booked as {booked}", f"mapped in {', '.join(holders) or 'no range'}"]


class _PoolChange(NamedTuple):
    owner: VirtualRange
    runs: Sequence[ExtentRun]
    grown: bool


class VirtualRange:
    """An address range that the pool reserves once. Extents are added and removed at its tail, while base address and
    tensor do not change.

    Only the first `mapped_bytes` of the tensor may be accessed, through views, slices and index_select. Reading beyond,
    for example by `repr` or `clone` of the whole tensor, crashes the process with SIGSEGV.
    """

    def __init__(self, pool: PhysicalPool, name: str, purpose: Purpose, address: int, reserved_bytes: int) -> None:
        self._pool = pool
        self.name = name
        self.purpose = purpose
        self.address = address
        self.reserved_bytes = reserved_bytes
        self.bytes = pool.backend.raw(address, reserved_bytes)
        self._runs: list[ExtentRun] = []  # in address order
        self._count = 0

    @property
    def runs(self) -> Sequence[ExtentRun]:
        return self._runs

    @property
    def extent_count(self) -> int:
        return self._count

    @property
    def mapped_bytes(self) -> int:
        return self._count * self._pool.extent_bytes

    def grow(self, count: int) -> None:
        """Take `count` extents from the pool and map them at the tail."""
        runs = self._pool.take(self.purpose, count)
        try:
            self.map_tail(runs)
        except BaseException:
            self._pool.give_back(self.purpose, runs)
            raise
        self._pool.changed(self, runs, grown=True)

    def shrink(self, count: int) -> None:
        """Unmap `count` extents at the tail and return them to the pool."""
        runs = self.unmap_tail(count)
        self._pool.give_back(self.purpose, runs)
        self._pool.changed(self, runs, grown=False)

    def map_tail(self, runs: Sequence[ExtentRun]) -> None:
        """Map runs that were taken for this range's purpose. On failure none is mapped."""
        added = sum(run.count for run in runs)
        if self.mapped_bytes + added * self._pool.extent_bytes > self.reserved_bytes:
            raise InvariantViolation(
                f"{self.name}: {added} more extents exceed the {self.reserved_bytes} bytes reserved"
            )
        if added:
            self._pool.backend.map(self.address + self.mapped_bytes, runs)
        for run in runs:
            self._append(run)
        self._count += added

    def unmap_tail(self, count: int) -> list[ExtentRun]:
        """Unmap `count` extents at the tail and return them."""
        if not 0 <= count <= self._count:
            raise InvariantViolation(f"{self.name}: {count} extents to unmap of {self._count}")
        if count == 0:
            return []
        kept, taken = _split(self._runs, self._count - count)
        self._pool.backend.unmap(self.address + self.mapped_bytes - count * self._pool.extent_bytes, taken)
        self._runs, self._count = kept, self._count - count
        return taken

    def contents(self, offset_bytes: int, size_bytes: int) -> Iterable[memoryview]:
        """Yield mapped bytes, in parts."""
        return self._pool.backend.contents(self.bytes[offset_bytes : offset_bytes + size_bytes])

    def release(self) -> None:
        """Unmap all extents. Called by the pool when it closes, before it releases the addresses."""
        if self._count:
            self._pool.backend.unmap(self.address, self._runs)
            self._runs, self._count = [], 0

    def _append(self, run: ExtentRun) -> None:
        if self._runs and self._runs[-1].end == run.first:
            run = ExtentRun(self._runs[-1].first, self._runs.pop().count + run.count)
        self._runs.append(run)


def _split(runs: Sequence[ExtentRun], count: int) -> tuple[list[ExtentRun], list[ExtentRun]]:
    """Split runs into the first `count` extents and the rest."""
    head: list[ExtentRun] = []
    tail: list[ExtentRun] = []
    for run in runs:
        part = min(run.count, count)
        count -= part
        if part:
            head.append(ExtentRun(run.first, part))
        if part < run.count:
            tail.append(ExtentRun(run.first + part, run.count - part))
    return head, tail

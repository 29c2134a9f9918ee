"""Prefix cache in host memory: KV blocks evicted from the device can be copied back instead of recomputed.

Each block that no sequence holds is copied once, in parallel with steps; the copy survives the block's eviction from
the device. Copies are found by prefix keys (`core.prefixes`) and use the host blocks that swapped sequences and mirrors
(`core.swapping`) leave free. When these need room, copies are evicted, least recently used first.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from ballast.common.errors import InvariantViolation
from ballast.common.marks import Mark
from services.worker.core.batch import BlockKey, BlockNumber, SequenceId
from services.worker.core.blocks import BlockBook


class _Copy(NamedTuple):
    number: BlockNumber  # number of the block on the device; negated, the copy's id in the host's book
    used_at_s: float  # last use on the device; 0.0 until the device evicts the block
    mark: Mark | None


class HostPrefixes:
    def __init__(self, host: BlockBook, block_tokens: int) -> None:
        """`host`: book of the host's blocks, shared with swapped sequences."""
        self._host = host
        self._block_tokens = block_tokens
        self._kept: OrderedDict[BlockKey, _Copy] = OrderedDict()  # in order of eviction
        self._copying: dict[BlockNumber, BlockKey] = {}  # copies of batches that have not completed
        self._read: Counter[BlockKey] = Counter()  # number of sequences that are copying a block back
        self.kept_since_s = 0.0  # every copy used since this time is still here

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._kept

    @property
    def marks(self) -> list[Mark]:
        return [copy.mark for copy in self._kept.values() if copy.mark is not None]

    @property
    def book_ids(self) -> list[SequenceId]:
        """Ids of all copies in the host's book, including unfinished ones."""
        return [*(-copy.number for copy in self._kept.values()), *(-number for number in self._copying)]

    @property
    def removable_count(self) -> int:
        """Number of copies that can be evicted."""
        return len(self._kept) - sum([key in self._kept for key in self._read])

    # ---------------------------------------------------------------- device to host

    def lacks(self, number: BlockNumber, key: BlockKey) -> bool:
        """True if the block is neither here nor being copied here."""
        return key not in self._kept and number not in self._copying

    def copy(self, numbers: Iterable[tuple[BlockNumber, BlockKey]]) -> tuple[int, ...]:
        """Reserve host blocks for copies that accompany the batch being formed, and return them. Requires enough free
        host blocks.
        """
        host_blocks: list[int] = []
        for number, key in numbers:
            self._copying[number] = key
            host_blocks += self._host.hold(-number, self._block_tokens)
        return tuple(host_blocks)

    def landed(self, numbers: Iterable[BlockNumber], *, good: bool) -> None:
        """Make the copies of a completed batch available, or release them if the batch failed (not `good`)."""
        for number in numbers:
            key = self._copying.pop(number, None)
            if key is None:
                continue
            if good and key not in self._kept:
                self._kept[key] = _Copy(number, 0.0, None)
            else:
                self._host.release(-number)

    def gone(self, number: BlockNumber, key: BlockKey, used_at_s: float, mark: Mark | None) -> bool:
        """Record that the device evicts a block, last used at `used_at_s`. Returns True if a complete copy remains
        here.
        """
        if self._copying.pop(number, None) is not None:
            self._host.release(-number)
        if (copy := self._kept.get(key)) is None:
            return False
        self._kept[key] = _Copy(copy.number, used_at_s, mark)
        self._kept.move_to_end(key)
        return True

    # ---------------------------------------------------------------- host to device

    def blocks(self, keys: Iterable[BlockKey]) -> tuple[int, ...]:
        """Return the host blocks of `keys`, all of which must be here."""
        return tuple([self._host.table(-self._kept[key].number)[0] for key in keys])

    def read(self, keys: tuple[BlockKey, ...]) -> None:
        """Pin blocks that are about to be copied to the device, until `done`."""
        self._read.update(keys)
        for key in reversed(keys):  # tail first, so that a block is evicted before the blocks before it
            self._kept.move_to_end(key)

    def done(self, keys: tuple[BlockKey, ...]) -> None:
        for key in keys:
            self._read[key] -= 1
            if self._read[key] <= 0:
                del self._read[key]

    # ---------------------------------------------------------------- eviction

    def make_room(self, block_count: int) -> None:
        """Evict up to `block_count` copies that are not being read."""
        going = islice((key for key in self._kept if key not in self._read), max(0, block_count))
        for key in [*going]:
            copy = self._kept.pop(key)
            self.kept_since_s = max(self.kept_since_s, copy.used_at_s)
            self._host.release(-copy.number)

    def clear(self) -> None:
        """Drop all copies, because stages hold other layers after a change of the group."""
        for number in (*(copy.number for copy in self._kept.values()), *self._copying):
            self._host.release(-number)
        for known in (self._kept, self._copying, self._read):
            known.clear()

    def check(self) -> None:
        """Raise InvariantViolation unless each copy has one block, and every copy being read is here."""
        for book_id in self.book_ids:
            if len(self._host.table(book_id)) != 1:
                raise InvariantViolation(f"the copy of number {-book_id} has {len(self._host.table(book_id))} blocks")
        if missing := [key for key in self._read if key not in self._kept]:
            raise InvariantViolation(f"{len(missing)} blocks are being copied back, but are not on the host")

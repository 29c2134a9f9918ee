"""Retained KV blocks in host memory: what is given up on the device may come back instead of being computed.

Each block that nobody holds is copied beside steps, once; when the device gives it up the copy stays. Copies are known
by the keys of their tokens (`core.prefixes`) and take what swapped sequences and mirrors (`core.swapping`) leave of the
host: they go first, the least recently used before others.
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
    number: BlockNumber  # that the block had on the device; the host's book knows the copy by it, negative
    used_at_s: float  # on the device, which has given it up; 0.0: not yet
    mark: Mark | None


class HostPrefixes:
    def __init__(self, host: BlockBook, block_tokens: int) -> None:
        """`host`: the blocks of host memory, shared with what is swapped."""
        self._host = host
        self._block_tokens = block_tokens
        self._kept: OrderedDict[BlockKey, _Copy] = OrderedDict()  # the first goes first
        self._copying: dict[BlockNumber, BlockKey] = {}  # of batches that have not landed
        self._read: Counter[BlockKey] = Counter()  # by sequences whose KV comes back
        self.kept_since_s = 0.0  # what has been used since then, and was copied, is still here

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._kept

    @property
    def marks(self) -> list[Mark]:
        return [copy.mark for copy in self._kept.values() if copy.mark is not None]

    @property
    def book_ids(self) -> list[SequenceId]:
        """What has blocks in the host's book."""
        return [*(-copy.number for copy in self._kept.values()), *(-number for number in self._copying)]

    @property
    def removable_count(self) -> int:
        """Blocks that make room for others."""
        return len(self._kept) - sum([key in self._kept for key in self._read])

    # ---------------------------------------------------------------- from the device

    def lacks(self, number: BlockNumber, key: BlockKey) -> bool:
        """Whether it is neither here nor being copied."""
        return key not in self._kept and number not in self._copying

    def copy(self, numbers: Iterable[tuple[BlockNumber, BlockKey]]) -> tuple[int, ...]:
        """They are copied beside the batch that is formed, for which there is room. Returns blocks of the host."""
        host_blocks: list[int] = []
        for number, key in numbers:
            self._copying[number] = key
            host_blocks += self._host.hold(-number, self._block_tokens)
        return tuple(host_blocks)

    def landed(self, numbers: Iterable[BlockNumber], *, good: bool) -> None:
        """The batch beside which they were copied has been run."""
        for number in numbers:
            key = self._copying.pop(number, None)
            if key is None:
                continue
            if good and key not in self._kept:
                self._kept[key] = _Copy(number, 0.0, None)
            else:
                self._host.release(-number)

    def gone(self, number: BlockNumber, key: BlockKey, used_at_s: float, mark: Mark | None) -> bool:
        """The device gives it up, which used it last then. Returns whether a copy stays here; one that has not landed
        is of no use.
        """
        if self._copying.pop(number, None) is not None:
            self._host.release(-number)
        if (copy := self._kept.get(key)) is None:
            return False
        self._kept[key] = _Copy(copy.number, used_at_s, mark)
        self._kept.move_to_end(key)
        return True

    # ---------------------------------------------------------------- and back

    def blocks(self, keys: Iterable[BlockKey]) -> tuple[int, ...]:
        """Blocks of the host; all of these are here."""
        return tuple([self._host.table(-self._kept[key].number)[0] for key in keys])

    def read(self, keys: tuple[BlockKey, ...]) -> None:
        """They are about to be copied to the device, and stay until `done`."""
        self._read.update(keys)
        for key in reversed(keys):  # tail first: what follows on a block goes before it
            self._kept.move_to_end(key)

    def done(self, keys: tuple[BlockKey, ...]) -> None:
        for key in keys:
            self._read[key] -= 1
            if self._read[key] <= 0:
                del self._read[key]

    # ---------------------------------------------------------------- making room

    def make_room(self, block_count: int) -> None:
        """So many blocks fewer are held, as far as there are ones that nobody reads."""
        going = islice((key for key in self._kept if key not in self._read), max(0, block_count))
        for key in [*going]:
            copy = self._kept.pop(key)
            self.kept_since_s = max(self.kept_since_s, copy.used_at_s)
            self._host.release(-copy.number)

    def clear(self) -> None:
        """The group changes: stages have other layers."""
        for number in (*(copy.number for copy in self._kept.values()), *self._copying):
            self._host.release(-number)
        for known in (self._kept, self._copying, self._read):
            known.clear()

    def check(self) -> None:
        """Raise InvariantViolation unless each copy has one block, and none that is read is missing."""
        for book_id in self.book_ids:
            if len(self._host.table(book_id)) != 1:
                raise InvariantViolation(f"the copy of number {-book_id} has {len(self._host.table(book_id))} blocks")
        if missing := [key for key in self._read if key not in self._kept]:
            raise InvariantViolation(f"{len(missing)} blocks come back from the host, where they are not")

"""Sequences whose KV is in host memory, or on its way there or back.

What gives way when the cache is full leaves the running set and keeps its blocks until they have been copied, some with
each step (`policy.swapping`); then they are free, and it waits in the line with its place by arrival. When it fits
again it gets new blocks, and runs on when its KV is back in them: no token is computed twice. A step copies blocks of
sequences that it does not compute, so both may happen at the same time.

The device's block ids are those of each stage's own book, the host's are the leader's, and the same on every stage:
there may be as many as the smallest stage has. Batches carry copies. As every stage takes batches in their order and
waits for the copies of each, what one batch has copied is there for the next one, even if it has not landed.

What is in here when the group changes loses what was copied.
"""

from dataclasses import dataclass
from enum import Enum

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import Batch, SequenceId, SwapCopy
from services.worker.core.blocks import BlockBook, blocks_for
from services.worker.core.events import BlockCopy
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.policy.swapping import CopyPace, copy_budget


class Phase(Enum):
    LEAVING = "leaving"  # holds blocks on both sides, its KV is complete on the device
    AWAY = "away"  # holds blocks on the host only
    RETURNING = "returning"  # holds blocks on both sides, its KV is complete on the host


class _Entry:
    __slots__ = ("block_count", "copied_count", "phase", "sequence")

    def __init__(self, sequence: Sequence, block_count: int) -> None:
        self.sequence = sequence
        self.block_count = block_count  # of its KV
        self.copied_count = 0  # in this direction
        self.phase = Phase.LEAVING


@dataclass(frozen=True, slots=True)
class SwapOrders:
    """What a step does besides computing."""

    left: tuple[Sequence, ...] = ()  # their KV is on the host: the device's blocks are free before the step
    back: tuple[Sequence, ...] = ()  # blocks of the device are taken for these
    copies: tuple[SwapCopy, ...] = ()

    @property
    def block_count(self) -> int:
        return sum(len(copy.host_blocks) for copy in self.copies)


NOTHING = SwapOrders()


class SwapSpace:
    """The space on the host, in counts, as in the scheduler. `block_count` 0: there is none, no sequence swaps."""

    def __init__(self, block_count: int, block_tokens: int, fixed_blocks: int) -> None:
        self._limit = block_count
        self._block_tokens = block_tokens
        self._fixed_blocks = fixed_blocks
        self._host = BlockBook(block_count, block_tokens)
        self._entries: dict[SequenceId, _Entry] = {}
        self._pace = CopyPace()
        self.swapped_total = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def enabled(self) -> bool:
        return self._limit > 0

    def limit(self, block_count: int) -> bool:
        """There may be so many blocks in use from now on. False: there are more, and those in here lose their KV."""
        self._limit = min(block_count, self._host.block_count)
        return self._host.used_count <= self._limit

    @property
    def sequences(self) -> list[Sequence]:
        return [entry.sequence for entry in self._entries.values()]

    @property
    def used_block_count(self) -> int:
        """Blocks in use on the host."""
        return self._host.used_count

    @property
    def budget_blocks(self) -> int:
        return copy_budget(self._pace, self._fixed_blocks)

    @property
    def has_copies(self) -> bool:
        return any(entry.phase is not Phase.AWAY for entry in self._entries.values())

    @property
    def leaving_block_count(self) -> int:
        """Blocks on the device, soon to be free."""
        return sum(s.reserved_block_count for s in self._in(Phase.LEAVING))

    @property
    def returning_count(self) -> int:
        return len(self._in(Phase.RETURNING))

    @property
    def holders(self) -> list[Sequence]:
        """Those that hold blocks of the device."""
        return [*self._in(Phase.LEAVING), *self._in(Phase.RETURNING)]

    @property
    def away(self) -> list[Sequence]:
        return self._in(Phase.AWAY)

    def _in(self, phase: Phase) -> list[Sequence]:
        return [entry.sequence for entry in self._entries.values() if entry.phase is phase]

    # ---------------------------------------------------------------- there and back

    def takes(self, sequence: Sequence) -> bool:
        """Whether it runs, has KV and the host has room for it."""
        block_count = blocks_for(sequence.computed_tokens, self._block_tokens)
        return sequence.snapshot is None and 0 < block_count <= self._limit - self._host.used_count

    def leave(self, sequence: Sequence) -> None:
        table = self._host.hold(sequence.sequence_id, sequence.computed_tokens)
        self._entries[sequence.sequence_id] = _Entry(sequence, len(table))
        self.swapped_total += 1

    def come_back(self, sequence: Sequence) -> None:
        entry = self._entries[sequence.sequence_id]
        if entry.phase is not Phase.AWAY:
            raise InvariantViolation(f"{sequence.name} comes back while it is {entry.phase.value}", sequence.story())
        entry.phase, entry.copied_count = Phase.RETURNING, 0

    def forget(self, sequence: Sequence) -> None:
        """It has ended, or lost its KV. A copy under way does no harm: nothing uses its blocks before the next step."""
        del self._entries[sequence.sequence_id]
        self._host.release(sequence.sequence_id)

    def settle(self) -> tuple[list[Sequence], list[Sequence]]:
        """Before a step: which are away now, and which are back. All copies that were ordered are made before it."""
        complete = [entry for entry in self._entries.values() if entry.copied_count == entry.block_count]
        left = [entry for entry in complete if entry.phase is Phase.LEAVING]
        back = [entry.sequence for entry in complete if entry.phase is Phase.RETURNING]
        for entry in left:
            entry.phase, entry.copied_count = Phase.AWAY, 0
        for sequence in back:
            self.forget(sequence)
        return [entry.sequence for entry in left], back

    def order(self, left: tuple[Sequence, ...], *, busy: bool) -> SwapOrders:
        """Copies for the step that is formed: those that leave first, since others wait for their blocks. A step that
        computes nothing has nothing to hide them behind, and copies all there is. `left` since the last one.
        """
        budget = self.budget_blocks if busy else sum(entry.block_count for entry in self._entries.values())
        copies: list[SwapCopy] = []
        back: list[Sequence] = []
        for phase in (Phase.LEAVING, Phase.RETURNING):
            for sequence_id, entry in self._entries.items():
                first = entry.copied_count
                count = min(budget, entry.block_count - first)
                if entry.phase is not phase or not count:
                    continue
                host_blocks = self._host.table(sequence_id)[first : first + count]
                tokens = entry.sequence.computed_tokens
                copies.append(SwapCopy(sequence_id, phase is Phase.LEAVING, first, tokens, host_blocks))
                if phase is Phase.RETURNING:
                    back.append(entry.sequence)
                entry.copied_count += count
                budget -= count
        return SwapOrders(left, tuple(back), tuple(copies))

    def measured(self, step_s: float, block_count: int, copy_s: float) -> None:
        """A step that copied so many blocks."""
        self._pace = self._pace.after(step_s, block_count, copy_s)

    # ---------------------------------------------------------------- inspector

    def check(self) -> None:
        """Raise InvariantViolation unless host blocks belong to exactly those in here, and each holds what it should
        (I3 for host memory).
        """
        self._host.check()
        if set(self._host.sequence_ids) != set(self._entries):
            raise InvariantViolation(f"host blocks of {self._host.sequence_ids}, swapped are {list(self._entries)}")
        for sequence_id, entry in self._entries.items():
            sequence = entry.sequence
            if sequence.state is not SequenceState.SWAPPED:
                raise InvariantViolation(f"{sequence.name} is in the swap space", sequence.story())
            needed = blocks_for(sequence.computed_tokens, self._block_tokens)
            if not 0 < needed == entry.block_count == len(self._host.table(sequence_id)):
                raise InvariantViolation(f"{sequence.name} miscounts its host blocks", sequence.story())
            if (entry.phase is Phase.AWAY) != (sequence.reserved_block_count == 0):
                raise InvariantViolation(f"{sequence.name} is {entry.phase.value}", sequence.story())
            if not 0 <= entry.copied_count <= entry.block_count:
                raise InvariantViolation(f"{sequence.name} has copied {entry.copied_count} blocks", sequence.story())


def block_copies(batch: Batch, book: BlockBook) -> tuple[BlockCopy, ...]:
    """The copies beside a batch on a stage whose `book` has applied it. Sequences that return get their blocks."""
    copies: list[BlockCopy] = []
    for copy in batch.copies:
        table = book.table(copy.sequence_id) if copy.out else book.hold(copy.sequence_id, copy.token_count)
        device_blocks = table[copy.first : copy.first + len(copy.host_blocks)]
        copies.append(BlockCopy(copy.out, device_blocks, copy.host_blocks))
    return tuple(copies)

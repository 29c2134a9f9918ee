"""Sequences whose KV is in host memory, or being swapped out or in.

A sequence preempted because the cache is full leaves the running set and keeps its blocks until they have been copied,
some in each step (`policy.swapping`). Then the blocks are free, and the sequence waits in the queue according to its
arrival. When it fits again it gets new blocks and runs once its KV has been copied back, so no token is computed twice.
A step copies only blocks of sequences that it does not compute, so copies and computation overlap.

Each stage has its own device block ids. The leader chooses host block ids, which are the same on every stage, so the
stage with the least host memory limits their number. Batches carry the copies. Every stage executes batches in order
and waits for the copies of each, so a batch may use blocks copied by an earlier batch before that one has completed.

The full blocks of an offline sequence, which are never written again, are copied while it runs; these copies are its
mirror, an incremental checkpoint. When preempted, the sequence is swapped out at once. Tokens that were not copied are
recomputed on its return, and the mirror stays valid. Mirrors use host blocks that online sequences leave free.

Prefix blocks that are only on the host (`core.host_prefixes`) are copied back the same way, at admission.

When the group changes, copied KV is dropped.
"""

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from enum import Enum

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import Batch, BlockKey, SequenceId, SwapCopy
from services.worker.core.blocks import BlockBook, blocks_for
from services.worker.core.events import BlockCopy
from services.worker.core.host_prefixes import HostPrefixes
from services.worker.core.line import OFFLINE_RANK, order
from services.worker.core.prefixes import PrefixIndex
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.policy.swapping import CopyPace, bringing_s, copy_budget


class SwapPhase(Enum):
    LEAVING = "leaving"  # holds blocks on both sides, its KV is complete on the device
    AWAY = "away"  # holds blocks on the host only
    RETURNING = "returning"  # holds blocks on both sides, its KV is complete on the host


class _SwapEntry:
    __slots__ = ("block_count", "copied_count", "first", "keys", "phase", "sequence")

    def __init__(self, sequence: Sequence, block_count: int, first: int = 0, keys: tuple[BlockKey, ...] = ()) -> None:
        self.sequence = sequence
        self.block_count = block_count  # blocks of its KV
        self.copied_count = 0  # blocks copied in the current direction
        self.phase = SwapPhase.LEAVING
        self.first = first  # index in its table of the first copied block
        self.keys = keys  # keys of prefix blocks copied from the host when it is first admitted, or empty


@dataclass(frozen=True, slots=True)
class SwapOrders:
    """The copies of a step, and the sequences whose copies have ended."""

    left: tuple[Sequence, ...] = ()  # their KV is on the host, so their device blocks are free before the step
    back: tuple[Sequence, ...] = ()  # sequences for which device blocks are reserved
    copies: tuple[SwapCopy, ...] = ()

    @property
    def block_count(self) -> int:
        return sum(len(copy.host_blocks) for copy in self.copies)


NOTHING = SwapOrders()


class SwapSpace:
    """Host memory as counts of blocks, like in the scheduler. `block_count` 0: no sequence is swapped."""

    def __init__(self, block_count: int, block_tokens: int, fixed_blocks: int, *, online: bool = True) -> None:
        """`online`: preempted online sequences are swapped, too; otherwise only offline ones."""
        self._limit = block_count
        self._online = online
        self._block_tokens = block_tokens
        self._fixed_blocks = fixed_blocks
        self._host = BlockBook(block_count, block_tokens)
        self.prefixes = HostPrefixes(self._host, block_tokens)
        self.entries: dict[SequenceId, _SwapEntry] = {}  # other modules only check whether it is empty
        self._mirrors: dict[
            SequenceId, int
        ] = {}  # running offline sequence -> number of its full blocks mirrored on the host
        self._pace = CopyPace()
        self.swapped_total = 0

    @property
    def enabled(self) -> bool:
        """True if online sequences are swapped."""
        return self._online and self._limit > 0

    def limit(self, block_count: int) -> bool:
        """Set the number of host blocks. Returns False if more are in use, so that the caller drops swapped KV."""
        self._limit = min(block_count, self._host.block_count)
        self.prefixes.make_room(self._host.used_count - self._limit)
        return self._host.used_count <= self._limit

    @property
    def sequences(self) -> list[Sequence]:
        return [entry.sequence for entry in self.entries.values()]

    @property
    def used_block_count(self) -> int:
        """Host blocks in use, except copies of retained blocks."""
        return self._host.used_count - len(self.prefixes)

    @property
    def has_space(self) -> bool:
        return self._limit > 0

    @property
    def budget_blocks(self) -> int:
        return copy_budget(self._pace, self._fixed_blocks)

    @property
    def has_copies(self) -> bool:
        return any(entry.phase is not SwapPhase.AWAY for entry in self.entries.values())

    @property
    def leaving_block_count(self) -> int:
        """Number of device blocks of sequences being swapped out, which will soon be free."""
        return sum(s.reserved_block_count for s in self._in(SwapPhase.LEAVING))

    @property
    def leaving_count(self) -> int:
        """Number of online sequences being swapped out. Offline ones are swapped out at once."""
        return len(self._in(SwapPhase.LEAVING))

    @property
    def returning(self) -> list[Sequence]:
        return self._in(SwapPhase.RETURNING)

    @property
    def holders(self) -> list[Sequence]:
        """Sequences that hold device blocks."""
        return [*self._in(SwapPhase.LEAVING), *self._in(SwapPhase.RETURNING)]

    @property
    def away(self) -> list[Sequence]:
        """Online sequences that are swapped out."""
        return [s for s in self._in(SwapPhase.AWAY) if s.rank != OFFLINE_RANK]

    @property
    def offline_away(self) -> list[Sequence]:
        return [s for s in self._in(SwapPhase.AWAY) if s.rank == OFFLINE_RANK]

    def _in(self, phase: SwapPhase) -> list[Sequence]:
        return [entry.sequence for entry in self.entries.values() if entry.phase is phase]

    # ---------------------------------------------------------------- swap out and in

    def takes(self, sequence: Sequence) -> bool:
        """True if the sequence may be swapped out: it has KV, and the host has room for it in addition to the other
        online sequences.
        """
        if not self._online or sequence.snapshot is not None:
            return False
        room = self._limit - self._host.used_count + sum(self._mirrors.values())
        room += sum(self.entries[s.sequence_id].block_count for s in self.offline_away)
        room += self.prefixes.removable_count
        return 0 < blocks_for(sequence.computed_tokens, self._block_tokens) <= room

    def leave(self, sequence: Sequence) -> list[Sequence]:
        """Swap out a sequence. Returns the offline sequences whose KV was dropped to make room."""
        lost = self._free(blocks_for(sequence.computed_tokens, self._block_tokens))
        table = self._host.hold(sequence.sequence_id, sequence.computed_tokens)
        self.entries[sequence.sequence_id] = _SwapEntry(sequence, len(table))
        self.swapped_total += 1
        return lost

    def _free(self, block_count: int) -> list[Sequence]:
        """Make room for an online sequence: evict copies of retained blocks first, then mirrors, then swapped-out
        offline sequences, newest first.
        """
        self.prefixes.make_room(block_count - self._limit + self._host.used_count)
        for sequence_id, mirrored in list(self._mirrors.items()):
            if (missing := block_count - self._limit + self._host.used_count) <= 0:
                break
            self._trim(sequence_id, max(0, mirrored - missing))
        lost: list[Sequence] = []
        for sequence in sorted(self.offline_away, key=order, reverse=True):
            if block_count <= self._limit - self._host.used_count:
                break
            self.forget(sequence)
            lost.append(sequence)
        return lost

    def come_back(self, sequence: Sequence) -> None:
        entry = self.entries[sequence.sequence_id]
        if entry.phase is not SwapPhase.AWAY:
            raise InvariantViolation(f"{sequence.name} is swapped in while it is {entry.phase.value}", sequence.story())
        entry.phase, entry.copied_count = SwapPhase.RETURNING, 0

    def forget(self, sequence: Sequence) -> None:
        """Release the host blocks of a sequence that ends or is recomputed. A copy under way is harmless: its blocks
        are not reused before the next step.
        """
        entry = self.entries.pop(sequence.sequence_id)
        self._host.release(sequence.sequence_id)
        if entry.keys:
            self.prefixes.done(entry.keys)

    def delay_return(self, sequence: Sequence) -> None:
        """Stop swapping in a sequence. Its KV on the host is complete."""
        entry = self.entries[sequence.sequence_id]
        entry.phase, entry.copied_count = SwapPhase.AWAY, 0

    def settle(self) -> tuple[list[Sequence], list[Sequence]]:
        """Complete all copies ordered so far, before a step. Returns the sequences that are now swapped out and the
        sequences that are now swapped in.
        """
        complete = [entry for entry in self.entries.values() if entry.copied_count == entry.block_count]
        left = [entry for entry in complete if entry.phase is SwapPhase.LEAVING]
        back = [entry.sequence for entry in complete if entry.phase is SwapPhase.RETURNING]
        for entry in left:
            entry.phase, entry.copied_count = SwapPhase.AWAY, 0
        for sequence in back:
            if sequence.rank == OFFLINE_RANK:  # the copy on the host stays valid as its mirror
                entry = self.entries.pop(sequence.sequence_id)
                self._mirrors[sequence.sequence_id] = entry.block_count
            else:
                if self.brings(sequence):
                    sequence.computed_tokens = sequence.dispatched_tokens
                self.forget(sequence)
        return [entry.sequence for entry in left], back

    def order(self, left: tuple[Sequence, ...], *, busy: bool) -> SwapOrders:
        """Order copies for the step being formed, those to the host first, because other sequences wait for the blocks.
        A step without online computation has nothing to overlap with, and copies everything for online sequences.
        Offline sequences are swapped in within the remaining budget, because a new online sequence would wait for the
        step. `left`: sequences that have left since the last step.
        """
        budget = self.budget_blocks
        copies: list[SwapCopy] = []
        back: list[Sequence] = []
        entries = sorted(self.entries.items(), key=lambda item: item[1].sequence.rank == OFFLINE_RANK)
        for phase in (SwapPhase.LEAVING, SwapPhase.RETURNING):
            for sequence_id, entry in entries:
                first, limited = entry.copied_count, busy or entry.sequence.rank == OFFLINE_RANK
                count = entry.block_count - first
                count = min(budget, count) if limited else count
                if entry.phase is not phase or count <= 0:
                    continue
                host_blocks, tokens = (
                    self._host.table(sequence_id)[first : first + count],
                    entry.sequence.computed_tokens,
                )
                if entry.keys:
                    host_blocks = self.prefixes.blocks(entry.keys[first : first + count])
                    tokens = entry.sequence.dispatched_tokens
                copies.append(
                    SwapCopy(sequence_id, phase is SwapPhase.LEAVING, entry.first + first, tokens, host_blocks)
                )
                if phase is SwapPhase.RETURNING:
                    back.append(entry.sequence)
                entry.copied_count += count
                budget -= count
        return SwapOrders(left, tuple(back), tuple(copies))

    # ---------------------------------------------------------------- copies of retained blocks

    def brings_within(self, block_count: int, seconds: float) -> bool:
        """True if copying this many blocks from the host takes less than `seconds`."""
        return block_count > 0 and bringing_s(self._pace, block_count) < seconds

    def bring(self, sequence: Sequence, first: int, keys: tuple[BlockKey, ...]) -> None:
        """Order copies of the prefix blocks `keys` into the sequence's table, from block `first` on."""
        entry = self.entries[sequence.sequence_id] = _SwapEntry(sequence, len(keys), first, keys)
        entry.phase = SwapPhase.RETURNING
        sequence.dispatched_tokens = (first + len(keys)) * self._block_tokens  # counted as computed from now on
        self.prefixes.read(keys)

    def brings(self, sequence: Sequence) -> bool:
        """True if the sequence waits until prefix blocks are copied."""
        return bool(self.entries[sequence.sequence_id].keys)

    def keep(self, orders: SwapOrders, index: PrefixIndex) -> SwapOrders:
        """Add copies of retained blocks to a step that computes, as many as overlap with it."""
        budget = self.budget_blocks - orders.block_count
        room = self._limit - self._host.used_count + self.prefixes.removable_count
        if room <= 0:
            index.keep_no_copies()
            return orders
        chosen = index.take_to_copy(min(budget, room))
        if not chosen:
            return orders
        self.prefixes.make_room(len(chosen) - self._limit + self._host.used_count)
        host_blocks, numbers = self.prefixes.copy(chosen), tuple([number for number, _ in chosen])
        return replace(orders, copies=(*orders.copies, SwapCopy(0, True, 0, 0, host_blocks, numbers)))

    def landed(self, orders: SwapOrders, *, good: bool) -> None:
        """Record that a step's copies of retained blocks have ended. `good`: the step has completed on all stages."""
        for copy in orders.copies:
            if copy.numbers:
                self.prefixes.landed(copy.numbers, good=good)

    # ---------------------------------------------------------------- mirrors

    @property
    def mirrored_block_count(self) -> int:
        return sum(self._mirrors.values())

    def mirror(self, orders: SwapOrders, sequences: Iterable[Sequence]) -> SwapOrders:
        """Add copies of full blocks of running offline sequences to a step that computes anyway. They get at most half
        of the copies that the step hides, so that copies for online sequences are never delayed.

        Args:
            orders: The step's swap orders so far.
            sequences: Running offline sequences, the next to be preempted first.
        """
        budget, copies = max(1, self.budget_blocks // 2) - orders.block_count, list(orders.copies)
        chosen = list(sequences)
        for place, sequence in enumerate(chosen):
            if sequence.scores_prompt:  # one engine must compute its whole prompt, so it starts over after a preemption
                continue
            mirrored = self._mirrors.get(sequence.sequence_id, 0)
            count = min(budget, sequence.computed_tokens // self._block_tokens - mirrored)
            if count <= 0:
                continue
            count = min(count, self._room(count, chosen[place + 1 :]))
            if count <= 0:
                break
            table = self._host.hold(sequence.sequence_id, (mirrored + count) * self._block_tokens)
            host_blocks = table[mirrored : mirrored + count]
            copies.append(SwapCopy(sequence.sequence_id, True, mirrored, sequence.computed_tokens, host_blocks))
            self._mirrors[sequence.sequence_id] = mirrored + count
            budget -= count
        return replace(orders, copies=tuple(copies)) if len(copies) > len(orders.copies) else orders

    def _room(self, block_count: int, later: list[Sequence]) -> int:
        """Make room for a mirror: evict copies of retained blocks, and mirrors of the sequences in `later`, which are
        preempted later. Returns how many of `block_count` host blocks are free.
        """
        self.prefixes.make_room(block_count - self._limit + self._host.used_count)
        for sequence in reversed(later):
            missing = block_count - self._limit + self._host.used_count
            if missing <= 0:
                break
            if mirrored := self._mirrors.get(sequence.sequence_id, 0):
                self._trim(sequence.sequence_id, max(0, mirrored - missing))
        return min(block_count, self._limit - self._host.used_count)

    def _trim(self, sequence_id: SequenceId, block_count: int) -> None:
        """Shorten a mirror to `block_count` blocks."""
        self._host.trim(sequence_id, block_count * self._block_tokens)
        if block_count:
            self._mirrors[sequence_id] = block_count
        else:
            del self._mirrors[sequence_id]

    def leave_by_mirror(self, sequence: Sequence) -> int:
        """Preempt a sequence that has a mirror. Returns how many of its tokens have KV on the host; 0: it is not
        swapped.
        """
        mirrored = self._mirrors.pop(sequence.sequence_id, 0)
        if mirrored:
            entry = self.entries[sequence.sequence_id] = _SwapEntry(sequence, mirrored)
            entry.phase = SwapPhase.AWAY
        return mirrored * self._block_tokens

    def drop_mirror(self, sequence: Sequence) -> None:
        if self._mirrors.pop(sequence.sequence_id, 0):
            self._host.release(sequence.sequence_id)

    def drop_mirrors(self, who: Container[SequenceId] | None) -> None:
        """Drop the mirrors of the sequences in `who`, or all of them."""
        for sequence_id in [i for i in self._mirrors if who is None or i in who]:
            self._trim(sequence_id, 0)

    def measured(self, step_s: float, block_count: int, copy_s: float) -> None:
        """Learn from the duration of a step that copied this many blocks. Steps without copies are ignored if online
        sequences are not swapped, because the simulator may skip such steps (`core.plain`).
        """
        if block_count or self.enabled:
            self._pace = self._pace.after(step_s, block_count, copy_s)

    # ---------------------------------------------------------------- inspector

    def check(self, offline: Iterable[Sequence]) -> None:
        """Raise InvariantViolation unless the host blocks in use are exactly those of swapped and mirrored sequences
        (I3 for host memory). Only running `offline` sequences may have mirrors.
        """
        self._host.check()
        self.prefixes.check()
        own = [i for i, entry in self.entries.items() if not entry.keys]
        if sorted(self._host.sequence_ids) != sorted(swapped := [*own, *self._mirrors, *self.prefixes.book_ids]):
            raise InvariantViolation(f"host blocks of {self._host.sequence_ids}, swapped or mirrored: {swapped}")
        mirrored = {s.sequence_id: s for s in offline if s.sequence_id in self._mirrors}
        for sequence_id, block_count in self._mirrors.items():
            if sequence_id not in mirrored:
                raise InvariantViolation(f"sequence {sequence_id} has a mirror but is no running offline one")
            full = mirrored[sequence_id].computed_tokens // self._block_tokens
            if not 0 < block_count == len(self._host.table(sequence_id)) <= full:
                story = mirrored[sequence_id].story()
                raise InvariantViolation(f"{mirrored[sequence_id].name} mirrors {block_count} blocks", story)
        for sequence_id, entry in self.entries.items():
            sequence = entry.sequence
            if sequence.state is not SequenceState.SWAPPED:
                raise InvariantViolation(f"{sequence.name} is in the swap space", sequence.story())
            needed = blocks_for(sequence.computed_tokens, self._block_tokens)
            held_count = len(self._host.table(sequence_id))
            if entry.keys:
                needed, held_count = sequence.dispatched_tokens // self._block_tokens - entry.first, len(entry.keys)
            if not 0 < needed == entry.block_count == held_count:
                raise InvariantViolation(f"{sequence.name} has a wrong count of host blocks", sequence.story())
            if (entry.phase is SwapPhase.AWAY) != (sequence.reserved_block_count == 0):
                raise InvariantViolation(f"{sequence.name} is {entry.phase.value}", sequence.story())
            if not 0 <= entry.copied_count <= entry.block_count:
                raise InvariantViolation(f"{sequence.name} has copied {entry.copied_count} blocks", sequence.story())


def block_copies(batch: Batch, book: BlockBook) -> tuple[BlockCopy, ...]:
    """Return the copies that accompany a batch. The stage's `book` must have applied the batch, so that sequences being
    swapped in have blocks.
    """
    copies: list[BlockCopy] = []
    for copy in batch.copies:
        if copy.numbers:
            device_blocks = book.numbered(copy.numbers)
        else:
            table = book.table(copy.sequence_id) if copy.out else book.hold(copy.sequence_id, copy.token_count)
            device_blocks = table[copy.first : copy.first + len(copy.host_blocks)]
        copies.append(BlockCopy(copy.out, device_blocks, copy.host_blocks))
    return tuple(copies)

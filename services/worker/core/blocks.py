"""The block tables of one stage, for the lifetime of a worker process: which KV blocks each sequence holds.

Every stage of a pipeline has its own book and applies the leader's batches to it. The leader admits and preempts by
block counts (`core.scheduler`), so a request for more blocks than a book has is a bug. Sequence ids are unique in the
cluster, so tables survive changes of the group.

Stages take batches in the order in which the leader formed them, and a batch frees blocks before it assigns any. A
block that batch k frees was therefore last used by a batch before k, and its next sequence uses it in batch k or later.
Two sequences never use it at once on any stage, however far that stage is behind the others.

A block that has a number (`core.prefixes`) may be in several tables. It is free when it is in no table and its number
has been removed.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, takewhile

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import Batch, BlockNumber, SequenceId

Table = tuple[int, ...]


def blocks_for(token_count: int, block_tokens: int) -> int:
    """Number of KV blocks for `token_count` tokens."""
    return -(-token_count // block_tokens)


_LOOKS = 64  # after this many checks of changed tables only, all tables are checked


class _Audit:
    """The state of a book when it was last checked."""

    __slots__ = ("claims", "looks_left", "numbered", "tables")

    def __init__(self, tables: dict[SequenceId, Table], numbered: dict[BlockNumber, int]) -> None:
        self.tables = tables
        self.numbered = numbered
        self.claims = Counter(chain(chain.from_iterable(tables.values()), numbered.values()))
        self.looks_left = _LOOKS


class BlockBook:
    """Block tables of one stage. The lowest free id is always taken first, so that used blocks stay at the low end of
    the cache and its tail can be released with few copies. Freeing or reusing a block costs one heap operation. Blocks
    never used are only counted, so the size of a book is bounded by the peak number of used blocks.

    Ids begin at `first_block`: a worker that is a stage of two groups has a book for each, over disjoint blocks.
    """

    def __init__(self, block_count: int, block_tokens: int, first_block: int = 0) -> None:
        self._first = first_block
        self._end = first_block + block_count
        self._block_tokens = block_tokens
        self._fresh = first_block  # this block and all higher ones are free
        self._returned: list[int] = []  # heap of the free blocks below `_fresh`
        self._tables: dict[SequenceId, Table] = {}  # in token order
        self._numbered: dict[BlockNumber, int] = {}  # number -> block
        self._claims: dict[int, int] = {}  # block -> reference count (its tables, plus 1 if numbered); absent: 0 or 1
        self._audit: _Audit | None = None  # result of the last check; None: the next one is a full check
        self._changed: dict[SequenceId, None] = {}  # tables that changed since the last check
        self._renumbered: dict[BlockNumber, None] = {}  # numbers that changed since the last check
        self.compaction_count = 0  # table changes (compactions and others) that moved KV

    @property
    def block_count(self) -> int:
        return self._end - self._first

    @property
    def free_count(self) -> int:
        return len(self._returned) + self._end - self._fresh

    @property
    def used_count(self) -> int:
        return self._fresh - self._first - len(self._returned)

    @property
    def sequence_ids(self) -> Sequence[SequenceId]:
        return tuple(self._tables)

    def table(self, sequence_id: SequenceId) -> Table:
        """Block ids in token order; empty if the sequence holds none."""
        return self._tables.get(sequence_id, ())

    def hold(self, sequence_id: SequenceId, token_count: int) -> Table:
        """Extend the sequence's table until it covers `token_count` tokens, and return it. Its existing blocks stay in
        place.

        The same tuple object is returned until the table changes, so an engine may use its identity as a cache key.
        """
        table = self._tables.get(sequence_id, ())
        missing = -(-token_count // self._block_tokens) - len(table)
        if missing <= 0:
            return table
        if missing > self.free_count:
            raise InvariantViolation(
                f"sequence {sequence_id} needs {missing} blocks, but {self.free_count} of {self.block_count} are free"
            )
        returned, fresh = self._returned, self._fresh
        again = [heapq.heappop(returned) for _ in range(min(missing, len(returned)))]
        self._fresh = fresh + missing - len(again)
        table = (*table, *again, *range(fresh, self._fresh))
        self._tables[sequence_id] = table
        self._note(sequence_id)
        return table

    def apply(self, batch: Batch) -> tuple[Table, ...]:
        """Apply the batch and return, for each slice, a table that covers its tokens; the same object while
        unchanged.
        """
        for sequence_id, first_block, first_number, count in batch.named:
            self._name(sequence_id, first_block, first_number, count)
        for sequence_id in batch.removed:
            self.release(sequence_id)
        self.forget(batch.forgotten)
        for sequence_id, runs in batch.taken:
            self._take(sequence_id, [*_numbers(runs)])
        block_tokens, known, hold = self._block_tokens, self._tables, self.hold
        return tuple(
            [
                known[sequence_id]
                if sequence_id in known and first + len(token_ids) <= len(known[sequence_id]) * block_tokens
                else hold(sequence_id, first + len(token_ids))
                for sequence_id, first, token_ids, _ in batch.slices
            ]
        )

    # ---------------------------------------------------------------- numbered blocks

    @property
    def numbers(self) -> set[BlockNumber]:
        return set(self._numbered)

    def numbered(self, numbers: Iterable[BlockNumber]) -> Table:
        """Return the block ids of `numbers`."""
        return tuple([self._numbered[number] for number in numbers])

    def _name(self, sequence_id: SequenceId, first_block: int, first_number: BlockNumber, count: int) -> None:
        blocks = self.table(sequence_id)[first_block : first_block + count]
        if len(blocks) < count:
            have = first_block + len(blocks)
            raise InvariantViolation(f"sequence {sequence_id} has {have} blocks, but {first_block + count} are named")
        for number, block_id in enumerate(blocks, first_number):
            if number in self._numbered:
                raise InvariantViolation(f"number {number} for block {block_id} belongs to another block")
            self._numbered[number] = block_id
            self._claims[block_id] = self._claims.get(block_id, 1) + 1
            self._note_number(number)

    def _take(self, sequence_id: SequenceId, numbers: Sequence[BlockNumber]) -> None:
        unknown = [number for number in numbers if number not in self._numbered]
        if unknown or sequence_id in self._tables:
            raise InvariantViolation(f"sequence {sequence_id} already has blocks, or takes unknown numbers: {unknown}")
        self._tables[sequence_id] = table = self.numbered(numbers)
        for block_id in table:
            self._claims[block_id] += 1
        self._note(sequence_id)

    def forget(self, runs: Iterable[tuple[BlockNumber, int]]) -> None:
        """Remove these numbers. Their blocks become free unless tables hold them."""
        for number in _numbers(runs):
            self._note_number(number)
            self._give_back((self._numbered.pop(number),))

    def forget_numbers(self) -> None:
        """Remove all numbers, because the next leader assigns its own. Blocks in several tables stay shared."""
        self.forget([(number, 1) for number in self._numbered])

    # ---------------------------------------------------------------- shared blocks

    def shared(self, token_counts: Mapping[SequenceId, int]) -> dict[SequenceId, Table]:
        """The leading blocks of each sequence that are also in other tables, without the block of its last token.
        `token_counts`: tokens of each sequence.
        """
        numbered = set(self._numbered.values())
        return {
            sequence_id: tuple(
                takewhile(
                    lambda block_id: self._claims.get(block_id, 1) > 1 + (block_id in numbered),
                    self.table(sequence_id)[: (token_count - 1) // self._block_tokens],
                )
            )
            for sequence_id, token_count in token_counts.items()
        }

    def share(self, sequence_id: SequenceId, donor: SequenceId, block_count: int) -> None:
        """Replace the sequence's first `block_count` blocks, if it has any, with the donor's."""
        first, own = self.table(donor)[:block_count], self.table(sequence_id)
        if len(first) < block_count:
            raise InvariantViolation(f"sequence {donor} has {len(first)} blocks, but {block_count} are shared")
        if own[:block_count] == first:
            return
        for block_id in first:
            self._claims[block_id] = self._claims.get(block_id, 1) + 1
        self._tables[sequence_id] = (*first, *own[block_count:])
        self._note(sequence_id)
        if own:
            self.compaction_count += 1  # its KV is in other blocks now
            self._give_back(own[:block_count])

    # ---------------------------------------------------------------- release

    def release(self, sequence_id: SequenceId) -> int:
        """Release all blocks of a sequence. Returns their number: 0 if it held none."""
        table = self._tables.pop(sequence_id, ())
        self._note(sequence_id)
        self._give_back(table)
        return len(table)

    def _give_back(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each block. Blocks without references become free."""
        returned, claims = self._returned, self._claims
        for block_id in block_ids:
            if claims and block_id in claims:
                claims[block_id] -= 1
                if claims[block_id]:
                    continue
                del claims[block_id]
            heapq.heappush(returned, block_id)

    def copy(self) -> "BlockBook":
        """An independent copy of this book."""
        other = BlockBook(self.block_count, self._block_tokens, self._first)
        other._fresh, other._returned = self._fresh, self._returned.copy()
        other._tables = self._tables.copy()
        other._numbered, other._claims = self._numbered.copy(), self._claims.copy()
        return other

    @property
    def used_end(self) -> int:
        """Number of blocks from the book's first one to its last used one."""
        return max(self._held(), default=self._first - 1) + 1 - self._first

    def _held(self) -> set[int]:
        return {*chain.from_iterable(self._tables.values()), *self._numbered.values()}

    def trim(self, sequence_id: SequenceId, token_count: int) -> None:
        """Keep only as many of the sequence's blocks as `token_count` tokens need, and release the others."""
        table = self._tables.get(sequence_id, ())
        kept = blocks_for(token_count, self._block_tokens)
        if kept == 0:
            self.release(sequence_id)
        elif len(table) > kept:
            self._tables[sequence_id] = table[:kept]
            self._note(sequence_id)
            self._give_back(table[kept:])

    def grow(self, added_block_count: int) -> None:
        """Add blocks at the end of the cache."""
        self._audit = None
        self._end += added_block_count

    def compaction_plan(self, block_count: int) -> tuple[tuple[int, int], ...]:
        """Return block copies (from, to) that move all held blocks into the first `block_count` blocks, so that the
        cache can be cut there. The caller executes them before the next batch and confirms them with `compacted`.
        """
        end = self._first + block_count
        tail = sorted(b for b in self._held() if b >= end)
        free = chain((b for b in self._returned if b < end), range(self._fresh, end))
        targets = heapq.nsmallest(len(tail), free)
        if len(targets) < len(tail):
            raise InvariantViolation(f"{self.used_count} held blocks do not fit into {block_count}")
        return tuple(zip(tail, targets, strict=True))

    def compacted(self, moves: Sequence[tuple[int, int]]) -> None:
        """Replace the moved blocks (from, to) in all tables, after their content has been copied."""
        if not moves:
            return
        moved = dict(moves)
        self.compaction_count += 1
        self._audit = None
        held = self._held()
        fresh = max(self._fresh, max(moved.values()) + 1)
        free = {*self._returned, *range(self._fresh, min(fresh, self._end))}
        if len(moved) != len(moves) or not held.issuperset(moved) or not free.issuperset(moved.values()):
            raise InvariantViolation(f"a source is not held or a target is not free: {moves}")
        for sequence_id, table in self._tables.items():
            if not moved.keys().isdisjoint(table):
                self._tables[sequence_id] = tuple(moved.get(b, b) for b in table)
        self._numbered = {number: moved.get(b, b) for number, b in self._numbered.items()}
        self._claims = {moved.get(b, b): count for b, count in self._claims.items()}
        self._fresh = fresh
        self._returned = [*(free - set(moved.values())), *moved]
        heapq.heapify(self._returned)

    def shrink(self, block_count: int) -> None:
        """Remove blocks at the end of the cache; they must be free."""
        end = self._first + block_count
        kept = [b for b in self._returned if b < end]
        self._audit = None
        if len(self._returned) - len(kept) != max(0, self._fresh - end):
            raise InvariantViolation(f"some of the blocks from {end} to {self._end} are held")
        heapq.heapify(kept)
        self._fresh, self._returned = min(self._fresh, end), kept
        self._end = end

    def check(self) -> None:
        """Raise InvariantViolation unless every block is free, or in exactly one table, or numbered with as many
        references as holders (I3).

        Tables that have not changed since the last check are only counted; every `_LOOKS` checks, all tables and the
        free list are verified.
        """
        if self._audit is None or self._audit.looks_left == 0:
            self._check_all()
            self._audit = _Audit(dict(self._tables), dict(self._numbered))
        elif self._changed or self._renumbered:
            self._check_changed(self._audit)
            self._audit.looks_left -= 1
        self._changed.clear()
        self._renumbered.clear()

    def _note(self, sequence_id: SequenceId) -> None:
        """Record for `check` that the table changes. Does nothing before the first check, since only tests and
        simulations check.
        """
        if self._audit is not None:
            self._changed[sequence_id] = None

    def _note_number(self, number: BlockNumber) -> None:
        if self._audit is not None:
            self._renumbered[number] = None

    def _check_all(self) -> None:
        claims = Counter(chain(chain.from_iterable(self._tables.values()), self._numbered.values()))
        free = [*self._returned, *range(self._fresh, self._end)]
        shared = {block_id: count for block_id, count in claims.items() if count > 1}
        wrong = shared.items() - self._claims.items() or any(claims[b] != n for b, n in self._claims.items())
        everything = [*free, *claims]
        if (
            wrong
            or len(everything) != self.block_count
            or set(everything) != set(range(self._first, self._end))
            or len(set(self._numbered.values())) != len(self._numbered)
        ):
            self._blame()

    def _check_changed(self, audit: "_Audit") -> None:
        claims, touched = audit.claims, set[int]()
        for sequence_id in self._changed:
            before, after = audit.tables.pop(sequence_id, ()), self._tables.get(sequence_id, ())
            if after:
                audit.tables[sequence_id] = after
            if after[: len(before)] == before:
                before, after = (), after[len(before) :]
            self._count_claims(claims, touched, before, after)
        for number in self._renumbered:
            before, after = audit.numbered.pop(number, None), self._numbered.get(number)
            if after is not None:
                audit.numbered[number] = after
            self._count_claims(claims, touched, () if before is None else (before,), () if after is None else (after,))
        wrong = any(
            not self._first <= b < self._end or claims[b] != self._claims.get(b, 1) for b in touched if b in claims
        )
        if wrong or len(claims) + self.free_count != self.block_count:
            self._blame()
            raise InvariantViolation("blocks have changed owner without a recorded change of a table")

    def _count_claims(self, claims: Counter[int], touched: set[int], before: Table, after: Table) -> None:
        for block_id in before:
            claims[block_id] -= 1
            if not claims[block_id]:
                del claims[block_id]
        for block_id in after:
            claims[block_id] += 1
        touched.update(before, after)

    def _blame(self) -> None:
        """Raise InvariantViolation that names a block held twice, lost, or out of range. Slow."""
        owner: dict[int, str] = {}  # block id -> its holder
        for block_id in (*self._returned, *range(self._fresh, self._end)):
            self._claim(owner, block_id, "the free list")
        for number, block_id in self._numbered.items():
            self._claim(owner, block_id, f"number {number}")
        claims = Counter(self._numbered.values())
        for sequence_id, table in self._tables.items():
            for block_id in table:
                claims[block_id] += 1
                if block_id not in self._claims or block_id not in owner:
                    self._claim(owner, block_id, f"sequence {sequence_id}")
        for block_id, count in self._claims.items():
            if claims[block_id] != count:
                raise InvariantViolation(f"block {block_id} has {claims[block_id]} references, but {count} are counted")
        if len(owner) != self.block_count:
            raise InvariantViolation(f"{self.block_count - len(owner)} of {self.block_count} blocks are lost")

    def _claim(self, owner: dict[int, str], block_id: int, who: str) -> None:
        if not self._first <= block_id < self._end:
            raise InvariantViolation(f"{who} holds block {block_id}, outside of {self._first} to {self._end - 1}")
        if block_id in owner:
            raise InvariantViolation(f"block {block_id} belongs to both {owner[block_id]} and {who}")
        owner[block_id] = who


def _numbers(runs: Iterable[tuple[BlockNumber, int]]) -> Iterable[BlockNumber]:
    return chain.from_iterable([range(first, first + count) for first, count in runs])

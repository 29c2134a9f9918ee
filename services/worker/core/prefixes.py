"""The prefix cache of a group: the tokens of each numbered KV block, the sequences that hold it, and the order of
eviction.

The leader gives each full block with KV a number, which is never reused. A number identifies the same tokens after the
same prefix, whichever physical block each stage uses for it. A sequence whose prompt begins with numbered blocks takes
these blocks and computes only the remaining tokens, at least the last one. A block that no sequence holds is
*retained*: it counts as free and is evicted when room is needed. Blocks used only by offline sequences are evicted
first, then the least recently used ones. Each prefix is evicted from its tail.

Only the leader has this index. Stages learn numbers from batches (`Batch.named`, `forgotten`, `taken`), so stages of
different capacity cannot disagree.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Container, Iterable
from hashlib import blake2b

from ballast.common.errors import InvariantViolation
from ballast.common.marks import MARK_TOKENS, Mark, first_mark, mark_after
from services.worker.core.batch import BlockKey, BlockNumber, NamedBlocks, NumberRuns, SequenceId, TakenBlocks
from services.worker.core.host_prefixes import HostPrefixes
from services.worker.core.limits import WorkerLimits
from services.worker.core.line import OFFLINE_RANK
from services.worker.core.sequence import Sequence

_KEY_BYTES = 16


def runs_of(numbers: Iterable[BlockNumber]) -> NumberRuns:
    """Return (first, count) for each run of consecutive numbers."""
    runs: list[tuple[BlockNumber, int]] = []
    for number in numbers:
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return tuple(runs)


class PrefixIndex:
    """Index of the cached blocks. Numbers are held by running sequences and by those being swapped out, not by others.

    A closed index matches, numbers and retains no blocks.
    """

    def __init__(self, limits: WorkerLimits, first_number: BlockNumber, host: HostPrefixes) -> None:
        """Numbers begin after `first_number`. `host`: copies of retained blocks in host memory."""
        self._host = host
        self._to_copy = deque[BlockNumber]()  # blocks to copy to the host; includes some evicted or copied since
        self._block_tokens = limits.block_tokens
        self._seed = limits.prefix_seed
        self._closed = not limits.prefix_caching
        self._last_number = first_number
        self._numbers: dict[BlockKey, BlockNumber] = {}
        self._keys: dict[BlockNumber, BlockKey] = {}
        self._holders: dict[BlockNumber, int] = {}  # reference count of each held number
        self._retained: OrderedDict[BlockNumber, float] = (
            OrderedDict()
        )  # unreferenced -> last use; in order of eviction
        self._offline: OrderedDict[BlockNumber, None] = (
            OrderedDict()
        )  # unreferenced, used by offline sequences only; in order of eviction, all before `_retained`
        self._online: set[BlockNumber] = set()  # numbers that online sequences have held
        self._marks: dict[BlockNumber, Mark] = {}  # last block of a marked prefix -> its mark
        self.new_marks: list[Mark] = []  # marks of prefixes computed or reused since `take_marks` was last called
        self.at_s = 0.0  # instant of the event being handled
        self._kept_since_s = 0.0  # all blocks used since this time are still here or on the host
        self._held: dict[SequenceId, list[BlockNumber | None]] = {}  # numbers of its first blocks; None: not numbered
        self._begun: list[Sequence] = []  # sequences that have taken blocks but are in no plan yet
        self._displaced: set[SequenceId] = set()  # sequences without KV on the stages of the new group
        self.shared_count = 0  # blocks saved by sharing: how many more would be needed if each sequence had its own
        self.queried_tokens_total = self.hit_tokens_total = 0  # tokens of online sequences at their first admission
        self.host_hit_tokens_total = 0  # part of the hits that were copied from the host
        # For the next batch:
        self._named: list[NamedBlocks] = []
        self._taken: list[TakenBlocks] = []
        self._forgotten: list[BlockNumber] = []

    @property
    def retained_count(self) -> int:
        return len(self._retained) + len(self._offline)

    @property
    def kept_since_s(self) -> float:
        return max(self._kept_since_s, self._host.kept_since_s)

    @kept_since_s.setter
    def kept_since_s(self, at_s: float) -> None:
        self._kept_since_s = at_s

    @property
    def marks(self) -> list[Mark]:
        return list({*self._marks.values(), *self._host.marks})

    @property
    def needs_release_batch(self) -> bool:
        """True if evictions or taken blocks have not been sent to the stages."""
        return bool(self._forgotten or self._taken)

    @property
    def carries_changes(self) -> bool:
        return bool(self._forgotten or self._taken or self._named)

    def drain_changes(self) -> tuple[tuple[NamedBlocks, ...], NumberRuns, tuple[TakenBlocks, ...]]:
        """Return and clear the changes for the next batch: named, forgotten and taken blocks."""
        news = tuple(self._named), runs_of(sorted(self._forgotten)), tuple(self._taken)
        self._named, self._forgotten, self._taken = [], [], []
        return news

    # ---------------------------------------------------------------- lookup

    def _chain(self, sequence: Sequence, block_count: int) -> list[BlockKey]:
        """Return the prefix keys of the sequence's first `block_count` blocks; missing keys are computed."""
        chain, size = sequence.block_keys, self._block_tokens
        for index in range(len(chain), block_count):
            adapter = sequence.sampling.adapter.encode()
            before = chain[-1] if chain else self._seed + sequence.cache_salt + adapter
            token_ids = array("I", sequence.token_ids(index * size, size)).tobytes()
            chain.append(blake2b(before + token_ids, digest_size=_KEY_BYTES).digest())
        return chain[:block_count]

    def match(self, sequence: Sequence) -> list[BlockNumber]:
        """Return the block numbers of the longest cached prefix, without the last token, which is always computed for
        its logits.
        """
        found: list[BlockNumber] = []
        numbers = self._numbers
        if self._closed or not numbers or sequence.scores_prompt:
            return found
        for key in self._chain(sequence, (sequence.token_count - 1) // self._block_tokens):
            number = numbers.get(key)
            if number is None:
                break
            found.append(number)
        return found

    def on_host(self, sequence: Sequence, first: int) -> tuple[BlockKey, ...]:
        """Keys of the consecutive blocks of the sequence, from index `first` on, that are on the host but not on the
        device.
        """
        keys = list[BlockKey]()
        if self._closed or not len(self._host) or sequence.scores_prompt:
            return ()
        for key in self._chain(sequence, (sequence.token_count - 1) // self._block_tokens)[first:]:
            if key not in self._host or key in self._numbers:
                break
            keys.append(key)
        return tuple(keys)

    def held_count(self, numbers: list[BlockNumber], without: list[Sequence] | None = None) -> int:
        """Return how many of these numbers are held by sequences other than those in `without`. Their blocks need no
        room.
        """
        holders = self._holders
        if not without:
            return sum([number in holders for number in numbers])
        leaving = self._holdings(without)
        return sum([holders.get(number, 0) > leaving[number] for number in numbers])

    def freed_count(self, sequences: list[Sequence]) -> int:
        """Blocks that become free when all of these sequences leave."""
        block_count = sum([s.reserved_block_count for s in sequences])
        if self.shared_count and sequences:
            holdings, holders = self._holdings(sequences), self._holders
            block_count -= sum([n if holders[number] > n else n - 1 for number, n in holdings.items()])
        return block_count

    def _holdings(self, sequences: list[Sequence]) -> Counter[BlockNumber]:
        return Counter(n for s in sequences for n in self._held.get(s.sequence_id, ()) if n is not None)

    def wanted(self, waiting: Iterable[tuple[Sequence, int]]) -> tuple[int, int]:
        """Return how many blocks these sequences need in total, and how many tokens must be computed for them. Shared
        blocks and tokens count once; cached tokens need no computation and held blocks no room. `waiting`: each
        sequence with the blocks that it needs alone.
        """
        size, block_count, token_count = self._block_tokens, 0, 0
        keys = set[BlockKey]()
        for sequence, need in waiting:
            whole = 0 if self._closed or sequence.scores_prompt else (sequence.token_count - 1) // size
            keys.update(self._chain(sequence, whole) if whole else ())
            block_count += need - whole
            token_count += sequence.token_count - whole * size
        if keys:
            found = [number for key in keys if (number := self._numbers.get(key)) is not None]
            block_count += len(keys) - self.held_count(found)
            host = self._host
            on_host_count = sum([key in host and key not in self._numbers for key in keys]) if len(host) else 0
            token_count += (len(keys) - len(found) - on_host_count) * size
        return block_count, token_count

    def is_being_computed(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """True if a running prompt will soon compute at least half of the tokens that this sequence needs, so that
        waiting for it saves work.
        """
        if self._closed or sequence.scores_prompt:
            return False
        size, first = self._block_tokens, len(self.match(sequence))
        keys = self._chain(sequence, (sequence.token_count - 1) // size)[first:]
        wanted_count = -(-(sequence.token_count - first * size) // (2 * size))
        if len(keys) < wanted_count:
            return False
        for other in running:
            if other.token_count - other.computed_tokens > 1 and other.sequence_id not in self._displaced:
                theirs = other.block_keys[first : first + wanted_count]
                if theirs == keys[:wanted_count] and not other.scores_prompt:
                    return True
        return False

    # ---------------------------------------------------------------- references

    def take(self, sequence: Sequence, from_host: int = 0) -> int:
        """Admit a sequence with its cached blocks; `from_host` more are copied back from the host. Returns how many of
        these blocks other sequences already hold, so that they need no room.
        """
        if not self._closed:
            self._chain(sequence, (sequence.token_count - 1) // self._block_tokens)  # waiting sequences need its keys
        numbers = self.match(sequence)
        hit_tokens = len(numbers) * self._block_tokens
        if sequence.cached_tokens is None:
            host_tokens = from_host * self._block_tokens
            sequence.cached_tokens = hit_tokens + host_tokens
            if sequence.rank != OFFLINE_RANK:
                self.queried_tokens_total += sequence.token_count
                self.hit_tokens_total += sequence.cached_tokens
                self.host_hit_tokens_total += host_tokens
        self._held[sequence.sequence_id] = [*numbers]
        shared_count = 0
        for number in numbers:
            held = self._holders.get(number, 0)
            self._holders[number] = held + 1
            if held:
                shared_count += 1
            elif number in self._offline:
                del self._offline[number]
            else:
                del self._retained[number]
        if sequence.rank != OFFLINE_RANK:
            self._online.update(numbers)
        self._report_marks(sequence, hit_tokens)
        if numbers:
            self._begun.append(sequence)
            sequence.dispatched_tokens = hit_tokens  # treated as computed; the stages learn of them with the next batch
        self.shared_count += shared_count
        return shared_count

    def begin(self) -> list[Sequence]:
        """Add the blocks taken since the last batch to the batch being formed. Returns the sequences that took them."""
        for sequence in self._begun:
            held = self._held[sequence.sequence_id]
            sequence.computed_tokens = len(held) * self._block_tokens
            self._taken.append(TakenBlocks(sequence.sequence_id, runs_of(n for n in held if n is not None)))
        begun, self._begun = self._begun, []
        return begun

    def name(self, sequence: Sequence) -> None:
        """Number the sequence's full blocks with KV, except those that duplicate a block already numbered."""
        if self._closed or sequence.scores_prompt:
            return
        if sequence.snapshot is not None or sequence.sequence_id in self._displaced:
            return
        end = sequence.computed_tokens // self._block_tokens
        held = self._held.get(sequence.sequence_id)
        if held is None:
            held = self._held[sequence.sequence_id] = []
        first = len(held)
        if first >= end:
            return
        begin, count = first, 0  # first block and length of the run being numbered
        for index, key in enumerate(self._chain(sequence, end)[first:], first):
            if key in self._numbers:
                self._note_named(sequence, begin, count)
                begin, count = index + 1, 0
                held.append(None)
                continue
            self._last_number = number = self._last_number + 1
            self._numbers[key], self._keys[number], self._holders[number] = number, key, 1
            held.append(number)
            count += 1
            if sequence.rank != OFFLINE_RANK:
                self._online.add(number)
        self._note_named(sequence, begin, count)
        self._report_marks(sequence, end * self._block_tokens)

    def _report_marks(self, sequence: Sequence, token_count: int) -> None:
        """Report the marks of the sequence's first `token_count` tokens as cached."""
        marks = sequence.marks
        first = len(marks)
        for index in range(first, token_count // MARK_TOKENS):
            before = marks[-1] if marks else first_mark(sequence.cache_salt)
            marks.append(mark_after(before, sequence.token_ids(index * MARK_TOKENS, MARK_TOKENS)))
            key = sequence.block_keys[(index + 1) * MARK_TOKENS // self._block_tokens - 1]
            if (number := self._numbers.get(key)) is not None:
                self._marks[number] = marks[-1]
        self.new_marks += marks[first:]

    def _note_named(self, sequence: Sequence, first: int, count: int) -> None:
        """Record that `count` blocks of the sequence's table, from `first` on, have received the latest numbers."""
        if count:
            self._named.append(NamedBlocks(sequence.sequence_id, first, self._last_number - count + 1, count))

    def leave(self, sequence: Sequence, *, kept: bool) -> int:
        """Remove all references of a sequence. Returns how many of its blocks other sequences hold. `kept`: its KV is
        valid on all stages and is retained.
        """
        self._displaced.discard(sequence.sequence_id)
        held = self._held.pop(sequence.sequence_id, ())
        if self._begun:
            self._begun = [s for s in self._begun if s is not sequence]
        shared_count = 0
        for number in reversed(held):  # tail first, so that a block is evicted before the blocks before it
            if number is None:
                continue
            holders = self._holders[number]
            if holders > 1:
                self._holders[number] = holders - 1
                shared_count += 1
                continue
            del self._holders[number]
            if number < 0:
                continue
            if kept and not self._closed:
                if number in self._online:
                    self._retained[number] = self.at_s
                    self._to_copy.append(number)
                else:
                    self._offline[number] = None
            else:
                self._forget(number)
        self.shared_count -= shared_count
        return shared_count

    def fit(self, free_block_count: int) -> None:
        """Evict retained blocks until they fit into the free blocks."""
        for _ in range(self.retained_count - max(0, free_block_count)):
            if self._offline:
                number, _ = self._offline.popitem(last=False)
                self._forget(number)
            else:
                number, used_at_s = self._retained.popitem(last=False)
                if not self._forget(number, used_at_s) and not len(self._host):  # the host holds most older ones
                    self._kept_since_s = used_at_s

    def _forget(self, number: BlockNumber, used_at_s: float = 0.0) -> bool:
        """Evict a block. Returns True if the host has a copy."""
        key, mark = self._keys.pop(number), self._marks.pop(number, None)
        del self._numbers[key]
        self._online.discard(number)
        stays = self._host.gone(number, key, used_at_s, mark)
        self._forgotten.append(number)
        return stays

    # ---------------------------------------------------------------- copies on the host

    @property
    def wants_copies(self) -> bool:
        """True if the host lacks retained blocks."""
        waiting = self._to_copy
        while waiting and not self._is_to_copy(waiting[0]):
            waiting.popleft()
        return bool(waiting)

    def _is_to_copy(self, number: BlockNumber) -> bool:
        return number in self._retained and self._host.lacks(number, self._keys[number])

    def take_to_copy(self, count: int) -> list[tuple[BlockNumber, BlockKey]]:
        """Take up to `count` retained blocks that the host lacks, the next to be evicted first. They are returned
        sorted by number.
        """
        found = list[tuple[BlockNumber, BlockKey]]()
        while len(found) < count and self.wants_copies:
            number = self._to_copy.popleft()
            found.append((number, self._keys[number]))
        return sorted(set(found))

    def keep_no_copies(self) -> None:
        """Drop the list of blocks to copy, because the host has no room."""
        self._to_copy.clear()

    def forget_all(self, running: list[Sequence]) -> int:
        """Forget all numbers because the group changes. Stages do the same independently, and running sequences get no
        numbers until their KV is on the new stages. Blocks that running sequences share stay shared, under negative
        numbers, which are never matched, sent to stages or retained. Returns by how much the number of held blocks
        grows.
        """
        shared_count = self.shared_count
        self._displaced = {s.sequence_id for s in running if s.computed_tokens}
        for sequence in self._begun:
            sequence.dispatched_tokens = sequence.computed_tokens
            self._displaced.discard(sequence.sequence_id)
        self._held = {
            sequence_id: [None if number is None else -abs(number) for number in held]
            for sequence_id, held in self._held.items()
            if sequence_id in self._displaced
        }
        self._holders = dict(Counter(n for held in self._held.values() for n in held if n is not None))
        self.shared_count = sum(self._holders.values()) - len(self._holders)
        for known in (self._numbers, self._keys, self._retained, self._offline):
            known.clear()
        self._online.clear()
        self._marks.clear()
        self._to_copy.clear()
        self._host.clear()
        self.kept_since_s = self.at_s
        for news in (self._begun, self._named, self._taken, self._forgotten):
            news.clear()
        return shared_count - self.shared_count

    # ---------------------------------------------------------------- blocks shared through a change of the group

    def hold(self, sequence_id: SequenceId, numbers: Iterable[BlockNumber]) -> int:
        """Make a sequence hold negative numbers for its first blocks. Returns how many of them other sequences hold."""
        held, shared_count = self._held.setdefault(sequence_id, []), 0
        for number in numbers:
            held.append(number)
            self._holders[number] = self._holders.get(number, 0) + 1
            shared_count += self._holders[number] > 1
        self.shared_count += shared_count
        return shared_count

    def donors(
        self, coming: Collection[SequenceId], waiting: Container[SequenceId]
    ) -> dict[SequenceId, tuple[SequenceId, int]]:
        """Donors of the sequences that a roster announces to the stages: sequence -> (donor, number of shared first
        blocks). `coming`: those sequences, in the roster's order. A donor has its blocks on all stages, or is announced
        earlier; sequences in `waiting` have no blocks there yet.
        """
        known: dict[BlockNumber, SequenceId] = {}
        found: dict[SequenceId, tuple[SequenceId, int]] = {}
        for sequence_id in self._held:
            if sequence_id not in waiting and sequence_id not in coming:
                known.update(dict.fromkeys(self._moved(sequence_id), sequence_id))
        for sequence_id in coming:
            numbers = self._moved(sequence_id)
            if both := [number for number in numbers if number in known]:
                found[sequence_id] = known[both[-1]], len(both)
            for number in numbers:
                known.setdefault(number, sequence_id)
        return found

    def _moved(self, sequence_id: SequenceId) -> list[BlockNumber]:
        """The sequence's negative numbers, all at the front of its table."""
        return [number for number in self._held.get(sequence_id, ()) if number is not None and number < 0]

    def close(self) -> None:
        """Disable the index: from now on no blocks are matched, numbered or retained."""
        self.fit(0)
        self._closed = True

    # ---------------------------------------------------------------- inspector

    def check(self, stage_numbers: Iterable[BlockNumber] | None, reserved: dict[SequenceId, int]) -> None:
        """Raise InvariantViolation unless reference counts match the holders, and the leader's own stage has the same
        numbers after the next batch.

        Args:
            stage_numbers: Numbers in this stage's book; None: the book is another group's.
            reserved: Number of reserved blocks of each sequence that may hold numbers.
        """
        holders = Counter(n for held in self._held.values() for n in held if n is not None)
        if holders != self._holders:
            raise InvariantViolation(f"holders of numbered blocks are {holders}, but {self._holders} are counted")
        if (shared := sum(holders.values()) - len(holders)) != self.shared_count:
            raise InvariantViolation(f"{shared} blocks are shared, but {self.shared_count} are counted")
        places = Counter([*(number for number in holders if number > 0), *self._retained, *self._offline])
        if places.keys() != self._keys.keys() or places.total() != len(places) or self._online - places.keys():
            raise InvariantViolation("a number is neither held nor retained, or both")
        if {key: number for number, key in self._keys.items()} != self._numbers:
            raise InvariantViolation("numbers and keys do not map to each other")
        for sequence_id, held in self._held.items():
            if len(held) > reserved.get(sequence_id, 0):
                raise InvariantViolation(f"sequence {sequence_id} holds {len(held)} numbers but has fewer blocks")
        if stage_numbers is not None:
            coming = {n for _, _, first, count in self._named for n in range(first, first + count)}
            told = (self._keys.keys() | set(self._forgotten)) - coming
            if told != set(stage_numbers):
                raise InvariantViolation(f"the stage has numbers {set(stage_numbers)} instead of {told}")

"""The queue of waiting sequences, ordered by class and then by arrival."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import PriorityClass
from services.worker.core.batch import SequenceId
from services.worker.core.sequence import Sequence

OFFLINE_RANK = PriorityClass.BATCH.rank  # the lowest class
LIFT_S = 10.0  # wait after which the head of a class counts as one class better; see also `PlacementRules.lift_s`


def order(sequence: Sequence) -> tuple[int, tuple[float, SequenceId]]:
    """The order of service: (class rank, arrival)."""
    return sequence.rank, sequence.arrival


class WaitingLine:
    """The waiting sequences. `count` and `token_count` include online sequences only."""

    def __init__(self) -> None:
        self.count = 0
        self.token_count = 0
        self.callers: Counter[int] = Counter()  # caller -> number of its waiting online sequences, if any
        self._classes: tuple[OrderedDict[SequenceId, Sequence], ...] = tuple(OrderedDict() for _ in PriorityClass)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences in order of service."""
        return chain.from_iterable([line.values() for line in self._classes])

    @property
    def offline_count(self) -> int:
        return len(self._classes[OFFLINE_RANK])

    @property
    def online(self) -> Sequence | None:
        """The first online sequence in order of service."""
        if not self.count:
            return None
        return next((next(iter(line.values())) for line in self._classes if line), None)

    @property
    def offline(self) -> Sequence | None:
        """The earliest offline sequence."""
        return next(iter(self._classes[OFFLINE_RANK].values()), None)

    @property
    def all_online(self) -> list[Sequence]:
        """Online sequences in order of service."""
        return [s for line in self._classes[:OFFLINE_RANK] for s in line.values()] if self.count else []

    def firsts(self, rank: int) -> list[Sequence]:
        """The first waiting sequence of each caller in this class."""
        found: dict[int, Sequence] = {}
        for sequence in self._classes[rank].values():
            found.setdefault(sequence.caller, sequence)
        return list(found.values())

    @property
    def overtakes(self) -> bool:
        """True if online sequences of several classes wait, which `lift` may reorder."""
        return sum(map(bool, self._classes[:OFFLINE_RANK])) > 1

    def lift(self, at_s: float) -> None:
        """Raise the head of each class by one class, permanently, once it has waited LIFT_S behind a better class.
        Offline sequences are never raised.
        """
        for rank in range(1, OFFLINE_RANK):
            first = next(iter(self._classes[rank].values()), None)
            if first is not None and any(self._classes[:rank]) and at_s - first.waits_since_s >= LIFT_S:
                self.remove(first)
                first.rank = rank - 1
                first.note(at_s, f"has waited for {LIFT_S:.0f} s: counts as one class better")
                self.add(first)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence into its class by arrival: new ones at the end, preempted ones near the head."""
        line = self._classes[sequence.rank]
        line[sequence.sequence_id] = sequence
        self._count(sequence, 1)
        if len(line) > 1 and next(islice(reversed(line.values()), 1, None)).arrival > sequence.arrival:
            if next(iter(line.values())).arrival > sequence.arrival:
                line.move_to_end(sequence.sequence_id, last=False)
            else:
                for other in sorted(line.values(), key=order):
                    line.move_to_end(other.sequence_id)

    def remove(self, sequence: Sequence) -> None:
        del self._classes[sequence.rank][sequence.sequence_id]
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        if sequence.rank == OFFLINE_RANK:
            return
        self.count += sign
        self.token_count += sign * sequence.token_count
        self.callers[sequence.caller] += sign
        if not self.callers[sequence.caller]:
            del self.callers[sequence.caller]

    def check(self) -> None:
        """Raise InvariantViolation unless all counts are right, the sequences are in order and every one is waiting."""
        waiting = list(self)
        online = [s for s in waiting if s.rank != OFFLINE_RANK]
        for what, have, want in (
            ("count", self.count, len(online)),
            ("token_count", self.token_count, sum(s.token_count for s in online)),
        ):
            if have != want:
                raise InvariantViolation(f"{what} of waiting online sequences is {have}, but should be {want}")
        if self.callers != Counter(s.caller for s in online):
            raise InvariantViolation(f"wrong counts of waiting sequences by caller: {self.callers}")
        if [order(s) for s in waiting] != sorted(order(s) for s in waiting):
            raise InvariantViolation(f"out of order: {[order(s) for s in waiting]}")
        for sequence in waiting:
            sequence.check_waiting()

"""KV that a member copies ahead of a restore, while its sequences go on decoding (pure).

A member that is to lead alone lacks the KV of the layers that the other stages execute. Their layers are back before
the commit, so it asks them for the whole blocks of the sequences it is going to take, again and again as those grow;
what is missing at the commit is the rest of the last blocks. KV is only ever appended to, so a copied block stays
right as long as the sequence keeps its blocks.

A sequence loses its blocks with a batch that removes it, on every stage at another moment, and may come back later.
A sender can therefore be reading blocks that are somebody else's by the end of the transfer. It says which batch it
had come to when it began to read: if that is not before the batch in which the sequence was first seen here, both
stages were in the same life of it; and if its blocks were lost meanwhile, then to a batch that this member comes to as
well, and forgets what it has copied.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from ballast.common.layout import group_of
from ballast.common.transition import TransitionKind
from services.worker.core.batch import Batch, SequenceId
from services.worker.core.plan import Plan

WORTH_BLOCKS = 2  # fewer are left for later: asking takes time from batches, and at the commit all rests go together
_AT_ONCE = 2  # questions to a source that are not answered


@dataclass(frozen=True, slots=True)
class Source:
    worker_id: WorkerId
    first_layer: int
    last_layer: int


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks `[first_block, last_block)` of a sequence, in its own order."""

    sequence_id: SequenceId
    first_block: int
    last_block: int


def sources_of(plan: Plan, me: WorkerId) -> tuple[Source, ...]:
    """Whom a worker that leaves a pipeline gets KV from; none if this is nothing of the kind."""
    old, new = group_of(plan.base, me), group_of(plan.target, me)
    if plan.kind is not TransitionKind.RESTORE or old is None or new is None or len(new.members) > 1:
        return ()
    return tuple(Source(m.worker_id, m.first_layer, m.last_layer) for m in old.members if m.worker_id != me)


class Precopy:
    """What one member has of the KV of the other stages' layers, and what it offers them of its own.

    `ran` is told every batch, whether or not this member copies anything: it is a source for the others.
    """

    def __init__(
        self,
        sources: tuple[Source, ...],
        block_tokens: int,
        max_blocks: int,
        reach: Callable[[SequenceId], int] = lambda _: sys.maxsize,
    ) -> None:
        """`max_blocks` bounds what is asked for at once; `reach`: so many first blocks of a sequence have room here."""
        self._sources = sources
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._reach = reach
        self._step_id = 0  # the last batch that this stage has begun
        self._tokens: dict[SequenceId, int] = {}  # with KV in this stage's layers
        self._seen_at: dict[SequenceId, int] = {}  # the first batch of its present life that was seen here
        self._share: set[SequenceId] = set()  # what this member is going to take; who has ended may be among them
        self._copied: dict[tuple[SequenceId, WorkerId], int] = {}  # blocks from the beginning
        self._asked: dict[tuple[SequenceId, WorkerId], tuple[Span, int]] = {}  # and the step it was asked at
        self._tried_at: dict[tuple[SequenceId, WorkerId], int] = {}  # step after which asking again makes sense
        self._first_round: set[SequenceId] | None = None  # None: the leader has not said what is to be taken
        self._over = False

    # ------------------------------------------------------------ this stage's batches

    def begins(self, batch: Batch) -> None:
        """Before it runs: who is removed may lose its blocks to it."""
        if self._over:
            return
        self._step_id = batch.step_id
        for sequence_id in batch.removed:
            self._tokens.pop(sequence_id, None)
            self._seen_at.pop(sequence_id, None)
            for source in self._sources:
                self._copied.pop((sequence_id, source.worker_id), None)
                self._tried_at.pop((sequence_id, source.worker_id), None)

    def ran(self, batch: Batch) -> None:
        for part in () if self._over else batch.slices:
            self._tokens[part.sequence_id] = part.first_position + len(part.token_ids)
            self._seen_at.setdefault(part.sequence_id, batch.step_id)

    # ------------------------------------------------------------ as a source

    def offer(self, wanted: Span) -> tuple[Span, int]:
        """What there is of it: whole blocks that no batch writes to any more; and the last batch that was run."""
        whole = self._tokens.get(wanted.sequence_id, 0) // self._block_tokens
        last = max(wanted.first_block, min(wanted.last_block, whole))
        return Span(wanted.sequence_id, wanted.first_block, last), self._step_id

    # ------------------------------------------------------------ as the one that takes

    def share(self, sequence_ids: Iterable[SequenceId]) -> None:
        """The leader's word: this member is going to take these as well."""
        told = set(sequence_ids)
        self._share |= told
        if self._first_round is None:
            self._first_round = told

    def wants(self) -> list[tuple[WorkerId, Span]]:
        """What to ask whom for now. It counts as asked."""
        wanted: list[tuple[WorkerId, Span]] = []
        if self._over:
            return wanted
        for source in self._sources:
            name = source.worker_id
            left = _AT_ONCE - sum(asked == name for _, asked in self._asked)
            ready = (i for i in self._tokens if i in self._share and self._may_ask((i, name)))
            for sequence_id in islice(ready, max(0, left)):
                key = (sequence_id, name)
                first = self._copied.get(key, 0)
                span = Span(sequence_id, first, first + min(self._missing(key), self._max_blocks))
                self._asked[key] = span, self._step_id
                wanted.append((name, span))
        return wanted

    def _may_ask(self, key: tuple[SequenceId, WorkerId]) -> bool:
        worth = self._missing(key) >= WORTH_BLOCKS
        return worth and key not in self._asked and self._tried_at.get(key, -1) < self._step_id

    def landed(self, source: WorkerId, span: Span, source_step_id: int) -> bool:
        """Whether what has come may be put into the sequence's blocks, and then it counts as copied."""
        key = (span.sequence_id, source)
        asked, at_step_id = self._asked.pop(key, (None, 0))
        if asked is None or self._over:
            return False
        if span.first_block != asked.first_block or span.last_block > asked.last_block:
            raise InvariantViolation(f"{source} was asked for {asked} and sends {span}")
        if span.last_block < asked.last_block:
            self._tried_at[key] = at_step_id  # it is behind; not before another batch
        same_life = source_step_id >= self._seen_at.get(span.sequence_id, source_step_id)
        in_place = self._copied.get(key, 0) == span.first_block
        here = span.last_block <= self._whole_blocks(span.sequence_id)
        if not (same_life and in_place and here):
            self._tried_at[key] = self._step_id
            return False
        self._copied[key] = span.last_block
        return True

    def failed(self, source: WorkerId, sequence_id: SequenceId) -> None:
        """The answer will not come."""
        asked = self._asked.pop((sequence_id, source), None)
        if asked is not None:
            self._tried_at[sequence_id, source] = asked[1]

    @property
    def converged(self) -> bool:
        """Each sequence of the first share has had (nearly) all its KV here at some time, or is gone."""
        if self._first_round is None:
            return False
        self._first_round = {i for i in self._first_round if not self._near(i)}
        return not self._first_round

    def _near(self, sequence_id: SequenceId) -> bool:
        return all(self._missing((sequence_id, source.worker_id)) < WORTH_BLOCKS for source in self._sources)

    def _missing(self, key: tuple[SequenceId, WorkerId]) -> int:
        return self._whole_blocks(key[0]) - self._copied.get(key, 0)

    def _whole_blocks(self, sequence_id: SequenceId) -> int:
        """That no batch writes to any more, and for which there is a place here."""
        return min(self._tokens.get(sequence_id, 0) // self._block_tokens, self._reach(sequence_id))

    def copied_blocks(self, sequence_id: SequenceId, source: WorkerId) -> int:
        """So many of its first blocks have the KV of that source's layers."""
        return self._copied.get((sequence_id, source), 0)

    def end(self) -> None:
        """The commit: what is copied stays, what is still to come is too late, later batches are another layout's."""
        self._over = True
        self._asked.clear()

    def check(self) -> None:
        """Raise InvariantViolation if more is copied than there is, or something of nobody."""
        for (sequence_id, source), blocks in self._copied.items():
            if blocks * self._block_tokens > self._tokens.get(sequence_id, 0):
                raise InvariantViolation(f"{blocks} blocks of sequence {sequence_id} were copied from {source}")
            if sequence_id not in self._share:
                raise InvariantViolation(f"sequence {sequence_id} is copied and goes elsewhere")

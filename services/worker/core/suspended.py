"""Sequences whose KV is being transferred, and KV that is complete before its request has arrived.

A suspended sequence is not scheduled, and keeps its reservation even if it ends meanwhile, because the stages still
write into its blocks. Until `take_blocks`, a sequence that waits for room on some stage reserves only the blocks that
it shares with others. KV that has `arrived` before its request may be preempted like a running sequence.
"""

from collections.abc import Callable

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.sequence import Sequence, SequenceState


class Suspended(dict[SequenceId, Sequence]):
    """The suspended sequences by id. A sequence that ends while it is suspended stays in the table."""

    def __init__(
        self,
        block_tokens: int,
        reserve: Callable[[Sequence, int], None],
        unreserve: Callable[[Sequence], None],
    ) -> None:
        """`reserve` adds blocks to the reservation of a sequence, or removes them; `unreserve` removes all of them."""
        super().__init__()
        self._block_tokens = block_tokens
        self._reserve = reserve
        self._unreserve = unreserve
        self.without_blocks: set[SequenceId] = set()  # sequences without a reservation of their own yet
        self.arrived: set[SequenceId] = set()  # sequences with all their KV but without a request

    @property
    def kept(self) -> list[Sequence]:
        """Complete KV whose request has not arrived."""
        return [self[sequence_id] for sequence_id in sorted(self.arrived)]

    def add(self, sequence: Sequence, at_s: float, *, travels: bool, waits: bool) -> None:
        """Add a sequence of this group or of another leader. `travels`: its KV is being transferred; otherwise it is
        complete. `waits`: the transfer begins once there is room.
        """
        why = "its KV waits for room" if waits else "its KV travels" if travels else "its KV is here"
        if sequence.state is SequenceState.SUSPENDED:
            self.arrived.remove(sequence.sequence_id)
            sequence.note(at_s, why)
        else:
            sequence.move(SequenceState.SUSPENDED, at_s, why)
        self[sequence.sequence_id] = sequence
        if waits:
            self.without_blocks.add(sequence.sequence_id)
            self._reserve(sequence, -sequence.reserved_block_count)
        elif not sequence.reserved_block_count:
            self._reserve(sequence, blocks_for(sequence.token_count, self._block_tokens))
        if not (travels or waits):
            self.arrived.add(sequence.sequence_id)

    def take_blocks(self, sequence: Sequence, at_s: float) -> None:
        """Reserve blocks for a sequence that waited for room."""
        self.without_blocks.remove(sequence.sequence_id)
        block_count = blocks_for(sequence.token_count, self._block_tokens)
        self._reserve(sequence, max(0, block_count - sequence.reserved_block_count))
        sequence.note(at_s, "its KV is being transferred")

    def bind(self, kept: Sequence, request: Sequence, at_s: float) -> bool:
        """Bind KV to its request, which has been given the KV's sequence id. Returns True if the KV is complete, so
        that the sequence can run.
        """
        self[kept.sequence_id] = request
        request.move(SequenceState.SUSPENDED, at_s, "its KV is here, or being transferred")
        request.computed_tokens, request.on_stages = kept.computed_tokens, kept.on_stages
        request.reserved_block_count, request.reserved_tokens = kept.reserved_block_count, kept.reserved_tokens
        return kept.sequence_id in self.arrived

    def complete(self, sequence: Sequence, at_s: float) -> bool:
        """Record that all KV has arrived. Returns True if the sequence was removed because it can run; False if its
        request is missing.
        """
        if sequence.sequence_id in self.without_blocks:
            raise InvariantViolation(f"{sequence.name} has its KV in no block", sequence.story())
        if sequence.snapshot is not None:
            self.arrived.add(sequence.sequence_id)
            sequence.note(at_s, "its KV is complete, but its request has not arrived")
            return False
        self.leave(sequence)
        return True

    def leave(self, sequence: Sequence) -> None:
        del self[sequence.sequence_id]
        self.without_blocks.discard(sequence.sequence_id)
        self.arrived.discard(sequence.sequence_id)

    def let_go(self, sequence: Sequence) -> None:
        """Remove a sequence with its reservation. It no longer needs its blocks, and no write into
        them is under way.
        """
        self.leave(sequence)
        self._unreserve(sequence)

    def forget_kv(self, kept: Sequence, at_s: float, why: str) -> None:
        """Free KV whose request has not arrived; the request will be recomputed."""
        self.let_go(kept)
        kept.computed_tokens = 0
        kept.move(SequenceState.WAITING, at_s, why)

    def check(self) -> None:
        """Raise InvariantViolation unless states, reservations and sets agree."""
        for sequence_id, sequence in self.items():
            if sequence.state not in (SequenceState.SUSPENDED, SequenceState.ENDED):
                raise InvariantViolation(f"{sequence.name} is among the suspended", sequence.story())
            if sequence_id in self.arrived and sequence.snapshot is None:
                raise InvariantViolation(f"{sequence.name} has all its KV but does not run", sequence.story())
        if not self.without_blocks | self.arrived <= self.keys() or self.without_blocks & self.arrived:
            waits, has = sorted(self.without_blocks), sorted(self.arrived)
            raise InvariantViolation(f"{waits} wait for room and {has} for their requests, but not all are suspended")

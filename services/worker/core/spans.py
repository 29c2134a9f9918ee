"""Which KV goes from where to where when a sequence changes its group (pure).

Each stage of the group that it goes to takes, from each stage of the group that it comes from, the layers that both
execute. What travels at once is a `Span` of the sequence, cut at the borders of stages into one `Piece` for each hop.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ballast.common.ids import WorkerId
from services.worker.core.batch import SequenceId

Key = tuple[int, int, WorkerId, int]  # of what comes: move, sequence, giver and first layer


class Holder(Protocol):
    """A stage that has the KV of some layers, or is to have it."""

    @property
    def worker_id(self) -> WorkerId: ...
    @property
    def first_layer(self) -> int: ...
    @property
    def last_layer(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Stage:
    worker_id: WorkerId
    first_layer: int
    last_layer: int


def stages_of(holders: Iterable[Holder]) -> tuple[Stage, ...]:
    return tuple(Stage(h.worker_id, h.first_layer, h.last_layer) for h in holders)


class Hop(NamedTuple):
    giver: WorkerId
    taker: WorkerId
    first_layer: int
    last_layer: int


def hops(givers: Sequence[Holder], takers: Sequence[Holder]) -> list[Hop]:
    """Who gives which layers to whom; by taker, then by layer. A worker that is on both sides gives to itself."""
    found: list[Hop] = []
    for taker in takers:
        for giver in givers:
            first = max(giver.first_layer, taker.first_layer)
            last = min(giver.last_layer, taker.last_layer)
            if first < last:
                found.append(Hop(giver.worker_id, taker.worker_id, first, last))
    return found


@dataclass(frozen=True, slots=True)
class Span:
    """KV of a sequence, in all layers: its blocks `[first_block, last_block)`, in its own order. `last`: nothing
    follows, and `token_count` tokens have theirs.
    """

    first_block: int
    last_block: int
    token_count: int  # with KV at the giver when it was sent
    last: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A span in the layers of one hop. `move`: the epoch of a transition, or the number of a migration."""

    move: int
    sequence_id: SequenceId
    first_layer: int
    last_layer: int
    span: Span


def key_of(piece: Piece, giver: WorkerId) -> Key:
    return piece.move, piece.sequence_id, giver, piece.first_layer

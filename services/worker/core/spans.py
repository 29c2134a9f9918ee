"""Computes which stage sends which KV to which other stage when a sequence changes its group (pure).

Each stage of the target group receives, from each stage of the source group, the layers that both execute. The unit of
transfer is a `KvRange` of the sequence, split at stage boundaries into one `Piece` for each hop.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ballast.common.ids import WorkerId
from services.worker.core.batch import SequenceId

Key = tuple[int, int, WorkerId, int]  # key of incoming KV: move, sequence, sender and first layer


class Holder(Protocol):
    """A stage that has or will receive the KV of some layers."""

    @property
    def worker_id(self) -> WorkerId: ...
    @property
    def first_layer(self) -> int: ...
    @property
    def last_layer(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StageLayers:
    worker_id: WorkerId
    first_layer: int
    last_layer: int


def stages_of(holders: Iterable[Holder]) -> tuple[StageLayers, ...]:
    return tuple(StageLayers(h.worker_id, h.first_layer, h.last_layer) for h in holders)


class Hop(NamedTuple):
    giver: WorkerId
    taker: WorkerId
    first_layer: int
    last_layer: int


def hops(givers: Sequence[Holder], takers: Sequence[Holder]) -> list[Hop]:
    """Return the hops between two sets of holders, ordered by receiver and then by layer. A worker in both sets sends
    to itself.
    """
    found: list[Hop] = []
    for taker in takers:
        for giver in givers:
            first = max(giver.first_layer, taker.first_layer)
            last = min(giver.last_layer, taker.last_layer)
            if first < last:
                found.append(Hop(giver.worker_id, taker.worker_id, first, last))
    return found


@dataclass(frozen=True, slots=True)
class KvRange:
    """KV of a sequence in all layers: its blocks `[first_block, last_block)`. `last`: no further span follows, and
    `token_count` tokens have KV.
    """

    first_block: int
    last_block: int
    token_count: int  # tokens with KV at the sender when it was sent
    last: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a span that is sent over one hop. `move`: the epoch of a transition, or the number of a migration."""

    move: int
    sequence_id: SequenceId
    first_layer: int
    last_layer: int
    span: KvRange


def key_of(piece: Piece, giver: WorkerId) -> Key:
    return piece.move, piece.sequence_id, giver, piece.first_layer

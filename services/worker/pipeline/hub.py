"""Receives from this worker's links: messages become events for the engine thread.

It runs on link threads, so it only decodes, looks up destinations and posts events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from ballast.common.ids import Epoch, WorkerId
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core import transition_messages as t
from services.worker.core.spans import Key, Piece, key_of
from services.worker.core.turns import MemberEvent
from services.worker.links.transfer import Refusal, TransferOutcome
from services.worker.memory.backend import Algorithm
from services.worker.pipeline import events as e
from services.worker.pipeline.wire import (
    SNAPSHOT,
    Topic,
    batch_from_bytes,
    capacity_from_bytes,
    grammar_from_bytes,
    migration_from_bytes,
    pieces_from_bytes,
    result_from_bytes,
    room_from_bytes,
    victim_from_proto,
)

if TYPE_CHECKING:
    import torch

    from services.worker.links.connection import Link
    from services.worker.links.ports import LinkEnding, Message
    from services.worker.links.transfer import Opening

Pieces = list["torch.Tensor"]
_PARAMETERS = -1  # in place of the first layer of KV: marks the key of a layer's parameters


def layer_key(epoch: Epoch, layer: int, source: WorkerId) -> Key:
    """Return the key of a layer's parameters, distinct from all KV keys."""
    return epoch, layer, source, _PARAMETERS


def whole(pieces: Pieces) -> Callable[[int, int], Pieces]:
    """Return a destination for data that always fills all of `pieces`."""
    return lambda _first, _last: pieces


class Destinations:
    """Destinations in memory for expected KV and parameters, by key. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._expected: dict[Key, tuple[int, int, Callable[[int, int], Pieces]]] = {}

    def put(self, key: Key, pieces: Callable[[int, int], Pieces], first_block: int = 0, last_block: int = 0) -> None:
        """Register a destination. `pieces(first, last)` is called on a link's thread with the arriving range of the
        sequence's blocks, which may be shorter than the reserved range.
        """
        with self._lock:
            self._expected[key] = first_block, last_block, pieces

    def take(self, key: Key, first_block: int = 0, last_block: int = 0) -> Pieces | None:
        """Remove a destination and return its memory for these blocks; None if the data is not expected."""
        with self._lock:
            first, last, pieces = self._expected.get(key, (-1, -1, _nothing))
            if not first == first_block <= last_block <= last:
                return None
            del self._expected[key]
        return pieces(first_block, last_block)

    def of_kv(self) -> list[Key]:
        with self._lock:
            return [key for key in self._expected if key[-1] != _PARAMETERS]

    def forget(self, key: Key) -> bool:
        """Remove a destination. Returns False if it has already been taken, so that a write may be under way."""
        with self._lock:
            return self._expected.pop(key, None) is not None


def _nothing(_first: int, _last: int) -> Pieces:
    return []


class Hub:
    """The `Receiver` of all links of a worker."""

    def __init__(
        self,
        post: Callable[[MemberEvent], None],
        now: Callable[[], float] = time.monotonic,
        device: torch.device | str = "cpu",
    ) -> None:
        """`device`: device that uses hidden states."""
        self.post = post
        self._now = now
        self._device = device
        self.places = Destinations()
        self._receiving: set[tuple[Link, int]] = set()  # transfers that write into this worker's memory
        self._lock = Lock()
        self._heads: dict[Link, bytes] = {}  # link -> head of the next batch on it

    @property
    def receives(self) -> bool:
        with self._lock:
            return bool(self._receiving)

    def device_of(self, topic: int) -> torch.device | str:
        """Return the device of hidden states, or the host for payloads that are decoded there or written to a
        destination.
        """
        return self._device if topic in (Topic.BATCH, Topic.ACTIVATIONS) else "cpu"

    def on_message(self, link: Link, message: Message) -> None:
        epoch, peer, now_s = Epoch(link.epoch), WorkerId(link.peer_id), self._now()
        match Topic(message.topic):
            case Topic.BATCH:
                head = message.meta or self._heads.pop(link)
                self.post(e.BatchArrived(epoch, batch_from_bytes(head), message.tensor, now_s, message.receive_s))
            case Topic.BATCH_HEAD:
                self._heads[link] = _whole(message)
            case Topic.RESULT:
                self.post(e.ResultArrived(epoch, result_from_bytes(_whole(message))))
            case Topic.GRAMMAR:
                self.post(e.GrammarAnnounced(grammar_from_bytes(_whole(message))))
            case Topic.EPOCH_ENDED:
                ending = Epoch(message.stream)
                kept = pb.Roster.FromString(_whole(message)).victims
                victims = tuple(victim_from_proto(v) for v in kept)
                self.post(e.Told(ending, t.EpochEnded(now_s, ending, peer, victims)))
            case Topic.HANDOVER:
                handover = pb.Handover.FromString(_whole(message))
                snapshots = tuple(SNAPSHOT.record(s) for s in handover.sequences)
                counts = handover.block_count, handover.final_block_count
                self.post(e.HandoverArrived(epoch, peer, snapshots, *counts, handover.more, tuple(handover.lacking)))
            case Topic.ACTIVATIONS_WANTED:
                asked = pb.Activations.FromString(message.meta)
                self.post(e.ActivationsAsked(epoch, peer, asked.sequence_id, asked.first, asked.count))
            case Topic.ACTIVATIONS:
                given = pb.Activations.FromString(message.meta or self._heads.pop(link))
                token_ids = tuple(given.token_ids)
                self.post(e.ActivationsArrived(epoch, given.sequence_id, given.first, token_ids, message.tensor))
            case Topic.ROSTER | Topic.WAVE:
                roster = pb.Roster.FromString(_whole(message))
                victims = tuple(victim_from_proto(v) for v in roster.victims)
                event = t.RosterReceived(now_s, epoch, peer, victims, roster.wave, roster.last)
                self.post(e.RosterArrived(epoch, event, tuple(roster.recomputed)))
            case Topic.WAVE_DONE:
                self.post(e.Told(epoch, t.WaveDone(now_s, epoch, peer, message.stream)))
            case Topic.KV_WANTED:
                asked = pb.KvWantedAll.FromString(_whole(message))
                self.post(e.KvAsked(epoch, peer, tuple(asked.sequence_ids)))
            case Topic.KV_COMPLETE:
                self.post(e.Told(epoch, t.KvCompleteReceived(now_s, epoch, message.stream, peer)))
            case Topic.CAPACITY:
                withdrawn, block_count, sizes = capacity_from_bytes(message.meta)
                self.post(e.CapacityTold(epoch, peer, block_count, sizes, withdrawn))
            case Topic.LAYER_WANTED:
                self.post(e.LayerAsked(epoch, message.stream, link, bytes(message.meta)))
            case Topic.LAYER_REFUSED:
                self.post(
                    e.LayerArrived(epoch, message.stream, peer, b"", f"{peer} does not send it{_reason(message)}")
                )
            case Topic.ROOM:
                self.post(e.RoomGranted(*room_from_bytes(message.meta)))
            case Topic.ROOM_WITHDRAWN:
                self.post(e.RoomWithdrawn(Epoch(message.stream)))
            case Topic.MIGRATION:
                self.post(e.MigrationTold(peer, migration_from_bytes(_whole(message)), link, now_s))
            case Topic.KV:
                self._kv(link, peer, message)
            case Topic.LAYER:
                raise ValueError(f"{peer} sends {Topic(message.topic).name} as a message")

    def _kv(self, link: Link, peer: WorkerId, message: Message) -> None:
        (piece,) = pieces_from_bytes(message.meta)
        place, packed = self._place(piece, peer), message.tensor
        if place is None:
            return  # not expected
        size, expected = 0 if packed is None else packed.numel(), sum(tensor.nbytes for tensor in place)
        if size != expected:
            self.post(
                e.KvLanded(peer, piece, delivered=False)
            )  # `_place` has removed the destination, so no other event reports it
            raise ValueError(f"{peer} sends {piece} in {size} bytes instead of {expected}")
        unpack = None if packed is None else partial(link.unpack, packed, place)
        self.post(e.KvLanded(peer, piece, delivered=True, unpack=unpack))

    def _place(self, piece: Piece, giver: WorkerId) -> list[torch.Tensor] | None:
        """Take the memory into which a piece is written; None if the piece is not expected."""
        return self.places.take(key_of(piece, giver), piece.span.first_block, piece.span.last_block)

    def on_opening(self, link: Link, opening: Opening) -> Sequence[torch.Tensor] | Refusal:
        peer, epoch = WorkerId(link.peer_id), Epoch(link.epoch)
        if opening.topic == Topic.KV:
            found = [self._place(piece, peer) for piece in pieces_from_bytes(opening.meta)]
            pieces = None if None in found else [tensor for part in found for tensor in part or ()]
        else:
            pieces = self.places.take(layer_key(epoch, pb.LayerWanted.FromString(opening.meta).layer, peer))
        if pieces is None:
            return Refusal("unexpected transfer")
        if opening.total_bytes != (expected := sum(tensor.nbytes for tensor in pieces)):
            self.on_transfer_end(link, opening, TransferOutcome.REFUSED)  # no other event reports it
            raise ValueError(f"{peer} sends {opening.total_bytes} bytes instead of {expected}")
        with self._lock:
            self._receiving.add((link, opening.transfer))
        return pieces

    def on_transfer_end(self, link: Link, opening: Opening, outcome: TransferOutcome) -> None:
        peer, epoch = WorkerId(link.peer_id), Epoch(link.epoch)
        delivered = outcome is TransferOutcome.DELIVERED
        with self._lock:
            self._receiving.discard((link, opening.transfer))
        if opening.topic == Topic.KV:
            for piece in pieces_from_bytes(opening.meta):
                self.post(e.KvLanded(peer, piece, delivered))
            return
        wanted = pb.LayerWanted.FromString(opening.meta)
        failure = "" if delivered else f"{peer}: {outcome.value}"
        by = next((known for known in Algorithm if known.value == wanted.algorithm), None)
        if by is None:
            failure = failure or f"{peer} has a checksum of unknown algorithm {wanted.algorithm!r}"
        self.post(e.LayerArrived(epoch, wanted.layer, peer, wanted.checksum, failure, by))

    def on_link_end(self, link: Link, ending: LinkEnding) -> None:
        self._heads.pop(link, None)
        if not link.retired:  # broken, or the peer has left the epoch
            epoch = Epoch(link.epoch)
            self.post(e.Told(epoch, t.PeerLost(self._now(), WorkerId(link.peer_id), ending.why)))


def _reason(message: Message) -> str:
    return f": {message.meta.decode(errors='replace')}" if message.meta else ""


def _whole(message: Message) -> bytes:
    """Return the body of a message without a tensor. Small bodies are sent as meta, large ones as a tensor of bytes."""
    return message.meta if message.tensor is None else message.tensor.numpy().tobytes()

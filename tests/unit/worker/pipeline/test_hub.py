"""Link messages and transfers of the wrong size: their receivers are notified that the data will not arrive."""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from ballast.common.ids import Epoch, WorkerId
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core.spans import KvRange, Piece, key_of
from services.worker.core.turns import MemberEvent
from services.worker.links.connection import Link
from services.worker.links.ports import Message
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Opening, TransferOutcome
from services.worker.memory.backend import Algorithm
from services.worker.pipeline.events import KvLanded, LayerArrived
from services.worker.pipeline.hub import Hub, layer_key, whole
from services.worker.pipeline.wire import Topic, pieces_to_bytes

PEER = WorkerId("w9")
PIECE = Piece(7, 5, 0, 4, KvRange(0, 2, 30, last=True))
PLACE = torch.zeros(64, dtype=torch.uint8)


class FakeLink:
    """The attributes of a link that a hub reads."""

    peer_id = PEER
    epoch = 3


def as_message(hub: Hub, link: Link, meta: bytes) -> object:
    return hub.on_message(link, Message(TrafficClass.CONTROL, Topic.KV, 0, meta, PLACE[:63]))


def as_transfer(hub: Hub, link: Link, meta: bytes) -> object:
    return hub.on_opening(link, Opening(1, TrafficClass.KV, Topic.KV, 0, 63, meta))


@pytest.mark.parametrize("comes", [as_message, as_transfer])
def test_kv_of_another_size_ends_the_link_and_is_no_longer_awaited(
    comes: Callable[[Hub, Link, bytes], object],
) -> None:
    posted: list[MemberEvent] = []
    hub, link = Hub(posted.append, device="cpu"), cast("Link", FakeLink())
    hub.places.put(key_of(PIECE, PEER), whole([PLACE]), 0, 2)
    with pytest.raises(ValueError, match="63 bytes instead of 64"):
        comes(hub, link, pieces_to_bytes((PIECE,)))
    assert posted == [KvLanded(PEER, PIECE, delivered=False)]
    assert not hub.receives
    assert not hub.places.forget(key_of(PIECE, PEER)), "its destination must not be registered any more"


def test_a_layer_whose_checksum_cannot_be_computed_is_refused() -> None:
    posted: list[MemberEvent] = []
    hub, link = Hub(posted.append, device="cpu"), cast("Link", FakeLink())
    for algorithm in ("mix128", "of tomorrow"):
        meta = pb.LayerWanted(epoch=3, layer=1, checksum=b"16", algorithm=algorithm).SerializeToString()
        hub.places.put(layer_key(Epoch(3), 1, PEER), whole([PLACE]))
        opening = Opening(1, TrafficClass.PARAMETERS, Topic.LAYER, 0, 64, meta)
        assert hub.on_opening(link, opening) == [PLACE]
        hub.on_transfer_end(link, opening, TransferOutcome.DELIVERED)
    known, unknown = posted
    assert known == LayerArrived(Epoch(3), 1, PEER, b"16", by=Algorithm.MIX128)
    assert isinstance(unknown, LayerArrived)
    assert "unknown algorithm 'of tomorrow'" in unknown.failure

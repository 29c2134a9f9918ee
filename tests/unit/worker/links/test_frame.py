"""Headers survive encoding and decoding, and invalid ones are refused."""

import pytest
import torch

from ballast.common.errors import PeerViolation
from services.worker.links.config import HEADER_BYTES
from services.worker.links.frame import SUPPORTED_DTYPES, FrameKind, Header, unpack
from services.worker.links.traffic import TrafficClass


@pytest.mark.parametrize("dtype", sorted(SUPPORTED_DTYPES, key=str))
def test_a_message_header_survives_a_round_trip(dtype: torch.dtype) -> None:
    header = Header(
        kind=FrameKind.MESSAGE,
        traffic=TrafficClass.ACTIVATION,
        epoch=7,
        sequence=2**32 - 1,
        stream=2**64 - 1,
        topic=3,
        meta_bytes=5,
        payload_bytes=6 * dtype.itemsize,
        dtype=dtype,
        shape=(2, 3),
        inline=True,
    )
    assert len(header.pack()) == HEADER_BYTES
    assert unpack(header.pack(), "w2") == header


def test_a_chunk_header_survives_a_round_trip() -> None:
    header = Header(
        kind=FrameKind.CHUNK,
        traffic=TrafficClass.PARAMETERS,
        epoch=2**63,
        transfer=9,
        payload_bytes=1 << 33,
        total_bytes=1 << 40,
        offset_bytes=1 << 39,
        more=True,
    )
    assert unpack(header.pack(), "w2") == header


@pytest.mark.parametrize(
    ("at", "byte", "complaint"),
    [
        (0, 0, "magic"),
        (2, 9, "version 9"),
        (3, 99, "99 is not a valid FrameKind"),
        (4, 99, "TrafficClass"),
        (6, 99, "dtype code 99"),
        (7, 3, "3 dimensions"),
        (24, 5, "shape"),  # the first dimension contradicts the announced bytes
    ],
)
def test_a_damaged_header_is_named(at: int, byte: int, complaint: str) -> None:
    header = Header(kind=FrameKind.MESSAGE, traffic=TrafficClass.CONTROL, epoch=1, payload_bytes=4, shape=(4,))
    data = bytearray(header.pack())
    data[at] = byte
    with pytest.raises(PeerViolation, match=complaint):
        unpack(bytes(data), "w2")

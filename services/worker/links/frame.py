"""Header of every message on a link: 64 bytes, little-endian, fixed layout.

Sizes are known before data is received: the handshake bounds the size of frames, and a frame states the size of its
payload.
"""

import struct
from dataclasses import dataclass

import torch

from ballast.common.errors import PeerViolation
from services.worker.links.config import HEADER_BYTES
from services.worker.links.frame_kinds import FrameKind
from services.worker.links.traffic import TrafficClass

MAGIC = 0xBA57
VERSION = 7
MAX_DIMENSIONS = 2

# magic, version, kind, class, flags, dtype, dimensions | epoch | stream | extent x2 | transfer, sequence, topic, meta
# bytes | payload bytes
_LAYOUT = struct.Struct("<HBBBBBBQQQQIIIIQ")
assert _LAYOUT.size == HEADER_BYTES

_INLINE = 1
_MORE = 2
_ON_DEVICE = 4

_DTYPES = (
    torch.uint8,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.int16,
    torch.bool,
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
SUPPORTED_DTYPES = frozenset(_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    kind: FrameKind
    traffic: TrafficClass
    epoch: int = 0  # 0: about the connection itself
    sequence: int = 0  # incremented per frame of a lane and direction, modulo 2**32
    stream: int = 0  # chosen by the caller
    topic: int = 0  # chosen by the caller
    transfer: int = 0  # assigned by the sender
    meta_bytes: int = 0
    payload_bytes: int = 0
    total_bytes: int = 0  # OPENING
    offset_bytes: int = 0  # CHUNK
    dtype: torch.dtype = torch.uint8  # MESSAGE
    shape: tuple[int, ...] = ()  # MESSAGE
    inline: bool = False  # the payload follows the meta within the frame
    more: bool = False  # another frame follows
    on_device: bool = False  # the payload is sent from device memory to the peer's device memory, not from host to host

    def pack(self) -> bytes:
        if self.kind is FrameKind.MESSAGE:
            first, second = (*self.shape, 0, 0)[:2]
        else:
            first, second = self.total_bytes, self.offset_bytes
        return _LAYOUT.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.traffic,
            _INLINE * self.inline | _MORE * self.more | _ON_DEVICE * self.on_device,
            _DTYPE_CODES[self.dtype],
            len(self.shape),
            self.epoch,
            self.stream,
            first,
            second,
            self.transfer,
            self.sequence,
            self.topic,
            self.meta_bytes,
            self.payload_bytes,
        )


def unpack(data: bytes, peer: str) -> Header:
    """Decode a header. Raises PeerViolation if the bytes are no header of this version."""
    magic, version, kind, traffic, flags, dtype, ndim, epoch, stream, first, second, *rest = _LAYOUT.unpack(data)
    transfer, sequence, topic, meta_bytes, payload_bytes = rest
    if magic != MAGIC or version != VERSION:
        raise PeerViolation(peer, f"frame with magic {magic:#x} version {version}, expected {MAGIC:#x} {VERSION}")
    try:
        kind, traffic = FrameKind(kind), TrafficClass(traffic)
    except ValueError as error:
        raise PeerViolation(peer, f"frame header: {error}") from error
    if dtype >= len(_DTYPES) or ndim > MAX_DIMENSIONS:
        raise PeerViolation(peer, f"frame header: dtype code {dtype}, {ndim} dimensions")
    is_message = kind is FrameKind.MESSAGE
    header = Header(
        kind=kind,
        traffic=traffic,
        epoch=epoch,
        sequence=sequence,
        stream=stream,
        topic=topic,
        transfer=transfer,
        meta_bytes=meta_bytes,
        payload_bytes=payload_bytes,
        total_bytes=0 if is_message else first,
        offset_bytes=0 if is_message else second,
        dtype=_DTYPES[dtype],
        shape=(first, second)[:ndim] if is_message else (),
        inline=bool(flags & _INLINE),
        more=bool(flags & _MORE),
        on_device=bool(flags & _ON_DEVICE),
    )
    _check_shape(header, peer)
    return header


def _check_shape(header: Header, peer: str) -> None:
    """Raise PeerViolation unless a message's payload is a tensor of the announced shape, or empty."""
    if header.kind is not FrameKind.MESSAGE:
        return
    elements = 1
    for size in header.shape:
        elements *= size
    expected = elements * header.dtype.itemsize if header.shape else 0
    if expected != header.payload_bytes:
        raise PeerViolation(
            peer, f"message of shape {header.shape} {header.dtype} announces {header.payload_bytes} bytes"
        )

"""What emulated links send over TCP: a head of fixed size, then meta, then the marks of what would have been sent."""

import struct
from enum import IntEnum
from typing import NamedTuple

_HEAD = struct.Struct("<BBHIQQII")
HEAD_BYTES = _HEAD.size
MAX_BYTES = 64 << 20  # of meta or of marks
MAX_HELLO_BYTES = 4096  # of each, from a stranger


class Kind(IntEnum):
    HELLO = 1  # meta: who calls; stream: the epoch
    MESSAGE = 2
    OPENING = 3
    CONTENT = 4  # all of a transfer has been sent by now
    CANCEL = 5
    REFUSED = 6  # meta: why
    DELIVERED = 7
    CLOSE = 8


class Frame(NamedTuple):
    kind: Kind
    traffic: int = 0
    topic: int = 0
    transfer: int = 0
    stream: int = 0
    size_bytes: int = 0  # that a real link would have sent
    meta: bytes = b""
    body: bytes = b""

    def encode(self) -> bytes:
        head = _HEAD.pack(
            self.kind,
            self.traffic,
            self.topic,
            self.transfer,
            self.stream,
            self.size_bytes,
            len(self.meta),
            len(self.body),
        )
        return head + self.meta + self.body


class Frames:
    """Cuts what comes in into frames."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes  # of meta, and of marks
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """
        Raises:
            ValueError: this is no link of ours.
        """
        buffer, frames = self._buffer, list[Frame]()
        buffer += data
        while len(buffer) >= HEAD_BYTES:
            kind, traffic, topic, transfer, stream, size_bytes, meta_bytes, body_bytes = _HEAD.unpack_from(buffer)
            if max(meta_bytes, body_bytes) > self.max_bytes:
                raise ValueError(f"a frame of {meta_bytes} + {body_bytes} bytes")
            middle = HEAD_BYTES + meta_bytes
            end = middle + body_bytes
            if len(buffer) < end:
                break
            meta, body = bytes(buffer[HEAD_BYTES:middle]), bytes(buffer[middle:end])
            frames.append(Frame(Kind(kind), traffic, topic, transfer, stream, size_bytes, meta, body))
            del buffer[:end]
        return frames

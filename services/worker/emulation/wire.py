"""Frames of emulated links over TCP: a head of fixed size, meta, and the marks of the payload."""

import struct
from enum import IntEnum
from typing import Any, NamedTuple

_HEAD = struct.Struct("<BBHIQQQdII")
HEAD_BYTES = _HEAD.size
MAX_BYTES = 64 << 20  # maximum size of meta or of marks


class FrameType(IntEnum):
    MESSAGE = 2
    OPENING = 3
    CONTENT = 4  # all of a transfer has been sent
    CANCEL = 5
    REFUSED = 6  # meta: the reason
    DELIVERED = 7
    CLOSE = 8
    JOIN = 9  # the sender joins this epoch
    LEAVE = 10


class EmulatedFrame(NamedTuple):
    kind: FrameType
    traffic: int = 0
    topic: int = 0
    transfer: int = 0
    epoch: int = 0
    stream: int = 0
    size_bytes: int = 0  # size of the real payload
    meta: bytes = b""
    body: bytes = b""
    at_s: float = 0.0  # ideal arrival of the message; see `clock`

    def encode(self) -> bytes:
        head = _HEAD.pack(
            self.kind,
            self.traffic,
            self.topic,
            self.transfer,
            self.epoch,
            self.stream,
            self.size_bytes,
            self.at_s,
            len(self.meta),
            len(self.body),
        )
        return head + self.meta + self.body


class Frames:
    """Splits the byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[EmulatedFrame]:
        """Add received bytes, and return the frames that are complete. Raises ValueError for another protocol."""
        buffer, frames = self._buffer, list[EmulatedFrame]()
        buffer += data
        while len(buffer) >= HEAD_BYTES:
            head: tuple[Any, ...] = _HEAD.unpack_from(buffer)  # Any: whole numbers, and an instant
            meta_bytes, body_bytes = head[-2:]
            if max(meta_bytes, body_bytes) > MAX_BYTES:
                raise ValueError(f"a frame of {meta_bytes} + {body_bytes} bytes")
            middle = HEAD_BYTES + meta_bytes
            end = middle + body_bytes
            if len(buffer) < end:
                break
            meta, body = bytes(buffer[HEAD_BYTES:middle]), bytes(buffer[middle:end])
            frames.append(EmulatedFrame._make((FrameType(head[0]), *head[1:-3], meta, body, head[-3])))
            del buffer[:end]
        return frames

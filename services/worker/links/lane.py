"""One direction of one channel: writes or reads frames."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ballast.common.errors import PeerViolation
from services.worker.links.config import HEADER_BYTES
from services.worker.links.copies import HOST, Copies, Mark, carried_on
from services.worker.links.frame import Header, unpack
from services.worker.links.pieces import Pieces
from services.worker.links.ports import Channel, Pending

_SEQUENCE_MODULUS = 1 << 32
_LEAST_DIRECT_BYTES = 256 << 10  # below this size, a copy takes less processor time than a separate message
_LEAST_DIRECT_DEVICE_BYTES = 1 << 20  # below this size, a gathering kernel is faster than separate messages


class FrameWriter:
    """Posts frames in order. Used by one thread at a time."""

    def __init__(self, channel: Channel, max_frame_bytes: int, copies: Copies) -> None:
        self._channel = channel
        self._copies = copies
        self._max_frame_bytes = max_frame_bytes
        self._sequence = 0

    def max_meta_bytes(self) -> int:
        return self._max_frame_bytes - HEADER_BYTES

    def post(self, header: Header, meta: bytes = b"", payload: torch.Tensor | None = None) -> list[Pending]:
        """Post a frame and its payload (flat bytes), which is copied into the frame if the peer's receive has room.

        The payload must be on the device where `fetch` or `gathered` put it.
        """
        payload_bytes = 0 if payload is None else payload.numel()
        inline = 0 < payload_bytes <= self._max_frame_bytes - HEADER_BYTES - len(meta)
        sized = replace(
            header,
            sequence=self._sequence,
            meta_bytes=len(meta),
            payload_bytes=payload_bytes,
            inline=inline,
            on_device=payload is not None and payload.device != HOST and not inline,
        )
        self._sequence = (self._sequence + 1) % _SEQUENCE_MODULUS
        head = sized.pack() + meta
        frame = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if payload is None or not payload_bytes:
            return [self._channel.send_frame(frame)]
        if inline:
            whole = torch.empty(len(head) + payload_bytes, dtype=torch.uint8)
            whole[: len(head)].copy_(frame)
            whole[len(head) :].copy_(payload)
            return [self._channel.send_frame(whole)]
        return [self._channel.send_frame(frame), self._channel.send_payload(payload)]

    def is_ready(self, payload: torch.Tensor) -> bool:
        """True if the payload can be posted in place, from any thread."""
        return payload.device == HOST

    def fetch(self, payload: torch.Tensor, then: Callable[[torch.Tensor | None], None]) -> None:
        """Copy the payload, once it is computed, to a device from which it can be posted. `then` is called with the
        copy, at once or from another thread, or with None if the copy failed.
        """
        self._copies.fetch(payload, self._carried(payload.device, payload.numel()), then)

    def mark(self, pieces: Pieces) -> Mark | None:
        """Return the mark after which the calling thread's launched work has written the pieces; None: no wait is
        needed.
        """
        return None if pieces.device == HOST else self._copies.mark()

    def gathered(self, pieces: Pieces, offset: int, size: int) -> tuple[torch.Tensor, bool]:
        """Return a range of the pieces, ready to be posted, and whether it is a copy. Blocks while copying."""
        carried = self._carried(pieces.device, size)
        view = pieces.view(offset, size)
        if view is not None and view.device == carried:
            return view, False
        payload = self._copies.empty(size, carried)
        self._copies.gather(pieces, offset, payload)
        return payload, True

    def chunk_bytes(self, pieces: Pieces, offset: int, limit: int) -> int:
        """Return how many of the next `limit` bytes to send together. A large contiguous piece is sent without a copy,
        as a separate message.
        """
        carried = self._carried(pieces.device, limit)
        least_bytes = _LEAST_DIRECT_BYTES if carried == HOST else _LEAST_DIRECT_DEVICE_BYTES
        return pieces.chunk_bytes(offset, limit, least_bytes if carried == pieces.device else limit + 1)

    def _carried(self, lies_on: torch.device, size: int) -> torch.device:
        """Return the device from which a payload is sent. Payloads small enough to be inlined in their frame are sent
        from the host.
        """
        is_small = size <= self._max_frame_bytes - HEADER_BYTES
        return HOST if is_small else carried_on(lies_on, self._channel.device)


@dataclass(frozen=True, slots=True)
class Frame:
    header: Header
    meta: bytes
    inline: torch.Tensor | None  # flat bytes in the receive buffer, valid until the next `FrameReader.next`


class FrameReader:
    """Keeps receives posted and returns one frame at a time. Used by one thread."""

    def __init__(self, channel: Channel, peer: str, frame_bytes: int, posted_frames: int) -> None:
        self._channel = channel
        self._peer = peer
        self._frame_bytes = frame_bytes
        self._posted: deque[tuple[Pending, bytearray]] = deque()
        self._in_use: bytearray | None = None
        self._expected = 0
        for _ in range(posted_frames):
            self._post(bytearray(frame_bytes))

    def next(self, timeout_s: float) -> Frame:
        """Return the next frame. Raises ChannelBroken on a timeout, PeerViolation for an invalid frame."""
        if self._in_use is not None:
            self._post(self._in_use)
            self._in_use = None
        pending, buffer = self._posted.popleft()
        pending.wait(timeout_s)
        self._in_use = buffer
        header = unpack(bytes(buffer[:HEADER_BYTES]), self._peer)
        self._check(header)
        meta_end = HEADER_BYTES + header.meta_bytes
        inline = None
        if header.inline:
            inline = torch.frombuffer(buffer, dtype=torch.uint8)[meta_end : meta_end + header.payload_bytes]
        return Frame(header, bytes(buffer[HEADER_BYTES:meta_end]), inline)

    def release(self) -> None:
        """Drop the posted receives. The channel must have been aborted."""
        self._posted.clear()
        self._in_use = None

    def _check(self, header: Header) -> None:
        if header.sequence != self._expected:
            raise PeerViolation(self._peer, f"frame number {header.sequence}, expected {self._expected}")
        self._expected = (self._expected + 1) % _SEQUENCE_MODULUS
        in_frame_bytes = HEADER_BYTES + header.meta_bytes + header.payload_bytes * header.inline
        if in_frame_bytes > self._frame_bytes:
            raise PeerViolation(self._peer, f"frame of {in_frame_bytes} bytes in a buffer of {self._frame_bytes}")

    def _post(self, buffer: bytearray) -> None:
        self._posted.append((self._channel.post_frame(torch.frombuffer(buffer, dtype=torch.uint8)), buffer))

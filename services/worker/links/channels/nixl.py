"""Bulk by one-sided reads, over whatever NIXL's UCX finds: RDMA, NVLink, shared memory, TCP. Frames and all that is
urgent over TCP.

Each side of a link has a slab of slots that is registered once. The sender copies a payload into slots and offers
them; the receiver reads them into its own, copies them to where they belong, and says that they are free. Nothing but
slabs is ever registered: memory that is mapped anew while a card still knows its old pages would be written behind
everybody's back. So nothing but the two copies touches what was posted, and an abort only has to wait for those.
"""

from __future__ import annotations

import importlib
import os
import select
import socket
import struct
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from threading import Condition, Thread
from typing import Any, Protocol

import torch

from ballast.common.errors import ConfigError
from ballast.service.logs import get_logger
from services.worker.links.channels.tcp import TcpChannel
from services.worker.links.copies import HOST, Copies
from services.worker.links.ports import ChannelBroken, Channels, Pending
from services.worker.links.store import PairStore

_SLOT_BYTES = 2 << 20
_SLOTS = 4  # each way
SLAB_BYTES = 2 * _SLOTS * _SLOT_BYTES  # of the memory that is moved, for each link
_LOOK_MS = 1  # between two looks at what is being read; NIXL cannot be waited for
_ABORT_S = 10.0

_WORD = struct.Struct("<BBQ")  # kind, slot, bytes
_PLACE = struct.Struct("<QQ")  # of the sender's slots: address, device


class _Kind(IntEnum):
    OFFERED = 1
    FREED = 2


class Reading(Protocol):
    """One read that is under way."""

    def is_done(self) -> bool:
        """
        Raises:
            ChannelBroken: it has failed.
        """
        ...

    def release(self) -> None:
        """Whether done or not. When it has returned, it writes nothing."""
        ...


class Agent(Protocol):
    """One end of a link, as NIXL knows it: the slab it was made with, and one peer. One thread at a time."""

    def card(self) -> bytes:
        """For the peer, to `meet`."""
        ...

    def meet(self, card: bytes) -> None: ...

    def read(self, into: int, remote: int, remote_device: int, size_bytes: int) -> Reading:
        """From the peer's address into one of this slab's."""
        ...

    def close(self) -> None: ...


class _Part:
    """Of a payload: what goes through one slot."""

    def __init__(self, owner: Posted, bytes_of: torch.Tensor) -> None:
        self.owner = owner
        self.bytes_of = bytes_of


class Posted:
    """A payload until it has gone or come."""

    def __init__(self, reads: Reads, parts_left: int) -> None:
        self._reads = reads
        self.parts_left = parts_left

    def wait(self, timeout_s: float) -> None:
        self._reads.wait(self, timeout_s)


class Reads:
    """What is offered and read over a link. Takes the socket over. One thread does it all."""

    def __init__(
        self, connection: socket.socket, agent: Agent, slab: torch.Tensor, place: bytes, copies: Copies, name: str
    ) -> None:
        """`slab`: this side's; the first half is offered from, the second read into. `place`: of the peer's."""
        self._connection = connection
        self._agent = agent
        self._slots = slab.view(2, _SLOTS, -1)
        self._slot_bytes = self._slots.shape[2]
        self._remote, self._remote_device = _PLACE.unpack(place)
        self._copies = copies
        self._changed = Condition()
        self._why = ""  # nothing moves any more
        self._copying = False  # what was posted is touched
        self._out: deque[_Part] = deque()
        self._into: deque[_Part] = deque()
        self._free_out = list(range(_SLOTS))
        self._free_in = list(range(_SLOTS))
        self._offered: dict[int, _Part] = {}  # by slot of this side
        self._offers: deque[tuple[int, int]] = deque()  # slot of the peer, bytes
        self._reading: deque[tuple[Reading, int, int, _Part]] = deque()  # slot of this side, slot of the peer
        self._heard = b""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = Thread(target=self._run, name=f"link-reads-{name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ for the lane

    def send(self, payload: torch.Tensor) -> Posted:
        return self._post(self._out, payload)

    def receive(self, buffer: torch.Tensor) -> Posted:
        return self._post(self._into, buffer)

    def wait(self, posted: Posted, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not posted.parts_left or self._why, timeout_s):
                raise ChannelBroken(f"a payload has not moved for {timeout_s} s")
            if posted.parts_left:
                raise ChannelBroken(self._why)

    def abort(self) -> None:
        """Safe from any thread but its own. When it has returned, nothing touches what was posted."""
        self._end("aborted")
        with self._changed:
            if not self._changed.wait_for(lambda: not self._copying, _ABORT_S):
                get_logger().error("a copy does not end", thread=self._thread.name)

    def destroy(self) -> None:
        self._thread.join(_ABORT_S)
        self._connection.close()
        os.close(self._wake)

    def _post(self, line: deque[_Part], tensor: torch.Tensor) -> Posted:
        parts = tensor.split(self._slot_bytes)
        posted = Posted(self, len(parts))
        with self._changed:
            if self._why:
                raise ChannelBroken(self._why)
            line.extend(_Part(posted, part) for part in parts)
            os.eventfd_write(self._wake, 1)
        return posted

    def _end(self, why: str) -> None:
        with self._changed:
            self._why = self._why or why
            self._out.clear()
            self._into.clear()
            self._changed.notify_all()
        with suppress(OSError):  # it has ended before
            self._connection.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._why:
                self._offer()
                self._read()
                self._finish()
                self._listen()
        except Exception as error:  # noqa: BLE001 whatever it is, the lane must hear of it
            self._end(f"{type(error).__name__}: {error}")
        for reading, *_ in self._reading:
            reading.release()
        self._agent.close()

    def _offer(self) -> None:
        while self._free_out and (part := self._take(self._out)) is not None:
            slot, size = self._free_out.pop(), part.bytes_of.numel()
            if not self._copy(part.bytes_of, self._slots[0, slot, :size]):
                return
            self._offered[slot] = part
            self._say(_Kind.OFFERED, slot, size)

    def _read(self) -> None:
        while self._offers and self._free_in and (part := self._take(self._into)) is not None:
            (slot, size), mine = self._offers.popleft(), self._free_in.pop()
            if size != part.bytes_of.numel():
                raise ChannelBroken(f"the peer offers {size} bytes where {part.bytes_of.numel()} were announced")
            remote = self._remote + slot * self._slot_bytes
            into = self._slots[1, mine].data_ptr()
            reading = self._agent.read(into, remote, self._remote_device, size)
            self._reading.append((reading, mine, slot, part))

    def _finish(self) -> None:
        while self._reading and self._reading[0][0].is_done():
            reading, mine, slot, part = self._reading.popleft()
            reading.release()
            if not self._copy(self._slots[1, mine, : part.bytes_of.numel()], part.bytes_of):
                return
            self._free_in.append(mine)
            self._say(_Kind.FREED, slot, 0)
            self._done(part)

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        for ready, _ in poll.poll(_LOOK_MS if self._reading else None):
            if ready == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._hear()

    def _hear(self) -> None:
        said = self._connection.recv(4096)
        if not said:
            raise ChannelBroken("the peer has ended the connection")
        self._heard += said
        while len(self._heard) >= _WORD.size:
            kind, slot, size = _WORD.unpack_from(self._heard)
            self._heard = self._heard[_WORD.size :]
            if slot >= _SLOTS or size > self._slot_bytes or (kind == _Kind.FREED and slot not in self._offered):
                raise ChannelBroken(f"the peer speaks of slot {slot} with {size} bytes")
            if kind == _Kind.OFFERED:
                if len(self._offers) == _SLOTS:
                    raise ChannelBroken(f"the peer offers more than its {_SLOTS} slots")
                self._offers.append((slot, size))
            else:
                self._free_out.append(slot)
                self._done(self._offered.pop(slot))

    def _say(self, kind: _Kind, slot: int, size: int) -> None:
        self._connection.sendall(_WORD.pack(kind, slot, size))  # a few words at most are ever unread

    def _take(self, line: deque[_Part]) -> _Part | None:
        with self._changed:
            return line.popleft() if line else None

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """False: it is too late, and nothing has been touched."""
        with self._changed:
            if self._why:
                return False
            self._copying = True
        try:
            with self._copies.copying():
                target.copy_(source, non_blocking=True)
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify_all()
        return True

    def _done(self, part: _Part) -> None:
        with self._changed:
            part.owner.parts_left -= not self._why
            self._changed.notify_all()


class NixlChannel:
    """The bulk lane. See `links.ports.Channel`."""

    def __init__(self, frames: TcpChannel, reads: Reads, device: torch.device) -> None:
        self.device = device
        self._frames = frames
        self._reads = reads

    def send_frame(self, frame: torch.Tensor) -> Pending:
        return self._frames.send_frame(frame)

    def post_frame(self, buffer: torch.Tensor) -> Pending:
        return self._frames.post_frame(buffer)

    def send_payload(self, payload: torch.Tensor) -> Pending:
        return self._reads.send(payload)

    def post_payload(self, buffer: torch.Tensor) -> Pending:
        return self._reads.receive(buffer)

    def abort(self) -> None:
        self._frames.abort()
        self._reads.abort()

    def destroy(self) -> None:
        self._frames.destroy()
        self._reads.destroy()


class NixlTransport:
    """`make_agent` is NIXL's, but for tests: it registers the slab."""

    name = "nixl"
    lanes = ("store", "reads", "urgent", "bulk")

    def __init__(
        self, device: torch.device, copies: Copies, make_agent: Callable[[torch.Tensor], Agent] | None = None
    ) -> None:
        self._device = device
        self._copies = copies
        self._make_agent = make_agent or _nixl_agents()

    def open(self, sockets: Sequence[socket.socket], name: str, rank: int, within_s: float) -> Channels:
        store_socket, reads_socket, urgent, bulk = sockets
        store = PairStore(store_socket)
        slab = self._copies.empty(SLAB_BYTES, self._device)
        agent: Agent | None = None
        try:
            with store.expiring(time.monotonic() + within_s):
                agent = self._make_agent(slab)
                mine = _PLACE.pack(slab.data_ptr(), self._device.index or 0)
                store.set(f"card {rank}", mine + agent.card())
                theirs = store.get(f"card {1 - rank}")
                agent.meet(theirs[_PLACE.size :])
        except Exception as error:
            if agent is not None:
                agent.close()
            store.close()
            raise ChannelBroken(f"{name}: {type(error).__name__}: {error}") from error
        reads_socket.setblocking(True)
        with suppress(OSError):  # it is no TCP
            reads_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reads = Reads(reads_socket, agent, slab, theirs[: _PLACE.size], self._copies, name)
        channel = NixlChannel(TcpChannel(bulk), reads, self._device)
        return Channels(TcpChannel(urgent), channel, store.close)

    def close(self) -> None:
        """Nothing is shared."""


class _NixlReading:
    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def is_done(self) -> bool:
        if self._state != "DONE":
            self._state = self._agent.check_xfer_state(self._handle)
        if self._state == "ERR":
            raise ChannelBroken("a read has failed")
        return self._state == "DONE"

    def release(self) -> None:
        self._agent.release_xfer_handle(self._handle)


class _NixlAgent:
    """Over the package's own."""

    def __init__(self, api: Any, slab: torch.Tensor) -> None:
        self._agent: Any = api.nixl_agent(uuid.uuid4().hex, api.nixl_agent_config(backends=["UCX"]))
        self._slab: torch.Tensor | None = slab
        self._kind = "DRAM" if slab.device == HOST else "VRAM"
        self._device = slab.device.index or 0
        self._registered = self._agent.register_memory([slab])
        self._peer = ""

    def card(self) -> bytes:
        return self._agent.get_agent_metadata()

    def meet(self, card: bytes) -> None:
        peer = self._agent.add_remote_agent(card)
        self._peer = peer.decode() if isinstance(peer, bytes) else str(peer)

    def read(self, into: int, remote: int, remote_device: int, size_bytes: int) -> Reading:
        local = self._agent.get_xfer_descs([(into, size_bytes, self._device)], self._kind)
        there = self._agent.get_xfer_descs([(remote, size_bytes, remote_device)], self._kind)
        handle = self._agent.initialize_xfer("READ", local, there, self._peer)
        return _NixlReading(self._agent, handle, self._agent.transfer(handle))

    def close(self) -> None:
        with suppress(Exception):  # a peer that has died is not to be parted from in order
            if self._peer:
                self._agent.remove_remote_agent(self._peer)
        self._agent.deregister_memory(self._registered)
        self._agent = None
        self._slab = None


def _nixl_agents() -> Callable[[torch.Tensor], Agent]:
    os.environ.setdefault("UCX_HANDLE_ERRORS", "none")  # its handlers of signals, where the process has its own
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # else it writes to the standard output
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        why = f"nixl is not installed ({error}): pip install 'ballast-serve[nixl]', or use tcp"
        raise ConfigError("worker.transport", why) from error
    return lambda slab: _NixlAgent(api, slab)

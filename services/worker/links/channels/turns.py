"""Serialises sends and receives of two lanes in an order agreed by both ranks.

A communicator executes one operation after another, and both sides must request the same one: if both send first, they
deadlock. Therefore rank 0 decides. Over a socket it learns which payloads the other side has posted, and announces for
each turn how many payloads of one lane are sent in each direction. A turn costs the same for one payload and for
several. No bulk payload is started while an urgent one is known, so an urgent payload waits for at most the current
turn.

A single thread decides and calls the mover. Waiters for a payload wait for a notification from that thread, so a failed
payload never counts as delivered. An abort notifies all waiters at once.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from threading import Condition, Thread
from typing import Protocol

import torch

from ballast.service.logs import get_logger
from services.worker.links.ports import ChannelBroken

_ABORT_S = 10.0  # timeout for the mover to return

# Control messages are one byte. To rank 0: the number of posted payloads. From rank 0: the lane of a turn, and the
# numbers of payloads.
_BULK, _RECEIVES = 1, 2
_DOWN, _UP = 1, 4  # lowest bits of the numbers of payloads from rank 0 and from rank 1
_MOST = 7  # maximum payloads per turn in each direction


class Lane(IntEnum):
    """Lanes by priority; a smaller value is more urgent."""

    URGENT = 0
    BULK = 1


class TurnMover(Protocol):
    """Moves several payloads in each direction at once. Only one thread calls it, except for `abort`."""

    def move(self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Send `out`, receive `into`, and return when all have arrived. Both sides must request the same operation.

        Raises:
            Exception: a payload has failed. After `abort` this method may return or raise.
        """
        ...

    def abort(self) -> None:
        """Make `move` return soon; after that the tensors are not accessed. Callable from any thread."""
        ...

    def destroy(self) -> None: ...


class Posted:
    """A posted payload, which exists until it has been sent or received."""

    def __init__(self, turns: ChannelTurns, tensor: torch.Tensor) -> None:
        self._turns = turns
        self.tensor: torch.Tensor | None = tensor
        self.is_done = False

    def wait(self, timeout_s: float) -> None:
        self._turns.wait(self, timeout_s)


class ChannelTurns:
    """The turns of the two lanes, decided by rank 0. Takes ownership of the socket."""

    def __init__(self, connection: socket.socket, mover: TurnMover, rank: int, name: str) -> None:
        self._connection = connection
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with suppress(OSError):  # not a TCP socket
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.setblocking(True)
        self._mover = mover
        self._decides = rank == 0
        self._changed = Condition()
        self._why = ""  # reason for the abort
        self._moves = False  # True while the mover runs
        self._out: dict[Lane, deque[Posted]] = {lane: deque() for lane in Lane}
        self._into: dict[Lane, deque[Posted]] = {lane: deque() for lane in Lane}
        self._theirs: dict[tuple[Lane, bool], int] = {
            (lane, receives): 0 for lane in Lane for receives in (True, False)
        }
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._left = 2  # lanes not yet destroyed
        self._thread = Thread(target=self._run, name=f"link-turns-{name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ called by the lanes

    def send(self, lane: Lane, payload: torch.Tensor) -> Posted:
        return self._post(lane, payload, receives=False)

    def receive(self, lane: Lane, buffer: torch.Tensor) -> Posted:
        return self._post(lane, buffer, receives=True)

    def wait(self, posted: Posted, timeout_s: float) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: posted.is_done or self._why, timeout_s):
                raise ChannelBroken(f"a payload was not transferred for {timeout_s} s")
            if not posted.is_done:
                raise ChannelBroken(self._why)

    def abort(self) -> None:
        """Wake all waiters with an error, and stop the mover. Safe from any thread but the mover's. Afterwards posted
        memory is not accessed.
        """
        self._end("aborted")
        self._mover.abort()
        with self._changed:
            if not self._changed.wait_for(lambda: not self._moves, _ABORT_S):
                get_logger().error("a communicator does not stop", thread=self._thread.name)

    def destroy(self) -> None:
        """Release all resources once the last lane is destroyed. Call this once for each lane, after `abort`."""
        self._left -= 1
        if self._left:
            return
        self._thread.join(_ABORT_S)
        self._mover.destroy()
        self._connection.close()
        os.close(self._wake)

    def _post(self, lane: Lane, tensor: torch.Tensor, *, receives: bool) -> Posted:
        posted = Posted(self, tensor)
        with self._changed:
            if self._why:
                raise ChannelBroken(self._why)
            (self._into if receives else self._out)[lane].append(posted)
            if self._decides:
                os.eventfd_write(self._wake, 1)
                return posted
            try:
                self._connection.send(bytes([_RECEIVES * receives | _BULK * (lane is Lane.BULK)]))
            except OSError as error:
                raise ChannelBroken(f"the connection has ended: {error}") from error
        return posted

    def _end(self, why: str) -> None:
        with self._changed:
            self._why = self._why or why
            for waiting in (*self._out.values(), *self._into.values()):
                waiting.clear()
            self._changed.notify_all()
        with suppress(OSError):  # it has already ended
            self._connection.shutdown(socket.SHUT_RDWR)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._why:
                turn = self._decide() if self._decides else self._told()
                if turn is not None:
                    self._take(*turn)
        except Exception as error:  # noqa: BLE001 the lanes must be notified of any error
            self._end(f"{type(error).__name__}: {error}")

    def _decide(self) -> tuple[Lane, int, int] | None:
        """Return the next turn, if any: the lane, and the number of payloads from each rank."""
        with self._changed:
            lane = Lane.URGENT if self._knows_of(Lane.URGENT) else Lane.BULK
            down = min(len(self._out[lane]), self._theirs[lane, True], _MOST)
            up = min(len(self._into[lane]), self._theirs[lane, False], _MOST)
            if down or up:
                self._theirs[lane, True] -= down
                self._theirs[lane, False] -= up
                self._connection.send(bytes([down << _DOWN | up << _UP | _BULK * (lane is Lane.BULK)]))
                return lane, down, up
        self._listen()
        return None

    def _knows_of(self, lane: Lane) -> bool:
        return bool(self._out[lane] or self._into[lane] or self._theirs[lane, True] or self._theirs[lane, False])

    def _listen(self) -> None:
        """Wait for posts of either side. All posts that have arrived are read before the next turn is decided."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        for ready, _ in poll.poll():
            if ready == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._hear()

    def _hear(self) -> None:
        for word in self._read(256):
            lane = Lane.BULK if word & _BULK else Lane.URGENT
            self._theirs[lane, bool(word & _RECEIVES)] += 1

    def _told(self) -> tuple[Lane, int, int]:
        word = self._read(1)[0]
        return Lane.BULK if word & _BULK else Lane.URGENT, word >> _DOWN & _MOST, word >> _UP & _MOST

    def _read(self, size: int) -> bytes:
        words = self._connection.recv(size)
        if not words:
            raise ChannelBroken("the peer has ended the connection")
        return words

    def _take(self, lane: Lane, down: int, up: int) -> None:
        sends, receives = (down, up) if self._decides else (up, down)
        with self._changed:
            if self._why:
                return
            try:
                out = [self._out[lane].popleft() for _ in range(sends)]
                into = [self._into[lane].popleft() for _ in range(receives)]
            except IndexError:
                raise ChannelBroken("the peer announces a turn for payloads that were not posted") from None
            self._moves = True
        try:
            self._mover.move(_tensors(out), _tensors(into))
            is_done = True
        except Exception as error:  # noqa: BLE001 as above; drivers raise various errors
            is_done = False
            self._end(f"{type(error).__name__}: {error}")
        with self._changed:
            self._moves = False
            for posted in (*out, *into):
                posted.tensor = None
                posted.is_done = is_done and not self._why  # an aborted operation returns as if it were complete
            self._changed.notify_all()


def _tensors(posted: Sequence[Posted]) -> list[torch.Tensor]:
    return [each.tensor for each in posted if each.tensor is not None]

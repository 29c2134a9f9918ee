"""Sends a link's bulk transfers chunk by chunk, in the order of the schedule, and only when no
urgent message is due.
"""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Condition, Lock

import torch

from ballast.common.errors import InvalidRequest, InvariantViolation, Overloaded, Unavailable
from services.worker.links.config import TransportConfig
from services.worker.links.copies import Mark
from services.worker.links.frame import Header
from services.worker.links.frame_kinds import FrameKind
from services.worker.links.gate import SharedWire, UrgentGate
from services.worker.links.lane import FrameWriter
from services.worker.links.pace import ChunkSize, StagePace
from services.worker.links.pacing import BulkSchedule, Grant, Hold
from services.worker.links.pieces import Pieces
from services.worker.links.ports import Pending
from services.worker.links.traffic import TrafficClass, TrafficCounts
from services.worker.links.transfer import Transfer, TransferOutcome, TransferReport

_LEAST_ON_WIRE_BYTES = 16 * 1024  # minimum chunk size on an emulated wire, where chunks have no fixed cost


@dataclass(slots=True)
class _Outgoing:
    """An outgoing transfer, which is queued, opened, sent and acknowledged. It exists until its future completes."""

    peer: str
    epoch: int
    number: int
    traffic: TrafficClass
    topic: int
    stream: int
    meta: bytes
    pieces: Pieces
    queued_at_s: float
    done: Future[TransferReport]
    computed: Mark | None = None  # must be reached before the pieces are read
    opened: bool = False
    sent_bytes: int = 0
    in_flight: int = 0  # number of posted frames that may still be read from memory
    verdict: TransferOutcome | None = None
    why: str = ""


@dataclass(slots=True)
class _Posted:
    pending: list[Pending]
    owner: _Outgoing | None
    kind: FrameKind
    size_bytes: int = 0
    posted_at_s: float = 0.0


@dataclass(slots=True)
class _SenderState:
    transfers: dict[int, _Outgoing] = field(default_factory=dict[int, _Outgoing])
    notices: deque[tuple[FrameKind, _Outgoing | None]] = field(
        default_factory=deque[tuple[FrameKind, "_Outgoing | None"]]
    )  # sent before any chunk
    in_flight: deque[_Posted] = field(default_factory=deque[_Posted])
    last_number: int = 0
    promised: bool = False  # the last frame announced another frame
    refusal: str | None = None  # reason for refusing new transfers
    broken: bool = False


class BulkSender:
    """Sends bulk transfers. `run` is the body of the only thread that posts and waits for completions."""

    def __init__(
        self,
        peer: str,
        config: TransportConfig,
        writer: FrameWriter,
        max_transfer_bytes: int,
        gate: UrgentGate,
        counts: TrafficCounts,
        wire: SharedWire | None,
        pace: StagePace,
    ) -> None:
        self._peer = peer
        self._config = config
        self._writer = writer
        self._max_transfer_bytes = max_transfer_bytes
        self._gate = gate
        self._counts = counts
        self._wire = wire
        self._pace = pace
        least_bytes = config.least_chunk_bytes if wire is None or not config.urgent_first else _LEAST_ON_WIRE_BYTES
        self._least_bytes = min(least_bytes, config.chunk_bytes)
        self._chunks = ChunkSize(
            config.chunk_bytes,
            config.window_chunks if wire is None else 1,  # an emulated wire takes one chunk at a time
            self._least_bytes,
            min(config.most_chunk_bytes, config.max_message_bytes),
            config.bandwidth_bytes_per_s if wire is None else config.rate_bytes_per_s,
        )
        self._free_since_s = 0.0  # since this time only the link's speed has limited bulk
        self._last_end_s = 0.0  # when the last chunk was completed
        self._share = 1.0  # fraction of link time allowed to the last chunk's class: see `_share_of`
        self._in_background = False  # the last chunk was of parameters
        self._changed = Condition()
        self._reading = Lock()  # held while callers' memory is read without holding _changed
        self._state = _SenderState()
        self._schedule = BulkSchedule(
            chunk_bytes=config.chunk_bytes, hold_s=config.hold_s, patience_chunks=config.patience_chunks
        )

    # ------------------------------------------------------------ for callers

    def submit(
        self,
        epoch: int,
        traffic: TrafficClass,
        pieces: Sequence[torch.Tensor],
        topic: int,
        meta: bytes,
        stream: int,
        rank: int,
    ) -> Transfer:
        source = Pieces(pieces, "pieces")
        self._refuse_bad(traffic, meta, source.total_bytes)
        done: Future[TransferReport] = Future()
        done.set_running_or_notify_cancel()  # only `Transfer.cancel` may cancel it
        with self._changed:
            if self._state.refusal is not None:
                raise Unavailable(self._peer, self._state.refusal)
            if len(self._state.transfers) >= self._config.max_transfers:
                raise Overloaded(f"link to {self._peer}: {len(self._state.transfers)} transfers unfinished", 0.05)
            self._state.last_number += 1
            number = self._state.last_number
            outgoing = _Outgoing(
                self._peer, epoch, number, traffic, topic, stream, meta, source, time.monotonic(), done
            )
            outgoing.computed = self._writer.mark(source)
            self._state.transfers[number] = outgoing
            if source.total_bytes:
                if not len(self._schedule):
                    self._free_since_s = outgoing.queued_at_s
                self._schedule.add(number, traffic, source.total_bytes, rank)
            else:
                outgoing.opened = True
                self._state.notices.append((FrameKind.OPENING, outgoing))
            self._changed.notify_all()
        return Transfer(number, source.total_bytes, self, done)

    def cancel(self, number: int) -> bool:
        with self._changed:
            outgoing = self._state.transfers.get(number)
            if outgoing is None or not self._schedule.remove(number):
                return False
            finished = self._withdraw(outgoing, TransferOutcome.CANCELLED, "")
        _settle(finished)
        return True

    def reprioritise(self, number: int, traffic: TrafficClass, rank: int) -> bool:
        if traffic.is_urgent:
            raise InvalidRequest("traffic", f"{traffic.name} is not bulk")
        with self._changed:
            moved = self._schedule.reprioritise(number, traffic, rank)
            if moved:
                self._state.transfers[number].traffic = traffic
            return moved

    @property
    def in_flight_bytes(self) -> int:
        """Maximum bulk bytes in flight while activations are sent, at the current chunk size."""
        window = self._chunks.window_for(activations_flow=True)
        return self._chunks.bytes_for(self._pace.stage_s) * window

    def queued_bytes(self) -> int:
        with self._changed:
            return self._schedule.queued_bytes

    def acknowledged(self, number: int, outcome: TransferOutcome, why: str) -> None:
        """Handle the peer's answer: the transfer was received or refused."""
        with self._changed:
            outgoing = self._state.transfers.get(number)
            if outgoing is None or outgoing.verdict is not None:
                return
            if self._schedule.remove(number):  # refused early: notify the receiver of the transfer's end
                finished = self._withdraw(outgoing, outcome, why)
            else:
                outgoing.verdict, outgoing.why = outcome, why
                finished = self._finish_if_quiet(outgoing)
        _settle(finished)

    def end(self, epoch: int, why: str) -> None:
        """Fail the unfinished transfers of an epoch and notify the peer."""
        finished = list[_Outgoing | None]()
        with self._changed:
            for outgoing in list(self._state.transfers.values()):
                if outgoing.epoch != epoch or outgoing.verdict is not None:
                    continue
                if self._schedule.remove(outgoing.number):
                    finished.append(self._withdraw(outgoing, TransferOutcome.BROKEN, why))
                else:
                    outgoing.verdict, outgoing.why = TransferOutcome.BROKEN, why
                    finished.append(self._finish_if_quiet(outgoing))
        for outgoing in finished:
            _settle(outgoing)

    def close(self) -> None:
        """Fail unfinished transfers, and queue CLOSE as the last frame."""
        with self._changed:
            if self._state.refusal is not None:
                return
            self._state.refusal = "the link is closed"
            self._state.notices.append((FrameKind.CLOSE, None))
            ended = [self._end(outgoing) for outgoing in list(self._state.transfers.values())]
            self._changed.notify_all()
        for finished in ended:
            _settle(finished)

    def fail(self, why: str) -> None:
        """Fail all unfinished transfers. The channel must have been aborted, so that it no longer reads the callers'
        memory.
        """
        with self._changed:
            self._state.refusal, self._state.broken = why, True
            failed = list(self._state.transfers.values())
            self._state.transfers.clear()
            self._changed.notify_all()
        if self._wire is not None:
            self._wire.end()
        with self._reading:  # wait for a chunk that is being gathered
            pass
        for outgoing in failed:
            outgoing.verdict, outgoing.why = TransferOutcome.BROKEN, why
            _settle(outgoing)

    def release(self) -> None:
        """Drop the posted sends, which reference the channel. The channel must have been aborted, and `run` must have
        ended.
        """
        self._state.in_flight.clear()

    # ------------------------------------------------------------ the thread

    def run(self) -> None:
        state = self._state
        while not state.broken:
            if len(state.in_flight) >= (self._window() if self._wire is None else self._config.window_chunks):
                if self._complete_oldest():
                    return
                continue
            with self._changed:
                decision = self._post_notice() or self._decide(time.monotonic())
                if decision is None and not state.in_flight:
                    self._wait_for_work()
                    continue
            match decision:
                case Grant():
                    began_s = time.monotonic()
                    self._send_chunk(decision)
                    if self._share < 1.0 and state.in_flight and self._rest(began_s):
                        return
                case Hold(until_s):
                    self._stand_back(until_s)
                case None:
                    if self._complete_oldest():
                        return
                case True:
                    pass

    def _share_of(self, traffic: TrafficClass, now_s: float) -> float:
        """Fraction of link time for this class. Parameters are throttled because moving them takes processor time from
        batches, except while requests wait for the memory that the restore holds. On an emulated slow link there is no
        throttling, because the processor is idle anyway.
        """
        if self._wire is not None or traffic is not TrafficClass.PARAMETERS or self._pace.memory_is_awaited:
            return 1.0
        return self._config.background_share

    def _rest(self, began_s: float) -> bool:
        """Pause until the last chunk's class is within its fraction of time, or traffic of a higher class arrives.

        Returns True if the lane has ended.
        """
        while self._state.in_flight:
            if self._complete_oldest():
                return True
        took_s = time.monotonic() - began_s
        until_s = began_s + min(took_s / self._share, took_s + self._config.keepalive_s)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._state.broken
                    or bool(self._state.notices)
                    or (self._in_background and self._schedule.has_above_parameters)
                ),
                timeout=max(until_s - time.monotonic(), 0),
            )
        return False

    def _window(self) -> int:
        flow = time.monotonic() - self._gate.activation_at_s < self._config.calm_s
        return self._chunks.window_for(activations_flow=flow)

    def _stand_back(self, until_s: float) -> None:
        began_s = time.monotonic()
        self._gate.wait_clear(until_s)
        self._free_since_s = time.monotonic()
        self._counts.holds += 1
        self._counts.held_s += self._free_since_s - began_s

    def _send_chunk(self, grant: Grant) -> None:
        self._share = 1.0
        with self._changed:
            outgoing = self._state.transfers.get(grant.transfer)
            if outgoing is None or grant.transfer not in self._schedule:  # cancelled while this thread waited
                return
            size = self._writer.chunk_bytes(outgoing.pieces, grant.offset_bytes, grant.limit_bytes)
        if self._wire is not None and not self._wire.cross(size, self._free_since_s, self._config.keepalive_s):
            return
        with self._changed:
            if grant.transfer not in self._schedule:  # cancelled while it was sent
                return
            if not outgoing.opened:
                outgoing.opened = True
                self._counts.sent[outgoing.traffic].waited_s += time.monotonic() - outgoing.queued_at_s
                self._post(FrameKind.OPENING, outgoing, more=True)
            self._schedule.sent(grant.transfer, size)
            outgoing.sent_bytes += size
            counted = self._counts.sent[outgoing.traffic]
            counted.total_bytes += size
            counted.messages += outgoing.sent_bytes == outgoing.pieces.total_bytes
            outgoing.in_flight += 1
            self._share = self._share_of(outgoing.traffic, time.monotonic())
            self._in_background = outgoing.traffic is TrafficClass.PARAMETERS
            more = len(self._schedule) > 0 and self._wire is None and self._share == 1.0
        posted_at_s = time.monotonic()
        pending = self._post_chunk(outgoing, grant.offset_bytes, size, more=more)
        if pending is None:
            return
        with self._changed:
            self._state.promised = more
            self._state.in_flight.append(_Posted(pending, outgoing, FrameKind.CHUNK, size, posted_at_s))

    def _post_chunk(self, outgoing: _Outgoing, offset: int, size: int, *, more: bool) -> list[Pending] | None:
        """Post a chunk; None if the link is broken. Does not hold `_changed`, because copying and writing to a socket
        take time. No other thread posts on this lane.
        """
        with self._reading:
            if self._state.broken:  # the memory's owner was notified and may have unmapped it
                return None
            if outgoing.computed is not None:
                outgoing.computed.wait()
            payload, copied = self._writer.gathered(outgoing.pieces, offset, size)
            self._counts.copied_bytes += size * copied
            header = Header(
                kind=FrameKind.CHUNK,
                traffic=outgoing.traffic,
                epoch=outgoing.epoch,
                transfer=outgoing.number,
                offset_bytes=offset,
                more=more,
            )
            return self._writer.post(header, b"", payload)

    def _complete_oldest(self) -> bool:
        """Wait for the oldest posted frame. Returns True if it was the lane's last frame."""
        posted = self._state.in_flight.popleft()
        for pending in posted.pending:
            pending.wait(self._config.send_timeout_s)
        if posted.size_bytes and self._wire is None:
            self._note_speed(posted)
        finished = None
        if posted.owner is not None:
            with self._changed:
                posted.owner.in_flight -= 1
                finished = self._finish_if_quiet(posted.owner)
        _settle(finished)
        return posted.kind is FrameKind.CLOSE

    def _note_speed(self, posted: _Posted) -> None:
        began_s, self._last_end_s = max(posted.posted_at_s, self._last_end_s), time.monotonic()
        if self._free_since_s <= began_s:  # else the completion was noticed late
            self._chunks.moved(posted.size_bytes, self._last_end_s - began_s)

    # ------------------------------------------------------------ below: called with _changed held

    def _decide(self, now_s: float) -> Grant | Hold | None:
        """The next chunk, small enough to end before the running batch's activation is due."""
        size, rate = self._chunks.bytes_for(self._pace.stage_s), self._chunks.rate_bytes_per_s
        if rate is not None and self._pace.due_at_s is not None and not self._pace.is_late(now_s):
            room_bytes = int((self._pace.due_at_s - now_s) * rate)
            size = min(size, max(room_bytes, self._least_bytes))
        self._schedule.chunk_bytes = size
        decision = self._schedule.next(now_s, urgent=self._gate.is_due)
        if not isinstance(decision, Grant) or self._wire is not None:
            return decision
        if self._state.transfers[decision.transfer].traffic is TrafficClass.PARAMETERS:
            limit_bytes = min(decision.limit_bytes, self._config.background_chunk_bytes)
            return replace(decision, limit_bytes=limit_bytes)
        return decision

    def _post_notice(self) -> bool | None:
        """Post a queued notice. Returns None if there is none, so that the caller asks the schedule for a chunk."""
        if not self._state.notices:
            return None
        kind, outgoing = self._state.notices.popleft()
        self._post(kind, outgoing, more=False)
        return True

    def _post(self, kind: FrameKind, outgoing: _Outgoing | None, *, more: bool) -> None:
        header = Header(kind=kind, traffic=TrafficClass.CONTROL, more=more)
        meta = b""
        if outgoing is not None:
            header = Header(
                kind=kind,
                traffic=outgoing.traffic,
                epoch=outgoing.epoch,
                transfer=outgoing.number,
                topic=outgoing.topic,
                stream=outgoing.stream,
                total_bytes=outgoing.pieces.total_bytes,
                more=more,
            )
            meta = outgoing.meta if kind is FrameKind.OPENING else b""
            outgoing.in_flight += 1
        self._state.in_flight.append(_Posted(self._writer.post(header, meta), outgoing, kind))
        self._state.promised = more

    def _wait_for_work(self) -> None:
        """Wait for work while no frame is in flight. Queue a keepalive if no work is submitted in time, or if the last
        frame announced another frame that does not exist.
        """
        if not self._state.promised and self._changed.wait(self._config.keepalive_s):
            return
        if not self._state.notices and not len(self._schedule):
            self._state.notices.append((FrameKind.KEEPALIVE, None))

    def _withdraw(self, outgoing: _Outgoing, outcome: TransferOutcome, why: str) -> _Outgoing | None:
        """Set the outcome of a transfer that left the schedule early, and notify the receiver if it was opened. Returns
        the transfer if it is finished.
        """
        outgoing.verdict, outgoing.why = outcome, why
        if not outgoing.opened:
            return self._finish_if_quiet(outgoing)
        self._state.notices.append((FrameKind.CANCEL, outgoing))
        self._changed.notify_all()
        return None

    def _finish_if_quiet(self, outgoing: _Outgoing) -> _Outgoing | None:
        if outgoing.verdict is None or outgoing.in_flight or outgoing.number not in self._state.transfers:
            return None
        del self._state.transfers[outgoing.number]
        return outgoing

    def _end(self, outgoing: _Outgoing) -> _Outgoing | None:
        """Stop a transfer because the link is closing. Returns the transfer if it is finished."""
        self._schedule.remove(outgoing.number)
        outgoing.verdict = outgoing.verdict or TransferOutcome.BROKEN
        outgoing.why = outgoing.why or "the link is closed"
        return self._finish_if_quiet(outgoing)

    def _refuse_bad(self, traffic: TrafficClass, meta: bytes, total_bytes: int) -> None:
        if traffic.is_urgent:
            raise InvalidRequest("traffic", f"{traffic.name} is not bulk: use send()")
        if total_bytes > self._max_transfer_bytes:
            raise InvalidRequest("pieces", f"{total_bytes} bytes, at most {self._max_transfer_bytes}")
        if len(meta) > self._writer.max_meta_bytes():
            raise InvalidRequest("meta", f"{len(meta)} bytes, at most {self._writer.max_meta_bytes()}")

    def check(self) -> None:
        with self._changed:
            self._schedule.check()
            for outgoing in self._state.transfers.values():
                left = outgoing.pieces.total_bytes - outgoing.sent_bytes
                if outgoing.verdict is None and bool(left) != (outgoing.number in self._schedule):
                    raise InvariantViolation(f"transfer {outgoing.number}: {left} bytes left, but not in the schedule")


def _settle(outgoing: _Outgoing | None) -> None:
    """Complete the caller's future, after which the source may be modified or unmapped. Called without the lock,
    because callbacks run here.
    """
    if outgoing is None or outgoing.verdict is None or outgoing.done.done():
        return
    if outgoing.verdict is TransferOutcome.BROKEN:
        outgoing.done.set_exception(Unavailable(outgoing.peer, outgoing.why))
        return
    duration_s = time.monotonic() - outgoing.queued_at_s
    outgoing.done.set_result(TransferReport(outgoing.verdict, outgoing.sent_bytes, duration_s, outgoing.why))

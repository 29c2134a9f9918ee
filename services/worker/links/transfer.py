"""A bulk transfer, as seen by its sender and its receiver."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from services.worker.links.traffic import TrafficClass


class TransferOutcome(Enum):
    DELIVERED = "delivered"  # the receiver has all bytes
    CANCELLED = "cancelled"  # cancelled by the sender, before the last chunk
    REFUSED = "refused"  # refused by the receiver
    BROKEN = "broken"  # the link ended first; only reported to the receiver, while the sender gets an exception


@dataclass(frozen=True, slots=True)
class Opening:
    """Announcement of a transfer to its receiver, before its first byte."""

    transfer: int
    traffic: TrafficClass
    topic: int
    stream: int
    total_bytes: int
    meta: bytes


@dataclass(frozen=True, slots=True)
class Refusal:
    why: str


@dataclass(frozen=True, slots=True)
class TransferReport:
    outcome: TransferOutcome
    sent_bytes: int  # less than the total unless delivered
    duration_s: float  # time since it was queued
    why: str = ""


class _Sender(Protocol):
    def cancel(self, number: int) -> bool: ...

    def reprioritise(self, number: int, traffic: TrafficClass, rank: int) -> bool: ...


class Transfer:
    """The sender's handle. The source tensors must not change until `done` completes."""

    def __init__(self, number: int, total_bytes: int, sender: _Sender, done: Future[TransferReport]) -> None:
        self.number = number
        self.total_bytes = total_bytes
        self.done = done  # fails with Unavailable if the link ends first
        self._sender = sender

    def cancel(self) -> bool:
        """Send no further chunks. Returns False if all chunks have been posted; `done` then has the result."""
        return self._sender.cancel(self.number)

    def reprioritise(self, traffic: TrafficClass, rank: int = 0) -> bool:
        """Continue the transfer in another bulk class. Returns False if no chunk is left to send."""
        return self._sender.reprioritise(self.number, traffic, rank)

"""Messages and bulk transfers between instances.

Urgent messages of one pair are ordered and wait for at most one chunk of bulk data (I4). One of a pair's bulk transfers
is active at a time: KV before parameters, then first come first served. Transfers of different pairs share resources
evenly; a resource is a network card (both directions together), the direct link within a host (each direction), or a
host's disk.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from sim.clock import Clock


class Bulk(IntEnum):
    KV = 0
    PARAMETERS = 1


@dataclass(frozen=True, slots=True)
class NetworkEndpoint:
    """Network capacity of an instance, summed over its GPUs."""

    name: str
    host: int
    nic_bytes_per_s: float
    scale_up_bytes_per_s: float


@dataclass(slots=True)
class _Resource:
    bytes_per_s: float
    flows: "dict[_Pair, None]" = field(default_factory=dict["_Pair", None])  # active transfers in order of start


@dataclass(slots=True)
class _NetworkTransfer:
    left_bytes: float
    kind: Bulk
    done: Callable[[], None]
    rank: int


def _nobody() -> None:
    """Placeholder for a cancelled callback."""


class _Pair:
    """One direction between two endpoints."""

    __slots__ = (
        "bytes_per_s",
        "current",
        "last_arrival_s",
        "queues",
        "resources",
        "serial",
        "settled_s",
        "source",
        "to",
    )

    def __init__(self, source: str, to: str, resources: tuple[_Resource, ...]) -> None:
        self.source, self.to = source, to
        self.resources = resources
        self.queues: tuple[deque[_NetworkTransfer], ...] = tuple(deque() for _ in Bulk)
        self.current: _NetworkTransfer | None = None
        self.bytes_per_s = 0.0
        self.settled_s = 0.0
        self.serial = 0  # identifies the latest scheduled end of the current transfer
        self.last_arrival_s = 0.0


class Sending(NamedTuple):
    """A transfer in progress, which can be cancelled."""

    pair: _Pair
    transfer: _NetworkTransfer


class Network:
    def __init__(
        self,
        clock: Clock,
        *,
        latency_s: float,
        chunk_bytes: float,
        rate_fraction: float = 1.0,
        coordinated: bool = True,
    ) -> None:
        """Without `coordinated`, urgent messages and bulk data of a direction share one FIFO queue."""
        self._clock = clock
        self._latency_s = latency_s
        self._chunk_bytes = chunk_bytes
        self._rate_fraction = rate_fraction
        self._coordinated = coordinated
        self._endpoints: dict[str, NetworkEndpoint] = {}
        self._resources: dict[tuple[str, str], _Resource] = {}
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self.bulk_bytes = dict.fromkeys(Bulk, 0)

    def add(self, endpoint: NetworkEndpoint) -> None:
        self._endpoints[endpoint.name] = endpoint

    def add_source(self, name: str, bytes_per_s: float) -> None:
        """Add an endpoint that only sends: a disk, or a host's memory."""
        self._resources[name, "source"] = _Resource(bytes_per_s)

    # ------------------------------------------------------------ urgent messages

    def send(self, source: str, to: str, size_bytes: int, label: bytes, arrive: Callable[[], None]) -> None:
        pair = self._pair(source, to)
        rate = min(resource.bytes_per_s for resource in pair.resources)
        wait_s = self._wait_s(pair, rate)
        at_s = self._clock.now_s + self._latency_s + wait_s + size_bytes / rate
        pair.last_arrival_s = at_s = max(at_s, pair.last_arrival_s)
        self._clock.at(at_s, label, arrive)

    def _wait_s(self, pair: _Pair, bytes_per_s: float) -> float:
        if self._coordinated:
            return self._chunk_bytes / bytes_per_s if any(resource.flows for resource in pair.resources) else 0.0
        if pair.current is None:
            return 0.0
        sent_bytes = (self._clock.now_s - pair.settled_s) * pair.bytes_per_s
        left_bytes = max(0.0, pair.current.left_bytes - sent_bytes)
        for queue in pair.queues:
            for transfer in queue:
                left_bytes += transfer.left_bytes
        return left_bytes / pair.bytes_per_s

    # ------------------------------------------------------------ bulk transfers

    def transfer(
        self, source: str, to: str, size_bytes: int, kind: Bulk, done: Callable[[], None], rank: int = 0
    ) -> Sending:
        """Start a transfer; `done` is called when the receiver has all of it. Among waiting transfers of one kind, the
        one with the smallest rank starts first.
        """
        self.bulk_bytes[kind] += size_bytes
        pair = self._pair(source, to)
        transfer, queue = _NetworkTransfer(float(size_bytes), kind, done, rank), pair.queues[kind]
        at = len(queue)
        while at and queue[at - 1].rank > rank:
            at -= 1
        queue.insert(at, transfer)
        if pair.current is None:
            self._begin(pair)
        elif kind < pair.current.kind:  # preempts after the current chunk; treated as immediate
            self._settle(pair)
            pair.queues[pair.current.kind].appendleft(pair.current)
            pair.current = pair.queues[kind].popleft()
            self._expect(pair)
        return Sending(pair, transfer)

    def cancel(self, sending: Sending) -> None:
        """Cancel a transfer; its callback is not called."""
        pair, transfer = sending.pair, sending.transfer
        transfer.done = _nobody
        if pair.current is not transfer:
            transfer.left_bytes = 0.0
            return
        self._settle(pair)
        transfer.left_bytes = 0.0
        self._expect(pair)

    def _begin(self, pair: _Pair) -> None:
        """Start the next transfer, and update the bandwidth of all transfers that share resources with it."""
        waiting = next((queue for queue in pair.queues if queue), None)
        was_idle, pair.current = pair.current is None, waiting.popleft() if waiting is not None else None
        pair.settled_s = self._clock.now_s
        if pair.current is not None and not was_idle:
            self._expect(pair)
            return
        for resource in pair.resources:
            if pair.current is not None:
                resource.flows[pair] = None
            else:
                del resource.flows[pair]
        pair.serial += 1  # invalidates the scheduled end
        affected = {other: None for resource in pair.resources for other in resource.flows}
        for other in affected:
            self._settle(other)
            rate = min(resource.bytes_per_s / len(resource.flows) for resource in other.resources)
            other.bytes_per_s = rate
            self._expect(other)

    def _settle(self, pair: _Pair) -> None:
        if pair.current is not None:
            passed_bytes = (self._clock.now_s - pair.settled_s) * pair.bytes_per_s
            pair.current.left_bytes = max(0.0, pair.current.left_bytes - passed_bytes)
        pair.settled_s = self._clock.now_s

    def _expect(self, pair: _Pair) -> None:
        assert pair.current is not None
        pair.serial += 1
        serial = pair.serial
        label = f"bulk {pair.source}>{pair.to}".encode()
        self._clock.after(pair.current.left_bytes / pair.bytes_per_s, label, lambda: self._ended(pair, serial))

    def _ended(self, pair: _Pair, serial: int) -> None:
        if serial != pair.serial or pair.current is None:
            return
        done = pair.current.done
        self._begin(pair)
        self._clock.after(self._latency_s, b"bulk is there", done)

    # ------------------------------------------------------------ sharing

    def _pair(self, source: str, to: str) -> _Pair:
        pair = self._pairs.get((source, to))
        if pair is None:
            pair = self._pairs[source, to] = _Pair(source, to, self._path(source, to))
        return pair

    def _path(self, source: str, to: str) -> tuple[_Resource, ...]:
        disk = self._resources.get((source, "source"))
        receiver = self._endpoints[to]
        if disk is not None:
            return (disk,)
        sender = self._endpoints[source]
        if sender.host == receiver.host:
            names = ((sender, "out", sender.scale_up_bytes_per_s), (receiver, "in", receiver.scale_up_bytes_per_s))
        else:
            names = ((sender, "nic", sender.nic_bytes_per_s), (receiver, "nic", receiver.nic_bytes_per_s))
        return tuple(self._resource(end.name, what, rate) for end, what, rate in names)

    def _resource(self, name: str, what: str, bytes_per_s: float) -> _Resource:
        found = self._resources.get((name, what))
        if found is None:
            found = self._resources[name, what] = _Resource(bytes_per_s * self._rate_fraction)
        return found

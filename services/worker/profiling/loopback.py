"""Bandwidth and latency of a link between two processes over the loopback device.

As a program (`python -m services.worker.profiling.loopback STORE_ADDRESS`) it is the other end.
"""

import queue
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from ballast.common.errors import Unavailable
from services.worker.cost_profile import LinkCosts as LinkFigures
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Link
from services.worker.links.open import open_plane
from services.worker.links.ports import ChannelBroken, LinkEnding, Message
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Opening, Refusal, TransferOutcome

_HERE, _THERE, _EPOCH = "profile-a", "profile-b", 1
_HOST = "127.0.0.1"
_TOPIC = 1
_ACTIVATION_BYTES = 4096
_TRIPS = 100
_BULK_BYTES = 64 << 20
_TRANSFERS = 4
_START_S = 120.0  # maximum time for the other process to load torch
_WAIT_S = 30.0


def measure_link() -> LinkFigures:
    """Measure a link between two processes. Takes one or two seconds, mostly to start the other process.

    Raises:
        Unavailable: the other process does not start or answer.
    """
    returned = _Ends()
    plane = open_plane(_HERE, returned, TransportConfig(), _HOST)
    command = [sys.executable, "-m", __name__, plane.store_address]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        within, _, _ = select.select([other.stdout], [], [], _START_S)
        address = other.stdout.readline().strip() if within else ""
        if not address:
            raise Unavailable("link", "the process at its other end has not started")
        link = plane.connect(_THERE, address, _EPOCH, _WAIT_S)
        return LinkFigures(bandwidth_bytes_per_s=_bandwidth(link), latency_s=_latency(link, returned))
    except (queue.Empty, TimeoutError, ChannelBroken) as error:
        raise Unavailable("link", "its other end does not answer") from error
    finally:
        plane.close()
        with suppress(OSError, subprocess.TimeoutExpired):
            other.communicate(timeout=_WAIT_S)  # closes its stdin; it exits at EOF
        other.kill()
        other.wait()


def _latency(link: Link, returned: "_Ends") -> float:
    activation = torch.zeros(_ACTIVATION_BYTES, dtype=torch.uint8)
    trips_s: list[float] = []
    for _ in range(_TRIPS):
        began_s = time.perf_counter()
        link.send(TrafficClass.ACTIVATION, _TOPIC, tensor=activation, timeout_s=_WAIT_S)
        returned.messages.get(timeout=_WAIT_S)
        trips_s.append(time.perf_counter() - began_s)
    return sorted(trips_s)[_TRIPS // 4] / 2  # the lower quartile, because other load only adds time


def _bandwidth(link: Link) -> float:
    source = torch.zeros(_BULK_BYTES, dtype=torch.uint8)
    times_s: list[float] = []
    for _ in range(_TRANSFERS):
        began_s = time.perf_counter()
        report = link.transfer(TrafficClass.KV, [source]).done.result(_WAIT_S)
        if report.outcome is not TransferOutcome.DELIVERED:
            raise Unavailable("link", f"its other end has not taken a transfer: {report.why}")
        times_s.append(time.perf_counter() - began_s)
    return _BULK_BYTES / min(times_s)


class _Ends:
    """Receiver at both ends. One end echoes small messages."""

    def __init__(self, *, echoes: bool = False) -> None:
        self.messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._echoes = echoes
        self._destination = torch.zeros(_BULK_BYTES if echoes else 0, dtype=torch.uint8)

    def device_of(self, topic: int) -> str:
        return "cpu"

    def on_message(self, link: Link, message: Message) -> None:
        if self._echoes:
            link.send(message.traffic, message.topic, tensor=message.tensor)
        else:
            self.messages.put(message)

    def on_opening(self, link: Link, opening: Opening) -> Sequence[torch.Tensor] | Refusal:
        if opening.total_bytes > len(self._destination):
            return Refusal("more bytes than agreed")
        return [self._destination[: opening.total_bytes]]

    def on_transfer_end(self, link: Link, opening: Opening, outcome: TransferOutcome) -> None: ...

    def on_link_end(self, link: Link, ending: LinkEnding) -> None: ...


def main() -> None:
    torch.set_num_threads(1)
    plane = open_plane(_THERE, _Ends(echoes=True), TransportConfig(), _HOST)
    print(plane.store_address, flush=True)
    plane.connect(_HERE, sys.argv[1], _EPOCH, _WAIT_S)
    sys.stdin.read()  # blocks until the parent closes our stdin
    plane.close()


if __name__ == "__main__":
    main()

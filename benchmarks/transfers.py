"""Mutual slowdown of a KV exchange and activations on the same link, for three ways of sending.

    python -m benchmarks.transfers [--seconds 2] [--rounds 5] [--speeds 25,100,400,unlimited] [--out FOLDER]
        [--devices cpu,cpu] [--transport auto]

Two processes have a real link. One acts as a stage: it repeatedly "executes" for --stage-ms and sends an activation,
while KV is sent over the same link in the same direction. naive: whole pieces of KV are queued with activations.
chunked: likewise, but pieces are split into chunks. coordinated: the links send as in production, bulk data in a lane
and with a schedule of its own, in chunks that fit into a stage. Speeds (MB/s) below "unlimited" are emulated on both
sides of the link. --devices: where activations and KV are stored: cuda:0,cuda:1, or cuda:0,cuda:0 with --transport tcp.

The three ways alternate in every round. Percentiles are medians over the rounds, so that other load during one round
does not matter. The clock is shared by all processes of the machine.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.transfers_report import GOALS, SpeedFigures, WayFigures, write_report
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Link
from services.worker.links.open import open_plane
from services.worker.links.plane import DataPlane
from services.worker.links.ports import LinkEnding, Message
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Opening, Refusal, TransferOutcome

RESULTS = Path(__file__).parent / "results"
STAMPED, BULK = 1, 2
ACTIVATION_BYTES = 16 * 1024
PIECE_BYTES = 8 * 1024 * 1024  # KV of one sequence, which naive sends at once
PIECES_AHEAD = 2
CHUNKS_AHEAD = 4
MICROBATCHES = 2  # maximum activations in flight, as in a pipeline of two stages
STAGE_JITTER = 0.2
MB = 1e6
WAIT_S = 60.0


class TransferEnd:
    """Receives bulk data and records the age of activations on arrival."""

    def __init__(self, device: str = "cpu") -> None:
        self.ages_s: list[float] = []
        self._device = device
        self._destination = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device=device)

    def device_of(self, topic: int) -> str:
        return self._device

    def on_message(self, link: Link, message: Message) -> None:
        if message.topic == STAMPED:
            self.ages_s.append(time.monotonic() - float(message.meta))

    def on_opening(self, link: Link, opening: Opening) -> Sequence[torch.Tensor] | Refusal:
        return [self._destination[: opening.total_bytes]]

    def on_transfer_end(self, link: Link, opening: Opening, outcome: TransferOutcome) -> None: ...

    def on_link_end(self, link: Link, ending: LinkEnding) -> None: ...


class TransferExchange:
    """Thread that keeps KV transfers in progress."""

    def __init__(self, send: Callable[[], tuple[Future[Any], int]], ahead: int) -> None:
        self._send = send
        self._ahead = ahead
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._moved_bytes = 0
        self.bytes_per_s = 0.0

    @contextmanager
    def running(self) -> Generator[None]:
        began_s = time.monotonic()
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(WAIT_S)
            self.bytes_per_s = self._moved_bytes / (time.monotonic() - began_s)

    def _run(self) -> None:
        waiting: deque[tuple[Future[Any], int]] = deque()
        while waiting or not self._stop.is_set():
            while len(waiting) < self._ahead and not self._stop.is_set():
                waiting.append(self._send())
            done, size = waiting.popleft()
            done.result(WAIT_S)
            self._moved_bytes += size


class TransferStage:
    """Emulates a stage: sleeps for the time of its execution and sends an activation, over and over."""

    def __init__(self, plane: DataPlane, link: Link, stage_s: float, seed: int, device: str = "cpu") -> None:
        self._plane = plane
        self._link = link
        self._stage_s = stage_s
        self._random = random.Random(seed)
        self._activation = torch.zeros(ACTIVATION_BYTES, dtype=torch.uint8, device=device)

    def run(self, seconds: float) -> int:
        """Run for some seconds. Returns the number of activations sent."""
        on_the_way: deque[Future[None]] = deque()
        pace, count = self._plane.pace, 0
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            if len(on_the_way) >= MICROBATCHES:
                on_the_way.popleft().result(WAIT_S)
            began_s = time.monotonic()
            pace.begins(began_s)
            time.sleep(self._stage_s * (1 + STAGE_JITTER * self._random.uniform(-1, 1)))
            now_s = time.monotonic()
            pace.ran(now_s - began_s)
            meta = repr(now_s).encode()
            on_the_way.append(
                self._link.send(TrafficClass.ACTIVATION, STAMPED, meta=meta, tensor=self._activation, timeout_s=WAIT_S)
            )
            count += 1
        for sent in on_the_way:
            sent.result(WAIT_S)
        return count


class TransferPeer:
    """The process that receives, controlled by lines of JSON."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.transfers", "--peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, **order: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def ask(self, **order: object) -> Any:
        assert self._process.stdout is not None
        self.tell(**order)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=WAIT_S)


def _plane(name: str, end: TransferEnd, config: TransportConfig, device: str, transport: str) -> DataPlane:
    return open_plane(name, end, config, "127.0.0.1", transport, device=torch.device(device))


def run_peer() -> None:
    torch.set_num_threads(1)
    plane, end = None, TransferEnd()
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "open":
                device, transport = order.pop("device"), order.pop("transport")
                end = TransferEnd(device)
                plane = _plane("w2", end, TransportConfig(**order), device, transport)
                print(json.dumps(plane.store_address), flush=True)
            case "connect":
                assert plane is not None
                plane.connect("w1", order["address"], order["epoch"])
            case "ages":
                give_up_at_s = time.monotonic() + WAIT_S
                while len(end.ages_s) < order["count"] and time.monotonic() < give_up_at_s:
                    time.sleep(0.002)
                print(json.dumps(end.ages_s), flush=True)
                end.ages_s = []
            case _:
                assert plane is not None
                plane.close()


@dataclass(frozen=True, slots=True)
class Round:
    ages_s: dict[str, list[float]]
    bytes_per_s: dict[str, float]
    in_flight_bytes: int  # limit on bulk data in flight in the way "coordinated"


def measure_round(link: Link, stage: TransferStage, peer: TransferPeer, seconds: float, device: str) -> Round:
    source = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device=device)
    in_flight_bytes = link.connection.facts().in_flight_bulk_bytes

    def message(size: int) -> tuple[Future[None], int]:
        return link.send(TrafficClass.ACTIVATION, BULK, tensor=source[:size], timeout_s=WAIT_S), size

    def transfer() -> tuple[Future[Any], int]:
        return link.transfer(TrafficClass.KV, [source]).done, PIECE_BYTES

    ways = {
        "idle": None,
        "naive": TransferExchange(lambda: message(PIECE_BYTES), PIECES_AHEAD),
        "chunked": TransferExchange(lambda: message(min(in_flight_bytes, PIECE_BYTES)), CHUNKS_AHEAD),
        "coordinated": TransferExchange(transfer, PIECES_AHEAD),
    }
    ages_s: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    for way, exchange in ways.items():
        if exchange is None:
            count = stage.run(seconds)
        else:
            with exchange.running():
                count = stage.run(seconds)
            rates[way] = exchange.bytes_per_s
        ages_s[way] = peer.ask(do="ages", count=count)
    alone = TransferExchange(transfer, PIECES_AHEAD)
    with alone.running():
        time.sleep(seconds)
    return Round(ages_s, {**rates, "alone": alone.bytes_per_s}, in_flight_bytes)


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summarise(speed: str, rounds: Sequence[Round]) -> SpeedFigures:
    def over_rounds(of: Callable[[Round], float]) -> float:
        return statistics.median(of(one) for one in rounds)

    alone = over_rounds(lambda r: r.bytes_per_s["alone"])
    in_flight_s = over_rounds(lambda r: r.in_flight_bytes) / alone
    ways = {
        way: WayFigures(
            p50_s=over_rounds(lambda r, w=way: percentile(r.ages_s[w], 0.5)),
            p99_s=over_rounds(lambda r, w=way: percentile(r.ages_s[w], 0.99)),
            bytes_per_s=over_rounds(lambda r, w=way: r.bytes_per_s.get(w, 0.0)),
            count=sum(len(r.ages_s[way]) for r in rounds),
        )
        for way in rounds[0].ages_s
    }
    return SpeedFigures(speed, alone, in_flight_s, ways)


def measure_speed(speed: str, options: argparse.Namespace, peer: TransferPeer) -> SpeedFigures:
    rate = None if speed == "unlimited" else float(speed) * MB
    device, _, there = options.devices.partition(",")
    plane = _plane("w1", TransferEnd(device), TransportConfig(rate_bytes_per_s=rate), device, options.transport)
    address = peer.ask(do="open", device=there, transport=options.transport, rate_bytes_per_s=rate)
    try:
        peer.tell(do="connect", epoch=1, address=plane.store_address)
        link = plane.connect("w2", address, 1)
        stage = TransferStage(plane, link, options.stage_ms / 1e3, 1, device)
        link.transfer(TrafficClass.KV, [torch.zeros(PIECE_BYTES, dtype=torch.uint8, device=device)]).done.result(WAIT_S)
        peer.ask(do="ages", count=stage.run(0.5))
        rounds = [measure_round(link, stage, peer, options.seconds, device) for _ in range(options.rounds)]
        return summarise(speed, rounds)
    finally:
        peer.tell(do="close")
        plane.close()


def lifecycle(peer: TransferPeer, rounds: int) -> str:
    """Median time to open a link and to close it, with both sides ready."""
    plane = open_plane("w1", TransferEnd(), TransportConfig(), "127.0.0.1")
    address = peer.ask(do="open", device="cpu", transport="auto")
    up_s: list[float] = []
    down_s: list[float] = []
    for epoch in range(2, 2 + rounds):
        peer.tell(do="connect", epoch=epoch, address=plane.store_address)
        time.sleep(0.02)
        began_s = time.monotonic()
        link = plane.connect("w2", address, epoch)
        up_s.append(time.monotonic() - began_s)
        began_s = time.monotonic()
        link.connection.close()
        down_s.append(time.monotonic() - began_s)
    peer.tell(do="close")
    plane.close()
    return f"link up {statistics.median(up_s) * 1e3:.1f} ms, closed {statistics.median(down_s) * 1e3:.1f} ms"


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of each way in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage-ms", type=float, default=10.0, help="time that a stage executes")
    parser.add_argument("--speeds", default="25,100,400,unlimited", help="link speeds in MB/s, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--devices", default="cpu,cpu", metavar="A,B", help="devices of the tensors on the two sides")
    parser.add_argument("--transport", default="auto", help="transport of the links, as for a worker")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = parser_of_options().parse_args()
    if options.peer:
        run_peer()
        return
    torch.set_num_threads(1)
    console = Console(width=140)
    peer = TransferPeer()
    figures = [measure_speed(speed, options, peer) for speed in options.speeds.split(",")]
    lives = lifecycle(peer, 9)
    peer.close()
    facts: dict[str, object] = {
        "stage_ms": options.stage_ms,
        "seconds": options.seconds,
        "rounds": options.rounds,
        "activation_bytes": ACTIVATION_BYTES,
        "load_average": os.getloadavg(),
        "links": lives,
        "goals": GOALS,
    }
    write_report(figures, facts, options.out, console)


if __name__ == "__main__":
    main()

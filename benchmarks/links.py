"""What bulk traffic between two workers costs the activations on the same link, for four ways to send it.

python -m benchmarks.links [--seconds 1] [--rounds 8] [--markdown OUT]

idle: no bulk. naive: bulk in large messages in the same queue. chunked: the same queue, chunks. coordinated: the
links as they are, with a lane and a schedule of their own for bulk.
"""

import argparse
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from services.worker.transport.config import TransportConfig
from services.worker.transport.link import Link, LinkEnding
from services.worker.transport.plane import DataPlane
from services.worker.transport.receiving import Message
from services.worker.transport.traffic import TrafficClass
from services.worker.transport.transfer import Opening, Outcome, Refusal

ECHO, BULK = 1, 2
ACTIVATION_BYTES = 4096
PAUSE_S = 0.003  # between two round trips: a short decode step
LARGE_BYTES = 32 * 1024 * 1024
WAIT_S = 30.0


class Echo:
    """Sends activations back and takes bulk in, on both ends."""

    def __init__(self) -> None:
        self.returned: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._destination = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
        self.is_peer = False

    def on_message(self, link: Link, message: Message) -> None:
        if message.topic == ECHO and self.is_peer:
            link.send(message.traffic, ECHO, tensor=message.tensor)
        elif message.topic == ECHO:
            self.returned.put(message)

    def on_opening(self, link: Link, opening: Opening) -> Sequence[torch.Tensor] | Refusal:
        return [self._destination[: opening.total_bytes]]

    def on_transfer_end(self, link: Link, opening: Opening, outcome: Outcome) -> None: ...

    def on_link_end(self, link: Link, ending: LinkEnding) -> None: ...


@dataclass(frozen=True, slots=True)
class Figures:
    way: str
    trips_s: list[float]
    bulk_bytes_per_s: float


class Bulk:
    """A thread that keeps two pieces of work in flight by some way of sending."""

    def __init__(self, send: Callable[[], tuple[Future[object], int]], in_flight: int) -> None:
        self._send = send
        self._in_flight = in_flight
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.moved_bytes = 0

    @contextmanager
    def running(self):
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(WAIT_S)

    def _run(self) -> None:
        waiting: deque[tuple[Future[object], int]] = deque()
        while not self._stop.is_set():
            while len(waiting) < self._in_flight:
                waiting.append(self._send())
            done, size = waiting.popleft()
            done.result(WAIT_S)
            self.moved_bytes += size
        for done, _ in waiting:
            done.result(WAIT_S)


def round_trips(link: Link, echo: Echo, seconds: float) -> list[float]:
    activation = torch.zeros(ACTIVATION_BYTES, dtype=torch.uint8)
    trips_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        began_s = time.perf_counter()
        link.send(TrafficClass.ACTIVATION, ECHO, tensor=activation, timeout_s=WAIT_S)
        echo.returned.get(timeout=WAIT_S)
        trips_s.append(time.perf_counter() - began_s)
        time.sleep(PAUSE_S)
    return trips_s


def measure(link: Link, echo: Echo, seconds: float, config: TransportConfig) -> list[Figures]:
    source = torch.zeros(LARGE_BYTES, dtype=torch.uint8)

    def message(size: int) -> tuple[Future[object], int]:
        sent: Future[object] = link.send(TrafficClass.ACTIVATION, BULK, tensor=source[:size], timeout_s=WAIT_S)  # pyright: ignore[reportAssignmentType] nobody sets a result
        return sent, size

    def transfer() -> tuple[Future[object], int]:
        done: Future[object] = link.transfer(TrafficClass.KV, [source]).done  # pyright: ignore[reportAssignmentType] nobody sets a result
        return done, LARGE_BYTES

    ways: list[tuple[str, Bulk | None]] = [
        ("idle", None),
        ("naive", Bulk(lambda: message(LARGE_BYTES), 2)),
        ("chunked", Bulk(lambda: message(config.chunk_bytes), config.window_chunks)),
        ("coordinated", Bulk(transfer, 2)),
    ]
    figures: list[Figures] = []
    for way, bulk in ways:
        if bulk is None:
            figures.append(Figures(way, round_trips(link, echo, seconds), 0.0))
            continue
        began_s = time.perf_counter()
        with bulk.running():
            trips_s = round_trips(link, echo, seconds)
        figures.append(Figures(way, trips_s, bulk.moved_bytes / (time.perf_counter() - began_s)))
    alone = Bulk(transfer, 2)
    began_s = time.perf_counter()
    with alone.running():
        time.sleep(seconds)
    figures.append(Figures("bulk alone", [], alone.moved_bytes / (time.perf_counter() - began_s)))
    return figures


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table_rows(rounds: list[list[Figures]]) -> list[tuple[str, ...]]:
    """Percentiles of the least disturbed round: what other processes do to a round only adds. Bulk: medians."""
    rows: list[tuple[str, ...]] = []
    alone = statistics.median(one[-1].bulk_bytes_per_s for one in rounds)
    for index, first in enumerate(rounds[0]):
        figures = [one[index] for one in rounds]
        trips = [
            f"{min(percentile(f.trips_s, share) for f in figures) * 1e6:,.0f}" if first.trips_s else "-"
            for share in (0.5, 0.9, 0.99)
        ]
        bulk = statistics.median(f.bulk_bytes_per_s for f in figures)
        share = f"{bulk / alone:.0%}" if bulk else "-"
        count = str(sum(len(f.trips_s) for f in figures))
        rows.append((first.way, *trips, f"{bulk / 1e9:.2f}" if bulk else "-", share, count))
    return rows


HEADINGS = ("bulk", "p50 us", "p90 us", "p99 us", "bulk GB/s", "of bulk alone", "trips")


def lifecycle(plane: DataPlane, peer: subprocess.Popen[str], address: str, rounds: int) -> tuple[float, float]:
    """Median seconds to make a link and to end it, both sides ready."""
    up_s: list[float] = []
    down_s: list[float] = []
    for epoch in range(2, 2 + rounds):
        order(peer, f"connect {epoch} {plane.store_address}")
        time.sleep(0.02)
        began_s = time.perf_counter()
        link = plane.connect("w2", address, epoch)
        up_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        link.close()
        down_s.append(time.perf_counter() - began_s)
    return statistics.median(up_s), statistics.median(down_s)


def order(peer: subprocess.Popen[str], line: str) -> None:
    assert peer.stdin is not None
    peer.stdin.write(line + "\n")
    peer.stdin.flush()


def config_of(options: argparse.Namespace) -> TransportConfig:
    return TransportConfig(
        chunk_bytes=options.chunk_kib * 1024,
        window_chunks=options.window,
        bulk_inline_bytes=options.bulk_inline_kib * 1024,
    )


def run_peer(config: TransportConfig) -> None:
    echo = Echo()
    echo.is_peer = True
    plane = DataPlane("w2", echo, config, "127.0.0.1")
    print(plane.store_address, flush=True)
    for line in sys.stdin:
        _, epoch, address = line.split()
        plane.connect("w1", address, int(epoch))
    plane.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="per way and round")
    parser.add_argument("--rounds", type=int, default=8)
    defaults = TransportConfig()
    parser.add_argument("--chunk-kib", type=int, default=defaults.chunk_bytes // 1024)
    parser.add_argument("--window", type=int, default=defaults.window_chunks, help="chunks in flight")
    parser.add_argument("--bulk-inline-kib", type=int, default=defaults.bulk_inline_bytes // 1024)
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.peer:
        run_peer(config_of(options))
        return
    command = [sys.executable, "-m", "benchmarks.links", "--peer", *sys.argv[1:]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        address = peer.stdout.readline().strip()
        config, echo = config_of(options), Echo()
        plane = DataPlane("w1", echo, config, "127.0.0.1")
        order(peer, f"connect 1 {plane.store_address}")
        link = plane.connect("w2", address, 1)
        round_trips(link, echo, 0.5)
        rounds = [measure(link, echo, options.seconds, config) for _ in range(options.rounds)]
        up_s, down_s = lifecycle(plane, peer, address, 9)
        plane.close()
        assert peer.stdin is not None
        peer.stdin.close()
        peer.wait(WAIT_S)
    report(table_rows(rounds), f"link up {up_s * 1e3:.1f} ms, closed {down_s * 1e3:.1f} ms", options.markdown)


def report(rows: list[tuple[str, ...]], lives: str, markdown: Path | None) -> None:
    table = Table(*HEADINGS, title=f"Round trip of {ACTIVATION_BYTES} bytes every {PAUSE_S * 1e3:.0f} ms; {lives}")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    if markdown is not None:
        lines = ["| " + " | ".join(row) + " |" for row in (HEADINGS, ("---",) * len(HEADINGS), *rows)]
        markdown.write_text("\n".join([*lines, "", f"Median: {lives}.", ""]), encoding="utf-8")


if __name__ == "__main__":
    main()

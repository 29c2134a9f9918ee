"""What our gateway adds to the first token, beside sglang-router, in one run.

`python -m benchmarks.gateway_peers --router VENV/bin/python [--markdown FILE]`; VENV has `pip install sglang-router`.
The router stands before two mock backends that speak HTTP and answer with 8 tokens, one each 2 ms, so what it adds is
the difference to asking those directly; our gateway stands before a dispatcher with two timed workers of the same pace,
asked over gRPC. Requests with and without what is measured alternate, at the same rate, over kept connections.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import uvloop

from benchmarks.gateway import alternate, measure_added_time, percentiles_ms
from tests.support.dispatchers import until
from tools.local.ports import free_ports
from tools.local.process import ChildProcess

_TOKENS, _STEP_S = 8, 0.002
_BODY = json.dumps({"model": "mock", "prompt": "a ship " * 64, "max_tokens": _TOKENS, "stream": True}).encode()
_REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: "
    + str(len(_BODY)).encode()
    + b"\r\n\r\n"
    + _BODY
)


@dataclass(frozen=True)
class Row:
    what: str
    quick_ack: bool
    without_ms: Sequence[float]  # p10, p50, p90, p99
    with_ms: Sequence[float]


async def serve_mock(port: int) -> None:
    """A backend whose engine is a timer."""
    chunk = b"data: " + json.dumps({"choices": [{"index": 0, "text": " ship"}]}).encode() + b"\n\n"
    last = b"data: [DONE]\n\n"
    told = json.dumps({"object": "list", "data": [{"id": "mock"}], "model_path": "mock", "status": "ok"}).encode()

    def part(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").lower().split("\r\n")
                length = sum(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
                await reader.readexactly(length)
                if not lines[0].startswith("post /v1/"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                    writer.write(b"content-length: %d\r\n\r\n%b" % (len(told), told))
                    continue
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                for _ in range(_TOKENS):
                    await asyncio.sleep(_STEP_S)
                    writer.write(part(chunk))
                writer.write(part(last) + b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


class Asker:
    """Streams one answer from one of the ports, over connections that are kept."""

    def __init__(self, ports: Sequence[int], *, quick_ack: bool) -> None:
        self._ports = cycle(ports)
        self._quick_ack = quick_ack
        self._idle: dict[int, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {port: [] for port in ports}

    async def first_s(self) -> float:
        port = next(self._ports)
        idle = self._idle[port]
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", port)
        begin_s, first_s, tail = time.perf_counter(), 0.0, b""
        writer.write(_REQUEST)
        while not tail.endswith(b"0\r\n\r\n"):
            if self._quick_ack:
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            data = await reader.read(1 << 16)
            assert data, "the connection was closed"
            if not first_s and b"data: {" in data:
                first_s = time.perf_counter() - begin_s
            tail = (tail + data)[-16:]
        idle.append((reader, writer))
        return first_s


async def measure_router(python: str, rate_per_s: float, seconds: float, folder: Path, *, quick_ack: bool) -> Row:
    mocks, [port, metrics] = free_ports(2), free_ports(2)
    async with AsyncExitStack() as ending:

        def start(name: str, command: Sequence[str]) -> ChildProcess:
            child = ChildProcess(name, list(command), log_path=folder / f"{name}-{os.getpid()}.log")
            ending.callback(child.kill)
            return child

        for mock in mocks:
            start(f"mock-{mock}", [sys.executable, "-m", "benchmarks.gateway_peers", "--mock", str(mock)])
        urls = [f"http://127.0.0.1:{mock}" for mock in mocks]
        command = [python, "-m", "sglang_router.launch_router", "--worker-urls", *urls, "--policy", "round_robin"]
        command += [
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
            "--prometheus-port",
            str(metrics),
            "--log-level",
            "warn",
        ]
        router = start("sglang-router", command)
        await until(lambda: _answers(port), "sglang-router", router.log)
        direct, through = Asker(mocks, quick_ack=quick_ack), Asker([port], quick_ack=quick_ack)
        without_s, with_s = await alternate(direct.first_s, through.first_s, rate_per_s, seconds)
        return Row("sglang-router", quick_ack, percentiles_ms(without_s), percentiles_ms(with_s))


def _answers(port: int) -> bool:
    body = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", _BODY, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(body, timeout=2) as answer:
            return b"[DONE]" in answer.read()
    except OSError:
        return False


async def measure_ours(rate_per_s: float, seconds: float, folder: Path, *, quick_ack: bool) -> Row:
    added = await measure_added_time(rate_per_s, seconds, folder, quick_ack=quick_ack)
    return Row("gateway", quick_ack, added.grpc_ms, added.http_ms)


def to_markdown(rows: Sequence[Row], command: str, rate_per_s: float) -> str:
    def times(values: Sequence[float]) -> str:
        return " / ".join(f"{value:.2f}" for value in values)

    lines = [
        "# Gateway beside sglang-router: added time to first token",
        "",
        f"Python {platform.python_version()}, {os.cpu_count()} cores shared by all processes; load average"
        f" {os.getloadavg()[0]:.1f}. {rate_per_s:g} requests/s each way. ms, p10 / p50 / p90 / p99. `{command}`",
        "",
        "| | client acknowledges at once | without it | through it | added p50 | added p99 |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        p50, p99 = (row.with_ms[i] - row.without_ms[i] for i in (1, 3))
        ack = "yes" if row.quick_ack else "no"
        lines.append(f"| {row.what} | {ack} | {times(row.without_ms)} | {times(row.with_ms)} | {p50:.2f} | {p99:.2f} |")
    return "\n".join(lines) + "\n"


async def measure(args: argparse.Namespace) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for quick_ack in (False, True) * args.repeat:
        rows.append(await measure_router(args.router, args.rate, args.seconds, args.folder, quick_ack=quick_ack))
        rows.append(await measure_ours(args.rate, args.seconds, args.folder, quick_ack=quick_ack))
    report = to_markdown(rows, f"python -m benchmarks.gateway_peers --rate {args.rate:g}", args.rate)
    print(report)
    if args.markdown:
        args.markdown.write_text(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--router", metavar="PYTHON", help="interpreter of an environment with sglang-router")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("out/gateway"), help="for logs")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--mock", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mock is None and args.router is None:
        parser.error(
            "--router is needed: python -m venv VENV, VENV/bin/pip install sglang-router, --router VENV/bin/python"
        )
    uvloop.run(serve_mock(args.mock) if args.mock is not None else measure(args))


if __name__ == "__main__":
    main()

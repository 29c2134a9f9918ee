"""What a gateway costs: the time it adds to the first token over gRPC, and tokens relayed per second by one process.

`python -m benchmarks.gateway [--markdown FILE]`. Engines are timers, everything else is real: state server, workers,
dispatcher, gateways, and clients in processes of their own. Requests over gRPC and over HTTP alternate in one run, at
each of the rates; where gRPC's own median is more than twice that of an idle cluster the machine is the limit, and what
the gateway adds is not to be had from that row: the report says so.
Beside each rate stands what the process's own CPU time comes to for a token, as the machine is shared by all of them.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import uvloop

from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb
from benchmarks.dispatcher_relay import Bench
from tests.support.dispatchers import until
from tools.local.process import ChildProcess

GATEWAY = "services.gateway"

_CLIENTS = 2
_PROMPT = list(range(8, 136))
_IDLE_RATE_PER_S, _IDLE_SECONDS = 10.0, 3.0
_SATURATED_RATIO = 2.0  # of gRPC's median under load to that of an idle cluster


@dataclass(frozen=True)
class Relayed:
    gateways: int
    streams: int
    tokens: int
    events: int
    elapsed_s: float
    gateway_cpu_s: float
    dispatcher_cpu_s: float


@dataclass(frozen=True)
class Added:
    quick_ack: bool
    rate_per_s: float
    idle_ms: Sequence[float]  # over gRPC, at an unhurried pace: p10, p50, p90, p99
    grpc_ms: Sequence[float]
    http_ms: Sequence[float]
    cpu_ms: float  # of the gateway, for each request of 8 tokens
    dispatcher_cpu_ms: float  # for each request of either kind
    load_cpu_ms: float  # of this process, which asks, likewise

    @property
    def is_saturated(self) -> bool:
        return self.grpc_ms[1] > _SATURATED_RATIO * self.idle_ms[1]


class GatewayBench:
    """A dispatcher between two timed workers and some gateways."""

    def __init__(self, gateways: int, step_s: float, folder: Path) -> None:
        self.inner = Bench(step_s=step_s)
        self._count = gateways
        self._folder = folder
        self._children: list[ChildProcess] = []
        self.addresses: list[str] = []

    async def __aenter__(self) -> "GatewayBench":
        await self.inner.__aenter__()
        for index in range(self._count):
            name = f"gateway-{index}"
            command = [sys.executable, "-m", GATEWAY, "--port", "0", "--gateway-id", name]
            command += ["--dispatchers", self.inner.dispatcher.address, "--log-level", "warning"]
            child = ChildProcess(name, command, log_path=self._folder / f"{name}-{os.getpid()}.log")
            self._children.append(child)
            line = await until(lambda child=child: child.find_line("ready "), "a gateway", child.log)
            self.addresses.append(line.split("address=")[1].strip())
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
        await self.inner.__aexit__()

    def cpu_s(self) -> float:
        """Processor seconds of all gateways."""
        total = 0.0
        for child in self._children:
            tree = psutil.Process(child.pid)
            for process in [tree, *tree.children()]:
                times = process.cpu_times()
                total += times.user + times.system
        return total


def request_bytes(tokens: int) -> bytes:
    body = json.dumps(
        {"prompt": _PROMPT, "max_tokens": tokens, "seed": 1, "stream": True, "ignore_eos": True}, separators=(",", ":")
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def run_client(address: str, streams: int, tokens: int) -> None:
    """Events are counted, not parsed: the client's cost is not the question."""
    host, port = address.rsplit(":", 1)
    counts = {"events": 0}

    async def one() -> None:
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        writer.write(request_bytes(tokens))
        tail = b""
        while not tail.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
            data = await reader.read(1 << 18)
            assert data, "the gateway closed the connection"
            counts["events"] += data.count(b"data: {")
            tail = (tail + data)[-40:]
        writer.close()

    begin_s = time.monotonic()
    await asyncio.gather(*(one() for _ in range(streams)))
    print(json.dumps({**counts, "begin_s": begin_s, "end_s": time.monotonic()}))


async def measure_throughput(gateways: int, streams: int, tokens: int, step_s: float, folder: Path) -> Relayed:
    async with GatewayBench(gateways, step_s, folder) as bench:
        gateway_cpu_s, dispatcher_cpu_s = bench.cpu_s(), bench.inner.cpu_s()
        clients = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.gateway", "--client", bench.addresses[index % gateways]),
                *("--streams", str(streams // _CLIENTS), "--tokens", str(tokens)),
                stdout=subprocess.PIPE,
            )
            for index in range(_CLIENTS)
        ]
        answers = [json.loads((await client.communicate())[0]) for client in clients]
        return Relayed(
            gateways,
            streams,
            streams * tokens,
            sum(answer["events"] for answer in answers),
            max(answer["end_s"] for answer in answers) - min(answer["begin_s"] for answer in answers),
            bench.cpu_s() - gateway_cpu_s,
            bench.inner.cpu_s() - dispatcher_cpu_s,
        )


async def measure_added_time(rate_per_s: float, duration_s: float, folder: Path, *, quick_ack: bool) -> Added:
    """Requests over gRPC and over HTTP, alternating, at an even pace, each over connections that are there already."""
    async with GatewayBench(1, 0.002, folder) as bench:
        stub = bench.inner.dispatcher.stub
        idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        host, port = bench.addresses[0].rsplit(":", 1)

        async def grpc_first_s() -> float:
            sampling = cluster_pb2.SamplingParams(max_tokens=8, seed=1)
            begin_s, first_s = time.perf_counter(), 0.0
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=_PROMPT), sampling=sampling)
            async for response in stub.Generate(request):
                # The first text, which is what makes the first event: timed workers hold that of a token for a step.
                if response.text and not first_s:
                    first_s = time.perf_counter() - begin_s
            return first_s

        async def http_first_s() -> float:
            reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port))
            begin_s, first_s, tail = time.perf_counter(), 0.0, b""
            writer.write(request_bytes(8))
            while not tail.endswith(b"0\r\n\r\n"):
                if quick_ack:
                    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                data = await reader.read(1 << 16)
                assert data, "the gateway closed the connection"
                if not first_s and b"data: {" in data:
                    first_s = time.perf_counter() - begin_s
                tail = (tail + data)[-16:]
            idle.append((reader, writer))
            return first_s

        unhurried = await alternate(grpc_first_s, grpc_first_s, _IDLE_RATE_PER_S / 2, _IDLE_SECONDS)
        before_s = bench.cpu_s(), bench.inner.cpu_s(), time.process_time()
        grpc_s, http_s = await alternate(grpc_first_s, http_first_s, rate_per_s, duration_s)
        after_s = bench.cpu_s(), bench.inner.cpu_s(), time.process_time()
        spent_ms = [
            (after - before) / int(rate_per_s * duration_s) * 1e3
            for before, after in zip(before_s, after_s, strict=True)
        ]
        for _, writer in idle:
            writer.close()
        return Added(
            quick_ack,
            rate_per_s,
            percentiles_ms([*unhurried[0], *unhurried[1]]),
            percentiles_ms(grpc_s),
            percentiles_ms(http_s),
            spent_ms[0],
            spent_ms[1] / 2,
            spent_ms[2] / 2,
        )


async def alternate(
    one: Callable[[], Awaitable[float]], other: Callable[[], Awaitable[float]], rate_per_s: float, duration_s: float
) -> tuple[list[float], list[float]]:
    """So many of each per second."""
    results: tuple[list[float], list[float]] = ([], [])

    async def run(index: int) -> None:
        results[index % 2].append(await (other if index % 2 else one)())

    for index in range(20):  # connections, caches
        await run(index)
    for result in results:
        result.clear()
    begin_s, tasks = time.perf_counter(), list[asyncio.Task[None]]()
    for index in range(int(rate_per_s * duration_s) * 2):
        wait_s = begin_s + index / rate_per_s / 2 - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(run(index)))
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)
    return results


def percentiles_ms(times_s: Sequence[float]) -> list[float]:
    return [float(p) * 1e3 for p in np.percentile(times_s, [10, 50, 90, 99])]


def to_markdown(throughput: Sequence[Relayed], added: Sequence[Added]) -> str:
    lines = [
        "# Gateway: relay throughput and added time to first token",
        "",
        f"Python {platform.python_version()}, {os.cpu_count()} cores shared by state server, timed workers,",
        f"dispatcher, gateways and {_CLIENTS} clients; load average {os.getloadavg()[0]:.1f}.",
        "Command: `python -m benchmarks.gateway`.",
        "",
        "| gateways | streams | tokens | events | tokens/s | gateway CPU us per token | dispatcher CPU us per token"
        " | gateway's tokens per CPU second, of the dispatcher's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in throughput:
        ratio = r.dispatcher_cpu_s / r.gateway_cpu_s
        lines.append(
            f"| {r.gateways} | {r.streams} | {r.tokens} | {r.events} | {r.tokens / r.elapsed_s:,.0f}"
            f" | {r.gateway_cpu_s / r.tokens * 1e6:.1f} | {r.dispatcher_cpu_s / r.tokens * 1e6:.1f} | {ratio:.0%} |"
        )
    lines += [
        "",
        "Time to the first text in ms, p10 / p50 / p90 / p99, of requests of 128 prompt tokens, so many a second each",
        f"way. gRPC counts as saturated where its p50 is more than {_SATURATED_RATIO:g} times that of an idle cluster.",
        "CPU in ms for each request, of the gateway / the dispatcher / the process that asks.",
        "",
        "| requests/s each way | client acknowledges at once | gRPC, idle | gRPC | gRPC saturated | through the gateway"
        " | added p10 / p50 / p99 | CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for a in added:
        grpc_ms, http_ms = a.grpc_ms, a.http_ms
        added_ms = [http_ms[i] - grpc_ms[i] for i in (0, 1, 3)]
        quick_ack, saturated = ("yes" if told else "no" for told in (a.quick_ack, a.is_saturated))
        cpu = _row([a.cpu_ms, a.dispatcher_cpu_ms, a.load_cpu_ms])
        lines.append(
            f"| {a.rate_per_s:g} | {quick_ack} | {_row(a.idle_ms)} | {_row(grpc_ms)} | {saturated} | {_row(http_ms)}"
            f" | {_row(added_ms)} | {cpu} |"
        )
    return "\n".join(lines) + "\n"


def _row(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


async def _measure(args: argparse.Namespace) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    throughput = [
        await measure_throughput(gateways, args.streams, args.tokens, args.step_s, args.folder)
        for gateways in args.gateways
    ]
    added = [
        await measure_added_time(rate, args.seconds, args.folder, quick_ack=quick_ack)
        for rate in args.rate
        for quick_ack in (False, True) * args.repeat
    ]
    report = to_markdown(throughput, added)
    print(report)
    if args.markdown:
        args.markdown.write_text(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=600, help="of each stream")
    parser.add_argument("--step-s", type=float, default=0.008, help="a worker's step")
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2], metavar="N", help="processes, one run each")
    parser.add_argument("--rate", type=float, nargs="+", default=[200.0], metavar="R", help="requests/s each way")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("out/gateway"), help="for logs")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--client", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    uvloop.run(run_client(args.client, args.streams, args.tokens) if args.client else _measure(args))


if __name__ == "__main__":
    main()

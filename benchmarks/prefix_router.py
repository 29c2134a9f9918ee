"""Ballast's placement by prefix compared with sglang-router's, in real time, on the same sessions and memory.

    python -m benchmarks.prefix_router [--workers 4] [--span-s 60] [--router-python VENV/bin/python] [--write]

VENV: an environment with `sglang-router` of PyPI; without it Ballast runs alone. Sessions are those of
`benchmarks.prefix_beside`. sglang-router (`cache_aware`, its defaults) forwards to mock backends: HTTP servers around
the core of Ballast's worker with its prefix cache, whose steps take as long as those of Llama-2-7B on an A100-40G.
Ballast runs its real services, with emulated workers of that GPU that have the same number of KV blocks. TTFT is
measured by the client.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ballast.client import AsyncClient, SamplingParams
from ballast.common.cost import CostModel
from benchmarks.offline import CLUSTER, MODEL, quantile
from benchmarks.prefix_beside import (
    BLOCK_TOKENS,
    LONGEST,
    PAGE,
    PLACES,
    STEP_TOKENS,
    VOCABULARY,
    PrefixRequest,
    PrefixSession,
    ServedByBallast,
    sessions_of,
)
from benchmarks.quoting import code_commit, quote
from sim.jobs.machines import catalogue_machine, stand_in
from tools.local.cluster import LocalCluster, Service

# Sends (prompt, answer); of the answer only the length is used. Returns (answer, arrival of its first token).
Ask = Callable[[tuple[int, ...], tuple[int, ...]], Awaitable[tuple[tuple[int, ...], float]]]


@dataclass
class RoutedFigures:
    ttfts_s: list[float] = field(default_factory=list[float])
    hit_fraction: float = 0.0
    requests_each: list[int] = field(default_factory=list[int])
    took_s: float = 0.0


class MockBackend:
    """HTTP server with SGLang's `/generate`, executed by a worker's core."""

    def __init__(self, block_count: int, cost: CostModel) -> None:
        self._served, self._cost = ServedByBallast(block_count, caching=True), cost
        self._waiting: dict[int, tuple[PrefixRequest, asyncio.Event, asyncio.Event]] = {}
        self._news = asyncio.Event()
        self.request_count = 0

    @property
    def counts(self) -> tuple[int, int]:
        """(prompt tokens found in the cache, all prompt tokens) of started requests."""
        return self._served.counts

    async def run(self) -> None:
        while True:
            if not (chunks := self._served.form(time.monotonic())):
                self._news.clear()
                await self._news.wait()
                continue
            await asyncio.sleep(self._cost.batch_cost_s(chunks))
            for request in self._served.done(time.monotonic()):
                request.token_count += 1
                _, begun, ended = self._waiting[request.number]
                begun.set()
                if request.token_count == len(request.answer):
                    ended.set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await _head(reader):
                body = await reader.readexactly(_length(head))
                if b" /generate" in head.split(b"\r\n", 1)[0]:
                    await self._generate(json.loads(body), writer)
                else:
                    writer.write(_plain(b"{}"))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _generate(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.request_count += 1
        prompt = tuple(int(word) for word in asked["text"].split())
        answer = (0,) * asked["sampling_params"]["max_new_tokens"]
        request = PrefixRequest(self.request_count, prompt, answer)
        begun, ended = asyncio.Event(), asyncio.Event()
        self._waiting[request.number] = request, begun, ended
        self._served.submit(request, time.monotonic())
        self._news.set()
        await begun.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(_chunk(b"data: {}\n\n"))
        await ended.wait()
        writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def _head(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


def _length(head: bytes) -> int:
    lines = head.lower().split(b"\r\n")
    return next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)


async def play(ask: Ask, sessions: Sequence[PrefixSession]) -> RoutedFigures:
    """Play all sessions at once; the turns of each one after the other."""
    found, begin_s = RoutedFigures(), time.monotonic()

    async def one(session: PrefixSession) -> None:
        before: tuple[int, ...] = ()
        await asyncio.sleep(max(0.0, begin_s + session.begin_s - time.monotonic()))
        for new, answer in session.turns:
            prompt, asked_s = (*before, *new), time.monotonic()
            said, first_s = await ask(prompt, answer)
            found.ttfts_s.append(first_s - asked_s)
            before = (*prompt, *said)
            await asyncio.sleep(session.think_s)

    async with asyncio.TaskGroup() as tasks:
        for session in sessions:
            tasks.create_task(one(session))
    found.took_s = time.monotonic() - begin_s
    return found


async def by_sglang(
    sessions: Sequence[PrefixSession], workers: int, block_count: int, cost: CostModel, python: Path
) -> RoutedFigures:
    backends = [MockBackend(block_count, cost) for _ in range(workers)]
    servers = [await asyncio.start_server(one.answer, "127.0.0.1", 0, limit=1 << 20) for one in backends]
    urls = [f"http://127.0.0.1:{one.sockets[0].getsockname()[1]}" for one in servers]
    port, metrics_port = _free_port(), _free_port()
    words = ["--worker-urls", *urls, "--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-port", str(metrics_port), "--log-level", "error"]
    router = await asyncio.create_subprocess_exec(str(python), "-m", "sglang_router.launch_router", *words, env=_bare())
    running = [asyncio.create_task(one.run()) for one in backends]

    async def ask(prompt: tuple[int, ...], answer: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        sampling = {"max_new_tokens": len(answer), "temperature": 0.0}
        body = json.dumps({"text": " ".join(map(str, prompt)), "stream": True, "sampling_params": sampling}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status:
            raise RuntimeError(f"sglang-router answers {status[:200]!r}")
        await reader.readuntil(b"{}")
        first_s = time.monotonic()
        await reader.read()
        writer.close()
        return (0,) * len(answer), first_s

    try:
        await _up(port, workers, backends)
        for one in backends:
            one.request_count = 0
        found = await play(ask, sessions)
        counts = [one.counts for one in backends]
        found.hit_fraction = sum(hit for hit, _ in counts) / max(1, sum(asked for _, asked in counts))
        found.requests_each = [one.request_count for one in backends]
        return found
    finally:
        router.terminate()
        await router.wait()
        for task in running:
            task.cancel()
        for server in servers:
            server.close()


async def _up(port: int, workers: int, backends: Sequence[MockBackend]) -> None:
    """Wait until the router knows all workers."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /workers HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                said = await reader.read()
                writer.close()
                if said.count(b"http://127.0.0.1") >= workers:
                    return
            except ConnectionError:
                pass
            await asyncio.sleep(0.5)


def _bare() -> dict[str, str]:
    """This process's environment without PYTHONPATH, so that the router's process cannot import our packages."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _version(python: Path) -> str:
    words = [str(python), "-c", "from importlib.metadata import version; print(version('sglang-router'))"]
    return subprocess.run(words, env=_bare(), check=True, capture_output=True, text=True).stdout.strip()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def by_ballast(sessions: Sequence[PrefixSession], workers: int, folder: Path) -> tuple[RoutedFigures, int]:
    """Play the sessions on a cluster. Returns (figures, KV blocks per worker)."""
    machine = catalogue_machine(CLUSTER.removeprefix("1x"), MODEL, VOCABULARY)
    longer = machine.model.model_copy(update={"max_model_len": LONGEST})  # sessions grow beyond Llama-2's 4,096
    made = stand_in(folder / "stand-in", machine.model_copy(update={"model": longer}))
    bounds = ["--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", str(PLACES)]
    bounds += ["--block-size", str(BLOCK_TOKENS), "--swap-space-bytes", "0"]
    flags: dict[Service, list[str]] = {"worker": [*made.worker_flags, *bounds]}
    flags["planner"] = ["--overload-policy", "recompute"]
    async with (
        LocalCluster(made.model, workers=workers, flags=flags) as cluster,
        AsyncClient(cluster.address) as client,
    ):

        async def ask(prompt: tuple[int, ...], answer: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
            said, first_s = list[int](), 0.0
            sampling = SamplingParams(max_tokens=len(answer), temperature=0.0, ignore_eos=True)
            async for chunk in client.stream(token_ids=list(prompt), sampling=sampling, include_text=False):
                first_s = first_s or (time.monotonic() if chunk.token_ids else 0.0)
                said += chunk.token_ids
            return tuple(said), first_s

        found = await play(ask, sessions)
        await asyncio.sleep(2.0)
        loads = [group.load for group in (await client.status()).groups if group.load is not None]
        asked = sum(load.prefix_queries_total for load in loads)
        found.hit_fraction = sum(load.prefix_hits_total for load in loads) / max(1, asked)
        return found, loads[0].block_count


def row(name: str, found: RoutedFigures) -> str:
    p50, p99 = (quantile(found.ttfts_s, fraction) * 1e3 for fraction in (0.5, 0.99))
    each = ", ".join(map(str, found.requests_each)) or "-"
    hits = f"{len(found.ttfts_s)} | {found.hit_fraction:.1%}"
    return f"| {name} | {hits} | {p50:,.0f} | {p99:,.0f} | {each} | {found.took_s:.0f} |"


async def compare(args: argparse.Namespace, folder: Path) -> str:
    machine = catalogue_machine(CLUSTER.removeprefix("1x"), MODEL, VOCABULARY)
    cost = machine.execution.cost_of(machine.model.layer_count, is_first=True, is_last=True)
    sessions = sessions_of(args.span_s, (40, 300), args.seed)
    ours, block_count = await by_ballast(sessions, args.workers, folder)
    rows = [
        "| | requests | hits | P50 TTFT ms | P99 | requests of each | took s |",
        f"|{'---|' * 7}",
        row("Ballast", ours),
    ]
    print(rows[-1], flush=True)
    if args.router_python is not None:
        theirs = await by_sglang(sessions, args.workers, block_count, cost, args.router_python)
        rows.append(row(f"sglang-router {_version(args.router_python)}", theirs))
        print(rows[-1], flush=True)
    return f"{args.workers} workers of {block_count:,} blocks:\n\n" + "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--span-s", type=float, default=60.0, help="in which sessions begin (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--router-python", type=Path, help="interpreter of an environment with sglang-router")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = os.getloadavg()[0]
        page = asyncio.run(compare(args, Path(folder)))
    if args.write:
        words = ["VENV/bin/python" if word == str(args.router_python) else word for word in sys.argv[1:]]
        command = f"python -m benchmarks.prefix_router {' '.join(words)}"
        load = f"load average {before:.1f} at its begin, {os.getloadavg()[0]:.1f} at its end"
        quote(PAGE, "prefix-router", f"`{command}`, commit {code_commit()}, {load}. {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Cost of relaying: the time that dispatcher and gateway add to a first token, and tokens relayed per second.

    python -m benchmarks.relay [--gateways 0 1 2] [--rate 100 200] [--markdown FILE] [--json FILE]
    python -m benchmarks.relay --beside REF [--rate 40] [--seconds 30] [--markdown FILE]

The workers' engines are timers; the rest is real: state server, workers, one dispatcher, gateways, and clients in
separate processes. With 0 gateways clients speak gRPC to the dispatcher. Requests directly to a worker, over gRPC and
over HTTP alternate in one run, at each of the rates; a row is marked as saturated if gRPC's median is more than twice
that of an idle cluster. Because all processes share the machine, their processor time per token is reported as well.
With --beside, every other call of each kind goes to a gateway of an older commit in the same cluster.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import grpc.aio
import numpy as np
import psutil
import uvloop

from ballast.rpc.channel import open_channel
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc
from benchmarks.upgrade import tree_of
from tests.support.dispatchers import Dispatcher, until, until_async
from tests.support.timed_worker import LAYER_COUNT, publish_layout
from tools.local.process import ChildProcess
from tools.local.state_server import PrivateStateServer
from tools.model.tokenizer import write_tokenizer

_ROOT = Path(__file__).resolve().parents[1]
_WORKERS, _CLIENTS = 2, 2
_PROMPT = list(range(8, 136))
_ANSWER_TOKENS = 8  # answer tokens of requests whose TTFT is measured
_IDLE_RATE_PER_S, _IDLE_SECONDS = 10.0, 3.0
_SATURATED_RATIO = 2.0  # gRPC's median under load over that of an idle cluster; if higher, the machine is the limit
_ROUTES = ("worker", "dispatcher", "gateway")


@dataclass(frozen=True)
class Relayed:
    gateways: int  # 0: clients speak gRPC to the dispatcher
    streams: int
    tokens: int
    messages: int  # messages to clients
    elapsed_s: float
    dispatcher_cpu_s: float
    gateway_cpu_s: float


@dataclass(frozen=True)
class Added:
    """Times to the first text. `idle_p50_ms`: over gRPC, at a low rate."""

    rate_per_s: float  # requests per second on each route
    idle_p50_ms: float
    route_ms: Mapping[str, Sequence[float]]  # _ROUTES -> p50, p90, p99
    dispatcher_cpu_ms: float  # processor time per request
    gateway_cpu_ms: float

    @property
    def is_saturated(self) -> bool:
        return self.route_ms["dispatcher"][0] > _SATURATED_RATIO * self.idle_p50_ms


@dataclass(frozen=True)
class Beside:
    """Calls of one kind that alternate between the current gateway and an older one."""

    kind: str
    p50_ms: tuple[float, float]  # durations of whole calls: the current gateway's, the older one's
    p99_ms: tuple[float, float]
    cpu_ms: tuple[float, float]  # processor time per call


class Bench:
    """Context manager with two timed workers, a dispatcher and gateways."""

    def __init__(self, *, gateways: int, step_s: float, older: Path | None = None) -> None:
        """`older`: folder with the files of another commit, from which an additional gateway runs."""
        self._trees = [_ROOT] * gateways + ([older] if older else [])
        self._step_s = step_s
        self._stack = AsyncExitStack()
        self._gateways: list[ChildProcess] = []
        self.worker_addresses: list[str] = []
        self.gateway_addresses: list[str] = []

    async def __aenter__(self) -> "Bench":
        stack = self._stack
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ballast-relay-")))
        write_tokenizer(folder, 512, qwen=False, max_len=2048)
        state = stack.enter_context(PrivateStateServer())
        for index in range(_WORKERS):
            flags = ["--worker-id", f"w{index}", "--step-s", str(self._step_s)]
            flags += ["--max-running", "1024", "--block-count", "100000"]
            _, address = await self._child(folder, f"w{index}", "tests.support.timed_worker", *flags)
            self.worker_addresses.append(address)
        members = [
            cluster_pb2.Member(worker_id=f"w{i}", incarnation=1, address=address, last_layer=LAYER_COUNT)
            for i, address in enumerate(self.worker_addresses)
        ]
        self.dispatcher = Dispatcher(folder, folder, state.url, "d0", ["--log-level", "warning"])
        stack.push_async_callback(self.dispatcher.stop)
        await self.dispatcher.start()
        publish_layout(state.url, 1, members)

        async def connected() -> bool:
            return sum(w.connected for w in (await self.dispatcher.status()).workers) == _WORKERS

        await until_async(connected, "the workers to be connected")
        for index, tree in enumerate(self._trees):
            flags = ["--port", "0", "--gateway-id", f"g{index}", "--dispatchers", self.dispatcher.address]
            child, address = await self._child(folder, f"g{index}", "services.gateway", *flags, tree=tree)
            self._gateways.append(child)
            self.gateway_addresses.append(address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _child(
        self, folder: Path, name: str, module: str, *flags: str, tree: Path = _ROOT
    ) -> tuple[ChildProcess, str]:
        environ = {**os.environ, "PYTHONPATH": str(tree)}
        command = [sys.executable, "-m", module, *flags]
        child = ChildProcess(name, command, log_path=folder / f"{name}.log", environ=environ, cwd=tree)
        self._stack.callback(child.kill)
        line = await until(lambda: child.find_line("ready "), name, child.log)
        return child, line.split("address=")[1].strip()

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds of the dispatcher, and of all gateways."""
        return _cpu_s([self.dispatcher.process.pid]), sum(self.gateways_cpu_s())

    def gateways_cpu_s(self) -> list[float]:
        """Processor seconds of each gateway."""
        return [_cpu_s([child.pid]) for child in self._gateways]


def _cpu_s(pids: Sequence[int]) -> float:
    """Processor seconds of these processes and their children."""
    trees = [psutil.Process(pid) for pid in pids]
    times = [process.cpu_times() for tree in trees for process in [tree, *tree.children()]]
    return sum(one.user + one.system for one in times)


# ---------------------------------------------------------------- throughput


async def measure_throughput(gateways: int, streams: int, tokens: int, step_s: float) -> Relayed:
    async with Bench(gateways=gateways, step_s=step_s) as bench:
        addresses = bench.gateway_addresses or [bench.dispatcher.address]
        before_s = bench.cpu_s()
        clients = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.relay", "--client", addresses[index % len(addresses)]),
                *("--streams", str(streams // _CLIENTS), "--tokens", str(tokens), "--gateways", str(gateways)),
                stdout=subprocess.PIPE,
            )
            for index in range(_CLIENTS)
        ]
        answers = [json.loads((await client.communicate())[0]) for client in clients]
        dispatcher_s, gateway_s = (after - before for before, after in zip(before_s, bench.cpu_s(), strict=True))
        elapsed_s = max(a["end_s"] for a in answers) - min(a["begin_s"] for a in answers)
        messages = sum(a["messages"] for a in answers)
        return Relayed(gateways, streams, streams * tokens, messages, elapsed_s, dispatcher_s, gateway_s)


async def run_client(address: str, streams: int, tokens: int, *, http: bool) -> None:
    """Run the streams of one client process and print counts and times as JSON. Messages are counted, not parsed, to
    keep the client cheap.
    """
    begin_s = time.monotonic()
    if http:
        counts = await asyncio.gather(*(_http_stream(address, tokens) for _ in range(streams)))
    else:
        async with open_channel(address) as channel:
            await channel.channel_ready()
            begin_s = time.monotonic()
            counts = await asyncio.gather(*(_grpc_stream(channel, index, tokens) for index in range(streams)))
    print(json.dumps({"messages": sum(counts), "begin_s": begin_s, "end_s": time.monotonic()}))


async def _grpc_stream(channel: grpc.aio.Channel, index: int, tokens: int) -> int:
    generate = channel.unary_stream(
        "/ballastpb.inference.v1.InferenceService/Generate", request_serializer=pb.GenerateRequest.SerializeToString
    )
    sampling = cluster_pb2.SamplingParams(max_tokens=tokens, seed=1)
    count, last = 0, b""
    async for last in generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, index]), sampling=sampling)):  # noqa: B007 - the last one is looked at afterwards
        count += 1
    assert pb.GenerateResponse.FromString(last).usage.completion_token_count == tokens
    return count


async def _http_stream(address: str, tokens: int) -> int:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    writer.write(_http_request(tokens))
    count, tail = 0, b""
    while not tail.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
        data = await reader.read(1 << 18)
        assert data, "the gateway closed the connection"
        count += data.count(b"data: {")
        tail = (tail + data)[-40:]
    writer.close()
    return count


def _http_request(tokens: int, path: str = "completions", **fields: object) -> bytes:
    body = {"max_tokens": tokens, "seed": 1, "ignore_eos": True, **(fields or {"prompt": _PROMPT, "stream": True})}
    data = json.dumps(body, separators=(",", ":")).encode()
    return f"POST /v1/{path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


# ---------------------------------------------------------------- time to the first text


async def measure_added_time(rate_per_s: float, duration_s: float) -> Added:
    """Measure times to the first text. Requests alternate between the routes at an even pace, on open connections."""
    async with Bench(gateways=1, step_s=0.002) as bench, open_channel(bench.worker_addresses[0]) as channel:
        direct, over_http = DirectClient(), RelayClient(bench.gateway_addresses[0])
        reader = asyncio.create_task(direct.run(worker_pb2_grpc.WorkerServiceStub(channel)))
        await direct.welcomed.wait()

        async def over_grpc() -> float:
            begin_s, first_s = time.perf_counter(), 0.0
            async for response in bench.dispatcher.stub.Generate(_short_request(), timeout=60):
                if response.text and not first_s:  # timed workers hold the text of a token back for a step
                    first_s = time.perf_counter() - begin_s
            return first_s

        [unhurried] = await in_turn([over_grpc], _IDLE_RATE_PER_S, _IDLE_SECONDS)
        before_s = bench.cpu_s()
        times_s = await in_turn([direct.first_s, over_grpc, over_http.first_s], rate_per_s, duration_s)
        count = int(rate_per_s * duration_s)
        dispatcher_s, gateway_s = (after - before for before, after in zip(before_s, bench.cpu_s(), strict=True))
        over_http.close()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        return Added(
            rate_per_s,
            _percentiles_ms(unhurried)[0],
            dict(zip(_ROUTES, map(_percentiles_ms, times_s), strict=True)),
            1e3 * dispatcher_s / count / 2,
            1e3 * gateway_s / count,
        )


async def in_turn(
    routes: Sequence[Callable[[], Awaitable[float]]], rate_per_s: float, duration_s: float
) -> list[list[float]]:
    """Call each route `rate_per_s` times per second, after 20 warm-up calls. Returns the times of each route."""
    results: list[list[float]] = [[] for _ in routes]

    async def run(index: int) -> None:
        number = index % len(routes)
        results[number].append(await routes[number]())

    for index in range(20):  # connections, caches
        await run(index)
    for result in results:
        result.clear()
    begin_s, tasks = time.perf_counter(), list[asyncio.Task[None]]()
    for index in range(int(rate_per_s * duration_s) * len(routes)):
        wait_s = begin_s + index / rate_per_s / len(routes) - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(run(index)))
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)
    return results


class RelayClient:
    """HTTP client of a gateway that reuses its connections."""

    def __init__(self, address: str) -> None:
        self._address = address.rsplit(":", 1)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def first_s(self) -> float:
        """Send a completion request. Returns the seconds until the first text."""
        return (await self._call(_http_request(_ANSWER_TOKENS)))[0]

    async def whole_s(self, request: bytes) -> float:
        return (await self._call(request))[1]

    async def _call(self, request: bytes) -> tuple[float, float]:
        host, port = self._address
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(host, int(port))
        begin_s, first_s = time.perf_counter(), 0.0
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        if found := re.search(rb"content-length: (\d+)", head):
            await reader.readexactly(int(found[1]))
        tail = b"" if found is None else b"0\r\n\r\n"
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            assert data, "the gateway closed the connection"
            if not first_s and b"data: {" in data:
                first_s = time.perf_counter() - begin_s
            tail = (tail + data)[-16:]
        self._idle.append((reader, writer))
        return first_s, time.perf_counter() - begin_s

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


class DirectClient:
    """Client of a worker that speaks the dispatcher's protocol and measures TTFT."""

    def __init__(self) -> None:
        self.welcomed = asyncio.Event()
        self._outgoing: asyncio.Queue[worker_pb2.AttachRequest] = asyncio.Queue()
        self._waiting: dict[int, tuple[float, asyncio.Future[float]]] = {}  # handle -> (time of submission, its TTFT)
        self._next_handle = 1

    async def first_s(self) -> float:
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting[handle] = (time.perf_counter(), answer)
        request = _short_request()
        submit = worker_pb2.Submit(
            handle=handle, attempt=1, prompt_token_ids=request.token_ids.ids, sampling=request.sampling
        )
        self._outgoing.put_nowait(worker_pb2.AttachRequest(submit=submit))
        return await answer

    async def run(self, stub: "worker_pb2_grpc.WorkerServiceAsyncStub") -> None:
        call = stub.Attach()
        hello = worker_pb2.Hello(dispatcher_id="bench", worker_id="w0", worker_incarnation=1)
        await call.write(worker_pb2.AttachRequest(hello=hello))
        writer = asyncio.create_task(self._write(call))
        try:
            while isinstance(message := await call.read(), worker_pb2.AttachResponse):
                self.welcomed.set()
                for handle in message.step.handles:
                    begun_s, answer = self._waiting.pop(handle, (0.0, None))
                    if answer is not None:
                        answer.set_result(time.perf_counter() - begun_s)
        finally:
            writer.cancel()
            call.cancel()

    async def _write(
        self, call: "grpc.aio.StreamStreamCall[worker_pb2.AttachRequest, worker_pb2.AttachResponse]"
    ) -> None:
        while True:
            await call.write(await self._outgoing.get())


def _short_request() -> pb.GenerateRequest:
    sampling = cluster_pb2.SamplingParams(max_tokens=_ANSWER_TOKENS, seed=1)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=_PROMPT), sampling=sampling)


def _percentiles_ms(times_s: Sequence[float]) -> list[float]:
    return [float(p) * 1e3 for p in np.percentile(times_s, [50, 90, 99])]


# ---------------------------------------------------------------- alongside an older gateway


def _kinds() -> dict[str, bytes]:
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i} of a talk"} for i in range(7)]
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": schema}} for i in range(4)]
    return {
        "completion, streamed": _http_request(_ANSWER_TOKENS),
        "chat, streamed": _http_request(_ANSWER_TOKENS, "chat/completions", messages=turns, stream=True),
        "chat, 64 tokens streamed": _http_request(64, "chat/completions", messages=turns, stream=True),
        "chat, whole": _http_request(_ANSWER_TOKENS, "chat/completions", messages=turns),
        "chat with tools": _http_request(_ANSWER_TOKENS, "chat/completions", messages=turns, tools=tools),
    }


async def measure_beside(tree: Path, rate_per_s: float, duration_s: float) -> list[Beside]:
    """Compare the current gateway with that of `tree`: `rate_per_s` calls through each, for `duration_s` per kind."""
    async with Bench(gateways=1, step_s=0.002, older=tree) as bench:
        clients = [RelayClient(address) for address in bench.gateway_addresses]
        found: list[Beside] = []
        for kind, request in _kinds().items():
            routes = [partial(client.whole_s, request) for client in clients]
            await in_turn(routes, rate_per_s, 1.0)
            before_s, count = bench.gateways_cpu_s(), int(rate_per_s * duration_s) + 10
            times_s = await in_turn(routes, rate_per_s, duration_s)
            cpu_ms = [
                1e3 * (after - before) / count for after, before in zip(bench.gateways_cpu_s(), before_s, strict=True)
            ]
            [[a50, _, a99], [b50, _, b99]] = map(_percentiles_ms, times_s)
            found.append(Beside(kind, (a50, b50), (a99, b99), (cpu_ms[0], cpu_ms[1])))
        for client in clients:
            client.close()
        return found


def beside_to_markdown(found: Sequence[Beside], ref: str, rate_per_s: float, duration_s: float) -> str:
    lines = [
        f"# A gateway beside that of {ref}",
        "",
        f"{_ANSWER_TOKENS} tokens where nothing else is said, {rate_per_s:g} calls a second through each gateway,"
        f" in turn, {duration_s:g} s for each kind; whole calls, ms.",
        f"Now is {_commit()}. Python {platform.python_version()}, {os.cpu_count()} cores;"
        f" load average {os.getloadavg()[0]:.1f}.",
        f"Command: `python -m benchmarks.relay --beside {ref} --rate {rate_per_s:g} --seconds {duration_s:g}`.",
        "",
        "| kind of call | p50, now / then | | p99, now / then | processor time of a call, now / then | |",
        "|---|---|---|---|---|---|",
    ]
    for each in found:
        (a50, b50), (a99, b99), (a, b) = each.p50_ms, each.p99_ms, each.cpu_ms
        p50, cpu = f"{a50:.2f} / {b50:.2f} | {a50 / b50 - 1:+.0%}", f"{a:.2f} / {b:.2f} | {a / b - 1:+.0%}"
        lines.append(f"| {each.kind} | {p50} | {a99:.2f} / {b99:.2f} | {cpu} |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the page


def to_markdown(throughput: Sequence[Relayed], added: Sequence[Added]) -> str:
    lines = [
        "# Relaying: throughput and added time to the first text",
        "",
        f"Python {platform.python_version()}, {os.cpu_count()} cores shared by state server, {_WORKERS} timed workers,",
        f"dispatcher, gateways and {_CLIENTS} clients; load average {os.getloadavg()[0]:.1f}.",
        "Command: `python -m benchmarks.relay`.",
        "",
        "| gateways | streams | tokens | messages to clients | tokens/s | dispatcher CPU us per token"
        " | gateway CPU us per token |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in throughput:
        cpu = " | ".join(f"{1e6 * spent_s / r.tokens:.1f}" for spent_s in (r.dispatcher_cpu_s, r.gateway_cpu_s))
        lines.append(
            f"| {r.gateways} | {r.streams} | {r.tokens} | {r.messages} | {r.tokens / r.elapsed_s:,.0f} | {cpu} |"
        )
    lines += [
        "",
        f"Requests of {len(_PROMPT)} prompt tokens, so many a second on each route; ms, p50 / p90 / p99. The worker's",
        "time is that of its first token, the others' that of the first text. CPU in ms for a request.",
        "",
        "| requests/s | straight to a worker | through the dispatcher | and a gateway | the gateway adds | saturated"
        " | dispatcher CPU | gateway CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for a in added:
        rows = [a.route_ms[route] for route in _ROUTES]
        rows.append([http - relayed for relayed, http in zip(rows[1], rows[2], strict=True)])
        cells = [" / ".join(f"{ms:.2f}" for ms in row) for row in rows]
        cpu = f"{a.dispatcher_cpu_ms:.2f} | {a.gateway_cpu_ms:.2f}"
        lines.append(f"| {a.rate_per_s:g} | {' | '.join(cells)} | {'yes' if a.is_saturated else 'no'} | {cpu} |")
    return "\n".join(lines) + "\n"


def _commit() -> str:
    said = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=_ROOT, check=True, stdout=subprocess.PIPE)
    return said.stdout.decode().strip()


async def _measure_beside(args: argparse.Namespace) -> None:
    with tree_of(args.beside) as tree:
        found = await measure_beside(tree, args.rate[0], args.seconds)
    report = beside_to_markdown(found, args.beside, args.rate[0], args.seconds)
    print(report)
    if args.markdown:
        args.markdown.write_text(report)


async def _measure(args: argparse.Namespace) -> None:
    throughput = [await measure_throughput(n, args.streams, args.tokens, args.step_s) for n in args.gateways]
    added = [await measure_added_time(rate, args.seconds) for rate in args.rate]
    report = to_markdown(throughput, added)
    print(report)
    if args.json:
        args.json.write_text(json.dumps({"throughput": [*map(asdict, throughput)], "added": [*map(asdict, added)]}))
    if args.markdown:
        args.markdown.write_text(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=600, help="answer tokens of each stream")
    parser.add_argument("--step-s", type=float, default=0.008, help="duration of a worker's step")
    parser.add_argument("--gateways", type=int, nargs="+", default=[0, 1], metavar="N", help="processes, one run each")
    parser.add_argument("--rate", type=float, nargs="+", default=[200.0], metavar="R", help="requests/s on each route")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--beside", metavar="REF", help="compare with the gateway of this commit")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--client", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        uvloop.run(run_client(args.client, args.streams, args.tokens, http=args.gateways[0] > 0))
    else:
        uvloop.run(_measure_beside(args) if args.beside else _measure(args))


if __name__ == "__main__":
    main()

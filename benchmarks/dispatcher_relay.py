"""What a dispatcher costs: tokens relayed per second by one process, and the time it adds to the first token.

`python -m benchmarks.dispatcher_relay [--markdown FILE]`. Everything runs on this machine: workers whose engines are
timers, a state server, one dispatcher, and clients in processes of their own. The machine is shared with all of them,
so beside the rate that was reached the table says what the dispatcher's own CPU time comes to per token.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc.aio
import numpy as np
import psutil
import uvloop

from ballast.rpc.channel import open_channel
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.support.dispatchers import Dispatcher, until, until_async
from tests.support.timed_worker import LAYER_COUNT, publish_layout
from tools.local.process import ChildProcess
from tools.local.state_server import PrivateStateServer
from tools.model.tokenizer import write_tokenizer

_WORKERS = 2
_CLIENTS = 2


@dataclass(frozen=True)
class Relayed:
    streams: int
    tokens: int
    messages: int
    elapsed_s: float
    dispatcher_cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.dispatcher_cpu_s


@dataclass(frozen=True)
class Added:
    rate_per_s: float
    direct_ms: Sequence[float]  # p50, p90, p99
    relayed_ms: Sequence[float]


class Bench:
    """The processes, as a context."""

    def __init__(self, *, step_s: float) -> None:
        self._step_s = step_s
        self._stack = AsyncExitStack()
        self.worker_addresses: list[str] = []

    async def __aenter__(self) -> "Bench":
        stack = self._stack
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ballast-relay-")))
        write_tokenizer(folder, 512, qwen=False, max_len=2048)
        state = stack.enter_context(PrivateStateServer())
        members: list[cluster_pb2.Member] = []
        for index in range(_WORKERS):
            command = [sys.executable, "-m", "tests.support.timed_worker", "--worker-id", f"w{index}"]
            command += ["--step-s", str(self._step_s), "--max-running", "1024", "--block-count", "100000"]
            child = ChildProcess(f"w{index}", command, log_path=folder / f"w{index}.log")
            stack.callback(child.kill)
            line = await until(lambda child=child: child.find_line("ready "), "a worker", child.log)
            self.worker_addresses.append(line.split("address=")[1])
            members.append(
                cluster_pb2.Member(
                    worker_id=f"w{index}", incarnation=1, address=self.worker_addresses[-1], last_layer=LAYER_COUNT
                )
            )
        self.dispatcher = Dispatcher(folder, folder, state.url, "d0", ["--log-level", "warning"])
        stack.push_async_callback(self.dispatcher.stop)
        await self.dispatcher.start()
        publish_layout(state.url, 1, members)

        async def connected() -> bool:
            return sum(w.connected for w in (await self.dispatcher.status()).workers) == _WORKERS

        await until_async(connected, "the workers to be connected")
        tree = psutil.Process(self.dispatcher.process.pid)
        self.process = next((p for p in [tree, *tree.children()] if "services.dispatcher" in _last_module(p)), tree)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def _last_module(process: psutil.Process) -> str:
    line = process.cmdline()
    return line[line.index("-m") + 1] if "-m" in line and "-I" not in line else ""


async def measure_throughput(streams: int, tokens: int, step_s: float) -> Relayed:
    async with Bench(step_s=step_s) as bench:
        command = [sys.executable, "-m", "benchmarks.dispatcher_relay", "--client", bench.dispatcher.address]
        command += ["--streams", str(streams // _CLIENTS), "--tokens", str(tokens)]
        cpu_s = bench.cpu_s()
        clients = [await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE) for _ in range(_CLIENTS)]
        answers = [json.loads((await client.communicate())[0]) for client in clients]
        return Relayed(
            streams,
            sum(a["tokens"] for a in answers),
            sum(a["messages"] for a in answers),
            max(a["end_s"] for a in answers) - min(a["begin_s"] for a in answers),
            bench.cpu_s() - cpu_s,
        )


async def run_client(address: str, streams: int, tokens: int) -> None:
    """Responses are counted, not parsed, but for the last of each stream: the client's cost is not the question."""
    async with open_channel(address) as channel:
        await channel.channel_ready()
        generate = channel.unary_stream(
            "/ballastpb.inference.v1.InferenceService/Generate", request_serializer=pb.GenerateRequest.SerializeToString
        )
        counts = {"messages": 0, "tokens": 0}

        async def one(index: int) -> None:
            sampling = cluster_pb2.SamplingParams(max_tokens=tokens, seed=1)
            call = generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, index]), sampling=sampling))
            last = b""
            async for last in call:  # noqa: B007 - the last one is looked at afterwards
                counts["messages"] += 1
            counts["tokens"] += pb.GenerateResponse.FromString(last).usage.completion_token_count

        begin_s = time.monotonic()
        await asyncio.gather(*(one(index) for index in range(streams)))
        print(json.dumps({**counts, "begin_s": begin_s, "end_s": time.monotonic()}))


async def measure_added_time(rate_per_s: float, duration_s: float, step_s: float) -> Added:
    """Requests through the dispatcher and straight to a worker, alternating, at an even pace."""
    async with Bench(step_s=step_s) as bench, open_channel(bench.worker_addresses[0]) as channel:
        direct = DirectClient()
        reader = asyncio.create_task(direct.run(worker_pb2_grpc.WorkerServiceStub(channel)))
        await direct.welcomed.wait()
        relayed_s: list[float] = []
        direct_s: list[float] = []
        tasks: list[asyncio.Task[None]] = []

        async def relayed() -> None:
            begin_s = time.perf_counter()
            first = True
            async for _ in bench.dispatcher.stub.Generate(_short_request(), timeout=30):
                if first:
                    relayed_s.append(time.perf_counter() - begin_s)
                    first = False

        async def straight() -> None:
            direct_s.append(await direct.first_token_s())

        begin_s = time.perf_counter()
        for index in range(int(rate_per_s * duration_s) * 2):
            wait_s = begin_s + index / rate_per_s / 2 - time.perf_counter()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(relayed() if index % 2 else straight()))
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        warm = int(rate_per_s)
        return Added(rate_per_s, _percentiles_ms(direct_s[warm:]), _percentiles_ms(relayed_s[warm:]))


class DirectClient:
    """Speaks to a worker as a dispatcher would, and notes when first tokens come."""

    def __init__(self) -> None:
        self.welcomed = asyncio.Event()
        self._outgoing: asyncio.Queue[worker_pb2.AttachRequest] = asyncio.Queue()
        self._waiting: dict[int, tuple[float, asyncio.Future[float]]] = {}  # handle -> when submitted, its time
        self._next_handle = 1

    async def first_token_s(self) -> float:
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
    sampling = cluster_pb2.SamplingParams(max_tokens=8, seed=1)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(128)), sampling=sampling)


def _percentiles_ms(times_s: Sequence[float]) -> list[float]:
    return [float(p) * 1e3 for p in np.percentile(times_s, [50, 90, 99])]


def to_markdown(throughput: Sequence[Relayed], added: Sequence[Added]) -> str:
    lines = [
        "# Dispatcher: relay throughput and added time to first token",
        "",
        f"Python {platform.python_version()}, grpcio {grpc.__version__}, {os.cpu_count()} cores shared by state server,"  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
        f" {_WORKERS} timed workers, dispatcher and {_CLIENTS} clients; load average {os.getloadavg()[0]:.1f}.",
        "Command: `python -m benchmarks.dispatcher_relay`.",
        "",
        "| streams | tokens | tokens/s | messages to clients | dispatcher CPU us per token | tokens per CPU second |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.streams} | {r.tokens} | {r.tokens_per_s:,.0f} | {r.messages}"
        f" | {1e6 / r.tokens_per_cpu_s:.1f} | {r.tokens_per_cpu_s:,.0f} |"
        for r in throughput
    ]
    lines += [
        "",
        "| requests/s | direct TTFT ms p50 / p90 / p99 | through the dispatcher | added p50 / p99 |",
        "|---|---|---|---|",
    ]
    for a in added:
        direct, relayed = a.direct_ms, a.relayed_ms
        lines.append(
            f"| {a.rate_per_s:g} | {direct[0]:.2f} / {direct[1]:.2f} / {direct[2]:.2f}"
            f" | {relayed[0]:.2f} / {relayed[1]:.2f} / {relayed[2]:.2f}"
            f" | {relayed[0] - direct[0]:.2f} / {relayed[2] - direct[2]:.2f} |"
        )
    return "\n".join(lines) + "\n"


async def _measure(args: argparse.Namespace) -> None:
    throughput = [
        await measure_throughput(args.streams, args.tokens, step_s) for step_s in (args.step_s, args.step_s / 4)
    ]
    added = [await measure_added_time(args.rate, args.seconds, 0.002) for _ in range(args.repeat)]
    report = to_markdown(throughput, added)
    print(report)
    if args.json:
        args.json.write_text(
            json.dumps({"throughput": list(map(asdict, throughput)), "added": list(map(asdict, added))})
        )
    if args.markdown:
        args.markdown.write_text(report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--step-s", type=float, default=0.008, help="a worker's step; a quarter of it in a second run")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--client", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    uvloop.run(run_client(args.client, args.streams, args.tokens) if args.client else _measure(args))


if __name__ == "__main__":
    main()

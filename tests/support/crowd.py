"""Crowds of abusive clients, and a well-behaved one: how long the latter waits, and what the crowd leaves behind.

A crowd consists of processes (`python -m tests.support.crowd KIND COUNT ADDRESS...`), so that it can be killed:

    silent   connect and send nothing
    preface  connect, send HTTP/2's preface, and no request
    drip     connect and send one byte every second
    stalled  begin long streams and read nothing of them
    readers  begin long streams and read them
    huge     prompts of 16 MiB, all at once
    large    prompts of 4 MiB, just under the message size limit
    empty    one message of millions of empty chat turns

It prints `there N` once its N connections or calls have begun, each answer as `answer TEXT`, and stays until killed.
"""

import asyncio
import contextlib
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
import psutil

from ballast.client import AsyncClient
from ballast.client.types import ClusterStatus
from ballast.common.errors import BallastError
from ballast.common.sampling import SamplingParams
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2, inference_pb2_grpc
from benchmarks.fuzz import link_addresses
from tools.local.cluster import LocalCluster

SILENT, PREFACE, DRIP = "silent", "preface", "drip"
STALLED, READERS, HUGE, LARGE, EMPTY = "stalled", "readers", "huge", "large", "empty"
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_HTTP1 = b"GET /metrics HTTP/1.1\r\nhost: x\r\nx-long: "
_TOKENIZE = "/ballastpb.inference.v1.InferenceService/Tokenize"
_NARROW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.use_local_subchannel_pool", 1))
_STREAMS_OF_A_CONNECTION = 5
_Call: TypeAlias = "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]"
_PROMPT_BYTES = {HUGE: (16 << 20) - 64, LARGE: (4 << 20) - 64}
_SOCKETS_OF_A_PROCESS = 900
_STREAMS_OF_A_PROCESS = 250
_ASK_EVERY_S = 0.02
_BACK_WITHIN_S = 60.0
_MORE_FILES = 8  # open files beyond this growth are a leak; services open a few connections themselves in the meantime
_GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """An attack to run. `count`: connections, streams or messages; for EMPTY, turns of the conversation. `seconds`:
    duration.
    """

    kind: str
    count: int
    seconds: float
    everywhere: bool = False  # at every port; otherwise at the dispatcher only


@dataclass
class Waits:
    """Waiting times of the well-behaved client, in seconds."""

    asked_s: list[float] = field(default_factory=list[float])  # for model_info()
    tokens_s: list[float] = field(default_factory=list[float])  # for a whole short answer
    failures: list[str] = field(default_factory=list[str])

    def ms(self, share: float) -> float:
        ordered = sorted(self.asked_s) or [0.0]
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


@dataclass
class Crowd:
    there: int = 0  # connections or calls that have begun
    answers: list[str] = field(default_factory=list[str])


@dataclass
class Outcome:
    before: Waits
    during: Waits
    there: int = 0  # connections or calls that had begun
    answers: list[str] = field(default_factory=list[str])
    left: str = ""  # resources that were not back at their initial values one minute after the crowd had left
    ended: str = ""


class Clients:
    """Runs a crowd and a well-behaved client against a running cluster. `ports`: addresses that are reachable from
    outside.
    """

    def __init__(self, cluster: LocalCluster, ports: Sequence[str]) -> None:
        self._cluster = cluster
        self._ports = list(ports)
        everyone = [process for processes in cluster.processes.values() for process in processes]
        self._processes = {process.id: psutil.Process(process.pid) for process in everyone}

    async def run(self, case: Case) -> Outcome:
        async with self._client() as client:
            await client.generate(token_ids=(5, 6, 7), sampling=_GREEDY)
            outcome = Outcome(before=await self._watch(client, min(3.0, case.seconds)), during=Waits())
            files = self._files()
            watching = asyncio.create_task(self._watch(client, case.seconds + min(3.0, case.seconds)))
            async with self.crowd(case) as there:
                await asyncio.sleep(case.seconds)
            outcome.there, outcome.answers = there.there, there.answers
            outcome.during = await watching
            await self._settle(client, files, outcome)
        crash = self._cluster.crash()
        outcome.ended = str(crash) if crash is not None else ""
        return outcome

    def _client(self) -> AsyncClient:
        return AsyncClient(self._cluster.address, **self._cluster.credentials)

    @contextlib.asynccontextmanager
    async def crowd(self, case: Case) -> AsyncGenerator["Crowd"]:
        """Runs the crowd's processes. Enters the block once the first connection is made, or after 30 s; kills them at
        the end.
        """
        addresses = self._ports if case.everywhere else [self._cluster.address]
        at_most = {STALLED: _STREAMS_OF_A_PROCESS, READERS: _STREAMS_OF_A_PROCESS, HUGE: 25, LARGE: 25}.get(
            case.kind, _SOCKETS_OF_A_PROCESS
        )
        left, processes, crowd = case.count, list[asyncio.subprocess.Process](), Crowd()
        while left > 0:
            count = left if case.kind == EMPTY else min(left, at_most)
            left -= count
            command = [sys.executable, "-m", "tests.support.crowd", case.kind, str(count), *addresses]
            processes.append(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))
        readers = [asyncio.create_task(_hear(process, crowd)) for process in processes]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30.0):
                    while crowd.there == 0:  # noqa: ASYNC110 - a number, not an event
                        await asyncio.sleep(0.05)
            yield crowd
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*(process.wait() for process in processes), *readers)

    async def _watch(self, client: AsyncClient, seconds: float) -> Waits:
        waits, until_s = Waits(), time.monotonic() + seconds

        async def ask() -> None:
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                try:
                    await client.model_info()
                except BallastError as error:
                    waits.failures.append(f"a small question failed: {error}")
                waits.asked_s.append(time.monotonic() - began_s)
                await asyncio.sleep(_ASK_EVERY_S)

        async def want_tokens() -> None:
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                with contextlib.suppress(BallastError):
                    await client.generate(token_ids=(5, 6, 7), sampling=_GREEDY, deadline_s=60.0)
                    waits.tokens_s.append(time.monotonic() - began_s)
                await asyncio.sleep(0.1)

        await asyncio.gather(ask(), want_tokens())
        return waits

    async def _settle(self, client: AsyncClient, files: dict[str, int], outcome: Outcome) -> None:
        began_s = time.monotonic()
        while time.monotonic() - began_s < _BACK_WITHIN_S:
            with contextlib.suppress(BallastError):
                more = [
                    f"{now - files[name]} file descriptors of {name}"
                    for name, now in self._files().items()
                    if now > files[name] + _MORE_FILES
                ]
                outcome.left = ", ".join([*more, *_busy(await client.status())])
                if not outcome.left:
                    return
            await asyncio.sleep(0.1)

    def _files(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                found[name] = process.num_fds()
        return found


async def _hear(process: asyncio.subprocess.Process, crowd: Crowd) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        word, _, rest = line.decode().strip().partition(" ")
        if word == "there":
            crowd.there += int(rest)
        elif word == "answer":
            crowd.answers.append(rest)


def _busy(status: ClusterStatus) -> list[str]:
    loads = [group.load for group in status.groups if group.load is not None]
    held = sum(load.used_block_count for load in loads)
    running = status.running_request_count + sum(load.running_count + load.waiting_count for load in loads)
    waiting = status.backlog_request_count
    return [f"{running} requests run, {waiting} wait, {held} blocks are held"] if held or running or waiting else []


async def every_port(cluster: LocalCluster) -> list[str]:
    """Addresses of all services, links and metrics."""
    services = [process.address for processes in cluster.processes.values() for process in processes]
    return [*services, *cluster.metrics_targets.values(), *await link_addresses(cluster)]


# ---------------------------------------------------------------- the crowd's process


def _connect(addresses: list[str], count: int) -> list[socket.socket]:
    """Opens up to `count` connections; refused ones are left out."""
    found: list[socket.socket] = []
    for number in range(count):
        host, _, port = addresses[number % len(addresses)].rpartition(":")
        with contextlib.suppress(OSError):
            found.append(socket.create_connection((host, int(port)), 5))
    return found


def _sit(kind: str, addresses: list[str], count: int) -> None:
    there = _connect(addresses, count)
    for each in there if kind == PREFACE else ():
        with contextlib.suppress(OSError):
            each.sendall(_HTTP2)
    _say(f"there {len(there)}")
    for at in range(1 << 30):
        for number, each in enumerate(there) if kind == DRIP else ():
            words = _HTTP2 if number % 2 else _HTTP1 + b"x" * 10_000
            with contextlib.suppress(OSError):
                each.send(words[at % len(words) : at % len(words) + 1], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        time.sleep(1.0)


async def _stream(address: str, count: int, *, read: bool) -> None:
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]), omit_text=True)
    request.sampling.MergeFrom(cluster_pb2.SamplingParams(max_tokens=3000, ignore_eos=True, logprobs=20))
    calls: list[_Call] = []
    for _ in range(-(-count // _STREAMS_OF_A_CONNECTION)):
        channel = grpc.aio.insecure_channel(address, options=_NARROW)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        begun = [stub.Generate(request) for _ in range(min(_STREAMS_OF_A_CONNECTION, count - len(calls)))]
        calls += begun
        # The requests have arrived by then; an answer begins only when a worker has room, perhaps long after.
        await asyncio.wait([asyncio.ensure_future(call.wait_for_connection()) for call in begun], timeout=0.2)
    _say(f"there {len(calls)}")
    if read:
        await asyncio.gather(*(_read(call) for call in calls), return_exceptions=True)
    await asyncio.Event().wait()


async def _read(call: _Call) -> None:
    async for _ in call:
        pass


def _flood(address: str, data: bytes, count: int) -> None:
    """Sends `data` `count` times from gRPC's own threads, and prints the answers as they arrive."""
    options = (("grpc.max_send_message_length", -1),)
    with grpc.insecure_channel(address, options=options) as channel:
        tokenize = cast(Any, channel.unary_unary)(_TOKENIZE)
        calls = [tokenize.future(data, timeout=120) for _ in range(count)]
        _say(f"there {count}")
        answers = Counter(_answer(call) for call in calls)
    for answer, times in answers.most_common():
        _say(f"answer {times} x {answer}")
    time.sleep(1 << 20)


# Any: a gRPC call.
def _answer(call: Any) -> str:
    try:
        call.result()
    except grpc.RpcError as error:
        known = cast(grpc.Call, error)
        return f"{known.code().name}: {(known.details() or '')[:120]}"
    return "OK"


def _say(text: str) -> None:
    print(text, flush=True)


def main(kind: str, addresses: list[str], count: int) -> None:
    match kind:
        case "stalled" | "readers":
            asyncio.run(_stream(addresses[0], count, read=kind == READERS))
        case "huge" | "large":
            message = inference_pb2.TokenizeRequest(text="a ship " * (_PROMPT_BYTES[kind] // 7))
            _flood(addresses[0], message.SerializeToString(), count)
        case "empty":
            conversation = b"\x0a\x00" * count  # field 1: messages
            _flood(addresses[0], _field(2, conversation), 1)
        case _:
            _sit(kind, addresses, count)


def _field(number: int, data: bytes) -> bytes:
    """Encodes bytes as a length-delimited protobuf field."""
    length, left = b"", len(data)
    while left > 0x7F:
        length, left = length + bytes([left & 0x7F | 0x80]), left >> 7
    return bytes([number << 3 | 2]) + length + bytes([left]) + data


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3:], int(sys.argv[2]))

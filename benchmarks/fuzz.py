"""Sends mutated messages to every method and port of the services, alongside a real client.

    python -m benchmarks.fuzz --messages 1000000

Half of the messages are generated from the protobuf types, with values at the ends of their ranges, NaN, long and empty
strings and other services' names; the other half are such messages with mutated bytes: truncated, flipped, duplicated,
or not a message at all. They are sent to all methods of a cluster's services, except those that drain on purpose, and
raw bytes to metrics and link ports. A third of the messages are requests to a gateway, generated from the schemas of
its bodies; occasionally a key of the state server is corrupted. At the end every process must be alive, no request may
have been answered with 500, and the cluster must produce the same tokens as before. Exit status 0 if so.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc.aio
import psutil
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ballast.client import AsyncClient
from ballast.common.errors import BallastError
from ballast.common.sampling import SamplingParams
from ballast.rpc.channel import open_channel
from ballastpb.inference.v1 import inference_pb2
from ballastpb.monitor.v1 import monitor_pb2, monitor_pb2_grpc
from ballastpb.planner.v1 import planner_pb2
from ballastpb.worker.v1 import worker_pb2
from benchmarks.fuzz_http import HttpFuzz, spoil_state
from tools.local.cluster import LocalCluster
from tools.local.ports import free_port
from tools.model.tiny import make_tiny

_FILES = {"dispatcher": (inference_pb2, planner_pb2), "planner": (planner_pb2,), "monitor": (monitor_pb2,)}
_FILES["worker"] = (worker_pb2,)
_ON_PURPOSE = {"Drain", "DrainWorker", "Park"}  # methods that stop a service on purpose, and are not called
_CONCURRENT = 64  # calls in flight; with fewer, both cores are idle while calls wait
_TELL_EVERY_S = 10.0
_CALL_S = 1.0
_READ_S = 0.1  # time limit for a message of a response stream: a watcher of an unchanged layout receives none
_HTTP_S = 10.0
_HONEST_EACH_S = 1.0  # pause of the real client between two requests, because each one costs computation
_RAW_SHARE = 0.02  # fraction of messages that are raw bytes for a port
_HTTP_SHARE = 0.33  # fraction of messages that are requests to a gateway
_SPOILT_EACH = 1_000  # messages per corrupted key of the state server
_PROMPT, _SAMPLING = (5, 6, 7), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
_NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 15, (1 << 31) - 1, -(1 << 31), (1 << 52) + 1, (1 << 63) - 1, -(1 << 63))
_REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"))
_INT32 = {FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SFIXED32}
_UNSIGNED = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}
_MAX_DEPTH = 5


@dataclass
class FuzzReport:
    """Messages sent, and their effects."""

    messages: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    memory_mib: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    waits_s: list[float] = field(default_factory=list[float])  # duration of each request of the real client
    ended: list[str] = field(default_factory=list[str])
    same_tokens: bool = False  # whether the last answer to the real client equals the first one
    different_count: int = 0  # answers in between that differ

    @property
    def passed(self) -> bool:
        return self.same_tokens and not (self.different_count or self.ended or self.errors)

    @property
    def errors(self) -> list[str]:
        """Requests to a gateway that were answered with 500, with the answers."""
        return [outcome for outcome in self.outcomes if outcome.startswith("http: 500")]


class MessageMaker:
    """Generates messages, deterministically from a seed."""

    def __init__(self, seed: int, names: Sequence[str]) -> None:
        self.rng = random.Random(seed)
        self._names = ("", "x", "x" * 129, "a b", "\x00", "ü" * 40, "127.0.0.1:1", *names)

    def message(self, descriptor: Descriptor) -> bytes:
        made = GetMessageClass(descriptor)()
        self._fill(made, 0)
        data = made.SerializeToString()
        return data if self.rng.random() < 0.5 else self.mutated(data)

    def mutated(self, data: bytes) -> bytes:
        rng, changed = self.rng, bytearray(data)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(changed) + 1)
            match rng.randrange(5):
                case 0:
                    del changed[at:]
                case 1 if changed:
                    changed[at % len(changed)] ^= 1 << rng.randrange(8)
                case 2:
                    changed[at:at] = changed[: rng.randint(0, 64)]
                case 3:
                    changed[at:at] = rng.randbytes(rng.randint(1, 16))
                case _:
                    changed = bytearray(rng.randbytes(rng.randint(0, 200)))
        return bytes(changed)

    def _fill(self, message: Message, depth: int) -> None:
        for each in cast(Sequence[FieldDescriptor], message.DESCRIPTOR.fields):
            if self.rng.random() < 0.3:
                continue
            # Any: a field is a number, a string, a message, or several of them.
            held: Any = getattr(message, each.name)
            with contextlib.suppress(ValueError, TypeError, AttributeError):  # some fields reject the value
                if each.type == FieldDescriptor.TYPE_MESSAGE:
                    if depth < _MAX_DEPTH:
                        for one in [held.add() for _ in range(self.rng.randint(0, 3))] if each.is_repeated else [held]:
                            self._fill(one, depth + 1)
                            one.SetInParent()
                elif each.is_repeated:
                    held.extend(self._value(each) for _ in range(self.rng.randint(0, 6)))
                else:
                    setattr(message, each.name, self._value(each))

    def _value(self, each: FieldDescriptor) -> object:
        rng = self.rng
        match each.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING:
                text = rng.choice(self._names)
                return text.encode() if each.type == FieldDescriptor.TYPE_BYTES else text
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return rng.choice(_REALS)
            case FieldDescriptor.CPPTYPE_BOOL:
                return rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                return rng.randint(0, 8)
            case _:
                value = rng.choice(_NUMBERS) if rng.random() < 0.7 else rng.randint(0, 200)
                bits = _UNSIGNED.get(each.type)
                if bits is not None:
                    return abs(value) % (1 << bits)
                return (value + (1 << 31)) % (1 << 32) - (1 << 31) if each.type in _INT32 else value


@dataclass(frozen=True)
class FuzzTarget:
    address: str
    method: MethodDescriptor

    @property
    def path(self) -> str:
        return f"/{cast(Any, self.method).containing_service.full_name}/{self.method.name}"


class Fuzz:
    """A fuzz run against a running cluster. `ports`: addresses that get raw bytes."""

    def __init__(self, cluster: LocalCluster, seed: int, ports: Sequence[str]) -> None:
        self._cluster = cluster
        everyone = [process for processes in cluster.processes.values() for process in processes]
        self.maker = MessageMaker(seed, [process.id for process in everyone])
        self.report = FuzzReport()
        self._ports = ports
        self._targets = [
            FuzzTarget(process.address, method)
            for service, files in _FILES.items()
            for process in cluster.processes[cast(Any, service)]
            for file in files
            for described in file.DESCRIPTOR.services_by_name.values()
            for method in described.methods
            if method.name not in _ON_PURPOSE
        ]
        gateways = cluster.processes["gateway"]
        self._http = HttpFuzz(self.maker.rng, gateways[0].address, "tiny") if gateways else None
        self._spoilt = 0
        self._processes = {process.id: psutil.Process(process.pid) for process in everyone}

    async def run(self, messages: int, concurrent: int = _CONCURRENT) -> FuzzReport:
        """Send `messages` messages, `concurrent` calls at a time. Errors of services are recorded, not raised."""
        report, before = self.report, self._memory()
        async with AsyncClient(self._cluster.address) as client:
            expected = (await client.generate(token_ids=_PROMPT, sampling=_SAMPLING)).token_ids
            beside = [
                asyncio.create_task(each)
                for each in (self._be_honest(client, expected), self._tell_progress(messages, before))
            ]
            async with contextlib.AsyncExitStack() as stack:
                addresses = {target.address for target in self._targets}
                channels = {a: await stack.enter_async_context(open_channel(a)) for a in addresses}
                await asyncio.gather(*(self._send(messages, channels) for _ in range(concurrent)))
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            await asyncio.sleep(1.0)  # time for a crashing process to end
            crash = self._cluster.crash()
            if crash is not None:
                report.ended.append(str(crash))
            with contextlib.suppress(BallastError):
                answer = await client.generate(token_ids=_PROMPT, sampling=_SAMPLING, deadline_s=60.0)
                report.same_tokens = answer.token_ids == expected
        after = self._memory()
        report.memory_mib = {name: (before[name], after.get(name, 0.0)) for name in before}
        return report

    async def _send(self, messages: int, channels: dict[str, grpc.aio.Channel]) -> None:
        report, rng = self.report, self.maker.rng
        while report.messages < messages:
            if self._http is not None and rng.random() < _HTTP_SHARE:
                report.messages += 1
                if report.messages // _SPOILT_EACH > self._spoilt:
                    self._spoilt = report.messages // _SPOILT_EACH
                    report.outcomes[await spoil_state(rng, self._cluster.redis_url)] += 1
                report.outcomes[await self._http.send(_HTTP_S)] += 1
                continue
            if self._ports and rng.random() < _RAW_SHARE:
                report.messages += 1
                await self._send_raw(rng.choice(self._ports), self.maker.mutated(b"GET /metrics HTTP/1.1\r\n\r\n"))
                continue
            target = rng.choice(self._targets)
            count = rng.randint(1, 8) if target.method.client_streaming else 1
            data = [self.maker.message(target.method.input_type) for _ in range(count)]
            report.messages += count
            report.outcomes[await _call(channels[target.address], target, data)] += count

    async def _send_raw(self, address: str, data: bytes) -> None:
        host, _, port = address.rpartition(":")
        outcome = "raw: answered"
        try:
            async with asyncio.timeout(_CALL_S):
                reader, writer = await asyncio.open_connection(host, int(port))
                with contextlib.closing(writer):
                    writer.write(data)
                    await writer.drain()
                    async with asyncio.timeout(0.05):
                        await reader.read(4096)
        except (OSError, TimeoutError) as error:
            outcome = f"raw: {type(error).__name__}"
        self.report.outcomes[outcome] += 1

    async def _be_honest(self, client: AsyncClient, expected: Sequence[int]) -> None:
        """Send valid requests, one after the other; record their durations, and answers that are not `expected`."""
        while True:
            began_s = time.monotonic()
            with contextlib.suppress(BallastError):
                answer = await client.generate(token_ids=_PROMPT, sampling=_SAMPLING, deadline_s=30.0)
                self.report.different_count += answer.token_ids != expected
                self.report.waits_s.append(time.monotonic() - began_s)
            await asyncio.sleep(_HONEST_EACH_S)

    async def _tell_progress(self, messages: int, before: Mapping[str, float]) -> None:
        began_s = time.monotonic()
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            rate = self.report.messages / (time.monotonic() - began_s)
            left_min = (messages - self.report.messages) / rate / 60 if rate else float("inf")
            grown = ", ".join(f"{name} {size - before.get(name, 0.0):+.0f}" for name, size in self._memory().items())
            text = f"{self.report.messages:,} of {messages:,} messages, {rate:.0f}/s, {left_min:.0f} min left"
            print(f"{text}; MiB since the start: {grown}", file=sys.stderr, flush=True)

    def _memory(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                found[name] = process.memory_info().rss / (1 << 20)
        return found


async def _call(channel: grpc.aio.Channel, target: FuzzTarget, data: Sequence[bytes]) -> str:
    """Call a method with raw bytes. Returns the name of the gRPC status, or of the exception without one."""
    method = target.method
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(target.path)
    try:
        async with asyncio.timeout(_CALL_S):
            if method.client_streaming:
                running = call(timeout=_CALL_S)
                for message in data:
                    await running.write(message)
                await running.done_writing()
            else:
                running = call(data[0], timeout=_CALL_S)
            if method.server_streaming:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_READ_S):
                        for _ in range(3):
                            if await running.read() is grpc.aio.EOF:
                                break
                running.cancel()
            else:
                await running
    except grpc.aio.AioRpcError as error:
        return error.code().name
    except (TimeoutError, asyncio.InvalidStateError, asyncio.CancelledError, grpc.aio.BaseError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return type(error).__name__
    return "OK"


async def link_addresses(cluster: LocalCluster) -> list[str]:
    """Addresses where workers accept links."""
    async with open_channel(cluster.processes["monitor"][0].address) as channel:
        stub = monitor_pb2_grpc.MonitorServiceStub(channel)
        status = await stub.GetClusterStatus(monitor_pb2.GetClusterStatusRequest(), timeout=10)
    return [row.instance.data_address for row in status.instances if row.instance.data_address]


async def fuzz_own_cluster(messages: int, seed: int, log_dir: Path, concurrent: int = _CONCURRENT) -> FuzzReport:
    """Fuzz a fresh cluster of two workers and one of each other service."""
    with tempfile.TemporaryDirectory() as folder:
        model, metrics = make_tiny("llama", Path(folder) / "tiny", max_len=1024), free_port()
        flags: Any = {"dispatcher": ["--metrics-port", str(metrics)]}
        async with LocalCluster(
            model, workers=2, gateways=1, device_memory_bytes=16 << 20, log_dir=log_dir, flags=flags
        ) as cluster:
            ports = [f"127.0.0.1:{metrics}", *await link_addresses(cluster)]
            return await Fuzz(cluster, seed, ports).run(messages, concurrent)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--concurrent", type=int, default=_CONCURRENT, help="number of concurrent calls")
    parser.add_argument("--log-dir", type=Path, default=Path("out/fuzz"))
    args = parser.parse_args()
    began_s = time.monotonic()
    report = asyncio.run(fuzz_own_cluster(args.messages, args.seed, args.log_dir, args.concurrent))
    waits = sorted(report.waits_s) or [0.0]
    print(
        json.dumps(
            {
                "messages": report.messages,
                "seconds": round(time.monotonic() - began_s, 1),
                "outcomes": dict(report.outcomes.most_common()),
                "memory_mib": {k: [round(v) for v in pair] for k, pair in report.memory_mib.items()},
                "client_p50_s": waits[len(waits) // 2],
                "client_p99_s": waits[len(waits) * 99 // 100],
                "ended": report.ended,
                "errors": report.errors[:20],
                "same_tokens": report.same_tokens,
                "different": report.different_count,
            },
            indent=2,
        )
    )
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Real dispatcher processes and a real state server around timed workers."""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ballast.common.errors import BallastError
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb
from ballastpb.inference.v1 import inference_pb2_grpc
from tests.support.timed_worker import TimedSettings, TimedWorker, publish_layout
from tools.local.process import ChildProcess
from tools.local.state_server import PrivateStateServer
from tools.model.tokenizer import write_tokenizer

SERVICE = "ballastpb.inference.v1.InferenceService"


@dataclass
class Answer:
    """Everything that a client received."""

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    responses: list[pb.GenerateResponse] = field(default_factory=list[pb.GenerateResponse])
    error: BallastError | None = None

    @property
    def last(self) -> pb.GenerateResponse:
        return self.responses[-1]


class Dispatcher:
    """A dispatcher process and a channel to it."""

    def __init__(self, model: Path, folder: Path, redis_url: str, name: str, flags: Sequence[str]) -> None:
        command = [
            *(sys.executable, "-m", "services.dispatcher", "--port", "0", "--redis-url", redis_url),
            *("--model", str(model), "--dispatcher-id", name, *flags),
        ]
        self.process = ChildProcess(name, command, log_path=folder / f"{name}.log")
        self.name = name
        self.address = ""
        self._narrow: grpc.aio.Channel | None = None

    async def start(self) -> None:
        line = await until(lambda: self.process.find_line("ready "), "the dispatcher's ready line", self.process.log)
        self.address = line.split("address=")[1].strip()
        self.channel = open_channel(self.address)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)

    def narrow_stub(self) -> "inference_pb2_grpc.InferenceServiceAsyncStub":
        """A stub on a connection whose flow-control window does not grow: unread data backs up after 64 KiB."""
        options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
        self._narrow = grpc.aio.insecure_channel(self.address, options=options)
        return inference_pb2_grpc.InferenceServiceStub(self._narrow)

    async def stop(self) -> None:
        if self._narrow is not None:
            await self._narrow.close()
        if self.address:
            await self.channel.close()
        self.process.kill()

    async def is_ready(self) -> bool:
        health: Any = health_pb2_grpc.HealthStub(self.channel)  # Any: the add-on has no types
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def status(self) -> pb.GetStatusResponse:
        return await self.stub.GetStatus(pb.GetStatusRequest(), timeout=60)

    async def generate(
        self, request: pb.GenerateRequest, timeout_s: float | None = 60.0, answer: Answer | None = None
    ) -> Answer:
        """Sends a request. If given, `answer` receives the results as they arrive, so that a caller can inspect them
        meanwhile.
        """
        answer = Answer() if answer is None else answer
        try:
            async for response in self.stub.Generate(request, timeout=timeout_s):
                answer.responses.append(response)
                answer.token_ids += response.token_ids
                answer.text += response.text
        except grpc.RpcError as error:
            answer.error = from_rpc_error(error, self.address)
        return answer


class Arena:
    """`async with Arena(TimedSettings(), flags=[...]) as arena:` starts everything, and waits until every dispatcher is
    ready.
    """

    def __init__(self, *workers: TimedSettings, dispatchers: int = 1, flags: Sequence[str] = ()) -> None:
        self.workers = [TimedWorker(settings) for settings in workers]
        self.dispatchers: list[Dispatcher] = []
        self.state = PrivateStateServer()
        self.epoch = 0
        self.place = (Path(), Path(), "")  # for starting another dispatcher: model, log folder, state server's URL
        self._count = dispatchers
        self._flags = flags
        self._stack = contextlib.AsyncExitStack()

    @property
    def dispatcher(self) -> Dispatcher:
        return self.dispatchers[0]

    @property
    def worker(self) -> TimedWorker:
        return self.workers[0]

    async def __aenter__(self) -> Self:
        async with self._stack as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ballast-arena-")))
            write_tokenizer(folder, 512, qwen=False, max_len=2048)
            await stack.enter_async_context(self.state)
            self.place = (folder, folder, self.state.url)
            for worker in self.workers:
                await stack.enter_async_context(worker)
            for index in range(self._count):
                dispatcher = Dispatcher(folder, folder, self.state.url, f"d{index}", self._flags)
                self.dispatchers.append(dispatcher)
                stack.push_async_callback(dispatcher.stop)
            for dispatcher in self.dispatchers:
                await dispatcher.start()
            if self.workers:
                self.publish()
                await self.connected(*self.workers)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def publish(self, *members: cluster_pb2.Member) -> None:
        self.epoch += 1
        publish_layout(self.state.url, self.epoch, members or [worker.member() for worker in self.workers])

    async def connected(self, *workers: TimedWorker) -> None:
        """Waits until every dispatcher is ready and has a stream to each of these workers."""
        wanted = {(w.settings.worker_id, w.settings.incarnation) for w in workers}

        async def all_there() -> bool:
            for dispatcher in self.dispatchers:
                status = await dispatcher.status()
                there = {(w.worker_id, w.incarnation) for w in status.workers if w.connected}
                if not wanted <= there or not await dispatcher.is_ready():
                    return False
            return True

        await until_async(all_there, f"streams to {sorted(wanted)}")


async def until(found: Callable[[], Any], what: str, story: Callable[[], str] = str, timeout_s: float = 60.0) -> Any:
    """Waits for a truthy result of `found` and returns it; a timeout fails with `what` and `story()`."""
    give_up_at_s = time.monotonic() + timeout_s
    while not (result := found()):
        assert time.monotonic() < give_up_at_s, f"waited {timeout_s} s for {what}\n{story()}"
        await asyncio.sleep(0.01)
    return result


async def until_async(found: Callable[[], Coroutine[Any, Any, bool]], what: str, timeout_s: float = 60.0) -> None:
    give_up_at_s = time.monotonic() + timeout_s
    while not await found():
        assert time.monotonic() < give_up_at_s, f"waited {timeout_s} s for {what}"
        await asyncio.sleep(0.02)


def request(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    request_id: str = "",
    max_tokens: int = 8,
    seed: int | None = 7,
    priority: cluster_pb2.PriorityClass.ValueType = cluster_pb2.PRIORITY_CLASS_UNSPECIFIED,
    collect: bool = False,
    omit_text: bool = False,
    logprobs: int | None = None,
) -> pb.GenerateRequest:
    sampling = cluster_pb2.SamplingParams(max_tokens=max_tokens)
    if seed is not None:
        sampling.seed = seed
    if logprobs is not None:
        sampling.logprobs = logprobs
    return pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(ids=prompt),
        sampling=sampling,
        priority=priority,
        collect=collect,
        omit_text=omit_text,
    )

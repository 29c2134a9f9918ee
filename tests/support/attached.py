"""A dispatcher's end of the Attach stream, controlled by the test."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import grpc
import grpc.aio

from ballast.common.sampling import FinishReason, SamplingParams
from ballast.rpc.codec import SAMPLING, finish_from_proto
from ballast.rpc.errors import from_rpc_error
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.worker.v1 import worker_pb2 as pb
from ballastpb.worker.v1 import worker_pb2_grpc

READ_TIMEOUT_S = 60.0


@dataclass
class Heard:
    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[cluster_pb2.Logprobs] = field(default_factory=list[cluster_pb2.Logprobs])
    ending: pb.Ending | None = None

    @property
    def reason(self) -> FinishReason | None:
        assert self.ending is not None
        return finish_from_proto(self.ending.finish_reason)


def hello(worker_id: str, incarnation: int) -> pb.AttachRequest:
    return pb.AttachRequest(
        hello=pb.Hello(
            dispatcher_id="d1", dispatcher_incarnation=1, worker_id=worker_id, worker_incarnation=incarnation
        )
    )


class Attached:
    """One stream. Errors of the call are raised as the classes of `ballast.common.errors`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self.call: grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse] = self.stub.Attach()
        self.welcome = pb.Welcome()
        self.heard: dict[int, Heard] = {}
        self.loads: list[cluster_pb2.LoadReport] = []
        self._wants_logprobs: set[int] = set()

    @classmethod
    async def open(cls, channel: grpc.aio.Channel) -> Self:
        """Attaches to the worker at the end of the channel, with the identity from its status."""
        attached = cls(channel)
        status: pb.GetStatusResponse = await attached.stub.GetStatus(pb.GetStatusRequest())
        await attached.call.write(hello(status.worker_id, status.incarnation))
        attached.welcome = (await attached.read()).welcome
        assert attached.welcome.worker_id == status.worker_id
        return attached

    async def submit(
        self, handle: int, max_tokens: int, prompt: Sequence[int] = (9, 8, 7), *, logprobs: int | None = None
    ) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
        await self.send(pb.Submit(handle=handle, prompt_token_ids=prompt, sampling=SAMPLING.message(sampling)))

    async def send(self, submit: pb.Submit) -> None:
        self.heard[submit.handle] = Heard()
        if submit.sampling.HasField("logprobs"):
            self._wants_logprobs.add(submit.handle)
        await self.call.write(pb.AttachRequest(submit=submit))

    async def read(self) -> pb.AttachResponse:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                response = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, "worker") from error
        assert isinstance(response, pb.AttachResponse), "the stream has ended"
        if response.HasField("step"):
            self._take(response.step)
        return response

    async def ended(self, *handles: int) -> list[Heard]:
        """Reads until the requests with these handles have ended."""
        while any(self.heard[handle].ending is None for handle in handles):
            await self.read()
        return [self.heard[handle] for handle in handles]

    async def started(self, handle: int) -> None:
        while not self.heard[handle].token_ids:
            await self.read()

    def _take(self, step: pb.StepOutput) -> None:
        assert step.HasField("load")
        self.loads.append(step.load)
        tokens, logprobs = iter(step.token_ids), iter(step.logprobs)
        for index, handle in enumerate(step.handles):
            one = self.heard[handle]
            assert one.ending is None
            assert handle <= step.seen_handle
            for _ in range(step.token_counts[index]):
                one.token_ids.append(next(tokens))
                if handle in self._wants_logprobs:
                    one.logprobs.append(next(logprobs))
            one.text += step.texts[index] if step.texts else ""
        assert next(tokens, None) is None
        assert next(logprobs, None) is None
        for ending in step.endings:
            assert self.heard[ending.handle].ending is None
            self.heard[ending.handle].ending = ending


async def status_of(channel: grpc.aio.Channel) -> pb.GetStatusResponse:
    return await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(pb.GetStatusRequest())


def is_idle(load: cluster_pb2.LoadReport) -> bool:
    counts = (load.used_block_count, load.waiting_block_count, load.running_count, load.waiting_count)
    return counts == (0, 0, 0, 0)


async def until_idle(channel: grpc.aio.Channel, within_s: float = 60.0) -> float:
    """Waits until the worker is idle; returns the seconds that it took."""
    loop = asyncio.get_running_loop()
    began_at_s = loop.time()
    while not is_idle((status := await status_of(channel)).load):
        assert loop.time() - began_at_s < within_s, f"the worker is still busy: {status.load}"
        await asyncio.sleep(0.005)
    return loop.time() - began_at_s

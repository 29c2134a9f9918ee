"""An InferenceService with scripted behaviour: the server for tests of the SDK and the CLI."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Any

import grpc
import grpc.aio

from ballast.common.errors import BallastError, Cancelled, NotFound
from ballast.rpc.server import RpcServer
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb
from ballastpb.inference.v1 import inference_pb2_grpc


class ScriptedDispatcher(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with `tokens` tokens `t0 t1 ...`, one per response, unless attributes say otherwise."""

    def __init__(self, name: str = "d0") -> None:
        self.name = name
        self.tokens = 3
        self.refuse: list[BallastError] = []  # errors for the next Generate calls, one each
        self.fail_after: tuple[int, BallastError] | None = None  # fails after (tokens, error)
        self.die_after: int | None = None  # tokens before UNAVAILABLE, as if the process had been killed
        self.end_early = False  # ends with OK, but without a finish reason
        self.pause_s = 0.0  # before each token
        self.status_pause_s = 0.0  # before its status
        self.requests: list[pb.GenerateRequest] = []
        self.abandoned = asyncio.Event()  # set when a caller disconnects during an answer
        self.running: dict[str, asyncio.Event] = {}  # request id -> set when cancelled by id
        self.started = asyncio.Event()  # set when a request has arrived
        self.drained = False
        self.status = pb.GetStatusResponse(dispatcher_id=name, version="0.1.0", state_server_reachable=True)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        if self.refuse:
            raise self.refuse.pop(0)
        cancelled = self.running.setdefault(request.request_id, asyncio.Event())
        self.started.set()
        try:
            collected = pb.GenerateResponse(request_id=request.request_id, prompt_token_count=5)
            for index in range(len(request.resumption.token_ids), self.tokens):
                if index == self.die_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                if self.fail_after is not None and index == self.fail_after[0]:
                    raise self.fail_after[1]
                await self._pause(cancelled)
                response = collected if request.collect else pb.GenerateResponse(request_id=request.request_id)
                response.token_ids.append(index)
                response.text += f"t{index} "
                if request.sampling.HasField("logprobs"):
                    token = cluster_pb2.TokenLogprob(token_id=index, logprob=-0.5, token=b"\xf0\x9f")
                    response.logprobs.add(chosen=token)
                if index == self.tokens - 1 and not self.end_early:
                    response.finish_reason = cluster_pb2.FINISH_REASON_LENGTH
                    response.usage.CopyFrom(pb.Usage(prompt_token_count=5, completion_token_count=self.tokens, seed=7))
                if not request.collect or index == self.tokens - 1:
                    yield response
        except asyncio.CancelledError:
            self.abandoned.set()
            raise
        finally:
            self.running.pop(request.request_id, None)

    async def _pause(self, cancelled: asyncio.Event) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(cancelled.wait(), self.pause_s or 0.0001)
        if cancelled.is_set():
            raise Cancelled("cancelled by id")

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        event = self.running.get(request.request_id)
        if event is not None:
            event.set()
        return pb.CancelResponse(found=event is not None)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        text = request.text or " ".join(f"{m.role}: {m.content}" for m in request.conversation.messages)
        return pb.TokenizeResponse(ids=text.encode())

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        raise NotFound("no text is known here")

    async def DescribeRequest(self, request: pb.DescribeRequestRequest, context: Any) -> pb.DescribeRequestResponse:
        raise NotFound("no story is known here")

    async def ListEnded(self, request: pb.ListEndedRequest, context: Any) -> pb.ListEndedResponse:
        return pb.ListEndedResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        if not self.status.HasField("model"):
            raise NotFound("no model yet")
        return pb.GetModelInfoResponse(model=self.status.model)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        await asyncio.sleep(self.status_pause_s)
        return self.status

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        self.drained = True
        return pb.DrainResponse(running_request_count=len(self.running))

    async def Undrain(self, request: pb.UndrainRequest, context: Any) -> pb.UndrainResponse:
        self.drained = False
        return pb.UndrainResponse()

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Any) -> pb.DrainWorkerResponse:
        for worker in self.status.workers:
            if worker.worker_id == request.worker_id:
                return pb.DrainWorkerResponse(
                    epoch=1, running_request_count=worker.load.running_count + worker.load.waiting_count
                )
        raise NotFound("no such worker")


@contextlib.asynccontextmanager
async def serving(dispatcher: ScriptedDispatcher, port: int = 0) -> AsyncGenerator[str, None]:
    """Serves on a local port; yields the address."""
    bugs: list[object] = []

    def register(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(dispatcher, server)

    descriptor = pb.DESCRIPTOR.services_by_name["InferenceService"]
    server = RpcServer(host="127.0.0.1", port=port, services=[(descriptor, register)], on_bug=bugs.append)
    port = await server.start()
    await server.set_ready(True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.0)
    assert not bugs


@contextlib.contextmanager
def serving_in_thread(name: str = "d0") -> Generator[tuple[ScriptedDispatcher, str], None, None]:
    """A dispatcher in a thread with its own event loop, for tests that block."""
    loop, started, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found: list[tuple[ScriptedDispatcher, str]] = []

    async def serve() -> None:
        dispatcher = ScriptedDispatcher(name)
        async with serving(dispatcher) as address:
            found.append((dispatcher, address))
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(60)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def worker_status(worker_id: str = "worker-0", *, used: int = 25, kv_bytes: int = 700 << 20) -> pb.WorkerStatus:
    """Status of a worker with a memory budget of 1 GiB whose parts add up."""
    parameter_bytes = 100 << 20
    memory = cluster_pb2.MemoryReport(
        budget_bytes=1 << 30,
        parameter_bytes=parameter_bytes,
        kv_bytes=kv_bytes,
        free_bytes=(1 << 30) - parameter_bytes - kv_bytes,
    )
    load = cluster_pb2.LoadReport(
        block_tokens=16,
        block_count=100,
        used_block_count=used,
        running_count=3,
        waiting_count=2,
        max_running_count=64,
        steps_total=10,
        prompt_tokens_total=500,
        generation_tokens_total=900,
        memory=memory,
    )
    return pb.WorkerStatus(
        worker_id=worker_id,
        incarnation=2,
        address="127.0.0.1:50061",
        group_id=f"group-{worker_id}",
        connected=True,
        load=load,
    )

"""A worker whose engine is a timer. It speaks the real WorkerService protocol over real gRPC.

Its tokens are a function of prompt, seed and position, so that a test can compute the expected answer under any faults.
Run it inside a test (`async with TimedWorker(...)`) or as a process: `python -m tests.support.timed_worker --worker-id
w0`.
"""

import argparse
import asyncio
import base64
import contextlib
import time
import zlib
from array import array
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc.aio
import redis
import uvloop

from ballast.common.protocol import PROTOCOL
from ballast.rpc.channel import SERVER_OPTIONS
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.worker.v1 import worker_pb2 as pb
from ballastpb.worker.v1 import worker_pb2_grpc

LAYER_COUNT = 4
Context = grpc.aio.ServicerContext[Any, Any]


def scripted_base(prompt_token_ids: Sequence[int], seed: int) -> int:
    return zlib.crc32(array("q", prompt_token_ids).tobytes(), seed & 0xFFFFFFFF)


def scripted_token(base: int, position: int, vocab_size: int) -> int:
    return (base + position * 2_654_435_761) % 4_294_967_291 % vocab_size


def scripted_tokens(prompt_token_ids: Sequence[int], seed: int, count: int, vocab_size: int = 1000) -> list[int]:
    """The tokens that a timed worker generates for a request."""
    base = scripted_base(prompt_token_ids, seed)
    return [scripted_token(base, position, vocab_size) for position in range(count)]


def scripted_text(token_ids: Iterable[int]) -> str:
    return "".join(f"{token_id} " for token_id in token_ids)


@dataclass(frozen=True, kw_only=True)
class TimedSettings:
    worker_id: str = "w0"
    incarnation: int = 1
    step_s: float = 0.01
    tokens_per_step: int = 1
    block_tokens: int = 16
    block_count: int = 4096
    max_running: int = 256
    max_waiting: int = 512
    vocab_size: int = 1000
    max_model_len: int = 8192


@dataclass(eq=False)
class TimedSequence:
    submit: pb.Submit
    stream: "TimedStream"
    base: int
    generated: int
    ends_at_s: float
    held_text: str = ""  # text of generated tokens that is not released yet
    blocks: int = 0


@dataclass(eq=False)
class TimedStream:
    messages: asyncio.Queue[pb.AttachResponse | None] = field(default_factory=lambda: asyncio.Queue(4096))
    sequences: dict[int, TimedSequence] = field(default_factory=dict[int, TimedSequence])
    seen_handle: int = 0
    output: pb.StepOutput = field(default_factory=pb.StepOutput)
    sent_at_s: float = 0.0


class TimedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """The timed worker; an async context manager that serves on `address`."""

    def __init__(self, settings: TimedSettings, port: int = 0) -> None:
        self.settings = settings
        self.address = ""
        self.draining = False
        self.aborted: list[tuple[str, float]] = []  # (request id, time)
        self.submitted: list[pb.Submit] = []
        self._port = port
        self._streams: list[TimedStream] = []
        self.running: dict[TimedSequence, None] = {}
        self.waiting: deque[TimedSequence] = deque()
        self._steps = 0
        self._server: grpc.aio.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self.address = f"127.0.0.1:{self._port}"
        await self._server.start()
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Breaks every stream at once, as a killed process would."""
        if self._task is not None and self._server is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._server.stop(None)
            self._task = None

    @property
    def used_blocks(self) -> int:
        return sum(sequence.blocks for sequence in self.running)

    @property
    def has_streams(self) -> bool:
        return bool(self._streams)

    @property
    def request_count(self) -> int:
        return len(self.running) + len(self.waiting)

    def member(self) -> cluster_pb2.Member:
        return cluster_pb2.Member(
            worker_id=self.settings.worker_id,
            incarnation=self.settings.incarnation,
            address=self.address,
            first_layer=0,
            last_layer=LAYER_COUNT,
            draining=self.draining,
        )

    # ------------------------------------------------------------------ protocol

    async def Attach(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Context
    ) -> None:
        hello = (await anext(request_iterator)).hello
        if hello.worker_incarnation != self.settings.incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
        stream = TimedStream()
        self._streams.append(stream)
        welcome = pb.Welcome(
            worker_id=self.settings.worker_id,
            incarnation=self.settings.incarnation,
            model=self._model(),
            load=self.load(),
            max_waiting_request_count=self.settings.max_waiting,
            protocol=PROTOCOL,
        )
        await context.write(pb.AttachResponse(welcome=welcome))
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            while (message := await stream.messages.get()) is not None:
                await context.write(message)
        finally:
            reader.cancel()
            self._streams.remove(stream)
            for sequence in list(stream.sequences.values()):
                self.forget(sequence)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(
            worker_id=self.settings.worker_id,
            incarnation=self.settings.incarnation,
            model=self._model(),
            load=self.load(),
            dispatcher_count=len(self._streams),
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self.draining = True
        return pb.DrainResponse(running_request_count=self.request_count)

    async def _refuse_transitions(self, request: Any, context: Context) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "a timed worker has no layers")

    Prepare = Commit = Abort = GetTransition = GetTrace = NamePartners = Migrate = Park = _refuse_transitions

    async def _read(self, stream: TimedStream, requests: AsyncIterator[pb.AttachRequest]) -> None:
        try:
            async for request in requests:
                if request.HasField("submit"):
                    self.submit(stream, request.submit)
                elif request.HasField("abort"):
                    sequence = stream.sequences.get(request.abort.handle)
                    if sequence is not None:
                        self.aborted.append((sequence.submit.request_id, time.monotonic()))
                        self.forget(sequence)
                        self.tell_cancelled(stream, sequence.submit)
        finally:
            stream.messages.put_nowait(None)

    def submit(self, stream: TimedStream, submit: pb.Submit) -> None:
        stream.seen_handle = submit.handle
        self.submitted.append(submit)
        if self.draining or len(self.waiting) >= self.settings.max_waiting:
            self.refuse(stream, submit)
            return
        ends_at_s = time.monotonic() + submit.deadline_s if submit.HasField("deadline_s") else float("inf")
        base = scripted_base(submit.prompt_token_ids, submit.sampling.seed)
        sequence = TimedSequence(submit, stream, base, len(submit.output_token_ids), ends_at_s)
        sequence.held_text = scripted_text(submit.output_token_ids)[submit.delivered_text_chars :]
        stream.sequences[submit.handle] = sequence
        self.waiting.append(sequence)

    def tell_cancelled(self, stream: TimedStream, submit: pb.Submit) -> None:
        """Reports the cancellation as workers do, since a dispatcher that recalled the request resumes it only after
        this ending.
        """
        ending = pb.Ending(handle=submit.handle, finish_reason=cluster_pb2.FINISH_REASON_CANCELLED)
        step = pb.StepOutput(endings=[ending], load=self.load(), seen_handle=stream.seen_handle)
        stream.messages.put_nowait(pb.AttachResponse(step=step))

    def refuse(self, stream: TimedStream, submit: pb.Submit) -> None:
        stream.seen_handle = submit.handle
        ending = pb.Ending(handle=submit.handle, refused=True)
        step = pb.StepOutput(endings=[ending], load=self.load(), seen_handle=submit.handle)
        stream.messages.put_nowait(pb.AttachResponse(step=step))

    # ------------------------------------------------------------------ engine

    async def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            due_s = max(due_s + self.settings.step_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            self._step()

    def _step(self) -> None:
        self._steps += 1
        now_s = time.monotonic()
        self._admit()
        for sequence in list(self.running):
            self._advance(sequence, now_s)
        load = self.load()
        for stream in self._streams:
            output = stream.output
            if output.handles or output.endings or now_s - stream.sent_at_s > 0.02:
                output.load.CopyFrom(load)
                output.seen_handle = stream.seen_handle
                if stream.messages.full():
                    continue  # the dispatcher is slow: merge this output with the next step's
                stream.messages.put_nowait(pb.AttachResponse(step=output))
                stream.output = pb.StepOutput()
                stream.sent_at_s = now_s

    def _admit(self) -> None:
        free = self.settings.block_count - self.used_blocks
        while self.waiting and len(self.running) < self.settings.max_running:
            need = self._need(self.waiting[0])
            if need > free:
                break
            sequence = self.waiting.popleft()
            sequence.blocks = need
            free -= need
            self.running[sequence] = None

    def _advance(self, sequence: TimedSequence, now_s: float) -> None:
        submit, output = sequence.submit, sequence.stream.output
        if now_s >= sequence.ends_at_s:
            output.endings.append(pb.Ending(handle=submit.handle, finish_reason=cluster_pb2.FINISH_REASON_DEADLINE))
            self.forget(sequence)
            return
        texts: list[str] = []
        ending: pb.Ending | None = None
        while ending is None and len(texts) < self.settings.tokens_per_step:
            token_id = scripted_token(sequence.base, sequence.generated, self.settings.vocab_size)
            sequence.generated += 1
            output.token_ids.append(token_id)
            if submit.sampling.HasField("logprobs"):
                output.logprobs.append(scripted_logprobs(token_id, submit.sampling.logprobs))
            ending = self._ending(submit, token_id, sequence.generated)
            texts.append(self._next_text(sequence, token_id, is_last=ending is not None))
        sequence.blocks = self._need(sequence)
        output.handles.append(submit.handle)
        output.token_counts.append(len(texts))
        output.texts.append("".join(texts))
        if ending is not None:
            output.endings.append(ending)
            self.forget(sequence)

    @staticmethod
    def _ending(submit: pb.Submit, token_id: int, generated: int) -> pb.Ending | None:
        if token_id in submit.sampling.stop_token_ids:
            return pb.Ending(handle=submit.handle, finish_reason=cluster_pb2.FINISH_REASON_STOP, matched_stop="id")
        if generated >= submit.sampling.max_tokens:
            return pb.Ending(handle=submit.handle, finish_reason=cluster_pb2.FINISH_REASON_LENGTH)
        return None

    @staticmethod
    def _next_text(sequence: TimedSequence, token_id: int, *, is_last: bool) -> str:
        """The text for a new token. It lags one token behind, like incremental detokenisation."""
        if sequence.submit.omit_text:
            return ""
        text, sequence.held_text = sequence.held_text, f"{token_id} "
        return text + sequence.held_text if is_last else text

    def forget(self, sequence: TimedSequence) -> None:
        sequence.stream.sequences.pop(sequence.submit.handle, None)
        self.running.pop(sequence, None)
        with contextlib.suppress(ValueError):
            self.waiting.remove(sequence)

    def _need(self, sequence: TimedSequence) -> int:
        tokens = len(sequence.submit.prompt_token_ids) + sequence.generated + 1
        return -(-tokens // self.settings.block_tokens)

    def load(self) -> cluster_pb2.LoadReport:
        s = self.settings
        block_bytes = s.block_tokens * 64
        kv_bytes = s.block_count * block_bytes
        return cluster_pb2.LoadReport(
            block_tokens=s.block_tokens,
            block_count=s.block_count,
            used_block_count=self.used_blocks,
            waiting_block_count=sum(map(self._need, self.waiting)),
            running_count=len(self.running),
            waiting_count=len(self.waiting),
            max_running_count=s.max_running,
            steps_total=self._steps,
            draining=self.draining,
            memory=cluster_pb2.MemoryReport(
                budget_bytes=kv_bytes + 1024, parameter_bytes=1024, kv_bytes=kv_bytes, free_bytes=0
            ),
        )

    def _model(self) -> cluster_pb2.ModelInfo:
        return cluster_pb2.ModelInfo(
            name="timed",
            architecture="Timer",
            layer_count=LAYER_COUNT,
            vocab_size=self.settings.vocab_size,
            max_model_len=self.settings.max_model_len,
            dtype="float32",
            parameter_count=1,
            kv_bytes_per_token=64,
            eos_token_ids=[0],
        )


def scripted_logprobs(token_id: int, count: int) -> cluster_pb2.Logprobs:
    top = [cluster_pb2.TokenLogprob(token_id=i, logprob=-1.5 - i) for i in range(count)]
    return cluster_pb2.Logprobs(chosen=cluster_pb2.TokenLogprob(token_id=token_id, logprob=-0.5), top=top)


def publish_layout(redis_url: str, epoch: int, members: Sequence[cluster_pb2.Member]) -> None:
    """Stores a layout as the planner would, with one group per instance."""
    publish_groups(redis_url, epoch, [[member] for member in members])


def publish_groups(redis_url: str, epoch: int, groups: Sequence[Sequence[cluster_pb2.Member]]) -> None:
    """Stores a layout of groups in stage order, whose members share the layers evenly."""
    layout = cluster_pb2.Layout(epoch=epoch, layer_count=LAYER_COUNT, reason="test")
    for members in groups:
        group = layout.groups.add(group_id="g-" + "-".join(m.worker_id for m in members))
        for index, member in enumerate(members):
            stage = group.members.add()
            stage.CopyFrom(member)
            stage.first_layer = LAYER_COUNT * index // len(members)
            stage.last_layer = LAYER_COUNT * (index + 1) // len(members)
    with contextlib.closing(redis.Redis.from_url(redis_url)) as client:
        client.set("ballast:layout", base64.b64encode(layout.SerializeToString()))
        client.publish("ballast:layout:changed", epoch)


async def _serve(settings: TimedSettings, port: int) -> None:
    async with TimedWorker(settings, port) as worker:
        print(f"ready service=worker id={settings.worker_id} address={worker.address}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="A worker whose engine is a timer.")
    parser.add_argument("--port", type=int, default=0)
    defaults = TimedSettings()
    for name in TimedSettings.__dataclass_fields__:
        default = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=type(default), default=default)
    given = vars(parser.parse_args())
    port = given.pop("port")
    uvloop.run(_serve(TimedSettings(**given), port))


if __name__ == "__main__":
    main()

"""WorkerService (protos/ballastpb/worker/v1): converts protobuf. Each dispatcher has one Attach stream."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc.aio

from ballast import __version__
from ballast.common.errors import BallastError, InvalidRequest, PeerViolation, StaleEpoch, Unavailable
from ballast.common.ids import Incarnation, RequestId, WorkerId
from ballast.common.model import ModelInfo
from ballast.common.protocol import PROTOCOL
from ballast.common.sampling import FinishReason, Grammar
from ballast.common.targets import Targets
from ballast.rpc.codec import LOAD, MODEL, PRIORITY, SAMPLING
from ballast.rpc.fencing import Fence
from ballast.rpc.mapping import Mapper
from ballast.service.logs import get_logger
from ballastpb.worker.v1 import worker_pb2 as pb
from ballastpb.worker.v1 import worker_pb2_grpc
from services.worker.core.batch import NewSequence
from services.worker.core.events import Aborted, Ending, SequenceKey, Submitted
from services.worker.output_stream import Output, OutputStream
from services.worker.pipeline.stage_clock import StageClock
from services.worker.pipeline.wire import logprobs_to_proto
from services.worker.shell import Detokenizing, WorkerShell
from services.worker.spans import RequestSpans

_HELLO_TIMEOUT_S = 10.0
_COMPILE_TIMEOUT_S = 15.0  # for a grammar and those queued before it; dispatchers have checked that it takes less alone
_ENDING = Mapper(Ending, pb.Ending)

# Any: grpc.aio has no better type for the context's messages.
Context = grpc.aio.ServicerContext[Any, Any]


class TransitionPort(Protocol):
    """Executes the planner's calls. Raises errors of `ballast.common.errors`."""

    def prepare(self, request: pb.PrepareRequest) -> None: ...

    def commit(self, epoch: int) -> None: ...

    def abort(self, epoch: int, why: str) -> None: ...

    def status(self, epoch: int) -> pb.TransitionStatus: ...

    def migrate(self, request: pb.MigrateRequest) -> None: ...

    async def when_prepared(self, epoch: int) -> pb.TransitionStatus:
        """Wait briefly until the transition is prepared. Returns its `status`."""
        ...

    async def when_taken_up(self, epoch: int) -> pb.TransitionStatus: ...

    def park(self, incarnation: int, *, park: bool) -> None: ...

    def name_partners(self, request: pb.NamePartnersRequest) -> int:
        """Pass partners, the peers to which links are kept open, to the member. Returns the highest epoch known to this
        worker.
        """
        ...


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of a worker, with its model and device."""

    worker_id: WorkerId
    incarnation: Incarnation
    model: ModelInfo
    device: str = "cpu"


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(
        self,
        *,
        shell: WorkerShell,
        identity: WorkerIdentity,
        max_waiting_count: int,
        detokenizer: Callable[[NewSequence], Detokenizing],
        transitions: TransitionPort,
        clock: StageClock,
        compile_grammar: Callable[[Grammar], Future[Any]] | None = None,
        spans: RequestSpans | None = None,
    ) -> None:
        """`compile_grammar`: starts to compile a request's grammar, before the engine gets the request."""
        self._spans = spans or RequestSpans(None, identity.worker_id)
        self._transitions = transitions
        self._clock = clock
        self._identity = identity
        self._shell = shell
        self._worker_id = identity.worker_id
        self._incarnation = identity.incarnation
        self._max_waiting_count = max_waiting_count
        self._detokenizer = detokenizer
        self._compile_grammar = compile_grammar
        self._fence = Fence()

    # Writes to the context instead of yielding, for which the generated base class has no type.
    async def Attach(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Context
    ) -> None:
        hello = await self._read_hello(request_iterator)
        stream = await self._shell.open_stream()
        log = get_logger().bind(dispatcher_id=hello.dispatcher_id, stream_id=stream.stream_id)
        log.info("dispatcher attached")
        reader = asyncio.create_task(self._read(stream, request_iterator), name=f"attach-{stream.stream_id}")
        writer = asyncio.create_task(self._write(stream, context), name=f"write-{stream.stream_id}")
        broken = asyncio.create_task(stream.broken.wait(), name=f"broken-{stream.stream_id}")
        try:
            await asyncio.wait((writer, broken), return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                await stream.next()  # raises the stream's error
            writer.result()
            if reader.done():
                reader.result()  # raises the reader's error
        finally:
            self._shell.close_stream(stream)
            self._spans.closed(stream.stream_id, time.monotonic())
            for task in (reader, writer, broken):
                task.cancel()
            await asyncio.gather(reader, writer, broken, return_exceptions=True)
            log.info("dispatcher detached")

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            version=__version__,
            model=MODEL.message(self._identity.model),
            load=LOAD.message(self._shell.load()),
            dispatcher_count=self._shell.stream_count,
            device=self._identity.device,
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._fence.admit(context)
        self._shell.drain()
        load = self._shell.load()
        return pb.DrainResponse(running_request_count=load.running_count + load.waiting_count)

    async def GetTrace(self, request: pb.GetTraceRequest, context: Context) -> pb.GetTraceResponse:
        times, ahead_s = self._clock.times, time.time() - time.monotonic()
        spans = [
            pb.TraceSpan(
                began_unix_s=span.began_s + ahead_s,
                duration_s=span.ended_s - span.began_s,
                kind=span.kind,
                epoch=span.epoch,
                step_id=span.step_id,
                token_count=span.token_count,
                what=span.what,
            )
            for span in self._clock.spans()
        ]
        return pb.GetTraceResponse(
            worker_id=self._worker_id,
            spans=spans,
            busy_s=times.busy_s,
            idle_s=times.idle_s,
            network_s=times.network_s,
            send_s=times.send_s,
            steps=times.steps,
        )

    # ------------------------------------------------------------ transitions

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareResponse:
        self._fence.admit(context)
        self._transitions.prepare(request)
        return pb.PrepareResponse(status=await self._transitions.when_prepared(request.target.epoch))

    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        self._fence.admit(context)
        self._transitions.commit(request.epoch)
        return pb.CommitResponse(status=await self._transitions.when_taken_up(request.epoch))

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        self._fence.admit(context)
        self._transitions.abort(request.epoch, request.why)
        return pb.AbortResponse(status=self._transitions.status(request.epoch))

    async def GetTransition(self, request: pb.GetTransitionRequest, context: Context) -> pb.GetTransitionResponse:
        return pb.GetTransitionResponse(status=self._transitions.status(request.epoch))

    async def Migrate(self, request: pb.MigrateRequest, context: Context) -> pb.MigrateResponse:
        self._fence.admit(context)
        for party in (*request.source, *request.target):
            if party.worker_id == self._worker_id and party.incarnation != self._incarnation:
                raise StaleEpoch("worker incarnation", party.incarnation, self._incarnation)
        self._transitions.migrate(request)
        return pb.MigrateResponse()

    async def Park(self, request: pb.ParkRequest, context: Context) -> pb.ParkResponse:
        self._fence.admit(context)
        self._transitions.park(request.incarnation, park=not request.wake)
        return pb.ParkResponse()

    async def NamePartners(self, request: pb.NamePartnersRequest, context: Context) -> pb.NamePartnersResponse:
        self._fence.admit(context)
        return pb.NamePartnersResponse(newest_epoch=self._transitions.name_partners(request))

    async def _read_hello(self, requests: AsyncIterator[pb.AttachRequest]) -> pb.Hello:
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = await anext(requests, None)
        except TimeoutError as error:
            raise PeerViolation("dispatcher", f"no Hello within {_HELLO_TIMEOUT_S:g} s") from error
        if first is None or not first.HasField("hello"):
            raise PeerViolation("dispatcher", "the first message must be Hello")
        hello = first.hello
        if hello.worker_id != self._worker_id:
            raise Unavailable(hello.worker_id, f"this is worker {self._worker_id}")
        if hello.worker_incarnation != self._incarnation:
            raise StaleEpoch("worker incarnation", hello.worker_incarnation, self._incarnation)
        return hello

    def _welcome(self) -> pb.Welcome:
        return pb.Welcome(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            model=MODEL.message(self._identity.model),
            load=LOAD.message(self._shell.load()),
            max_waiting_request_count=self._max_waiting_count,
            protocol=PROTOCOL,
        )

    async def _read(self, stream: OutputStream, requests: AsyncIterator[pb.AttachRequest]) -> None:
        """Pass messages on until the dispatcher closes its side; an invalid message closes the stream. Later requests,
        and its own abort, overtake a request whose grammar is being compiled.
        """
        compiling: dict[int, asyncio.Task[None]] = {}  # handle -> compilation of the request's grammar
        try:
            async for request in requests:
                match request.WhichOneof("message"):
                    case "submit":
                        await self._submit(stream, request.submit, compiling)
                    case "abort":
                        handle = request.abort.handle
                        if (task := compiling.pop(handle, None)) is not None and task.cancel():
                            stream.put_ending(Ending(handle, FinishReason.CANCELLED), self._shell.load())
                            continue
                        key = SequenceKey(stream.stream_id, handle)
                        await self._shell.post(Aborted(time.monotonic(), key))
                    case what:
                        raise PeerViolation("dispatcher", f"{what} in the middle of the stream")
        finally:
            for task in compiling.values():
                task.cancel()
            stream.close()

    async def _submit(self, stream: OutputStream, submit: pb.Submit, compiling: dict[int, asyncio.Task[None]]) -> None:
        def invalid(why: str) -> None:
            ending = Ending(submit.handle, FinishReason.ERROR, error=why, invalid=True)
            stream.put_ending(ending, self._shell.load())

        async def compile_first(event: Submitted, compiled: Future[Any]) -> None:
            try:
                async with asyncio.timeout(_COMPILE_TIMEOUT_S):
                    await asyncio.wrap_future(compiled)
                del compiling[submit.handle]  # from here on aborts are passed to the engine
                await self._shell.post(event)
            except InvalidRequest as error:
                invalid(str(error))
            except TimeoutError:
                invalid(f"sampling.grammar: was not compiled within {_COMPILE_TIMEOUT_S:g} s")
            except BallastError as error:
                stream.close(error)
            except Exception as error:  # noqa: BLE001 whatever the compiler raises, the request must end
                get_logger().error("a grammar could not be compiled", why=f"{type(error).__name__}: {error}")
                why = f"sampling.grammar: {type(error).__name__}: {error}"
                stream.put_ending(Ending(submit.handle, FinishReason.ERROR, error=why), self._shell.load())
            finally:
                compiling.pop(submit.handle, None)

        try:
            event = self._submitted(stream.stream_id, submit)
        except InvalidRequest as error:
            invalid(str(error))
            return
        self._spans.submitted(event, submit.traceparent)
        grammar = event.sampling.grammar
        if grammar is None or self._compile_grammar is None:
            await self._shell.post(event)
        elif len(compiling) >= self._max_waiting_count:
            why = f"{len(compiling)} grammars wait to be compiled"
            stream.put_ending(Ending(submit.handle, None, error=why, refused=True), self._shell.load())
        elif (compiled := self._compile_grammar(grammar)).done() and compiled.exception() is None:
            await self._shell.post(event)
        else:
            coming = compile_first(replace(event, overtaken=True), compiled)
            compiling[submit.handle] = asyncio.create_task(coming, name=f"grammar-{submit.handle}")

    def _submitted(self, stream_id: int, submit: pb.Submit) -> Submitted:
        now_s = time.monotonic()
        sampling = SAMPLING.record(submit.sampling)
        prompt, output = tuple(submit.prompt_token_ids), tuple(submit.output_token_ids)
        if submit.HasField("deadline_s") and math.isnan(submit.deadline_s):
            raise InvalidRequest("deadline_s", "must be a number of seconds, got NaN")
        output_text = ""
        if output and not (submit.omit_text and not sampling.stop):
            # The core validates tokens, but the tokenizer would fail on these before.
            if min((*prompt, *output)) < 0:
                raise InvalidRequest("token_ids", "must not be negative")
            detokenizer = self._detokenizer(NewSequence(0, prompt, (), sampling))
            output_text = "".join(map(detokenizer.push, output))
        return Submitted(
            at_s=now_s,
            key=SequenceKey(stream_id, submit.handle),
            request_id=RequestId(submit.request_id),
            attempt=submit.attempt,
            prompt_token_ids=prompt,
            sampling=sampling,
            output_token_ids=output,
            output_text=output_text,
            delivered_text_chars=submit.delivered_text_chars,
            priority=PRIORITY.member(submit.priority, "priority"),
            deadline_at_s=now_s + submit.deadline_s if submit.HasField("deadline_s") else None,
            wants_text=not submit.omit_text,
            expects_handover=submit.expects_handover,
            cache_salt=submit.cache_salt,
            targets=Targets(submit.ttft_target_s or math.inf, submit.tpot_target_s or math.inf),
            caller=submit.caller,
        )

    async def _write(self, stream: OutputStream, context: Context) -> None:
        await context.write(pb.AttachResponse(welcome=self._welcome()))
        while (output := await stream.next()) is not None:
            if output.emit is not None:
                self._spans.told(output.emit, time.monotonic())
            await context.write(pb.AttachResponse(step=step_to_proto(output)))


def step_to_proto(output: Output) -> pb.StepOutput:
    message = pb.StepOutput(load=LOAD.message(output.load), seen_handle=output.seen_handle)
    if (emit := output.emit) is not None:
        message.handles.extend(emit.handles)
        message.token_counts.extend(emit.token_counts)
        message.token_ids.extend(emit.token_ids)
        message.texts.extend(emit.texts)
        message.logprobs.extend(map(logprobs_to_proto, emit.logprobs))
        message.endings.extend(map(_ENDING.message, emit.endings))
        message.preempted_handles.extend(emit.preempted)
        message.resumed_handles.extend(emit.resumed)
        message.marks.extend(emit.marks)
    return message

"""The stream to each worker: connecting, reconnecting, protobuf <-> events."""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from ballast.common.clock import Clock
from ballast.common.errors import BallastError, InvariantViolation, PeerViolation, Unavailable
from ballast.common.ids import DispatcherId, Incarnation, RequestId
from ballast.common.protocol import PROTOCOL, may_be_dispatched_to
from ballast.rpc.channel import Dial
from ballast.rpc.codec import LOAD, MODEL, PRIORITY, SAMPLING
from ballast.rpc.errors import asking
from ballast.rpc.mapping import Mapper
from ballast.service.logs import get_logger
from ballast.service.otlp import Context
from ballast.service.tasks import note_failure
from ballastpb.worker.v1 import worker_pb2 as pb
from ballastpb.worker.v1 import worker_pb2_grpc
from services.dispatcher.core.events import Ending, Event, PlaceOnWorker, StepReceived, WorkerConnected, WorkerLost
from services.dispatcher.policy.freeness import WorkerKey

_ENDING = Mapper(Ending, pb.Ending)
_CONNECT_TIMEOUT_S, _FIRST_BACKOFF_S, _MAX_BACKOFF_S = 5.0, 0.05, 2.0

AttachCall = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]


@dataclass(frozen=True, slots=True)
class Identity:
    """This dispatcher, as introduced in the Hello message."""

    dispatcher_id: DispatcherId
    incarnation: Incarnation


class WorkerLink:
    """Keeps a stream to one worker open until cancelled, and converts its messages to events."""

    def __init__(
        self,
        worker: WorkerKey,
        address: str,
        *,
        identity: Identity,
        clock: Clock,
        feed: Callable[[Event], None],
        dial: Dial,
    ) -> None:
        self._dial = dial
        self._worker = worker
        self._address = address
        self._identity = identity
        self._clock = clock
        self._feed = feed
        self._outgoing: deque[pb.AttachRequest] = deque()  # messages to send; bounded by the requests placed there
        self._wake = asyncio.Event()
        self._log = get_logger().bind(worker_id=worker.worker_id, worker_incarnation=worker.incarnation)

    def place(self, place: PlaceOnWorker) -> None:
        self._send(pb.AttachRequest(submit=submit_to_proto(place)))

    def abort(self, handle: int) -> None:
        self._send(pb.AttachRequest(abort=pb.Abort(handle=handle)))

    def _send(self, message: pb.AttachRequest) -> None:
        self._outgoing.append(message)
        self._wake.set()

    async def run(self) -> None:
        backoff_s, rng = _FIRST_BACKOFF_S, random.Random(self._worker.worker_id)
        while True:
            connected_at_s = self._clock.now_s()
            why = await self._attach()
            self._feed(WorkerLost(self._clock.now_s(), self._worker, why))
            if self._clock.now_s() - connected_at_s > _MAX_BACKOFF_S:
                backoff_s = _FIRST_BACKOFF_S
            self._log.warning("no stream to worker", address=self._address, why=why, retry_after_s=backoff_s)
            await asyncio.sleep(backoff_s * rng.uniform(0.5, 1.0))
            backoff_s = min(_MAX_BACKOFF_S, 2 * backoff_s)

    async def _attach(self) -> str:
        """Run one stream from Hello to its end. Returns the reason for its end."""
        self._outgoing.clear()
        try:
            with asking(self._worker.worker_id):
                async with self._dial(self._address) as channel:
                    call: AttachCall = worker_pb2_grpc.WorkerServiceStub(channel).Attach()
                    try:
                        await self._greet(call)
                        await self._relay(call)
                    finally:
                        call.cancel()
        except InvariantViolation:
            raise
        except BallastError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 after any error its requests are replayed elsewhere
            note_failure("link to a worker", error)
            return f"unexpected {type(error).__name__}"
        return "the worker closed the stream"

    async def _greet(self, call: AttachCall) -> None:
        hello = pb.Hello(
            dispatcher_id=self._identity.dispatcher_id,
            dispatcher_incarnation=self._identity.incarnation,
            worker_id=self._worker.worker_id,
            worker_incarnation=self._worker.incarnation,
        )
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await call.write(pb.AttachRequest(hello=hello))
                first = await call.read()
        except TimeoutError as error:
            why = f"no welcome within {_CONNECT_TIMEOUT_S:g} s"
            raise Unavailable(self._worker.worker_id, why) from error
        if not isinstance(first, pb.AttachResponse) or not first.HasField("welcome"):
            raise PeerViolation(self._worker.worker_id, "answered Hello with a message other than Welcome")
        welcome = first.welcome
        if self._worker != (welcome.worker_id, welcome.incarnation):
            raise PeerViolation(self._worker.worker_id, f"is {welcome.worker_id}, life {welcome.incarnation}")
        if not may_be_dispatched_to(welcome.protocol):
            why = f"speaks protocol {welcome.protocol}, this dispatcher {PROTOCOL} and the adjacent versions"
            raise PeerViolation(self._worker.worker_id, why)
        self._log.info("stream to worker is up", address=self._address)
        self._feed(
            WorkerConnected(
                self._clock.now_s(),
                self._worker,
                MODEL.record(welcome.model),
                LOAD.record(welcome.load),
                welcome.max_waiting_request_count,
            )
        )

    async def _relay(self, call: AttachCall) -> None:
        writer = asyncio.create_task(self._write(call), name=f"write-{self._worker.worker_id}")
        try:
            while True:
                message = await call.read()
                if not isinstance(message, pb.AttachResponse):  # end of stream
                    break
                self._feed(self._decode(message))
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: AttachCall) -> None:
        """Send queued messages until the stream ends. The reader gets the reason."""
        while True:
            while self._outgoing:
                await call.write(self._outgoing.popleft())
            self._wake.clear()
            await self._wake.wait()

    def _decode(self, message: pb.AttachResponse) -> StepReceived:
        if not message.HasField("step"):
            raise PeerViolation(self._worker.worker_id, f"sent {message.WhichOneof('message')} amid steps")
        step = message.step
        handles, counts, token_ids = list(step.handles), list(step.token_counts), list(step.token_ids)
        texts = list(step.texts)
        if len(counts) != len(handles) or sum(counts) != len(token_ids) or len(texts) not in (0, len(handles)):
            raise PeerViolation(self._worker.worker_id, "sent a step whose arrays have inconsistent lengths")
        return StepReceived(
            self._clock.now_s(),
            self._worker,
            handles,
            counts,
            token_ids,
            texts,
            step.logprobs,
            [_ENDING.record(ending) for ending in step.endings] if step.endings else (),
            LOAD.record(step.load),
            step.seen_handle,
            tuple(step.preempted_handles),
            tuple(step.resumed_handles),
            tuple(step.marks),
        )


def submit_to_proto(place: PlaceOnWorker) -> pb.Submit:
    request = place.request
    return pb.Submit(
        handle=place.handle,
        request_id=request.request_id,
        attempt=place.attempt,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=place.output_token_ids,
        sampling=SAMPLING.message(request.sampling),
        priority=PRIORITY.number_of[request.priority],
        deadline_s=place.deadline_s,
        omit_text=request.omit_text,
        delivered_text_chars=place.delivered_text_chars,
        expects_handover=place.expects_handover,
        cache_salt=request.cache_salt,
        ttft_target_s=_or_zero(request.targets.ttft_s),
        tpot_target_s=_or_zero(request.targets.tpot_s),
        caller=request.caller_number,
        traceparent=_span_of(request.request_id, request.traceparent),
    )


def _or_zero(seconds: float) -> float:
    return 0.0 if math.isinf(seconds) else seconds


def _span_of(request_id: RequestId, traceparent: str) -> str:
    """Return the traceparent of the worker's parent span; empty if this request is not traced."""
    caller = Context.read(traceparent) if traceparent else None
    return caller.request(request_id).traceparent if caller is not None and caller.sampled else ""

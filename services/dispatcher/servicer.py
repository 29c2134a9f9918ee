"""InferenceService (protos/ballastpb/inference/v1): checks what clients send; protobuf stops here."""

import asyncio
import itertools
import json
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc.aio

from ballast import __version__
from ballast.common.clock import Clock
from ballast.common.errors import BallastError, Cancelled, InvalidRequest, NotFound, PermissionDenied, Unavailable
from ballast.common.ids import RequestId, WorkerId
from ballast.common.sampling import FinishReason, SamplingParams
from ballast.rpc.callers import caller
from ballast.rpc.codec import LAYOUT, LOAD, MODEL, PRIORITY, SAMPLING, finish_to_proto
from ballast.rpc.deadline import remaining_s
from ballast.service.security import refuse
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb
from ballastpb.inference.v1 import inference_pb2_grpc
from services.dispatcher.core.events import Finish, Request
from services.dispatcher.describing import account_to_proto, times_to_proto
from services.dispatcher.shell.clients import ClientStream, Delivery
from services.dispatcher.shell.dispatcher import DispatcherShell
from services.dispatcher.shell.links import Identity
from services.dispatcher.shell.ports import PlannerPort, RequestClaims
from services.dispatcher.text import PromptEncoder

# Any: grpc.aio has no better type for the context's messages.
Context = grpc.aio.ServicerContext[Any, Any]

_MAX_REQUEST_ID_CHARS = 128
_MAX_TURNS = 8192  # of one conversation
_PLANNER_TIMEOUT_S = 10.0
# A prompt of that many tokens, and as many generated ones, fit into one message to a worker.
_MAX_PROMPT_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBounds:
    max_deadline_s: float
    max_queued_request_count: int
    max_queued_token_count: int


@dataclass(frozen=True, slots=True)
class _Claim:
    """Of one request on its id, on its way to the state server or there."""

    serial: int
    task: asyncio.Task[None]


class DispatcherServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self,
        *,
        shell: DispatcherShell,
        claims: RequestClaims,
        encoder: PromptEncoder,
        identity: Identity,
        bounds: ServingBounds,
        clock: Clock,
        planner: PlannerPort,
    ) -> None:
        self._planner = planner
        self._shell = shell
        self._claims = claims
        self._encoder = encoder
        self._identity = identity
        self._bounds = bounds
        self._clock = clock
        self._started_at_s = clock.now_s()
        self._claim_serials = itertools.count(1)
        self._owners: dict[RequestId, tuple[ClientStream, str]] = {}  # the name of the token that started it

    # Writes to the context instead of yielding: cheaper for each token, and a cancelled call ends here at once.
    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        submission = await self._accepted(request, context)
        stream = self._shell.open(submission)
        self._owners.setdefault(submission.request_id, (stream, caller().name))
        claim = self._claim(request, submission, stream)
        try:
            await self._relay(stream, claim, submission, collect=request.collect, context=context)
        except asyncio.CancelledError:
            if not stream.given_up:
                raise
            # Without a status the client would wait for ever, should it read on: gRPC sends none for a cancelled call.
            raise Cancelled(stream.given_up) from None
        finally:
            self._shell.close(stream, "the client went away")
            if self._owners.get(submission.request_id, (None, ""))[0] is stream:  # else another's of the same id
                del self._owners[submission.request_id]
            if claim is not None:
                claim.task.cancel()
                self._claims.release(submission.request_id, claim.serial)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        if not request.request_id:
            raise InvalidRequest("request_id", "must not be empty")
        request_id, who = RequestId(request.request_id), caller()
        _, owner = self._owners.get(request_id, (None, who.name))
        if owner != who.name and not who.operates:
            why = f"request {request_id} was started with another token; to cancel it needs the role operate"
            refuse("not_owner", PermissionDenied(why))
        return pb.CancelResponse(found=self._shell.withdraw(request_id, "cancelled by its id"))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        match request.WhichOneof("prompt"):
            case "text":
                special = not request.omit_special_tokens
                ids = await self._encoder.encode_text(request.text, add_special_tokens=special)
            case "conversation":
                ids = await self._encode_conversation(request.conversation)
            case None:
                raise InvalidRequest("prompt", "is missing; give text or conversation")
        return pb.TokenizeResponse(ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        ids = list(request.ids)
        self._check_token_ids("ids", ids)
        return pb.DetokenizeResponse(text=self._encoder.decode(ids, skip_special_tokens=request.skip_special_tokens))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        model = self._shell.model
        if model is None:
            raise Unavailable("workers", "none has connected yet, so the model is not known")
        return pb.GetModelInfoResponse(model=MODEL.message(model), chat_template=self._encoder.chat_template)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        core, model = self._shell.core, self._shell.model
        layout = core.fleet.layout
        return pb.GetStatusResponse(
            dispatcher_id=self._identity.dispatcher_id,
            version=__version__,
            layout=LAYOUT.message(layout) if layout is not None else None,
            workers=self._worker_statuses(),
            model=MODEL.message(model) if model is not None else None,
            backlog_request_count=len(core.backlog),
            backlog_token_count=core.backlog.token_count,
            running_request_count=core.fleet.placed_count + core.moving_count,
            max_queued_request_count=self._bounds.max_queued_request_count,
            max_queued_token_count=self._bounds.max_queued_token_count,
            requests_total=dict(core.endings),
            draining=core.draining,
            uptime_s=self._clock.now_s() - self._started_at_s,
            state_server_reachable=self._claims.reachable,
            planner_address=self._planner.address,
            recent=times_to_proto(
                self._shell.chronicle.times(self._clock.now_s()),
                generated_tokens_total=core.relayed_token_count,
                replays_total=core.replay_count,
            ),
        )

    async def DescribeRequest(self, request: pb.DescribeRequestRequest, context: Context) -> pb.DescribeRequestResponse:
        at_s = self._clock.now_s()
        account = self._shell.chronicle.find(RequestId(request.request_id), at_s)
        if account is None:
            why = "neither is such a request served here nor is it among the last that ended here"
            raise NotFound(f"{request.request_id or 'a request id is needed'}: {why}")
        return account_to_proto(account, self._identity.dispatcher_id, at_s)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._shell.drain()
        return pb.DrainResponse(running_request_count=len(self._shell.core.requests))

    async def DrainWorker(self, request: pb.DrainWorkerRequest, context: Context) -> pb.DrainWorkerResponse:
        if not request.worker_id:
            raise InvalidRequest("worker_id", "must not be empty")
        left_s = remaining_s(context)
        timeout_s = _PLANNER_TIMEOUT_S if left_s is None else min(left_s, _PLANNER_TIMEOUT_S)
        worker_id = WorkerId(request.worker_id)
        epoch = await self._planner.drain_worker(worker_id, request.request_id or str(uuid.uuid4()), timeout_s)
        return pb.DrainWorkerResponse(
            epoch=epoch, running_request_count=self._shell.core.fleet.request_count_at(worker_id)
        )

    # --------------------------------------------------------------------------------------------- generate

    async def _relay(
        self,
        stream: ClientStream,
        claim: _Claim | None,
        request: Request,
        *,
        collect: bool,
        context: Context,
    ) -> None:
        is_first = True
        while True:
            delivery = await (stream.take_all() if collect else stream.take())
            if is_first and claim is not None:
                await claim.task  # raises if another dispatcher serves this id; it has had the time of the first token
            ending = delivery.ending
            if ending is not None and not isinstance(ending, Finish):
                if delivery.token_ids and not collect:
                    await context.write(self._response(request, delivery, is_first=is_first))
                raise ending.error
            await context.write(self._response(request, delivery, is_first=is_first))
            if ending is not None:
                return
            is_first = False

    def _claim(self, message: pb.GenerateRequest, request: Request, stream: ClientStream) -> _Claim | None:
        """An id that we minted is ours anyway. Runs beside the request: the first token need not wait for it.

        A request that was refused claims nothing: with the same id another one may be served here.
        """
        if not message.request_id or stream.ending is not None:
            return None
        ttl_s, serial = request.deadline_at_s - self._clock.now_s(), next(self._claim_serials)
        return _Claim(serial, asyncio.create_task(self._claims.claim(request.request_id, serial, ttl_s), name="claim"))

    async def _accepted(self, message: pb.GenerateRequest, context: Context) -> Request:
        """The request, checked; what is wrong with it is told to the client and noted."""
        try:
            self._refuse_if_draining()
            return await self._request_from_proto(message, context)
        except BallastError as error:
            if isinstance(error, InvalidRequest):
                self._shell.turned_away(RequestId(message.request_id), error, None)
            raise

    def _refuse_if_draining(self) -> None:
        """Before work is put into a request that the core will refuse."""
        if self._shell.core.draining:
            raise Unavailable(self._identity.dispatcher_id, "is draining; use another dispatcher")

    async def _request_from_proto(self, message: pb.GenerateRequest, context: Context) -> Request:
        arrived_at_s = self._clock.now_s()
        left_s = remaining_s(context)
        if len(message.request_id) > _MAX_REQUEST_ID_CHARS:
            raise InvalidRequest("request_id", f"has {len(message.request_id)} characters, at most 128 are allowed")
        priority = PRIORITY.member(message.priority, "priority")
        sampling = SAMPLING.record(message.sampling)
        if sampling.grammar is not None:
            await self._encoder.check_grammar(sampling.grammar)
        prompt = await self._encode_prompt(message)
        longest_s = self._bounds.max_deadline_s
        return Request(
            request_id=RequestId(message.request_id or str(uuid.uuid4())),
            prompt_token_ids=prompt,
            sampling=self._complete(
                sampling,
                prompt,
                may_shorten=message.fit_max_tokens or not message.sampling.HasField("max_tokens"),
            ),
            priority=priority,
            deadline_at_s=arrived_at_s + (longest_s if left_s is None else min(left_s, longest_s)),
            omit_text=message.omit_text,
            caller=context.peer(),
            traceparent=_traceparent(context),
        )

    async def _encode_prompt(self, message: pb.GenerateRequest) -> Sequence[int]:
        match message.WhichOneof("prompt"):
            case "token_ids":
                self._check_length(len(message.token_ids.ids))  # before a copy is made: millions fit into a message
                ids = list(message.token_ids.ids)
                self._check_token_ids("token_ids", ids)
            case "text":
                ids = await self._encoder.encode_text(message.text)
            case "conversation":
                ids = await self._encode_conversation(message.conversation)
            case None:
                raise InvalidRequest("prompt", "is missing; give text, token_ids or conversation")
        if not ids:
            raise InvalidRequest("prompt", "is empty; at least one token is needed")
        self._check_length(len(ids))
        return ids

    async def _encode_conversation(self, conversation: pb.Conversation) -> Sequence[int]:
        if len(conversation.messages) > _MAX_TURNS:
            why = f"has {len(conversation.messages)} messages, at most {_MAX_TURNS} are allowed"
            raise InvalidRequest("conversation.messages", why)
        messages = [
            {
                "role": m.role,
                "content": m.content,
                **_json_object(f"conversation.messages[{i}].extra_json", m.extra_json),
            }
            for i, m in enumerate(conversation.messages)
        ]
        variables = _json_object("conversation.template_variables_json", conversation.template_variables_json)
        return await self._encoder.encode_conversation(messages, variables)

    def _check_token_ids(self, field: str, ids: Sequence[int]) -> None:
        """Against the vocabulary, once a worker has told it; the worker checks again."""
        model = self._shell.model
        vocab_size = model.vocab_size if model is not None else 1 << 31
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            at, token_id = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
            raise InvalidRequest(f"{field}[{at}]", f"{token_id} is outside the vocabulary [0, {vocab_size})")

    def _check_length(self, token_count: int) -> None:
        model = self._shell.model
        longest = _MAX_PROMPT_TOKENS if model is None else min(_MAX_PROMPT_TOKENS, model.max_model_len - 1)
        if token_count > longest:
            why = f"has {token_count} tokens; with one generated token at most {longest} fit"
            raise InvalidRequest("prompt", why if model is None else f"{why} (max_model_len {model.max_model_len})")

    def _complete(self, sampling: SamplingParams, prompt: Sequence[int], *, may_shorten: bool) -> SamplingParams:
        """Draws a seed where there is none, and fits max_tokens to the model's length.

        Like in vLLM, a max_tokens that was asked for and does not fit is an error, and the default is shortened.
        """
        changes: dict[str, int] = {}
        self._check_token_ids("sampling.logit_bias", list(sampling.logit_bias))
        if sampling.seed is None:
            changes["seed"] = secrets.randbits(63)
        model = self._shell.model
        if model is not None and len(prompt) + sampling.max_tokens > model.max_model_len:
            room = model.max_model_len - len(prompt)
            if not may_shorten:
                why = f"{sampling.max_tokens} and a prompt of {len(prompt)} tokens exceed max_model_len"
                raise InvalidRequest("sampling.max_tokens", f"{why} {model.max_model_len}; at most {room} fit")
            changes["max_tokens"] = room
        return replace(sampling, **changes) if changes else sampling

    def _response(self, request: Request, delivery: Delivery, *, is_first: bool) -> pb.GenerateResponse:
        response = _response(request, delivery, is_first=is_first)
        if not request.omit_text:
            for logprobs in response.logprobs:
                for entry in (logprobs.chosen, *logprobs.top):
                    entry.token = self._encoder.token_bytes(entry.token_id)
        return response

    # --------------------------------------------------------------------------------------------- status

    def _worker_statuses(self) -> list[pb.WorkerStatus]:
        """Everybody in the layout. A leader's report is its group's; the others are connected if it is."""
        fleet = self._shell.core.fleet
        statuses: list[pb.WorkerStatus] = []
        for group in fleet.layout.groups if fleet.layout is not None else ():
            leader = fleet.member(group.leader.worker_id)
            for member in group.members:
                load = leader.load if leader is not None and member is group.leader else None
                status = pb.WorkerStatus(
                    worker_id=member.worker_id,
                    incarnation=member.incarnation,
                    address=member.address,
                    group_id=group.group_id,
                    connected=leader is not None and leader.connected,
                    load=LOAD.message(load) if load is not None else None,
                )
                statuses.append(status)
        return sorted(statuses, key=lambda status: status.worker_id)


def _json_object(field: str, text: str) -> Mapping[str, object]:
    if not text:
        return {}
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(field, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(field, "must be a JSON object")
    return cast(Mapping[str, object], value)


def _traceparent(context: Context) -> str:
    """What W3C's header of this name says, for `tracing` to read; empty if the caller sent none."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return str(value)[:64]
    return ""


def _response(request: Request, delivery: Delivery, *, is_first: bool) -> pb.GenerateResponse:
    response = pb.GenerateResponse(request_id=request.request_id, token_ids=delivery.token_ids, text=delivery.text)
    if delivery.logprobs:
        response.logprobs.extend(cast(Sequence[cluster_pb2.Logprobs], delivery.logprobs))
    if is_first:
        response.prompt_token_count = len(request.prompt_token_ids)
    ending = delivery.ending
    if isinstance(ending, Finish):
        facts = ending.facts
        response.finish_reason = finish_to_proto(FinishReason(ending.finish_reason))
        response.matched_stop = ending.matched_stop
        response.usage.CopyFrom(
            pb.Usage(
                prompt_token_count=facts.prompt_token_count,
                completion_token_count=facts.completion_token_count,
                replay_count=facts.replay_count,
                queue_s=facts.queue_s,
                ttft_s=facts.ttft_s or 0.0,
                e2e_s=facts.e2e_s,
                seed=request.sampling.seed or 0,
            )
        )
    return response

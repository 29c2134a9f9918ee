"""InferenceService (protos/ballastpb/inference/v1): validates requests and converts protobuf."""

import asyncio
import itertools
import json
import math
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, cast

import grpc.aio

from ballast import __version__
from ballast.common.clock import Clock
from ballast.common.errors import (
    AlreadyExists,
    BallastError,
    Cancelled,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from ballast.common.ids import RequestId, WorkerId
from ballast.common.sampling import FinishReason, SamplingParams
from ballast.common.targets import TARGET_HEADERS, Targets, seconds_of
from ballast.rpc.callers import caller, caller_name
from ballast.rpc.codec import LAYOUT, LOAD, MODEL, PRIORITY, SAMPLING, finish_to_proto
from ballast.rpc.deadline import remaining_s
from ballast.service.otlp import Context as TraceContext
from ballast.service.security import refuse
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb
from ballastpb.inference.v1 import inference_pb2_grpc
from services.dispatcher.core.events import Finish, Request
from services.dispatcher.describing import TIMES, account_to_proto, past_to_proto
from services.dispatcher.resuming import Resumption, digest_of, resumption_from_proto
from services.dispatcher.shell.chronicle import WINDOW_S
from services.dispatcher.shell.clients import ClientStream, Delivery
from services.dispatcher.shell.dispatcher import DispatcherShell
from services.dispatcher.shell.links import Identity
from services.dispatcher.shell.ports import Claim, PlannerPort, RequestClaims
from services.dispatcher.text import PromptEncoder

# Any: grpc.aio has no better type for the context's messages.
Context = grpc.aio.ServicerContext[Any, Any]

_MAX_REQUEST_ID_CHARS = 128
_MAX_SALT_CHARS = 256
_LOGPROBS_AT_ONCE = 64
_MAX_TURNS = 8192  # maximum number of messages in a conversation
_PLANNER_TIMEOUT_S = 10.0
_CALLERS_TOLD = 10
_MAX_DETOKENIZED = 1 << 17
# A prompt of this many tokens, and the same number of generated ones, fit into one message to a worker.
_MAX_PROMPT_TOKENS = 1_000_000
_MAX_PROMPT_LOGPROBS = 1 << 18  # maximum count of prompt logprobs, because they are sent in one message


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingBounds:
    max_deadline_s: float
    max_queued_request_count: int
    max_queued_token_count: int
    resume: bool


@dataclass(eq=False, slots=True)
class _Service:
    """A request served here. `stream`: None until the request is submitted. `claiming`: task that claims its id while
    it is served.
    """

    request: Request
    resumption: Resumption | None
    caller: str  # name of the token that authenticated its caller
    claim: Claim | None  # None: the id was generated here
    stream: ClientStream | None = None
    claiming: asyncio.Task[bool] | None = None

    @property
    def attempt(self) -> int:
        return self.resumption.attempt if self.resumption is not None else 1


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
        traces: bool = False,
    ) -> None:
        """`traces`: True starts a trace for requests that have none."""
        self._traces = traces
        self._planner = planner
        self._shell = shell
        self._claims = claims
        self._encoder = encoder
        self._identity = identity
        self._bounds = bounds
        self._clock = clock
        self._started_at_s = clock.now_s()
        self._claim_serials = itertools.count(1)
        self._served: dict[RequestId, _Service] = {}

    # Writes to the context instead of yielding, which is cheaper per token, and a cancelled call ends here at once.
    async def Generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        service = await self._accepted(request, context)
        try:
            stream = await self._open(service)
            await self._relay(stream, service, collect=request.collect, context=context)
        except asyncio.CancelledError:
            if service.stream is None or not service.stream.given_up:
                raise
            # gRPC sends no status for a cancelled call, but without a status a reading client would wait forever.
            raise Cancelled(service.stream.given_up) from None
        finally:
            self._close(service)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        if not request.request_id:
            raise InvalidRequest("request_id", "must not be empty")
        request_id, who = RequestId(request.request_id), caller()
        service = self._served.get(request_id)
        if service is not None and service.caller != who.name and not who.operates:
            why = f"request {request_id} was started with another token; to cancel it needs the role operate"
            refuse("not_owner", PermissionDenied(why))
        if service is not None and service.claim is not None:
            await self._claims.cancel(service.claim)  # first, because otherwise its client could resume it
        return pb.CancelResponse(found=self._shell.withdraw(request_id, "cancelled by its id"))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        match request.WhichOneof("prompt"):
            case "text":
                special = not request.omit_special_tokens
                ids = await self._encoder.encode_text(
                    request.text, add_special_tokens=special, longest=self._longest_prompt()
                )
            case "conversation":
                ids = await self._encode_conversation(request.conversation)
            case None:
                raise InvalidRequest("prompt", "is missing; give text or conversation")
        return pb.TokenizeResponse(ids=ids)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        if len(request.ids) > _MAX_DETOKENIZED:
            raise InvalidRequest("ids", f"has {len(request.ids):,} tokens, at most {_MAX_DETOKENIZED:,} are allowed")
        ids = list(request.ids)
        self._check_token_ids("ids", ids)
        return pb.DetokenizeResponse(text=self._encoder.decode(ids, skip_special_tokens=request.skip_special_tokens))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        model = self._shell.model
        if model is None:
            raise Unavailable("workers", "none has connected yet, so the model is not known")
        return pb.GetModelInfoResponse(
            model=MODEL.message(replace(model, max_model_len=self._shell.max_model_len or model.max_model_len)),
            chat_template=self._encoder.chat_template,
            default_sampling=self._encoder.default_sampling,
        )

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        core, model = self._shell.core, self._shell.model
        layout, kept_out = core.fleet.layout, await self._planner.kept_out()
        return pb.GetStatusResponse(
            dispatcher_id=self._identity.dispatcher_id,
            version=__version__,
            layout=LAYOUT.message(layout) if layout is not None else None,
            workers=self._worker_statuses(),
            model=MODEL.message(model) if model is not None else None,
            backlog_request_count=len(core.backlog) + len(core.long),
            backlog_token_count=core.backlog.distinct_token_count,
            offline_queued_count=len(core.feed),
            running_request_count=core.fleet.placed_count + core.moving_count,
            max_queued_request_count=self._bounds.max_queued_request_count,
            max_queued_token_count=self._bounds.max_queued_token_count,
            requests_total=dict(core.endings),
            draining=core.draining,
            uptime_s=self._clock.now_s() - self._started_at_s,
            state_server_reachable=self._claims.reachable,
            planner_address=self._planner.address,
            recent=TIMES.message(
                self._shell.chronicle.times(self._clock.now_s()),
                window_s=WINDOW_S,
                generated_tokens_total=core.relay.token_count,
                replays_total=core.replay_count,
            ),
            kept_out=kept_out,
            waiting_by_caller=dict(core.backlog.most_of(_CALLERS_TOLD)) if caller().operates else {},
        )

    async def DescribeRequest(self, request: pb.DescribeRequestRequest, context: Context) -> pb.DescribeRequestResponse:
        at_s = self._clock.now_s()
        account = self._shell.chronicle.find(RequestId(request.request_id), at_s)
        if account is None:
            why = "no such request is running here or among the last that ended here"
            raise NotFound(f"{request.request_id or 'a request id is needed'}: {why}")
        return account_to_proto(account, self._identity.dispatcher_id, at_s)

    async def ListEnded(self, request: pb.ListEndedRequest, context: Context) -> pb.ListEndedResponse:
        chronicle, at_s, now_unix_s = self._shell.chronicle, self._clock.now_s(), time.time()
        after = request.after if request.HasField("after") else chronicle.past_count
        past = chronicle.past_after(after)
        oldest_s = min((tracked.arrived_at_s for tracked in self._shell.core.requests.values()), default=None)
        return pb.ListEndedResponse(
            requests=[past_to_proto(one, now_unix_s, at_s) for one in past],
            last=chronicle.past_count,
            forgotten_count=max(0, chronicle.past_count - after) - len(past),
            oldest_open_unix_s=None if oldest_s is None else now_unix_s - (at_s - oldest_s),
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._shell.drain()
        return pb.DrainResponse(running_request_count=len(self._shell.core.requests))

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.UndrainResponse:
        if not self._shell.undrain():
            raise Unavailable(self._identity.dispatcher_id, "is shutting down, which cannot be undone")
        return pb.UndrainResponse()

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

    def taken(self, request_id: RequestId, serial: int) -> None:
        """Withdraw a request that its client has resumed on another dispatcher. `serial`: of the claim made here."""
        service = self._served.get(request_id)
        if service is not None and service.claim is not None and service.claim.serial == serial:
            self._shell.withdraw(request_id, "its client continues it on another dispatcher")

    async def _open(self, service: _Service) -> ClientStream:
        """Submit the request and claim its id. A later attempt is claimed before submission, a first attempt while it
        is served.
        """
        request, claim = service.request, service.claim
        if claim is not None and service.attempt > 1:
            self._refuse_if_served(claim)  # before this dispatcher's own claim is replaced
            was_elsewhere = await self._claims.claim(claim, self._ttl_s(request))
            if self._end_earlier(claim) or was_elsewhere:
                service.request = request = replace(request, taken_over=True)
        service.stream = stream = self._shell.open(request)
        self._served.setdefault(request.request_id, service)
        # A refused request has no claim, because another one with the same id may be served here.
        if claim is not None and service.attempt == 1 and stream.ending is None:
            service.claiming = asyncio.create_task(self._claims.claim(claim, self._ttl_s(request)), name="claim")
        return stream

    def _refuse_if_served(self, claim: Claim) -> None:
        """Raise AlreadyExists unless the request served here is an earlier attempt of the same client."""
        other = self._served.get(claim.request_id)
        if other is not None and (other.claim is None or not claim.follows(other.claim)):
            raise AlreadyExists(f"request {claim.request_id} is being served")

    def _end_earlier(self, claim: Claim) -> bool:
        """End an earlier attempt of the same client that lost its connection. Returns True if there was one."""
        earlier = self._served.get(claim.request_id)
        if earlier is None or earlier.claim is None or not claim.follows(earlier.claim):
            return False
        del self._served[claim.request_id]
        return self._shell.withdraw(claim.request_id, "its client continues it over another connection")

    def _close(self, service: _Service) -> None:
        if service.stream is not None:
            self._shell.close(service.stream, "the client disconnected")
        if self._served.get(service.request.request_id) is service:  # otherwise another request now has the same id
            del self._served[service.request.request_id]
        if service.claiming is not None:
            service.claiming.cancel()
        if service.claim is not None and (service.claiming is not None or service.attempt > 1):
            self._claims.release(service.claim)

    def _ttl_s(self, request: Request) -> float:
        return request.deadline_at_s - self._clock.now_s()

    async def _relay(self, stream: ClientStream, service: _Service, *, collect: bool, context: Context) -> None:
        is_first = True
        while True:
            delivery = await (stream.take_all() if collect else stream.take())
            if is_first and service.claiming is not None:
                await service.claiming  # raises if another dispatcher serves this id
            ending = delivery.ending
            if ending is not None and not isinstance(ending, Finish):
                if delivery.token_ids and not collect:
                    await context.write(await self._response(service, delivery, is_first=is_first))
                raise ending.error
            await context.write(await self._response(service, delivery, is_first=is_first))
            if ending is not None:
                return
            is_first = False

    async def _accepted(self, message: pb.GenerateRequest, context: Context) -> _Service:
        """Validate a request. An InvalidRequest is recorded before it is raised."""
        try:
            self._refuse_if_draining()
            resumption = resumption_from_proto(message, allowed=self._bounds.resume)
            request = await self._request_from_proto(message, context, resumption)
            claim = self._claim(request.request_id, resumption) if message.request_id else None
            return _Service(request, resumption, caller().name, claim)
        except BallastError as error:
            if isinstance(error, InvalidRequest):
                self._shell.record_refused(RequestId(message.request_id), error, None)
            raise

    def _claim(self, request_id: RequestId, resumption: Resumption | None) -> Claim:
        serial = next(self._claim_serials)
        if resumption is None:
            return Claim(request_id, serial)
        return Claim(request_id, serial, resumption.attempt, resumption.secret_hash)

    def _refuse_if_draining(self) -> None:
        """Raise Unavailable while draining, before doing any work for a request that the core would refuse."""
        if self._shell.core.draining:
            raise Unavailable(self._identity.dispatcher_id, "is draining; use another dispatcher")

    async def _request_from_proto(
        self, message: pb.GenerateRequest, context: Context, resumption: Resumption | None
    ) -> Request:
        arrived_at_s = self._clock.now_s()
        left_s = remaining_s(context)
        if len(message.request_id) > _MAX_REQUEST_ID_CHARS:
            raise InvalidRequest("request_id", f"has {len(message.request_id)} characters, at most 128 are allowed")
        priority = PRIORITY.member(message.priority, "priority")
        if priority not in caller().classes:
            may_use = ", ".join(sorted(caller().classes))
            raise PermissionDenied(f"the token {caller().name} may use the classes {may_use}, but not {priority}")
        sampling = SAMPLING.record(message.sampling)
        self._check_adapter(sampling.adapter)
        output = resumption.token_ids if resumption is not None else ()
        self._check_token_ids("resumption.token_ids", output)
        if sampling.grammar is not None:
            await self._encoder.check_grammar(sampling.grammar, output, caller_name(context))
        prompt = await self._encode_prompt(message)
        may_shorten = message.fit_max_tokens or not message.sampling.HasField("max_tokens")
        completed = self._complete(sampling, prompt, may_shorten=may_shorten)
        if resumption is not None:
            is_fixed = sampling.seed is not None or sampling.greedy
            resumption.check(prompt, completed.max_tokens, is_reproducible=is_fixed)
        longest_s = self._bounds.max_deadline_s
        return Request(
            request_id=RequestId(message.request_id or str(uuid.uuid4())),
            prompt_token_ids=prompt,
            sampling=completed,
            priority=priority,
            deadline_at_s=arrived_at_s + (longest_s if left_s is None else min(left_s, longest_s)),
            omit_text=message.omit_text,
            caller=caller_name(context),
            traceparent=_traceparent(context) or (TraceContext.new().traceparent if self._traces else ""),
            output_token_ids=output,
            text_chars=resumption.text_char_count if resumption is not None else 0,
            cache_salt=_cache_salt(message.cache_salt, sampling.adapter),
            targets=targets_of(context),
        )

    async def _encode_prompt(self, message: pb.GenerateRequest) -> Sequence[int]:
        match message.WhichOneof("prompt"):
            case "token_ids":
                self._check_length(len(message.token_ids.ids))  # before copying, because a message may contain millions
                ids = list(message.token_ids.ids)
                self._check_token_ids("token_ids", ids)
            case "text":
                ids = await self._encoder.encode_text(message.text, longest=self._longest_prompt())
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
        return await self._encoder.encode_conversation(messages, variables, self._longest_prompt())

    def _check_adapter(self, name: str) -> None:
        model = self._shell.model
        known = [] if model is None else [adapter.name for adapter in model.adapters]
        if name and model is not None and name not in known:
            raise InvalidRequest("sampling.adapter", f"{name!r} is not served; served: {', '.join(known) or 'none'}")

    def _check_token_ids(self, field: str, ids: Sequence[int]) -> None:
        """Raise InvalidRequest for ids outside the vocabulary, once a worker has reported its size. Workers check them,
        too.
        """
        model = self._shell.model
        vocab_size = model.vocab_size if model is not None else 1 << 31
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            at, token_id = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
            raise InvalidRequest(f"{field}[{at}]", f"{token_id} is outside the vocabulary [0, {vocab_size})")

    def _longest_prompt(self) -> int:
        """Maximum length of a prompt, in tokens."""
        most = self._shell.max_model_len
        return _MAX_PROMPT_TOKENS if most is None else min(_MAX_PROMPT_TOKENS, most - 1)

    def _check_length(self, token_count: int) -> None:
        most, longest = self._shell.max_model_len, self._longest_prompt()
        if token_count > longest:
            why = f"has {token_count} tokens; with one generated token at most {longest} fit"
            raise InvalidRequest("prompt", why if most is None else f"{why} (max_model_len {most})")

    def _complete(self, sampling: SamplingParams, prompt: Sequence[int], *, may_shorten: bool) -> SamplingParams:
        """Validate sampling parameters and add a seed, the tokens of bad words, and max_tokens within the context.

        As in vLLM, a requested max_tokens that does not fit is an error, while a default is reduced. The bound is the
        model's maximum length rather than the cluster's current capacity, because instances are added and removed, a
        resumed answer must not exceed its limit, and few answers are as long as their limit.
        """
        changes: dict[str, Any] = {}  # Any: values of fields
        if sampling.prompt_logprobs is not None:
            count = len(prompt) * (1 + sampling.prompt_logprobs)
            if count > _MAX_PROMPT_LOGPROBS:
                why = f"of {len(prompt)} tokens are {count:,} numbers; at most {_MAX_PROMPT_LOGPROBS:,} fit"
                raise InvalidRequest("sampling.prompt_logprobs", f"{why}: request fewer alternatives")
        self._check_token_ids("sampling.logit_bias", list(sampling.logit_bias))
        self._check_token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids)
        for ids in sampling.bad_words_token_ids:
            self._check_token_ids("sampling.bad_words_token_ids", ids)
        if sampling.bad_words:
            found = (*sampling.bad_words_token_ids, *self._encoder.encode_bad_words(sampling.bad_words))
            changes |= {"bad_words": (), "bad_words_token_ids": found}
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

    async def _response(self, service: _Service, delivery: Delivery, *, is_first: bool) -> pb.GenerateResponse:
        request = service.request
        response = _response(request, delivery, is_first=is_first and not request.output_token_ids)
        if is_first and service.resumption is not None:
            response.prompt_digest = digest_of(request.prompt_token_ids)
        if not request.omit_text:
            prompt = response.logprobs[0].prompt if response.logprobs else ()
            for count, logprobs in enumerate(itertools.chain(prompt, response.logprobs), start=1):
                if count % _LOGPROBS_AT_ONCE == 0:
                    await asyncio.sleep(0)  # yield, because a collected answer may have tens of thousands of tokens
                for entry in (logprobs.chosen, *logprobs.top):
                    entry.token = self._encoder.token_bytes(entry.token_id)
        return response

    # --------------------------------------------------------------------------------------------- status

    def _worker_statuses(self) -> list[pb.WorkerStatus]:
        """Return the status of each member of the layout. Only leaders have a load report, which is that of their
        group. All members of a group have the connection state of its leader.
        """
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


def _cache_salt(given: str, adapter: str) -> bytes:
    """Return the salt of a request's cached KV; empty if it may share KV with all requests. Callers with differently
    named tokens never share KV, because response times would reveal the prompts of others. Requests with different
    adapters cannot share KV.
    """
    if len(given) > _MAX_SALT_CHARS:
        raise InvalidRequest("cache_salt", f"has {len(given)} characters, at most {_MAX_SALT_CHARS} are allowed")
    name = caller().name if caller().has_token else ""
    if not (name or given or adapter):
        return b""
    key = blake2b(adapter.encode()).digest() if adapter else b""
    return blake2b(f"{name}\0{given}".encode(), digest_size=16, key=key).digest()


def _traceparent(context: Context) -> str:
    """Return the W3C traceparent header; empty if there is none."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return str(value)[:64]
    return ""


def targets_of(context: Context) -> Targets:
    """Return the latency targets from the headers of a call; infinity for a missing one.

    Raises:
        InvalidRequest: a header is not a positive number of seconds.
    """
    headers = {key: str(value) for key, value in context.invocation_metadata() or () if key in TARGET_HEADERS}
    found: list[float] = []
    for name in TARGET_HEADERS:
        try:
            found.append(seconds_of(headers[name]) if name in headers else math.inf)
        except ValueError as error:
            raise InvalidRequest(name, str(error)) from error
    return Targets(*found)


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
                cached_token_count=facts.cached_token_count,
                seed=request.sampling.seed or 0,
            )
        )
    return response

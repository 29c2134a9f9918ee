"""Protobuf of the inference service <-> the SDK's types."""

import json
from collections.abc import Iterable, Mapping, Sequence

from ballast.client.types import (
    ChatMessage,
    ClusterStatus,
    GenerationChunk,
    Logprobs,
    RecentTimes,
    RequestMoment,
    RequestStory,
    TokenLogprob,
    Usage,
    WorkerStatus,
)
from ballast.common.errors import InvalidRequest
from ballast.common.sampling import PriorityClass, SamplingParams
from ballast.rpc import codec
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb

Messages = Sequence[ChatMessage | Mapping[str, object]]


def request_to_proto(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Messages | None,
    sampling: SamplingParams,
    *,
    template_variables: Mapping[str, object] | None,
    fit_max_tokens: bool,
    request_id: str,
    priority: PriorityClass,
    include_text: bool,
    collect: bool,
) -> pb.GenerateRequest:
    """Raises InvalidRequest unless there is exactly one well-formed prompt."""
    require_one_prompt(prompt=prompt, token_ids=token_ids, messages=messages)
    request = pb.GenerateRequest(
        request_id=request_id,
        sampling=codec.SAMPLING.message(sampling),
        priority=codec.PRIORITY.number_of[priority],
        omit_text=not include_text,
        collect=collect,
        fit_max_tokens=fit_max_tokens,
    )
    if prompt is not None:
        request.text = checked_text("prompt", prompt)
    elif token_ids is not None:
        try:
            request.token_ids.ids.extend(token_ids)
        except (ValueError, TypeError) as error:
            raise InvalidRequest("token_ids", f"must be whole numbers below 2**31: {error}") from error
        request.token_ids.SetInParent()  # an empty list is a prompt as well; the dispatcher refuses it by name
    else:
        request.conversation.CopyFrom(conversation_to_proto(messages or (), template_variables))
    return request


def require_one_prompt(**given: object) -> None:
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise InvalidRequest("prompt", f"give one of {', '.join(given)}; got {' and '.join(names) or 'none'}")


def checked_text(field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode text: {error.reason} at {error.start}") from error
    return text


def conversation_to_proto(messages: Messages, template_variables: Mapping[str, object] | None) -> pb.Conversation:
    conversation = pb.Conversation()
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if isinstance(message, Mapping):
            message = _message_from_mapping(field, message)
        role = checked_text(f"{field}.role", message.role)
        content = checked_text(f"{field}.content", message.content)
        extra = _json(field, message.extra) if message.extra else ""
        conversation.messages.append(pb.ChatMessage(role=role, content=content, extra_json=extra))
    if template_variables:
        conversation.template_variables_json = _json("template_variables", template_variables)
    return conversation


def _message_from_mapping(field: str, message: Mapping[str, object]) -> ChatMessage:
    role, content = message.get("role"), message.get("content")
    extra = {name: value for name, value in message.items() if name not in ("role", "content")}
    if content is None and extra:  # an assistant's message may have nothing but tool calls
        content, extra = "", {**extra, "content": None}
    if not isinstance(role, str) or not isinstance(content, str):
        raise InvalidRequest(field, f"needs role and content as strings, has {', '.join(sorted(message))}")
    return ChatMessage(role, content, extra)


def _json(field: str, value: Mapping[str, object]) -> str:
    try:
        return checked_text(field, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"cannot be written as JSON: {error}") from error


def chunk_from_proto(response: pb.GenerateResponse) -> GenerationChunk:
    return GenerationChunk(
        request_id=response.request_id,
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=_logprobs_from_proto(response.logprobs) if response.logprobs else (),
        prompt_token_count=response.prompt_token_count,
        finish_reason=codec.finish_from_proto(response.finish_reason),
        matched_stop=response.matched_stop or None,
        usage=_usage_from_proto(response.usage) if response.HasField("usage") else None,
    )


def _logprobs_from_proto(messages: Iterable[cluster_pb2.Logprobs]) -> tuple[Logprobs, ...]:
    return tuple(
        Logprobs(
            TokenLogprob(message.chosen.token_id, message.chosen.logprob, message.chosen.token),
            tuple(TokenLogprob(t.token_id, t.logprob, t.token) for t in message.top),
        )
        for message in messages
    )


def _usage_from_proto(usage: pb.Usage) -> Usage:
    return Usage(
        prompt_token_count=usage.prompt_token_count,
        completion_token_count=usage.completion_token_count,
        replay_count=usage.replay_count,
        queue_s=usage.queue_s,
        ttft_s=usage.ttft_s,
        e2e_s=usage.e2e_s,
        seed=usage.seed,
    )


def status_from_proto(response: pb.GetStatusResponse, address: str) -> ClusterStatus:
    return ClusterStatus(
        dispatcher_id=response.dispatcher_id,
        address=address,
        version=response.version,
        layout=codec.LAYOUT.record(response.layout) if response.HasField("layout") else None,
        model=codec.MODEL.record(response.model) if response.HasField("model") else None,
        workers=tuple(_worker_from_proto(worker) for worker in response.workers),
        backlog_request_count=response.backlog_request_count,
        backlog_token_count=response.backlog_token_count,
        running_request_count=response.running_request_count,
        max_queued_request_count=response.max_queued_request_count,
        max_queued_token_count=response.max_queued_token_count,
        requests_total=dict(sorted(response.requests_total.items())),
        draining=response.draining,
        uptime_s=response.uptime_s,
        state_server_reachable=response.state_server_reachable,
        planner_address=response.planner_address,
        recent=_recent_from_proto(response.recent),
    )


def _recent_from_proto(recent: pb.RecentTimes) -> RecentTimes:
    return RecentTimes(
        window_s=recent.window_s,
        first_token_count=recent.first_token_count,
        ttft_p50_s=recent.ttft_p50_s,
        ttft_p99_s=recent.ttft_p99_s,
        tpot_p50_s=recent.tpot_p50_s,
        tpot_p99_s=recent.tpot_p99_s,
        longest_wait_s=recent.longest_wait_s,
        generated_tokens_total=recent.generated_tokens_total,
        replays_total=recent.replays_total,
    )


def story_from_proto(response: pb.DescribeRequestResponse) -> RequestStory:
    return RequestStory(
        request_id=response.request_id,
        dispatcher_id=response.dispatcher_id,
        state=response.state,
        error=response.error,
        age_s=response.age_s,
        priority=response.priority,
        caller=response.caller,
        prompt_token_count=response.prompt_token_count,
        completion_token_count=response.completion_token_count,
        max_token_count=response.max_token_count,
        queue_s=response.queue_s,
        ttft_s=response.ttft_s if response.HasField("ttft_s") else None,
        tpot_s=response.tpot_s if response.HasField("tpot_s") else None,
        e2e_s=response.e2e_s,
        replay_count=response.replay_count,
        move_count=response.move_count,
        recall_count=response.recall_count,
        longest_gap_s=response.longest_gap_s,
        longest_gap_token_count=response.longest_gap_token_count,
        moments=tuple(
            RequestMoment(
                at_s=moment.at_s,
                what=moment.what,
                worker_id=moment.worker_id,
                detail=moment.detail,
                token_count=moment.token_count,
                gap_s=moment.gap_s,
            )
            for moment in response.moments
        ),
        left_out_moment_count=response.left_out_moment_count,
    )


def _worker_from_proto(worker: pb.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        address=worker.address,
        group_id=worker.group_id,
        connected=worker.connected,
        load=codec.LOAD.record(worker.load) if worker.HasField("load") else None,
    )

"""Conversion between the SDK's types and the protobuf messages of the inference service."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ballast.client.types import (
    ChatMessage,
    ClusterStatus,
    EndedRequests,
    GenerationChunk,
    Logprobs,
    RequestStory,
    TokenLogprob,
)
from ballast.common.errors import InvalidRequest
from ballast.common.sampling import PriorityClass, SamplingParams
from ballast.rpc import codec
from ballast.rpc.mapping import Mapper, map_specially
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.inference.v1 import inference_pb2 as pb

Sampling = SamplingParams | Mapping[str, Any]  # Any: SamplingParams validates the values
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
    cache_salt: str = "",
) -> pb.GenerateRequest:
    """Make the message of a request. Raises InvalidRequest unless there is exactly one well-formed prompt."""
    require_one_prompt(prompt=prompt, token_ids=token_ids, messages=messages)
    request = pb.GenerateRequest(
        request_id=checked_text("request_id", request_id),
        sampling=codec.SAMPLING.message(sampling),
        priority=codec.PRIORITY.number_of[priority],
        omit_text=not include_text,
        collect=collect,
        fit_max_tokens=fit_max_tokens,
        cache_salt=checked_text("cache_salt", cache_salt),
    )
    if prompt is not None:
        request.text = checked_text("prompt", prompt)
    elif token_ids is not None:
        try:
            request.token_ids.ids.extend(token_ids)
        except (ValueError, TypeError) as error:
            raise InvalidRequest("token_ids", f"must be whole numbers below 2**31: {error}") from error
        request.token_ids.SetInParent()  # marks an empty list as given, so that the dispatcher's error names token_ids
    else:
        request.conversation.CopyFrom(conversation_to_proto(messages or (), template_variables))
    return request


def checked_sampling(sampling: Sampling | None, max_tokens: int | None = None) -> SamplingParams:
    """Sampling parameters from a mapping or an object, with `max_tokens` overriding theirs.

    Raises:
        InvalidRequest: a name is unknown, or a value out of range.
    """
    given: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
    if sampling is None:
        return SamplingParams(**given)
    if isinstance(sampling, SamplingParams):
        return dataclasses.replace(sampling, **given) if given else sampling
    if not isinstance(sampling, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may be untyped
        raise InvalidRequest("sampling", f"must be SamplingParams or a mapping, got {sampling!r}")
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    for name in sampling:
        if name not in known:
            raise InvalidRequest(f"sampling.{name}", f"is not known; known are {', '.join(sorted(known))}")
    return SamplingParams(**{**sampling, **given})


def require_one_prompt(**given: object) -> None:
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise InvalidRequest("prompt", f"give one of {', '.join(given)}; got {' and '.join(names) or 'none'}")


def checked_text(field: str, text: str) -> str:
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may be untyped
        raise InvalidRequest(field, f"must be text, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode text: {error.reason} at {error.start}") from error
    return text


def conversation_to_proto(messages: Messages, template_variables: Mapping[str, object] | None) -> pb.Conversation:
    conversation = pb.Conversation()
    for index, message in enumerate(messages):
        if type(cast(object, message)) is dict and len(given := cast(dict[str, object], message)) == 2:
            role, content = given.get("role"), given.get("content")  # fast path: most messages have only these two
            if isinstance(role, str) and isinstance(content, str) and role.isascii() and content.isascii():
                conversation.messages.add(role=role, content=content)
                continue
        field = f"messages[{index}]"
        if isinstance(message, Mapping):
            message = _message_from_mapping(field, message)
        elif not isinstance(message, ChatMessage):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequest(field, f"must be a ChatMessage or a mapping, got {message!r}")
        role = checked_text(f"{field}.role", message.role)
        content = checked_text(f"{field}.content", message.content)
        extra = _json(field, message.extra) if message.extra else ""
        conversation.messages.add(role=role, content=content, extra_json=extra)
    if template_variables:
        conversation.template_variables_json = _json("template_variables", template_variables)
    return conversation


def _message_from_mapping(field: str, message: Mapping[str, object]) -> ChatMessage:
    role, content = message.get("role"), message.get("content")
    extra = {name: value for name, value in message.items() if name not in ("role", "content")}
    if content is None and extra:  # an assistant's message may contain nothing but tool calls
        content, extra = "", {**extra, "content": None}
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = _joined(field, cast(Sequence[object], content))
    if not isinstance(role, str) or not isinstance(content, str):
        raise InvalidRequest(field, f"needs role and content as strings, has {', '.join(sorted(message))}")
    return ChatMessage(role, content, extra)


def _joined(field: str, parts: Sequence[object]) -> str:
    """Concatenate the texts of OpenAI's content parts. Raises InvalidRequest for a part that is not text."""
    texts: list[str] = []
    for index, part in enumerate(parts):
        given = cast(Mapping[str, object], part if isinstance(part, Mapping) else {})
        text = given.get("text")
        if given.get("type") != "text" or not isinstance(text, str):
            raise InvalidRequest(f"{field}.content[{index}]", "only parts of type text are supported")
        texts.append(text)
    return "".join(texts)


def _json(field: str, value: Mapping[str, object]) -> str:
    try:
        return checked_text(field, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, f"cannot be written as JSON: {error}") from error


def _logprobs_to_proto(logprobs: Logprobs) -> cluster_pb2.Logprobs:
    return cluster_pb2.Logprobs(
        chosen=_TOKEN.message(logprobs.chosen),
        top=map(_TOKEN.message, logprobs.top),
        prompt=map(_logprobs_to_proto, logprobs.prompt),
    )


def _logprobs_from_proto(message: cluster_pb2.Logprobs) -> Logprobs:
    prompt = tuple(map(_logprobs_from_proto, message.prompt))
    return Logprobs(_TOKEN.record(message.chosen), tuple(map(_TOKEN.record, message.top)), prompt)


_TOKEN = Mapper(TokenLogprob, cluster_pb2.TokenLogprob)
map_specially(Logprobs, cluster_pb2.Logprobs, _logprobs_to_proto, _logprobs_from_proto)
_CHUNK = Mapper(GenerationChunk, pb.GenerateResponse, given=("matched_stop",), ignored=("prompt_digest",))
_STATUS = Mapper(ClusterStatus, pb.GetStatusResponse, given=("address",))
_ENDED = Mapper(EndedRequests, pb.ListEndedResponse)
_STORY = Mapper(RequestStory, pb.DescribeRequestResponse)


def chunk_from_proto(response: pb.GenerateResponse) -> GenerationChunk:
    if not response.finish_reason and not response.logprobs:  # fast path: most have only text and tokens
        return GenerationChunk(
            request_id=response.request_id,
            text=response.text,
            token_ids=tuple(response.token_ids),
            prompt_token_count=response.prompt_token_count,
        )
    return _CHUNK.record(response, matched_stop=response.matched_stop or None)


def status_from_proto(response: pb.GetStatusResponse, address: str) -> ClusterStatus:
    return _STATUS.record(response, address=address)


def ended_from_proto(response: pb.ListEndedResponse) -> EndedRequests:
    return _ENDED.record(response)


def story_from_proto(response: pb.DescribeRequestResponse) -> RequestStory:
    return _STORY.record(response)

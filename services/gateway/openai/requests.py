"""Requests as clients send them. Fields that nobody knows are accepted and ignored, as everywhere in the field.

Beyond OpenAI's own fields these have vLLM's: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos,
skip_special_tokens, include_stop_str_in_output, return_token_ids, chat_template_kwargs; and `priority`, one of
interactive, default and batch.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.gateway.errors import invalid

_SERVICE_TIERS = Literal["auto", "default", "flex", "scale", "priority"]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class StreamOptions(_Shape):
    include_usage: bool | None = None


class GenerationRequest(_Shape):
    """What requests for text have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    service_tier: _SERVICE_TIERS | None = None

    priority: Literal["interactive", "default", "batch"] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def choice_count(self) -> int:
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    prompt: str | list[int] | list[str] | list[list[int]]  # long ones first: each number that is no text is an error
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


# Any: what a message holds beyond its role is looked at part by part, or by the chat template.
Message = dict[str, Any]


class ChatRequest(GenerationRequest):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    functions: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(_Shape):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(_Shape):
    model: str | None = None
    tokens: list[int]


R = TypeVar("R", bound=BaseModel)


def parse(shape: type[R], body: bytes) -> R:
    """Raises Failure, naming the field at fault."""
    try:
        return shape.model_validate_json(body)
    except ValidationError:
        return _parse_slowly(shape, body)


def _parse_slowly(shape: type[R], body: bytes) -> R:
    """Takes a little more (encodings, depth, halves of surrogate pairs), and knows what is wrong."""
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, Mapping):
        raise invalid(None, "the body must be a JSON object", code="invalid_json")
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        inner = ".".join(map(str, first["loc"][1:]))
        missing = first["type"] == "missing" and not inner
        why = "is missing" if missing else first["msg"] + (f" (at {inner})" if inner else "")
        raise invalid(param, why, code="missing_required_parameter" if missing else "invalid_value") from error

"""Requests as clients send them. Fields that affect the answer are honoured, or refused by name (`UNSUPPORTED`). Fields
that neither OpenAI nor vLLM has are ignored.

Beyond OpenAI's fields, requests may have vLLM's: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids,
bad_words, allowed_token_ids, ignore_eos, skip_special_tokens, include_stop_str_in_output, return_token_ids,
chat_template_kwargs; and `priority`, one of interactive, default and batch.
"""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.gateway.errors import Failure, invalid

_SERVICE_TIERS = Literal["auto", "default", "flex", "scale", "priority"]


class UsageWish(Enum):
    """Where a stream contains its usage (token counts)."""

    NONE = 0
    AT_THE_END = 1
    IN_EACH_CHUNK = 2


class _FieldShape(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class StreamOptions(_FieldShape):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_FieldShape):
    """The fields that all requests for text have in common."""

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

    priority: Literal["interactive", "default", "batch"] | int | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
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
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1)

    # these fields are refused with any value
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    logits_processors: Any = None
    prompt_embeds: Any = None
    guided_whitespace_pattern: Any = None
    structural_tag: Any = None
    thinking_token_budget: Any = None
    add_special_tokens: Any = None
    return_tokens_as_token_ids: Any = None
    repetition_detection: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None

    @property
    def choice_count(self) -> int:
        return self.n or 1

    @property
    def usage_wish(self) -> UsageWish:
        """Where a stream contains its usage. As in vLLM, include_usage: false overrides continuous_usage_stats."""
        if (options := self.stream_options) is None:
            return UsageWish.NONE
        if options.continuous_usage_stats and options.include_usage is not False:
            return UsageWish.IN_EACH_CHUNK
        return UsageWish.AT_THE_END if options.include_usage else UsageWish.NONE

    @property
    def structured(self) -> dict[str, Any] | None:
        """`structured_outputs`, or vLLM's older guided_* fields in its form. Raises Failure if both are given."""
        names = {"json": self.guided_json, "regex": self.guided_regex, "choice": self.guided_choice}
        guided = {name: value for name, value in {**names, "grammar": self.guided_grammar}.items() if value is not None}
        if self.structured_outputs and guided:
            raise invalid("structured_outputs", "and guided_* cannot both be given")
        return self.structured_outputs or guided or None


# Fields of OpenAI's and vLLM's APIs that affect the answer and are refused -> what to use instead.
UNSUPPORTED = {
    "truncate_prompt_tokens": "shorten the prompt, with the help of /tokenize",
    "use_beam_search": "use n with a temperature",
    "logits_processors": "use logit_bias",
    "prompt_embeds": "send text or token ids",
    "guided_whitespace_pattern": "write the white space into a grammar",
    "structural_tag": "use structured_outputs, or tools",
    "thinking_token_budget": "use max_tokens, or chat_template_kwargs with enable_thinking: false",
    "add_special_tokens": "send the desired token ids; see /tokenize",
    "return_tokens_as_token_ids": "use return_token_ids",
    "repetition_detection": "use repetition_penalty, or stop",
    "kv_transfer_params": "the cluster itself decides about transfers of KV",
    "vllm_xargs": "is for extensions of vLLM",
    "verbosity": "state the desired length in the conversation",
    "moderation": "use a separate moderation service",
    "chat_template": "conversations use the model's own template; /v1/completions accepts any text",
    "echo": "is for /v1/completions",
    "functions": "are OpenAI's older form; use tools",
    "function_call": "is OpenAI's older form; use tool_choice",
    "audio": "this model writes text only",
    "web_search_options": "use tools",
    "suffix": "is not supported",
}
# Values that have the same meaning as omitting the field (for function_call: if there are no functions).
_DEFAULTS = {"verbosity": ("medium",), "function_call": ("none", "auto")}
# Fields of these APIs that do not affect the answer: accepted and ignored.
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "safety_identifier", "prediction", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "request_id", "length_penalty", "spaces_between_special_tokens"),
        *("mm_processor_kwargs", "guided_decoding_backend"),
    }
)


def refuse_unsupported(request: BaseModel) -> None:
    """Raise Failure if a field of `UNSUPPORTED` has a value other than its default."""
    for name in sorted(UNSUPPORTED.keys() & request.model_fields_set):
        value: object = getattr(request, name)
        if name == "add_special_tokens" and isinstance(request, CompletionRequest):
            value = value is False  # the default of add_special_tokens is true in completions
        if value is None or value is False or value in ("", [], {}, *_DEFAULTS.get(name, ())):
            continue
        if not (name == "echo" and isinstance(request, CompletionRequest)):
            instead = UNSUPPORTED[name]
            why = instead if instead.startswith(("is ", "are ")) else f"is not supported: {instead}"
            raise invalid(name, why, code="unsupported_value")


class CompletionRequest(GenerationRequest):
    prompt: str | list[int] | list[str] | list[list[int]]  # list[int] first: pydantic tries types in this order
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


# Any: `messages` checks a message part by part; the chat template uses the rest.
Message = dict[str, Any]


class ChatRequest(GenerationRequest):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    modalities: list[str] | None = None
    functions: Any = None
    function_call: Any = None
    chat_template: Any = None
    echo: Any = None
    audio: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    moderation: Any = None
    include_reasoning: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(_FieldShape):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(_FieldShape):
    model: str | None = None
    tokens: list[int]


R = TypeVar("R", bound=BaseModel)


def parse(shape: type[R], body: bytes) -> R:
    """Parse the body of a request. Raises Failure, which names the invalid field."""
    try:
        return shape.model_validate_json(body)
    except ValidationError:
        return _parse_slowly(shape, body)


def _parse_slowly(shape: type[R], body: bytes) -> R:
    """Parse a body that pydantic's own JSON parser refuses. This parser accepts a little more (encodings, depth,
    unpaired surrogates), and otherwise its errors name the field.
    """
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, Mapping):
        raise invalid(None, "the body must be a JSON object", code="invalid_json")
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        raise refused(error) from error


def refused(error: ValidationError) -> Failure:
    """Return the failure that names a request's invalid field."""
    first = error.errors(include_url=False)[0]
    param = str(first["loc"][0]) if first["loc"] else None
    inner = ".".join(map(str, first["loc"][1:]))
    missing = first["type"] == "missing" and not inner
    why = "is missing" if missing else first["msg"] + (f" (at {inner})" if inner else "")
    return invalid(param, why, code="missing_required_parameter" if missing else "invalid_value")

"""Converts OpenAI's (and vLLM's) sampling parameters and priorities to Ballast's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ballast.common.sampling import Grammar, PriorityClass, SamplingParams
from services.gateway.errors import invalid
from services.gateway.openai.requests import GenerationRequest

_SAME_NAME = (
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_CLASSES = {"flex": PriorityClass.BATCH, "priority": PriorityClass.INTERACTIVE, "scale": PriorityClass.INTERACTIVE}


def sampling_of(
    request: GenerationRequest,
    defaults: Mapping[str, float],
    *,
    max_tokens: int,
    logprobs: int | None,
    grammar: Grammar | None,
    prompt_logprobs: int | None = None,
    adapter: str = "",
) -> SamplingParams:
    """Return the sampling parameters of a request. `defaults`: values for parameters that it omits. Raises
    InvalidRequest or Failure for an invalid value.
    """
    values = vars(request)
    given: dict[str, Any] = dict(defaults)  # Any: all types
    if "top_k" in given:
        given["top_k"] = int(given["top_k"])
    given |= {name: values[name] for name in _SAME_NAME if values[name] is not None}
    if given.get("top_k") == -1:  # vLLM's value for no limit
        given["top_k"] = 0
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        stop=tuple(text for text in stop if text),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        bad_words=tuple(request.bad_words or ()),
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        logprobs=0 if logprobs is None and prompt_logprobs is not None else logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        adapter=adapter,
        logit_bias=_logit_bias(request.logit_bias or {}),
    )


def for_each_choice(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the parameters of each choice. A given seed is increased by one for each further choice, so that choices
    differ but are reproducible.
    """
    seed = sampling.seed
    if seed is None:
        return [sampling] * count
    return [sampling, *(replace(sampling, seed=(seed + i + 2**63) % 2**64 - 2**63) for i in range(1, count))]


def priority_of(request: GenerationRequest) -> PriorityClass:
    if isinstance(request.priority, int):  # vLLM's priority, where lower is more urgent
        by_sign = (PriorityClass.INTERACTIVE, PriorityClass.DEFAULT, PriorityClass.BATCH)
        return by_sign[1 + (request.priority > 0) - (request.priority < 0)]
    if request.priority is not None:
        return PriorityClass(request.priority)
    return _CLASSES.get(request.service_tier or "", PriorityClass.DEFAULT)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in given.items()}
    except ValueError as error:
        raise invalid("logit_bias", f"keys are token ids: {error}") from error

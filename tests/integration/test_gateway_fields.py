"""Sends every field of OpenAI's and vLLM's routes. Each must be followed, refused by name, or known to change no
answer.

docs/fields.md lists the outcomes: BALLAST_WRITE_FIELDS=1 rewrites it.
"""

import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponsesParams
from pydantic import BaseModel

from services.gateway.openai import requests, responses
from services.gateway.openai.requests import ChatRequest, CompletionRequest
from services.gateway.openai.responses import ResponsesRequest
from tests.support.cluster import RunningCluster

pytestmark = pytest.mark.rotating

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
HEAD = """# All fields, one by one

What becomes of each field of OpenAI's routes (as its SDK knows them) and of vLLM's. A test sends each, and has written
this page: `tests/integration/test_gateway_fields.py`. [How they are followed](openai.md#what-is-supported).

| field | chat | completions | responses |
|---|---|---|---|
"""
# Fields that vLLM accepts in addition to OpenAI's: on both completion routes, and on chat completions only.
VLLM = [
    *("add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "guided_choice"),
    *("guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex"),
    *("guided_whitespace_pattern", "ignore_eos", "include_stop_str_in_output", "kv_transfer_params"),
    *("length_penalty", "logits_processors", "min_p", "min_tokens", "priority", "prompt_logprobs"),
    *("repetition_detection", "repetition_penalty", "request_id", "return_token_ids"),
    *("return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
    *("stop_token_ids", "structural_tag", "structured_outputs", "top_k", "truncate_prompt_tokens"),
    *("use_beam_search", "vllm_xargs"),
]
VLLM_TEXT = ["prompt_embeds", "response_format"]
VLLM_CHAT = [
    *("add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message"),
    *("documents", "echo", "include_reasoning", "mm_processor_kwargs", "thinking_token_budget"),
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
USER = {"role": "user", "content": "hi"}
# Valid values. Fields not listed here are refused or ignored whatever their value.
VALUES: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "allowed_token_ids": [5, 6],
    "background": True,
    "bad_words": ["ship"],
    "best_of": 1,
    "cache_salt": "x",
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": True,
    "documents": [{"text": "x"}],
    "echo": True,
    "frequency_penalty": 0.5,
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "guided_json": SCHEMA,
    "guided_regex": "a",
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "input": "hi",
    "instructions": "be brief",
    "logit_bias": {"5": 1},
    "logprobs": True,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "max_tokens": 2,
    "messages": [USER],
    "metadata": {"a": "b"},
    "min_p": 0.1,
    "min_tokens": 1,
    "modalities": ["text"],
    "model": "tiny",
    "n": 1,
    "parallel_tool_calls": True,
    "presence_penalty": 0.5,
    "priority": 1,
    "prompt": "hi",
    "prompt_logprobs": 1,
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "repetition_penalty": 1.1,
    "response_format": {"type": "text"},
    "return_token_ids": True,
    "seed": 1,
    "service_tier": "default",
    "skip_special_tokens": False,
    "stop": "x",
    "stop_token_ids": [5],
    "stream": False,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"choice": ["a"]},
    "temperature": 0.5,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [TOOL],
    "top_k": 5,
    "top_logprobs": 1,
    "top_p": 0.5,
}
TOGETHER: Mapping[str, Mapping[str, Any]] = {  # fields that another field requires
    "top_logprobs": {"logprobs": True},
    "continue_final_message": {"messages": [USER, {"role": "assistant", "content": "well"}]},
    "tool_choice": {"tools": [TOOL]},
}
UNLIKE = {  # routes on which a field takes a different value
    ("completions", "logprobs"): 1,
    ("completions", "add_special_tokens"): False,
    ("responses", "tools"): [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}],
    ("responses", "prompt"): {"id": "x"},
    ("responses", "stream_options"): {"include_obfuscation": False},
}
ROUTES: Mapping[str, tuple[str, type[BaseModel], Any, list[str], frozenset[str], dict[str, Any]]] = {
    "chat": (
        "/chat/completions",
        ChatRequest,
        ChatParams,
        VLLM + VLLM_CHAT,
        requests.IGNORED,
        {"messages": [USER], "max_tokens": 1},
    ),
    "completions": (
        "/completions",
        CompletionRequest,
        TextParams,
        VLLM + VLLM_TEXT,
        requests.IGNORED,
        {"prompt": "hi", "max_tokens": 1},
    ),
    "responses": (
        "/responses",
        ResponsesRequest,
        ResponsesParams,
        [],
        responses.IGNORED,
        {"input": "hi", "max_output_tokens": 1},
    ),
}


def fields_of(route: str) -> list[str]:
    _, _, params, more, _, _ = ROUTES[route]
    return sorted({*typing.get_type_hints(params), *more})


def outcome(http: httpx.Client, route: str, name: str) -> str:
    path, shape, _, _, ignored, body = ROUTES[route]
    value = UNLIKE.get((route, name), VALUES.get(name, "some"))
    together = {**TOGETHER.get(name, {})} if route == "chat" else {}
    if route == "responses" and name == "tool_choice":
        together = {"tools": UNLIKE[route, "tools"]}
    answer = http.post(path, json={**body, **together, name: value})
    known = name in shape.model_fields
    if answer.status_code == 200:
        assert known != (name in ignored), f"{route}: {name} must be either followed or listed as ignored"
        return "followed" if known else "ignored"
    error = answer.json()["error"]
    assert (answer.status_code, known, error["code"]) == (400, True, "unsupported_value"), (route, name, error)
    assert error["param"] == name, (route, name, error)
    return "refused"


@pytest.fixture(scope="module")
def outcomes(with_a_gateway: RunningCluster) -> dict[str, dict[str, str]]:
    with httpx.Client(base_url=with_a_gateway.cluster.http_urls[0], timeout=60) as http:
        return {route: {name: outcome(http, route, name) for name in fields_of(route)} for route in ROUTES}


def page_of(outcomes: Mapping[str, Mapping[str, str]]) -> str:
    names = sorted({name for found in outcomes.values() for name in found})
    rows = [f"| `{name}` | {' | '.join(found.get(name, '') for found in outcomes.values())} |" for name in names]
    return HEAD + "\n".join(rows) + "\n"


def test_no_field_is_ignored_that_changes_an_answer(outcomes: dict[str, dict[str, str]]) -> None:
    assert len(outcomes["chat"]) > 70
    for found in outcomes.values():
        assert set(found.values()) == {"followed", "refused", "ignored"}, found


def test_the_page_says_what_came_of_each(outcomes: dict[str, dict[str, str]]) -> None:
    if "BALLAST_WRITE_FIELDS" in os.environ:
        PAGE.write_text(page_of(outcomes))
    assert PAGE.read_text() == page_of(outcomes), "BALLAST_WRITE_FIELDS=1 writes it"

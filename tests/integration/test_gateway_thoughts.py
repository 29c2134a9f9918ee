"""A reasoning model through the gateway: structured output that begins after the reasoning, and its token counts."""

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from openai import OpenAI

from tests.support.cluster import RunningCluster, running_cluster
from tests.support.thinking import with_thoughts
from tools.model.tiny import make_tiny

MODEL = "tiny"
MESSAGES: Any = [{"role": "user", "content": "a ship"}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 23]}}, "required": ["n"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}


class Thinking:
    def __init__(self, running: RunningCluster, end_id: int) -> None:
        self.base = running.cluster.http_urls[0]
        self.end_id = end_id
        # The model is random: with this bias its reasoning ends after some thirty tokens.
        self.options: Any = {"model": MODEL, "messages": MESSAGES, "seed": 5, "logit_bias": {str(end_id): 3.5}}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Generator[Thinking]:
    folder = Path(make_tiny("qwen2", tmp_path_factory.mktemp("thoughts") / MODEL, max_len=2048, vocab=700))
    _, end_id = with_thoughts(folder)
    flags: Any = {"gateway": ["--reasoning-parser", "deepseek_r1"]}
    with running_cluster(folder, workers=1, gateways=1, device_memory_bytes=16 << 20, flags=flags) as running:
        yield Thinking(running, end_id)


@pytest.fixture
def ai(thinking: Thinking) -> Generator[OpenAI]:
    with OpenAI(base_url=thinking.base, api_key="unused", max_retries=0) as client:
        yield client


def thought_of(answer: Any, end_id: int) -> int:
    """Checks the reasoning of an answer, and returns its length in tokens."""
    [choice] = answer.choices
    count = choice.token_ids.index(end_id) + 1
    assert 0 < count < len(choice.token_ids)
    assert choice.message.reasoning_content
    assert "</think>" not in choice.message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens == count
    return count


def test_structured_output_begins_after_the_reasoning(thinking: Thinking, ai: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    ids: Any = {"return_token_ids": True}
    answer = ai.chat.completions.create(**thinking.options, response_format=form, extra_body=ids)
    thought_of(answer, thinking.end_id)
    assert json.loads(answer.choices[0].message.content or "")["n"] in (1, 23)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "count"}}])
def test_a_required_call_follows_the_reasoning(thinking: Thinking, ai: OpenAI, choice: Any) -> None:
    ids: Any = {"return_token_ids": True}
    answer = ai.chat.completions.create(**thinking.options, tools=[TOOL], tool_choice=choice, extra_body=ids)
    thought_of(answer, thinking.end_id)
    calls: Any = answer.choices[0].message.tool_calls
    assert all(call.function.name == "count" and json.loads(call.function.arguments)["n"] in (1, 23) for call in calls)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_streams_and_responses_count_the_same_tokens(thinking: Thinking, ai: OpenAI) -> None:
    options: Any = {**thinking.options, "max_tokens": 200}
    answer = ai.chat.completions.create(**options, extra_body={"return_token_ids": True})
    count = thought_of(answer, thinking.end_id)
    usage: Any = {"include_usage": True}
    chunks = list(ai.chat.completions.create(**options, stream=True, stream_options=usage))
    said, wanted = chunks[-1].usage, answer.usage
    assert said is not None
    assert wanted is not None  # prompt details may differ, since the second request hits the prefix cache
    assert said.completion_tokens_details == wanted.completion_tokens_details
    assert (said.prompt_tokens, said.completion_tokens) == (wanted.prompt_tokens, wanted.completion_tokens)
    thought = "".join(getattr(c.choices[0].delta, "reasoning", None) or "" for c in chunks if c.choices)
    assert thought == getattr(answer.choices[0].message, "reasoning", None)
    body: Any = {"seed": 5, "logit_bias": options["logit_bias"]}
    response = ai.responses.create(model=MODEL, input="a ship", max_output_tokens=200, extra_body=body)
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens in (count, response.usage.output_tokens)


def test_anthropics_api_gives_the_same_answer(thinking: Thinking, ai: OpenAI) -> None:
    options: Any = {**thinking.options, "max_tokens": 100, "logit_bias": None}
    chat = ai.chat.completions.create(**options)
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100, "seed": 5}
    with httpx.Client(base_url=thinking.base, headers={"x-api-key": "any"}, timeout=60) as http:
        answer = http.post("/messages", json=body).json()
        events = http.post("/messages", json={**body, "stream": True}).text.split("\n\n")
        count = http.post("/messages/count_tokens", json=body).json()
        wrong = http.post("/messages", json={**body, "temperature": -1})
        far = http.post("/messages", json={**body, "max_tokens": 1 << 20, "stop_sequences": [answer_start(chat)]})
    [block] = answer["content"]
    assert block["thinking"] == getattr(chat.choices[0].message, "reasoning", None), "cut off by max_tokens"
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 100)
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] == 100
    assert count["input_tokens"] == answer["usage"]["input_tokens"]
    begun = {**body, "messages": [*MESSAGES, {"role": "assistant", "content": "Well"}], "max_tokens": 1}
    with httpx.Client(base_url=thinking.base, headers={"x-api-key": "any"}, timeout=60) as http:
        count, answer = (http.post(path, json=begun).json() for path in ("/messages/count_tokens", "/messages"))
    assert count["input_tokens"] == answer["usage"]["input_tokens"]
    deltas = [json.loads(part.split("data: ")[1]) for part in events if "thinking_delta" in part]
    assert "".join(delta["delta"]["thinking"] for delta in deltas) == block["thinking"]
    assert events[0].startswith("event: message_start\n")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
    assert (far.status_code, far.json()["stop_reason"]) == (200, "stop_sequence")


def answer_start(chat: Any) -> str:
    return chat.choices[0].message.reasoning_content[10:14]

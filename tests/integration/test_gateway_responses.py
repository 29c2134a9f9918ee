"""/v1/responses through OpenAI's SDK, which assembles the events itself."""

import json
from collections.abc import Generator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.cluster import RunningCluster

MODEL = "tiny"
CLOCK: Any = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}, "strict": False}


@pytest.fixture
def ai(with_a_gateway: RunningCluster) -> Generator[OpenAI]:
    with OpenAI(base_url=with_a_gateway.cluster.http_urls[0], api_key="unused", max_retries=0) as client:
        yield client


def test_a_response_equals_the_chats_answer(ai: OpenAI) -> None:
    chat = ai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "a ship"}],
        max_tokens=12,
        temperature=0,
    )
    text = chat.choices[0].message.content
    options: Any = {"model": MODEL, "instructions": "be brief", "max_output_tokens": 12, "temperature": 0}
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "a ship"}]}]
    inputs: list[Any] = ["a ship", parts]
    for given in inputs:
        response = ai.responses.create(input=given, **options)
        assert response.output_text == text
        assert (response.status, response.incomplete_details and response.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )
        assert response.usage is not None
        assert chat.usage is not None
        assert (response.usage.input_tokens, response.usage.output_tokens) == (chat.usage.prompt_tokens, 12)
    with ai.responses.stream(input="a ship", **options) as stream:
        kinds = [event.type for event in stream]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.incomplete"
    events: Any = list(ai.responses.create(input="a ship", stream=True, **options))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Any = events[-1]
    assert last.response.output_text == text
    # How many tokens arrive in one chunk depends on timing, but 900 never arrive in one.
    long: Any = {**options, "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}
    events = list(ai.responses.create(input="a ship", stream=True, **long))
    assert len([event for event in events if event.type == "response.output_text.delta"]) > 1


def test_function_calls_and_their_results(ai: OpenAI) -> None:
    options: Any = {"model": MODEL, "tools": [strict()], "tool_choice": {"type": "function", "name": "clock"}}
    response = ai.responses.create(input="what time is it?", max_output_tokens=60, **options)
    call: Any = response.output[0]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "clock", {})
    assert response.status == "completed"
    events: Any = list(ai.responses.create(input="what time is it?", stream=True, **options))
    kinds = list(dict.fromkeys(event.type for event in events))  # the arguments arrive in several deltas
    assert kinds[2:6] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    after = ai.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": "what time is it?"},
            {"type": "function_call", "call_id": call.call_id, "name": "clock", "arguments": "{}"},
            {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"},
        ],
        tools=[CLOCK],
        tool_choice="none",
        max_output_tokens=4,
    )
    assert after.output[0].type == "message"


def strict() -> Any:
    return {**CLOCK, "parameters": {"type": "object", "properties": {}, "additionalProperties": False}, "strict": True}


def test_structured_output_works_and_stored_responses_are_refused(ai: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"masts": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["masts"],
        "additionalProperties": False,
    }
    text: Any = {"format": {"type": "json_schema", "name": "ship", "schema": schema, "strict": True}}
    response = ai.responses.create(model=MODEL, input="a ship", text=text)
    assert 1 <= json.loads(response.output_text)["masts"] <= 9
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        ai.responses.create(model=MODEL, input="go on", previous_response_id="resp_1")
    search: Any = [{"type": "web_search"}]
    with pytest.raises(openai.BadRequestError, match="web_search"):
        ai.responses.create(model=MODEL, input="find", tools=search)

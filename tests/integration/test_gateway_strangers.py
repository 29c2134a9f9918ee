"""Requests as third-party programs send them: agents' histories, tools of MCP servers, odd fields, unusual HTTP."""

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from tests.support.cluster import RunningCluster

HI: Any = [{"role": "user", "content": "hi"}]
CITY = {"properties": {"city": {"enum": ["Ulm"]}}, "required": ["city"]}
ARGUMENTS = {"type": "object", "additionalProperties": False, **CITY}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": ARGUMENTS}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
BODY = json.dumps({"messages": HI, "max_tokens": 2}).encode()


class Door:
    """A client of one gateway."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def post(self, path: str, **body: Any) -> Any:
        answer = self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, **fields: Any) -> Any:
        """The single choice of a chat completion."""
        return self.post("/chat/completions", **{"messages": HI, "max_tokens": 3, **fields})["choices"][0]

    def refused(self, **fields: Any) -> Any:
        answer = self._http.post("/chat/completions", json={"messages": HI, "max_tokens": 3, **fields})
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    def deltas(self, **fields: Any) -> list[Any]:
        """The choices of all events of a streamed chat completion."""
        answer = self._http.post("/chat/completions", json={"messages": HI, "stream": True, **fields})
        events = [json.loads(part[6:]) for part in answer.text.split("\n\n") if part.startswith("data: {")]
        return [choice for event in events for choice in event["choices"]]

    def raw(self, data: bytes) -> bytes:
        address = urlsplit(str(self._http.base_url))
        with socket.create_connection((address.hostname, address.port), timeout=60) as link:
            link.sendall(data)
            return b"".join(iter(lambda: link.recv(1 << 16), b""))


def says(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 400}


@pytest.fixture(scope="module")
def door(with_a_gateway: RunningCluster) -> Iterator[Door]:
    with httpx.Client(base_url=with_a_gateway.cluster.http_urls[0], timeout=60) as http:
        yield Door(http)


def called(arguments: object, **more: object) -> dict[str, object]:
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}], **more}


RESULT = {"role": "tool", "content": "sun"}


@pytest.mark.parametrize(
    "history",
    [
        *([called(arguments), RESULT] for arguments in ("", None, "not json", '{"city": "Ul', "[1]", "null", {"a": 1})),
        [called("{}", content=""), HI[0]],  # a tool call without its result
        [called("{}", refusal=None, annotations=[], audio=None, function_call=None, reasoning_details=[{}]), RESULT],
        [{"role": "tool", "content": None, "tool_call_id": None, "name": "weather"}],
        [called("{}"), {"role": "tool", "content": [{"type": "text", "text": "sun"}]}],
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": None}],
        [{"role": "assistant", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}],
        [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]}],
        [{"role": "assistant", "content": []}, {"role": "developer", "content": "x", "name": "y"}],
        [{"role": "assistant", "content": "x"}, {"role": "system", "content": "y"}],
    ],
)
def test_conversations_with_unusual_messages_are_accepted(door: Door, history: list[Any]) -> None:
    assert door.chat(messages=[*HI, *history, *HI], tools=[WEATHER])["finish_reason"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "hm"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "reasoning", "text": "hm"},
    ],
)
def test_reasoning_parts_of_a_message_count_as_reasoning(door: Door, part: dict[str, Any]) -> None:
    def tokens(**message: Any) -> list[int]:
        return door.post("/../tokenize", messages=[*HI, {"role": "assistant", **message}, *HI])["tokens"]

    parts = [part, {"type": "text", "text": "Yes."}]
    assert tokens(content=parts) == tokens(content="Yes.", reasoning_content="hm")


NULLS = (
    *("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "stream_options", "service_tier", "user"),
    *("metadata", "response_format", "logprobs", "top_logprobs", "functions", "function_call", "audio", "modalities"),
    *("reasoning_effort", "store", "prediction", "verbosity", "max_completion_tokens", "bad_words", "tools"),
    *("allowed_token_ids", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "structured_outputs", "top_k"),
)


@pytest.mark.parametrize(
    "fields",
    [
        dict.fromkeys(NULLS),
        {"stop": [], "logit_bias": {}, "functions": [], "tools": [], "tool_choice": "auto", "bad_words": []},
        {"function_call": "none"},
        {"function_call": "auto", "stop": ""},
        {"max_tokens": 4.0, "n": "1", "seed": 7.0, "stream": "false", "temperature": "0.5", "top_logprobs": 0},
        {"model": ""},
        {"tools": [WEATHER], "tool_choice": "none"},
    ],
)
def test_null_and_default_values_are_accepted(door: Door, fields: dict[str, Any]) -> None:
    assert door.chat(**fields)["finish_reason"]


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": None, "required": None},  # as Go serialises empty fields
        {"type": "object", "properties": {}, "required": None, "description": None},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/A",
            "definitions": {"A": ARGUMENTS},
        },
    ],
)
def test_tools_as_mcp_servers_describe_them(door: Door, parameters: dict[str, Any]) -> None:
    schema = {**parameters, "additionalProperties": False} if "$ref" not in parameters else parameters
    for tool in ({"parameters": schema}, {"parameters": schema, "strict": None, "description": None}):
        asked = {"tools": [{"type": "function", "function": {"name": "ns__a.b-c", **tool}}], "max_tokens": 200}
        door.chat(**asked)
        [call] = door.chat(**asked, tool_choice="required", parallel_tool_calls=False)["message"]["tool_calls"]
        assert call["function"]["name"] == "ns__a.b-c"
        assert json.loads(call["function"]["arguments"]) == ({"city": "Ulm"} if "$ref" in parameters else {})


@pytest.mark.parametrize(
    "text",
    [
        f"first {CALL} then {CALL} last",
        f"<think>\nI might <tool_call> it\n</think>\n\n{CALL}",
        '<tool_call>{"name": "weather"}</tool_call>',
        '<tool_call>{"arguments": null, "name": "other"}</tool_call>',
        '<tool_call>\n{"name": "weather", "arguments": {"city": "a \\"b\\" } ] </tool_call> \\\\ {"}}\n</tool_call>',
        "<think>\nall of it\n</think>",
        "<think>\na < b and </thin k> c\n</think>\n\nYes <b>",
    ],
)
def test_a_stream_equals_the_complete_answer(door: Door, text: str) -> None:
    asked = {"tools": [WEATHER], "logprobs": True, "return_token_ids": True, "temperature": 0, **says(text)}
    whole = door.chat(**asked)
    message = whole["message"]
    parts = door.deltas(**asked)
    deltas = [part["delta"] for part in parts]
    assert sum("role" in delta for delta in deltas) == 1
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == message.get("reasoning", "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for index, call in enumerate(message.get("tool_calls", ())):
        first, *later = [part for part in calls if part["index"] == index]
        assert (first["type"], first["function"]["name"]) == ("function", call["function"]["name"])
        assert not any("id" in part or "name" in part["function"] for part in later)
        arguments = "".join(part["function"]["arguments"] for part in (first, *later))
        assert arguments == call["function"]["arguments"]
        json.loads(arguments)
    assert [token for part in parts for token in part.get("token_ids") or ()] == whole["token_ids"]
    logprobs = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert logprobs == whole["logprobs"]["content"]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [whole["finish_reason"]]


def head(*lines: str) -> bytes:
    start = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Content-Length: {len(BODY)}"]
    return "\r\n".join([*start, *lines, "", ""]).encode()


CLOSING = "Connection: close"
DOORS: Mapping[str, bytes] = {
    "expect": head("Expect: 100-continue", CLOSING) + BODY,
    "form": head("Content-Type: application/x-www-form-urlencoded", CLOSING) + BODY,
    "azure": head(CLOSING).replace(b"completions", b"completions?api-version=2024-02-01") + BODY,
    "proxy": head(CLOSING).replace(b"POST /", b"POST http://x/") + BODY,
    "two at once": head() + BODY + head(CLOSING) + BODY,
    "upgrade": head("Upgrade: h2c", "HTTP2-Settings: AAMAAABk", "Connection: Upgrade, close") + BODY,
    "chunks": head(CLOSING).replace(b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked")
    + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:], b"")),
}


@pytest.mark.parametrize("name", DOORS)
def test_requests_of_other_http_clients(door: Door, name: str) -> None:
    assert door.raw(DOORS[name]).count(b" 200 OK\r\n") == (2 if name == "two at once" else 1)


def test_anthropics_histories(door: Door) -> None:
    tool = {"name": "weather", "type": "custom", "input_schema": ARGUMENTS, "cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Ulm"}, "caller": {"type": "direct"}}
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "y"}]
    for content in ({}, {"content": ""}, {"content": [{"type": "text", "text": "sun"}], "is_error": True}):
        result = {"type": "tool_result", "tool_use_id": "t", **content}
        turns = [*HI, {"role": "assistant", "content": [*thoughts, use]}, {"role": "user", "content": [result]}]
        for more in ({"system": []}, {"tool_choice": {"type": "none"}, "service_tier": "auto", "container": None}):
            said = door.post("/messages?beta=true", model="tiny", messages=turns, max_tokens=3, tools=[tool], **more)
            assert said["role"] == "assistant"


def test_a_tool_choice_in_the_form_of_the_responses_api(door: Door) -> None:
    for choice in ({"type": "function", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}):
        message = door.chat(tools=[WEATHER], tool_choice=choice, max_tokens=200)["message"]
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"city": "Ulm"}]


def test_a_tool_whose_parameters_are_not_a_schema_is_refused(door: Door) -> None:
    for parameters in ([1], "object", 5):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        assert door.refused(tools=[tool])["param"] == "tools[0].function.parameters"


def test_contradictory_constraints_are_refused(door: Door) -> None:
    error = door.refused(**says("Ulm"), allowed_token_ids=[5])
    assert "allowed_token_ids" in error["message"]

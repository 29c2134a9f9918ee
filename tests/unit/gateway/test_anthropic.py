"""Anthropic's Messages API: requests are converted to chats, and answers to blocks. Errors have the API's format."""

import contextlib
import json
from typing import Any

import pytest

from ballast.client import FinishReason, Generation, GenerationChunk, Usage
from services.gateway.anthropic import MessagesRequest, MessagesWriter, failure_form, status_of
from services.gateway.errors import Failure, invalid
from services.gateway.openai.chat import Head, Wishes
from services.gateway.openai.formats import Thoughts, ToolFormat, format_of
from services.gateway.openai.requests import UsageWish, parse

HEAD = Head(id="msg-abc", created=0, model="m")
USAGE = Usage(prompt_token_count=7, completion_token_count=9, replay_count=0, queue_s=0, ttft_s=0, e2e_s=0, seed=1)
TOOL: Any = {"name": "weather", "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "x"}}


def asked(**fields: Any) -> Any:
    given = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse(MessagesRequest, json.dumps(given).encode()).as_chat()


def test_a_conversation_with_tools_becomes_a_chat() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "weather?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    chat = asked(messages=turns, system=[{"type": "text", "text": "be brief"}], tools=[TOOL], stop_sequences=["END"])
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    assert chat.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "user", "content": "and?"},
    ]
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    assert chat.tools == [{"type": "function", "function": function}]
    assert (chat.max_completion_tokens, chat.stop, chat.continue_final_message) == (9, ["END"], None)


@pytest.mark.parametrize("fields", [{"thinking": {"type": []}}, {"tool_choice": {"type": []}}])
def test_a_type_that_is_no_name_is_unknown(fields: dict[str, Any]) -> None:
    with contextlib.suppress(Failure):
        assert asked(**fields).enable_thinking is None


def test_the_arguments_of_an_earlier_call_may_be_anything() -> None:
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"x": float("nan")}}
    assert asked(messages=[{"role": "assistant", "content": [call]}]).messages[0]["tool_calls"]


def test_every_field_of_a_request_is_followed_or_refused() -> None:
    prefilled = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    assert asked(messages=prefilled).continue_final_message is True
    assert [asked(tool_choice={"type": kind}, tools=[TOOL]).tool_choice for kind in ("auto", "any", "none")] == [
        "auto",
        "required",
        "none",
    ]
    named = asked(tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, tools=[TOOL])
    assert named.tool_choice == {"type": "function", "function": {"name": "weather"}}
    assert named.parallel_tool_calls is False
    assert [asked(thinking={"type": kind}).enable_thinking for kind in ("enabled", "disabled", "adaptive")] == [
        True,
        False,
        None,
    ]
    form = asked(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}).response_format
    assert form["json_schema"]["schema"] == {"type": "object"}
    picture = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    for field, fields in (
        ("max_tokens", {"max_tokens": None}),
        ("messages[0].content[0][0]", {"messages": picture}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("tools[0]", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tool_choice", {"tool_choice": {"type": "some"}}),
        ("mcp_servers", {"mcp_servers": [{"url": "x"}]}),
    ):
        with pytest.raises(Failure) as caught:
            asked(**fields)
        assert (caught.value.param, caught.value.status) == (field, 400)


ANSWER = '<think>hm</think>\nWell.<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
BLOCKS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "hm", "signature": ""},
    {"type": "text", "text": "Well."},
    {"type": "tool_use", "id": "toolu_abc_2", "name": "weather", "input": {"city": "Ulm"}},
]


def writer() -> MessagesWriter:
    wishes = Wishes(
        logprobs=False, usage=UsageWish.NONE, token_ids=False, format=format_of(ToolFormat.HERMES, [], Thoughts())
    )
    return MessagesWriter(HEAD, wishes, ["END"])


def whole(text: str, reason: FinishReason = FinishReason.STOP, matched: str | None = None) -> Any:
    generation = Generation(
        request_id="r", text=text, token_ids=(), logprobs=(), finish_reason=reason, matched_stop=matched, usage=USAGE
    )
    return writer().complete([generation])


def streamed(pieces: list[str], reason: FinishReason = FinishReason.STOP) -> list[Any]:
    writing, written = writer(), b""
    for piece in pieces:
        written += writing.chunk(0, GenerationChunk(request_id="r", text=piece, token_ids=(), prompt_token_count=7))
    last = GenerationChunk(request_id="r", text="", token_ids=(), finish_reason=reason, usage=USAGE)
    written += writing.chunk(0, last) + writing.end()
    return [json.loads(part.split("data: ", 1)[1]) for part in written.decode().split("\n\n") if part]


@pytest.mark.parametrize("size", [1, 3, 7, 200])
def test_a_stream_assembles_the_complete_answer(size: int) -> None:
    events = streamed([ANSWER[at : at + size] for at in range(0, len(ANSWER), size)])
    assert events[0]["message"]["usage"] == {"input_tokens": 7, "output_tokens": 0}
    blocks: list[Any] = []
    for each in events[1:-2]:
        match each["type"]:
            case "content_block_start":
                assert each["index"] == len(blocks)
                blocks.append({**each["content_block"], "text_": ""})
            case "content_block_delta":
                assert each["index"] == len(blocks) - 1
                [piece] = [value for name, value in each["delta"].items() if name != "type"]
                blocks[-1]["text_"] += piece
            case kind:
                assert kind == "content_block_stop"
    texts = [block.pop("text_") for block in blocks]
    assert texts == ["hm", "Well.", '{"city": "Ulm"}']
    complete = whole(ANSWER)
    assert complete["content"] == BLOCKS
    assert [block["type"] for block in blocks] == [block["type"] for block in BLOCKS]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == complete["usage"]


def test_why_an_answer_ended() -> None:
    def end(answer: Any) -> tuple[str, str | None]:
        return answer["stop_reason"], answer["stop_sequence"]

    assert end(whole("a")) == ("end_turn", None)
    assert end(whole("a", matched="END")) == ("stop_sequence", "END")
    assert end(whole("a", matched="<|im_end|>")) == ("end_turn", None)
    cut = whole(ANSWER[:-20], FinishReason.LENGTH)
    assert end(cut) == ("max_tokens", None)
    assert cut["content"] == BLOCKS[:2], "a truncated call is left out"
    odd = whole(ANSWER.replace('{"city": "Ulm"}', '{"city": Ulm}'))
    assert odd["content"][2]["input"] == {"arguments": '{"city": Ulm}'}


def test_errors_have_anthropics_format() -> None:
    wrong = failure_form(invalid("max_tokens", "is missing"), "msg-1")
    error = {"type": "invalid_request_error", "message": "max_tokens: is missing"}
    assert wrong == {"type": "error", "error": error, "request_id": "msg-1"}
    busy = Failure(503, "server_error", "overloaded", "full")
    form: Any = failure_form(busy, "msg-1")
    assert (status_of(busy), form["error"]["type"]) == (529, "overloaded_error")
    form = failure_form(Failure(500, "server_error", "internal_error", "x"), "")
    assert form["error"]["type"] == "api_error"

"""Request fields are followed, or refused by name."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ballast.client import FinishReason, Generation, GenerationChunk, Logprobs, TokenLogprob, Usage
from ballast.common.errors import InvalidRequest
from ballast.common.sampling import GrammarKind, PriorityClass
from services.gateway.errors import Failure, failure_of
from services.gateway.openai.chat import Head, Wishes
from services.gateway.openai.completion import CompletionWriter
from services.gateway.openai.messages import messages_for_template
from services.gateway.openai.requests import (
    UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
    UsageWish,
    parse,
    refuse_unsupported,
)
from services.gateway.openai.responses import ResponsesRequest
from services.gateway.openai.sampling import priority_of
from services.gateway.openai.structure import form_of
from services.gateway.openai.tools import tool_use_of
from services.gateway.openai.writing import encoded

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({**CHAT, **fields}).encode())


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_field_that_would_change_the_answer_is_refused_by_name(name: str) -> None:
    shape: Any = ChatRequest if name in ChatRequest.model_fields else CompletionRequest
    given = {**(CHAT if shape is ChatRequest else TEXT), name: "something"}
    with pytest.raises(Failure) as caught:
        refuse_unsupported(parse(shape, json.dumps(given).encode()))
    assert (caught.value.param, caught.value.status) == (name, 400)
    for off in (None, False, [], {}):
        if shape is ChatRequest:
            refuse_unsupported(chat(**{name: off}))


def test_the_docs_name_each_field_that_is_refused() -> None:
    page = Path("docs/openai.md").read_text()
    assert [name for name in UNSUPPORTED if f"`{name}`" not in page] == []


def test_echo_is_for_completions_only() -> None:
    refuse_unsupported(parse(CompletionRequest, json.dumps({**TEXT, "echo": True}).encode()))


def test_older_names_of_structured_outputs_are_followed() -> None:
    form = form_of(None, chat(guided_regex="a+").structured)
    assert form.grammar is not None
    assert (form.grammar.kind, form.grammar.text) == (GrammarKind.REGEX, "a+")
    assert chat(guided_json={"type": "object"}).structured == {"json": {"type": "object"}}
    with pytest.raises(Failure):
        _ = chat(guided_regex="a", structured_outputs={"regex": "a"}).structured
    for several in ({"json": {}, "regex": "a"}, {"json": {}, "whitespace_pattern": "x"}, {"regex": "a", "other": 1}):
        with pytest.raises(Failure, match="structured_outputs"):
            form_of(None, several)
    assert (
        form_of(None, {"regex": "a", "json_object": False, "disable_any_whitespace": False}).grammar
        == form_of(None, {"regex": "a"}).grammar
    )


def test_a_message_of_many_thoughts_is_read_in_linear_time() -> None:
    parts = [{"type": "thinking", "thinking": str(number)} for number in range(20_000)]
    began_s = time.process_time()
    [_, said] = messages_for_template([{"role": "user", "content": "?"}, {"role": "assistant", "content": parts}])
    assert said["thinking"].count("\n") == 19_999
    assert time.process_time() - began_s < 5.0


def test_reasoning_in_history_reaches_the_template_under_all_its_names() -> None:
    asked = {"role": "user", "content": "?"}
    for name in ("reasoning", "reasoning_content"):
        [_, said] = messages_for_template([asked, {"role": "assistant", "content": "a", name: "hm"}])
        assert [said[key] for key in ("reasoning", "reasoning_content", "thinking")] == ["hm"] * 3
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "lost"}]},
    ]
    chat = parse(ResponsesRequest, json.dumps({"input": items}).encode()).as_chat()
    assert [message.get("reasoning_content") for message in chat.messages] == ["hm", None]


def test_a_field_that_only_the_chat_request_refuses_is_named() -> None:
    request = parse(ResponsesRequest, json.dumps({"input": "?", "cache_salt": "\ud800"}).encode())
    with pytest.raises(Failure, match="unicode"):
        request.as_chat()


def test_numeric_priorities_have_vllms_meaning() -> None:
    classes = [priority_of(chat(priority=each)) for each in (-1, 0, 5, "batch")]
    assert classes == [PriorityClass.INTERACTIVE, PriorityClass.DEFAULT, PriorityClass.BATCH, PriorityClass.BATCH]


SET = {"type": "array", "items": {"type": "string", "format": "path"}, "uniqueItems": True}


def json_schema(strict: bool | None) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SET, "strict": strict}}


def test_unsupported_keywords_of_a_non_strict_schema_are_ignored_and_the_answer_says_so() -> None:
    loose = form_of(json_schema(None), None)
    assert loose.left_out == {"uniqueItems"}
    assert loose.grammar is not None
    assert "uniqueItems" not in loose.grammar.text
    strict = form_of(json_schema(strict=True), None)
    assert strict.grammar is not None
    assert "uniqueItems" in strict.grammar.text  # the dispatcher refuses it, with the key's name
    assert "format" not in strict.grammar.text  # an annotation, strict or not


def test_only_schema_keywords_are_left_out_and_no_property_names() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"type": "string"}, "format": {"const": {"format": "path", "if": 1}}},
        "required": ["not"],
    }
    form = form_of({"type": "json_schema", "json_schema": {"schema": schema}}, None)
    assert form.grammar is not None
    assert (json.loads(form.grammar.text), form.left_out) == (schema, frozenset())


def test_invalid_json_arguments_of_earlier_calls_are_forwarded_unchanged() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"x": '}}
    [message] = messages_for_template([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"x": '


def response(**fields: Any) -> ChatRequest:
    return parse(ResponsesRequest, json.dumps({"input": "hi", **fields}).encode()).as_chat()


def test_a_response_follows_vllms_fields_and_the_service_tier() -> None:
    values = {"top_k": 5, "stop": ["x"], "ignore_eos": True, "logit_bias": {"5": 1.0}, "structured_outputs": {"a": 1}}
    request = response(**values, service_tier="flex")
    assert {name: getattr(request, name) for name in values} == values
    assert priority_of(request) is PriorityClass.BATCH
    assert priority_of(response(priority="batch")) is PriorityClass.BATCH  # as the jobs service sends
    for name in ("vllm_xargs", "kv_transfer_params"):
        with pytest.raises(Failure, match=name):
            refuse_unsupported(response(**{name: {"a": 1}}))
    with pytest.raises(Failure, match="verbosity"):
        refuse_unsupported(response(text={"verbosity": "low"}))
    for wrong in ({"service_tier": "fast"}, {"text": {"format": "json_object"}}):
        with pytest.raises(Failure, match="Input should be"):
            response(**wrong)


NAN, LONE = float("nan"), "\ud800"


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [{"type": "reasoning", "summary": ["hm"]}]},
        {"input": [{"type": "reasoning", "content": 5}]},
        {"text": {"x": NAN}},
        {"metadata": {"a": LONE}},
        {"tools": [{"type": "function", "name": "f", "parameters": {"default": NAN}}], "tool_choice": "none"},
    ],
)
def test_a_malformed_response_request_is_refused_before_it_runs(fields: dict[str, Any]) -> None:
    with pytest.raises(Failure) as caught:
        response(**fields)
    assert caught.value.status == 400


def test_log_probabilities_of_a_response_are_refused_and_parts_that_it_never_has_are_not() -> None:
    response(include=["reasoning.encrypted_content", "file_search_call.results"])
    with pytest.raises(Failure, match="/v1/chat/completions has them") as caught:
        response(include=["message.output_text.logprobs"])
    assert (caught.value.status, caught.value.param) == (400, "include")


def test_a_choice_of_a_malformed_function_is_refused() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(Failure, match="by its name"):
        tool_use_of(tools, {"function": "f"}, parallel=True, template="tools", kind=None)


def test_a_schema_that_is_nested_too_deeply_is_a_client_error() -> None:
    schema: dict[str, Any] = {}
    for _ in range(900):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RecursionError) as caught:
        form_of({"type": "json_schema", "json_schema": {"schema": schema}}, None)
    assert failure_of(caught.value).status == 400


def test_offsets_in_a_stream_equal_those_of_a_whole_answer_although_its_text_lags() -> None:
    usage = Usage(prompt_token_count=1, completion_token_count=3, replay_count=0, queue_s=0, ttft_s=0, e2e_s=0, seed=1)
    wishes = Wishes(logprobs=True, usage=UsageWish.NONE, token_ids=False)
    positions = [Logprobs(TokenLogprob(token_id, -1.0, text), ()) for token_id, text in enumerate((b"He", b"ll", b"o"))]

    def offsets(choice: Any) -> list[int]:
        return choice["logprobs"]["text_offset"]

    def writer() -> CompletionWriter:
        return CompletionWriter(Head(id="cmpl-a", created=0, model="m"), wishes, [""], 1)

    ended: Any = {"finish_reason": FinishReason.STOP, "usage": usage}
    tokens = (0, 1, 2)
    given: Any = {"request_id": "a", "text": "Hello", "token_ids": tokens, "logprobs": tuple(positions), **ended}
    whole: Any = writer().complete([Generation(**given, matched_stop=None)])
    stream, streamed = writer(), list[int]()
    for token_id, text in zip(tokens, ("", "", "Hello"), strict=True):  # as with stop strings
        more: Any = ended if text else {}
        part: Any = {"token_ids": (token_id,), "logprobs": (positions[token_id],), **more}
        event = stream.chunk(0, GenerationChunk(request_id="a", text=text, **part))
        streamed += offsets(json.loads(event[6:])["choices"][0])
    assert streamed == offsets(whole["choices"][0]) == [0, 2, 4]


def test_a_lone_surrogate_of_a_call_does_not_break_the_answer() -> None:
    assert json.loads(encoded({"name": "a\ud800"})) == {"name": "a?"}


def test_the_logprobs_field_of_completions() -> None:
    assert failure_of(InvalidRequest("sampling.logprobs", "must be between 0 and 20, got 21")).param == "logprobs"


def test_the_error_for_a_prompt_that_is_too_long_has_the_wording_gateways_look_for() -> None:
    why = "100 and a prompt of 5000 tokens exceed max_model_len 4096; at most 0 fit"
    failure = failure_of(InvalidRequest("sampling.max_tokens", why))
    assert failure.code == "context_length_exceeded"
    assert "This model's maximum context length is 4096 tokens" in str(failure.body()["error"])


def test_function_calls_of_the_older_form_in_history_become_tool_calls() -> None:
    named = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    asked, called, answered = messages_for_template(
        [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "function_call": named},
            {"role": "function", "name": "weather", "content": None},
        ]
    )
    assert asked == {"role": "user", "content": "Rain?"}
    function = {"name": "weather", "arguments": {"city": "Ulm"}}
    assert called == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    assert answered == {"role": "tool", "name": "weather", "content": ""}, "a tool's result may be empty"


@pytest.mark.parametrize("given", [{}, {"type": None}, {"type": "xml"}, {"schema": {}}])
def test_a_response_format_of_unknown_type_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(Failure) as refused:
        form_of(given, None)
    assert refused.value.param == "response_format"

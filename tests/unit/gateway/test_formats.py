"""Reasoning, tool calls and text of an answer are recognised, however it is split into chunks."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.openai.formats import Thoughts, ToolFormat, answer, arguments_of, array_of_calls, format_of, plain
from services.gateway.openai.scanner import AnswerParser, Arguments, CallBegin, CallEnd, Format, Reasoning, Text

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "raw": {}},
            },
        },
    },
    {"type": "function", "function": {"name": "clock"}},
]
THINK = Thoughts()
Call = tuple[str, str]  # name, JSON text of the arguments


def heard(parse: Format, text: str, cuts: list[int] | None = None, *, cut: bool = False) -> tuple[str, str, list[Call]]:
    """Parse `text`, split at `cuts`; return (reasoning, text, complete calls)."""
    parser = AnswerParser(parse)
    edges = [0, *sorted(min(each, len(text)) for each in cuts or []), len(text)]
    events = [event for a, b in itertools.pairwise(edges) for event in parser.feed(text[a:b])]
    events += parser.finish(cut=cut)
    thought, said, calls, name, arguments = "", "", list[Call](), "", ""
    for event in events:
        match event:
            case Reasoning(piece):
                thought += piece
            case Text(piece):
                said += piece
            case CallBegin(name):
                arguments = ""
            case Arguments(piece):
                arguments += piece
            case CallEnd(complete):
                calls += [(name, arguments)] if complete else []
    return thought, said, calls


def of(kind: str, thoughts: Thoughts | None = THINK) -> Format:
    return format_of(ToolFormat(kind), TOOLS, thoughts)


DS_BEGIN, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CASES: list[tuple[str, str, tuple[str, str, list[Call]]]] = [
    ("hermes", "plain words", ("", "plain words", [])),
    ("hermes", "  indented", ("", "  indented", [])),
    ("hermes", "a < b <tool and <tool_call", ("", "a < b <tool and <tool_call", [])),
    (
        "hermes",
        'Well.<tool_call>\n{"name": "clock", "arguments": {"zone": "é"}}\n</tool_call>',
        ("", "Well.", [("clock", '{"zone": "é"}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name":"a","arguments":{}}</tool_call>\n<tool_call>{"name":"b","arguments":{"x":1}}</tool_call>!',
        ("", "!", [("a", "{}"), ("b", '{"x":1}')]),
    ),
    ("hermes", '<tool_call>{"name":"a","arguments":{"t":"</tool"}}</tool_call>', ("", "", [("a", '{"t":"</tool"}')])),
    (
        "hermes",
        '<tool_call>{"name":"a","arguments":{"t":"</tool_call>","u":"\\"}"}}</tool_call>',
        ("", "", [("a", '{"t":"</tool_call>","u":"\\"}"}')]),
    ),
    ("hermes", "<tool_call>no json</tool_call>", ("", "<tool_call>no json</tool_call>", [])),
    ("hermes", '<tool_call>{"name":"a","arguments":{}}', ("", "", [("a", "{}")])),
    ("hermes", '<tool_call>{"name":"a","argum', ("", '<tool_call>{"name":"a","argum', [])),
    ("hermes", '<tool_call>{"name": "a"}</tool_call>', ("", "", [("a", "{}")])),
    ("hermes", '<tool_call>{"name": "a", "arguments": null}</tool_call>', ("", "", [("a", "{}")])),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "a"}</tool_call>', ("", "", [("a", '{"x": 1}')])),
    ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', ("", "", [("a", '{"x": 1}')])),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": 3}</tool_call>',
        ("", '<tool_call>{"name": "a", "arguments": 3}</tool_call>', []),
    ),
    (
        "hermes",
        '<tool_call>{"name": "a", "arguments": {"n": 1e999, "b": 0.10, "t": "1\n2"}}</tool_call>',
        ("", "", [("a", '{"n": 1e999, "b": 0.10, "t": "1\\n2"}')]),
    ),
    (
        "hermes",
        '<think>\nI may write <tool_call>{"name": "a"}</tool_call>\n</think>\n\n<tool_call>{"name": "b"}</tool_call>',
        ('I may write <tool_call>{"name": "a"}</tool_call>', "", [("b", "{}")]),
    ),
    ("hermes", "<think>\n\n</think>\n\nYes.", ("", "Yes.", [])),
    ("hermes", "The tag <think> is text here.</think>", ("", "The tag <think> is text here.</think>", [])),
    (
        "hermes",
        '<think>1</think>a<tool_call>{"name":"b"}</tool_call>\n<think>2</think>c',
        ("12", "ac", [("b", "{}")]),
    ),
    ("llama3_json", "plain words {not a call}", ("", "plain words {not a call}", [])),
    ("llama3_json", '{"name": "a", "parameters": {"x": [1]}}', ("", "", [("a", '{"x": [1]}')])),
    (
        "llama3_json",
        '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}',
        ("", "", [("a", "{}"), ("b", "{}")]),
    ),
    ("llama3_json", '{"just": "json"}', ("", '{"just": "json"}', [])),
    ("llama3_json", '{"name": "Bob", "age": 3}', ("", '{"name": "Bob", "age": 3}', [])),
    ("llama3_json", '{"name": "a", "parameters"', ("", '{"name": "a", "parameters"', [])),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "a", "arguments": {"x": "]"}, "id": "abc123def"}, {"name": "b", "arguments": {}}]',
        ("", "", [("a", '{"x": "]"}'), ("b", "{}")]),
    ),
    (
        "mistral",
        'So:[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]123456789[ARGS]{}',
        ("", "So:", [("a", '{"x": 1}'), ("b", "{}")]),
    ),
    ("mistral", '[TOOL_CALLS]a{"x": 1}', ("", "", [("a", '{"x": 1}')])),
    ("mistral", "[TOOL_CALLS] or what?", ("", "[TOOL_CALLS] or what?", [])),
    (
        "deepseek_v3",
        f'{DS_BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{{"x": 1}}\n```<｜tool▁call▁end｜>{DS_END}',
        ("", "", [("a", '{"x": 1}')]),
    ),
    (
        "deepseek_v3",
        f'Hm.{DS_BEGIN}<｜tool▁call▁begin｜>a<｜tool▁sep｜>{{"x": 1}}<｜tool▁call▁end｜>'
        f"<｜tool▁call▁begin｜>b<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>{DS_END}",
        ("", "Hm.", [("a", '{"x": 1}'), ("b", "{}")]),
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.a "
        '<|constrain|>json<|message|>{"x": 1}<|call|>',
        ("hm", "", [("a", '{"x": 1}')]),
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        ("hm", "Yes.", []),
    ),
    ("openai", "plain", ("", "plain", [])),
    *(
        (
            "openai",
            f"{role}<|message|>{{}}<|call|><|start|>assistant<|channel|>final<|message|>a",
            ("", "a", [("f", "{}")]),
        )
        for role in (
            " to=functions.f<|channel|>commentary json",
            "to=functions.f<|channel|>commentary <|constrain|>json",
            "<|channel|>analysis<|message|><|end|><|start|>assistant to=functions.f<|channel|>commentary json",
            "<|channel|>analysis<|message|><|end|><|start|>assistant to=functions.f",
        )
    ),
    ("openai", "<|channel|>commentary to=functions. <|constrain|>json<|message|>{}<|call|>", ("", "{}", [])),
    ("openai", " to=ground it", ("", " to=ground it", [])),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=raw>\nfree words\n</parameter>\n</function>\n</tool_call>",
        ("", "", [("weather", '{"city": "Ulm", "days": 3, "raw": "free words"}')]),
    ),
    ("qwen3_coder", "<tool_call>\n<function=clock>\n</function>\n</tool_call>.", ("", ".", [("clock", "{}")])),
    (
        "qwen3_coder",
        '<tool_call><function=weather><parameter=city>\n3 "x"\ny\n</parameter></function></tool_call>',
        ("", "", [("weather", '{"city": "3 \\"x\\"\\ny"}')]),
    ),
    (
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        ("", "", [("weather", '{"city": "Ulm", "days": 3}')]),
    ),
    (
        "pythonic",
        '[weather(city="Ulm", days=3), clock()]',
        ("", "", [("weather", '{"city": "Ulm", "days": 3}'), ("clock", "{}")]),
    ),
    ("pythonic", "[1, 2]", ("", "[1, 2]", [])),
]


@pytest.mark.parametrize(("kind", "text", "expected"), CASES)
@given(cuts=st.lists(st.integers(0, 160)))
def test_an_answer_is_parsed_wherever_it_is_split(
    kind: str, text: str, expected: tuple[str, str, list[Call]], cuts: list[int]
) -> None:
    assert heard(of(kind), text, cuts) == expected


_PIECES = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "a", "arguments": {"x": "', '"}}', "[TOOL_CALLS]",
    "[ARGS]", "{", "}", '"', "\\", "\n", " ", "words", "<", "<function=a>", "<parameter=city>", "</parameter>",
    "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", DS_BEGIN, DS_END, "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json\n", "<|channel|>", "analysis", "<|message|>", "<|end|>", "[", "]",
    "a", "to=functions.", "<|python_tag|>", "<|start|>", "<|call|>",
)  # fmt: skip


@pytest.mark.parametrize("kind", list(ToolFormat))
@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=14), cuts=st.lists(st.integers(0, 120)), cut=st.booleans())
def test_chunk_boundaries_never_matter(kind: str, pieces: list[str], cuts: list[int], *, cut: bool) -> None:
    text = "".join(pieces)
    for thoughts in (None, THINK, Thoughts(open=True)):
        whole = heard(of(kind, thoughts), text, cut=cut)
        assert heard(of(kind, thoughts), text, cuts, cut=cut) == whole
        assert heard(of(kind, thoughts), text, list(range(len(text))), cut=cut) == whole


@pytest.mark.parametrize("kind", ["hermes", "llama3_json", "mistral", "pythonic"])
@given(text=st.text(alphabet='<tool_cal>/{}" ;:,1n[]TOLCAS'))
def test_text_without_a_call_is_not_lost(kind: str, text: str) -> None:
    _, said, calls = heard(of(kind, None), text)
    assert calls or said == text


def test_reasoning_that_the_prompt_has_opened() -> None:
    opened = answer(Thoughts(open=True), plain)
    assert heard(opened, "because\n</think>\n\nYes.") == ("because", "Yes.", [])
    assert heard(opened, "it never ends") == ("it never ends", "", [])
    assert heard(answer(Thoughts("[THINK]", "[/THINK]"), plain), "[THINK]a[/THINK]b") == ("a", "b", [])


CUT = [
    ("hermes", '<tool_call>{"name": "b"}</tool_call><tool_call>{"name": "a", "arguments": {"x": 1', [("b", "{}")]),
    ("hermes", 'Well. <tool_call>{"na', []),
    ("llama3_json", '{"name": "b", "parameters": {}}; {"name": "a", "par', [("b", "{}")]),
    ("llama3_json", '{"name": "a", "par', []),
    ("mistral", "[TOOL_CALLS]a[ARGS]{", []),
    ("qwen3_coder", "<tool_call><function=weather><parameter=city>\nU", []),
    ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>U", []),
    ("pythonic", "[clock(), weather(ci", []),
]


@pytest.mark.parametrize(("kind", "text", "calls"), CUT)
def test_a_truncated_call_is_ignored_and_complete_ones_are_kept(kind: str, text: str, calls: list[Call]) -> None:
    _, said, found = heard(of(kind), text, cut=True)
    assert found == calls
    assert said in ("", "Well. ")


def test_answers_that_are_constrained_to_calls() -> None:
    two = '[{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"x": 1}}]'
    assert heard(array_of_calls, two) == ("", "", [("clock", "{}"), ("weather", '{"x": 1}')])
    assert heard(array_of_calls, two[:-10], cut=True) == ("", "", [("clock", "{}")])
    assert heard(arguments_of("clock"), '{"a": [1, 2]}') == ("", "", [("clock", '{"a": [1, 2]}')])
    assert heard(arguments_of("clock"), "{   ", cut=True) == ("", "", [])


def test_reasoning_tokens_are_counted() -> None:
    exact = AnswerParser(answer(THINK, plain), None, 9)
    exact.feed("<think>", [1])
    assert exact.reasoning_token_count == 0
    exact.feed("well</think>", [2, 3, 9])
    exact.feed("yes </think>", [4, 5, 9])
    assert exact.reasoning_token_count == 4
    cut = AnswerParser(answer(THINK, plain), None, 9)
    cut.feed("<think>well", [1, 2, 3])
    assert cut.reasoning_token_count == 3
    by_share = AnswerParser(answer(THINK, plain))
    by_share.feed("<think>12345</think>1234", [1] * 8)
    by_share.finish()
    assert by_share.reasoning_token_count == 2
    none = AnswerParser(answer(THINK, plain), None, 9)
    none.feed("yes", [4, 9])
    assert none.reasoning_token_count == 0


def test_arguments_stream() -> None:
    parser = AnswerParser(of("hermes"))
    begin = '<tool_call>{"name": "weather", "arguments": {"city": "'
    assert parser.feed(begin) == [CallBegin("weather"), Arguments('{"city": "')]
    for word in ("a ", "long ", "text"):
        assert parser.feed(word) == [Arguments(word)]
    assert parser.feed('"}}') == [Arguments('"}'), CallEnd(complete=True)]
    assert json.loads('{"city": "a long text"}')


def test_a_bare_text_streams_as_a_string() -> None:
    parser = AnswerParser(of("qwen3_coder"))
    parser.feed("<tool_call><function=weather><parameter=city>\n")
    assert parser.feed("first\n") == [Arguments("first")]
    assert parser.feed("second") == [Arguments("\\nsecond")]

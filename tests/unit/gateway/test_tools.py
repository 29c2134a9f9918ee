"""Calls are found in a model's words however these are cut into pieces."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import Failure
from services.gateway.openai.tools import Dialect, Hermes, Listener, Llama3Json, ToolCall, listen, tool_use_of

TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "clock"}},
]
HERMES = "{% if tools %}<tool_call>{% endif %}"
LLAMA = '{% if tools %}{"name": name, "parameters": {}}{% endif %}'


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


HERMES_CASES = {
    "plain words": ("plain words", []),
    "a < b <tool and <tool_call": ("a < b <tool and <tool_call", []),
    'Well.<tool_call>\n{"name": "clock", "arguments": {"zone": "é"}}\n</tool_call>': (
        "Well.",
        [call("clock", zone="é")],
    ),
    '<tool_call>{"name":"a","arguments":{}}</tool_call>\n<tool_call>{"name":"b","arguments":{"x":1}}</tool_call>!': (
        "!",
        [call("a"), call("b", x=1)],
    ),
    '<tool_call>{"name":"a","arguments":{"t":"</tool"}}</tool_call>': ("", [call("a", t="</tool")]),
    "<tool_call>no json</tool_call>": ("<tool_call>no json</tool_call>", []),
    '<tool_call>{"name":"a","arguments":{}}': ("", [call("a")]),
    '<tool_call>{"name":"a","argum': ('<tool_call>{"name":"a","argum', []),
}
LLAMA_CASES = {
    "plain words {not a call}": ("plain words {not a call}", []),
    '{"name": "a", "parameters": {"x": [1]}}': ("", [call("a", x=[1])]),
    '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}': ("", [call("a"), call("b")]),
    '{"just": "json"}': ('{"just": "json"}', []),
    '{"name": "a", "parameters"': ('{"name": "a", "parameters"', []),
}


@pytest.mark.parametrize(("text", "expected"), HERMES_CASES.items())
@given(cuts=st.lists(st.integers(0, 120)))
def test_hermes(text: str, expected: tuple[str, list[ToolCall]], cuts: list[int]) -> None:
    assert heard(Hermes(), text, cuts) == expected


@pytest.mark.parametrize(("text", "expected"), LLAMA_CASES.items())
@given(cuts=st.lists(st.integers(0, 120)))
def test_llama(text: str, expected: tuple[str, list[ToolCall]], cuts: list[int]) -> None:
    assert heard(Llama3Json(), text, cuts) == expected


@given(text=st.text(alphabet='<tool_cal>/{}" ;:,1n'), cuts=st.lists(st.integers(0, 60)))
def test_pieces_never_matter_and_words_are_never_lost(text: str, cuts: list[int]) -> None:
    for make in (Hermes, Llama3Json):
        assert heard(make(), text, cuts) == listen(make(), text)
        said, calls = listen(make(), text)
        assert calls or said == text


def heard(listener: Listener, text: str, cuts: list[int]) -> tuple[str, list[ToolCall]]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [listener.feed(text[a:b]) for a, b in itertools.pairwise(edges)] + [listener.finish()]
    return "".join(piece.text for piece in pieces), [each for piece in pieces for each in piece.calls]


def test_the_template_tells_the_dialect_and_the_choice_binds_the_answer() -> None:
    def use(choice: object, template: str = HERMES, dialect: Dialect | None = None, *, parallel: bool = True) -> Any:
        return tool_use_of(TOOLS, choice, parallel=parallel, template=template, dialect=dialect)

    assert use(None).dialect is Dialect.HERMES
    assert use("auto", LLAMA).dialect is Dialect.LLAMA3_JSON
    assert use("auto", LLAMA, Dialect.HERMES).dialect is Dialect.HERMES
    assert use("none") is None
    assert use("auto").grammar is None
    assert json.loads(use("required", parallel=False).grammar.text)["maxItems"] == 1
    named = use({"type": "function", "function": {"name": "clock"}})
    assert json.loads(named.grammar.text)["additionalProperties"] is False
    assert listen(named.listener(), '{"a": 1}') == ("", [ToolCall("clock", '{"a": 1}')])
    required = '[{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"x": 1}}]'
    assert listen(use("required").listener(), required) == ("", [call("clock"), call("weather", x=1)])
    assert listen(use("required").listener(), required[:20]) == (required[:20], [])
    assert tool_use_of(None, None, parallel=True, template=HERMES, dialect=None) is None


@pytest.mark.parametrize(
    ("tools", "choice", "template", "param"),
    [
        (None, "required", HERMES, "tool_choice"),
        (TOOLS, "auto", "no such thing", "tools"),
        (TOOLS, {"function": {"name": "other"}}, HERMES, "tool_choice"),
        (TOOLS, 5, HERMES, "tool_choice"),
        ([{"type": "retrieval"}], "auto", HERMES, "tools[0]"),
    ],
)
def test_malformed_tools_are_refused_by_name(tools: Any, choice: Any, template: str, param: str) -> None:
    with pytest.raises(Failure) as caught:
        tool_use_of(tools, choice, parallel=True, template=template, dialect=None)
    assert caught.value.param == param

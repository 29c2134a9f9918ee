"""The tools that the chat template gets, and the grammar that constrains the answer."""

import json
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher

from ballast.common.sampling import Grammar, GrammarKind
from services.gateway.errors import Failure
from services.gateway.openai.formats import ReasoningParser, Thoughts, ToolFormat, thoughts_of
from services.gateway.openai.scanner import AnswerParser, Arguments, CallBegin, CallEnd, Reasoning
from services.gateway.openai.tools import tool_use_of

TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "clock"}},
]
HERMES = "{% if tools %}<tool_call>{% endif %}"
LLAMA = '{% if tools %}{"name": name, "parameters": {}}{% endif %}'


def use(choice: object, template: str = HERMES, kind: ToolFormat | None = None, *, parallel: bool = True) -> Any:
    return tool_use_of(TOOLS, choice, parallel=parallel, template=template, kind=kind)


def test_the_tool_choice_constrains_the_answer() -> None:
    assert use(None).kind is ToolFormat.HERMES
    assert use("auto", LLAMA, ToolFormat.HERMES).kind is ToolFormat.HERMES
    assert use("none") is None
    assert use("auto").grammar is None
    assert use("auto", parallel=False).most_calls == 1
    assert json.loads(use("required", parallel=False).grammar.text)["maxItems"] == 1
    named = use({"type": "function", "function": {"name": "clock"}})
    assert json.loads(named.grammar.text)["additionalProperties"] is False
    assert tool_use_of(None, None, parallel=True, template=HERMES, kind=None) is None


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (HERMES, "hermes"),
        (LLAMA, "llama3_json"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{% if tools %}<tool_call>\n<function=example>{% endif %}", "qwen3_coder"),
        ("{% if tools %}<tool_call>{name}<arg_key>{% endif %}", "glm45"),
        ("{{ tools }}<|start|>assistant<|channel|>", "openai"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("{{ tools }}[func_name1(params_name1=value)]", "pythonic"),
        ("{{ tools }}", "hermes"),
    ],
)
def test_the_format_follows_from_the_template(template: str, kind: str) -> None:
    assert use("auto", template).kind == kind


def test_a_template_may_begin_the_reasoning() -> None:
    open_ = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    asked = "{% if add_generation_prompt %}{% if enable_thinking is false %}<think>\n\n</think>{% endif %}{% endif %}"
    assert thoughts_of(ReasoningParser.AUTO, open_, {}) == Thoughts(open=True)
    assert thoughts_of(ReasoningParser.AUTO, open_, {"enable_thinking": False}) == Thoughts()
    assert thoughts_of(ReasoningParser.AUTO, asked, {}) == Thoughts(likely=True)
    assert thoughts_of(ReasoningParser.AUTO, asked, {"enable_thinking": False}) == Thoughts()
    assert thoughts_of(ReasoningParser.DEEPSEEK_R1, "", {}) == Thoughts(open=True)
    assert thoughts_of(ReasoningParser.AUTO, "[THINK]", {}) == Thoughts("[THINK]", "[/THINK]", likely=True)
    assert thoughts_of(ReasoningParser.NONE, open_, {}) is None


def test_a_grammar_begins_after_the_reasoning() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a")
    assert Thoughts().before(grammar) == grammar
    assert Thoughts(open=True).before(grammar) == replace(grammar, thought_end="</think>")
    likely = Thoughts("[THINK]", "[/THINK]", likely=True).before(grammar)
    assert (likely.thought_begin, likely.thought_end) == ("[THINK]", "[/THINK]")


def test_required_calls_may_follow_reasoning() -> None:
    for choice, text in (("required", '[{"name": "clock", "arguments": {}}]'), ({"function": {"name": "clock"}}, "{}")):
        tools = tool_use_of(TOOLS, choice, parallel=True, template=HERMES, kind=None)
        assert tools is not None
        parser = AnswerParser(tools.format(Thoughts(open=True)))
        events = [*parser.feed("hm <tool_call></think>\n\n" + text), *parser.finish()]
        assert events == [Reasoning("hm <tool_call>"), CallBegin("clock"), Arguments("{}"), CallEnd(complete=True)]


def test_references_within_a_tool_are_valid_in_the_array_of_calls() -> None:
    leaf = {"type": "object", "properties": {"n": {"type": "integer"}, "$ref": {"type": "string"}}}
    nested = {
        "$defs": {"Leaf": leaf},
        "type": "object",
        "properties": {"leaf": {"$ref": "#/$defs/Leaf"}, "again": {"$ref": "#"}},
    }
    tool: Any = {"type": "function", "function": {"name": "book", "parameters": nested}}
    grammar = tool_use_of([tool], "required", parallel=True, template=HERMES, kind=None)
    assert grammar is not None
    assert grammar.grammar is not None
    schema = json.loads(grammar.grammar.text)
    book = schema["$defs"]["0"]
    assert book["properties"]["leaf"]["$ref"] == "#/$defs/0/$defs/Leaf"
    assert book["properties"]["again"]["$ref"] == "#/$defs/0"
    assert book["$defs"]["Leaf"] == leaf  # a property named $ref stays as it is
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(grammar.grammar.text)) == ""


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
        tool_use_of(tools, choice, parallel=True, template=template, kind=None)
    assert caught.value.param == param


def allowed(mode: object, *names: str) -> dict[str, Any]:
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": n}} for n in names]},
    }


def test_only_tools_that_are_allowed_are_shown_and_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("sail", "row", "drift")]
    given: dict[str, Any] = {"parallel": True, "template": "tools <tool_call>", "kind": None}
    use = tool_use_of(tools, allowed("auto", "row", "sail"), **given)
    assert use is not None
    assert list(use.tools) == tools[:2]
    assert use.grammar is None
    demanded = tool_use_of(tools, allowed("required", "row"), **given)
    assert demanded is not None
    assert demanded.grammar == tool_use_of(tools[1:2], "required", **given).grammar  # pyright: ignore[reportOptionalMemberAccess]
    for choice in (allowed("auto", "fly"), allowed("auto"), allowed("none", "row"), {"type": "allowed_tools"}):
        with pytest.raises(Failure) as refused:
            tool_use_of(tools, choice, **given)
        assert refused.value.param == "tool_choice"

"""Parsers for the formats in which models write reasoning and tool calls, built on `scanner`.

Sources: the chat templates and model cards of Qwen 2.5/3 and Hermes (`hermes`), Qwen3-Coder, Llama 3, Mistral
(tokenizers v3 to v11), DeepSeek V3 and V3.1, GPT-OSS (harmony), GLM-4.5, Llama 4 (`pythonic`).
"""

import ast
import functools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, cast

from ballast.common.sampling import Grammar
from services.gateway.openai.scanner import (
    Arguments,
    Body,
    CallBegin,
    CallEnd,
    Events,
    Format,
    Found,
    Reasoning,
    Scanner,
    Test,
    Text,
    collect,
    literal,
    more,
    space,
    string,
    until,
    until_trimmed,
    value,
)


class ToolFormat(StrEnum):
    """Formats of tool calls. Names are vLLM's if it supports the format."""

    HERMES = "hermes"
    QWEN3_CODER = "qwen3_coder"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"
    DEEPSEEK_V3 = "deepseek_v3"
    OPENAI = "openai"  # GPT-OSS, whose reasoning, calls and text are channels
    GLM45 = "glm45"
    PYTHONIC = "pythonic"


class ReasoningParser(StrEnum):
    """Formats of reasoning. Names are vLLM's if it has the parser."""

    AUTO = "auto"
    NONE = "none"
    QWEN3 = "qwen3"  # <think> ... </think>
    DEEPSEEK_R1 = "deepseek_r1"  # the same tags, but the prompt always contains the first one
    MISTRAL = "mistral"  # [THINK] ... [/THINK]


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The tags around reasoning. `open`: the prompt already contains the first tag. `likely`: the model may begin to
    reason, because its template has the tags and the request does not disable reasoning.
    """

    begin: str = "<think>"
    end: str = "</think>"
    open: bool = False
    likely: bool = False

    def before(self, grammar: Grammar) -> Grammar:
        """Return the grammar, preceded by unconstrained reasoning if the model may begin it, or the prompt has."""
        if not (self.open or self.likely):
            return grammar
        return replace(grammar, thought_end=self.end, thought_begin="" if self.open else self.begin)


@functools.lru_cache(maxsize=8)
def format_by_template(template: str) -> ToolFormat:
    """Return the format of tool calls in a chat template; HERMES if none is recognised."""
    return next((kind for mark, kind in _MARKS if mark in template), ToolFormat.HERMES)


def thoughts_of(parser: ReasoningParser, template: str, variables: Mapping[str, object]) -> Thoughts | None:
    """Return the tags of a model's reasoning; None: reasoning is not parsed.

    Args:
        parser: The configured parser. AUTO: `[THINK]` if the template contains it, otherwise `<think>`.
        template: The model's chat template. Reasoning is open if its generation prompt ends with the first tag.
        variables: Template variables of this request, of which `enable_thinking` is used.
    """
    match parser:
        case ReasoningParser.NONE:
            return None
        case ReasoningParser.MISTRAL:
            return Thoughts("[THINK]", "[/THINK]", likely=True)
        case ReasoningParser.DEEPSEEK_R1:
            return Thoughts(open=True)
        case ReasoningParser.AUTO if "[THINK]" in template:
            return Thoughts("[THINK]", "[/THINK]", likely=True)
        case _:
            knows, ends_inside = _thinking(template)
            wanted = variables.get("enable_thinking") is not False
            knows = knows or parser is ReasoningParser.QWEN3
            return Thoughts(open=ends_inside and wanted, likely=knows and wanted and not ends_inside)


@functools.lru_cache(maxsize=8)
def _thinking(template: str) -> tuple[bool, bool]:
    """Return (whether a template contains the reasoning tag, whether its generation prompt begins the reasoning)."""
    _, _, prompt = template.rpartition("add_generation_prompt")
    return "<think>" in template, "<think>" in prompt and "</think>" not in prompt


_MARKS = (
    ("<|channel|>", ToolFormat.OPENAI),
    ("[TOOL_CALLS]", ToolFormat.MISTRAL),
    ("<｜tool▁calls▁begin｜>", ToolFormat.DEEPSEEK_V3),
    ("<arg_key>", ToolFormat.GLM45),
    ("<function=", ToolFormat.QWEN3_CODER),
    ("<tool_call>", ToolFormat.HERMES),
    ("[func_name1(", ToolFormat.PYTHONIC),
    ("<|python_tag|>", ToolFormat.LLAMA3_JSON),
    ('"parameters"', ToolFormat.LLAMA3_JSON),
)


def answer(thoughts: Thoughts | None, calls: Format) -> Format:
    """Return the parser of answers that may begin with reasoning. `calls` parses the rest."""

    def parse(scanner: Scanner) -> Events:
        if thoughts is not None:
            yield from _thoughts(scanner, thoughts)
        yield from calls(scanner)

    return parse


def plain(scanner: Scanner) -> Events:
    """Parse an answer that is only text."""
    scanner.passes_text = True
    yield from until(scanner, (), Text)


def format_of(kind: ToolFormat, tools: Sequence[Mapping[str, Any]], thoughts: Thoughts | None) -> Format:
    """Return the parser of a model's answers.

    Args:
        kind: The format of tool calls.
        tools: Tools of the request, whose schemas give the types of values in formats that write values without types.
        thoughts: The tags of reasoning; None: reasoning is text.
    """
    types = dict(map(_named_properties, tools))
    again = thoughts and Thoughts(thoughts.begin, thoughts.end)  # tags of further reasoning, between calls
    if kind is ToolFormat.OPENAI:
        return _harmony
    if kind is ToolFormat.LLAMA3_JSON:
        calls: Format = _llama3_json
    elif kind is ToolFormat.PYTHONIC:
        calls = _pythonic
    elif kind is ToolFormat.MISTRAL:
        calls = _tagged("[TOOL_CALLS]", _mistral, again)
    elif kind is ToolFormat.DEEPSEEK_V3:
        calls = _tagged("<｜tool▁calls▁begin｜>", _deepseek, again)
    elif kind is ToolFormat.GLM45:
        calls = _tagged("<tool_call>", lambda scanner: _glm(scanner, types), again)
    elif kind is ToolFormat.QWEN3_CODER:
        calls = _tagged("<tool_call>", lambda scanner: _qwen3_coder(scanner, types), again)
    else:
        calls = _tagged("<tool_call>", _hermes, again)
    return answer(thoughts, calls)


def array_of_calls(scanner: Scanner) -> Events:
    """Parse an answer that a grammar constrains to a JSON array of calls."""
    yield from space(scanner)
    if (yield from literal(scanner, "[")):
        yield from _objects(scanner, "]")


def arguments_of(name: str) -> Format:
    """Return the parser of an answer that a grammar constrains to the arguments of one function."""

    def parse(scanner: Scanner) -> Events:
        yield from space(scanner)
        if scanner.rest:
            yield CallBegin(name)
            yield CallEnd((yield from value(scanner, Arguments)))

    return parse


# ------------------------------------------------------------------------------------------------ thoughts


def _thoughts(scanner: Scanner, tags: Thoughts) -> Events:
    """Parse the reasoning that follows, and drop the whitespace around it. If none follows, nothing is consumed."""
    is_open = tags.open
    while True:
        start = scanner.at
        yield from space(scanner)
        if not (yield from literal(scanner, tags.begin)) and not is_open:
            scanner.at = start
            return
        is_open = False
        yield from space(scanner, "\r\n")
        yield from until_trimmed(scanner, tags.end, Reasoning, most=sys.maxsize)
        yield from space(scanner, "\r\n")


# ------------------------------------------------------------------------------------------------ calls


def _tagged(begin: str, body: Body, thoughts: Thoughts | None) -> Format:
    """Return the parser of text in which calls follow the tag `begin`. `body` parses a call. A tag without a call is
    text. `thoughts`: tags of reasoning after a call.
    """

    def parse(scanner: Scanner) -> Events:
        while (yield from until(scanner, (begin,), Text)) is not None:
            start, scanner.starved = scanner.at - len(begin), False
            if (yield from body(scanner)):
                yield from space(scanner, "\r\n")
                if thoughts is not None:
                    yield from _thoughts(scanner, thoughts)
            elif scanner.starved and scanner.cut:
                return  # a call truncated before its arguments
            else:
                yield Text(scanner.text[start : scanner.at])

    return parse


def _hermes(scanner: Scanner) -> Test:
    """Parse `{"name": ..., "arguments": {...}}</tool_call>`; the last tag may be missing."""
    yield from space(scanner)
    if not (yield from _object(scanner)):
        return False
    yield from space(scanner)
    yield from literal(scanner, "</tool_call>")
    return True


def _object(scanner: Scanner, *, bare: bool = True) -> Test:
    """Parse `{"name": ..., "arguments": ...}` (or `parameters`). False: it does not match, and no event was emitted.

    `bare`: a call may omit its arguments.
    """
    if not (yield from literal(scanner, "{")):
        return False
    name: str | None = None
    early: str | None = None  # arguments that precede the name
    begun = False
    while True:
        yield from space(scanner, " \t\r\n,")
        if (yield from literal(scanner, "}")):
            break
        key = yield from string(scanner) if scanner.rest.startswith('"') else _nothing()
        if key is None:
            return (yield from _broken(begun))
        yield from space(scanner)
        if not (yield from literal(scanner, ":")):
            return (yield from _broken(begun))
        yield from space(scanner)
        if key == "name" and name is None:
            name = yield from string(scanner)
            if name is None:
                return (yield from _broken(begun))
        elif key in ("arguments", "parameters") and not begun and early is None:
            if name is not None and scanner.rest.startswith("{"):
                begun = True
                yield CallBegin(name)
                if not (yield from value(scanner, Arguments)):
                    yield CallEnd(complete=False)
                    return True
            else:
                start = scanner.at
                if not (yield from value(scanner, None)):
                    return False
                early = _as_object(scanner.text[start : scanner.at])
                if early is None:
                    return False
        elif not (yield from value(scanner, None)):
            return (yield from _broken(begun))
    if name is None or not (bare or begun or early is not None):
        return False
    if not begun:
        yield CallBegin(name)
        yield Arguments(early or "{}")
    yield CallEnd(complete=True)
    return True


def _nothing() -> Found:
    return None
    yield None


def _broken(begun: bool) -> Test:
    if begun:  # the arguments were complete, but invalid JSON follows
        yield CallEnd(complete=True)
    return begun


def _as_object(text: str) -> str | None:
    """Return the arguments of a call as JSON text, from JSON of an object, of a string with such text, or null; else
    None.
    """
    if text.startswith("{"):
        return text
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    if value is None:
        return "{}"
    return value if isinstance(value, str) else None


def _objects(scanner: Scanner, end: str, *, bare: bool = True) -> Test:
    """Parse calls that are objects, separated by commas or semicolons, up to `end` (empty: the end of the answer).
    False: there is no call.
    """
    found = False
    while True:
        yield from space(scanner, " \t\r\n,;")
        if not scanner.rest or (end and (yield from literal(scanner, end))):
            return found
        start = scanner.at
        if not (yield from _object(scanner, bare=bare)):
            scanner.at = len(scanner.text) if found and scanner.starved and scanner.cut else start
            return found
        found = True


def _llama3_json(scanner: Scanner) -> Events:
    """Parse an answer that is only calls if it begins with a brace or `<|python_tag|>`, and only text otherwise."""
    start = scanner.at
    yield from space(scanner)
    tagged = yield from literal(scanner, "<|python_tag|>")
    yield from space(scanner)
    if (tagged or scanner.rest.startswith("{")) and (yield from _objects(scanner, "", bare=False)):
        yield from space(scanner)
        start = scanner.at
    elif scanner.starved and scanner.cut and _is_head(scanner.rest):
        return
    scanner.at = start
    yield from until(scanner, (), Text)


def _is_head(text: str) -> bool:
    """True if the text so far may be the beginning of a call."""
    return text.startswith(('{"name"', '{ "name"', '{"type"'))


def _mistral(scanner: Scanner) -> Test:
    """Parse an array of objects, or `name[ARGS]{...}`; `[CALL_ID]...` may precede `[ARGS]`, which may be missing."""
    yield from space(scanner)
    if (yield from literal(scanner, "[")):
        return (yield from _objects(scanner, "]"))
    start = scanner.at
    name, tag = yield from collect(scanner, ("[ARGS]", "[CALL_ID]", "{", "[TOOL_CALLS]"))
    if tag == "[CALL_ID]":
        _, tag = yield from collect(scanner, ("[ARGS]", "{"))
    name = name.strip()
    if tag not in ("[ARGS]", "{") or not name or any(c.isspace() for c in name):
        scanner.at = len(scanner.text) if tag is None else start
        return False
    if tag == "{":
        scanner.at -= 1
    yield from space(scanner)
    yield CallBegin(name)
    yield CallEnd((yield from value(scanner, Arguments)))
    return True


def _deepseek(scanner: Scanner) -> Test:
    """Parse calls between tags: `function<sep>name`, a line break, a fenced object (V3); or `name<sep>{...}` (V3.1)."""
    found = False
    while True:
        yield from space(scanner)
        if not (yield from literal(scanner, "<｜tool▁call▁begin｜>")):
            yield from literal(scanner, "<｜tool▁calls▁end｜>")
            return found
        name, tag = yield from collect(scanner, ("<｜tool▁sep｜>",))
        if tag is None:
            return found
        yield from space(scanner)
        if not scanner.rest.startswith("{"):
            name, tag = yield from collect(scanner, ("```json", "<｜tool▁call▁end｜>"))
            if tag != "```json":
                return found
            yield from space(scanner)
        found = True
        yield CallBegin(name.strip())
        whole = yield from value(scanner, Arguments)
        yield CallEnd(whole)
        yield from collect(scanner, ("<｜tool▁call▁end｜>",))


def _qwen3_coder(scanner: Scanner, types: Mapping[str, Mapping[str, Any]]) -> Test:
    """Parse `<function=name>`, then parameters, each as bare text between `<parameter=key>` and its end tag."""
    yield from space(scanner)
    if not (yield from literal(scanner, "<function=")):
        return False
    name, tag = yield from collect(scanner, (">",))
    if tag is None:
        return False
    name = name.strip()
    yield CallBegin(name)
    before = "{"
    while True:
        yield from space(scanner)
        if not (yield from literal(scanner, "<parameter=")):
            break
        key, _ = yield from collect(scanner, (">",))
        yield from literal(scanner, "\n")
        yield Arguments(f"{before}{_quoted(key.strip())}: ")
        if not (yield from _bare_value(scanner, "</parameter>", types.get(name, {}).get(key.strip()), most=1)):
            yield CallEnd(complete=False)
            return True
        before = ", "
    whole = yield from literal(scanner, "</function>")
    if whole:
        yield Arguments("{}" if before == "{" else "}")
    yield CallEnd(whole)
    yield from space(scanner)
    yield from literal(scanner, "</tool_call>")
    return True


def _glm(scanner: Scanner, types: Mapping[str, Mapping[str, Any]]) -> Test:
    """Parse `name`, then pairs of `<arg_key>` and `<arg_value>` that contain bare text."""
    name, tag = yield from collect(scanner, ("<arg_key>", "</tool_call>"))
    name = name.strip()
    if tag is None or not name or name.startswith("{"):
        return False
    yield CallBegin(name)
    before = "{"
    while tag == "<arg_key>":
        key, _ = yield from collect(scanner, ("</arg_key>",))
        yield from collect(scanner, ("<arg_value>",))
        yield Arguments(f"{before}{_quoted(key.strip())}: ")
        if not (yield from _bare_value(scanner, "</arg_value>", types.get(name, {}).get(key.strip()), most=0)):
            yield CallEnd(complete=False)
            return True
        before = ", "
        _, tag = yield from collect(scanner, ("<arg_key>", "</tool_call>"))
    yield Arguments("{}" if before == "{" else "}")
    yield CallEnd(complete=True)
    return True


_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


def _harmony(scanner: Scanner) -> Events:
    """Parse an answer of GPT-OSS, which is messages in channels: the channel `analysis` is reasoning, a message to a
    function is a call, and all others are text. The recipient is named after the role or after the channel.
    """
    tags = ("<|channel|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|message|>")
    ends = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
    start, role, tag = scanner.at, "", None
    yield from space(scanner, " ")
    if (yield from literal(scanner, "to=")):  # the prompt ends with the role, and the answer begins with its recipient
        role, tag = yield from collect(scanner, ("<|channel|>", "<|message|>"))
        role = f"to={role}"
    if tag is None:
        scanner.at = start
    while True:
        if tag is None:
            role, tag = "", (yield from until(scanner, tags, Text))
            if tag is None:
                return
        if tag == "<|start|>":
            role, tag = yield from collect(scanner, ("<|channel|>", "<|message|>"))
        channel = None
        if tag == "<|channel|>":
            channel, tag = yield from collect(scanner, ("<|message|>",))
            if tag is None:
                return
        if tag == "<|message|>" and (to := _RECIPIENT.search(f"{role} {channel or ''}")):
            yield CallBegin(to[1])
            yield from space(scanner)
            whole = yield from value(scanner, Arguments)
            yield CallEnd(whole)
            _, tag = yield from collect(scanner, ends)
        elif channel is None:
            tag = None
        else:
            is_thought = channel.strip().startswith("analysis")
            tag = yield from until(scanner, ends, Reasoning if is_thought else Text)
        if tag != "<|start|>":
            tag = None


def _pythonic(scanner: Scanner) -> Events:
    """Parse an answer that is a Python list of calls with keyword arguments, `[f(a=1), g()]`, or else text. Calls are
    emitted at the end of the answer.
    """
    start = scanner.at
    yield from space(scanner)
    if scanner.rest.startswith("["):
        while (yield from more(scanner)):
            pass
        calls = _python_calls(scanner.rest)
        if calls:
            scanner.at = len(scanner.text)
            for name, arguments in calls:
                yield CallBegin(name)
                yield Arguments(arguments)
                yield CallEnd(complete=True)
            return
        if scanner.cut:
            return
    scanner.at = start
    yield from until(scanner, (), Text)


def _python_calls(text: str) -> list[tuple[str, str]]:
    """Return (name, JSON text of the arguments) of each call in a Python list; empty if the text is not such a list."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: list[tuple[str, str]] = []
    for call in tree.elts if isinstance(tree, ast.List) else []:
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            return []
        try:
            values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            found.append((ast.unparse(call.func), json.dumps(values, ensure_ascii=False, allow_nan=False)))
        except (ValueError, TypeError):
            return []
    return found


# ------------------------------------------------------------------------------------------------ bare values


def _named_properties(tool: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    function: Mapping[str, Any] = tool.get("function") or {}
    parameters: Mapping[str, Any] = function.get("parameters") or {}
    properties: object = parameters.get("properties")
    return str(function.get("name")), cast(Mapping[str, Any], properties) if isinstance(properties, Mapping) else {}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _bare_value(scanner: Scanner, end: str, schema: object, *, most: int) -> Test:
    """Emit the text up to the end tag, without up to `most` trailing line breaks, as a JSON value. False: the end tag
    is missing.

    The value is a string if its schema says so, and is then streamed; otherwise it is JSON, or a string if it is not
    valid JSON.
    """
    kind: object = cast(Mapping[str, Any], schema).get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        yield Arguments('"')
        ended = yield from until_trimmed(scanner, end, lambda text: Arguments(_quoted(text)[1:-1]), most)
        yield Arguments('"')
        return ended is not None
    text, tag = yield from collect(scanner, (end,))
    text = text.removesuffix("\n") if most else text
    try:
        json.loads(text, parse_constant=_refuse)
        yield Arguments(text.strip())
    except (ValueError, RecursionError):
        yield Arguments(_quoted(text))
    return tag is not None


def _refuse(word: str) -> None:
    raise ValueError(word)

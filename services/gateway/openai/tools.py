"""Tools: what a model is told of them, what it is bound to, and how its calls are found in its words.

Two ways of writing calls are common. `hermes` (Nous Hermes, Qwen): `{"name": ..., "arguments": {...}}` between the tags
`<tool_call>` and `</tool_call>`, amid text. `llama3_json` (Llama 3): the whole answer is
`{"name": ..., "parameters": {...}}`, several with a semicolon between. A call is told to the client in one piece.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, cast

from ballast.common.sampling import Grammar
from services.gateway.errors import invalid
from services.gateway.openai.structure import json_schema

_BEGIN, _END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_MAX_CALLS = 16  # in one answer that has to consist of calls

# Any: foreign JSON.
Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a function.

    Attributes:
        name: Of the function.
        arguments: JSON, as the model has written it.
    """

    name: str
    arguments: str


class Dialect(StrEnum):
    """How a model writes its calls."""

    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"


@dataclass(frozen=True, slots=True)
class Heard:
    """What a piece of text has brought."""

    text: str = ""
    calls: Sequence[ToolCall] = field(default_factory=tuple[ToolCall, ...])


class Listener(Protocol):
    """Finds calls in the text of one choice, piece by piece."""

    def feed(self, text: str) -> Heard: ...

    def finish(self) -> Heard:
        """What is left when nothing more comes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How one request uses tools.

    Attributes:
        tools: What the template is told of; empty: of none.
        grammar: What the answer is bound to; None: the model chooses.
        dialect: How calls are written where the model chooses.
        named: The only function that may be called: the answer consists of its arguments.
    """

    tools: Sequence[Tool]
    grammar: Grammar | None
    dialect: Dialect
    named: str | None = None

    def listener(self) -> Listener:
        if self.named is not None:
            return _Arguments(self.named)
        if self.grammar is not None:
            return _Array()
        return Hermes() if self.dialect is Dialect.HERMES else Llama3Json()


def tool_use_of(
    tools: Sequence[Tool] | None, choice: object, *, parallel: bool, template: str, dialect: Dialect | None
) -> ToolUse | None:
    """None: the request has nothing to do with tools.

    Args:
        tools: Of the request.
        choice: Its tool_choice.
        parallel: Whether one answer may have several calls.
        template: The model's chat template, which tells the dialect.
        dialect: What the operator says about it; None: nothing.

    Raises:
        Failure: a tool or the choice is malformed, or the model's template knows no tools.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "needs tools")
        return None
    functions = {_name(index, tool): _parameters(tool) for index, tool in enumerate(tools)}
    if choice == "none":
        return None
    if "tools" not in template:
        raise invalid("tools", "this model's chat template knows no tools", code="unsupported_value")
    if dialect is None:
        knows_llama = "<tool_call>" not in template and (_PYTHON_TAG in template or '"parameters"' in template)
        dialect = Dialect.LLAMA3_JSON if knows_llama else Dialect.HERMES
    if choice in (None, "auto"):
        return ToolUse(tools=tools, grammar=None, dialect=dialect)
    if choice == "required":
        return ToolUse(tools=tools, grammar=_calls(functions, _MAX_CALLS if parallel else 1), dialect=dialect)
    named = _chosen(choice)
    if named not in functions:
        raise invalid("tool_choice", f"{named!r} is none of the tools")
    return ToolUse(tools=tools, grammar=json_schema(functions[named]), dialect=dialect, named=named)


def _name(index: int, tool: Tool) -> str:
    function: object = tool.get("function")
    name: object = cast(Tool, function).get("name") if isinstance(function, Mapping) else None
    if tool.get("type", "function") != "function" or not isinstance(name, str) or not name:
        raise invalid(f"tools[{index}]", "must be a function with a name")
    return name


def _parameters(tool: Tool) -> Mapping[str, Any]:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def _chosen(choice: object) -> str:
    if isinstance(choice, Mapping):
        given = cast(Mapping[str, Any], choice)
        name: object = cast(Mapping[str, Any], given.get("function") or given).get("name")
        if isinstance(name, str):
            return name
    raise invalid("tool_choice", "must be none, auto, required, or a function by its name")


def _calls(functions: Mapping[str, Mapping[str, Any]], most: int) -> Grammar:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": parameters},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, parameters in functions.items()
    ]
    return json_schema({"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}})


class Hermes:
    """Calls between tags; what stands around them is text."""

    def __init__(self) -> None:
        self._held = ""  # a tag may have begun here
        self._is_inside = False
        self._is_behind_a_call = False  # line breaks there belong to nobody

    def feed(self, text: str) -> Heard:
        self._held += text
        said: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if not self._is_inside:
                if self._is_behind_a_call:
                    self._held = self._held.lstrip("\n")
                    self._is_behind_a_call = not self._held
                before, found, rest = self._held.partition(_BEGIN)
                if not found:
                    keep = _begun(self._held, _BEGIN)
                    said.append(self._held[: len(self._held) - keep])
                    self._held = self._held[len(self._held) - keep :]
                    break
                said.append(before)
                self._held, self._is_inside = rest, True
            inner, found, rest = self._held.partition(_END)
            if not found:
                break
            self._held, self._is_inside, self._is_behind_a_call = rest, False, True
            call = _call(inner)
            if call is None:
                said.append(_BEGIN + inner + _END)  # no call after all
            else:
                calls.append(call)
        return Heard("".join(said), tuple(calls))

    def finish(self) -> Heard:
        held, self._held = self._held, ""
        if not self._is_inside:
            return Heard(held)
        call = _call(held)  # some models leave the last tag out
        return Heard(_BEGIN + held) if call is None else Heard("", (call,))


class Llama3Json:
    """An answer that begins with a brace, or with the tag for it, is calls or nothing."""

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def feed(self, text: str) -> Heard:
        if self._is_text:
            return Heard(text)
        self._held += text
        begin = self._held.lstrip()
        if not begin or begin[0] == "{" or begin.startswith(_PYTHON_TAG) or _PYTHON_TAG.startswith(begin):
            return Heard()
        self._is_text = True
        said, self._held = self._held, ""
        return Heard(said)

    def finish(self) -> Heard:
        held, self._held = self._held, ""
        calls = _several(held.strip().removeprefix(_PYTHON_TAG))
        return Heard("", calls) if calls else Heard(held)


def listen(listener: Listener, text: str) -> tuple[str, list[ToolCall]]:
    """All of an answer at once: what is no call, and the calls."""
    heard = [listener.feed(text), listener.finish()]
    return "".join(each.text for each in heard), [call for each in heard for call in each.calls]


class _Array:
    """An answer that is bound to be an array of calls."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> Heard:
        self._held += text
        return Heard()

    def finish(self) -> Heard:
        try:
            given: object = json.loads(self._held)
        except ValueError:
            return Heard(self._held)  # cut off by max_tokens
        calls = [_from_object(each) for each in cast(list[object], given if isinstance(given, list) else [])]
        return Heard("", tuple(call for call in calls if call is not None))


class _Arguments:
    """An answer that is bound to be the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._held = ""

    def feed(self, text: str) -> Heard:
        self._held += text
        return Heard()

    def finish(self) -> Heard:
        return Heard("", (ToolCall(self._name, self._held),)) if self._held else Heard()


def _begun(text: str, tag: str) -> int:
    """Characters at the end of `text` that may be the beginning of the tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


def _call(text: str) -> ToolCall | None:
    try:
        return _from_object(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _several(text: str) -> tuple[ToolCall, ...]:
    """Objects one behind the other with semicolons or blanks between; empty if anything else is among them."""
    decoder, calls, at = json.JSONDecoder(), list[ToolCall](), 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return ()
        call = _from_object(value)
        if call is None:
            return ()
        calls.append(call)
        while at < len(text) and text[at] in "; \n\t\r":
            at += 1
    return tuple(calls)


def _from_object(value: object) -> ToolCall | None:
    if not isinstance(value, Mapping):
        return None
    given = cast(Mapping[str, Any], value)
    name: object = given.get("name")
    arguments: object = given.get("arguments", given.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, (Mapping, str)):
        return None
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))

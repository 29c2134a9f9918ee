"""Tools of a request: the template variable, the constraint on the answer, and its parser."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ballast.common.sampling import Grammar
from services.gateway.errors import invalid
from services.gateway.openai.formats import (
    Thoughts,
    ToolFormat,
    answer,
    arguments_of,
    array_of_calls,
    format_by_template,
    format_of,
)
from services.gateway.openai.scanner import Format
from services.gateway.openai.structure import json_schema, rooted

_MAX_CALLS = 16  # maximum calls in an answer that a grammar constrains to calls

_KINDS = {"type", "$ref", "anyOf", "oneOf", "allOf"}  # keys by which a schema may require an object

# Any: external JSON.
Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """How one request uses tools.

    Attributes:
        tools: Tools for the template.
        grammar: Constrains the answer to calls; None: the model decides whether to call.
        kind: Format of calls if the model decides whether to call.
        named: The only function to call: the answer consists of its arguments. None: any function.
        most_calls: Maximum calls per answer; None: unlimited.
    """

    tools: Sequence[Tool]
    grammar: Grammar | None
    kind: ToolFormat
    named: str | None = None
    most_calls: int | None = None

    def format(self, thoughts: Thoughts | None) -> Format:
        """Return the parser of the answer."""
        if self.named is not None:
            return answer(thoughts, arguments_of(self.named))
        if self.grammar is not None:
            return answer(thoughts, array_of_calls)
        return format_of(self.kind, self.tools, thoughts)


def tool_use_of(
    tools: Sequence[Tool] | None, choice: object, *, parallel: bool, template: str, kind: ToolFormat | None
) -> ToolUse | None:
    """Determine how a request uses tools; None if it has no tools, or must not use them.

    Args:
        tools: The request's tools.
        choice: The request's tool_choice.
        parallel: Whether an answer may contain several calls.
        template: The model's chat template, from which the format of calls is derived.
        kind: The configured format of calls; None: derived from the template.

    Raises:
        Failure: a tool or the choice is malformed, or the model's template does not support tools.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "needs tools")
        return None
    functions = {_name(index, tool): _parameters(index, tool) for index, tool in enumerate(tools)}
    told = cast(Mapping[str, Any], choice if isinstance(choice, Mapping) else {})
    if told.get("type") == "allowed_tools":
        allowed, choice = _allowed(told, functions)
        tools = [tool for index, tool in enumerate(tools) if _name(index, tool) in allowed]
        functions = {name: schema for name, schema in functions.items() if name in allowed}
    if choice == "none":
        return None
    if "tools" not in template:
        raise invalid("tools", "this model's chat template does not support tools", code="unsupported_value")
    kind = kind or format_by_template(template)
    most = None if parallel else 1
    if choice in (None, "auto"):
        return ToolUse(tools=tools, grammar=None, kind=kind, most_calls=most)
    if choice == "required":
        return ToolUse(tools=tools, grammar=_calls(functions, most or _MAX_CALLS), kind=kind)
    named = _chosen(cast(object, choice))
    if named not in functions:
        raise invalid("tool_choice", f"{named!r} is not one of the tools")
    return ToolUse(tools=tools, grammar=json_schema(functions[named]), kind=kind, named=named)


def _name(index: int, tool: Tool) -> str:
    function: object = tool.get("function")
    name: object = cast(Tool, function).get("name") if isinstance(function, Mapping) else None
    if tool.get("type", "function") != "function" or not isinstance(name, str) or not name:
        raise invalid(f"tools[{index}]", "must be a function with a name")
    return name


def _parameters(index: int, tool: Tool) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which are an object even if the given schema does not require
    one.
    """
    given: object = tool["function"].get("parameters") or {"properties": {}, "additionalProperties": False}
    if not isinstance(given, Mapping):
        raise invalid(f"tools[{index}].function.parameters", "must be a JSON schema, which is an object")
    schema = cast(Mapping[str, Any], given)
    return schema if schema.keys() & _KINDS else {"type": "object", **schema}


def _chosen(choice: object) -> str:
    if isinstance(choice, Mapping):
        given = cast(Mapping[str, Any], choice)
        function: object = given.get("function") or given
        name: object = cast(Mapping[str, Any], function).get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise invalid("tool_choice", "must be none, auto, required, or a function by its name")


def _allowed(choice: Mapping[str, Any], functions: Collection[str]) -> tuple[set[str], object]:
    """Return (names of the tools that may be used, mode) of an `allowed_tools` choice."""
    given: object = choice.get("allowed_tools") or choice
    told = cast(Mapping[str, Any], given if isinstance(given, Mapping) else {})
    named: object = told.get("tools")
    names = {_chosen(tool) for tool in cast(list[object], named)} if isinstance(named, list) else set[str]()
    mode: object = told.get("mode", "auto")
    if not names or mode not in ("auto", "required"):
        raise invalid("tool_choice", "allowed_tools needs tools, and a mode that is auto or required")
    if unknown := names - set(functions):
        raise invalid("tool_choice", f"{min(unknown)!r} is not one of the tools")
    return names, mode


def _calls(functions: Mapping[str, Mapping[str, Any]], most: int) -> Grammar:
    """Return the grammar of an array of 1 to `most` calls. Schemas of arguments are in `$defs`, with adapted
    references.
    """
    places = {name: f"#/$defs/{index}" for index, name in enumerate(functions)}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": place}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, place in places.items()
    ]
    definitions = {
        str(index): rooted(parameters, f"#/$defs/{index}") for index, parameters in enumerate(functions.values())
    }
    array = {"type": "array", "minItems": 1, "maxItems": most, "items": {"anyOf": calls}}
    return json_schema({**array, "$defs": definitions})

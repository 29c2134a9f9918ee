"""Converts a client's constraints on the answer to a grammar."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ballast.common.sampling import Grammar, GrammarKind
from services.gateway.errors import invalid

# Any: schemas are external JSON, validated by the dispatcher.
Schema = Mapping[str, Any]

# Formats that llguidance enforces.
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
# Keys that llguidance does not support. They are removed from schemas that are not strict.
_LOOSE = {
    "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "not", "if", "then", "else",
    "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
_VALUES = frozenset(("const", "enum", "default", "example", "examples"))
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


@dataclass(frozen=True, slots=True)
class Form:
    """The constraint on an answer.

    Attributes:
        grammar: The constraint; None: the answer is unconstrained.
        left_out: Keys of a non-strict schema that are not enforced.
    """

    grammar: Grammar | None = None
    left_out: frozenset[str] = frozenset()


def form_of(response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None) -> Form:
    """Return the constraint of a request. `response_format`: OpenAI's field. `structured`: vLLM's `structured_outputs`
    (json, regex, choice, grammar or json_object). Raises Failure if both are given, or one is invalid.
    """
    if structured:
        if response_format and response_format.get("type") != "text":
            raise invalid("structured_outputs", "and response_format cannot both be given")
        return Form(_structured(structured))
    match "text" if response_format is None else response_format.get("type"):
        case "text":
            return Form()
        case "json_object":
            assert response_format is not None, "has a type"
            given: object = response_format.get("schema")  # an extension of llama.cpp and others
            return Form(json_schema(cast(Schema, given) if isinstance(given, Mapping) else {"type": "object"}))
        case "json_schema":
            assert response_format is not None, "has a type"
            named = response_format.get("json_schema", response_format)  # /v1/responses omits the intermediate level
            schema: object = cast(Schema, named).get("schema") if isinstance(named, Mapping) else None
            if not isinstance(schema, (Mapping, bool)):
                raise invalid("response_format", "json_schema needs a schema, which is an object")
            whole = cast("Schema | bool", schema)
            if cast(Schema, named).get("strict") is True:
                return Form(json_schema(whole))
            loose, left_out = loosened(whole)
            return Form(json_schema(loose), frozenset(left_out))
        case other:
            raise invalid("response_format", f"{other!r} is not supported; text, json_object and json_schema are")


def json_schema(schema: Schema | bool) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_without_remarks(schema), ensure_ascii=False))


def loosened(schema: Schema | bool) -> tuple[Schema | bool, set[str]]:
    """Return the schema without the keys that llguidance does not support, and these keys."""
    left_out: set[str] = set()

    def drop(given: Schema) -> Schema:
        left_out.update(_LOOSE & given.keys())
        return {key: value for key, value in given.items() if key not in _LOOSE}

    return cast("Schema | bool", _mapped(schema, drop)), left_out


def rooted(schema: Schema, root: str) -> Schema:
    """Return the schema with references adapted to its place `root` in another schema: `#/$defs/A` ->
    `ROOT/$defs/A`.
    """

    def move(given: Schema) -> Schema:
        reference = given.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            return {**given, "$ref": root + reference[1:]}
        return given

    return cast(Schema, _mapped(schema, move))


def _without_remarks(schema: object) -> object:
    """Drop keys whose value is null, and unknown formats. These are only annotations (JSON Schema 2020-12, 7.2.1),
    which pydantic writes for Path, SecretStr and bytes.
    """

    def drop(given: Schema) -> Schema:
        known = given.get("format")
        left = given.keys() if isinstance(known, str) and known in _FORMATS else given.keys() - {"format"}
        return {key: given[key] for key in given if key in left and (given[key] is not None or key in _VALUES)}

    return _mapped(schema, drop)


def _mapped(schema: object, change: Callable[[Schema], Schema]) -> object:
    """Apply `change` to a schema and each schema within it, but not to plain values (`_VALUES`). The keys of `_BY_NAME`
    contain schemas by name.
    """
    if isinstance(schema, list):
        return [_mapped(each, change) for each in cast(list[object], schema)]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: value
        if key in _VALUES
        else {name: _mapped(each, change) for name, each in cast(Schema, value).items()}
        if key in _BY_NAME and isinstance(value, Mapping)
        else _mapped(value, change)
        for key, value in change(cast(Schema, schema)).items()
    }


_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def _structured(given: Mapping[str, Any]) -> Grammar:
    wanted = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(wanted) > 1:
        others = [name for name in wanted if name not in _KINDS]
        why = f"does not support {', '.join(others)}" if others else f"has {' and '.join(wanted)}; only one is possible"
        raise invalid("structured_outputs", why)
    match wanted:
        case {"json": str() as text}:
            return Grammar(GrammarKind.JSON_SCHEMA, text)
        case {"json": dict()}:
            return json_schema(given["json"])
        case {"json_object": True}:
            return json_schema({"type": "object"})
        case {"regex": str() as regex}:
            return Grammar(GrammarKind.REGEX, regex)
        case {"choice": [*choices]} if choices and all(isinstance(choice, str) for choice in choices):
            return Grammar(GrammarKind.REGEX, "|".join(map(_literal, cast(Sequence[str], choices))))
        case {"grammar": str() as grammar}:
            return Grammar(GrammarKind.LARK, grammar)
        case _:
            raise invalid("structured_outputs", "needs one of json, json_object, regex, choice and grammar")


_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


def _literal(text: str) -> str:
    """Return a literal as a regular expression. All choices form one expression, because a grammar must not have
    thousands of them.
    """
    return _SPECIAL.sub(r"\\\g<0>", text)

"""What a client demands of the form of an answer -> a grammar."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ballast.common.sampling import Grammar, GrammarKind
from services.gateway.errors import invalid

# Any: schemas are foreign JSON; the dispatcher says what is wrong with one.
Schema = Mapping[str, Any]


def grammar_of(response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None) -> Grammar | None:
    """`response_format` is OpenAI's; `structured_outputs` is vLLM's: json, regex, choice, grammar or json_object."""
    if structured:
        if response_format and response_format.get("type") != "text":
            raise invalid("structured_outputs", "and response_format cannot both be given")
        return _structured(structured)
    match (response_format or {}).get("type", "text"):
        case "text":
            return None
        case "json_object":
            return json_schema({"type": "object"})
        case "json_schema":
            assert response_format is not None, "has a type"
            named = response_format.get("json_schema", response_format)  # in /v1/responses without the layer between
            schema: object = cast(Schema, named).get("schema") if isinstance(named, Mapping) else None
            if not isinstance(schema, (Mapping, bool)):
                raise invalid("response_format", "json_schema needs a schema, which is an object")
            return json_schema(cast("Schema | bool", schema))
        case other:
            raise invalid("response_format", f"{other!r} is not known; text, json_object and json_schema are")


def json_schema(schema: Schema | bool) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))


def _structured(given: Mapping[str, Any]) -> Grammar:
    match {name: value for name, value in given.items() if value is not None}:
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
    """As a regular expression: thousands of these are one lexeme, and as alternatives of a grammar too many."""
    return _SPECIAL.sub(r"\\\g<0>", text)

"""Size limits of grammars, checked before compilation if its cost is more than linear."""

import json
import re
from collections.abc import Iterator
from typing import cast

from ballast.common.errors import InvalidRequest
from ballast.common.sampling import Grammar, GrammarKind

MAX_PROPERTIES = 2_000  # limit of one object; 3,000 properties take three times as long to compile
MAX_ALL_PROPERTIES = 20_000  # limit of all objects of a schema together
MAX_ALTERNATIVES = 2_000  # limit of one anyOf, oneOf or allOf; an enum is limited only by the grammar's length
MAX_REPETITION = 1 << 17  # limit of a minimum count of repetitions: longer than any answer
MAX_DEPTH = 200

_REPETITION = re.compile(r"\{\s*(\d+)")
_MINIMA = ("minItems", "minLength", "minProperties")


def check_bounds(grammar: Grammar) -> None:
    """Raise InvalidRequest, with the count and the limit, for a grammar beyond a limit."""
    field = f"sampling.grammar.{grammar.kind}"
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        try:
            schema: object = json.loads(grammar.text)
        except RecursionError:
            raise InvalidRequest(field, f"is nested too deeply; at most {MAX_DEPTH} levels are allowed") from None
        except ValueError as error:
            raise InvalidRequest(field, f"is not valid JSON: {error}") from error
        _check_schema(field, schema)
    else:
        _check_repetition(field, grammar.text)


def _check_schema(field: str, schema: object) -> None:
    property_count = 0
    for node, depth in _objects(schema):
        _within(field, "its nesting", "levels", depth, MAX_DEPTH)
        for key in ("properties", "patternProperties"):
            if isinstance(named := node.get(key), dict):
                count = len(cast("dict[str, object]", named))
                _within(field, f"an object's {key}", "entries", count, MAX_PROPERTIES)
                property_count += count
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := node.get(key), list):
                _within(field, key, "alternatives", len(cast("list[object]", branches)), MAX_ALTERNATIVES)
        for key in _MINIMA:
            if isinstance(least := node.get(key), (int, float)):
                _within(field, key, "repetitions", least, MAX_REPETITION)
        if isinstance(pattern := node.get("pattern"), str):
            _check_repetition(field, pattern)
    _within(field, "all objects together", "properties", property_count, MAX_ALL_PROPERTIES)


def _objects(schema: object) -> Iterator[tuple[dict[str, object], int]]:
    """(object, nesting depth) of each JSON object in a schema, itself included."""
    left: list[tuple[object, int]] = [(schema, 1)]
    while left:
        node, depth = left.pop()
        inner: list[object] = []
        if isinstance(node, dict):
            found = cast("dict[str, object]", node)
            yield found, depth
            inner = list(found.values())
        elif isinstance(node, list):
            inner = cast("list[object]", node)
        left += [(child, depth + 1) for child in inner if isinstance(child, (dict, list))]


def _check_repetition(field: str, expression: str) -> None:
    for least in _REPETITION.findall(expression):
        count = int(least) if len(least) < 20 else 10**19
        _within(field, "a regular expression", "repetitions", count, MAX_REPETITION)


def _within(field: str, what: str, of: str, count: float, most: int) -> None:
    if count > most:
        raise InvalidRequest(field, f"{what}: {count:,} {of}, and at most {most:,} are allowed")

"""Narrows `oneOf` in JSON schemas whose branches overlap in their types, so that they become disjoint.

A grammar cannot express "exactly one of these", so llguidance accepts `oneOf` only if it can prove that no value
matches two branches. It cannot for {"type": ["string", "null"]} and {"type": ["integer", "null"]}: null matches both,
and is therefore invalid. Once types that several branches share are removed from each, it can. Every answer is still
valid, since nothing new is allowed.
"""

import json
from collections import Counter
from typing import Any, cast

Schema = dict[str, Any]  # Any: external JSON

_INNER = ("items", "additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems", "contains")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def narrowed(text: str) -> str:
    """The schema with overlapping `oneOf`s narrowed; unchanged if there are none or if the text is not JSON.

    Schemas with `not` or `if` are unchanged, because narrowing a condition would allow more elsewhere.
    """
    if '"oneOf"' not in text or '"not"' in text or '"if"' in text:
        return text
    try:
        schema: object = json.loads(text)
    except (ValueError, RecursionError):
        return text  # llguidance reports the error
    changed, left = False, [schema]
    while left:
        match found := left.pop():
            case dict():
                one = cast(Schema, found)
                branches = _without_shared_types(one.get("oneOf"))
                if branches is not None:
                    one["oneOf"], changed = branches, True
                left += _within(one)
            case _:
                pass
    return json.dumps(schema, ensure_ascii=False) if changed else text


def _within(schema: Schema) -> list[object]:
    """The direct subschemas of a schema."""
    found: list[object] = [schema[key] for key in _INNER if key in schema]
    for key in _LISTS:
        if isinstance(parts := schema.get(key), list):
            found += cast(list[object], parts)
    for key in _NAMED:
        if isinstance(parts := schema.get(key), dict):
            found += cast(Schema, parts).values()
    return found


def _without_shared_types(branches: object) -> list[Schema] | None:
    """The branches without the types that several of them share; None if there are none or a type is not known."""
    if not isinstance(branches, list):
        return None
    types = [_types(branch) for branch in cast(list[object], branches)]
    known = [names for names in types if names is not None]
    count = Counter(name for names in known for name in names)
    if len(known) < len(types) or max(count.values(), default=1) == 1 or {"integer", "number"} <= count.keys():
        return None  # every integer is a number, too
    kept = [sorted(name for name in names if count[name] == 1) for names in known]
    pairs = zip(cast(list[Schema], branches), kept, strict=True)
    return [{**branch, "type": names} for branch, names in pairs if names] or None


def _types(branch: object) -> set[str] | None:
    named: object = cast(Schema, branch).get("type") if isinstance(branch, dict) else None
    if isinstance(named, str):
        return {named}
    if isinstance(named, list) and all(isinstance(name, str) for name in cast(list[object], named)):
        return set(cast(list[str], named))
    return None

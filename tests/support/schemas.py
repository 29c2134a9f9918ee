"""Random JSON schemas whose output is short, whatever tokens a model with random weights prefers."""

import random
from typing import Any

# Any: schemas are plain JSON.
Schema = dict[str, Any]


def random_schema(seed: int) -> Schema:
    """A schema with an object at the top level, as OpenAI requires."""
    rng = random.Random(seed)
    return _object(rng, 3)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "größe", "a b", "船", "kind", "tags", "ok", "x-1"], rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: _any(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _any(rng: random.Random, depth: int) -> Schema:
    kinds = [_integer, _enum, _boolean, _string, _pattern, _constant]
    if depth > 0:
        kinds += [_object, _array, _one_of]
    return rng.choice(kinds)(rng, depth)


def _integer(rng: random.Random, _: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 999)}


def _enum(rng: random.Random, _: int) -> Schema:
    return {"enum": rng.sample(["red", "grün", 7, None, True, 'a"b', 1.5, ""], rng.randint(1, 4))}


def _boolean(_: random.Random, __: int) -> Schema:
    return {"type": ["boolean", "null"]}


def _string(rng: random.Random, _: int) -> Schema:
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 12)}


def _pattern(rng: random.Random, _: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^\\d{3}-\\d{2}$", "^(yes|no|maybe)$"])}


def _constant(rng: random.Random, _: int) -> Schema:
    return {"const": rng.choice(["fixed", 0, False])}


def _array(rng: random.Random, depth: int) -> Schema:
    return {
        "type": "array",
        "items": _any(rng, depth - 1),
        "minItems": rng.randint(0, 1),
        "maxItems": rng.randint(1, 3),
    }


def _one_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}

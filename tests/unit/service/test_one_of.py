"""`oneOf` with overlapping branches is narrowed, and nothing is allowed that does not validate."""

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from ballast.common.errors import InvalidRequest
from ballast.common.sampling import Grammar, GrammarKind
from ballast.service.grammar import Grammars
from ballast.service.one_of import narrowed
from tests.support.public_schemas import public_schemas
from tools.model.tokenizer import train_tokenizer

VOCAB = 600
VALUES: list[Any] = [None, True, 3, 2.5, "a", [], {}]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
OVERLAPPING = {"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]}
TOKENIZER = train_tokenizer(VOCAB, qwen=False)


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    file = tmp_path_factory.mktemp("one-of") / "tokenizer.json"
    TOKENIZER.save(str(file))
    return Grammars(file)


def allowed(grammars: Grammars, schema: Any, value: Any) -> bool:
    """Whether the grammar allows a model to generate `value` and then end."""
    tokens = TOKENIZER.encode(json.dumps(value), add_special_tokens=False).ids
    matcher = grammars.start(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), ())
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return matcher.is_accepting()


def test_overlapping_types_are_narrowed_and_other_schemas_stay_unchanged() -> None:
    inner = {"properties": {"oneOf": OVERLAPPING, "a": {"prefixItems": [{"anyOf": [OVERLAPPING]}]}}}
    text = json.dumps({**inner, "$defs": {"d": OVERLAPPING}})
    assert narrowed(text).count('{"oneOf": [{"type": ["string"]}, {"type": ["integer"]}]}') == 3
    for kept in (
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"oneOf": [{"type": ["number", "null"]}, {"type": ["integer", "null"]}]},
        {"oneOf": [{"type": ["string", "null"]}, {"$ref": "#/$defs/x"}]},
        {"oneOf": [{"type": "string"}, {"type": "string"}]},
        {"not": OVERLAPPING},
        {"const": {"oneOf": 3}},
    ):
        assert narrowed(json.dumps(kept)) == json.dumps(kept)
    for wrong in ('{"oneOf": [', '{"oneOf": ' + "[" * 100_000):
        assert narrowed(wrong) == wrong


@given(st.lists(st.lists(st.sampled_from(TYPES), min_size=1, max_size=4, unique=True), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_allowed_values_validate(grammars: Grammars, branches: list[list[str]]) -> None:
    schema = {"type": "array", "items": {"oneOf": [{"type": types} for types in branches]}, "maxItems": 1}
    try:
        right = [value for value in VALUES if allowed(grammars, schema, [value])]
    except InvalidRequest:
        return  # branches that types cannot distinguish are refused
    validator = Draft202012Validator(schema)
    assert [value for value in right if not validator.is_valid([value])] == []
    named = Counter(name for types in branches for name in types)
    if max(named.values()) == 1 or "integer" not in named:
        assert [v for v in VALUES if validator.is_valid([v])] == right, "values that match only one branch stay allowed"


def test_most_of_the_public_set_can_be_followed(grammars: Grammars) -> None:
    """Covers public schemas whose `oneOf` overlaps, such as that of a nullable IntOrString."""
    overlapping = [schema for schema in public_schemas() if narrowed(json.dumps(schema)) != json.dumps(schema)]
    assert len(overlapping) > 150
    for schema in overlapping[::20]:
        grammars.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))

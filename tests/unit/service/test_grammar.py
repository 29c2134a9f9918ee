"""A grammar's state follows from the tokens. Grammars that cannot be enforced are refused with a reason."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ballast.common.errors import ConfigError, InvalidRequest
from ballast.common.sampling import Grammar, GrammarKind
from ballast.service.grammar import MOST_KEPT, Grammars
from tools.model.tokenizer import EOS_ID, TURN_END_ID, train_tokenizer

VOCAB = 600
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"], "additionalProperties": False}
    ),
)

LARK = 'start: "{" "\\"a\\": " ("1" | "23") "}"'


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grammar") / "tokenizer.json"
    train_tokenizer(VOCAB, qwen=False).save(str(path))
    return path


@pytest.fixture(scope="module")
def grammars(tokenizer_file: Path) -> Grammars:
    return Grammars(tokenizer_file, VOCAB + 40, [EOS_ID, TURN_END_ID])


def walk(grammars: Grammars, grammar: Grammar, seed: int) -> list[int]:
    """Draw tokens uniformly from the allowed ones, rebuilding the state from the earlier tokens at each step."""
    rng, tokens = np.random.default_rng(seed), list[int]()
    while not tokens or tokens[-1] not in (EOS_ID, TURN_END_ID):
        bits = np.frombuffer(grammars.start(grammar, tokens).compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        assert allowed.max() < VOCAB
        tokens.append(int(rng.choice(allowed)))
        assert len(tokens) < 500
    return tokens[:-1]


@pytest.mark.parametrize("kind", GrammarKind)
def test_a_grammar_may_begin_after_reasoning(grammars: Grammars, kind: GrammarKind) -> None:
    text = {GrammarKind.JSON_SCHEMA: SCHEMA.text, GrammarKind.REGEX: '\\{"a": (1|23)\\}', GrammarKind.LARK: LARK}[kind]
    tokenizer = train_tokenizer(VOCAB, qwen=False)

    def follows(grammar: Grammar, answer: str) -> bool:
        tokens = tokenizer.encode(answer, add_special_tokens=False).ids
        matcher = grammars.start(grammar, ())
        if matcher.validate_tokens(tokens) < len(tokens):
            return False
        return grammars.start(grammar, tokens).is_accepting()

    inside = Grammar(kind, text, "</think>")
    assert follows(inside, '{"a": 5} </x>\n</think>\n\n{"a": 23}')
    assert follows(inside, '</think>{"a": 1}')
    assert not follows(inside, '{"a": 1}')
    assert not follows(inside, 'a</think>{"a": 2}')
    perhaps = Grammar(kind, text, "</think>", "<think>")
    assert follows(perhaps, '<think>a</think>{"a": 23}')
    assert follows(perhaps, '{"a": 1}')
    assert not follows(perhaps, 'a</think>{"a": 1}')
    grammars.check(inside)


def test_reasoning_tags_may_be_special_tokens(grammars: Grammars) -> None:
    tokenizer = train_tokenizer(VOCAB, qwen=False)
    tag = tokenizer.id_to_token(TURN_END_ID)
    grammar = Grammar(GrammarKind.REGEX, "(ab)+", tag or "")
    thought, tail = (tokenizer.encode(part, add_special_tokens=False).ids for part in ("well", "abab"))
    assert grammars.start(grammar, [*thought, TURN_END_ID, *tail]).is_accepting()
    assert not grammars.start(grammar, [*thought, *tail]).is_accepting()


@pytest.mark.parametrize("seed", range(20))
def test_every_walk_ends_in_the_language(grammars: Grammars, tokenizer_file: Path, seed: int) -> None:
    tokenizer = train_tokenizer(VOCAB, qwen=False)
    assert json.loads(tokenizer.decode(walk(grammars, SCHEMA, seed))) in ({"a": 1}, {"a": 23})
    regex = Grammar(GrammarKind.REGEX, "(ab|船){2,3}")
    text = tokenizer.decode(walk(grammars, regex, seed))
    assert len(text.replace("ab", "船")) in (2, 3)
    assert set(text) <= set("ab船")
    lark = Grammar(GrammarKind.LARK, 'start: "yes" | "no"')
    assert tokenizer.decode(walk(grammars, lark, seed)) in ("yes", "no")


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (GrammarKind.JSON_SCHEMA, "{", "not valid JSON"),
        (GrammarKind.JSON_SCHEMA, '{"type": "ship"}', "ship"),
        (GrammarKind.REGEX, "a(b", "unclosed group"),
        (GrammarKind.LARK, "start: missing", "missing"),
    ],
)
def test_unenforceable_grammars_are_refused(grammars: Grammars, kind: GrammarKind, text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        grammars.check(Grammar(kind, text))
    assert caught.value.field == f"sampling.grammar.{kind}"


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "no text can follow"),
        (GrammarKind.LARK, "start: /[^\\s\\S]/", "no text can follow"),
        (GrammarKind.LARK, "start: " + " | ".join(f'"w{i}"' for i in range(3000)), "max is 2000"),
        (
            GrammarKind.LARK,
            "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"',
            "Too many items",
        ),
    ],
)
def test_grammars_that_compile_but_cannot_be_enforced_are_refused(
    grammars: Grammars, kind: GrammarKind, text: str, why: str
) -> None:
    """A matcher that fails midway allows the answer to end as if it were complete."""
    with pytest.raises(InvalidRequest, match=why):
        grammars.check(Grammar(kind, text))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {str(i): {} for i in range(2001)}}, "an object's properties: 2,001 entries"),
        ({"anyOf": [{"const": i} for i in range(2001)]}, "anyOf: 2,001 alternatives, and at most 2,000"),
        ({"type": "array", "minItems": 10**6}, "minItems: 1,000,000 repetitions"),
        ({"type": "string", "pattern": "a{1000000}"}, "1,000,000 repetitions"),
    ],
)
def test_limits_are_reported_with_the_counted_value(grammars: Grammars, schema: object, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        grammars.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def test_deep_nesting_and_many_properties_in_total_are_refused(grammars: Grammars) -> None:
    deep = '{"type":"array","items":' * 120 + "{}" + "}" * 120
    grammars.check(Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","items":' * 60 + "{}" + "}" * 60))
    for text in (deep.replace('"items":', '"items":{"anyOf":[', 1).replace("}", "]}}", 1), "[" * 100_000):
        with pytest.raises(InvalidRequest):
            grammars.check(Grammar(GrammarKind.JSON_SCHEMA, text))
    objects = {f"o{i}": {"properties": {f"p{j}": {} for j in range(200)}} for i in range(101)}
    with pytest.raises(InvalidRequest, match="20,301 properties, and at most 20,000"):
        grammars.check(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"properties": objects})))


def test_tokens_that_the_grammar_does_not_allow_are_refused(grammars: Grammars) -> None:
    tokens = walk(grammars, SCHEMA, 1)[:-1]
    grammars.check(SCHEMA, tokens)
    grammars.check(SCHEMA, [])
    for wrong in ([*tokens, tokens[0]], [VOCAB + 39], [*tokens[:1], EOS_ID, *tokens[1:]]):
        with pytest.raises(InvalidRequest, match="does not follow the grammar") as caught:
            grammars.check(SCHEMA, wrong)
        assert caught.value.field == "resumption.token_ids"


def test_a_file_that_is_not_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Grammars(tmp_path / "tokenizer.json")


def test_a_second_request_for_a_grammar_waits_for_its_compilation(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar, grammars = Grammar(GrammarKind.REGEX, "(ab|cd){2,7}"), Grammars(tokenizer_file, VOCAB)
    compile_it = grammars._compiled
    begun, may_end, count = threading.Event(), threading.Event(), list[int]()

    def slowly(grammar: Grammar) -> object:
        count.append(1)
        begun.set()
        assert may_end.wait(30.0)
        return compile_it(grammar)

    monkeypatch.setattr(grammars, "_compiled", slowly)
    with ThreadPoolExecutor(2) as threads:
        ahead = threads.submit(grammars.check, grammar)
        assert begun.wait(30.0)
        following = threads.submit(grammars.start, grammar, ())
        may_end.set()
        ahead.result(30.0)
        assert not following.result(30.0).is_error()
    assert len(count) == 1


def test_a_grammar_that_cannot_be_compiled_is_refused_each_time(grammars: Grammars) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            grammars.check(Grammar(GrammarKind.REGEX, "(ab"))


def test_unused_grammars_are_evicted(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, compiled = Grammars(tokenizer_file, VOCAB), list[str]()
    compile_it = grammars._compiled

    def seen(grammar: Grammar) -> object:
        compiled.append(grammar.text)
        return compile_it(grammar)

    monkeypatch.setattr(grammars, "_compiled", seen)
    for number in range(MOST_KEPT + 1):
        grammars.check(Grammar(GrammarKind.REGEX, f"a{number}"))
        grammars.check(Grammar(GrammarKind.REGEX, "a0"))
    assert len(compiled) == MOST_KEPT + 1, "a grammar in repeated use stays cached"
    grammars.check(Grammar(GrammarKind.REGEX, "a1"))
    assert compiled[-1] == "a1"
    assert len(compiled) == MOST_KEPT + 2

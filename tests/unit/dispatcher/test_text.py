"""Tokenization equals that of `transformers`, and failures have clear messages."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers.models.auto.tokenization_auto import AutoTokenizer

from ballast.common.errors import ConfigError, InvalidRequest
from services.dispatcher.text import PromptEncoder
from tools.model.tokenizer import write_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, 512, qwen=False, max_len=2048)
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def conversation(encoder: PromptEncoder, *messages: tuple[str, str]) -> Sequence[int]:
    wanted = [{"role": role, "content": content} for role, content in messages]
    return asyncio.run(encoder.encode_conversation(wanted))


@pytest.mark.parametrize("text", ["a ship", "naïve café 🚢 \n\n x", "stones " * 2000, "<|eos|> in the text"])
def test_ids_equal_those_of_transformers(model: Path, text: str) -> None:
    reference = AutoTokenizer.from_pretrained(str(model))
    encoder = PromptEncoder(model)
    assert list(asyncio.run(encoder.encode_text(text))) == reference(text)["input_ids"]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": text}]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(asyncio.run(encoder.encode_conversation(messages))) == expected


def test_bad_words_are_encoded_as_in_vllm(model: Path) -> None:
    reference = AutoTokenizer.from_pretrained(str(model))

    def ids(text: str) -> tuple[int, ...]:
        return tuple(reference(text, add_special_tokens=False)["input_ids"])

    words = [
        token[1:]
        for token in reference.get_vocab()
        if token[0] == "Ġ" and token[1:].isalpha() and token.count("Ġ") == 1
    ]
    expected: list[tuple[int, ...]] = []
    for word in [*words, "!", "seven ships", " and"]:
        first, second = ids(word.lstrip()), ids(" " + word.lstrip())
        expected.append(first)
        if second[0] != first[0] and len(second) == len(first):
            expected.append(second)
    assert PromptEncoder(model).encode_bad_words([*words, "!", "seven ships", " and"]) == expected
    assert len(words) + 3 < len(expected) < 2 * len(words) + 6  # some words also have a variant with a leading space


def test_a_bad_word_that_the_tokenizer_drops_is_a_client_error(model: Path) -> None:
    edit(model / "tokenizer.json", normalizer={"type": "Replace", "pattern": {"String": "\u200b"}, "content": ""})
    with pytest.raises(InvalidRequest, match=r"bad_words.*has no tokens"):
        PromptEncoder(model).encode_bad_words(["fine", "\u200b"])


def test_a_saved_truncation_does_not_cut_prompts(model: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    edit(model / "tokenizer.json", truncation=truncation)
    assert len(asyncio.run(PromptEncoder(model).encode_text("one two three four five six seven"))) > 4


def test_a_conversation_that_the_template_refuses_is_a_client_error(model: Path) -> None:
    encoder = PromptEncoder(model)
    with pytest.raises(InvalidRequest, match="unknown role: ghost") as caught:
        conversation(encoder, ("ghost", "boo"))
    assert caught.value.field == "conversation"
    with pytest.raises(InvalidRequest, match=r"conversation\.messages"):
        conversation(encoder)


def test_a_template_cannot_reach_into_python(model: Path) -> None:
    edit(model / "tokenizer_config.json", chat_template="{{ messages.__class__.__mro__ }}{{ ''.__class__.mro() }}")
    with pytest.raises(InvalidRequest):
        conversation(PromptEncoder(model), ("user", "x"))


ENDLESS = {
    "iterations": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops have more": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a repetition": "{{ 'x' * 100000000000 }}",
    "a text or list": "{% set n = namespace(s='xxxx') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a text of more": "{% set n = namespace(s='xxxx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "its output": "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "a power": "{{ 10 ** 100000000 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("why", ENDLESS)
def test_a_template_that_runs_forever_is_aborted(model: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.dispatcher.template._MOST_TURNS", 100_000)  # the real limit takes half a minute
    edit(model / "tokenizer_config.json", chat_template=ENDLESS[why])
    with pytest.raises(InvalidRequest, match=why):
        conversation(PromptEncoder(model), ("user", "x"))


def test_a_template_with_many_turns_is_rendered(model: Path) -> None:
    template = "{% for i in range(300) %}{% for j in range(300) %}{% if i == j %}x{% endif %}{% endfor %}{% endfor %}"
    edit(model / "tokenizer_config.json", chat_template=template)
    encoder = PromptEncoder(model)
    assert list(conversation(encoder, ("user", "x"))) == list(
        asyncio.run(encoder.encode_text("x" * 300, add_special_tokens=False))
    )


def test_a_text_that_is_certainly_too_long_is_refused_untokenized(model: Path) -> None:
    encoder = PromptEncoder(model)
    with pytest.raises(InvalidRequest, match=r"16777216 characters, but the 100 tokens that fit \(max_model_len 101\)"):
        asyncio.run(encoder.encode_text("x" * (16 << 20), longest=100))
    assert asyncio.run(encoder.encode_text("x" * 100, longest=100))


def test_without_a_template_conversations_are_refused_and_text_is_served(model: Path) -> None:
    edit(model / "tokenizer_config.json", chat_template=None)
    encoder = PromptEncoder(model)
    with pytest.raises(InvalidRequest, match="no chat template"):
        conversation(encoder, ("user", "x"))
    assert asyncio.run(encoder.encode_text("x"))


def test_a_template_file_takes_precedence_and_of_several_templates_the_default(model: Path) -> None:
    named = [{"name": "tools", "template": "wrong"}, {"name": "default", "template": "{{ messages[0]['content'] }}"}]
    edit(model / "tokenizer_config.json", chat_template=named)
    plain = conversation(PromptEncoder(model), ("user", "abc"))
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}{{ messages[0]['content'] }}")
    assert len(conversation(PromptEncoder(model), ("user", "abc"))) > len(plain)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.json", None, "no such file"),
        ("tokenizer.json", "{", "not a valid tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "not a valid tokenizer"),
        ("tokenizer_config.json", "[", "not valid JSON"),
        ("tokenizer_config.json", "[]", "must be a JSON object"),
    ],
)
def test_a_broken_file_is_named(model: Path, name: str, content: str | None, why: str) -> None:
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_text(content)
    with pytest.raises(ConfigError, match=why) as caught:
        PromptEncoder(model)
    assert caught.value.path == str(model / name)


def test_a_template_that_does_not_parse_is_a_configuration_error(model: Path) -> None:
    edit(model / "tokenizer_config.json", chat_template="{% for %}")
    with pytest.raises(ConfigError, match="chat template is not valid"):
        PromptEncoder(model)


def test_variables_generation_blocks_and_a_template_for_tools(model: Path) -> None:
    source = (
        "{% if tools is none and documents is none %}n{% endif %}{% if enable_thinking %}t{% endif %}"
        "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ messages[0].tool_calls | tojson }}"
        "{% if add_generation_prompt %}g{% endif %}"
    )
    named = [{"name": "default", "template": source}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    edit(model / "tokenizer_config.json", chat_template=named)
    encoder, reference = PromptEncoder(model), AutoTokenizer.from_pretrained(str(model))
    messages = [{"role": "assistant", "content": "abc", "tool_calls": [{"größe": 1}]}]
    cases: list[dict[str, object]] = [
        {},
        {"enable_thinking": True},
        {"add_generation_prompt": False},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    ]
    for variables in cases:
        given = {"add_generation_prompt": True, **variables}
        expected = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **given)
        assert list(asyncio.run(encoder.encode_conversation(messages, variables))) == expected


def test_bytes_of_tokens_are_those_of_the_text(model: Path) -> None:
    encoder = PromptEncoder(model)
    text = "naïve café 🚢 \n\n x 船"
    ids = asyncio.run(encoder.encode_text(text, add_special_tokens=False))
    assert b"".join(map(encoder.token_bytes, ids)).decode() == text
    assert encoder.token_bytes(0) == b"<|bos|>"
    assert encoder.decode(ids, skip_special_tokens=True) == text


def test_a_last_message_can_be_continued(model: Path) -> None:
    encoder = PromptEncoder(model)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The ship "}]
    variables = {"continue_final_message": True, "add_generation_prompt": False}
    ids = asyncio.run(encoder.encode_conversation(messages, variables))
    assert encoder.decode(ids, skip_special_tokens=False).endswith("The ship ")
    (model / "other.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        asyncio.run(PromptEncoder(model, model / "other.jinja").encode_conversation(messages, variables))


def test_sampling_defaults_are_those_of_the_models_authors_or_of_none(model: Path, tmp_path: Path) -> None:
    assert PromptEncoder(model).default_sampling == {}
    path = model / "generation_config.json"
    path.write_text(json.dumps({"do_sample": True, "top_k": 20, "temperature": 0.6, "eos_token_id": 1}))
    assert PromptEncoder(model).default_sampling == {"temperature": 0.6, "top_k": 20.0}
    assert PromptEncoder(model, generation_config="ballast").default_sampling == {}
    assert PromptEncoder(model, generation_config=str(tmp_path / "elsewhere")).default_sampling == {}
    path.write_text(json.dumps({"top_k": "many"}))
    with pytest.raises(ConfigError, match="top_k must be a number"):
        PromptEncoder(model)

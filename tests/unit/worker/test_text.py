"""Incremental detokenisation equals decoding all at once, and never yields an incomplete character."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ballast.common.errors import ConfigError
from ballast.service.tokenizer import load_tokenizer
from services.worker.text import Detokenizer


def byte_level() -> Tokenizer:
    """A tokenizer with one token per byte, so that every multi-byte character is split over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A tokenizer as in Llama 2: pieces with a word mark, and bytes as <0xNN>."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁hello": 256, "▁world": 257, "▁": 258, "!": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token=None))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
    return [detokenizer.push(i) for i in ids]


@pytest.mark.parametrize("text", ["plain text, many words to pass the window " * 3, "naïve 中文 🙂🏳️‍🌈 ok", "🙂" * 20])
def test_pieces_add_up_to_the_text_and_contain_only_whole_characters(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    pieces = streamed(tokenizer, [], ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_given_with_its_last_byte() -> None:
    tokenizer = byte_level()
    assert streamed(tokenizer, [], tokenizer.encode("é🙂").ids) == ["", "é", "", "", "", "🙂"]


def test_invalid_bytes_do_not_hold_back_the_text_forever() -> None:
    tokenizer = byte_level()
    lead = tokenizer.encode("中").ids[0]  # a lead byte whose continuation bytes never follow
    pieces = streamed(tokenizer, [], [lead] * 50)
    assert "".join(pieces) == "\ufffd" * 47


def test_random_bytes_decode_incrementally_as_at_once() -> None:
    tokenizer, rng = byte_level(), random.Random(5)
    for _ in range(200):
        ids = [rng.randrange(256) for _ in range(60)]
        whole = tokenizer.decode(ids)
        given = "".join(streamed(tokenizer, [], ids))
        assert whole.startswith(given)
        assert set(whole[len(given) :]) <= {"\ufffd"}
        assert len(whole) - len(given) <= 3


def test_the_space_before_the_first_word_is_kept_after_a_prompt() -> None:
    tokenizer = byte_fallback()
    assert streamed(tokenizer, [256], [257, 259]) == [" world", "!"]
    assert streamed(tokenizer, [], [257, 259]) == ["world", "!"]


def test_byte_fallback_holds_every_incomplete_byte_back() -> None:
    tokenizer = byte_fallback()
    assert streamed(tokenizer, [256], [0xE4, 0xB8, 0xAD, 259]) == ["", "", "中", "!"]


def test_tokens_without_text_neither_change_the_text_nor_make_the_window_long() -> None:
    """A model that continues after its end-of-sequence token may generate thousands of special tokens or unused ids."""
    tokenizer, rng = byte_fallback(), random.Random(5)
    tokenizer.add_special_tokens(["<eos>"])
    assert tokenizer.token_to_id("<eos>") == 260
    eos, unused, text = 260, 400, [0xE4, 0xB8, 0xAD, 256, 257, 258, 259]
    for _ in range(50):
        ids = [i for token_id in text for i in (token_id, *rng.choices([eos, unused], k=rng.randrange(40)))]
        detokenizer = Detokenizer(tokenizer, [256], skip_special_tokens=True)
        assert "".join(map(detokenizer.push, ids)) == tokenizer.decode([256, *ids]).removeprefix("hello")
        assert len(detokenizer._window) <= 16


def test_a_corrupt_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3')
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is not a valid tokenizer"):
        load_tokenizer(tmp_path)

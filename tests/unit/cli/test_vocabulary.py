"""A checkpoint with the vocabulary files of an older tokenizer gets its `tokenizer.json`."""

import json
from pathlib import Path
from typing import Any

import pytest

from ballast.common.errors import ConfigError
from ballast.service.tokenizer import load_tokenizer
from tools.cli.main import main
from tools.model.tiny import make_tiny
from tools.model.vocabulary import ensure_tokenizer

TEXT = "Hello wörld, 1234 <|im_end|>\n\tdef f(x):"


def older(folder: Path) -> list[int]:
    """Replace `tokenizer.json` with the older files that it can be built from; return its tokens for `TEXT`."""
    make_tiny("qwen2", folder, vocab=700, max_len=256)
    expected = load_tokenizer(folder).encode(TEXT).ids
    content: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    merges = [one if isinstance(one, str) else " ".join(one) for one in content["model"]["merges"]]
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "Qwen2Tokenizer"}))
    (folder / "tokenizer.json").unlink()
    return expected


def test_fetch_builds_it_from_vocabulary_and_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = older(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"`ballast model fetch .*model` makes it"):
        load_tokenizer(tmp_path / "model")
    assert main(["model", "fetch", str(tmp_path / "model")]) == 0
    capsys.readouterr()
    assert load_tokenizer(tmp_path / "model").encode(TEXT).ids == expected
    assert not ensure_tokenizer(tmp_path / "model"), "an existing tokenizer.json stays"
    assert not list((tmp_path / "model").glob(".tokenizer*"))


def test_files_that_cannot_be_converted_are_named(tmp_path: Path) -> None:
    older(tmp_path / "model")
    (tmp_path / "model" / "vocab.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot make one from vocab\.json"):
        ensure_tokenizer(tmp_path / "model")


def test_a_vocabulary_that_encodes_nothing_is_refused(tmp_path: Path) -> None:
    older(tmp_path / "model")
    (tmp_path / "model" / "vocab.json").write_text("{}")
    (tmp_path / "model" / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ConfigError, match="cannot make one"):
        ensure_tokenizer(tmp_path / "model")


def test_a_folder_without_vocabulary_files_is_unchanged(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path / "model", layers=2)
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert not ensure_tokenizer(tmp_path / "model")

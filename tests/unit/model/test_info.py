import argparse
import json
from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from ballast.common.units import human_bytes
from tools.cli import model as command
from tools.model.info import read_info
from tools.model.tiny import make_preset, make_tiny


def test_facts_of_a_sharded_checkpoint(tmp_path: Path) -> None:
    info = read_info(make_tiny("qwen3", tmp_path / "m", dtype="bfloat16", shards=3, head_dim=32, tied=True))
    layer = 64 * (4 + 2 + 2) * 32 + 64 * 4 * 32 + 2 * 32 + 2 * 64 + 3 * 64 * 176
    assert info.parameter_count == 512 * 64 + 4 * layer + 64
    assert info.bytes_per_dtype == {"bfloat16": 2 * info.parameter_count}
    assert info.kv_bytes_per_token() == 2 * 4 * 2 * 32 * 2
    assert info.kv_bytes_per_token("float32") == 2 * info.kv_bytes_per_token()
    assert (info.shard_count, info.tied, info.head_dim) == (3, True, 32)
    assert info.has_tokenizer
    assert info.has_chat_template


def test_bench_preset_has_about_35_million_parameters(tmp_path: Path) -> None:
    info = read_info(make_preset("bench", tmp_path / "m"))
    assert 33e6 < info.parameter_count < 37e6


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", None, "config.json: not found"),
        ("config.json", b"{", "config.json: cannot be read as JSON"),
        ("config.json", b"[]", "config.json: must be a JSON object"),
        ("config.json", b"{}", "num_attention_heads must be a whole number"),
        ("model.safetensors.index.json", b"{}", "has no weight_map"),
        ("model-00002-of-00002.safetensors", None, "model-00002-of-00002.safetensors: cannot be read"),
        ("model-00002-of-00002.safetensors", b"abc", "not a safetensors file"),
        ("model-00002-of-00002.safetensors", b"\x02" + b"\0" * 7 + b"{!", "header is damaged"),
        ("model-00002-of-00002.safetensors", b"\x07" + b"\0" * 7 + b'{"a":1}', "header is damaged"),
    ],
)
def test_errors_of_a_checkpoint_are_named(file: str, content: bytes | None, named: str, tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path / "m", shards=2)
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=named):
        read_info(path)


def test_a_file_cut_off_in_its_data_is_named(tmp_path: Path) -> None:
    weights = make_tiny("llama", tmp_path / "m") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="cut off"):
        read_info(tmp_path / "m")


def test_command_makes_and_describes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    out = tmp_path / "m"
    args = parser.parse_args(["model", "make-tiny", "--out", str(out), "--arch", "qwen2", "--layers", "2", "--tied"])
    assert args.run(args) == 0
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2
    capsys.readouterr()
    args = parser.parse_args(["model", "info", str(out)])
    assert args.run(args) == 0
    printed = capsys.readouterr().out
    assert "Qwen2ForCausalLM" in printed
    assert "tied embedding" in printed


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["model", "info", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        args.run(args)


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")])
def test_human_bytes(size: int, text: str) -> None:
    assert human_bytes(size) == text

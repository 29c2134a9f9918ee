"""`ballast model info` and `up` compute, before any worker runs, what a worker would report about a model."""

from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from tests.support.families import write_family
from tools.cli.main import main
from tools.cli.served import check_served
from tools.model.tiny import make_tiny


def test_info_shows_the_implementation_of_a_model_and_the_gain_of_a_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "info", str(write_family("gemma2", tmp_path))]) == 0
    told = capsys.readouterr().out
    assert "computed by     transformers' Gemma2ForCausalLM, attention: a soft cap, a window" in told
    assert "KV per token    1.0 KiB float32, 256 B fp8_e4m3" in told
    assert "a pair gains" in told


def test_info_of_a_quantised_model_shows_the_size_of_a_parameter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "info", str(write_family("llama:w4a16", tmp_path))]) == 0
    told = capsys.readouterr().out
    assert "parameters      172,608 of 1.69 bytes each, int4 in memory" in told
    assert told.count("parameters  ") == 1


def test_models_of_our_own_classes_need_no_subprocess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.cli.served.described", None)
    folder = make_tiny("llama", tmp_path / "model", layers=2)
    check_served(folder)
    capsys.readouterr()
    assert main(["model", "info", str(folder)]) == 0
    assert "computed by     Ballast's own classes" in capsys.readouterr().out


def test_up_refuses_a_model_before_any_process_is_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_family("bloom", tmp_path)
    assert main(["up", "--model", str(folder), "--workers", "1"]) != 0
    assert "keeps other state than keys and values" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="BloomForCausalLM"):
        check_served(folder, "ballast")


def test_up_refuses_ranks_that_a_model_cannot_be_divided_among(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_family("gpt2", tmp_path / "gpt2")
    assert main(["up", "--model", str(folder), "--workers", "1", "--tensor-parallel-size", "2"]) != 0
    assert "transformers has no plan for GPT2LMHeadModel on several devices" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="3 does not divide the model's 4 attention heads"):
        check_served(make_tiny("llama", tmp_path / "model", layers=2), ranks=3)

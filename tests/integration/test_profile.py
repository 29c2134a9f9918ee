"""`ballast profile` from end to end: a process measures a tiny model and a link to another process."""

from pathlib import Path

import pytest

from ballast.common.cost import Chunk
from services.worker.cost_profile import read_profile
from services.worker.policy.cost_fit import CostForm, StageShape
from tools.cli.main import main
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.rotating

FAST = ["--rounds", "1", "--max-num-batched-tokens", "64", "--max-num-seqs", "8"]


def test_a_profile_is_measured_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny("qwen2", tmp_path / "tiny", layers=3, vocab=320, max_len=256)
    out = tmp_path / "profiles" / "tiny.json"
    out.parent.mkdir()
    assert main(["profile", "--model", str(model), "--out", str(out), "--layers", "1", "2", *FAST]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "tiny: Qwen2ForCausalLM, float32, 3 layers",
        "error of token count",
        "GB/s",
        "ms per GB",
        str(out),
    ):
        assert expected in shown.replace("\n", "")
    profile = read_profile(out)
    assert profile.key.layer_count == 3
    assert profile.link is not None
    assert profile.link.bandwidth_bytes_per_s > 1e6
    assert profile.link.latency_s < 1
    assert set(profile.held_out) == set(CostForm)
    costs = profile.costs.stages()
    whole, half = (costs.of(StageShape(*shape)) for shape in ((3, True, True), (1, False, False)))
    assert whole.batch_cost_s([Chunk(0, 64)]) > half.batch_cost_s([Chunk(0, 64)]) > 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--model", "{model}", "--layers", "7"], "stages of 7 layers"),
        (["--model", "{model}", "--threads", "0"], "threads: must be at least 1"),
    ],
)
def test_impossible_measurements_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], why: str
) -> None:
    model = make_tiny("llama", tmp_path / "tiny", layers=2, vocab=320, max_len=128)
    given = [argument.format(model=model) for argument in arguments]
    assert main(["profile", "--out", str(tmp_path / "out.json"), *given, *FAST]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()

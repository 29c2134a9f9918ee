"""Sweeps over one parameter of a scenario."""

from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from sim.jobs.whatif import parse_sweep, sweep
from sim.scenario import make_scenario
from tools.bench.slo import Slo
from tools.cli.main import main

SCENARIO = make_scenario(
    {
        "description": "",
        "model": "Llama-2-13B",
        "cluster": "2xA100-40G",
        "policies": ["recompute", "drop"],
        "lengths": "burstgpt",
        "arrivals": {"span_s": 25, "rate_per_s": 1, "bursts": [{"at_s": 5, "for_s": 8, "factor": 6}]},
    },
    "test",
)
GOAL = Slo(ttft_s=2.0, share=0.95)


def test_a_sweep_changes_one_thing() -> None:
    rates = sweep(SCENARIO.model_copy(update={"policies": ("recompute",)}), "rate", (0.5, 2.0), GOAL)
    assert [point.condition for point in rates] == ["rate 0.5", "rate 2"]
    assert (rates[0].ttft_p99_s or 0.0) < (rates[1].ttft_p99_s or 0.0)
    assert (rates[0].met_share or 0.0) > (rates[1].met_share or 0.0)
    sizes = sweep(SCENARIO.model_copy(update={"policies": ("recompute",)}), "gpus", (1, 3), None)
    assert [(point.gpu_count, point.met_share) for point in sizes] == [(1, None), (3, None)]
    assert (sizes[0].ttft_p99_s or 0.0) > (sizes[1].ttft_p99_s or 0.0)


def test_a_slower_network_makes_a_drop_slower_and_no_other_policy() -> None:
    # Within one server, KV does not cross the network.
    apart = SCENARIO.model_copy(update={"cluster": "2x1xA100-40G", "rate_scale": 1.6})
    points = sweep(apart, "network", (10.0, 200.0), None)
    plain = [point.ttft_p99_s for point in points if point.policy == "recompute"]
    drop = [point.ttft_p99_s or 0.0 for point in points if point.policy == "drop"]
    assert plain[0] == plain[1]
    assert drop[0] > drop[1]


def test_one_run_is_judged_by_every_slo() -> None:
    points = sweep(SCENARIO.model_copy(update={"policies": ("recompute",)}), "slo", (0.5, 5.0, 500.0), None)
    shares = [point.met_share or 0.0 for point in points]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len({point.ttft_p99_s for point in points}) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("speed=1", "NAME=VALUE"),
        ("rate=1,x", "must be numbers"),
        ("rate=0", "above 0"),
        ("gpus=inf", "above 0"),
        ("rate=nan", "above 0"),
        ("rate", "NAME=VALUE"),
    ],
)
def test_an_invalid_sweep_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_sweep(text)


def test_a_tpot_goal_requires_a_ttft_goal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0.0,100,5\n0.5,200,5\n")
    flags = ["sim", "--trace", str(trace), "--model", "llama-2-7b", "--cluster", "1xA800"]
    assert main([*flags, "--slo-tpot-s", "0.1"]) != 0
    assert "how long may a first token take" in capsys.readouterr().err

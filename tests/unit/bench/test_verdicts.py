"""Sentences that a comparison's figures make."""

from pathlib import Path

import pytest

from tests.unit.bench.samples import CONTESTANTS, comparison_result, write_comparison
from tools.bench.plot import merged_spans
from tools.bench.study import read_study
from tools.bench.verdicts import verdicts

pytest.importorskip("matplotlib")


def test_ours_is_measured_against_each_goal(tmp_path: Path) -> None:
    write_comparison(tmp_path, ("extreme-spiky",), repetitions=2)
    (workload,) = read_study(tmp_path).workloads
    lines = verdicts(workload)
    p99_s = {
        label: sorted(comparison_result("extreme-spiky", label, n, 0).policies[label].ttft_s.p99 or 0.0 for n in (0, 1))
        for label in CONTESTANTS
    }
    assert max(p99_s["drop"]) < min(p99_s["static-pipeline"]), "or the sample does not suit"
    assert "It is the lowest of all in 2 of 2 repetitions." in lines
    assert any(line.startswith("Lower than its") and line.endswith("nobody.") for line in lines)
    assert any(line.startswith(("P50 TPOT is -", "P50 TPOT is +")) for line in lines)
    (slo,) = [line for line in lines if line.startswith("Over 5 times the reference")]
    assert "with drop" in slo
    assert "with recompute" in slo
    assert "with static-pipeline" in slo
    (restored,) = [line for line in lines if line.startswith("Restoring changes")]
    p50_s = {
        label: [comparison_result("extreme-spiky", label, n, 0).policies[label].ttft_s.p50 or 0.0 for n in (0, 1)]
        for label in ("drop", "drop:restore=off")
    }
    changes = sorted(a / b - 1 for a, b in zip(p50_s["drop"], p50_s["drop:restore=off"], strict=True))
    assert f"({changes[0]:+.1%} to {changes[1]:+.1%} within repetitions)" in restored
    assert "P50 TTFT by" in restored
    assert "P50 TPOT by" in restored
    assert sum("first TTFT over 5 times the reference after" in line for line in lines) == len(CONTESTANTS)
    (lasted,) = [line for line in lines if "holds out" in line]
    assert float(lasted.split("holds out ")[1].split()[0]) > 1.0


def test_without_rivals_it_is_said_for_how_long_parameters_are_dropped(tmp_path: Path) -> None:
    write_comparison(tmp_path, repetitions=1)
    for path in (tmp_path / "runs").rglob("*.json"):
        if int(path.name[0]) < 5:
            path.unlink()
    (workload,) = read_study(tmp_path).workloads
    assert {c.policy for c in workload.contestants} == {"drop"}
    lines = verdicts(workload)
    assert {line.split(" parameters are")[0] for line in lines} <= {"With drop", "With drop:restore=off"}
    ours = next(c for c in workload.contestants if c.label == "drop")
    (line,) = [line for line in lines if line.startswith("With drop parameters")]
    spans = merged_spans(ours.first)
    dropped_s = sum(end_s - begin_s for begin_s, end_s, _ in spans)
    assert 0 < dropped_s < ours.first.duration_s
    assert f"dropped for {dropped_s:.2f} s of {ours.first.duration_s:.2f} s;" in line
    came = [r for r in ours.first.requests if any(begin_s <= r.planned_s < end_s for begin_s, end_s, _ in spans)]
    assert line.endswith(f"{len(came) / len(ours.first.requests):.1%} of the requests come then.")

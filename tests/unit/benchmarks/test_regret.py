"""The rules that judge policies over a grid, on made-up runs, and the random draws of the grid."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.regret import RegretRow, is_saturated, predictions, row_of, summary, table
from benchmarks.regret_cells import KINDS, REPLAYED, decided, figures_of, job_of, trace_of
from sim.results import Outcome
from tests.support.simulated import world


def run(policy: str, p99_s: float, tpot_ms: float = 40.0, draw: int = 0, **others: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "policy": policy,
        "draw": draw,
        "failed": None,
        "prompt_share": 0.2,
        "ttft_p50_s": 0.2,
        "ttft_p99_s": p99_s,
        "tpot_p50_s": tpot_ms / 1e3,
        "tokens_per_s": 1000.0,
        "preemptions": 0,
        "mean_demand": 0.5,
        "peak_demand": 0.9,
    }
    return figures | others


def row(*runs: dict[str, Any], calm_s: float = 0.1) -> RegretRow:
    found = row_of("cell", runs, run("calm", calm_s, ttft_p50_s=calm_s))
    assert found is not None
    return found


def test_waits_below_a_second_are_equal() -> None:
    found = row(run("recompute", 0.3), run("drop", 0.9))
    assert found.ttft_regret("drop") == 1.0
    assert found.gain("drop") == pytest.approx(3.0)
    assert not found.faults("drop")


def test_waits_below_five_times_the_calm_median_are_equal() -> None:
    assert row(run("recompute", 1.1), run("drop", 4.0), calm_s=0.8).ttft_regret("drop") == 1.0
    assert row(run("recompute", 1.1), run("drop", 6.0), calm_s=0.8).ttft_regret("drop") == pytest.approx(1.5)


def test_a_saturated_cell_is_judged_by_the_median_of_its_draws() -> None:
    draws = [run("recompute", wait, draw=d) for d, wait in enumerate((20.0, 30.0, 40.0))]
    ours = [run("drop", wait, draw=d) for d, wait in enumerate((90.0, 34.0, 36.0))]
    found = row(*draws, *ours)
    assert found.saturated
    assert found.ttft_regret("drop") == pytest.approx(1.2)
    assert not found.faults("drop")


def test_draws_of_a_cell_that_is_not_saturated_do_not_count() -> None:
    found = row(run("recompute", 5.0), run("drop", 4.0), run("drop", 400.0, draw=1))
    assert found.policies["drop"].ttft_p99_s == 4.0


def test_the_judged_policy_does_not_decide_whether_a_cell_is_saturated() -> None:
    assert is_saturated([run("recompute", 12.0), run("drop", 0.5)])
    assert not is_saturated([run("recompute", 12.0), run("static-pipeline", 2.0)])


def test_every_violated_rule_is_named() -> None:
    plain = run("recompute", 0.5, tpot_ms=40.0)
    ours = run("drop", 3.0, tpot_ms=60.0, tokens_per_s=900.0)
    assert row(plain, ours).faults("drop") == [
        "P99 TTFT 3.00 x",
        "TPOT 1.50 x",
        "TPOT 1.50 x recompute's",
        "throughput 0.90 x",
    ]


def test_tpot_is_judged_only_where_a_rival_has_shorter_waits() -> None:
    found = row(run("recompute", 50.0, tpot_ms=40.0), run("drop", 2.0, tpot_ms=80.0))
    assert found.tpot_regret("drop") == 1.0
    assert found.tpot_over_plain("drop") is None


def test_memory_is_the_bottleneck_where_compute_is_not() -> None:
    ours = run("drop", 1.0)
    assert row(run("recompute", 1.0, peak_demand=1.2), ours).memory_is_short
    assert row(run("recompute", 1.0, preemptions=3), ours).memory_is_short
    assert not row(run("recompute", 1.0, peak_demand=0.9), ours).memory_is_short
    assert not row(run("recompute", 1.0, peak_demand=1.2, prompt_share=0.8), ours).memory_is_short


def test_with_memory_just_full_no_figure_may_be_worse_than_with_recompute() -> None:
    rows = [
        row(run("recompute", 0.5, peak_demand=1.01), run("drop", 0.6)),
        row(run("recompute", 0.5, peak_demand=1.5), run("drop", 0.9)),
    ]
    told = "\n".join(summary(rows, ["recompute", "drop"], "drop"))
    assert "memory just full (95% to 115%) in 1 cells: at most 1.20 x recompute's (goal 1.05), P99 TTFT in cell" in told


def test_a_broken_run_is_reported_and_not_counted() -> None:
    broke = {"policy": "drop", "draw": 1, "failed": "block 559", "prompt_share": 0.2}
    found = row(run("recompute", 20.0), run("drop", 21.0), broke)
    assert found.faults("drop") == ["1 broken"]


def test_text_has_every_cell_and_each_policys_worst() -> None:
    rows = [row(run("recompute", 8.0), run("drop", 2.0)), row(run("recompute", 0.5), run("drop", 4.0))]
    assert table(rows, ["recompute", "drop"], "drop").count("| cell (") == 3
    told = "\n".join(summary(rows, ["recompute", "drop"], "drop"))
    assert "1 of 2 cells; not in cell" in told
    assert "recompute: 4.00 (cell)" in told
    assert "drop: 4.00 (cell)" in told


def test_predictions_are_judged_by_their_outcomes() -> None:
    decided = [
        {"predicted_s": 2.0, "was_s": 1.0},
        {"predicted_s": 0.0, "was_s": 0.3},  # both waits are short enough to count as equal
        {"predicted_s": 1.0, "was_s": 8.0},
        {"predicted_s": 1.0, "was_s": None},  # no request waited
    ]
    found = predictions([run("drop", 1.0, decisions=decided), run("recompute", 1.0)])
    assert "3 decisions: median error 2.00 x (goal 1.5), 67% within 3 x" in found


def test_predictions_of_the_planner_are_recorded_with_their_outcomes() -> None:
    made = world("drop", check_every=0)
    done = made.run()
    assert done.predicted
    # A prediction that is superseded before any first token has no outcome.
    first = next(one for one in (decided(predicted, done.zero_s) for predicted in done.predicted) if one["was_s"])
    assert 5.0 < first["at_s"] < 15.0  # during the burst
    assert first["after_s"] <= max(predicted.horizon_s for predicted in done.predicted) + 1.0
    assert first["predicted_s"] <= first["nothing_s"]
    waits_s = [r.token_times_s[0] - r.arrival_s for r in done.records if r.token_times_s]
    assert 0.0 < first["was_s"] < 1.25 * max(waits_s)
    for predicted in done.predicted:
        assert predicted.epoch is None or predicted.epoch in {record.epoch for record in done.transitions}


def test_draws_differ_in_lengths_alone(tmp_path: Path) -> None:
    lines = ["arrival_s,input_tokens,output_tokens", *(f"{i / 4},{100 + i},{50 + i}" for i in range(2000))]
    think, chat = REPLAYED["think-14b-40g-x1.2"], REPLAYED["chat-13b-40g-x1.4"]
    for cell in (think, chat):
        (tmp_path / f"{cell.trace}.csv").write_text("\n".join(lines))
        first, again, other = (trace_of(cell, tmp_path, draw) for draw in (0, 0, 1))
        assert first == again
        assert [r.arrival_s for r in first.requests] == [r.arrival_s for r in other.requests]
        assert [r.output_tokens for r in first.requests] != [r.output_tokens for r in other.requests]
        window = [r for r in range(2000) if cell.from_s <= r / 4 < cell.until_s][:: KINDS[cell.kind].every]
        assert len(first.requests) == round(len(window) * cell.rate)
        assert max(r.input_tokens for r in first.requests) <= KINDS[cell.kind].most_input


def test_the_replayed_cells_are_of_five_kinds_and_three_machines() -> None:
    assert len(REPLAYED) >= 24
    assert {cell.kind for cell in REPLAYED.values()} == set(KINDS)
    for kind in KINDS:
        assert len({cell.machine for cell in REPLAYED.values() if cell.kind == kind}) >= 3


def test_requests_that_only_the_judged_policy_leaves_unserved_are_a_fault() -> None:
    found = row(run("recompute", 8.0), run("drop", 0.8, unserved=50))
    assert found.faults("drop") == ["50 unserved"]
    assert "50 unserved" in table([found], ["recompute", "drop"], "drop")
    assert not row(run("recompute", 8.0, unserved=50), run("drop", 0.8, unserved=50)).faults("drop")


def test_a_request_without_a_token_waits_until_the_end_of_the_run() -> None:
    made = world().run()
    del made.records[-1].token_times_s[:]
    made.records[-1].outcome = Outcome.REFUSED
    made.duration_s = 1e4
    found = figures_of(made)
    assert found["ttft_p99_s"] > 10.0
    assert found["unserved"] == 1


def test_workers_have_the_default_size_of_their_gpu(tmp_path: Path) -> None:
    (tmp_path / "azure_conv_calm640.csv").write_text("arrival_s,input_tokens,output_tokens\n1,100,10\n2,100,10\n")
    sizes = {
        machine: job_of(REPLAYED[f"calm-{machine}"], tmp_path, "drop", 0).worker
        for machine in ("14b-40g-x1", "14b-80g-x1")
    }
    assert [(s.max_running_count, s.max_batch_tokens) for s in sizes.values()] == [(256, 2048), (512, 4096)]

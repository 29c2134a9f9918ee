"""The parts of `bench overload` and `bench plot` that need no cluster."""

import argparse
import asyncio
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from ballast.common.errors import ConfigError, Unavailable
from tests.unit.bench.samples import CONTESTANTS, bench_result, bursty_run, comparison_result, write_comparison
from tools.bench.emulation import why_void, with_effort, with_settings
from tools.bench.overload import OverloadComparison, Run, describe_run, is_formed, order_of
from tools.bench.overload_command import add_overload_parser, settle
from tools.bench.overload_plan import (
    ComparisonArguments,
    Timetable,
    WorkloadPlan,
    arguments_of,
    describe_plan,
    setting_variable,
    span_within,
)
from tools.bench.policies import ABLATION, COMPARED, SWEEP, parse_policies
from tools.bench.progress import ComparisonDisplay, minutes, open_console
from tools.bench.replay import ReplayProgress
from tools.bench.results import read_result, write_result
from tools.bench.study import read_study
from tools.bench.workloads import Workload, parse_workloads
from tools.cli.bench import emulate
from tools.cli.main import main
from tools.model.info import read_info
from tools.model.tiny import make_tiny


def test_policies_carry_knobs_as_flags() -> None:
    plain, tuned, named = parse_policies("recompute,recompute:watermark=0.1,drop:max-num-seqs=8:label=ours")
    assert plain.flags() == {service: ["--overload-policy", "recompute"] for service in ("planner", "worker")}
    assert tuned.label == "recompute:watermark=0.1"
    assert tuned.flags()["worker"][2:] == ["--dev", "admission_reserve_fraction=0.1"]
    assert (named.label, named.policy, named.flags()["worker"][2:]) == ("ours", "drop", ["--max-num-seqs", "8"])
    (pipeline,) = parse_policies("static-pipeline:degree=4")
    assert (pipeline.pipeline_degree, plain.pipeline_degree) == (4, 1)
    assert pipeline.flags()["planner"][2:] == ["--pipeline-degree", "4"]
    assert pipeline.flags()["worker"][2:] == ["--dev", "microbatching=token-count"], (
        "a static pipeline uses no lookahead"
    )
    (ordered,) = parse_policies("drop:queue-order=deadline")
    assert ordered.flags()["dispatcher"] == ["--queue-order", "deadline"]


@pytest.mark.parametrize("words", [COMPARED, ABLATION, SWEEP])
def test_lists_of_contestants_are_parsed(words: tuple[str, ...]) -> None:
    specs = parse_policies(",".join(words))
    assert len({json.dumps([spec.policy, dict(spec.knobs)]) for spec in specs}) == len(words)


def test_the_duration_is_estimated_and_fits_into_the_given_minutes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "overload", "--out", str(tmp_path / "o"), "--workloads", "burst,extreme:answers", "--plan-only"]
    assert main([*command, "--workers", "2,4", "--policies", "drop,static-pipeline:degree=4", "--span-s", "20"]) == 0
    two, four, together = capsys.readouterr().out.splitlines()
    assert re.match(
        r"2 workers: 6 runs \(2 workloads of 20 s, \d\d s; 1 policies; 3 repetitions\), about \d+:\d\d", two
    )
    assert four.startswith("4 workers: 12 runs")
    assert together.startswith("together about")
    assert not (tmp_path / "o").exists()
    assert main([*command, "--workers", "1,4", "--policies", "static-pipeline"]) == 0
    assert capsys.readouterr().out.startswith("4 workers"), "no policy is for one worker"
    assert main([*command, "--policies", "drop", "--max-minutes", "9"]) == 0
    assert re.search(r"about (8:[345]|9:0)", capsys.readouterr().out)
    assert main([*command, "--policies", "drop", "--max-minutes", "2"]) == 2
    assert "6 runs of at least 10 s take" in capsys.readouterr().err
    assert main([*command, "--policies", "static-pipeline:degree=4"]) == 2
    assert main([*command, "--workers", "2,2"]) == 2


def test_a_span_follows_from_the_given_minutes() -> None:
    unit = Timetable(2, {"a": 1.0, "b": 2.0}, ["x", "y"], 3, probe_s=5.0)
    span_s = span_within([unit], 25.0)
    made = Timetable(2, {"a": span_s, "b": 2 * span_s}, ["x", "y"], 3, probe_s=5.0)
    assert 24.5 * 60 < made.total_s <= 25.0 * 60


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "names none"),
        ("vllm", "unknown: 'vllm'"),
        ("drop:speed=9", "drop has no knob 'speed'; it has"),
        ("drop:watermark", "NAME=VALUE"),
        ("static-pipeline:degree=1", "at least 2"),
        ("drop,drop", "twice"),
    ],
)
def test_wrong_policies_are_named(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_policies(text)


def test_runs_are_interleaved_and_every_policy_goes_first_once() -> None:
    workloads = parse_workloads("burst,answers", seed=0)
    specs = parse_policies("recompute,drop,recompute:watermark=0.1")
    runs = order_of(workloads, specs, 3)
    assert [run.position for run in runs] == list(range(18))
    assert {(r.workload.name, r.spec.label, r.repetition) for r in runs} == {
        (w.name, s.label, n) for w in workloads for s in specs for n in range(3)
    }
    assert {runs[6 * n].spec.label for n in range(3)} == {s.label for s in specs}
    paths = {run.path(Path("out")) for run in runs}
    assert len(paths) == 18


def arguments(model: Path, **changes: object) -> ComparisonArguments:
    given: dict[str, object] = {
        "workers": 2,
        "seed": 0,
        "deadline_s": 60.0,
        "demand_fraction": 0.5,
        "mean_tokens": 100.0,
        "sequences_each": 4,
        "span_s": 10.0,
        "max_num_seqs": 16,
        "settings": {"monitor.dwell_s": "7"},
    }
    return arguments_of(read_info(model), **{**given, **changes})  # pyright: ignore[reportArgumentType] -- any argument


def test_settings_are_the_services_defaults_except_for_given_ones(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "m")
    assert arguments(model, settings={}).settings == {}
    (given,) = arguments(model).settings
    assert setting_variable(given) == "BALLAST_MONITOR__DWELL_S"


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"demand_fraction": 0.0}, {"span_s": -1.0}, {"mean_tokens": 1.0}])
def test_wrong_arguments_are_named(tmp_path: Path, wrong: dict[str, object]) -> None:
    model = make_tiny("llama", tmp_path / "m")
    with pytest.raises(ConfigError, match="must be"):
        arguments(model, **wrong)


def flags(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_overload_parser(commands, emulate)
    return parser.parse_args(["overload", "--out", "out", "--workloads", "burst", *text.split()])


EMULATED = "--engine emulated --profile A100-40G --model Qwen2.5-14B --policies recompute,drop"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("--profile A100-40G", "--profile"),
        ("--engine emulated --model Qwen2.5-14B", "--profile"),
        ("--engine emulated --profile A100-40G", "--model"),
        (f"{EMULATED} --sequences-each 4", "--sequences-each"),
        (f"{EMULATED} --probe-s 4", "--probe-s"),
        (f"{EMULATED} --answer-share 0.5", "--answer-share"),
        (f"{EMULATED} --peak 2", "--peak"),
    ],
)
def test_flags_that_make_no_sense_together_are_named(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        settle(flags(text))


def test_emulated_workers_replay_an_unchanged_trace(tmp_path: Path) -> None:
    given, own = flags(EMULATED), flags("")
    settle(given)
    settle(own)
    assert (own.demand, own.mean_tokens, own.max_num_seqs) == (0.55, 240.0, 64)
    assert (given.demand, given.mean_tokens, given.max_num_seqs) == (None, None, None)
    emulation = emulate(tmp_path / "machine", given.profile, given.model)
    planned = arguments_of(
        emulation.info,
        workers=2,
        seed=0,
        deadline_s=60.0,
        demand_fraction=None,
        mean_tokens=None,
        sequences_each=8,
        span_s=None,
        max_num_seqs=None,
        settings={},
        gpu=emulation.gpu,
    )
    comparison = OverloadComparison(emulation, planned, tmp_path / "out", open_console())
    [workload] = parse_workloads("answers", seed=0)
    asyncio.run(comparison._prepare(workload))
    assert comparison._traces["answers"].requests == workload.trace.requests
    plan = comparison._plan.workloads["answers"]
    assert (plan.length_scale, plan.rate_factor) == (1.0, 1.0)
    assert plan.undropped_tokens == 2 * emulation.capacity_tokens
    assert plan.full_tokens_per_s > plan.few_tokens_per_s > 0


@pytest.mark.parametrize(
    ("sizes", "degree", "formed"),
    [
        ([1, 1, 1], 1, True),
        ([2, 1], 1, False),
        ([2, 2], 2, True),
        ([2, 2, 1], 2, True),
        ([2, 1, 1], 2, False),
        ([4, 1], 2, False),  # a group formed by an overload
        ([4, 2, 1], 4, False),
        ([1, 1], 4, True),
    ],
)
def test_a_policys_groups_have_its_degree(sizes: list[int], degree: int, formed: bool) -> None:
    assert is_formed(sizes, degree) is formed


def test_a_run_says_why_it_is_void(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    result = comparison_result("burst", "drop", 0, 0)
    with pytest.raises(Unavailable, match="have not said"):
        with_effort(result, tmp_path)
    log.write_text("t [info     ] emulated            due_s=10.0 late_s=1.0 lost_s=5.0\n")
    with log.open("a") as more:  # appended by a second run
        more.write("t [info     ] emulated            due_s=10.0 instance=w late_s=1.0 lost_s=0.1 service=worker\n")
    kept_up = with_effort(result, tmp_path)
    assert kept_up.config.cluster["lost_share"] == 0.01
    assert not why_void(kept_up)
    assert "3.0%" in why_void(with_settings(kept_up, {"lost_share": 0.03}))
    (tmp_path / "worker-1.log").write_text("t [error    ] killed before it has said how late it was\n")
    with pytest.raises(Unavailable, match=r"^worker-1:? have not said"):
        with_effort(result, tmp_path)


PLAN = {
    "word": "burst",
    "length_scale": 0.1,
    "rate_factor": 0.5,
    "span_s": 10.0,
    "request_count": 1,
    "device_memory_bytes": 1,
    "undropped_tokens": 1,
    "few_tokens_per_s": 1.0,
    "full_tokens_per_s": 2.0,
    "forecast_demand_fraction": 0.5,
    "forecast_peak_fraction": 1.0,
}


def test_a_plan_without_an_overload_says_so() -> None:
    assert "OVERFLOW" in describe_plan("burst", WorkloadPlan.model_validate(PLAN))
    steep = WorkloadPlan.model_validate({**PLAN, "forecast_peak_fraction": 1.3})
    assert describe_plan("burst", steep).endswith("130% at the peak, if nobody waited")


def test_a_comparison_continues_only_with_the_same_arguments_and_plan(tmp_path: Path) -> None:
    model, out = make_tiny("llama", tmp_path / "m"), tmp_path / "out"
    given = arguments(model)
    out.mkdir()
    (out / "plan.json").write_text(
        json.dumps({"arguments": given.model_dump(), "workloads": {"burst": PLAN}}, indent=1)
    )
    comparison = OverloadComparison(model, given, out, open_console())
    (workload,) = parse_workloads("burst", seed=0)
    run = Run(workload, parse_policies("drop")[0], 0, 0)
    assert not comparison._finished(run)
    made = comparison_result("burst", "drop", 0, 0)
    assert made.comparison is not None
    write_result(run.path(out), made)
    assert not comparison._finished(run), "the result belongs to another plan"
    facts = made.comparison.model_copy(update={"plan_digest": comparison._digest(workload)})
    write_result(run.path(out), made.model_copy(update={"comparison": facts}))
    assert comparison._finished(run)
    write_result(run.path(out), made.model_copy(update={"comparison": facts, "complete": False}))
    assert not comparison._finished(run), "interrupted"

    with pytest.raises(ConfigError, match=r"workers \(was 2, is 4\)"):
        OverloadComparison(model, arguments(model, workers=4), out, open_console())


def test_a_workload_that_has_changed_is_refused(tmp_path: Path) -> None:
    model, out = make_tiny("llama", tmp_path / "m"), tmp_path / "out"
    given = arguments(model)
    out.mkdir()
    (out / "plan.json").write_text(json.dumps({"arguments": given.model_dump(), "workloads": {"burst": PLAN}}))
    comparison = OverloadComparison(model, given, out, open_console())
    (workload,) = parse_workloads("burst", seed=0)
    with pytest.raises(ConfigError, match="has changed since"):
        asyncio.run(comparison._prepare(workload))
    with pytest.raises(ConfigError, match="was 'burst' there"):
        asyncio.run(comparison._prepare(Workload("burst", "other.csv", workload.trace, workload.trace)))


def test_the_remaining_time_follows_real_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("tools.bench.progress.time.monotonic", lambda: now_s[0])
    with ComparisonDisplay(open_console(), [10.0, 10.0, 10.0]) as display:
        assert display.left_s == 30.0
        display.begin("one")
        now_s[0] += 20.0
        display.end()
        assert display.left_s == 40.0
    assert minutes(75.4) == "1:15"


def test_a_terminal_shows_a_bar_with_the_time_left() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=120)
    with ComparisonDisplay(console, [30.0, 30.0]) as display:
        display.begin("spiky · drop · repetition 1")
        display.on_progress(ReplayProgress(total_count=9, span_s=20.0, sent_count=4, finished_count=3))
        display.end()
        display.begin("spiky · recompute · repetition 1")
        display.say(describe_run("spiky · drop · repetition 1", comparison_result("spiky", "drop", 0, 0)))
        display.end()
    shown = written.getvalue()
    assert "run 1/2" in shown
    assert re.search(r"(1:00|0:5\d) left  spiky · drop · repetition 1  starting", shown)
    assert "run 2/2" in shown
    assert "4 not served" in shown


# ---------------------------------------------------------------- derived from results


def test_a_study_takes_its_unit_from_the_best_baseline(tmp_path: Path) -> None:
    write_comparison(tmp_path)
    (workload,) = read_study(tmp_path).workloads
    assert [c.label for c in workload.contestants] == list(CONTESTANTS)
    assert [len(c.runs) for c in workload.contestants] == [2] * len(CONTESTANTS)
    by_label = {c.label: c for c in workload.contestants}
    assert workload.reference.ttft_policy == "static-pipeline"
    assert workload.reference.ttft_s == by_label["static-pipeline"].spread(lambda r: r.ttft_s.p50).middle
    worst, ours = (workload.violations(by_label[label], 5.0).middle for label in ("recompute", "drop"))
    assert (worst or 0) > 0.3 > (ours or 0)
    demand = workload.demand_fraction(by_label["recompute"]).middle
    assert demand is not None
    assert 0.3 < demand < 1.0


def test_runs_of_different_plans_are_not_mixed(tmp_path: Path) -> None:
    write_comparison(tmp_path)
    made = comparison_result("spiky", "drop", 5, 99)
    assert made.comparison is not None
    other = made.model_copy(update={"comparison": made.comparison.model_copy(update={"plan_digest": "other"})})
    write_result(tmp_path / "runs" / "other.json", other)
    with pytest.raises(ConfigError, match="different sizes or settings"):
        read_study(tmp_path)


def test_a_folder_without_results_is_named(tmp_path: Path) -> None:
    write_result(tmp_path / "runs" / "replay.json", bench_result(bursty_run()))
    with pytest.raises(ConfigError, match="holds no finished result"):
        read_study(tmp_path)


def test_plot_writes_a_table_its_figures_as_json_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    write_comparison(tmp_path, repetitions=2)
    first = tmp_path / "runs" / "spiky" / "0.0.json"
    interrupted = read_result(first).model_copy(update={"complete": False})
    write_result(tmp_path / "runs" / "spiky" / "x.json", interrupted)
    assert main(["bench", "plot", "--results", str(tmp_path), "--out", str(tmp_path / "plot")]) == 0
    assert {path.name for path in (tmp_path / "plot").iterdir()} == {"table.md", "comparison.json", "spiky.png"}
    table = (tmp_path / "plot" / "table.md").read_text()
    assert re.search(r"^\| drop:restore=off \| 2 \| .* s \|", table, re.MULTILINE)
    assert "(static-pipeline), the lowest medians of policies other than drop." in table
    figures = json.loads((tmp_path / "plot" / "comparison.json").read_text())["spiky"]
    assert list(figures) == list(CONTESTANTS)
    ours = [comparison_result("spiky", "drop", n, 0).policies["drop"] for n in (0, 1)]
    p99 = figures["drop"]["ttft_p99_s"]
    assert (p99["low"], p99["high"], p99["count"]) == (*sorted(r.ttft_s.p99 or 0.0 for r in ours), 2)
    assert figures["drop"]["drops"]["middle"] == figures["drop"]["restores"]["middle"] == 1.0
    assert figures["drop"]["dropped_s"]["middle"] == pytest.approx(25.2)
    assert figures["recompute"]["bubble_share"] == {"middle": None, "low": None, "high": None, "count": 0}
    said = capsys.readouterr().out
    assert "1 interrupted runs are left out" in said
    assert "wrote table.md" in said

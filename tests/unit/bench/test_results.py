import dataclasses
import json
import re
import subprocess
from pathlib import Path

import pytest

from ballast.common.errors import ConfigError
from tests.unit.bench.samples import bench_result, bursty_run, dropped_run, record, sample
from tools.bench import environment, results
from tools.bench.environment import describe_environment
from tools.bench.records import ReplayRun, RequestOutcome
from tools.bench.results import (
    SLO_SCALES,
    BenchResult,
    SloReference,
    Summary,
    policy_result,
    read_result,
    write_result,
)

SCHEMA_PAGE = Path(__file__).parents[3] / "docs" / "results-schema.md"


def run_of(*records: results.BenchRecord) -> ReplayRun:
    return ReplayRun(list(records), [sample(0, 100), sample(1, 300, epoch=1)], True, 10.0, 0)


def test_summary_of_known_values() -> None:
    summary = Summary.of([float(v) for v in range(1001)])
    assert (summary.count, summary.mean, summary.p50, summary.p90) == (1001, 500.0, 500.0, 900.0)
    assert summary.p99 == pytest.approx(990)
    assert summary.p999 == pytest.approx(999)
    assert summary.max == 1000.0


def test_nothing_measured_is_null_and_not_zero() -> None:
    policy = policy_result(ReplayRun([], [], False, 0.0, 3), "recompute")
    assert policy.ttft_s == Summary(count=0)
    assert policy.throughput_tokens_per_s is None
    assert policy.slo_violation_fraction == dict.fromkeys(SLO_SCALES)
    assert (policy.token_mismatches, policy.bubble_fraction) == (None, None)


def test_figures_of_a_run() -> None:
    policy = policy_result(
        run_of(
            record(0, 0.0, [1.0, 1.5, 2.0]),
            record(1, 2.0, [2.5]),
            record(2, 3.0, [3.1], outcome=RequestOutcome.FAILED),
            record(3, 4.0, [], outcome=RequestOutcome.REFUSED),
        ),
        "recompute",
    )
    assert policy.ttft_s.count == 2
    assert policy.ttft_s.mean == pytest.approx(0.75)
    assert (policy.tpot_s.count, policy.tpot_s.p50) == (1, 0.5)
    assert policy.itl_s.count == 2
    assert policy.e2e_s.max == pytest.approx(2.0)
    assert policy.send_lag_s.p50 == pytest.approx(0.001)
    assert (policy.request_count, policy.output_token_count, policy.input_token_count) == (4, 5, 20)
    assert policy.throughput_tokens_per_s == pytest.approx(0.5)
    assert policy.outcomes[RequestOutcome.REFUSED] == 1
    assert sum(policy.outcomes.values()) == 4
    assert [(t.at_s, t.epoch, t.reason) for t in policy.transitions] == [(1, 1, "overload")]
    assert policy.series.kv_demand_bytes == [100 << 20, 300 << 20]


def test_a_transition_reported_by_the_planner_replaces_the_observed_one() -> None:
    run = dropped_run()
    run.samples.append(sample(80.0, 10, epoch=5))
    drop, restore, other = policy_result(run, "drop").transitions
    assert (drop.at_s, drop.epoch, drop.kind, drop.phase) == (26.8, 1, "drop", "done")
    assert (drop.duration_s, drop.exchange_s, drop.max_stall_s) == (1.5, 1.0, 0.25)
    assert (drop.moved_bytes, drop.freed_parameter_bytes) == ((30 << 20) + 5, 200 << 20)
    assert (drop.victim_count, drop.victims_recomputed) == (12, 1)
    assert (restore.epoch, restore.kind, restore.summary) == (2, "restore", "a restore")
    assert (other.at_s, other.epoch, other.kind, other.duration_s) == (80.0, 5, None, None)


def test_slo_counts_late_and_unserved_requests_but_not_those_we_cancelled() -> None:
    reference = SloReference(policy="drop", ttft_s=1.0, tpot_s=0.1)
    policy = policy_result(
        run_of(
            record(0, 0.0, [0.5, 0.6]),  # within the SLO
            record(1, 0.0, [3.5, 3.6]),  # violates the TTFT SLO up to scale 3
            record(2, 0.0, [0.5, 1.05]),  # violates the TPOT SLO up to scale 5
            record(3, 0.0, [], outcome=RequestOutcome.REFUSED),
            record(4, 0.0, [], outcome=RequestOutcome.CANCELLED),
        ),
        "recompute",
        reference,
    )
    assert [policy.ttft_slo_violation_fraction[s] for s in (3, 4)] == [0.5, 0.25]
    assert [policy.tpot_slo_violation_fraction[s] for s in (5, 6)] == [0.5, 0.25]
    assert [policy.slo_violation_fraction[s] for s in (1, 4, 10)] == [0.75, 0.5, 0.25]
    assert list(policy.slo_violation_fraction) == list(range(1, 11))
    assert policy.slo_reference.policy == "drop"


def test_own_median_is_the_default_reference() -> None:
    policy = policy_result(bursty_run(), "recompute")
    assert policy.slo_reference.ttft_s == policy.ttft_s.p50
    fractions = [policy.slo_violation_fraction[scale] or 0 for scale in SLO_SCALES]
    assert fractions == sorted(fractions, reverse=True)
    assert fractions[0] >= 0.5


def test_a_file_reads_back_equal(tmp_path: Path) -> None:
    result = bench_result(bursty_run(), "recompute", "drop")
    write_result(tmp_path / "new" / "r.json", result)
    assert read_result(tmp_path / "new" / "r.json") == result
    raw = json.loads((tmp_path / "new" / "r.json").read_text())
    assert set(raw["policies"]["drop"]["slo_violation_fraction"]) == {str(scale) for scale in SLO_SCALES}
    assert raw["policies"]["recompute"]["requests"][0]["prompt_token_ids"] is None


def test_tokens_are_in_the_file_if_recorded() -> None:
    made = record(0, 0.0, [1.0], prompt_token_ids=[1, 2], output_token_ids=[3])
    request = policy_result(run_of(made), "recompute").requests[0]
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 2], [3])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "r.json: is no result file"),
        ('{"schema_version": 2}', "schema_version: Input should be 1"),
        ('{"schema_version": 1, "extra": 1}', "created_unix_s: Field required"),
    ],
)
def test_other_files_than_results_are_refused(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_result(tmp_path / "r.json")


def test_unreadable_and_unwritable_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_result(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_result(tmp_path / "file" / "r.json", bench_result(bursty_run()))


def test_environment_names_the_machine() -> None:
    found = describe_environment()
    assert found.core_count >= 1
    assert found.memory_bytes > 0
    assert found.packages["numpy"]
    assert found.packages["ballast-serve"]


def test_the_commit_is_not_that_of_another_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (
        ("init", "-q"),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"),
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(environment, "_HERE", tmp_path / "environment.py")
    (tmp_path / "environment.py").touch()
    assert describe_environment().git_commit is None
    assert describe_environment().git_dirty is None


def test_every_field_is_documented() -> None:
    """docs/results-schema.md has a row for each field of each object, and no row for anything else."""
    documented: dict[str, set[str]] = {}
    section = ""
    for line in SCHEMA_PAGE.read_text().splitlines():
        if heading := re.match(r"## .*`(\w+)`", line):
            section = heading[1]
        elif section and (row := re.match(r"\| `(\w+)`", line)):
            documented.setdefault(section, set()).add(row[1])
    schema = BenchResult.model_json_schema()
    defined = {"BenchResult": set(schema["properties"])}
    defined |= {name: set(body["properties"]) for name, body in schema["$defs"].items() if "properties" in body}
    assert documented == defined


def test_overloaded_periods_do_not_set_the_slo_reference() -> None:
    """The SLO reference of a lone run excludes overloaded periods, because waits for memory would otherwise set the
    target.
    """
    run = bursty_run()
    shortage = [dataclasses.replace(s, kv_demand_bytes=2 * s.kv_capacity_bytes) for s in run.samples if s.at_s > 5.0]
    calm = [s for s in run.samples if s.at_s <= 5.0]
    overloaded = dataclasses.replace(run, samples=[*calm, *shortage])
    reference = policy_result(overloaded, "recompute").slo_reference
    median_s = policy_result(overloaded, "recompute").ttft_s.p50
    assert reference.calm
    assert reference.ttft_s is not None
    assert median_s is not None
    assert reference.ttft_s < median_s

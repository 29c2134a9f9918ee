"""How the table of a reproduction compares measured figures with those of a paper."""

import random
from dataclasses import replace

import pytest

from ballast.common.errors import ConfigError
from benchmarks.reproduce import BURST_AT_S, CLAIMS, SCENARIOS, PaperClaim, PaperLine, table
from sim.hardware import find_cluster, find_model, timings
from sim.jobs.settled import Load, peak_demand, settled
from sim.jobs.simulation import SimJob, instance_count, specs_of
from sim.scenario import Scenario, read_scenario
from tests.unit.bench.samples import bench_result, bursty_run
from tools.bench.lengths import lengths_of
from tools.bench.traces import Trace, TraceRequest


def line(value: float | None, low: float = 10.0, high: float = 20.0) -> PaperLine:
    return PaperLine(PaperClaim("13", "gain", "somewhere", low, high, "x", lambda _: value), value)


@pytest.mark.parametrize(
    ("value", "ratio", "within"),
    [
        (15.0, 1.0, True),
        (8.0, 0.8, True),
        (5.0, 0.5, False),
        (28.0, 1.4, True),
        (40.0, 2.0, False),
        (-3.0, -0.3, False),
    ],
)
def test_the_ratio_is_to_the_nearest_end_of_the_papers_range(value: float, ratio: float, within: bool) -> None:
    assert line(value).ratio == pytest.approx(ratio)
    assert line(value).within is within


def test_missing_measurements_have_no_figure() -> None:
    assert line(None).ratio is None
    assert not line(None).within
    assert table([line(None), line(8.0)]).splitlines()[2:] == [
        "| 13 | gain | somewhere | 10.0 to 20.0 x | - | - | no |",
        "| 13 | gain | somewhere | 10.0 to 20.0 x | 8.0 x | 0.80 | yes |",
    ]


def test_all_figures_of_the_paper_are_covered() -> None:
    assert {claim.figure for claim in CLAIMS} == {"2", "12", "13", "14", "16", "17"}


def job(*policies: str) -> SimJob:
    trace = Trace(source="none", format="none", requests=())
    return SimJob(trace=trace, model=find_model("Llama-2-7B"), cluster=find_cluster("2xA800"), policies=policies)


def test_knobs_of_policies_change_the_rules() -> None:
    found = {
        spec.label: rules
        for spec, rules in specs_of(
            job(
                "static-pipeline:degree=4",
                "static-pipeline:microbatching=lookahead",
                "swap:swap-space=2GiB",
                "drop:restore=off:transfers=naive",
                "drop:ttft-target-s=0.1:label=ours",
            )
        )
    }
    assert found["static-pipeline:degree=4"].planner.transitions.pipeline_degree == 4
    assert not found["static-pipeline:degree=4"].worker.lookahead
    assert found["static-pipeline:microbatching=lookahead"].worker.lookahead
    assert found["swap:swap-space=2GiB"].worker.swap_space_bytes == 2 << 30
    stays = found["drop:restore=off:transfers=naive"]
    assert not stays.planner.transitions.restores
    assert not stays.coordinated
    assert found["ours"].planner.transitions.restores
    assert found["ours"].planner.transitions.planning.targets.ttft_s == 0.1
    assert stays.planner.transitions.planning.targets.ttft_s == 0.5
    assert found["ours"].coordinated


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("drop:restore=perhaps", "restore is on or off"),
        ("drop:transfers=fast", "transfers is coordinated or naive"),
        ("recompute:watermark=much", "watermark must be a number"),
        ("swap:swap-space=lots", "swap-space must be a number of bytes"),
        ("recompute:degree=2", "has no knob 'degree'"),
        ("migrate:migrate-below=few", "migrate-below must be a number"),
        ("drop:ttft-target-s=0", "ttft-target-s=0: must be a positive number of seconds"),
        ("drop:ttft-target-s=inf", "ttft-target-s=inf: must be a positive number of seconds"),
        ("evict", "known are"),
    ],
)
def test_invalid_knobs_are_refused(word: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        specs_of(job(word))


def test_a_policy_is_named_once() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        specs_of(job("drop", "drop"))


def overload(scenario: Scenario, answer_scale: float) -> tuple[float, float]:
    """Return (share of the step time spent on prefill in the burst, peak KV demand / KV memory), from the closed
    form.
    """
    arrivals, model, cluster = scenario.arrivals, find_model(scenario.model), find_cluster(scenario.cluster)
    assert arrivals is not None
    assert scenario.lengths is not None
    draw, rng = lengths_of(scenario.lengths).draw, random.Random(0)
    drawn = [TraceRequest(0.0, *draw(rng)) for _ in range(2000)]
    longer = [replace(one, output_tokens=round(one.output_tokens * answer_scale)) for one in drawn]
    calm = Load.of(longer, arrivals.rate_per_s / instance_count(model, cluster))
    burst = replace(calm, rate_per_s=calm.rate_per_s * arrivals.bursts[0].factor)
    phases = ((150.0, calm), (arrivals.bursts[0].for_s, burst))
    share = settled(model, cluster, timings(), burst).prompt_share
    return share, peak_demand(model, cluster, timings(), phases)


@pytest.mark.parametrize(
    "name", ["ablation-14b", "burstgpt-14b", "sharegpt-14b", "longbench-14b", "longbench-72b", "long-14b"]
)
def test_the_operating_point_follows_from_a_rule(name: str) -> None:
    scenario = read_scenario(SCENARIOS / f"{name}.yaml")
    chosen = scenario.answer_scale
    assert chosen is not None
    share, peak = overload(scenario, chosen)
    assert 0.5 < share <= 0.56  # the largest share at which memory rather than compute is the bottleneck
    assert peak > 1.0
    assert overload(scenario, chosen - 0.5)[1] <= 1.0  # at an answer scale lower by 0.5, memory would suffice


def test_scenarios_burst_at_the_time_that_figures_assume() -> None:
    for path in SCENARIOS.glob("*.yaml"):
        arrivals = read_scenario(path).arrivals
        assert arrivals is not None
        assert arrivals.bursts[0].at_s == BURST_AT_S, path.stem


def test_the_better_static_pipeline_is_the_rival() -> None:
    result = bench_result(bursty_run(), "static-pipeline", "static-pipeline:microbatching=lookahead", "drop")
    waits_s = dict(zip(result.policies, (9.0, 4.0, 1.0), strict=True))
    policies = {
        name: policy.model_copy(update={"ttft_s": policy.ttft_s.model_copy(update={"p99": waits_s[name]})})
        for name, policy in result.policies.items()
    }
    claim = next(c for c in CLAIMS if "vLLM with pipelines" in c.what)
    assert claim.measure(result.model_copy(update={"policies": policies})) == pytest.approx(4.0)

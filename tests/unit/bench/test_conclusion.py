"""The paragraph says what the figures say."""

import pytest

from ballast.bench.conclusion import conclude
from ballast.bench.results import BenchResult, PolicyResult, Transition
from tests.unit.bench.samples import bench_result, bursty_run


def policy(template: PolicyResult, *, p99_s: float, dropped: bool, demand: float = 1.5) -> PolicyResult:
    """Its KV demand is so many times the capacity for half of the samples, and little otherwise."""
    at_s = [0.5 * index for index in range(21)]
    series = template.series.model_copy(
        update={
            "at_s": at_s,
            "kv_capacity_bytes": [100] * 21,
            "kv_demand_bytes": [int(100 * demand) if index % 2 else 10 for index in range(21)],
        }
    )
    drop = Transition(at_s=1.0, epoch=2, reason="overload", kind="drop", phase="done", freed_parameter_bytes=26 * 10**9)
    changes = {
        "series": series,
        "transitions": [drop] if dropped else [],
        "ttft_s": template.ttft_s.model_copy(update={"p99": p99_s}),
        "tpot_s": template.tpot_s.model_copy(update={"p50": 0.06 if dropped else 0.05}),
    }
    return template.model_copy(update=changes)


@pytest.fixture
def template() -> BenchResult:
    return bench_result(bursty_run())


def told(template: BenchResult, drop: PolicyResult, recompute: PolicyResult) -> str:
    return conclude(template.model_copy(update={"policies": {"recompute": recompute, "drop": drop}}))


def test_a_drop_that_helps(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    text = told(template, policy(base, p99_s=1.0, dropped=True), policy(base, p99_s=5.0, dropped=False))
    assert "With recompute the requests want up to 150% of the KV cache, and more than there is for 5 s." in text
    assert "drops parameters once, 26 GB in all, and they do not come back before the end" in text
    assert "5.0 times better: 1.00 s against 5.00 s with recompute" in text
    assert "changes by +20% to 60.0 ms" in text
    assert text.endswith("worth it here.")


def test_a_drop_that_harms(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    text = told(template, policy(base, p99_s=5.0, dropped=True), policy(base, p99_s=2.0, dropped=False))
    assert "2.5 times worse" in text
    assert "computing and not memory" in text


def test_nothing_to_drop(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    same = policy(base, p99_s=1.0, dropped=False, demand=0.4)
    text = told(template, same, same)
    assert "at its peak the trace wants 40% of it" in text
    assert "about the same" in text
    assert "enough memory for this trace" in text


def test_advice_is_about_dropping_alone_and_other_rivals_are_told_beside(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    policies = {
        "static-pipeline": policy(base, p99_s=0.5, dropped=False),
        "recompute": policy(base, p99_s=5.0, dropped=False),
        "drop": policy(base, p99_s=1.0, dropped=True),
    }
    text = conclude(template.model_copy(update={"policies": policies}))
    assert text.index("5.0 times better") < text.index("2.0 times worse: 1.00 s against 500.0 ms with static-pipeline")
    assert text.endswith("worth it here.")


def test_a_single_policy_is_not_compared(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    alone = template.model_copy(update={"policies": {"drop": policy(base, p99_s=1.0, dropped=True)}})
    assert "against" not in conclude(alone)


def test_enough_memory_and_requests_that_wait_all_the_same(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    slow = policy(base, p99_s=15.0, dropped=False, demand=0.8)
    slow = slow.model_copy(update={"ttft_s": slow.ttft_s.model_copy(update={"p50": 0.5})})
    config = template.config.model_copy(update={"cluster": {"recompute.busy_fraction": 0.93}})
    text = told(template.model_copy(update={"config": config}), slow, slow)
    assert "The median time per output token is that with recompute, 50.0 ms." in text
    assert "wait for computing: at the worst times 30 times as long as the median" in text
    assert "compute 93% of the time" in text

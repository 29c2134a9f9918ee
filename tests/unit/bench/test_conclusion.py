"""The conclusion of a report agrees with its figures."""

import pytest

from tests.unit.bench.samples import bench_result, bursty_run
from tools.bench.conclusion import conclude
from tools.bench.records import RequestOutcome
from tools.bench.results import BenchResult, PolicyResult, TransitionResult
from tools.bench.slo import Slo


def policy(
    template: PolicyResult, *, p99_s: float, dropped: bool, demand: float = 1.5, late: float = 0.0, tpot_s: float = 0.06
) -> PolicyResult:
    """A result whose KV demand is `demand` times the capacity in half of the samples and low in the others.

    `late`: fraction of requests that wait a minute for their first token. `tpot_s`: median TPOT if `dropped`; otherwise
    it is 0.05.
    """
    at_s = [0.5 * index for index in range(21)]
    series = template.series.model_copy(
        update={
            "at_s": at_s,
            "kv_capacity_bytes": [100] * 21,
            "kv_demand_bytes": [int(100 * demand) if index % 2 else 10 for index in range(21)],
        }
    )
    drop = TransitionResult(
        at_s=1.0, epoch=2, reason="overload", kind="drop", phase="done", freed_parameter_bytes=26 * 10**9
    )
    count = len(template.requests)
    requests = [
        r.model_copy(
            update={
                "outcome": RequestOutcome.FINISHED,
                "first_token_s": r.planned_s + (60.0 if index < late * count else 0.1),
            }
        )
        for index, r in enumerate(template.requests)
    ]
    changes = {
        "series": series,
        "requests": requests,
        "transitions": [drop] if dropped else [],
        "ttft_s": template.ttft_s.model_copy(update={"p99": p99_s}),
        "tpot_s": template.tpot_s.model_copy(update={"p50": tpot_s if dropped else 0.05}),
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
    assert "drops parameters once, 24.2 GiB in all, and they do not come back before the end" in text
    assert "5.0 times better: 1.00 s against 5.00 s with recompute" in text
    assert "changes by +20% to 60.0 ms" in text
    assert text.endswith("worth it here.")


def test_a_drop_that_harms(template: BenchResult) -> None:
    """The load is compute-bound: more KV cache does not shorten the waits, and a pipeline wastes part of the GPUs'
    time.
    """
    base = next(iter(template.policies.values()))
    config = template.config.model_copy(update={"cluster": {"prompt_share": 0.93}})
    drop = policy(base, p99_s=5.0, dropped=True, late=0.3)
    text = told(template.model_copy(update={"config": config}), drop, policy(base, p99_s=2.0, dropped=False))
    assert "2.5 times worse" in text
    assert "not worth it here. What is short is computing: prompts take 93% of the GPUs' time" in text


def test_a_goal_that_both_policies_meet(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    other = policy(base, p99_s=1.0, dropped=False)
    assert told(template, policy(base, p99_s=1.5, dropped=True), other).endswith("without it, and sooner.")
    assert told(template, policy(base, p99_s=1.05, dropped=True), other).endswith("neither helps nor harms here.")


def test_the_goal_is_the_users(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    policies = {
        "recompute": policy(base, p99_s=5.0, dropped=False, late=0.05),
        "drop": policy(base, p99_s=1.0, dropped=True),
    }
    result = template.model_copy(update={"policies": policies})
    strict = conclude(result, Slo(ttft_s=0.5))
    assert "The goal is that 99 % of the requests get their first token within 500.0 ms: 100.0% do" in strict
    assert "100.0% do with drop, 95.0% with recompute. Dropping parameters is worth it here." in strict
    assert "too small" in conclude(result, Slo(ttft_s=0.01))


@pytest.mark.parametrize(
    ("cluster", "series", "short"),
    [
        ({}, {}, "What is short is memory."),
        ({"prompt_share": 0.9}, {}, "What is short is computing: prompts take 90%"),
        ({"prompt_share": 0.5, "reading_is_short": True}, {}, "What is short is the reading of KV"),
        ({"drop.stranded_fraction": 0.8, "prompt_share": 0.9}, {}, "Ballast's own fault"),
        ({"recompute.stranded_fraction": 0.8}, {}, "What is short is memory."),
        (
            {"max_num_seqs": 64, "reading_is_short": True},
            {"running_count": [126] * 21, "kv_used_bytes": [60] * 21},
            "they may (--max-num-seqs 64) while memory is free",
        ),
        ({"max_num_seqs": 64}, {"running_count": [126] * 21, "kv_used_bytes": [95] * 21}, "What is short is memory."),
        ({"max_num_seqs": 64}, {"running_count": [90] * 21, "kv_used_bytes": [60] * 21}, "What is short is memory."),
    ],
)
def test_the_scarce_resource_is_named(
    template: BenchResult, cluster: dict[str, object], series: dict[str, list[int]], short: str
) -> None:
    """For a cluster that is too small, the conclusion names the scarce resource."""
    base = next(iter(template.policies.values()))
    drop = policy(base, p99_s=50.0, dropped=True, late=0.5)
    columns = {"waiting_count": [5] * 21, "group_sizes": [[1, 2]] * 21, **series}
    drop = drop.model_copy(update={"series": drop.series.model_copy(update=columns)})
    config = template.config.model_copy(update={"cluster": {"gpu_count": 3, **cluster}})
    other = policy(base, p99_s=60.0, dropped=False, late=0.6)
    text = told(template.model_copy(update={"config": config}), drop, other)
    assert "too small for this trace, whatever the policy. " in text
    assert short in text
    assert "It takes about 4 GPUs or more" in text


def test_a_drop_that_helps_at_a_price_names_it(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    drop, other = policy(base, p99_s=1.0, dropped=True, tpot_s=0.105), policy(base, p99_s=5.0, dropped=False)
    text = told(template, drop, other)
    assert text.endswith(
        "worth it here at a price: the first token comes sooner, and each further one takes 2.1 times as long"
        " (105.0 ms instead of 50.0 ms)."
    )


def test_a_cluster_too_small_for_either_policy_is_named_with_the_needed_size(template: BenchResult) -> None:
    """P99 TTFT is better with drop, yet the cluster is too small under either policy."""
    base = next(iter(template.policies.values()))
    drop = policy(base, p99_s=58.0, dropped=True, late=0.65, tpot_s=0.12)
    other = policy(base, p99_s=230.0, dropped=False, late=0.8)
    config = template.config.model_copy(update={"cluster": {"gpu_count": 2}})
    trace = template.trace.model_copy(update={"span_s": base.duration_s / 3})
    text = told(template.model_copy(update={"config": config, "trace": trace}), drop, other)
    assert "worth it" not in text
    assert "too small for this trace, whatever the policy" in text
    assert "It takes about 6 GPUs or more" in text


def test_nothing_to_drop(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    same = policy(base, p99_s=1.0, dropped=False, demand=0.4)
    text = told(template, same, same)
    assert "at its peak the trace wants 40% of it" in text
    assert "about the same" in text
    assert "enough memory for this trace" in text


def test_advice_is_about_drop_and_other_rivals_are_mentioned(template: BenchResult) -> None:
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


def test_requests_that_wait_despite_enough_memory(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    slow = policy(base, p99_s=15.0, dropped=False, demand=0.8, late=0.4)
    config = template.config.model_copy(update={"cluster": {"prompt_share": 0.97, "gpu_count": 8}})
    text = told(template.model_copy(update={"config": config}), slow, slow)
    assert "The median time per output token is that with recompute, 50.0 ms." in text
    assert "This cluster has enough memory for this trace. What is short is computing: prompts take 97%" in text
    assert "It takes about 9 GPUs or more" in text


def test_requests_without_an_answer_are_counted(template: BenchResult) -> None:
    base = next(iter(template.policies.values()))
    base = base.model_copy(update={"outcomes": {RequestOutcome.FINISHED: base.request_count}})
    drop, plain = policy(base, p99_s=1.0, dropped=True), policy(base, p99_s=5.0, dropped=False)
    refused = drop.model_copy(update={"outcomes": {RequestOutcome.FINISHED: 293, RequestOutcome.REFUSED: 7}})
    text = told(template, refused, plain)
    assert f"left out of latencies: 7 of {drop.request_count} requests with drop." in text
    assert "left out" not in told(template, drop, plain)

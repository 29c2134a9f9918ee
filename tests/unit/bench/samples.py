"""Made-up records and results for tests of the figures and plots derived from them."""

import random
from array import array
from pathlib import Path

from tools.bench.records import BenchRecord, PlannerTransition, ReplayRun, RequestOutcome, StatusSample, TimedTransition
from tools.bench.results import (
    BenchConfig,
    BenchResult,
    ComparisonFacts,
    Environment,
    ModelFacts,
    TraceInfo,
    policy_result,
    write_result,
)


def record(index: int, planned_s: float, token_times_s: list[float], **changes: object) -> BenchRecord:
    """A finished request unless `changes` say otherwise."""
    made = BenchRecord(
        index=index,
        request_id=f"r-{index}",
        input_tokens=10,
        wanted_tokens=len(token_times_s),
        planned_s=planned_s,
        submit_s=planned_s + 0.001,
        token_times_s=array("d", token_times_s),
        end_s=token_times_s[-1] if token_times_s else planned_s,
        outcome=RequestOutcome.FINISHED,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def sample(at_s: float, demand_mib: float, epoch: int = 0, *, merged: bool = False) -> StatusSample:
    return StatusSample(
        at_s=at_s,
        kv_demand_bytes=int(demand_mib * 2**20),
        kv_capacity_bytes=(460 if merged else 256) << 20,
        kv_used_bytes=int(min(demand_mib, 440 if merged else 240) * 2**20),
        running_count=int(demand_mib // 10),
        waiting_count=int(max(demand_mib - 240, 0) // 10),
        preemptions_total=0,
        epoch=epoch,
        epoch_reason="overload" if epoch else "start",
        group_sizes=(2, 1) if merged else (1, 1, 1),
    )


def drop_and_restore(at_s: float, duration_s: float, epoch: int) -> list[TimedTransition]:
    """Transitions as a planner reports them: the drop begins at `at_s`, the restore `duration_s` later."""

    def told(kind: str, epoch: int) -> PlannerTransition:
        return PlannerTransition(
            age_s=0.0,
            epoch=epoch,
            kind=kind,
            phase="done",
            reason="overload",
            summary=f"a {kind}",
            duration_s=1.5,
            exchange_s=1.0,
            freed_parameter_bytes=200 << 20,
            kv_bytes_exchanged=30 << 20,
            parameter_bytes_pulled=5,
            victim_count=12,
            victims_recomputed=1,
            max_stall_s=0.25,
        )

    return [TimedTransition(at_s, told("drop", epoch)), TimedTransition(at_s + duration_s, told("restore", epoch + 1))]


def bursty_run(seed: int = 0) -> ReplayRun:
    """A run with a burst at 25 s in which requests wait, some are refused and one fails."""
    rng = random.Random(seed)
    records: list[BenchRecord] = []
    for index in range(300):
        planned_s = rng.uniform(25, 35) if index % 3 == 0 else rng.uniform(0, 75)
        wait_s = rng.lognormvariate(-3, 0.5) + max(0.0, 8 - abs(planned_s - 33)) * rng.random()
        times_s = [planned_s + wait_s + 0.02 * i for i in range(rng.randint(2, 60))]
        made = record(index, planned_s, times_s)
        if 30 < planned_s < 33 and index % 5 == 0:
            made = record(index, planned_s, [], outcome=RequestOutcome.REFUSED, error="backlog full")
        records.append(made)
    records[7] = record(7, 50.0, [50.1], outcome=RequestOutcome.FAILED, wanted_tokens=9, error="Unavailable: worker-0")
    samples = [sample(t / 2, 80 + 260 * max(0.0, 1 - abs(t / 2 - 33) / 12)) for t in range(160)]
    return ReplayRun(records, samples, complete=True, duration_s=78.0, failed_sample_count=0)


def dropped_run() -> ReplayRun:
    """`bursty_run` with the parameters dropped from 27 s to 52 s."""
    run = bursty_run()
    run.samples = [
        sample(s.at_s, s.kv_demand_bytes / 2**20, epoch=1, merged=True)
        if 27 <= s.at_s < 52
        else sample(s.at_s, s.kv_demand_bytes / 2**20, epoch=0 if s.at_s < 27 else 2)
        for s in run.samples
    ]
    run.transitions = drop_and_restore(26.8, 25.0, 1)
    return run


def bench_result(run: ReplayRun, *policies: str) -> BenchResult:
    return BenchResult(
        created_unix_s=1.0,
        complete=run.complete,
        config=BenchConfig(seed=0, deadline_s=300, address="127.0.0.1:1", cluster={"workers": 2}),
        environment=Environment(
            cpu="a cpu",
            core_count=2,
            memory_bytes=1 << 33,
            platform="Linux",
            python="3.11",
            packages={"numpy": "2"},
            git_commit=None,
            git_dirty=None,
        ),
        model=ModelFacts(
            name="demo",
            architecture="LlamaForCausalLM",
            dtype="float32",
            parameter_count=1,
            kv_bytes_per_token=1,
            max_model_len=1024,
            vocab_size=512,
        ),
        trace=TraceInfo(
            source="traces/bursty.csv",
            format="ballast",
            request_count=len(run.records),
            span_s=75.0,
            dropped_count=0,
            clamped_count=2,
            time_scale=1.0,
            length_scale=0.25,
            limit=None,
        ),
        policies={name: policy_result(run, name) for name in policies or ("recompute",)},
    )


# label -> (overload policy, knobs, `extra_s` of `late_run`)
CONTESTANTS: dict[str, tuple[str, dict[str, str], float]] = {
    "recompute": ("recompute", {}, 9.0),
    "recompute:watermark=0.2": ("recompute", {"watermark": "0.2"}, 8.0),
    "static-pipeline": ("static-pipeline", {}, 1.0),
    "static-pipeline:degree=4": ("static-pipeline", {"degree": "4"}, 2.0),
    "swap": ("swap", {}, 6.0),
    "drop": ("drop", {}, 0.0),
    "drop:restore=off": ("drop", {"restore": "off"}, 0.3),
}


def late_run(policy: str, extra_s: float, seed: int) -> ReplayRun:
    """`bursty_run` (for drop: `dropped_run`) in which waits reach `extra_s` at the peak, and token times grow with
    them.
    """
    run = dropped_run() if policy == "drop" else bursty_run()
    rng = random.Random(seed)
    for made in run.records:
        wait_s = 0.02 + rng.random() * (0.02 + extra_s * max(0.0, 1 - abs(made.planned_s - 33) / 12))
        if made.token_times_s:
            shift_s = made.planned_s + wait_s - made.token_times_s[0]
            slower = 1 + 0.5 * rng.random() * (1 + extra_s / 10)
            first_s = made.token_times_s[0]
            made.token_times_s = array("d", [first_s + shift_s + slower * (t - first_s) for t in made.token_times_s])
            made.end_s = made.token_times_s[-1]
    return run


def comparison_result(workload: str, label: str, repetition: int, position: int) -> BenchResult:
    policy, knobs, extra_s = CONTESTANTS[label]
    facts = ComparisonFacts(
        workload=workload,
        policy=label,
        overload_policy=policy,
        knobs=knobs,
        repetition=repetition,
        position=position,
        warmup_request_count=8,
        undropped_kv_bytes=256 << 20,
        forecast_demand_fraction=0.55,
        plan_digest=workload,
    )
    return bench_result(late_run(policy, extra_s, repetition), label).model_copy(update={"comparison": facts})


def write_comparison(out: Path, workloads: tuple[str, ...] = ("spiky",), repetitions: int = 2) -> None:
    """Write results into the folder layout of `bench overload`."""
    position = 0
    for repetition in range(repetitions):
        for workload in workloads:
            for number, label in enumerate(CONTESTANTS):
                result = comparison_result(workload, label, repetition, position)
                write_result(out / "runs" / workload / f"{number}.{repetition}.json", result)
                position += 1

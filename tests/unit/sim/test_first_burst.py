"""A burst on a cluster that has served no request before, as a new user would send it."""

from benchmarks.first_block import run as first_block
from sim.hardware import find_cluster, find_model
from sim.jobs.simulation import SimJob, specs_of, world_of
from sim.results import SimRun
from tools.bench.traces import Trace, TraceRequest

COUNT, WITHIN_S = 353, 12.0  # the dashboard's burst on four A100 with 40 GB


def burst_job(policy: str) -> SimJob:
    requests = tuple(TraceRequest(WITHIN_S * i / COUNT, 675, 451) for i in range(COUNT))
    return SimJob(
        trace=Trace(source="burst", format="made", requests=requests),
        model=find_model("Qwen2.5-14B"),
        cluster=find_cluster("4xA100-40G"),
        policies=(policy,),
    )


def run(policy: str) -> SimRun:
    job = burst_job(policy)
    ((_, rules),) = specs_of(job)
    return world_of(job, rules).run()


def p99_ttft_s(run: SimRun) -> float:
    waits = sorted(record.token_times_s[0] - record.arrival_s for record in run.records)
    return waits[int(0.99 * len(waits))]


def test_parameters_are_dropped_although_no_answer_has_ended_yet() -> None:
    ours, plain = run("drop"), run("recompute")
    assert [record.journal.kind.value for record in ours.transitions][:1] == ["drop"]
    assert p99_ttft_s(ours) < p99_ttft_s(plain) / 4
    assert p99_ttft_s(ours) < 3.0


def test_kv_in_transit_waits_neither_for_long_prompts_nor_for_a_full_pipeline() -> None:
    delays = first_block(0, "Qwen2.5-14B", "2xA100-40G", 640)
    assert delays is not None
    assert delays.in_use - delays.taken_up < 80.0, "with whole batches of prompts it was 183 ms"

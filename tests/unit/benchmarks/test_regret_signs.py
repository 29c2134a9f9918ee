"""Compares a run that changes the layout with the same run without the change."""

from array import array
from dataclasses import asdict, replace

from benchmarks.regret_signs import judged, outcome, signs_text, without
from services.planner.policy.fluid_model import Prediction
from sim.jobs.simulation import specs_of, world_of
from sim.results import RequestRecord
from tests.unit.sim.test_first_burst import burst_job
from tools.bench.traces import TraceRequest


def record(arrival_s: float, *token_times_s: float) -> RequestRecord:
    return RequestRecord(0, "r", 10, 10, arrival_s, array("d", token_times_s))


def test_requests_that_wait_or_arrive_in_the_period_are_judged() -> None:
    before, waiting, late = record(0.0, 1.0, 2.0, 4.0, 9.0), record(1.0, 6.0), record(8.0, 8.5)
    assert outcome([before, waiting, late], 3.0, 7.0, 20.0) == Prediction(5.0, 3.0, 2.0)


def test_a_request_that_is_never_served_waits_until_the_end() -> None:
    assert outcome([record(0.0, 1.0, 4.0), record(2.0)], 3.0, 7.0, 20.0) == Prediction(18.0, 17.0, 3.0)


def test_without_requests_there_is_no_outcome() -> None:
    assert outcome([record(0.0, 1.0, 2.0)], 3.0, 7.0, 20.0) is None


def test_without_a_drop_the_run_is_the_same_until_then_and_drops_nothing() -> None:
    job = burst_job("drop")
    later = TraceRequest(150.0, 20, 20)  # by then the outcome of the drop is known
    job = replace(job, trace=replace(job.trace, requests=(*job.trace.requests, later)))
    [(_, rules)] = specs_of(job)
    run = world_of(job, rules).run()
    drop = next(one for one in run.predicted if one.epoch is not None)
    other = without(job, drop, run.zero_s)
    assert not other.transitions
    assert run.transitions
    until_s = drop.at_s - run.zero_s
    for one, two in zip(run.records, other.records, strict=True):
        earlier = [[t for t in r.token_times_s if t < until_s] for r in (one, two)]
        assert earlier[0] == earlier[1]
    found = judged(run, other, drop)
    assert found is not None
    assert found["gain"] > 0.0
    assert "the sign as predicted in 1 (100%" in signs_text([{"cell": "c", "draw": 0, **found}])[-2]


def test_changes_without_a_predicted_difference_have_no_sign() -> None:
    one = {"cell": "c", "draw": 0, "change": "give back 1", "at_s": 1.0, "with": asdict(Prediction(1.0, 1.0, 0.1))}
    one["without"] = asdict(Prediction(2.0, 1.0, 0.1))
    lines = signs_text([{**one, "gain": 0.7, "predicted_gain": 0.01}])
    assert lines[-2].startswith("predicted to differ by more than a tenth: 0 changes")
    assert lines[-1].startswith("predicted to differ by less: 1 changes, 1 did")

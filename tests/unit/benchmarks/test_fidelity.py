"""The machine parameters for the simulator that follow from comparing simulated and real runs."""

from dataclasses import fields, replace

import pytest

from ballast.common.cost import CostModel
from benchmarks.fidelity import Overheads, slowed
from benchmarks.fidelity_probes import Level, Seen, at_times, contention, fitted, predicted
from services.worker.emulation.machine import MeasuredCosts
from sim.processors import Contention
from tests.unit.worker.emulation.machines import small_machine

_EACH = CostModel(*range(1, len(fields(CostModel)) + 1))


def test_a_slower_machine_has_every_cost_scaled() -> None:
    made = small_machine()
    measured = MeasuredCosts(layer=_EACH, step=_EACH, first=_EACH, last=_EACH)
    made = made.model_copy(update={"execution": measured})
    known = Overheads(step_s=0.0, request_s=0.0)
    assert slowed(made, known).execution == measured
    twice = slowed(made, replace(known, step_slowdown=2.0, prompt_slowdown=2.0)).execution
    assert isinstance(twice, MeasuredCosts)
    assert twice.layer == _EACH.plus(_EACH)


def test_the_fit_recovers_cpu_time_per_step_and_per_token() -> None:
    """From runs alone and in two-stage pipelines, the fit recovers 2 ms of CPU time per step and 0.5 ms per token."""
    counts = ((1, 1), (2, 2), (8, 2), (16, 2), (1, 2), (8, 4), (32, 4))
    levels = [Level(requests, steps, 0.01, 0.002 * steps + 0.0005 * requests) for requests, steps in counts]
    found = contention(levels, 0.1, 2)
    assert (found.step_s, found.token_s) == pytest.approx((0.002, 0.0005))
    assert (found.background, found.processors) == (0.1, 2)


def test_overheads_beyond_the_profile_follow_from_measured_waits() -> None:
    whole = CostModel(0.0, 0.0002, 0.005, 0.004)
    shared = Contention(processors=2, step_s=0.001, token_s=0.0001, background=0.1)
    made = [Level(requests, steps, 1.0, 0.0) for requests, steps in ((1, 1), (2, 2), (8, 2), (16, 2))]
    true = replace(shared, together=1.1)
    seen_s = predicted(made, whole, true, step_s=0.0005, sequence_s=0.0)
    levels = [replace(level, tpot_s=seen_s[level.request_count]) for level in made]
    step_s, sequence_s, together = fitted(levels, whole, shared)
    assert (step_s, sequence_s, together) == pytest.approx((0.0005, 0.0, 1.1), abs=0.011)
    again = predicted(levels, whole, replace(shared, together=together), step_s, sequence_s)
    assert again == pytest.approx(seen_s, rel=0.01)


def test_pipelines_are_as_much_slower_at_other_times_as_lone_workers_were() -> None:
    seen = Seen(0.02, 0.1, (Level(1, 1, 0.01, 0.002), Level(8, 2, 0.02, 0.004)), (Level(8, 4, 0.03, 0.006),))
    slow = Seen(0.04, 0.3, (Level(1, 1, 0.02, 0.004), Level(8, 2, 0.04, 0.008)))
    slower = Seen(0.06, 0.5, (Level(1, 1, 0.03, 0.006), Level(8, 2, 0.06, 0.012)))
    made = at_times(seen, [slow, slower])
    assert (made.first_s, made.background) == pytest.approx((0.05, 0.4))
    assert [(x.tpot_s, x.served_s) for x in made.levels] == [pytest.approx(of) for of in ((0.025, 0.005), (0.05, 0.01))]
    assert [(x.tpot_s, x.served_s) for x in made.pipelined] == [pytest.approx((0.075, 0.015))]
    assert at_times(seen, [seen]) == seen

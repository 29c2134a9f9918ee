"""With old, missing or wrong inputs, the planner decides as it would with fresh ones, or defers the decision."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ballast.common.cost import CostModel
from ballast.common.ids import WorkerId
from ballast.common.load import LoadReport
from ballast.common.traffic import Pace, Traffic
from ballast.common.transition import TransitionKind
from services.monitor.core.backlogs import Backlogs
from services.monitor.core.messages import BacklogWord
from services.planner.core.change_requests import Approved, DropRequest, Planning, Rejected, decide
from services.planner.core.messages import ClusterLoad, NothingDone, OverloadRaised
from services.planner.core.stages import Stage
from tests.support.planner_core import EXTENT, LOAD, MODEL, PACE, Planner
from tests.unit.planner.test_overloads import CALM, SHORT

_HUGE = 1 << 50
FULL = replace(LOAD, used_block_count=32, running_count=8)
# With fresh inputs, "calm" calls for nothing and "burst" for a drop.
STORIES = {"calm": (CALM, LOAD), "burst": (replace(SHORT, ended_tokens=5000), FULL)}
NONSENSE = replace(CALM, queued_count=1, queued_tokens=_HUGE, minute_tokens=_HUGE)
PACES: Mapping[str, Pace | None] = {
    "fresh": PACE,
    "none": None,
    "zero": Pace(CostModel(attention_s=0.0, token_s=0.0, chunk_s=0.0, shared_s=0.0), 4, 512),
    "nonsense": Pace(CostModel(attention_s=0.0, token_s=1e-4, chunk_s=1e9, shared_s=0.0), 4, 512),
}
SLOWNESS: Mapping[str, float | None] = {"fresh": 1.0, "none": None, "zero": 0.0, "nonsense": math.nan}
LOADS: Mapping[str, LoadReport | None] = {
    "fresh": LOAD,
    "none": None,
    "zero": replace(LOAD, block_count=0, used_block_count=0, memory=replace(LOAD.memory, budget_bytes=0)),
    "nonsense": replace(LOAD, block_count=-5, used_block_count=1 << 60),
}
TRAFFIC = ("fresh", "2 s", "20 s", "none", "zero", "nonsense")


def traffic_of(age: str, traffic: Traffic) -> tuple[Traffic, Traffic | None]:
    """Traffic as the monitor reports it for one dispatcher whose last entry has this age or is of this kind."""
    backlogs = Backlogs(lease_s=1.0, forget_s=60.0)
    told = {"none": None, "zero": Traffic(known_s=300.0), "nonsense": NONSENSE}.get(age, traffic)
    words = () if told is None else (BacklogWord("d", 1, told),)  # pyright: ignore[reportArgumentType]
    backlogs.read(0.0, words)
    return backlogs.traffic({"2 s": 2.0, "20 s": 20.0}.get(age, 0.0))


def decided(story: str, traffic: str, pace: str, slowness: str, load: str) -> Approved | Rejected:
    fresh, report = STORIES[story]
    one = report if load == "fresh" else LOADS[load]
    told, speaking = traffic_of(traffic, fresh)
    slow = SLOWNESS[slowness]
    known = ClusterLoad(
        {WorkerId("w0"): report} | ({} if one is None else {WorkerId("w1"): one}),
        told,
        PACES[pace],
        {} if slow is None else {WorkerId("w1"): slow},
        fresh_traffic=speaking,
    )
    planner = Planner(planning=Planning())
    planner.start("w0", "w1")
    change = DropRequest("overload", "c", required_bytes=EXTENT, again=True)
    return decide(change, planner.core.layout, MODEL, known, planner.core.layout.epoch, Planning())


@pytest.mark.parametrize("story", STORIES)
def test_decisions_are_those_with_fresh_inputs_or_are_deferred(story: str) -> None:
    """Tries every combination of ages and kinds of the inputs."""
    right = decided(story, "fresh", "fresh", "fresh", "fresh")
    assert isinstance(right, Approved) is (story == "burst")
    for inputs in itertools.product(TRAFFIC, PACES, SLOWNESS, LOADS):
        found = decided(story, *inputs)
        if isinstance(found, Approved):
            assert isinstance(right, Approved), inputs
            assert found.kind is right.kind is TransitionKind.DROP
            assert inputs[1] == inputs[3] == "fresh", inputs
            assert found.compared is not None, "without a comparison, only an operator's request leads to a drop"
        else:
            assert found.why, inputs
            assert found.for_now or inputs[3] != "fresh", inputs


@pytest.mark.parametrize("age", ["2 s", "20 s"])
def test_a_stopped_dispatchers_last_report_suffices_if_its_queue_does_not_matter(age: str) -> None:
    assert isinstance(decided("burst", age, "fresh", "fresh", "fresh"), Approved)


def test_without_known_costs_a_lasting_large_shortage_is_dropped_by_need() -> None:
    planner = Planner(planning=Planning())
    planner.pace, planner.traffic, planner.load = None, STORIES["burst"][0], FULL  # pyright: ignore[reportAttributeAccessIssue]
    planner.start("w0", "w1")
    for _ in range(4):
        planner.tell(OverloadRaised(planner.now_s, "o", 40 * EXTENT))
        [said] = planner.told(NothingDone)[-1:]
        assert isinstance(said, NothingDone)
        assert "not known yet how fast instances are" in said.why
        assert planner.journal == []
        planner.wait(2.7)
    planner.tell(OverloadRaised(planner.now_s, "o", 40 * EXTENT))
    assert planner.journal == [Stage.PREPARING]


def test_an_old_shortage_without_a_comparison_causes_no_drop() -> None:
    planner = Planner(planning=Planning())
    planner.pace, planner.load = None, FULL  # pyright: ignore[reportAttributeAccessIssue]
    planner.start("w0", "w1")
    planner.tell(OverloadRaised(planner.now_s, "o1", 40 * EXTENT))
    planner.wait(60.0)
    planner.tell(OverloadRaised(planner.now_s, "o2", 40 * EXTENT))
    assert planner.journal == []


def test_a_small_improvement_is_checked_twice() -> None:
    """A clear improvement is carried out at once, so that memory is freed earlier."""
    shown: dict[float, int] = {}
    for ttft_s in (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0):
        planner = Planner(planning=Planning(targets=replace(Planning().targets, ttft_s=ttft_s)))
        planner.traffic, planner.load = STORIES["burst"]
        planner.start("w0", "w1")
        planner.tell(OverloadRaised(planner.now_s, "o1", EXTENT))
        at_once = len(planner.journal)
        planner.wait(0.3)
        shown[ttft_s] = 2 * at_once + len(planner.journal)
    assert shown[0.5] == 3, shown
    assert 1 in shown.values(), shown

"""Which instances leave and are woken, and when: the planner's core under changing load."""

from dataclasses import replace

from ballast.common.ids import WorkerId
from ballast.common.layout import Standing
from ballast.common.load import LoadReport
from ballast.common.traffic import Traffic
from services.planner.core import messages as p
from services.planner.core.messages import ClusterLoad, LeadershipChanged, OverloadRaised, ReliefRaised, Sized
from services.planner.core.sizing import Sizing, SizingRules
from services.planner.core.stages import Stage
from services.planner.policy.compare import ComparisonTargets
from services.planner.policy.reserve import Learnt
from tests.support.planner_core import EXTENT, LOAD, MODEL, PACE, Planner
from tests.unit.planner.test_standings import ask, says, standings

IDLE = replace(LOAD, used_block_count=0, waiting_block_count=0, running_count=0, waiting_count=0, wake_s=1.0)
FULL = replace(IDLE, used_block_count=30, running_count=6)
CALM = Traffic(
    recent_count=4, minute_count=20, minute_tokens=200, calm_per_s=0.3, ended_count=90, ended_tokens=900, known_s=300.0
)
COMPUTING = replace(CALM, recent_count=1500, minute_count=9000, minute_tokens=900_000, calm_per_s=150.0)
NAMES = ("w0", "w1", "w2", "w10")


def started(*, load: LoadReport = IDLE, **rules: object) -> Planner:
    planner = Planner(sizing=SizingRules(parks=True, **rules))  # pyright: ignore[reportArgumentType]
    planner.load, planner.traffic = load, CALM
    planner.start(*NAMES)
    return planner


def away(planner: Planner) -> list[str]:
    return [worker for worker, standing in standings(planner).items() if standing is not Standing.SERVING]


def go_on(planner: Planner, seconds: float) -> None:
    until_s = planner.now_s + seconds
    while planner.now_s < until_s:
        planner.now_s += 0.5
        planner.fire()


def test_half_of_the_instances_stay_in_the_first_minute() -> None:
    planner = Planner(sizing=SizingRules(parks=True))
    planner.load, planner.traffic = IDLE, CALM
    planner.start(*(f"w{number}" for number in range(6)))
    counts = list[int]()
    for _ in range(14):
        go_on(planner, 5.0)
        for worker in away(planner):
            says(planner, worker, parked=True)
        counts.append(len(away(planner)))
    assert counts[7] == 3
    assert counts[-1] > 3
    assert any(isinstance(command, Sized) for command in planner.said)


def test_a_planner_inherits_the_learnt_values() -> None:
    """The first planner sees two minutes without jumps. A successor that did not inherit this knowledge would keep half
    of the instances serving.
    """
    names = [f"w{number}" for number in range(6)]
    first = Planner(sizing=SizingRules(parks=True))
    first.load, first.traffic = IDLE, CALM
    first.start(*names)
    go_on(first, 120.0)
    assert len(first.core.conductor.sizing.learnt.jumps) > 2
    assert first.stored is not None

    def serving_after_45_s(learnt: Learnt) -> int:
        assert first.stored is not None
        second = Planner(sizing=SizingRules(parks=True))
        second.load, second.traffic = IDLE, CALM
        second.stored = replace(first.stored, layout=replace(first.stored.layout, groups=()), learnt=learnt)
        second.start(*names)
        for _ in range(9):
            go_on(second, 5.0)
            for worker in away(second):
                says(second, worker, parked=True)
        return len(names) - len(away(second))

    assert serving_after_45_s(Learnt()) == 3
    assert serving_after_45_s(first.core.conductor.sizing.learnt) < 3


def test_longer_observation_spans_are_inherited_too() -> None:
    sizing = Sizing(SizingRules(parks=True))
    sizing.begin(Learnt((0.5,), 80.0))
    sizing.begin(Learnt((), 20.0))
    assert sizing.learnt == Learnt((0.5,), 80.0)
    sizing.begin(Learnt(tuple(float(rise) for rise in range(100)), 1e5))
    assert sizing.learnt == Learnt((*(float(rise) for rise in range(91, 100)), 0.5), 600.0), (
        "limited to ten spans and ten minutes"
    )


def test_an_instance_leaves_only_after_one_fewer_has_sufficed_for_a_while() -> None:
    planner = started(load=FULL)
    go_on(planner, 70.0)
    planner.load = IDLE
    go_on(planner, 9.5)
    assert away(planner) == []
    go_on(planner, 1.5)
    assert away(planner) == ["w0"]


def test_instances_leave_one_by_one_down_to_the_minimum() -> None:
    planner = started(least_instances=2)
    for _ in range(12):
        go_on(planner, 5.0)
        for worker in away(planner):
            says(planner, worker, parked=True)
    assert len(away(planner)) == 2


def test_a_planner_that_leads_again_does_not_count_calm_from_before() -> None:
    planner = started(load=FULL)
    go_on(planner, 70.0)
    planner.load = IDLE
    go_on(planner, 5.0)
    planner.tell(p.LeadershipChanged(planner.now_s, "c", None))
    planner.now_s += 3600.0
    planner.start(*NAMES)
    go_on(planner, 8.0)
    assert away(planner) == []
    go_on(planner, 30.0)
    assert away(planner)


def test_the_minimum_serves_even_without_demand() -> None:
    """Neither parking by an operator nor a loss may leave fewer instances serving than the minimum while others are
    parked.
    """
    planner = started(least_instances=3)
    for worker in ("w1", "w2"):
        ask(planner, worker, away=True)
        says(planner, worker, parked=True)
    go_on(planner, 1.0)
    assert len(away(planner)) == 2
    [waking] = [w for w in away(planner) if standings(planner)[w] is Standing.WAKING]
    says(planner, waking, parked=False)
    go_on(planner, 1.0)
    assert len(away(planner)) == 1
    planner.lose("w0")
    del planner.lives["w0"]
    go_on(planner, 1.0)
    assert Standing.PARKED not in standings(planner).values()


def test_the_last_by_name_leaves_where_platforms_end_that_one() -> None:
    planner = started(last_name=True)
    go_on(planner, 11.0)
    assert away(planner) == ["w10"]


def test_demand_undoes_leaves_first_and_then_wakes() -> None:
    planner = started()
    go_on(planner, 11.0)
    [parked] = away(planner)
    says(planner, parked, parked=True)
    go_on(planner, 6.0)
    [leaving] = [w for w in away(planner) if w != parked]
    planner.load = replace(FULL, used_block_count=20)
    go_on(planner, 1.0)
    assert standings(planner)[leaving] is Standing.SERVING
    planner.load = FULL
    go_on(planner, 1.0)
    assert standings(planner)[parked] is Standing.WAKING


def test_an_instance_needed_within_the_last_minute_stays() -> None:
    planner = started(load=FULL)
    go_on(planner, 3.0)
    planner.load = IDLE
    go_on(planner, 57.0)
    assert not away(planner)
    go_on(planner, 15.0)
    assert away(planner)


def test_a_waking_instance_counts_until_it_is_overdue() -> None:
    """One more instance suffices. A second one is woken only if the first takes three times as long as announced."""
    planner = started(least_instances=2)
    for _ in range(8):
        go_on(planner, 5.0)
        for worker in away(planner):
            says(planner, worker, parked=True)
    assert len(away(planner)) == 2
    planner.load = replace(FULL, used_block_count=24)
    woken: list[int] = []
    for _ in range(6):
        go_on(planner, 1.0)
        woken.append(list(standings(planner).values()).count(Standing.WAKING))
    assert woken[0] == woken[1] == 1, woken
    assert woken[-1] == 2, woken


def test_an_instance_that_was_soon_needed_again_leaves_later_the_next_time() -> None:
    planner = started()
    go_on(planner, 70.0)  # jumps are known, and a drop would bridge this one
    planner.load = FULL
    go_on(planner, 1.0)
    assert not away(planner)
    planner.load = IDLE
    go_on(planner, 19.0)
    assert not away(planner), "it waits twice as long as before"
    go_on(planner, 3.0)
    assert away(planner)


def test_lone_instances_leave_while_others_are_merged_and_merged_ones_stay() -> None:
    planner = started(load=FULL)
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    assert planner.journal[-1] is Stage.DONE
    planner.load = IDLE
    for _ in range(30):
        go_on(planner, 5.0)
        for worker in away(planner):
            says(planner, worker, parked=True)
    assert away(planner) == ["w10"], "the last instance outside a group stays"


def test_a_wanted_restore_takes_precedence_over_a_leave() -> None:
    def merged() -> Planner:
        planner = started(load=FULL)
        planner.drop("w0", "w1")
        planner.go_through("w0", "w1")
        planner.load = IDLE
        return planner

    alike, planner = merged(), merged()
    while not away(alike):
        go_on(alike, 0.5)
    go_on(planner, alike.now_s - planner.now_s - 0.5)
    assert away(planner) == []
    planner.now_s += 0.5
    planner.tell(ReliefRaised(planner.now_s, "c"))
    assert away(planner) == []
    assert planner.journal[-1] is Stage.PREPARING


def test_an_overload_first_wakes_instances_and_drops_are_compared_with_them() -> None:
    planner = started()
    go_on(planner, 11.0)
    [parked] = away(planner)
    says(planner, parked, parked=True)
    planner.load = replace(FULL, waiting_block_count=40, waiting_count=8)
    planner.tell(OverloadRaised(planner.now_s, "c", 40 * EXTENT))
    assert standings(planner)[parked] is Standing.WAKING


def test_without_parking_the_number_is_reported_and_no_instance_leaves() -> None:
    planner = Planner(sizing=SizingRules(advises=True))
    planner.load, planner.traffic = IDLE, CALM
    planner.start(*NAMES)
    go_on(planner, 60.0)
    assert away(planner) == []
    assert planner.core.conductor.sizing.wanted_count == 3
    planner.load = replace(FULL, waiting_block_count=40, waiting_count=8)
    go_on(planner, 6.0)
    assert planner.core.conductor.sizing.wanted_count > 4


def test_more_instances_are_wanted_if_compute_is_short_although_memory_is_free() -> None:
    """15,000 prompt tokens arrive per second, and an instance computes about 7,000 of them."""
    planner = Planner(sizing=SizingRules(advises=True))
    planner.load, planner.traffic = IDLE, COMPUTING
    planner.start("w0", "w1")
    go_on(planner, 6.0)
    assert planner.core.conductor.sizing.wanted_count > 2


def test_a_planner_that_leads_again_starts_over() -> None:
    """Another planner has led for an hour, so neither the number of instances nor the time of calm from the first term
    counts.
    """
    planner = started()
    go_on(planner, 8.0)
    assert planner.core.conductor.sizing.wanted_count == 4
    planner.tell(LeadershipChanged(planner.now_s, "c", None))
    planner.now_s, planner.token = planner.now_s + 3600.0, planner.token + 1
    planner.lead()
    assert planner.core.conductor.sizing.wanted_count == 0
    planner.start(*NAMES)
    go_on(planner, 9.0)
    assert away(planner) == []
    go_on(planner, 3.0)
    assert away(planner)


def test_instances_that_have_not_reported_to_a_new_monitor_do_not_seem_to_be_missing() -> None:
    planner = started()
    layout, rate_per_s = planner.core.layout, 12.0
    traffic = replace(CALM, recent_count=120, minute_count=720, minute_tokens=72_000, calm_per_s=rate_per_s)
    sizing = Sizing(SizingRules(parks=True))

    def wanted(names: tuple[str, ...], at_s: float) -> int:
        load = ClusterLoad({WorkerId(name): replace(FULL, used_block_count=8) for name in names}, traffic, PACE)
        sizing.look(layout, MODEL, load, ComparisonTargets(), at_s)
        return sizing.wanted_count

    assert wanted(NAMES, 100.0) == 4
    assert [wanted(("w0",), at_s) for at_s in (101.0, 103.0, 105.5)] == [4, 4, 4]
    assert wanted(("w0",), 107.0) > 4, "by now they would have reported"
    assert wanted(NAMES, 108.0) == 4
    assert wanted(("w0", "w1"), 109.0) == 4, "the wait starts over"


def test_an_instance_with_a_wake_time_of_zero_gets_a_second_to_report_it() -> None:
    planner = started(load=replace(IDLE, wake_s=0.1), least_instances=2)
    for _ in range(8):
        go_on(planner, 5.0)
        for worker in away(planner):
            says(planner, worker, parked=True)
    assert len(away(planner)) == 2
    planner.load = replace(FULL, used_block_count=24, wake_s=0.1)
    go_on(planner, 2.0)
    assert list(standings(planner).values()).count(Standing.WAKING) == 1


def test_of_equally_empty_instances_the_one_with_the_least_memory_leaves() -> None:
    sizing = Sizing(SizingRules(parks=True, dwell_s=0.0))
    layout = started().core.layout
    small = replace(IDLE, block_count=16, wake_s=0.0)
    loads = {WorkerId(name): replace(small if name == "w2" else IDLE, wake_s=0.1) for name in NAMES}
    load = ClusterLoad(loads, CALM, PACE)
    leave = [dict(sizing.look(layout, MODEL, load, ComparisonTargets(), at_s)[0]) for at_s in (100.0, 101.0)]
    assert leave == [{}, {"w2": True}]

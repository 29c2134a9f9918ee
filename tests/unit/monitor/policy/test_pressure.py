"""Overload and relief signals, from series of five samples per second."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable

import pytest

from ballast.common.errors import InvariantViolation
from services.monitor.policy.demand import ClusterDemand, GroupLoad, sum_demand
from services.monitor.policy.pressure import Overload, Pressure, Relief, Signal
from tests.support.pressure import ALONE, MERGED, RULES, W0, W1, W2, sample

STEP_S = 0.2
Said = list[tuple[float, Signal]]


def tell(pressure: Pressure, samples: Iterable[ClusterDemand]) -> Said:
    said: Said = []
    for one in samples:
        said += [(one.at_s, signal) for signal in pressure.observe(one)]
        pressure.check()
    return said


def series(until_s: float, make: Callable[[float], ClusterDemand], from_s: float = 0.0) -> list[ClusterDemand]:
    return [make(round(STEP_S * i, 6)) for i in range(round(from_s / STEP_S), round(until_s / STEP_S))]


def test_steady_growth_is_an_overload_one_horizon_before_capacity_is_reached() -> None:
    said = tell(Pressure(RULES), series(10, lambda t: sample(t, int(600 + 100 * t))))
    at_s, overload = said[0]
    forecast = 600 + 100 * (at_s + 1.0)
    assert forecast > 950 >= forecast - 100 * STEP_S, "at the first sample that shows the overload"
    assert isinstance(overload, Overload)
    assert overload.required_bytes == pytest.approx(forecast * 1.1 / 0.95 - 1000, abs=3)
    assert overload.required_bytes > 0


def test_a_momentary_shortage_is_signalled_like_a_lasting_one() -> None:
    """The planner's prediction, not the monitor, decides whether a shortage was only momentary."""
    moments = series(2, lambda t: sample(t, 1100 if t == 1.0 else 900))
    assert [at_s for at_s, _ in tell(Pressure(RULES), moments)] == [1.0]


def test_a_burst_is_an_overload_at_the_first_sample_that_shows_it() -> None:
    said = tell(Pressure(RULES), series(4, lambda t: sample(t, 300 if t < 2 else 5000)))
    assert [at_s for at_s, _ in said] == [2.0]
    assert said[0][1] == Overload(required_bytes=4790, horizon_s=1.0)


def test_fast_growth_far_below_capacity_is_no_overload() -> None:
    """Demand grows from 10 % to 70 % within a second and then stays flat. Extrapolating the rise would exceed the
    capacity.
    """
    said = tell(Pressure(RULES), series(6, lambda t: sample(t, int(100 + 600 * min(1.0, max(0.0, t - 2.0))))))
    assert said == []


def test_waiting_requests_are_no_overload_while_workers_have_free_memory() -> None:
    slots_taken = series(20, lambda t: sample(t, 9000, engaged_bytes=840, used_bytes=650))
    assert tell(Pressure(RULES), slots_taken) == []
    memory_taken = series(1, lambda t: sample(t, 9000, engaged_bytes=860, used_bytes=650))
    assert [at_s for at_s, _ in tell(Pressure(RULES), memory_taken)] == [0.0]


def test_waiting_requests_are_an_overload_while_small_instances_are_full() -> None:
    def groups(small: int, large: int) -> tuple[GroupLoad, ...]:
        sizes = ((W0, small, 100), (W1, small, 100), (W2, large, 800))
        return tuple(
            GroupLoad(
                leader_id=name,
                member_ids=(name,),
                used_bytes=used,
                waiting_bytes=0,
                capacity_bytes=capacity,
                undropped_bytes=capacity,
            )
            for name, used, capacity in sizes
        )

    def said(small: int, large: int, backlog_bytes: int) -> list[Signal]:
        return Pressure(RULES).observe(sum_demand(0.0, groups(small, large), backlog_bytes))

    assert said(90, 100, 7) == [Overload(required_bytes=7, horizon_s=1.0)]
    assert said(90, 100, 0) == said(80, 100, 7) == said(30, 720, 7) == []


def test_a_falling_capacity_is_extrapolated_but_not_below_the_undropped_one() -> None:
    def shrinking(t: float) -> ClusterDemand:
        return sample(t, 1000, capacity_bytes=int(2000 - 300 * t), undropped_bytes=1000, groups=MERGED)

    early = tell(Pressure(dataclasses.replace(RULES, arming_below_fraction=0.35)), series(2.8, shrinking))
    assert early, "1000 wanted, 1160 available now, 860 in a second"
    assert isinstance(early[0][1], Overload)

    def by_plan(t: float) -> ClusterDemand:
        return sample(t, 900, capacity_bytes=2000 if t < 2 else 1000, undropped_bytes=1000, groups=MERGED)

    assert tell(Pressure(RULES), series(6, by_plan)) == [], (
        "a restore takes capacity down to the planned value and no further"
    )


def test_relief_only_when_something_is_dropped_and_usage_stayed_low_for_long_enough() -> None:
    low_alone = series(10, lambda t: sample(t, 100))
    assert tell(Pressure(RULES), low_alone) == []
    low_merged = series(10, lambda t: sample(t, 499 if t > 1 else 700, capacity_bytes=3000, groups=MERGED))
    said = tell(Pressure(RULES), low_merged)
    assert said[0] == (3.2, Relief(used_bytes=499, undropped_capacity_bytes=1000))
    one_peak = series(10, lambda t: sample(t, 600 if t == 1.0 else 100, capacity_bytes=3000, groups=MERGED))
    assert next(at_s for at_s, _ in tell(Pressure(RULES), one_peak)) == pytest.approx(3.2), (
        "a peak restarts the relief timer"
    )


def test_relief_refers_to_half_of_the_undropped_memory_not_of_the_enlarged_one() -> None:
    held = series(20, lambda t: sample(t, 600, capacity_bytes=3000, groups=MERGED))
    assert tell(Pressure(RULES), held) == []


def test_queued_requests_keep_parameters_dropped_even_when_little_memory_is_used() -> None:
    queued = series(20, lambda t: sample(t, 800, used_bytes=10, capacity_bytes=3000, groups=MERGED))
    assert tell(Pressure(RULES), queued) == []


def test_nothing_counts_as_idle_while_the_backlogs_are_unknown() -> None:
    blind = series(40, lambda t: sample(t, 0, capacity_bytes=3000, groups=MERGED, complete=False))
    assert tell(Pressure(RULES), blind) == []
    blind_alone = series(60, lambda t: sample(t, 0, complete=False))
    assert tell(Pressure(RULES), blind_alone) == []


def test_two_transitions_are_separated_by_the_dwell_time() -> None:
    flapping = series(60, lambda t: sample(t, 2000 if int(t) % 2 else 0, capacity_bytes=1000, groups=MERGED))
    times = [at_s for at_s, _ in tell(Pressure(RULES), flapping)]
    assert len(times) > 5
    assert all(later - earlier >= RULES.dwell_s for earlier, later in itertools.pairwise(times))


def relieved_at(pressure: Pressure) -> float:
    said = tell(pressure, series(4, lambda t: sample(t, 300, capacity_bytes=3000, groups=MERGED)))
    assert [type(signal) for _, signal in said] == [Relief]
    return said[0][0]


def test_a_burst_revokes_a_relief_at_once_while_the_groups_are_unchanged() -> None:
    pressure = Pressure(RULES)
    relieved_s = relieved_at(pressure)
    back = series(8, lambda t: sample(t, 1000, capacity_bytes=1000, groups=MERGED), from_s=4.0)
    (taken_back_s, signal), *_ = tell(pressure, back)
    assert isinstance(signal, Overload)
    assert taken_back_s == 4.0
    assert taken_back_s - relieved_s < RULES.dwell_s, "no dwell time, since the groups have not changed yet"


def test_memory_of_a_dissolving_pipeline_counts_as_its_members() -> None:
    """For a few seconds the members hold all parameters but little KV memory, which is no reason to drop again."""

    def dissolving(wanted_bytes: int) -> list[ClusterDemand]:
        return series(4, lambda t: sample(t, wanted_bytes, capacity_bytes=500, undropped_bytes=1000))

    assert tell(Pressure(RULES), dissolving(560)) == []
    assert [type(signal) for _, signal in tell(Pressure(RULES), dissolving(1100))][:1] == [Overload]


def gives_back_after(pressure: Pressure, from_s: float) -> float:
    """Seconds of low demand until the relief is signalled."""
    merged = series(from_s + 90, lambda t: sample(t, 300, capacity_bytes=3000, groups=MERGED), from_s=from_s)
    for one in merged:
        if pressure.observe(one):
            return one.at_s - from_s
    raise AssertionError("never")


@pytest.mark.parametrize(("calm_s", "waits_s"), [(20.0, 22.0), (80.0, RULES.relief_after_s)])
def test_between_close_bursts_parameters_stay_dropped(calm_s: float, waits_s: float) -> None:
    pressure = Pressure(RULES)
    tell(pressure, series(8, lambda t: sample(t, 900, capacity_bytes=3000, groups=MERGED)))
    first_s = gives_back_after(pressure, 8.0)
    assert first_s == pytest.approx(RULES.relief_after_s, abs=0.5)
    calm = series(10 + calm_s, lambda t: sample(t, 300), from_s=8.2 + first_s)
    assert tell(pressure, calm) == []
    burst = series(16 + calm_s, lambda t: sample(t, 900, capacity_bytes=3000, groups=MERGED), from_s=10.2 + calm_s)
    assert tell(pressure, burst) == []
    assert gives_back_after(pressure, 16.2 + calm_s) == pytest.approx(waits_s, abs=0.5)


def test_during_a_restore_demand_is_compared_with_the_future_capacity() -> None:
    """A restoring pair holds all layers twice and half of the KV. Demand that will fit once it has restored does not
    abort it.
    """
    pressure = Pressure(RULES)
    relieved_at(pressure)

    def returning(wanted_bytes: int) -> Callable[[float], ClusterDemand]:
        return lambda t: sample(t, wanted_bytes, capacity_bytes=500, undropped_bytes=1000, groups=MERGED)

    assert tell(pressure, series(5.6, returning(560), from_s=4.0)) == []
    said = tell(pressure, series(6.0, returning(1100), from_s=5.6))
    assert [type(signal) for _, signal in said] == [Overload]


def test_the_dwell_time_applies_once_the_layers_are_restored() -> None:
    pressure = Pressure(RULES)
    relieved_at(pressure)
    back = series(12, lambda t: sample(t, 1400, capacity_bytes=1000), from_s=4.0)
    assert tell(pressure, back)[0][0] == pytest.approx(4.0 + RULES.dwell_s)


def test_an_operators_transition_starts_the_dwell_time_too() -> None:
    pressure = Pressure(RULES)
    tell(pressure, series(2, lambda t: sample(t, 500)))
    after = series(8, lambda t: sample(t, 5000, capacity_bytes=3000, groups=MERGED), from_s=2.0)
    assert tell(pressure, after)[0][0] == pytest.approx(5.0)


def test_an_instance_that_joins_or_leaves_is_no_transition_and_no_trend() -> None:
    pressure = Pressure(RULES)
    tell(pressure, series(4, lambda t: sample(t, 700)))
    three = (*ALONE, (W2,))
    assert tell(pressure, series(8, lambda t: sample(t, 940, groups=three), from_s=4.0)) == [], "a step, not a slope"
    assert [at for at, _ in tell(pressure, [sample(8.0, 1300, groups=three)])] == [8.0], "no dwell time"


def dropped_after_1_s(t: float, wanted_bytes: int) -> ClusterDemand:
    merged = t >= 1
    return sample(t, wanted_bytes, capacity_bytes=3000 if merged else 1000, groups=MERGED if merged else ALONE)


def test_a_drop_that_helped_is_followed_by_no_further_overload() -> None:
    story = series(
        30, lambda t: sample(t, 2000, capacity_bytes=1000 if t < 1 else 3000, groups=MERGED if t >= 1 else ALONE)
    )
    assert [type(signal) for _, signal in tell(Pressure(RULES), story)] == [Overload]


def test_without_serving_workers_there_is_no_signal() -> None:
    assert tell(Pressure(RULES), series(40, lambda t: sample(t, 5000, capacity_bytes=0, groups=()))) == []


def test_thresholds_in_the_wrong_order_and_decreasing_times_are_bugs() -> None:
    with pytest.raises(InvariantViolation, match="thresholds"):
        Pressure(dataclasses.replace(RULES, relief_threshold_fraction=0.9))
    pressure = Pressure(RULES)
    pressure.observe(sample(2.0, 1))
    with pytest.raises(InvariantViolation, match="after"):
        pressure.observe(sample(1.0, 1))


def test_the_history_suffices_for_a_trend_and_is_bounded() -> None:
    pressure = Pressure(RULES)
    tell(pressure, series(100, lambda t: sample(t, 1, groups=((W0,), (W1,)))))
    assert pressure.history[0].at_s == pytest.approx(pressure.history[-1].at_s - RULES.trend_window_s)
    tell(pressure, [sample(100 + i / 1e4, 1, groups=((W0,), (W1,))) for i in range(2 * RULES.sample_count)])
    assert len(pressure.history) == RULES.sample_count


def test_a_shrinking_capacity_counts_with_its_future_value() -> None:
    pressure = Pressure(RULES)
    sizes = [1000, 1000, 1000, 980, 960, 940, 920, 900] + [900] * 15
    found: list[float] = []
    for i, size in enumerate(sizes):
        pressure.observe(sample(i * STEP_S, 100, capacity_bytes=size, groups=MERGED, undropped_bytes=500))
        assert pressure.forecast is not None
        found.append(pressure.forecast.capacity_bytes)
    assert found[2] == 1000
    assert found[7] == pytest.approx(900 - 100), "it falls by 20 every 0.2 s"
    assert found[-1] == 900

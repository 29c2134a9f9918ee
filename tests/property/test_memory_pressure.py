"""Properties of overload and relief signals for every history of demand."""

import itertools
import math
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.monitor.core.machine import pressure_rules
from services.monitor.policy.demand import ClusterDemand
from services.monitor.policy.pressure import LongRequest, Overload, Pressure, PressureRules, Relief, Signal
from tests.support.pressure import ALONE, MERGED, RULES, sample

STEP_S = 0.2
CAPACITY, UNDROPPED = 1000, 1000
ENLARGED = 3000
DEFAULTS = pressure_rules(overload_threshold_fraction=0.95, relief_threshold_fraction=0.8, dwell_s=3.0)

LEVELS = st.integers(0, 4 * CAPACITY)
STEPS_S = st.sampled_from([0.05, 0.2, 0.21, 0.5, 2.0])


@st.composite
def histories(draw: st.DrawFn) -> list[ClusterDemand]:
    """Histories with any demand at any time, while groups merge and dissolve at random."""
    at_s, merged, found = 0.0, False, list[ClusterDemand]()
    for step_s, level, toggles in draw(
        st.lists(st.tuples(STEPS_S, LEVELS, st.integers(0, 9)), min_size=1, max_size=150)
    ):
        at_s += step_s
        merged = merged != (toggles == 0)
        capacity = ENLARGED if merged else CAPACITY
        found.append(
            sample(at_s, level, capacity_bytes=capacity, undropped_bytes=UNDROPPED, groups=MERGED if merged else ALONE)
        )
    return found


def run(history: list[ClusterDemand]) -> list[tuple[ClusterDemand, Signal]]:
    pressure = Pressure(RULES)
    said: list[tuple[ClusterDemand, Signal]] = []
    for one in history:
        said += [(one, signal) for signal in pressure.observe(one)]
        pressure.check()
    return said


def transitions(said: list[tuple[ClusterDemand, Signal]], history: list[ClusterDemand]) -> list[float]:
    """Times of signals that request a transition. A relief that an overload revokes before the groups change does not
    count.
    """
    asked = said
    taken_back = {
        one.at_s
        for (one, signal), (after, other) in itertools.pairwise(asked)
        if isinstance(signal, Relief)
        and isinstance(other, Overload)
        and all(h.merged for h in history if one.at_s <= h.at_s <= after.at_s)
    }
    return [one.at_s for one, _ in asked if one.at_s not in taken_back]


@given(histories())
@settings(max_examples=300, deadline=None)
def test_at_most_one_transition_per_dwell_time(history: list[ClusterDemand]) -> None:
    times = transitions(run(history), history)
    assert all(b - a >= RULES.dwell_s - 1e-9 for a, b in itertools.pairwise(times))


@given(histories())
@settings(max_examples=300, deadline=None)
def test_relief_only_below_half_and_overload_only_near_capacity(history: list[ClusterDemand]) -> None:
    for one, signal in run(history):
        match signal:
            case Relief():
                assert one.merged
                assert one.used_bytes < RULES.relief_threshold_fraction * one.undropped_bytes
                assert one.wanted_bytes < RULES.relief_threshold_fraction * one.undropped_bytes
            case Overload(required_bytes):
                assert required_bytes > 0
                assert one.wanted_bytes >= RULES.overload_arming_fraction * one.capacity_bytes
            case LongRequest():
                pytest.fail("no history has a request longer than an instance holds")


@given(histories())
@settings(max_examples=100, deadline=None)
def test_the_same_history_gives_the_same_signals(history: list[ClusterDemand]) -> None:
    assert run(history) == run(history)


@given(histories())
@settings(max_examples=200, deadline=None)
def test_usage_was_low_for_the_whole_time_before_a_relief(history: list[ClusterDemand]) -> None:
    for one, signal in run(history):
        if isinstance(signal, Relief):
            since_s = one.at_s - RULES.relief_after_s
            before = [h for h in history if since_s <= h.at_s <= one.at_s]
            assert all(h.wanted_bytes < RULES.relief_threshold_fraction * UNDROPPED for h in before)


@given(
    period_s=st.floats(0.3, 30.0),
    low=st.integers(0, CAPACITY),
    high=st.integers(0, 4 * CAPACITY),
    duty=st.floats(0.05, 0.95),
    smooth=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_reactions_to_an_oscillating_load_flap_no_faster_than_the_dwell_time(
    period_s: float, low: int, high: int, duty: float, smooth: bool
) -> None:
    """The cluster drops on each Overload and restores on each Relief, half a second after the signal."""
    pressure, merged, due_at_s = Pressure(RULES), False, math.inf
    changes: list[float] = []
    for i in range(600):
        at_s = i * STEP_S
        if at_s >= due_at_s:
            merged, due_at_s = not merged, math.inf
            changes.append(at_s)
        phase = (at_s % period_s) / period_s
        share = (1 - math.cos(2 * math.pi * phase)) / 2 if smooth else float(phase < duty)
        wanted = int(low + (high - low) * share)
        capacity, groups = (ENLARGED, MERGED) if merged else (CAPACITY, ALONE)
        for signal in pressure.observe(sample(at_s, wanted, capacity_bytes=capacity, groups=groups)):
            wants_merged = isinstance(signal, Overload)
            if wants_merged != merged:
                due_at_s = at_s + 0.5
    assert all(b - a >= RULES.dwell_s - 1e-6 for a, b in itertools.pairwise(changes))


@given(start=st.integers(0, 700), growth_per_step=st.integers(1, 400))
@settings(max_examples=300, deadline=None)
def test_steady_growth_is_signalled_before_capacity_is_exceeded_by_more_than_one_interval(
    start: int, growth_per_step: int
) -> None:
    """The trend is known from the third sample on; until then only the level is compared with the threshold."""
    steps = (CAPACITY - start) // growth_per_step + 5  # enough that memory is exhausted at the end
    history = [sample(i * STEP_S, start + growth_per_step * i) for i in range(1, steps)]
    first = next(one for one, signal in run(history) if isinstance(signal, Overload))
    alarming = next(
        count
        for count, one in enumerate(history, start=1)
        if one.wanted_bytes >= RULES.overload_arming_fraction * CAPACITY
        and one.wanted_bytes + (growth_per_step / STEP_S * RULES.horizon_s if count >= 3 else 0.0)
        > RULES.overload_threshold_fraction * CAPACITY + 1e-6
    )
    assert first.at_s <= history[alarming - 1].at_s + 1e-9, "overload must be signalled at the first alarming sample"
    if alarming >= 3:
        assert first.wanted_bytes <= RULES.overload_threshold_fraction * CAPACITY + growth_per_step


@given(st.lists(st.integers(0, 849), min_size=1, max_size=300), st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_overload_while_demand_stays_below(levels: list[int], ordered: bool) -> None:
    history = [sample(i * STEP_S, level) for i, level in enumerate(sorted(levels) if ordered else levels)]
    assert not any(isinstance(signal, Overload) for _, signal in run(history))


@given(st.integers(850, 949), st.lists(st.integers(-10, 10), min_size=20, max_size=100))
@settings(max_examples=200, deadline=None)
def test_noise_below_the_threshold_is_no_overload(level: int, noise: list[int]) -> None:
    """Demand is near capacity, but below the threshold even if the noise's steepest slope is extrapolated over the
    horizon.
    """
    steepest_per_s = 20 / (RULES.trend_window_s / 2 - STEP_S)
    assume(level + 10 + steepest_per_s * RULES.horizon_s <= RULES.overload_threshold_fraction * CAPACITY)
    history = [sample(i * STEP_S, level) for i in range(10)]
    history += [sample((10 + i) * STEP_S, level + more) for i, more in enumerate(noise)]
    assert not any(isinstance(signal, Overload) for _, signal in run(history))


@pytest.mark.parametrize(
    ("seed", "slots", "share", "rules", "most_alarms"),
    [
        *[(seed, slots, 0.4, RULES, 5) for seed, slots in ((0, 16), (1, 16), (2, 64), (3, 64))],
        *[(seed, 64, 0.55, DEFAULTS, 2) for seed in (4, 5)],
        (6, 16, 0.4, DEFAULTS, 3),
    ],
)
def test_random_fluctuations_seldom_look_like_a_burst_and_a_burst_does(
    seed: int, slots: int, share: float, rules: PressureRules, most_alarms: int
) -> None:
    """Requests arrive at random and occupy a fraction `share` of `slots` places; after 300 s the rate quadruples."""
    rng, pressure = random.Random(seed), Pressure(rules)
    mean_s, burst_at_s = 2.0, 300.0
    arrival_s, queue, running = 0.0, list[float](), list[tuple[float, float]]()
    alarms: list[float] = []
    short_at_s = math.inf
    for i in range(int((burst_at_s + 15.0) / STEP_S)):
        at_s = i * STEP_S
        while arrival_s <= at_s:
            queue.append(rng.expovariate(1 / mean_s))
            arrival_s += rng.expovariate(share * slots / mean_s * (4 if arrival_s >= burst_at_s else 1))
        running = [(began_s, lasts_s) for began_s, lasts_s in running if began_s + lasts_s > at_s]
        while queue and len(running) < slots:
            running.append((at_s, queue.pop(0)))
        wanted = len(running) + len(queue)
        if at_s >= burst_at_s and wanted > slots:
            short_at_s = min(short_at_s, at_s)
        one = sample(at_s, 100 * wanted, used_bytes=100 * len(running), capacity_bytes=100 * slots)
        alarms += [at_s for signal in pressure.observe(one) if isinstance(signal, Overload)]
    assert len([at_s for at_s in alarms if at_s < burst_at_s]) <= most_alarms
    assert min(at_s for at_s in alarms if at_s >= burst_at_s) <= short_at_s + STEP_S

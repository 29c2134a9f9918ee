"""Whatever workers and dispatchers report, comparing candidates gives the planner a decision."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.common.cost import CostModel
from ballast.common.ids import GroupId
from ballast.common.traffic import Pace, Traffic
from services.planner.policy.candidates import Running
from services.planner.policy.compare import choose, compare, compare_restore
from services.planner.policy.drop import plan_of
from services.planner.policy.snapshot import Snapshot
from tests.support.drop_plans import model, singles

_COUNTS = st.sampled_from([0, 1, 3, 100, 10_000, 2**62])
_SECONDS = st.sampled_from([-1e-10, 0.0, 1e-9, 1e-4, 0.03, 1e9])


@st.composite
def _paces(draw: st.DrawFn) -> Pace:
    attention_s, token_s, shared_s, more_s, prefix_s, many_s, beyond_s = (draw(_SECONDS) for _ in range(7))
    cost = CostModel(attention_s, token_s, shared_s + max(0.0, more_s), shared_s, prefix_s, many_s, beyond_s)
    return Pace(cost, draw(st.integers(1, 8)), draw(st.sampled_from([1, 512, 1 << 40])))


@st.composite
def _traffics(draw: st.DrawFn) -> Traffic:
    rate = st.sampled_from([0.0, 0.5, 40.0, 1e9])
    return Traffic(
        queued_count=draw(_COUNTS),
        queued_tokens=draw(_COUNTS),
        recent_count=draw(_COUNTS),
        minute_count=draw(_COUNTS),
        minute_tokens=draw(_COUNTS),
        calm_per_s=draw(rate),
        ended_count=draw(_COUNTS),
        ended_tokens=draw(_COUNTS),
        open_tokens=draw(_COUNTS),
        known_s=draw(st.sampled_from([0.0, 1e-6, 20.0, 300.0])),
        oldest_wait_s=draw(st.sampled_from([0.0, 1e-6, 5.0, 1e12])),
    )


@st.composite
def _loaded(draw: st.DrawFn) -> tuple[Snapshot, Running]:
    count = draw(st.integers(1, 5))
    snapshot = singles(count, model(8), used=[draw(st.sampled_from([0, 1, 99, 100, 10**9])) for _ in range(count)])
    groups = (g._replace(running_count=draw(_COUNTS), uncomputed_tokens=draw(_COUNTS)) for g in snapshot.groups)
    running = Running(max_running_count=draw(st.sampled_from([1, 256, 2**31])), waiting_count=draw(_COUNTS))
    return Snapshot(snapshot.model, tuple(groups)), running


@settings(max_examples=60, deadline=None)
@given(_loaded(), _traffics(), _paces())
def test_comparisons_always_give_a_decision(loaded: tuple[Snapshot, Running], traffic: Traffic, pace: Pace) -> None:
    snapshot, running = loaded
    found = compare(snapshot, running, traffic, pace)
    assert found.chosen in found.candidates
    assert found.candidates[0].merges == ()
    assert not any(math.isnan(one.loss) for one in found.candidates)
    assert len(found.lines()) == len(found.candidates)
    plan = plan_of(snapshot, found.chosen.merges, 1)
    assert len(plan.groups) == len(found.chosen.merges)
    restored = {GroupId(group.group_id): (5,) * len(group.members) for group in snapshot.groups[:1]}
    back = compare_restore(snapshot, running, traffic, pace, restored)
    assert back.chosen in back.candidates


_LOSSES = st.sampled_from([0.0, 0.04, 0.09, 0.1, 0.15, 0.2, 0.3, 1.0, math.inf])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(_LOSSES, _LOSSES, st.integers(0, 4)), min_size=1, max_size=8))
def test_an_unfinished_candidate_would_not_have_been_chosen(trials: list[tuple[float, float, int]]) -> None:
    full = [first + others for first, others, _ in trials]
    changes = [change for *_, change in trials]
    good = [i for i, loss in enumerate(full) if loss <= min(full) + math.log(1.1)]
    assert choose([first for first, *_ in trials], changes, full.__getitem__) == min(good, key=changes.__getitem__)

"""How many instances should serve: predictions for one fewer and for several more, and the cost of an instance."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ballast.common.traffic import Traffic
from services.planner.policy.candidates import Candidates, Running
from services.planner.policy.compare import Comparison, ComparisonTargets, compare_sizes
from services.planner.policy.reserve import Jumps, Reserve, home_tokens, kinds, more, pair_gain
from tests.unit.planner.policy.test_compare import BLOCKS, EIGHT, PACE, SHAPE, alone, running

FULL = Reserve(parked_count=8, wake_s=1.0)


def quiet(per_s: float, *, prompt: int = 500, answer: int = 200) -> Traffic:
    """Steady traffic with prompts and answers of these lengths in tokens."""
    return Traffic(
        recent_count=round(10 * per_s),
        minute_count=round(60 * per_s),
        minute_tokens=round(60 * per_s * prompt),
        calm_per_s=per_s,
        ended_count=round(300 * per_s),
        ended_tokens=round(300 * per_s * answer),
        known_s=300.0,
    )


def sized(
    names: Sequence[str], used: float, traffic: Traffic, reserve: Reserve = FULL, *, each: int = 10, may: bool = True
) -> Comparison:
    """`used`: fraction of each instance's blocks in use. `each`: running requests on each instance."""
    snapshot = running(alone(names, round(used * BLOCKS)), each)
    return compare_sizes(snapshot, Running(256, 0), traffic, PACE, reserve, may_shrink=may, targets=ComparisonTargets())


def test_under_low_demand_one_instance_leaves_if_it_may() -> None:
    calm = quiet(1.0)
    assert sized(EIGHT, 0.1, calm).chosen.candidate.added == -1
    assert sized(EIGHT, 0.1, calm, may=False).chosen.candidate.added == 0


def test_the_requests_of_a_leaving_unlike_instance_count_on_the_others() -> None:
    """The two instances differ in speed, so each is the only instance of its kind."""
    like = running(alone(("a", "b"), round(0.1 * BLOCKS)), 10)
    slower = like.groups[1].members[0]._replace(slowness=2.0)
    unlike = replace(like, groups=(like.groups[0], like.groups[1]._replace(members=(slower,))))
    fewer = kinds(Candidates(unlike, Running(256, 0)), unlike, FULL, -1, 256)
    assert [(kind.group_count, kind.running_count) for kind in fewer] == [(1, 20.0)]
    calm = quiet(0.1)
    for snapshot, may, added in ((unlike, True, -1), (replace(unlike, groups=unlike.groups[:1]), True, 0)):
        found = compare_sizes(snapshot, Running(256, 0), calm, PACE, FULL, may_shrink=may, targets=ComparisonTargets())
        assert found.chosen.candidate.added == added


@pytest.mark.parametrize(("used", "leaves"), [(0.3, True), (0.42, False)])
def test_memory_is_reserved_for_unpredicted_demand(used: float, leaves: bool) -> None:
    """Usage of 0.3 on eight instances is 0.34 on seven; 0.42 is 0.48."""
    assert (sized(EIGHT, used, quiet(1.0)).chosen.candidate.added < 0) is leaves


def test_small_observed_jumps_need_a_smaller_reserve() -> None:
    calm = quiet(1.0)
    assert sized(EIGHT, 0.6, calm, replace(FULL, jump=0.5)).chosen.candidate.added < 0
    assert sized(EIGHT, 0.6, calm, replace(FULL, jump=3.0)).chosen.candidate.added == 0
    assert sized(EIGHT, 0.9, calm, replace(FULL, jump=0.1)).chosen.candidate.added == 0, "seven would be full"


def test_the_largest_jump_is_remembered_for_some_minutes() -> None:
    jumps, told, most = Jumps(), list[float](), list[float]()
    for step in range(2000):
        at_s = 0.5 * step
        wanted = 2.0 + (1.5 if 100.0 <= at_s < 130.0 else 0.0) + 0.001 * at_s
        reserve = jumps.look(FULL, wanted, recent_count=step // 100, within_s=2.0, at_s=at_s)
        told.append(reserve.jump)
        most.append(reserve.peak)
        assert reserve.recent_peak_count == step // 100
    assert told[0] == told[100] == math.inf, "unknown during the first minute"
    assert told[150] == pytest.approx(0.002)
    assert told[210] == pytest.approx(1.502)
    assert told[600] == pytest.approx(1.502)
    assert told[-1] == pytest.approx(0.002)
    assert most[300] == pytest.approx(most[259]) == pytest.approx(3.6295)
    assert most[400] == pytest.approx(2.2), "a minute later the peak is forgotten"


def test_a_recently_needed_instance_stays() -> None:
    assert sized(EIGHT, 0.3, quiet(1.0), replace(FULL, jump=0.2, peak=3.0)).chosen.candidate.added < 0
    assert sized(EIGHT, 0.3, quiet(1.0), replace(FULL, jump=0.2, peak=7.5)).chosen.candidate.added == 0


def test_the_peak_rate_of_the_last_minute_is_expected_to_recur() -> None:
    load = quiet(10.0, prompt=2000, answer=20)
    found = [
        sized(EIGHT, 0.15, load, replace(FULL, recent_peak_count=count), each=2).chosen.candidate.added
        for count in (100, 130)
    ]
    assert found == [-1, 0]


def test_room_that_a_drop_would_make_need_not_be_reserved() -> None:
    """With eight instances at 0.55 and a jump of 2.5 instances, seven would be at 0.99, or at 0.55 once parameters are
    dropped.
    """
    for gain, leaves in ((1.0, False), (1.8, True)):
        reserve = replace(FULL, jump=2.5, gain=gain)
        assert (sized(EIGHT, 0.55, quiet(1.0), reserve).chosen.candidate.added < 0) is leaves


def test_no_instance_leaves_if_compute_is_short_although_memory_is_free() -> None:
    """A prompt of 2,000 tokens takes 0.3 s on one instance, so eight instances handle 26 a second."""
    assert sized(EIGHT, 0.15, quiet(20.0, prompt=2000, answer=20), each=2).chosen.candidate.added >= 0
    assert sized(EIGHT, 0.15, quiet(2.0, prompt=2000, answer=20), each=2).chosen.candidate.added < 0


def test_a_full_cluster_wakes_some_and_not_more_than_it_needs() -> None:
    comparison = sized(EIGHT[:4], 0.95, quiet(2.0), each=30)
    assert 2 <= comparison.chosen.candidate.added <= 4
    losses = {one.candidate.added: one.loss for one in comparison.candidates}
    assert losses[0] > losses[comparison.chosen.candidate.added]


def test_waking_instances_count() -> None:
    traffic = quiet(2.0)
    waking = replace(FULL, parked_count=4, waking_s=(0.5,) * 4)
    before = sized(EIGHT[:4], 0.95, traffic, each=30).chosen.candidate.added
    assert sized(EIGHT[:4], 0.95, traffic, waking, each=30).chosen.candidate.added < before


def test_undoing_a_leave_adds_its_room_at_once() -> None:
    snapshot = running(alone(EIGHT, BLOCKS // 2), 10)
    staying = replace(snapshot, groups=snapshot.groups[:6])
    reserve = Reserve(leaving=tuple(snapshot.groups[6:]), parked_count=2, wake_s=2.0)
    candidates, home = Candidates(staying, Running(256, 0)), home_tokens(staying)
    assert home == BLOCKS * SHAPE.block_tokens
    nothing, undone, woken = (kinds(candidates, staying, reserve, added, 256) for added in (0, 2, 3))
    assert [(k.group_count, k.capacity_tokens / home, k.stall_s) for k in nothing] == [(6, 6.0, 0.0), (2, 1.0, 0.0)]
    assert [(k.group_count, k.capacity_tokens / home, k.stall_s) for k in undone] == [(6, 6.0, 0.0), (2, 2.0, 0.0)]
    assert [(k.group_count, k.stall_s) for k in woken] == [(6, 0.0), (2, 0.0), (1, 2.0)]
    assert sum(k.running_count for k in woken) == 80, "every running request is counted"


def test_part_or_all_of_the_reserve_is_woken() -> None:
    assert [candidate.added for candidate in more(replace(FULL, parked_count=6))] == [1, 2, 4, 6]
    assert more(Reserve()) == []


def test_a_model_with_one_layer_gains_nothing_from_pairs() -> None:
    snapshot = running(alone(("a", "b"), 0), 1)
    assert pair_gain(snapshot) > 1.0
    assert pair_gain(replace(snapshot, model=replace(SHAPE, layer_parameter_bytes=(1 << 20,)))) == 1.0

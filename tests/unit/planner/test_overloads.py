"""How the planner handles an overload when it can predict the outcome of a drop."""

from dataclasses import replace

import pytest

from ballast.common.traffic import Traffic
from ballast.common.transition import Phase
from services.planner.core import messages as p
from services.planner.core.change_requests import Planning
from services.planner.core.stages import Stage
from services.planner.policy.compare import ComparisonTargets
from tests.support.planner_core import EXTENT, LOAD, Planner

CALM = Traffic(recent_count=2, minute_count=10, minute_tokens=80, ended_count=50, ended_tokens=500, known_s=300.0)
# Requests wait for memory: every answer has some tokens, and requests arrive faster than others end.
SHORT = replace(CALM, queued_count=40, queued_tokens=320, recent_count=60, minute_count=100, minute_tokens=800)


def test_an_overload_without_a_better_option_is_compared_again() -> None:
    planner = Planner(planning=Planning())
    planner.traffic = CALM
    planner.start("w0", "w1")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    [nothing] = planner.told(p.NothingDone)
    assert isinstance(nothing, p.NothingDone)
    assert "nothing: P99 TTFT" in nothing.why
    assert planner.journal == []
    planner.wait(0.05)
    assert not planner.told(p.ReadLoads)
    planner.load = replace(LOAD, used_block_count=32, running_count=8)
    planner.traffic = replace(SHORT, ended_tokens=5000)
    planner.wait(0.3)
    assert planner.journal == [Stage.PREPARING], "by now a drop pays"
    [moved] = planner.told(p.TransitionMoved)
    assert isinstance(moved, p.TransitionMoved)
    assert "predicted 1 pair: P99 TTFT" in moved.record.journal.why


@pytest.mark.parametrize(("ttft_s", "dropped"), [(0.5, True), (1000.0, False)])
def test_nothing_is_dropped_if_first_tokens_meet_the_target(ttft_s: float, dropped: bool) -> None:
    planner = Planner(planning=Planning(targets=ComparisonTargets(ttft_s=ttft_s)))
    planner.traffic = replace(SHORT, ended_tokens=5000)
    planner.start("w0", "w1")
    planner.load = replace(LOAD, used_block_count=32, running_count=8)
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    assert planner.journal == [Stage.PREPARING] * dropped


def test_the_failure_of_an_older_read_denies_no_newer_change() -> None:
    """The older one was made for another purpose, and its monitor has just ended."""
    planner = Planner()
    planner.start("w0", "w1")
    assert p.ReadLoads("drop") in planner.core.handle(p.DropRequested(planner.now_s, "drop", "d1", EXTENT))
    older = p.LoadsRead(planner.now_s, "older", p.ClusterLoad({}), "no monitor")
    assert not [c for c in planner.core.handle(older) if isinstance(c, p.RefuseChange)]
    planner.execute(p.ReadLoads("drop"))
    planner.tell(planner.events.pop())
    assert planner.journal == [Stage.PREPARING]


def test_an_overload_is_not_compared_forever() -> None:
    planner = Planner(planning=Planning())
    planner.traffic = CALM
    planner.start("w0", "w1")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    planner.wait(60.0)
    assert len([c for c in planner.said if isinstance(c, p.NothingDone)]) == 1
    assert 20 <= len([c for c in planner.said if isinstance(c, p.ReadLoads)]) <= 28


def test_without_comparisons_the_shortage_determines_the_drop() -> None:
    planner = Planner(planning=Planning(compares=False))
    planner.traffic = CALM
    planner.start("w0", "w1")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    assert planner.journal == [Stage.PREPARING]


def test_a_burst_after_a_restores_commit_hurries_it_and_is_handled_afterwards() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.drop("w0", "w1")
    planner.go_through("w0", "w1")
    planner.load = replace(LOAD, used_block_count=0, running_count=0)
    planner.tell(p.ReliefRaised(planner.now_s, "r1"))
    planner.answer(Phase.PREPARED, "w0", "w1")
    planner.answer(Phase.EXCHANGING, "w0", "w1")
    planner.wait(1.0)
    assert planner.calls(p.WorkerCall.ABORT) == []
    planner.answer(Phase.DONE, "w1")
    planner.said.clear()
    planner.tell(p.OverloadRaised(planner.now_s, "o2", EXTENT))
    assert planner.calls(p.WorkerCall.ABORT) == ["w0"], "w1 is already done"
    planner.said.clear()
    planner.wait(1.0)
    assert planner.calls(p.WorkerCall.ABORT), "repeated, since messages may be lost"
    planner.answer(Phase.DONE, "w0")
    planner.load = replace(LOAD, used_block_count=32, running_count=8)
    planner.wait(0.1)
    assert planner.journal[-2:] == [Stage.DONE, Stage.PREPARING]
    assert planner.core.conductor.records()[0].by == "overload"


@pytest.mark.parametrize("queued", [0, 40, 10**9])
@pytest.mark.parametrize("recent", [0, 60])
@pytest.mark.parametrize("others", [Traffic(), CALM], ids=["it is the only one", "others speak"])
def test_a_silent_dispatcher_causes_no_drop_by_itself(queued: int, recent: int, others: Traffic) -> None:
    """The dispatcher may have died with its queue, so a drop must be justified by the other dispatchers' traffic alone
    or with an empty queue.
    """
    planner = Planner(planning=Planning())
    planner.traffic = replace(SHORT, queued_count=queued, queued_tokens=8 * queued, recent_count=recent)
    planner.fresh_traffic = others
    planner.start("w0", "w1")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    planner.wait(5.0)
    assert planner.journal == []
    [nothing] = [command for command in planner.told(p.NothingDone) if isinstance(command, p.NothingDone)]
    assert "nothing: P99 TTFT" in nothing.why, "the options were compared"


def test_a_dispatcher_that_falls_silent_in_a_burst_does_not_end_the_comparison() -> None:
    """Memory is full and requests keep arriving, so a drop is right even without the silent dispatcher's queue."""
    planner = Planner(planning=Planning())
    planner.load = replace(LOAD, used_block_count=32, running_count=8)
    planner.traffic = replace(SHORT, ended_tokens=5000)
    planner.fresh_traffic = Traffic()
    planner.start("w0", "w1")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    assert planner.journal == [Stage.PREPARING]
    [moved] = planner.told(p.TransitionMoved)
    assert isinstance(moved, p.TransitionMoved)
    assert "predicted 1 pair: P99 TTFT" in moved.record.journal.why


def served(traffic: Traffic, waits: tuple[int, ...], later_count: int, later_s: float) -> Traffic:
    return replace(traffic, first_counts=waits, later_count=later_count, later_s=later_s)


def test_the_prediction_for_doing_nothing_is_logged_with_its_outcome() -> None:
    planner = Planner(planning=Planning())
    planner.traffic = served(CALM, (7,), 100, 3.0)
    planner.start("w0", "w1")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    prediction_log = planner.core.conductor.prediction_log
    [one] = prediction_log.open
    assert (one.decision, one.epoch) == ("nothing", None)
    assert "it can be said what came" in one.told(planner.now_s)
    planner.wait(one.horizon_s / 2)
    assert prediction_log.newest_first() == [one], "a repeated decision is logged once"
    planner.traffic = served(CALM, (7, 0, 0, 20), 300, 13.0)
    planner.wait(one.horizon_s)
    [settled] = [c for c in planner.said if isinstance(c, p.PredictionSettled)]
    assert settled.predicted is one
    assert one.settled_at_s == pytest.approx(one.at_s + one.horizon_s, abs=0.2)
    assert one.served is not None
    assert (one.served.first_count, one.served.tpot_s) == (20, 0.05)
    assert 0.02 < (one.served.ttft_p99_s or 0.0) < 0.05
    assert one.tokens_per_s == pytest.approx(220 / one.horizon_s, rel=0.1)
    assert f"TPOT 50 ms, {one.tokens_per_s:.0f} tokens/s" in one.told(planner.now_s)


def test_tokens_are_logged_even_if_no_request_had_its_first_one() -> None:
    planner = Planner(planning=Planning())
    planner.traffic = served(CALM, (7,), 100, 3.0)
    planner.start("w0", "w1")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    [one] = planner.core.conductor.prediction_log.open
    planner.traffic = served(CALM, (7,), 300, 13.0)
    planner.wait(2 * one.horizon_s)
    assert "no request had its first token, TPOT 50 ms" in one.told(planner.now_s)


def test_the_shortage_is_logged_if_nothing_is_done() -> None:
    planner = Planner(planning=Planning())
    planner.traffic = CALM
    planner.start("w0", "w1")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", 7 * EXTENT))
    planner.wait(60.0)
    said = [command for command in planner.said if isinstance(command, p.NothingDone)]
    assert {one.shortfall_bytes for one in said} == {7 * EXTENT}


def test_a_drop_ends_the_prediction_for_doing_nothing_and_a_failed_one_has_none() -> None:
    planner = Planner(planning=Planning())
    planner.traffic = CALM
    planner.start("w0", "w1")
    planner.tell(p.OverloadRaised(planner.now_s, "o1", EXTENT))
    planner.load = replace(LOAD, used_block_count=32, running_count=8)
    planner.traffic = replace(SHORT, ended_tokens=5000)
    planner.wait(0.3)
    prediction_log = planner.core.conductor.prediction_log
    [nothing] = prediction_log.settled
    assert nothing.settled_at_s == pytest.approx(nothing.at_s + 0.2, abs=0.2)
    [drop] = prediction_log.open
    assert drop.epoch is not None
    assert prediction_log.of(drop.epoch) is drop
    planner.wait(60.0)  # no member answers, so the drop is aborted
    assert Stage.ABORTED in planner.journal
    assert prediction_log.of(drop.epoch) is None


def test_an_overload_does_not_replace_an_operators_pending_request() -> None:
    planner = Planner()
    planner.start("w0", "w1")
    said = planner.core.handle(p.RestoreRequested(planner.now_s, "c", "r"))
    said += planner.core.handle(p.OverloadRaised(planner.now_s, "c", 1 << 20))
    said += planner.core.handle(p.LoadsRead(planner.now_s, "c", p.ClusterLoad({}), ""))
    assert [command.request_id for command in said if isinstance(command, p.RefuseChange)] == ["r"]

"""Stories of the dispatcher's core: events in, commands out."""

import pytest

from ballast.common.errors import InvariantViolation, Overloaded
from ballast.common.ids import RequestId
from ballast.common.sampling import FinishReason, PriorityClass
from services.dispatcher.core import events as d
from services.dispatcher.core.limits import Limits
from services.dispatcher.core.placement import PlacementRules
from services.dispatcher.policy.freeness import RoutingRules
from tests.support.dispatcher_core import FULL, Answer, Story, delivered, finishes, key, load


def test_a_request_is_placed_relayed_and_finished_once() -> None:
    story = Story("a")
    [place] = story.submit("r").of(d.PlaceOnWorker)
    assert (place.worker, place.attempt, place.output_token_ids, place.delivered_text_chars) == (key("a"), 1, (), 0)
    story.now_s = 2.0
    [deliver] = story.step("a", {"r": [7, 8]}, texts=["xy"]).of(d.Deliver)
    assert deliver == d.Deliver("r", [7, 8], "xy", ())  # pyright: ignore[reportArgumentType]
    story.now_s = 3.0
    [finish] = story.finish("a", "r").of(d.Finish)
    assert finish.finish_reason is FinishReason.LENGTH
    facts = finish.facts
    assert (facts.prompt_token_count, facts.completion_token_count, facts.replay_count) == (16, 2, 0)
    assert (facts.queue_s, facts.ttft_s, facts.e2e_s) == (0.0, 2.0, 3.0)
    assert not story.core.requests
    assert story.core.endings == {"length": 1}


def test_tokens_and_ending_in_one_message_are_delivered_in_order() -> None:
    story = Story("a")
    story.submit("r")
    ending = d.Ending(story.handle_of("r"), FinishReason.STOP, matched_stop="!")
    answer = story.step("a", {"r": [7]}, endings=[ending])
    assert [type(c) for c in answer.commands] == [d.Deliver, d.Finish]


def test_a_worker_gets_less_time_than_remains() -> None:
    story = Story("a")
    story.now_s = 10.0
    [place] = story.submit("r", deadline_at_s=12.0).of(d.PlaceOnWorker)
    assert 1.9 < place.deadline_s < 2.0


# ------------------------------------------------------------------------------------------------- backlog


def test_the_backlog_is_served_by_class_then_arrival() -> None:
    story = Story("a")
    for index in range(8):
        story.submit(f"running{index}")
    story.step("a", report=load(used_block_count=64, running_count=8, waiting_count=2, waiting_block_count=2))
    story.submit("first")
    story.submit("second")
    story.submit("urgent", priority=PriorityClass.INTERACTIVE)
    assert len(story.core.backlog) == 3
    answer = story.step("a")
    assert [name for name, _ in answer.places] == ["urgent", "first", "second"]


def test_workers_hold_only_short_queues() -> None:
    story = Story("a", routing=RoutingRules(worker_queue_count=2, growth_tokens=0))
    story.step("a", report=FULL)
    placed = [name for index in range(10) for name, _ in story.submit(f"r{index}").places]
    assert placed == ["r0", "r1"]
    assert len(story.core.backlog) == 8


def test_a_burst_between_two_reports_spreads_over_the_workers() -> None:
    story = Story("a", "b")
    workers = [worker for index in range(8) for _, worker in story.submit(f"r{index}").places]
    assert sorted(workers) == ["a"] * 4 + ["b"] * 4


def test_a_report_that_has_not_seen_a_placement_does_not_free_its_blocks() -> None:
    story = Story("a")
    story.submit("big", prompt=40 * 16 - 1)
    handle = story.handle_of("big")
    story.step("a", seen_handle=handle - 1)
    assert story.submit("other", prompt=40 * 16 - 1).places == []
    story.step("a", report=load(used_block_count=40, running_count=1), seen_handle=handle)
    worker = story.core.fleet.get(key("a"))
    assert worker is not None
    assert worker.unseen_block_count == 0


def test_requests_beyond_the_bound_are_refused_with_a_delay() -> None:
    story = Story("a", limits=Limits(max_queued_request_count=3))
    story.step("a", report=load(used_block_count=64, running_count=8, waiting_count=2))
    for index in range(3):
        assert story.submit(f"r{index}").commands == []
    [refuse] = story.submit("more").of(d.Refuse)
    assert isinstance(refuse.error, Overloaded)
    assert 0.1 <= refuse.error.retry_after_s <= 30.0
    assert "--max-num-queued-reqs" in str(refuse.error)
    assert story.core.endings == {"refused": 1}


def test_tokens_beyond_the_bound_are_refused_but_only_if_they_would_wait() -> None:
    story = Story("a", limits=Limits(max_queued_token_count=100))
    assert story.submit("long", prompt=200).places == [("long", "a")]
    story.step("a", report=load(used_block_count=64, running_count=8, waiting_count=2))
    assert story.submit("waits", prompt=90).errors == {}
    assert story.submit("too much", prompt=11).errors == {"too much": "Overloaded"}
    assert story.submit("fits", prompt=10).errors == {}


def test_the_delay_follows_the_rate_at_which_the_backlog_empties() -> None:
    def delay_s(placements_per_s: int) -> float:
        story = Story("a", limits=Limits(max_queued_request_count=50))
        full = load(used_block_count=64, running_count=8, waiting_count=2)
        for index in range(placements_per_s * 20):
            story.now_s += 1 / placements_per_s
            story.submit(f"r{index}")
            story.finish("a", f"r{index}")
        story.step("a", report=full)
        for index in range(50):
            story.submit(f"w{index}")
        [refuse] = story.submit("more").of(d.Refuse)
        assert isinstance(refuse.error, Overloaded)
        return refuse.error.retry_after_s

    assert delay_s(1) > 5 * delay_s(10)


def test_an_id_in_use_is_refused_and_its_owner_is_not_disturbed() -> None:
    story = Story("a")
    story.submit("r")
    assert story.submit("r").errors == {"r": "AlreadyExists"}
    assert finishes(story.finish("a", "r")) == {"r": "length"}
    assert story.submit("r").places == [("r", "a")]


# ------------------------------------------------------------------------------------------------- large requests


def test_small_requests_overtake_a_large_one_until_its_patience_ends() -> None:
    story = Story("a", placement=PlacementRules(large_patience_s=2.0))
    story.step("a", report=load(used_block_count=40, running_count=2))
    assert story.submit("large", prompt=30 * 16).places == []
    assert story.submit("small").places == [("small", "a")]
    assert story.core.next_timer_s() == pytest.approx(2.0)
    story.now_s = 2.0
    assert story.handle(d.DispatcherTick(2.0)).places == [("large", "a")]
    # The large request's waiting blocks now count as load of the worker, so no other request overtakes it, and it
    # cannot starve.
    story.step("a", report=load(used_block_count=42, running_count=3, waiting_count=1, waiting_block_count=31))
    story.submit("next")
    story.submit("over")
    assert story.core.requests["over"].worker is None  # pyright: ignore[reportArgumentType]


def test_patience_has_ended_when_its_timer_fires() -> None:
    begin_s = 3.1
    assert (begin_s + 2.0) - begin_s < 2.0  # in virtual time, a timer that is due again at once would fire forever
    story = Story("a", placement=PlacementRules(large_patience_s=2.0))
    story.step("a", report=load(used_block_count=40, running_count=2))
    story.now_s = begin_s
    story.submit("large", prompt=30 * 16)
    due_at_s = story.core.next_timer_s()
    assert due_at_s is not None
    story.now_s = due_at_s
    assert story.handle(d.DispatcherTick(due_at_s)).places == [("large", "a")]


def test_a_large_request_that_fits_elsewhere_does_not_wait() -> None:
    story = Story("a", "b")
    story.step("a", report=load(used_block_count=40, running_count=2))
    assert story.submit("large", prompt=30 * 16).places == [("large", "b")]


def test_a_request_larger_than_any_worker_is_refused() -> None:
    story = Story("a")
    assert story.submit("huge", prompt=64 * 16).errors == {"huge": "InvalidRequest"}


# ------------------------------------------------------------------------------------------------- losses


def test_a_lost_workers_requests_continue_elsewhere_after_their_tokens() -> None:
    story = Story("a")
    story.submit("r")
    first = story.step("a", {"r": [5, 6, 7]}, texts=["abc"])
    story.adopt(key("a"), key("b"))
    story.connect("b")
    old_handle = story.handle_of("r")
    [place] = story.lose("a").of(d.PlaceOnWorker)
    assert (place.worker, place.attempt) == (key("b"), 2)
    assert (place.output_token_ids, place.delivered_text_chars) == ((5, 6, 7), 3)
    late = story.raw_step("a", {old_handle: [8]})
    assert late.commands == []
    assert (story.core.relay.stale_count, story.core.relay.token_count) == (1, 3)
    rest = story.step("b", {"r": [8, 9]})
    assert delivered([first, late, rest], "r") == [5, 6, 7, 8, 9]
    [finish] = story.finish("b", "r").of(d.Finish)
    assert (finish.facts.replay_count, finish.facts.completion_token_count) == (1, 5)


def test_replayed_requests_keep_their_place_in_the_queue() -> None:
    story = Story("a")
    for name in ("r1", "r2", "r3"):
        story.submit(name)
    story.step("a", report=load(used_block_count=64, running_count=8, waiting_count=2))
    story.submit("later")
    assert story.lose("a").places == []
    answer = story.connect("a")
    assert [name for name, _ in answer.places] == ["r1", "r2", "r3", "later"]


def test_a_request_that_loses_too_many_workers_fails() -> None:
    story = Story("a", limits=Limits(replay_limit=2))
    story.submit("r")
    for _ in range(2):
        assert story.lose("a").errors == {}
        assert story.connect("a").places == [("r", "a")]
    assert story.lose("a").errors == {"r": "Unavailable"}


def test_losing_a_worker_twice_is_the_same_as_once() -> None:
    story = Story("a", "b")
    story.submit("r")
    assert story.lose("a").places == [("r", "b")]
    assert story.lose("a").commands == []


def test_a_worker_that_reconnects_has_forgotten_its_requests() -> None:
    story = Story("a")
    story.submit("r")
    assert [p.attempt for p in story.connect("a").of(d.PlaceOnWorker)] == [2]


def test_an_engine_error_is_tried_elsewhere_unless_the_request_is_at_fault() -> None:
    story = Story("a")
    story.submit("r")
    story.submit("bad")
    broken = d.Ending(story.handle_of("r"), FinishReason.ERROR, error="step failed")
    assert [p.attempt for p in story.step("a", endings=[broken]).of(d.PlaceOnWorker)] == [2]
    invalid = d.Ending(story.handle_of("bad"), FinishReason.ERROR, error="too long", invalid=True)
    assert story.step("a", endings=[invalid]).errors == {"bad": "InvalidRequest"}


def outgrown(story: Story) -> d.Ending:
    """The worker's error for request r, which has outgrown the memory at 1,100 prompt and 30 answer tokens."""
    return d.Ending(story.handle_of("r"), FinishReason.ERROR, error="1130 tokens do not fit")


def test_a_request_that_has_outgrown_its_worker_continues_on_a_larger_group() -> None:
    story = Story("a", "b")
    story.connect("a", load(block_count=128))
    assert story.submit("r", prompt=1100).places == [("r", "a")]
    story.step("a", {"r": [7] * 30}, report=load(block_count=128))
    story.connect("b", load(block_count=128))
    assert story.step("a", endings=[outgrown(story)], report=load(block_count=70)).places == [("r", "b")]
    assert story.core.requests[RequestId("r")].output_token_ids == [7] * 30


def test_a_request_that_has_outgrown_all_workers_ends_as_exhausted() -> None:
    story = Story("a")
    story.connect("a", load(block_count=128))
    story.submit("r", prompt=1100)
    story.step("a", {"r": [7] * 30}, report=load(block_count=128))
    answer = story.step("a", endings=[outgrown(story)], report=load(block_count=70))
    assert answer.errors == {"r": "Overloaded"}
    [fail] = answer.of(d.Fail)
    assert "after 30 tokens of the answer, 1130 tokens need more KV blocks than any worker has" in str(fail.error)


def test_requests_of_a_failing_step_are_replayed_up_to_a_limit() -> None:
    """It is unknown which request of a batch made the step fail, so all are replayed, up to the limit."""
    story = Story("a")
    story.submit("bad")
    story.submit("good")
    limit = story.core.limits.replay_limit

    def fails(*names: str) -> Answer:
        endings = [d.Ending(story.handle_of(name), FinishReason.ERROR, error="cuda error") for name in names]
        return story.step("a", endings=endings)

    assert sorted(fails("bad", "good").places) == [("bad", "a"), ("good", "a")]
    for _ in range(limit - 1):
        assert fails("bad").places == [("bad", "a")]
    answer = fails("bad")
    assert answer.errors == {"bad": "Unavailable"}
    [fail] = answer.of(d.Fail)
    assert "cuda error" in str(fail.error)
    assert finishes(story.finish("a", "good")) == {"good": "length"}


def test_a_request_that_only_a_lost_group_could_hold_is_not_a_client_error() -> None:
    """A request that only a lost group could hold fails as `Overloaded` rather than as `InvalidRequest`."""
    story = Story("a", "b")
    story.connect("a", load(block_count=256))
    story.connect("b", load(block_count=128))
    story.submit("placed", prompt=3000)
    assert story.lose("a").errors == {"placed": "Overloaded"}
    [fail] = story.submit("next", prompt=3000).of(d.Fail)
    assert isinstance(fail.error, Overloaded)
    assert story.submit("never", prompt=5000).errors == {"never": "InvalidRequest"}


def test_a_refused_request_waits_a_moment_and_does_not_count_as_a_replay() -> None:
    story = Story("a")
    story.submit("r")
    answer = story.step("a", endings=[d.Ending(story.handle_of("r"), None, refused=True)])
    assert answer.commands == []
    assert story.core.next_timer_s() == pytest.approx(0.05)
    story.now_s = 0.06
    [place] = story.handle(d.DispatcherTick(0.06)).of(d.PlaceOnWorker)
    assert (place.attempt, story.core.replay_count) == (2, 0)


def test_messages_of_another_incarnation_are_dropped_and_counted() -> None:
    story = Story("a")
    story.submit("r")
    handle = story.handle_of("r")
    story.adopt(key("a", 2))
    assert story.raw_step("a", {handle: [1]}, incarnation=1).commands == []
    assert story.core.relay.stale_count == 1
    assert story.connect("a", incarnation=1).commands == []
    assert story.connect("a", incarnation=2).places == [("r", "a")]


def test_logprobs_of_a_request_that_has_ended_are_not_given_to_another() -> None:
    story = Story("a")
    story.submit("gone", logprobs=1)
    story.submit("stays", logprobs=1)
    gone, stays = story.handle_of("gone"), story.handle_of("stays")
    story.handle(d.Withdrawn(0.0, "gone", "left"))  # pyright: ignore[reportArgumentType]
    [deliver] = story.raw_step("a", {gone: [1, 2], stays: [3]}, logprobs=["l1", "l2", "l3"]).of(d.Deliver)
    assert (deliver.request_id, deliver.logprobs) == ("stays", ["l3"])


# ------------------------------------------------------------------------------------------------- layout


def test_streams_follow_the_layout() -> None:
    story = Story("a")
    answer = story.adopt(key("b"), key("a", 2))
    assert answer.of(d.Disconnect) == [d.Disconnect(key("a", 1))]
    assert answer.of(d.Connect) == [d.Connect(key("a", 2), "a:1"), d.Connect(key("b"), "b:1")]


def test_the_same_layout_again_changes_nothing() -> None:
    story = Story("a")
    story.epoch -= 1
    assert story.adopt(key("a")).commands == []


def test_a_layout_with_a_reset_epoch_is_adopted() -> None:
    story = Story("a")
    for epoch in (0, -1):
        story.epoch = epoch
        assert story.adopt(key("b")).of(d.Connect) == ([d.Connect(key("b"), "b:1")] if epoch == 0 else [])


def test_a_draining_worker_finishes_its_requests_and_gets_no_new_ones() -> None:
    story = Story("a", "b")
    story.submit("r")
    story.adopt(key("a"), key("b"), draining=[key("a")])
    assert [story.submit(f"n{i}").places[0][1] for i in range(3)] == ["b"] * 3
    assert finishes(story.finish("a", "r")) == {"r": "length"}


def test_a_worker_that_says_it_drains_gets_nothing_new() -> None:
    story = Story("a")
    story.step("a", report=load(draining=True))
    assert story.submit("r").commands == []


# ------------------------------------------------------------------------------------------------- time


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    story = Story("a")
    story.submit("running", deadline_at_s=1.0)
    story.step("a", report=load(used_block_count=64, running_count=8, waiting_count=2))
    story.submit("waiting", deadline_at_s=1.5)
    assert story.core.next_timer_s() == 1.0
    handle = story.handle_of("running")
    early = story.handle(d.DispatcherTick(0.9))
    assert early.commands == []
    answer = story.handle(d.DispatcherTick(2.0))
    assert answer.of(d.AbortOnWorker) == [d.AbortOnWorker(key("a"), handle)]
    assert answer.errors == {"running": "DeadlineExceeded", "waiting": "DeadlineExceeded"}
    assert story.core.endings == {"deadline": 2}


def test_a_deadline_in_the_past_is_refused() -> None:
    story = Story("a")
    story.now_s = 5.0
    assert story.submit("r", deadline_at_s=5.0).errors == {"r": "DeadlineExceeded"}


def test_without_a_worker_requests_wait_and_then_fail() -> None:
    story = Story(limits=Limits(no_worker_timeout_s=10.0))
    story.submit("r1")
    story.now_s = 5.0
    story.submit("r2")
    assert story.core.next_timer_s() == pytest.approx(10.0)
    assert story.handle(d.DispatcherTick(10.0)).errors == {"r1": "Unavailable"}
    assert story.handle(d.DispatcherTick(15.0)).errors == {"r2": "Unavailable"}


def test_a_worker_that_joins_in_time_gets_the_waiting_requests() -> None:
    story = Story(limits=Limits(no_worker_timeout_s=10.0))
    story.submit("r")
    story.adopt(key("a"))
    story.now_s = 9.0
    assert story.connect("a").places == [("r", "a")]
    assert story.handle(d.DispatcherTick(11.0)).commands == []


def test_ended_requests_leave_no_timers_behind() -> None:
    story = Story("a")
    for index in range(1000):
        story.submit(f"r{index}", deadline_at_s=1e6 + index)
        story.finish("a", f"r{index}")
    assert story.handle(d.DispatcherTick(2e6)).commands == []
    assert story.core.endings == {"length": 1000}


# ------------------------------------------------------------------------------------------------- endings


def test_a_client_that_leaves_frees_the_worker_at_once() -> None:
    story = Story("a")
    story.submit("r")
    handle = story.handle_of("r")
    answer = story.handle(d.Withdrawn(1.0, "r", "the client disconnected"))  # pyright: ignore[reportArgumentType]
    assert answer.of(d.AbortOnWorker) == [d.AbortOnWorker(key("a"), handle)]
    assert answer.errors == {"r": "Cancelled"}
    again = story.handle(d.Withdrawn(1.0, "r", "the client disconnected"))  # pyright: ignore[reportArgumentType]
    assert again.commands == []


def test_only_a_cancelled_request_may_end_cancelled() -> None:
    story = Story("a")
    story.submit("r")
    answer = story.step("a", endings=[d.Ending(story.handle_of("r"), FinishReason.CANCELLED)])
    assert answer.errors == {"r": "PeerViolation"}


def test_draining_refuses_new_requests_and_finishes_old_ones() -> None:
    story = Story("a")
    story.submit("old")
    story.handle(d.DispatcherDrainRequested(1.0))
    assert story.submit("new").errors == {"new": "Unavailable"}
    assert finishes(story.finish("a", "old")) == {"old": "length"}


def test_a_drain_can_be_undone_unless_the_process_is_stopping() -> None:
    story = Story("a")
    story.handle(d.DispatcherDrainRequested(1.0))
    story.handle(d.UndrainRequested(2.0))
    assert not story.submit("new").errors
    for last in (
        d.DispatcherDrainRequested(3.0, for_good=True),
        d.DispatcherDrainRequested(3.5),
        d.UndrainRequested(4.0),
    ):
        story.handle(last)
    assert story.submit("newer").errors == {"newer": "Unavailable"}
    story = Story("a")
    story.handle(d.TimeIsUp(1.0))
    story.handle(d.UndrainRequested(2.0))
    assert story.submit("new").errors == {"new": "Unavailable"}


def test_when_time_is_up_everything_ends_with_a_reason() -> None:
    story = Story("a")
    story.submit("r")
    answer = story.handle(d.TimeIsUp(1.0))
    assert [type(c) for c in answer.commands] == [d.AbortOnWorker, d.Fail]
    assert answer.errors == {"r": "Unavailable"}


def test_checking_one_worker_finds_its_errors() -> None:
    story = Story("a", "b")
    story.submit("r")
    story.core.check_step(key("a"))
    tracked = story.core.requests.pop(RequestId("r"))
    with pytest.raises(InvariantViolation, match=r"is unknown|exist"):
        story.core.check_step(tracked.worker or key("a"))


def test_a_worker_that_changes_without_notifying_routing_is_detected() -> None:
    story = Story("a")
    story.submit("first")
    story.core._placement._look_around(story.now_s)
    worker = story.core.fleet.get(key("a"))
    assert worker is not None
    worker.closed_in_layout = True
    with pytest.raises(InvariantViolation, match="its ranking is old"):
        story.core._placement.check()


def test_requests_wait_for_a_woken_worker_that_has_not_reported_blocks_yet() -> None:
    story = Story("a")
    story.connect("a", load(block_count=0))
    assert story.submit("r", prompt=108).places == []
    assert story.step("a", report=load(block_count=128)).places == [("r", "a")]

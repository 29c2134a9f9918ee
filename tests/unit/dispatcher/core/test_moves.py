"""Stories about groups that form and dissolve: requests follow the worker that continues them."""

from collections import Counter

from ballast.common.ids import RequestId
from ballast.common.sampling import FinishReason
from services.dispatcher.core.events import (
    AbortOnWorker,
    Connect,
    Disconnect,
    DispatcherTick,
    Ending,
    Fail,
    PlaceOnWorker,
    TimeIsUp,
    Withdrawn,
)
from services.dispatcher.core.limits import Limits
from services.dispatcher.policy.freeness import RoutingRules
from tests.support.dispatcher_core import FULL, Story, delivered, finishes, key, load


def test_a_moved_request_continues_after_all_received_tokens() -> None:
    story = Story("a", "b")
    story.submit("r", prompt=20)
    first = story.step("a", {"r": [5, 6]}, texts=["xyz"])
    ending = Ending(story.handle_of("r"), None, moved_to="b")
    last = story.step("a", {"r": [7]}, texts=["é!"], endings=[ending])
    [place] = last.of(PlaceOnWorker)
    assert (place.worker, place.attempt, place.expects_handover) == (key("b"), 2, True)
    assert (place.output_token_ids, place.delivered_text_chars) == ((5, 6, 7), 5)
    rest = story.step("b", {"r": [8]})
    assert delivered([first, last, rest], "r") == [5, 6, 7, 8]
    assert finishes(story.finish("b", "r")) == {"r": "length"}
    assert story.core.move_counts == {"at_once": 1}
    assert story.core.replay_count == 0


def test_later_messages_of_the_old_worker_are_dropped() -> None:
    story = Story("a", "b")
    story.submit("r")
    old = story.handle_of("r")
    story.move("a", "r", "b")
    answer = story.raw_step("a", {old: [9]}, endings=[Ending(old, None, moved_to="b"), Ending(old, FinishReason.STOP)])
    assert answer.commands == []
    assert story.core.relay.stale_count == 3


def test_moves_bypass_backlog_room_and_holds() -> None:
    story = Story("a", "b", routing=RoutingRules(worker_queue_count=1, growth_tokens=0))
    story.submit("r")
    story.step("b", report=load(used_block_count=64, running_count=8, waiting_count=3, waiting_block_count=9))
    story.step("a", report=FULL)
    for index in range(4):
        story.submit(f"w{index}")
    assert len(story.core.backlog) == 3
    assert story.move("a", "r", "b").places[:1] == [("r", "b")]


def test_a_draining_worker_gets_requests_handed_over_to_it() -> None:
    story = Story("a", "b")
    story.submit("r")
    story.adopt(key("a"), key("b"), draining=[key("b")])
    assert story.move("a", "r", "b").places == [("r", "b")]


def test_a_request_waits_for_the_stream_to_its_new_worker() -> None:
    story = Story(limits=Limits(move_wait_s=5.0))
    story.merge("ab")
    story.connect("a")
    story.submit("r")
    story.step("a", {"r": [1, 2]})
    assert story.move("a", "r", "b").commands == []  # a restore: b was a follower
    assert story.core.moving_count == 1
    assert story.core.next_timer_s() == 5.0
    assert story.merge("a", "b").of(Connect) == [Connect(key("b"), "b:1")]
    [place] = story.connect("b").of(PlaceOnWorker)
    assert (place.worker, place.output_token_ids, place.expects_handover) == (key("b"), (1, 2), True)
    assert story.core.move_counts == {"waited": 1}


def test_a_move_to_a_worker_that_no_layout_has_named_yet_waits_too() -> None:
    story = Story("a")
    story.submit("r")
    story.move("a", "r", "newcomer")
    story.merge("a", "b")
    assert story.core.moving_count == 1
    story.adopt(key("a"), key("newcomer", 3))
    assert story.connect("newcomer", incarnation=3).places == [("r", "newcomer")]


def test_a_move_that_waits_too_long_continues_from_the_backlog_without_a_replay() -> None:
    story = Story("a", "c", limits=Limits(move_wait_s=5.0, replay_limit=0))
    story.submit("r")
    story.step("a", {"r": [1]})
    story.move("a", "r", "b")
    story.step("a", report=FULL)
    story.step("c", report=FULL)
    for index in range(6):
        story.submit(f"later{index}")
    story.now_s = 4.9
    assert story.handle(DispatcherTick(4.9)).commands == []
    story.now_s = 5.0
    story.handle(DispatcherTick(5.0))
    assert story.core.backlog.slice(0, 1)[0].request.request_id == "r"
    [place, *_] = story.step("c").of(PlaceOnWorker)
    assert (place.request.request_id, place.output_token_ids, place.expects_handover) == ("r", (1,), False)
    assert story.core.requests[place.request.request_id].replay_count == 0
    assert story.core.move_counts == {"replayed": 1}


def test_a_new_worker_that_dies_or_restarts_meanwhile_is_not_waited_for() -> None:
    for keys in ([key("a")], [key("a"), key("b", 2)]):
        story = Story("a")
        story.merge("ab")
        story.submit("r")
        story.move("a", "r", "b")
        [place] = story.adopt(*keys).of(PlaceOnWorker)
        assert (place.worker, place.expects_handover) == (key("a"), False)


def test_a_request_may_move_on_before_its_new_worker_has_sent_anything() -> None:
    story = Story("a", "b", "c")
    story.submit("r")
    story.step("a", {"r": [1]})
    assert story.move("a", "r", "b").places == [("r", "b")]
    [place] = story.move("b", "r", "c").of(PlaceOnWorker)
    assert (place.worker, place.attempt, place.output_token_ids) == (key("c"), 3, (1,))


def test_a_request_that_workers_hand_over_endlessly_fails() -> None:
    story = Story("a", "b", limits=Limits(replay_limit=2))
    story.submit("r")
    errors: dict[str, str] = {}
    for _ in range(200):
        if not story.core.requests:
            break
        worker = story.core.requests[next(iter(story.core.requests))].worker
        assert worker is not None
        answer = story.move(worker.worker_id, "r", "b" if worker.worker_id == "a" else "a")
        errors |= answer.errors
    assert errors == {"r": "Unavailable"}


def test_moves_do_not_count_as_replays_and_a_loss_after_one_does() -> None:
    story = Story("a", "b", limits=Limits(replay_limit=1))
    story.submit("r")
    for source, target in ("ab", "ba", "ab"):
        story.move(source, "r", target)
    assert story.lose("b").places == [("r", "a")]
    assert story.lose("a").errors == {"r": "Unavailable"}


def test_a_request_ends_by_cancel_deadline_or_shutdown_while_it_is_between_workers() -> None:
    story = Story("a")
    for name in ("cancelled", "late", "given up"):
        story.submit(name, deadline_at_s=3.0 if name == "late" else 1000.0)
        story.move("a", name, "b")
    cancelled = story.handle(Withdrawn(1.0, RequestId("cancelled"), "gone"))
    assert cancelled.errors == {"cancelled": "Cancelled"}
    assert not cancelled.of(AbortOnWorker)
    story.now_s = 3.0
    late = story.handle(DispatcherTick(3.0))
    assert late.errors == {"late": "DeadlineExceeded"}
    [fail] = late.of(Fail)
    assert fail.facts.queue_s == 0.0  # time between workers is not backlog time
    assert story.handle(TimeIsUp(3.1)).errors == {"given up": "Unavailable"}
    story.merge("a", "b")
    assert story.connect("b").commands == []
    assert not story.core.requests


def test_a_worker_lost_after_a_move_replays_with_the_tokens_of_both() -> None:
    story = Story("a", "b", "c")
    story.submit("r")
    story.step("a", {"r": [1]})
    story.move("a", "r", "b")
    story.step("b", {"r": [2]})
    [place] = story.lose("b").of(PlaceOnWorker)
    assert (place.output_token_ids, place.expects_handover) == ((1, 2), False)


def test_logprobs_keep_their_requests_over_a_move() -> None:
    story = Story("a", "b")
    story.submit("r", logprobs=1)
    story.step("a", {"r": [1]}, logprobs=["l1"])
    old = story.handle_of("r")
    story.move("a", "r", "b")
    story.raw_step("a", {old: [5]}, logprobs=["stale"])
    answer = story.step("b", {"r": [2]}, logprobs=["l2"])
    assert [c.logprobs for c in answer.commands if hasattr(c, "logprobs")] == [["l2"]]  # pyright: ignore[reportAttributeAccessIssue]


# ------------------------------------------------------------------------------------------------- layout


def test_a_former_leader_keeps_its_stream_until_its_requests_have_moved() -> None:
    story = Story("a", "b")
    story.submit("r0")
    story.submit("r1")
    assert story.handle_of("r1") in story.core.fleet.get(key("b")).placed  # pyright: ignore[reportOptionalMemberAccess]
    assert story.merge("ab").commands == []
    assert delivered([story.step("b", {"r1": [1]})], "r1") == [1]
    answer = story.move("b", "r1", "a")
    assert answer.places == [("r1", "a")]
    assert answer.commands[-1] == Disconnect(key("b"))
    assert story.core.fleet.get(key("b")) is None


def test_a_former_leader_without_requests_is_disconnected_at_once() -> None:
    story = Story("a", "b")
    assert story.merge("ab").commands == [Disconnect(key("b"))]


def test_a_former_leader_gets_nothing_new() -> None:
    story = Story("a", "b")
    story.submit("r0")
    story.submit("r1")
    story.merge("ab")
    assert {worker for i in range(5) for _, worker in story.submit(f"n{i}").places} == {"a"}


def test_a_lost_former_leader_is_disconnected_and_its_requests_are_replayed() -> None:
    story = Story("a", "b")
    story.submit("r0")
    story.submit("r1")
    story.merge("ab")
    answer = story.lose("b")
    assert answer.places == [("r1", "a")]
    assert answer.commands[-1] == Disconnect(key("b"))


def test_a_former_leader_that_leads_again_keeps_its_stream() -> None:
    story = Story("a", "b")
    story.submit("r0")
    story.submit("r1")
    story.merge("ab")
    assert story.merge("a", "b").commands == []
    assert story.submit("n").places
    assert {w.key for w in story.core.fleet.usable} == {key("a"), key("b")}


def test_a_refusal_by_a_former_leader_places_the_request_elsewhere_at_once() -> None:
    story = Story("a", "b")
    story.submit("r0")
    story.submit("r1")
    story.merge("ab")
    answer = story.step("b", endings=[Ending(story.handle_of("r1"), None, refused=True)])
    assert answer.places == [("r1", "a")]
    assert story.core.replay_count == 0


def test_a_former_leader_that_leaves_the_layout_is_gone() -> None:
    story = Story("a", "b")
    story.submit("r0")
    story.submit("r1")
    story.merge("ab")
    answer = story.adopt(key("a"))
    assert answer.of(Disconnect) == [Disconnect(key("b"))]
    assert answer.places == [("r1", "a")]


# ------------------------------------------------------------------------------------------------- room


def test_the_backlog_is_placed_in_proportion_to_the_room_that_a_drop_has_made() -> None:
    story = Story("a", "b", "c", routing=RoutingRules(worker_queue_count=1, growth_tokens=0))
    for name in "abc":
        story.step(name, report=FULL)
    for index in range(103):
        story.submit(f"r{index}", prompt=31)  # two blocks each
    assert len(story.core.backlog) == 100
    story.merge("ab", "c")
    room = load(used_block_count=64, block_count=264, running_count=8, max_running_count=200)
    c_room = load(used_block_count=0, block_count=50, running_count=0, max_running_count=100)
    answers = [story.step("c", report=c_room), story.step("a", report=room)]
    # c reports first and is filled. The rest goes to a, which has more room.
    assert Counter(w for answer in answers for _, w in answer.places) == {"a": 75, "c": 25}


def burst_after_a_drop(growth_tokens: int) -> Counter[str]:
    """Where 120 requests of two blocks each go (worker -> count): a leads a pair with 240 blocks, c has 80."""
    story = Story("a", "b", "c", routing=RoutingRules(growth_tokens=growth_tokens))
    story.merge("ab", "c")
    story.step("a", report=load(block_count=240, max_running_count=200))
    story.step("c", report=load(block_count=80, max_running_count=100))
    return Counter(w for i in range(120) for _, w in story.submit(f"r{i}", prompt=31, max_tokens=10_000).places)


def test_a_burst_after_a_drop_spreads_by_capacity_if_requests_grow_into_all_of_it() -> None:
    counts = burst_after_a_drop(growth_tokens=10_000)
    assert abs(counts["a"] - 90) <= 2
    assert counts.total() == 120


def test_a_burst_after_a_drop_spreads_evenly_if_all_have_enough_memory() -> None:
    counts = burst_after_a_drop(growth_tokens=0)
    assert abs(counts["a"] - 80) <= 2
    assert counts.total() == 120


def test_no_group_gets_more_than_its_maximum_batch_however_much_room_it_has() -> None:
    story = Story("a", "b", "c", routing=RoutingRules(worker_queue_count=1, growth_tokens=0))
    story.merge("ab", "c")
    story.step("a", report=load(block_count=10_000, max_running_count=16))
    story.step("c", report=load(block_count=10_000, max_running_count=8))
    places = [p for i in range(100) for p in story.submit(f"r{i}").places]
    assert Counter(w for _, w in places) == {"a": 16, "c": 8}
    assert len(story.core.backlog) == 76
    handed_over = load(block_count=10_000, running_count=20, max_running_count=16)
    assert story.step("a", report=handed_over).places == [("r24", "a")]  # one may queue, so that it never idles


def withdraw(story: Story, name: str) -> list[AbortOnWorker]:
    return story.handle(Withdrawn(story.now_s, RequestId(name), "the client disconnected")).of(AbortOnWorker)


def test_a_request_that_was_handed_over_before_its_abort_arrived_is_not_resubmitted() -> None:
    story = Story("a", "b")
    story.submit("r", prompt=20)
    story.step("a", {"r": [5, 6]})
    old = story.handle_of("r")
    assert withdraw(story, "r") == [AbortOnWorker(key("a"), old)]
    assert story.raw_step("a", {old: [7]}, endings=[Ending(old, None, moved_to="b")]).commands == []


def test_a_request_that_ends_between_two_workers_is_not_submitted_to_the_second() -> None:
    story = Story("a", limits=Limits(move_wait_s=5.0))
    story.submit("r", prompt=20)
    story.move("a", "r", "b")
    assert withdraw(story, "r") == []
    assert story.core.moving_count == 0
    story.adopt(key("a"), key("b"))
    assert story.connect("b").of(PlaceOnWorker) == []


def test_a_former_leader_is_disconnected_once_its_last_request_is_aborted() -> None:
    story = Story("a", "b")
    story.submit("r", prompt=20)
    withdraw(story, "r")
    assert [d.worker for d in story.merge("ba").of(Disconnect)] == [key("a")]

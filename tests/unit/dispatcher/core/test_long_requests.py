"""Requests too long for one instance wait in their own queue, in order, for a group that can hold them."""

from ballast.common.errors import InvalidRequest, Overloaded
from ballast.common.ids import RequestId
from ballast.common.reach import Reach
from ballast.common.sampling import FinishReason
from services.dispatcher.core.events import DispatcherTick, Ending, Fail, PlaceOnWorker, ReachChanged, Refuse, Withdrawn
from services.dispatcher.core.limits import Limits
from tests.support.dispatcher_core import Answer, Story, load

ALONE = 64 * 16  # tokens
PAIR = load(block_count=400)


def story(*workers: str, group_tokens: int = 6000, limits: Limits | None = None) -> Story:
    told = Story(*workers, limits=limits)
    told.handle(ReachChanged(0.0, Reach(ALONE, group_tokens, 2, max(2, len(workers)))))
    return told


def paired(told: Story) -> Answer:
    """Merge workers a and b into a pair with 400 blocks; return the answer to its first report."""
    told.merge("ab", "c")
    return told.step("a", report=PAIR)


def test_a_long_request_waits_separately_and_delays_no_other() -> None:
    told = story("a", "b", "c")
    assert told.submit("long", prompt=ALONE, max_tokens=500).commands == []
    assert told.submit("short").places != []
    traffic = told.core.traffic(1.0)
    assert (traffic.queued_count, traffic.queued_tokens, traffic.minute_count) == (0, 0, 1)
    assert (traffic.long.count, traffic.long.prompt_tokens) == (1, ALONE)
    assert ALONE + 1 <= traffic.long.need_tokens <= ALONE + 501
    assert paired(told).places == [("long", "a")]
    assert told.core.traffic(1.0).long.count == 0


def test_a_request_that_no_group_holds_is_refused_with_the_limit() -> None:
    told = story("a", "b")
    (refusal,) = told.submit("huge", prompt=6000, max_tokens=1).of(Refuse)
    assert isinstance(refusal.error, InvalidRequest)
    assert "max_model_len 6000" in refusal.error.why
    assert told.submit("fits", prompt=5999, max_tokens=4000).commands == [], "only the prompt must fit, not max_tokens"


def test_without_a_reach_nothing_waits() -> None:
    told = Story("a", "b")
    assert told.submit("long", prompt=2 * ALONE).errors == {"long": "InvalidRequest"}


def test_a_group_has_one_long_request_and_the_others_wait_in_order() -> None:
    told = story("a", "b", "c")
    for number in range(10):
        told.submit(f"long{number}", prompt=4 * ALONE, max_tokens=10)
    placed = [name for name, _ in paired(told).places]
    for number in range(10):
        assert placed == [f"long{number}"]
        placed = [name for name, _ in told.finish("a", f"long{number}", PAIR).places]
    assert placed == []


def test_shorter_long_requests_share_half_of_a_large_group() -> None:
    told = story("a", "b", "c")
    for number in range(3):
        told.submit(f"long{number}", prompt=ALONE + 16 * 20, max_tokens=10)
    assert [name for name, _ in paired(told).places] == ["long0", "long1"]


def test_others_go_elsewhere_while_its_prompt_is_computed() -> None:
    told = story("a", "b", "c")
    told.submit("long", prompt=2 * ALONE, max_tokens=100)
    assert paired(told).places == [("long", "a")]
    told.step("c", report=load(used_block_count=40, running_count=4))
    assert told.submit("first").places == [("first", "c")]
    told.step("a", {"long": [7]}, report=PAIR)
    assert told.submit("second").places == [("second", "a")]


def test_a_client_that_leaves_while_its_group_forms() -> None:
    told = story("a", "b", "c")
    told.submit("long", prompt=2 * ALONE)
    (gone,) = told.handle(Withdrawn(0.0, RequestId("long"), "gone")).of(Fail)
    assert gone.request_id == "long"
    assert told.core.traffic(1.0).long.count == 0
    assert paired(told).places == []


def test_a_request_that_outgrows_its_instance_waits_with_its_answer() -> None:
    told = story("a", "b", "c")
    ((_, where),) = told.submit("grows", prompt=ALONE - 2, max_tokens=500).places
    told.step(where, {"grows": [7, 7]})
    full = Ending(told.handle_of("grows"), FinishReason.ERROR, error="outgrown")
    assert told.step(where, endings=[full]).commands == []
    assert told.core.traffic(1.0).long.count == 1
    (place,) = paired(told).of(PlaceOnWorker)
    assert place.output_token_ids == (7, 7)


def test_losing_a_member_that_runs_the_long_request() -> None:
    told = story("a", "b", "c")
    told.submit("long", prompt=2 * ALONE)
    paired(told)
    told.adopt()
    assert told.core.traffic(1.0).long.count == 1, "it waits for the next group"


def test_reach_shrinks_below_a_waiting_request() -> None:
    told = story("a", "b", "c")
    told.submit("long", prompt=4000)
    told.submit("shorter", prompt=2000)
    assert told.handle(ReachChanged(1.0, Reach(ALONE, 3000, 2, 2))).commands == [], "lost instances may return"
    assert told.core.next_timer_s() == 5.0
    answer = told.handle(DispatcherTick(5.0))
    assert answer.errors == {"long": "Overloaded"}
    (failed,) = answer.of(Fail)
    assert "3000" in str(failed.error)
    assert told.core.traffic(1.0).long.count == 1


def test_a_late_reach_applies_to_requests_that_already_wait() -> None:
    told = Story("a")
    told.step("a", report=load(used_block_count=64, running_count=8, waiting_count=2))
    told.submit("long", prompt=ALONE)
    assert len(told.core.backlog) == 1
    told.handle(ReachChanged(0.0, Reach(ALONE, 4000, 2, 2)))
    assert (len(told.core.backlog), len(told.core.long)) == (0, 1)


def test_waiting_for_a_group_has_a_limit() -> None:
    told = story("a", "b", limits=Limits(long_wait_s=60.0))
    told.submit("long", prompt=2 * ALONE)
    assert told.core.next_timer_s() == 60.0
    told.now_s = 60.0
    (failed,) = told.handle(DispatcherTick(60.0)).of(Fail)
    assert isinstance(failed.error, Overloaded)
    assert failed.error.retry_after_s == 60.0


def test_limits_are_those_of_the_backlog() -> None:
    told = story("a", limits=Limits(max_queued_token_count=5000))
    assert told.submit("one", prompt=3000).commands == []
    assert told.submit("two", prompt=3000).errors == {"two": "Overloaded"}

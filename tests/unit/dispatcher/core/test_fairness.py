"""No request starves: callers alternate according to their tokens, and classes that have waited long are promoted."""

import random

import pytest

from ballast.common.ids import RequestId
from ballast.common.sampling import PriorityClass, SamplingParams
from services.dispatcher.core.backlog import Backlog, DrainRate, Order
from services.dispatcher.core.events import Request
from services.dispatcher.core.limits import Limits, too_full
from services.dispatcher.core.tracked import Tracked
from tests.support.dispatcher_core import Story, key, load

DEFAULT, INTERACTIVE, BATCH = PriorityClass.DEFAULT, PriorityClass.INTERACTIVE, PriorityClass.BATCH


class Waiting:
    def __init__(self, lift_s: float = 1e9) -> None:
        self.backlog = Backlog(Order.FIRST_COME, lift_s)
        self._serial = 0
        self.now_s = 0.0

    def come(self, caller: str, count: int = 1, prompt: int = 10, priority: PriorityClass = DEFAULT) -> list[Tracked]:
        made: list[Tracked] = []
        for _ in range(count):
            self._serial += 1
            request = Request(
                request_id=RequestId(f"{caller}-{self._serial}"),
                prompt_token_ids=[5] * prompt,
                sampling=SamplingParams(),
                priority=priority,
                deadline_at_s=1e9,
                caller=caller,
            )
            made.append(Tracked(request=request, serial=self._serial, arrived_at_s=self.now_s, queued_at_s=self.now_s))
            self.backlog.add(made[-1])
        self.backlog.check()
        return made

    def go(self, count: int) -> list[str]:
        """Serve the next `count` requests; return their callers."""
        callers: list[str] = []
        for _ in range(count):
            [tracked] = self.backlog.slice(0, 1, self.now_s)
            expected = self.backlog.slice(0, 5, self.now_s)[0]
            assert tracked is expected
            self.backlog.serve(tracked)
            self.backlog.check()
            callers.append(tracked.request.caller)
        return callers


def test_a_flood_delays_only_itself() -> None:
    made = Waiting()
    made.come("flood", 1000)
    made.go(10)
    first, *_ = made.come("few", 3)
    assert made.backlog.count_before(first) <= 1
    served = made.go(6)
    assert served.count("few") == 3
    assert "few" in served[:2]
    assert made.go(1) == ["flood"]


def test_callers_alternate_by_tokens_and_not_by_requests() -> None:
    made = Waiting()
    made.come("long", 50, prompt=100)
    made.come("short", 500, prompt=10)
    served = made.go(110)
    assert served.count("short") * 10 == pytest.approx(served.count("long") * 100, abs=100)


def test_answers_count_once_they_are_known() -> None:
    made = Waiting()
    much, *_ = made.come("much", 10)
    made.come("little", 10)
    made.backlog.serve(much)
    assert made.go(1) == ["little"]
    much.output_token_ids = [7] * 30
    made.backlog.end(much)
    assert made.go(3) == ["little"] * 3


def test_an_idle_caller_accumulates_no_credit() -> None:
    made = Waiting()
    made.come("always", 200)
    made.go(100)
    made.come("later", 100)
    served = made.go(40)
    assert served.count("later") in (20, 21)


def test_a_returned_request_is_not_charged_again() -> None:
    """A request returns to the front of the queue after its worker was lost or had no room."""
    made = Waiting()
    lost, *_ = made.come("a", 5)
    made.come("b", 5)
    assert made.go(1) == ["a"]
    lost.attempt = 1
    made.backlog.add(lost)
    assert made.backlog.slice(0, 1) == [lost]


def test_a_class_that_has_waited_alternates_with_the_one_above() -> None:
    made = Waiting(lift_s=10.0)
    made.come("old", 20, priority=BATCH)
    made.come("pours", 200, priority=INTERACTIVE)
    assert made.go(20) == ["pours"] * 20
    made.now_s = 11.0
    made.come("pours", 100, priority=INTERACTIVE)
    served = made.go(20)
    assert 9 <= served.count("old") <= 11
    made.come("pours", 100, priority=INTERACTIVE)
    assert len(made.backlog.slice(0, 500, 11.0)) == len(made.backlog), "every request is queued exactly once"
    assert len({tracked.serial for tracked in made.backlog}) == len(made.backlog)


def test_a_slice_has_the_order_of_service() -> None:
    rng = random.Random(3)
    for _ in range(30):
        made = Waiting(lift_s=5.0)
        for _ in range(rng.randrange(2, 40)):
            made.now_s += rng.random()
            made.come(
                rng.choice("abc"), rng.randrange(1, 4), rng.randrange(1, 50), rng.choice([DEFAULT, INTERACTIVE, BATCH])
            )
        seen = made.backlog.slice(0, 10**6, made.now_s)
        assert len(seen) == len(made.backlog) == len({tracked.serial for tracked in seen})
        assert made.backlog.slice(3, 4, made.now_s) == seen[3:7]
        while len(made.backlog):
            made.go(1)


def refused(made: Waiting, newcomer: Tracked, limits: Limits) -> str:
    error = too_full(newcomer, made.backlog, limits, DrainRate(), 0.0)
    if error is not None:
        made.backlog.remove(newcomer)
    return "" if error is None else error.why


def test_a_caller_fills_its_share_and_others_are_admitted() -> None:
    made, limits = Waiting(), Limits(max_queued_request_count=100)
    made.come("flood", 100)
    assert "100 requests are waiting" in refused(made, made.come("flood")[0], limits)
    for _ in range(8):
        assert refused(made, made.come("few")[0], limits) == ""
    assert "its share while 2 callers wait" in refused(made, made.come("flood")[0], limits)
    for number in range(300):
        refused(made, made.come(f"one of many {number}")[0], limits)
        assert len(made.backlog) <= 200, "at most twice the limit"


def flooded() -> Story:
    """A worker whose batch and queue are full with requests of one caller."""
    story = Story()
    story.adopt(key("w"))
    story.connect("w")
    for number in range(10):
        story.submit(f"flood-{number}", caller="flood")
    story.step("w", report=load(used_block_count=64, running_count=8, waiting_count=2, busiest_caller_count=8))
    story.submit("waiting", caller="flood")
    assert len(story.core.backlog) == 3
    return story


def test_a_caller_with_few_requests_is_placed_on_a_full_worker() -> None:
    story = flooded()
    assert story.submit("few-1", caller="few").places == [("few-1", "w")]
    assert len(story.core.backlog) == 3, "the flood's requests wait"
    placed = [story.submit(f"few-{number}", caller="few").places for number in range(2, 9)]
    assert sum(map(len, placed)) <= 3, "until it has half as many as the flood"


def test_no_blocks_are_claimed_from_many_callers_or_for_an_unknown_one() -> None:
    story = flooded()
    assert story.submit("unknown", caller="").places == []
    story.step("w", report=load(used_block_count=64, running_count=8, waiting_count=2, busiest_caller_count=1))
    assert story.submit("few-1", prompt=200, caller="few").places == []

"""The stories of requests: the core records moments, and the chronicle stores and counts them."""

import asyncio
import itertools

import pytest
import structlog.testing
from prometheus_client import CollectorRegistry

from ballast.common.errors import InvalidRequest
from ballast.common.ids import DispatcherId, Incarnation, RequestId
from ballast.common.sampling import FinishReason
from services.dispatcher.core.events import Finish
from services.dispatcher.core.story import Moment, What
from services.dispatcher.core.story import Story as RequestStory
from services.dispatcher.shell.chronicle import Chronicle, quantile
from services.dispatcher.shell.dispatcher import DispatcherShell
from services.dispatcher.shell.links import Identity
from services.dispatcher.shell.metrics import DispatcherMetrics
from tests.support.dispatcher_core import FULL, Answer, Story, request


class StoppedClock:
    def now_s(self) -> float:
        return 0.0


def moments(answer: Answer) -> list[tuple[str, str, int]]:
    """(moment, worker, token count) of the finished request's story."""
    [ended] = answer.of(Finish)
    return [(m.what.value, m.worker_id, m.token_count) for m in ended.facts.story.moments]


def test_a_replayed_requests_story_shows_where_it_was_lost_and_the_clients_wait() -> None:
    story = Story("a", "b")
    story.submit("r1")
    story.now_s = 1.0
    [first] = story.core.requests.values()
    assert first.worker is not None
    lost, other = (first.worker.worker_id, "b" if first.worker.worker_id == "a" else "a")
    story.step(lost, {"r1": [5, 6]})
    story.now_s = 2.0
    story.lose(lost)
    story.now_s = 2.5
    story.step(other, {"r1": [7]})
    story.now_s = 2.6
    answer = story.finish(other, "r1")
    assert moments(answer) == [
        ("placed", lost, 0),
        ("first_token", lost, 0),
        ("lost", lost, 2),
        ("placed", other, 2),
        ("resumed", other, 2),
    ]
    [ended] = answer.of(Finish)
    facts = ended.facts
    assert facts.replay_count == 1
    assert facts.worker_id == other
    assert facts.ttft_s == 1.0
    assert (facts.longest_gap_s, facts.longest_gap_token) == (1.5, 2)
    assert facts.story.moments[-1].gap_s == 1.5
    assert "connection reset" in facts.story.moments[2].detail


def test_a_move_is_recorded_with_the_layout_in_force() -> None:
    story = Story("a", "b")
    story.submit("r1")
    [first] = story.core.requests.values()
    assert first.worker is not None
    here = first.worker.worker_id
    there = "b" if here == "a" else "a"
    story.step(here, {"r1": [5]})
    story.move(here, "r1", there)
    story.step(there, {"r1": [6]})
    answer = story.finish(there, "r1")
    assert [what for what, _, _ in moments(answer)] == ["placed", "first_token", "moved", "resumed"]
    [ended] = answer.of(Finish)
    assert ended.facts.move_count == 1
    assert ended.facts.story.moments[-1].detail == "epoch 1, test"


def test_the_story_of_one_request_is_bounded() -> None:
    told = RequestStory()
    for number in range(100):
        told.add(Moment(float(number), What.PLACED, 0))
    assert len(told.moments) == 64
    assert told.left_out_count == 36


def test_why_a_request_waits_is_recorded_on_arrival() -> None:
    story = Story("a", "b")
    story.step("a", report=FULL)
    story.step("b", report=FULL)
    chronicle = Chronicle(story.core, keep_count=4, log_each=False)
    for number in range(8):
        story.submit(f"r{number}")
        chronicle.opened(RequestId(f"r{number}"), 0.0)
    waiting = [t for t in story.core.requests.values() if t.worker is None]
    assert waiting, "two full workers cannot take eight requests"
    assert waiting[-1].story.moments[0].what is What.WAITING
    expected = f"behind {len(waiting) - 1} others; the emptiest of 2 leading workers has 100% of its KV in use"
    assert waiting[-1].story.moments[0].detail == expected


async def test_a_refused_duplicate_changes_no_history() -> None:
    story = Story("a")
    story.step("a", report=FULL)
    chronicle = Chronicle(story.core, keep_count=4, log_each=False)
    shell = DispatcherShell(
        story.core,
        identity=Identity(DispatcherId("d"), Incarnation(1)),
        clock=StoppedClock(),
        metrics=DispatcherMetrics(story.core, CollectorRegistry()),
        chronicle=chronicle,
        on_bug=lambda bug: pytest.fail(str(bug)),
        client_stall_timeout_s=1.0,
    )
    for number in range(8):
        story.submit(f"r{number}")
    shell.open(request("r7"))
    waiting = story.core.requests[RequestId("r7")]
    assert waiting.worker is None
    assert not waiting.story.moments


def test_a_limited_number_of_ended_requests_is_stored_without_prompts() -> None:
    story = Story("a")
    chronicle = Chronicle(story.core, keep_count=3, log_each=False)
    for number in range(5):
        story.submit(f"r{number}")
        story.step("a", {f"r{number}": [1, 2]})
        [ended] = story.finish("a", f"r{number}").of(Finish)
        chronicle.ended(ended, float(number))
    assert chronicle.find(RequestId("r1"), 9.0) is None
    account = chronicle.find(RequestId("r4"), 9.0)
    assert account is not None
    assert account.state == FinishReason.LENGTH.value
    assert not any(hasattr(account.facts, name) for name in ("request", "prompt_token_ids", "output_token_ids"))


def test_ended_requests_are_listed_once_and_their_number_is_bounded() -> None:
    story = Story("a")
    chronicle = Chronicle(story.core, keep_count=0, log_each=False)
    endings: list[Finish] = []
    for number in range(3):
        story.submit(f"r{number}")
        story.step("a", {f"r{number}": [1, 2]})
        endings += story.finish("a", f"r{number}").of(Finish)
        chronicle.ended(endings[-1], float(number))
    assert [past.completion_token_count for past in chronicle.past_after(0)] == [2, 2, 2]
    assert len(chronicle.past_after(2)) == 1
    assert chronicle.past_after(chronicle.past_count) == []
    for _ in range(9000):
        chronicle.ended(endings[0], 4.0)
    assert len(chronicle.past_after(3)) == 8192 < chronicle.past_count - 3


def test_a_running_request_is_not_hidden_by_a_refused_one_of_the_same_id() -> None:
    story = Story("a")
    chronicle = Chronicle(story.core, keep_count=3, log_each=False)
    story.submit("r1")
    chronicle.record_refused(RequestId("r1"), InvalidRequest("prompt", "is empty"), None, 0.0)
    account = chronicle.find(RequestId("r1"), 1.0)
    assert account is not None
    assert account.state == "running"


def test_current_latencies_include_waiting_requests() -> None:
    story = Story("a")
    chronicle = Chronicle(story.core, keep_count=3, log_each=False)
    story.submit("r1")
    story.now_s = 4.0
    story.submit("r2")
    story.step("a", {"r2": [1]})
    story.now_s = 5.0
    story.step("a", {"r2": [2]})
    times = chronicle.times(6.0)
    assert times.first_token_count == 1
    assert times.longest_wait_s == 6.0, "r1 arrived at 0 and has no token yet"
    assert times.tpot_p50_s == pytest.approx(1.0)
    assert chronicle.times(100.0).first_token_count == 0


def test_quantiles_are_values_that_occurred() -> None:
    assert quantile([], 0.99) == 0.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.99) == 4.0


def test_a_wrong_request_is_counted_under_a_bounded_id() -> None:
    story = Story("a")
    chronicle = Chronicle(story.core, keep_count=3, log_each=False)
    chronicle.record_refused(RequestId("x" * 5000), InvalidRequest("request_id", "too long"), None, 0.0)
    account = chronicle.find(RequestId("x" * 128), 0.0)
    assert account is not None
    assert account.state == "invalid"


async def test_log_lines_of_many_endings_are_written_a_few_per_turn_of_the_event_loop() -> None:
    story = Story("a")
    chronicle = Chronicle(story.core, keep_count=3, log_each=True)
    wrong = InvalidRequest("prompt", "is empty")
    with structlog.testing.capture_logs() as lines:
        for number in range(100):
            chronicle.record_refused(RequestId(f"r{number}"), wrong, None, 0.0)
        assert not lines, "ending a request does not wait for its log line"
        writing = asyncio.create_task(chronicle.write_lines())
        counts = [0]
        while counts[-1] < 90:
            await asyncio.sleep(0)
            counts.append(len(lines))
        writing.cancel()
        assert max(after - before for before, after in itertools.pairwise(counts)) <= 16
        chronicle.write_the_rest()
    assert [line["request_id"] for line in lines] == [f"r{number}" for number in range(100)]


def test_unwritten_log_lines_are_bounded() -> None:
    chronicle = Chronicle(Story("a").core, keep_count=3, log_each=True)
    with structlog.testing.capture_logs() as lines:
        for number in range(9000):
            chronicle.record_refused(RequestId(f"r{number}"), InvalidRequest("prompt", "is empty"), None, 0.0)
        assert 0 < len(lines) < 9000
        chronicle.write_the_rest()
    assert len(lines) == 9000

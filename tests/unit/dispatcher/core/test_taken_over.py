"""Requests that clients resume at this dispatcher after another one was serving them."""

from ballast.common.sampling import FinishReason, PriorityClass
from services.dispatcher.core.events import Deliver, Ending, Finish, PlaceOnWorker
from services.dispatcher.core.limits import Limits
from services.dispatcher.core.story import What
from tests.support.dispatcher_core import Story, load

FULL_QUEUE = load(used_block_count=64, running_count=8, waiting_count=2, waiting_block_count=2)


def test_a_resumed_request_continues_after_its_clients_tokens() -> None:
    story = Story("a")
    [place] = story.submit("r", answer=[5, 6, 7], max_tokens=5, taken_over=True).of(PlaceOnWorker)
    assert (place.output_token_ids, place.delivered_text_chars, place.attempt) == ((5, 6, 7), 3, 1)
    assert not place.expects_handover
    answer = story.step("a", {"r": [8, 9]}, endings=[Ending(story.handle_of("r"), FinishReason.LENGTH)])
    [delivered] = answer.of(Deliver)
    assert list(delivered.token_ids) == [8, 9]
    [finish] = answer.of(Finish)
    assert finish.facts.completion_token_count == 5
    assert finish.facts.ttft_s is None  # unknown to this dispatcher
    assert [moment.what for moment in finish.facts.story.moments][:2] == [What.TAKEN_OVER, What.PLACED]
    assert story.core.taken_over_count == 1


def test_losing_a_worker_afterwards_costs_no_token() -> None:
    story = Story("a", "b")
    [first] = story.submit("r", answer=[5, 6], taken_over=True).of(PlaceOnWorker)
    story.step(first.worker.worker_id, {"r": [7]}, texts=["x"])
    [second] = story.lose(first.worker.worker_id).of(PlaceOnWorker)
    assert (second.output_token_ids, second.delivered_text_chars, second.attempt) == ((5, 6, 7), 3, 2)


def test_a_resumed_request_precedes_its_own_class_but_no_higher_one() -> None:
    story = Story("a")
    for index in range(8):
        story.submit(f"running{index}")
    story.step("a", report=FULL_QUEUE)
    story.submit("new")
    story.submit("was served", answer=[1], taken_over=True)
    story.submit("was served later", answer=[1], taken_over=True)
    story.submit("urgent", priority=PriorityClass.INTERACTIVE)
    story.submit("unproven", answer=[1])  # the state server has no record of it
    answer = story.step("a")
    expected = ["urgent", "was served", "was served later", "new", "unproven"]
    assert [name for name, _ in answer.places] == expected


def test_resumed_requests_have_a_queue_limit_of_their_own() -> None:
    story = Story("a", limits=Limits(max_queued_request_count=2))
    for index in range(8):
        story.submit(f"running{index}")
    story.step("a", report=FULL_QUEUE)
    for name in ("1", "2"):
        assert story.submit(name).errors == {}
    assert story.submit("3").errors == {"3": "Overloaded"}
    assert story.submit("4", answer=[1]).errors == {"4": "Overloaded"}
    for name in ("5", "6"):
        assert story.submit(name, answer=[1], taken_over=True).errors == {}
    assert story.submit("7", answer=[1], taken_over=True).errors == {"7": "Overloaded"}
    assert story.core.taken_over_count == 2

"""Offline requests have their own queue and are placed only on workers that ask for them."""

from ballast.common.sampling import FinishReason, PriorityClass
from services.dispatcher.core.events import AbortOnWorker, Ending, PlaceOnWorker, Refuse
from services.dispatcher.core.limits import Limits
from tests.support.dispatcher_core import Answer, Story, key, load

BATCH = PriorityClass.BATCH


def offline(story: Story, name: str, *, prompt: int = 16) -> Answer:
    return story.submit(name, prompt=prompt, priority=BATCH)


def test_a_full_feed_refuses_offline_requests_and_no_other() -> None:
    story = Story(limits=Limits(max_queued_request_count=2, max_offline_queued_count=3))
    for index in range(3):
        assert not offline(story, f"b{index}", prompt=5000).errors
    refused = offline(story, "one more").of(Refuse)
    assert "--max-offline-queued" in str(refused[0].error)
    assert not story.submit("person", priority=PriorityClass.INTERACTIVE).errors
    assert not story.submit("another").errors
    assert story.submit("a third").errors == {"a third": "Overloaded"}, "the backlog has its own limit"


def test_offline_requests_count_neither_as_traffic_nor_as_backlog() -> None:
    story = Story("a")
    story.step("a", report=load(offline_wanted_tokens=0))
    before = story.core.traffic(story.now_s)
    offline(story, "b")
    assert story.core.traffic(story.now_s) == before
    assert (len(story.core.backlog), len(story.core.feed)) == (0, 1)


def test_a_worker_gets_as_many_prompt_tokens_as_it_wants() -> None:
    story = Story("a")
    for index in range(5):
        assert not offline(story, f"b{index}", prompt=40).places, "no worker has asked for offline tokens"
    answer = story.step("a", report=load(offline_wanted_tokens=100))
    assert answer.places == [("b0", "a"), ("b1", "a"), ("b2", "a")], "the third starts within the 100 tokens wanted"
    assert not story.step("a", report=load(offline_wanted_tokens=100), seen_handle=0).places, (
        "the report is older than those placements"
    )
    assert story.step("a", report=load(offline_wanted_tokens=60)).places == [("b3", "a"), ("b4", "a")]


def test_the_worker_that_wants_most_is_served_first() -> None:
    story = Story("a", "b")
    story.step("a", report=load(offline_wanted_tokens=10))
    story.step("b", report=load(offline_wanted_tokens=50))
    assert [offline(story, f"b{index}", prompt=20).places for index in range(5)] == [
        [("b0", "b")],
        [("b1", "b")],
        [("b2", "a")],
        [("b3", "b")],
        [],
    ]


def test_offline_requests_do_not_change_routings_view_of_a_worker() -> None:
    story = Story("a")
    story.step("a", report=load(offline_wanted_tokens=1000))
    worker = next(iter(story.core.fleet))
    before = worker.view()
    assert offline(story, "b", prompt=500).places
    assert worker.view() == before


def test_offline_requests_of_a_lost_worker_go_to_another_one() -> None:
    story = Story("a", "b")
    story.step("a", report=load(offline_wanted_tokens=10))
    assert offline(story, "b0").places == [("b0", "a")]
    assert not story.lose("a").places
    assert [t.request.request_id for t in story.core.feed] == ["b0"]
    (place,) = story.step("b", report=load(offline_wanted_tokens=10)).of(PlaceOnWorker)
    assert (place.request.request_id, place.attempt) == ("b0", 2)


def test_an_offline_request_that_no_worker_can_hold_fails() -> None:
    story = Story("a")
    story.step("a", report=load(offline_wanted_tokens=10))
    assert offline(story, "huge", prompt=64 * 16).errors == {"huge": "InvalidRequest"}


def test_times_of_offline_requests_are_in_no_figure_of_online_ones() -> None:
    story = Story("a")
    story.step("a", report=load(offline_wanted_tokens=100))
    offline(story, "b")
    story.submit("person")
    story.step("a", {"b": [1, 2, 3], "person": [4, 5]})
    relay = story.core.relay
    assert (relay.offline_token_count, relay.token_count) == (3, 2)
    assert len(relay.recent.ttfts_s(0.0)) == 1
    assert story.core.traffic(story.now_s).open_tokens == 2


def test_a_leaving_worker_does_not_wait_for_offline_requests() -> None:
    """Offline requests are recalled and continue elsewhere; online requests stay."""
    story = Story("a", "b")
    story.step("a", report=load(offline_wanted_tokens=1000))
    assert offline(story, "b0").places == [("b0", "a")]
    story.submit("online")
    handle = story.handle_of("b0")
    story.step("a", tokens={"b0": [7]})
    left = story.adopt(key("a"), key("b"), draining=[key("a")])
    assert left.of(AbortOnWorker) == [AbortOnWorker(key("a"), handle)]
    assert not story.adopt(key("a"), key("b"), key("c"), draining=[key("a")]).of(AbortOnWorker), "recalled only once"
    story.step("a", endings=[Ending(handle, FinishReason.CANCELLED)], report=load())
    [placed] = story.step("b", report=load(offline_wanted_tokens=1000)).of(PlaceOnWorker)
    assert (placed.request.request_id, placed.output_token_ids) == ("b0", (7,))


def test_without_another_worker_offline_requests_stay_on_a_leaving_one() -> None:
    story = Story("a")
    story.step("a", report=load(offline_wanted_tokens=1000))
    assert offline(story, "b0").places
    assert not story.adopt(key("a"), draining=[key("a")]).of(AbortOnWorker)

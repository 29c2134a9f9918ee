"""Requests that wait on a full worker, new or preempted, are recalled when another worker has room."""

import dataclasses

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import RequestId
from ballast.common.load import LoadReport
from ballast.common.sampling import FinishReason, PriorityClass
from services.dispatcher.core.events import AbortOnWorker, Ending, PlaceOnWorker, Withdrawn
from services.dispatcher.core.placement import PlacementRules
from tests.support.dispatcher_core import FULL, Story, finishes, key, load


def waiting_on_a() -> Story:
    """Request "late" waits in the queue of worker a, and worker b is full as well."""
    story = Story("a", "b", placement=PlacementRules(recall_after_s=0.1))
    story.step("b", report=FULL)
    story.step("a", report=FULL)
    assert story.submit("late").places == [("late", "a")]
    return story


def crowded() -> LoadReport:
    return load(used_block_count=64, running_count=7, waiting_count=1, waiting_block_count=2)


def test_a_waiting_request_is_recalled_when_another_worker_has_room() -> None:
    story = waiting_on_a()
    handle = story.handle_of("late")
    story.now_s = 0.2
    assert not story.step("a", report=crowded()).of(AbortOnWorker), "b is full too"
    story.step("b", report=load())
    asked = story.step("a", report=crowded())
    assert asked.of(AbortOnWorker) == [AbortOnWorker(key("a"), handle)]
    assert not asked.places, "it stays placed on a until a returns it"
    assert not story.step("a", report=crowded()).commands, "recalled only once"
    given_back = story.step("a", endings=[Ending(handle, FinishReason.CANCELLED)], report=FULL)
    assert given_back.places == [("late", "b")]
    assert story.core.replay_count == 0
    assert story.core.recall_count == 1


def test_repeated_recalls_of_a_request_have_growing_intervals() -> None:
    """Whenever the request arrives at the other worker, that worker is full again."""
    story = waiting_on_a()
    asked_at_s: list[float] = []
    begun_s, there, other = 0.0, "a", "b"
    for _ in range(8):
        story.step(other, report=load())
        while not story.step(there, report=crowded()).of(AbortOnWorker):
            story.now_s += 0.05
        asked_at_s.append(story.now_s - begun_s)
        ending = Ending(story.handle_of("late"), FinishReason.CANCELLED)
        assert story.step(there, endings=[ending], report=FULL).places == [("late", other)]
        begun_s, there, other = story.now_s, other, there
    assert asked_at_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 0.8, 0.8, 0.8, 0.8], abs=0.06)


def test_a_recalled_request_that_has_ended_is_not_restarted() -> None:
    story = waiting_on_a()
    story.now_s = 0.2
    story.step("b", report=load())
    assert story.step("a", report=crowded()).of(AbortOnWorker)
    ended = story.step("a", {"late": [1, 2]}, endings=[Ending(story.handle_of("late"), FinishReason.LENGTH)])
    assert finishes(ended) == {"late": "length"}
    assert story.core.recall_count == 0


def test_a_request_with_tokens_or_just_placed_is_not_recalled() -> None:
    story = waiting_on_a()
    story.step("b", report=load())
    story.now_s = 0.05
    assert not story.step("a", report=crowded()).commands, "it has hardly waited"
    story.now_s = 0.2
    story.step("a", {"late": [1]}, report=crowded())
    assert not story.step("a", report=crowded()).commands


def test_a_waiting_offline_request_hides_no_online_one_and_is_not_recalled() -> None:
    story = Story("a", "b", placement=PlacementRules(recall_after_s=0.1))
    story.step("b", report=FULL)
    story.step("a", report=dataclasses.replace(FULL, offline_wanted_tokens=1000))
    assert story.submit("job", priority=PriorityClass.BATCH).places == [("job", "a")]
    assert story.submit("late").places == [("late", "a")]
    story.step("a", {"job": [1]}, preempted=["job"], report=crowded())
    story.now_s = 0.2
    story.step("b", report=load())
    assert story.step("a", report=crowded()).of(AbortOnWorker) == [AbortOnWorker(key("a"), story.handle_of("late"))]
    story.now_s = 9.0
    assert not story.step("a", report=crowded()).of(AbortOnWorker)


# ------------------------------------------------------------------------------------------------- preempted requests


def preempted_on_a() -> Story:
    """Worker a has reported that it preempted request "late" after four tokens; worker b has room."""
    story = waiting_on_a()
    story.step("a", {"late": [1, 2, 3, 4]}, preempted=["late"], report=crowded())
    story.step("b", report=load())
    return story


def asked_back(story: Story, worker: str) -> list[AbortOnWorker]:
    """The recalls that follow a report of `worker` in which a request waits."""
    return story.step(worker, report=crowded()).of(AbortOnWorker)


def give_back(story: Story, worker: str) -> list[tuple[str, str]]:
    """Let `worker` return request "late". Returns the worker on which it is placed next."""
    ending = Ending(story.handle_of("late"), FinishReason.CANCELLED)
    return story.step(worker, endings=[ending], report=FULL).places


def test_a_preempted_request_is_recalled_and_continues_on_another_worker() -> None:
    story = preempted_on_a()
    handle = story.handle_of("late")
    story.now_s = 0.05
    assert not asked_back(story, "a"), "memory may be free in a moment"
    story.now_s = 0.1
    assert asked_back(story, "a") == [AbortOnWorker(key("a"), handle)]
    assert not asked_back(story, "a"), "recalled only once"
    given_back = story.step("a", {"late": [5]}, endings=[Ending(handle, FinishReason.CANCELLED)], report=FULL)
    [place] = given_back.of(PlaceOnWorker)
    assert (place.worker, tuple(place.output_token_ids)) == (key("b"), (1, 2, 3, 4, 5))
    assert story.core.replay_count == 0
    assert story.core.recall_count == 1


def test_a_preempted_request_stays_while_no_worker_has_room() -> None:
    story = preempted_on_a()
    story.step("b", report=FULL)
    for _ in range(40):
        story.now_s += 0.1
        assert not asked_back(story, "a")
    story.step("b", report=load())
    assert asked_back(story, "a")


@pytest.mark.parametrize("word", ["resumed", "a token"])
def test_a_resumed_request_is_not_recalled(word: str) -> None:
    story = preempted_on_a()
    if word == "resumed":
        story.step("a", resumed=["late"], report=crowded())
    else:
        story.step("a", {"late": [5]}, report=crowded())
    story.now_s = 9.0
    assert not asked_back(story, "a")
    story.step("a", preempted=["late"], report=crowded())
    assert not asked_back(story, "a"), "its wait has just begun"
    story.now_s = 9.2
    assert asked_back(story, "a")


def test_a_running_request_without_new_tokens_is_not_recalled() -> None:
    story = waiting_on_a()
    story.step("a", {"late": [1, 2, 3, 4]}, report=crowded())
    story.step("b", report=load())
    story.now_s = 9.0
    assert not asked_back(story, "a")


def test_the_request_preempted_first_is_recalled_first() -> None:
    story = waiting_on_a()
    story.step("a", report=load())
    story.submit("later")
    story.step("a", {"late": [1], "later": [1]}, preempted=["later"], report=crowded())
    story.now_s = 0.1
    story.step("a", preempted=["late"], report=crowded())
    story.step("b", report=load())
    story.now_s = 0.5
    assert [asked.handle for asked in asked_back(story, "a")] == [story.handle_of("later")]
    assert [asked.handle for asked in asked_back(story, "a")] == [story.handle_of("late")]


def test_recalls_between_two_full_workers_become_rarer() -> None:
    """Each worker reports room until the request arrives, and preempts it at once."""
    story = preempted_on_a()
    asked_after_s: list[float] = []
    since_s, there, other = 0.0, "a", "b"
    for _ in range(6):
        story.step(other, report=load())
        while not asked_back(story, there):
            story.now_s += 0.05
        asked_after_s.append(story.now_s - since_s)
        assert give_back(story, there) == [("late", other)]
        story.step(other, preempted=["late"], report=crowded())
        since_s, there, other = story.now_s, other, there
    assert asked_after_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 0.8, 0.8], abs=0.06)


@pytest.mark.parametrize("how", ["ends", "is given back", "moves", "is withdrawn", "is lost"])
def test_an_ended_preempted_request_leaves_no_state(how: str) -> None:
    story = preempted_on_a()
    [worker] = [worker for worker in story.core.fleet if worker.key == key("a")]
    assert list(worker.preempted) == [story.handle_of("late")]
    match how:
        case "ends":
            story.finish("a", "late", FULL)
        case "is given back":
            story.now_s = 0.2
            assert asked_back(story, "a")
            give_back(story, "a")
        case "moves":
            story.move("a", "late", "b")
        case "is withdrawn":
            story.handle(Withdrawn(story.now_s, RequestId("late"), "gone"))
        case _:
            story.lose("a")
    assert not worker.preempted


def test_reports_about_unknown_requests_count_as_stale() -> None:
    story = waiting_on_a()
    story.raw_step("a", {}, preempted=[77], resumed=[78], report=crowded())
    assert story.core.relay.stale_count == 2
    story.lose("a")
    story.raw_step("a", {}, preempted=[77], resumed=[78])
    assert story.core.relay.stale_count == 4


def test_a_waiting_request_without_a_placement_is_detected() -> None:
    story = preempted_on_a()
    [worker] = [worker for worker in story.core.fleet if worker.key == key("a")]
    worker.preempted[77] = 0.0
    with pytest.raises(InvariantViolation, match="wait"):
        story.core.check()

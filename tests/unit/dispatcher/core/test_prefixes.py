"""Among workers with room, requests go where the fewest tokens must be computed before the first token."""

from ballast.common.marks import marks_of
from tests.support.dispatcher_core import Story, key, load

PROMPT = 512
MARKS = marks_of((1,) * PROMPT)
ROOM = {"block_count": 400, "max_running_count": 50, "prefixes_kept_s": 100}


def story_of_two(*, marks: tuple[int, ...] = MARKS, **changes: int) -> Story:
    """Worker a is fuller than b, but has the prompt cached. `changes`: fields of a's load report."""
    story = Story("a", "b")
    story.step("a", report=load(**(ROOM | {"used_block_count": 100, "running_count": 4} | changes)), marks=marks)
    story.step("b", report=load(**ROOM))
    return story


def where(story: Story, *, begins: int = 1) -> str:
    ((_, worker),) = story.submit(f"r{len(story.core.requests)}", prompt=PROMPT + 8, begins=begins).places
    return worker


def test_a_request_goes_to_the_worker_with_its_prefix() -> None:
    assert where(story_of_two()) == "a"
    assert where(story_of_two(), begins=2) == "b", "another prompt"
    assert where(story_of_two(marks=())) == "b"


def test_a_request_does_not_wait_longer_than_its_prefix_saves() -> None:
    assert where(story_of_two(uncomputed_token_count=PROMPT - 1)) == "a"
    assert where(story_of_two(uncomputed_token_count=PROMPT + 1)) == "b"


def test_a_request_waits_for_prompts_that_take_less_than_its_prefix_saves() -> None:
    def beside(uncomputed: int, used: int = 100) -> str:
        busy = story_of_two(
            prompt_token_count=300, max_prompt_token_count=256, uncomputed_token_count=uncomputed, used_block_count=used
        )
        return where(busy)

    assert beside(300) == "a"
    assert beside(PROMPT + 1) == "b"
    assert beside(300, used=390) == "b", "a has no memory left"


def test_a_request_goes_to_a_worker_with_room_to_grow() -> None:
    assert where(story_of_two(used_block_count=390)) == "b"


def test_prefixes_used_before_an_eviction_do_not_count() -> None:
    story = story_of_two()
    story.now_s += 5.0
    story.step("a", report=load(**ROOM, used_block_count=100, running_count=4))
    assert where(story) == "a"
    story.step("a", report=load(**(ROOM | {"prefixes_kept_s": 1}), used_block_count=100, running_count=4))
    story.now_s += 2.0
    story.step("a", report=load(**(ROOM | {"prefixes_kept_s": 1}), used_block_count=100, running_count=4))
    assert where(story, begins=3) == "b"


def test_a_burst_of_the_same_beginning_stays_together_before_any_report() -> None:
    story = story_of_two()
    first = where(story, begins=5)
    others = [where(story, begins=5) for _ in range(3)]
    assert others == [first] * 3


def test_the_backlog_counts_a_common_beginning_once() -> None:
    story = Story("a")
    full = load(block_count=400, used_block_count=400, max_running_count=1, running_count=1, waiting_count=2)
    story.step("a", report=full, marks=(7,))
    for n in range(10):
        story.submit(f"r{n}", prompt=PROMPT + 8)
    backlog = story.core.backlog
    waiting = len(backlog)
    assert waiting >= 7
    assert backlog.token_count == waiting * (PROMPT + 8)
    assert backlog.distinct_token_count == PROMPT + waiting * 8
    assert story.core.traffic(story.now_s).queued_tokens == backlog.distinct_token_count


def test_a_worker_that_leads_again_must_report_before_its_prefixes_count() -> None:
    story = story_of_two()
    story.merge("ba")
    assert story.core.fleet.get(key("a")) is None
    story.merge("a", "b")
    story.connect("a", load(**ROOM, used_block_count=100, running_count=4))
    assert where(story) == "b"

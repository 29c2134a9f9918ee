"""A caller that holds few blocks does not wait behind one that holds nearly all of them."""

from tests.support.worker_core import Driver, greedy
from tests.unit.worker.core.stories import driver, prompt

FLOOD, FEW = 1, 2


def running(made: Driver) -> list[int]:
    return [s.caller for s in made.core.group_scheduler.scheduler.running]


def flooded(block_count: int = 16, max_running_count: int = 32) -> Driver:
    """A driver in which one caller holds all blocks and has more sequences waiting."""
    made = driver(block_count=block_count, block_tokens=4, max_running_count=max_running_count, max_batch_tokens=128)
    for number in range(min(20, max_running_count + 3)):
        made.submit(prompt(3, first=10 * number), greedy(5), caller=FLOOD)
    made.step()
    return made


def test_a_new_sequence_of_another_caller_gets_blocks_at_once() -> None:
    made = flooded()
    count = len(running(made))
    made.submit(prompt(6), greedy(3), caller=FEW)
    made.step()
    assert running(made).count(FEW) == 1
    assert running(made).count(FLOOD) < count
    made.run_to_end()
    made.assert_empty()


def test_a_new_sequence_of_the_same_caller_waits() -> None:
    made = flooded()
    before = running(made)
    made.submit(prompt(6), greedy(3), caller=FLOOD)
    made.step()
    assert running(made) == before


def test_a_new_sequence_takes_a_place_if_places_are_short() -> None:
    made = flooded(block_count=60, max_running_count=4)
    assert running(made) == [FLOOD] * 4
    made.submit(prompt(3), greedy(3), caller=FEW)
    made.step()
    assert sorted(running(made)) == [FLOOD, FLOOD, FLOOD, FEW]
    made.run_to_end()
    made.assert_empty()


def test_a_sequence_admitted_by_a_claim_is_not_the_next_victim() -> None:
    """The flooding caller's sequences grow until no block is free, while the newest sequence is the other caller's."""
    made = flooded()
    few = made.submit(prompt(3), greedy(9), caller=FEW)
    alone = 0
    while not made.received[few].ending:
        made.step()
        alone += FEW not in running(made) and not made.received[few].ending
    assert alone == 0, "the other caller's sequence must not be preempted"
    made.run_to_end()
    made.assert_empty()

"""An instance that serves alone forms its next batch before the tokens of the running batch are known."""

from dataclasses import replace

import pytest

from ballast.common.sampling import FinishReason, Grammar, GrammarKind, PriorityClass, SamplingParams
from services.worker.core.batch import IN_FLIGHT, Slice
from services.worker.core.events import Aborted
from tests.support.worker_core import Driver, greedy, limits, next_token

PROMPT = (1, 2, 3)


def driver(block_count: int = 64, *, block_tokens: int = 4, max_batch_tokens: int = 16) -> Driver:
    bounds = limits(async_scheduling=True, block_tokens=block_tokens, max_batch_tokens=max_batch_tokens)
    made = Driver(bounds, block_count)
    made.open(1)
    return made


def slices(made: Driver) -> tuple[Slice, ...]:
    execute = made.want_batch()
    return () if execute is None else execute.batch.slices


def test_the_token_in_flight_is_the_input_of_the_next_batch() -> None:
    made = driver()
    key = made.submit(PROMPT, greedy(4))
    assert slices(made) == (Slice(1, 0, PROMPT, True),)
    assert slices(made) == (Slice(1, 3, (IN_FLIGHT,), True),)
    assert not made.may_want, "two batches are already in flight"
    made.finish_step()
    assert made.received[key].token_ids == [next_token([*PROMPT])]
    assert slices(made) == (Slice(1, 4, (IN_FLIGHT,), True),)
    assert made.run_to_end() == 1
    assert tuple(made.received[key].token_ids) == made.expected(key, PROMPT).token_ids
    assert sum(IN_FLIGHT in part.token_ids for each in made.executed for part in each.batch.slices) == 3


def test_nothing_is_computed_after_the_last_token_by_count() -> None:
    made = driver()
    made.submit(PROMPT, greedy(1))
    made.want_batch()
    assert not made.may_want


def test_a_row_after_the_end_is_discarded_and_its_blocks_are_held_until_then() -> None:
    made = driver(block_tokens=1)
    stop = next_token([*PROMPT])
    key = made.submit(PROMPT, greedy(9, stop_token_ids=(stop,)))
    made.want_batch()
    made.want_batch()
    book = made.core.group_scheduler.book
    made.finish_step()
    ending = made.received[key].ending
    assert ending is not None
    assert ending.finish_reason is FinishReason.STOP
    assert made.core.group_scheduler.reserved_block_count == 0
    assert len(book.table(1)) == 4, "the batch in flight still writes to the last block"
    made.finish_step()
    assert made.received[key].token_ids == [stop]
    assert book.used_count == 0
    made.assert_empty()


def test_a_prompt_continues_after_its_chunk_in_flight() -> None:
    made = driver(max_batch_tokens=4)
    key = made.submit(tuple(range(10)), greedy(2))
    assert [slices(made) for _ in range(2)] == [
        (Slice(1, 0, (0, 1, 2, 3), False),),
        (Slice(1, 4, (4, 5, 6, 7), False),),
    ]
    made.finish_step()
    assert slices(made) == (Slice(1, 8, (8, 9), True),)
    made.run_to_end()
    assert tuple(made.received[key].token_ids) == made.expected(key, tuple(range(10))).token_ids


@pytest.mark.parametrize(
    "sampling",
    [
        replace(greedy(9, ignore_eos=False), grammar=Grammar(GrammarKind.REGEX, "a+")),
        greedy(9, min_tokens=9),
        replace(greedy(9), bad_words_token_ids=((5, 6),)),
        replace(greedy(9, logprobs=1), prompt_logprobs=1),
    ],
    ids=["grammar", "min_tokens", "bad words", "prompt logprobs"],
)
def test_a_row_that_depends_on_the_token_waits(sampling: SamplingParams) -> None:
    made = driver()
    waits = made.submit(PROMPT, sampling)
    goes_on = made.submit(PROMPT, greedy(9))
    made.want_batch()
    assert [part.sequence_id for part in slices(made)] == [2]
    made.finish_step()
    assert [part.sequence_id for part in slices(made)] == [1, 2]
    made.run_to_end()
    assert made.received[waits].token_ids[:8] == made.received[goes_on].token_ids[:8]


def test_preemption_waits_until_nothing_is_in_flight() -> None:
    made = driver(12, block_tokens=1)
    keys = [made.submit(PROMPT, greedy(8)) for _ in range(2)]
    while made.core.totals.preemptions == 0:
        if made.may_want:
            made.want_batch()
        if made.pending is not None:
            made.finish_step()
    made.run_to_end()
    for key in keys:
        assert tuple(made.received[key].token_ids) == made.expected(key, PROMPT).token_ids


def test_sequences_of_a_failed_step_leave_the_next_one() -> None:
    made = driver()
    lost = made.submit(PROMPT, greedy(9))
    made.want_batch()
    kept = made.submit((7, 8), greedy(3))
    assert [part.token_ids for part in slices(made)] == [(IN_FLIGHT,), (7, 8)]
    made.fail_step()
    ending = made.received[lost].ending
    assert ending is not None
    assert ending.finish_reason is FinishReason.ERROR
    made.run_to_end()
    assert made.received[lost].token_ids == []
    assert tuple(made.received[kept].token_ids) == made.expected(kept, (7, 8)).token_ids


def test_an_abort_in_both_batches() -> None:
    made = driver()
    key = made.submit(PROMPT, greedy(9))
    made.want_batch()
    made.want_batch()
    made.feed(Aborted(made.at_s, key))
    made.run_to_end()
    assert made.received[key].token_ids == []
    made.assert_empty()


def test_offline_work_is_launched_ahead_too() -> None:
    made = driver()
    key = made.submit(PROMPT, greedy(9), priority=PriorityClass.BATCH)
    made.want_batch()
    assert slices(made) == (Slice(1, 3, (IN_FLIGHT,), True),)
    made.run_to_end()
    assert tuple(made.received[key].token_ids) == made.expected(key, PROMPT).token_ids


def test_without_the_setting_one_batch_is_in_flight_at_a_time() -> None:
    made = Driver(limits(), 64)
    made.open(1)
    made.submit(PROMPT, greedy(4))
    made.want_batch()
    assert not made.core.has_work

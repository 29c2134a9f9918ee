"""Stories of a worker's core: events in, commands out. The driver calls check() after each event."""

from collections.abc import Sequence

import pytest

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.common.ids import RequestId
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from services.worker.core import events as w
from services.worker.core.batch import Batch, StepResult
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.limits import WorkerLimits
from services.worker.core.worker import WorkerCore
from tests.support.worker_core import MEMORY, VOCAB_SIZE, greedy, limits, next_token, piece
from tests.unit.worker.core.stories import driver, ending, prompt, slices

# ---------------------------------------------------------------- batches


def test_a_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    made = driver(max_batch_tokens=8)
    key = made.submit(prompt(18), greedy(3))
    assert [slices(made.step()) for _ in range(5)] == [
        [(1, 0, 8, False)],
        [(1, 8, 8, False)],
        [(1, 16, 2, True)],
        [(1, 18, 1, True)],
        [(1, 19, 1, True)],
    ]
    assert made.step() is None
    want = made.expected(key, prompt(18))
    assert (tuple(made.received[key].token_ids), made.received[key].text) == (want.token_ids, want.text)
    assert ending(made, key) == w.Ending(key.handle, FinishReason.LENGTH)


def test_a_sequence_is_described_only_in_its_first_batch() -> None:
    made = driver()
    made.submit(prompt(3), greedy(2))
    first, second = made.step(), made.step()
    assert first is not None
    assert second is not None
    assert [new.prompt_token_ids for new in first.batch.added] == [prompt(3)]
    assert second.batch.added == ()
    made.submit(prompt(3), greedy(2))
    made.submit(prompt(3), greedy(3))
    made.step()
    made.step()
    third = made.step()
    assert third is not None
    assert (third.batch.added, third.batch.removed) == ((), (2,))


def test_removals_are_sent_at_once_if_no_batch_follows() -> None:
    made = driver()
    made.submit(prompt(3), greedy(1))
    made.want_batch()
    *_, removed = made.finish_step()
    assert removed == w.Removed(Batch(2, (1,), (), ()))
    assert made.engine.known_ids == []


def test_a_long_prompt_delays_neither_decodes_nor_short_prompts() -> None:
    made = driver(max_batch_tokens=8)
    made.submit(prompt(3), greedy(20))
    made.step()
    made.submit(prompt(40), greedy(2))
    made.submit(prompt(3, first=9), greedy(2))
    assert slices(made.step()) == [(1, 3, 1, True), (2, 0, 4, False), (3, 0, 3, True)]
    assert slices(made.step()) == [(1, 4, 1, True), (3, 3, 1, True), (2, 4, 6, False)]


def test_prompts_are_admitted_only_for_full_batches_and_the_others_stay_movable() -> None:
    made = driver(max_batch_tokens=8, max_running_count=8, block_count=200)
    for _ in range(8):
        made.submit(prompt(8), greedy(1))
    load = made.core.load(made.at_s, MEMORY)
    assert (load.running_count, load.waiting_count) == (2, 6), "prompts for two batches"
    assert (load.prompt_token_count, load.max_prompt_token_count) == (64, 16)
    batches = [slices(made.step()) for _ in range(8)]
    assert [sum(count for _, _, count, _ in batch) for batch in batches] == [8] * 8, "each batch must be full"
    assert made.step() is None


def test_alongside_a_long_prompt_another_one_is_admitted() -> None:
    made = driver(max_batch_tokens=8, max_running_count=8, block_count=200)
    made.submit(prompt(48), greedy(1))
    made.submit(prompt(4), greedy(1))
    assert slices(made.step()) == [(1, 0, 4, False), (2, 0, 4, True)]


def test_the_most_important_class_is_admitted_first() -> None:
    made = driver(max_running_count=1, max_batch_tokens=16)
    blocking = made.submit(prompt(2), greedy(1))
    batch = made.submit(prompt(2), greedy(1), priority=PriorityClass.BATCH)
    default = made.submit(prompt(2), greedy(1))
    interactive = made.submit(prompt(2), greedy(1), priority=PriorityClass.INTERACTIVE)
    order: list[w.SequenceKey] = []
    while made.step() is not None:
        order += [k for k in made.received if made.received[k].ending and k not in order]
    assert order == [blocking, interactive, default, batch]


def test_admission_needs_blocks_for_the_whole_prompt_not_for_its_first_chunk() -> None:
    made = driver(block_count=10, block_tokens=4, max_batch_tokens=8)
    made.submit(prompt(30), greedy(2))  # 8 blocks
    made.submit(prompt(12), greedy(2))  # 4 blocks: does not fit yet
    assert [s[0] for s in slices(made.step())] == [1]
    load = made.core.load(made.at_s, MEMORY)
    assert (load.used_block_count, load.waiting_block_count, load.waiting_count) == (8, 4, 1)


def test_no_request_overtakes_the_head_of_the_queue() -> None:
    made = driver(block_count=10, block_tokens=4)
    made.submit(prompt(30), greedy(3))
    made.submit(prompt(12), greedy(2))
    made.submit(prompt(2), greedy(2))  # would fit
    assert [s[0] for s in slices(made.step())] == [1]


def test_the_first_token_is_sent_right_after_its_step() -> None:
    made = driver()
    key = made.submit((1, 2), greedy(1))
    made.want_batch()
    token = next_token([1, 2])
    assert made.finish_step() == [
        w.Emit(
            1,
            (key.handle,),
            (1,),
            (token,),
            (piece(token),) if piece(token) else (),
            (),
            (w.Ending(key.handle, FinishReason.LENGTH),),
            key.handle,
        ),
        w.Removed(Batch(2, (1,), (), ())),
    ]


def test_each_dispatcher_gets_one_message_with_its_own_tokens() -> None:
    made = driver()
    made.open(2)
    keys = [made.submit(prompt(3, first=s), greedy(2), stream_id=s) for s in (1, 2, 1)]
    made.want_batch()
    emits = made.finish_step()
    assert [(e.stream_id, e.handles) for e in emits if isinstance(e, w.Emit)] == [
        (1, (keys[0].handle, keys[2].handle)),
        (2, (keys[1].handle,)),
    ]


# ---------------------------------------------------------------- a full cache


def test_the_latest_of_the_lowest_class_is_preempted_and_resumes_with_the_same_tokens() -> None:
    made = driver(block_count=6, block_tokens=4, max_batch_tokens=16)
    old = made.submit(prompt(6), greedy(14))
    young = made.submit(prompt(6, first=30), greedy(14))
    made.run_to_end()
    assert made.core.totals.preemptions == 1
    assert made.executed[-1].batch.slices[0].sequence_id == 2
    for key, first in ((old, 0), (young, 30)):
        assert tuple(made.received[key].token_ids) == made.expected(key, prompt(6, first)).token_ids
    re_entered = [new for execute in made.executed for new in execute.batch.added if new.output_token_ids]
    assert [new.sequence_id for new in re_entered] == [2]
    assert re_entered[0].output_token_ids == made.expected(young, prompt(6, 30)).token_ids[:7]


def heard(commands: Sequence[w.Command]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(preempted, resumed) handles of each message that has any."""
    emits = [c for c in commands if isinstance(c, w.Emit)]
    return [(e.preempted, e.resumed) for e in emits if e.preempted or e.resumed]


def test_a_preemption_and_its_end_are_each_reported_once_to_the_dispatcher() -> None:
    made = driver(block_count=6, block_tokens=4, max_batch_tokens=16)
    made.submit(prompt(6), greedy(14))
    young = made.submit(prompt(6, first=30), greedy(14))
    told: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    while made.core.has_work:
        told += heard(made.feed(w.BatchWanted(made.at_s)))
        made.finish_step()
    assert told == [((young.handle,), ()), ((), (young.handle,))]


def test_a_preempted_request_that_ends_is_not_reported_as_resumed() -> None:
    made = driver(block_count=6, block_tokens=4, max_batch_tokens=16)
    made.submit(prompt(6), greedy(14))
    young = made.submit(prompt(6, first=30), greedy(14))
    while not made.preempted:
        made.step()
    commands = made.feed(w.Aborted(made.at_s, young))
    assert not heard(commands)
    assert ending(made, young).finish_reason is FinishReason.CANCELLED
    made.run_to_end()


def test_waiting_is_reported_for_resumed_requests_but_not_for_new_ones() -> None:
    made = driver(block_count=4, block_tokens=4)
    made.submit(prompt(10), greedy(3))
    newcomer = made.submit(prompt(10, first=5), greedy(3))
    assert newcomer not in made.preempted
    begun = made.submit(prompt(6, first=9), greedy(3), output=(5,))
    assert made.preempted == {begun}
    made.run_to_end()
    assert not made.preempted


def test_a_preemption_by_a_smaller_capacity_is_reported_after_its_tokens() -> None:
    made = driver(block_count=8, block_tokens=4, max_batch_tokens=32)
    keys = [made.submit(prompt(6, first=10 * i), greedy(9)) for i in range(3)]
    made.want_batch()
    made.feed(w.CapacityChanged(made.at_s, 4))
    assert not made.preempted, "all requests are in flight"
    made.finish_step()
    assert [len(made.received[key].token_ids) for key in keys] == [1, 1, 1]
    assert made.preempted == {keys[2]}
    made.run_to_end()


def test_an_interactive_request_is_never_preempted_for_one_of_the_default_class() -> None:
    made = driver(block_count=6, block_tokens=4)
    made.submit(prompt(6), greedy(14), priority=PriorityClass.DEFAULT)
    made.submit(prompt(6, first=30), greedy(14), priority=PriorityClass.INTERACTIVE)
    made.run_to_end()
    assert next(e.batch.removed for e in made.executed if e.batch.removed) == (1,)
    assert made.core.totals.preemptions >= 1


def test_a_preempted_sequence_does_not_return_in_the_same_step() -> None:
    made = driver(block_count=4, block_tokens=4, max_batch_tokens=16)
    made.submit(prompt(7), greedy(9))
    made.submit(prompt(7, first=30), greedy(9))
    while not made.core.totals.preemptions:
        made.step()
    assert [s[0] for s in slices(made.executed[-1])] == [1]


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    made = driver(block_count=4, block_tokens=4)
    key = made.submit(prompt(16), greedy(1))
    assert ending(made, key).finish_reason is FinishReason.ERROR
    assert ending(made, key).invalid
    assert "16 tokens and the next one need 5 KV blocks of 4 tokens, this worker has 4" in ending(made, key).error


def test_a_request_that_outgrows_the_cache_ends_with_an_error_and_affects_no_other() -> None:
    made = driver(block_count=4, block_tokens=4)
    big = made.submit(prompt(10), greedy(40))
    other = made.submit(prompt(3), greedy(4))
    made.run_to_end()
    assert "17 tokens do not fit into the KV cache" in ending(made, big).error
    assert ending(made, big).finish_reason is FinishReason.ERROR
    assert not ending(made, big).invalid, "a larger group may have room for it"
    assert len(made.received[big].token_ids) == 7
    assert ending(made, other).finish_reason is FinishReason.LENGTH
    made.assert_empty()


def test_a_reserve_keeps_a_new_request_from_taking_the_last_blocks() -> None:
    made = driver(block_count=10, block_tokens=4, admission_reserve_fraction=0.2)
    made.submit(prompt(20), greedy(9))  # 6 blocks
    made.submit(prompt(7, first=5), greedy(2))  # 2 blocks: all but the reserve
    made.submit(prompt(3, first=9), greedy(2))  # 1 block, from the reserve
    assert {s[0] for s in slices(made.step())} == {1, 2}


def test_waiting_requests_are_admitted_into_new_blocks() -> None:
    made = driver(block_count=4, block_tokens=4)
    made.submit(prompt(10), greedy(3))
    made.submit(prompt(10, first=5), greedy(3))
    assert len(slices(made.step())) == 1
    made.add_blocks(4)
    assert len(slices(made.step())) == 2


# ---------------------------------------------------------------- limits


def test_the_queue_is_bounded_by_requests() -> None:
    made = driver(max_running_count=1, max_waiting_count=2)
    keys = [made.submit(prompt(3), greedy(2)) for _ in range(4)]
    assert [made.received[k].ending is None for k in keys] == [True, True, True, False]
    assert ending(made, keys[3]).refused
    assert ending(made, keys[3]).finish_reason is None
    assert "max_num_queued_reqs is 2" in ending(made, keys[3]).error
    made.run_to_end()
    assert made.core.totals.refused == 1


def test_the_queue_is_bounded_by_tokens() -> None:
    made = driver(max_running_count=1, max_waiting_tokens=20)
    keys = [made.submit(prompt(n), greedy(2)) for n in (3, 15, 6, 5)]
    assert [made.received[k].ending is None for k in keys] == [True, True, False, True]
    assert "max_num_queued_tokens 20" in ending(made, keys[2]).error


def test_a_preempted_request_is_not_refused_by_a_full_queue() -> None:
    made = driver(block_count=6, block_tokens=4, max_running_count=2, max_waiting_count=1)
    keys = [made.submit(prompt(6, first=n), greedy(14)) for n in (0, 30, 60)]
    made.run_to_end()
    assert made.core.totals.preemptions > 0
    assert all(ending(made, k).finish_reason is FinishReason.LENGTH for k in keys)


@pytest.mark.parametrize(
    ("token_ids", "sampling", "why"),
    [
        ((), greedy(), "prompt_token_ids: must not be empty"),
        (prompt(64), greedy(), "prompt_token_ids: 64 tokens leave no room for an answer"),
        ((1, VOCAB_SIZE), greedy(), f"prompt_token_ids: token id {VOCAB_SIZE} is not in the vocabulary"),
        ((1, -1), greedy(), "prompt_token_ids: token id -1"),
        ((1,), greedy(stop_token_ids=(500,)), "sampling.stop_token_ids: token id 500"),
        ((1,), SamplingParams(temperature=1.0), "sampling.seed"),
    ],
)
def test_a_bad_request_is_refused_with_field_and_reason(
    token_ids: tuple[int, ...], sampling: SamplingParams, why: str
) -> None:
    made = driver()
    key = made.submit(token_ids, sampling)
    assert ending(made, key).error.startswith(why)
    assert ending(made, key).invalid
    assert not ending(made, key).refused
    assert not made.core.has_work


def test_the_engine_always_gets_a_seed() -> None:
    made = driver()
    made.submit(prompt(3), greedy(1))
    made.submit(prompt(3), SamplingParams(temperature=1.0, seed=-4, max_tokens=1))
    execute = made.step()
    assert execute is not None
    assert [new.sampling.seed for new in execute.batch.added] == [0, -4]


def test_text_is_requested_only_if_needed() -> None:
    made = driver()
    made.submit(prompt(3), greedy(1), wants_text=False)
    made.submit(prompt(3), greedy(1, stop=("x",)), wants_text=False)
    made.submit(prompt(3), greedy(1))
    execute = made.step()
    assert execute is not None
    assert execute.text_wanted == (False, True, True)


def test_a_token_that_its_grammar_does_not_allow_ends_its_sequence_and_no_other() -> None:
    made = driver()
    for _ in range(2):
        made.submit(prompt(3), greedy(5))
    made.want_batch()
    step_id = made.executed[-1].batch.step_id
    result = StepResult(step_id, (1, 2), (None, None), 0.0, errors=((0, "Too many items"),))
    [emit] = [
        command for command in made.core.handle(w.StepDone(0.0, result, ("a", "b"))) if isinstance(command, w.Emit)
    ]
    [ending] = emit.endings
    assert (ending.finish_reason, ending.error, ending.invalid) == (FinishReason.ERROR, "Too many items", True)
    assert emit.token_ids == (2,)
    made.core.check()


# ---------------------------------------------------------------- violated invariants


def test_a_batch_wanted_during_a_step_is_a_bug() -> None:
    made = driver()
    made.submit(prompt(3))
    made.want_batch()
    with pytest.raises(InvariantViolation, match="a batch is requested while step 1 runs"):
        made.core.handle(w.BatchWanted(0.0))


@pytest.mark.parametrize("step_id", [0, 2])
def test_the_result_of_a_step_that_does_not_run_is_a_bug(step_id: int) -> None:
    made = driver()
    made.submit(prompt(3))
    made.want_batch()
    with pytest.raises(InvariantViolation, match=f"step {step_id} is reported, but step 1 was running"):
        made.core.handle(w.StepDone(0.0, StepResult(step_id, (1,), (None,), 0.0), ("",)))


def test_a_result_of_the_wrong_size_is_a_bug() -> None:
    made = driver()
    made.submit(prompt(3))
    made.want_batch()
    with pytest.raises(InvariantViolation, match="step 1 samples 1 tokens, but the result has 2 tokens"):
        made.core.handle(w.StepDone(0.0, StepResult(1, (1, 2), (None, None), 0.0), ("", "")))


def test_check_finds_blocks_of_an_ended_sequence_and_reports_its_story() -> None:
    made = driver()
    made.submit(prompt(3))
    made.step()
    core = made.core
    core.group_scheduler.book.hold(77, 3)
    with pytest.raises(InvariantViolation, match="sequence 77 holds blocks and does not run"):
        core.check()
    core.group_scheduler.book.release(77)
    core.group_scheduler.book.release(1)
    with pytest.raises(InvariantViolation, match=r"(?s)has KV in no block.*submitted: 3 tokens.*running:.*first token"):
        core.check()


def test_the_story_of_a_sequence_is_available_while_it_exists_and_is_bounded() -> None:
    made = driver(block_count=6, block_tokens=4)
    made.submit(prompt(6), greedy(14))
    made.submit(prompt(6, first=30), greedy(14))
    while not made.core.totals.preemptions:
        made.step()
    story = made.core.story(2)
    assert [line.split(" ", 1)[1].split(":")[0] for line in story[:-1]] == [
        "submitted",
        "running",
        "first token",
        "waiting",
    ]
    assert "no block free for sequence 1 (request r1, attempt 1)" in story[-2]
    made.run_to_end()
    assert made.core.story(2) == []


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"block_tokens": 0}, "block_tokens"),
        ({"max_batch_tokens": 3}, "max_num_batched_tokens"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"admission_reserve_fraction": 1.0}, "admission_reserve_fraction"),
    ],
)
def test_limits_that_cannot_work_are_named(change: dict[str, int | float], setting: str) -> None:
    with pytest.raises(ConfigError) as raised:
        limits(**change)  # pyright: ignore[reportArgumentType]
    assert raised.value.path == setting


def test_opening_a_stream_twice_forgets_nothing() -> None:
    core = WorkerCore(WorkerLimits(block_tokens=4, max_model_len=8, vocab_size=9), 4)
    core.handle(w.StreamOpened(0.0, 1))
    submitted = w.Submitted(
        at_s=0.0,
        key=w.SequenceKey(1, 1),
        request_id=RequestId("r"),
        attempt=0,
        prompt_token_ids=(1,),
        sampling=greedy(1),
    )
    core.handle(submitted)
    core.handle(w.StreamOpened(0.0, 1))
    core.check()
    assert core.has_work


def test_check_finds_a_sequence_in_no_lane_or_in_the_wrong_one() -> None:
    made = driver()
    made.submit(prompt(3))
    made.step()
    core = made.core
    group_schedulers = core._request_table.group_schedulers
    ((sequence_id, group_scheduler),) = group_schedulers.items()
    group_schedulers[sequence_id] = GroupScheduler(limits(), 8, core._request_table.end_too_big)
    with pytest.raises(InvariantViolation, match="is in a wrong group_scheduler"):
        core.check()
    group_schedulers[sequence_id] = group_scheduler
    group_schedulers[7] = group_scheduler
    with pytest.raises(InvariantViolation, match="2 sequences have a group_scheduler, but 1 are in one"):
        core.check()
    del group_schedulers[7]
    del group_schedulers[sequence_id]
    with pytest.raises(InvariantViolation, match="waits for KV in a group, or has no group"):
        core.check()

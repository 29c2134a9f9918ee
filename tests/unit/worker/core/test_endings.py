"""How requests end or resume elsewhere, and what a draining worker reports, as events in and commands out."""

import pytest

from ballast.common.ids import RequestId
from ballast.common.sampling import FinishReason
from services.worker.core import events as w
from tests.support.worker_core import EOS, MEMORY, greedy, next_token, piece, undisturbed
from tests.unit.worker.core.stories import driver, ending, prompt

# ---------------------------------------------------------------- endings


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_request_frees_its_blocks_at_once(steps: int) -> None:
    made = driver(max_batch_tokens=8)
    key = made.submit(prompt(16), greedy(9))  # chunks: 2 steps of prefill, then decode
    for _ in range(steps):
        made.step()
    commands = made.feed(w.Aborted(made.at_s, key))
    assert [c.endings for c in commands if isinstance(c, w.Emit)] == [(w.Ending(key.handle, FinishReason.CANCELLED),)]
    made.assert_empty()
    assert made.want_batch() is None


def test_the_result_of_a_request_aborted_in_mid_step_is_dropped() -> None:
    made = driver(block_count=4, block_tokens=4)
    gone = made.submit(prompt(6), greedy(9))
    stays = made.submit(prompt(6, first=30), greedy(2))
    made.want_batch()
    made.feed(w.Aborted(made.at_s, gone))
    late = made.submit(prompt(6, first=60), greedy(2))  # is admitted in the next step, into the freed blocks
    made.run_to_end()
    assert made.received[gone].token_ids == []
    for key, first in ((stays, 30), (late, 60)):
        assert tuple(made.received[key].token_ids) == made.expected(key, prompt(6, first)).token_ids


def test_a_waiting_request_can_be_aborted() -> None:
    made = driver(max_running_count=1)
    made.submit(prompt(3), greedy(5))
    waiting = made.submit(prompt(3), greedy(5))
    made.step()
    made.feed(w.Aborted(made.at_s, waiting))
    assert ending(made, waiting).finish_reason is FinishReason.CANCELLED
    assert made.core.load(made.at_s, MEMORY).waiting_block_count == 0


def test_a_late_repeated_or_unknown_abort_changes_nothing() -> None:
    made = driver()
    key = made.submit(prompt(3), greedy(1))
    made.run_to_end()
    for stale in (key, w.SequenceKey(1, 99), w.SequenceKey(7, 1)):
        assert made.feed(w.Aborted(made.at_s, stale)) == []
    assert made.core.totals.stale_events == 3


def test_closing_a_stream_ends_its_requests_only() -> None:
    made = driver(max_running_count=2)
    made.open(2)
    mine = [made.submit(prompt(3), greedy(4), stream_id=1) for _ in range(3)]
    other = made.submit(prompt(3, first=8), greedy(4), stream_id=2)
    made.want_batch()
    assert made.feed(w.StreamClosed(made.at_s, 1)) == []
    made.run_to_end()
    assert all(made.received[key].ending is None and not made.received[key].token_ids for key in mine)
    assert ending(made, other).finish_reason is FinishReason.LENGTH
    made.assert_empty()


def test_messages_of_a_closed_stream_are_ignored() -> None:
    made = driver()
    made.feed(w.StreamClosed(0.0, 1))
    made.submit(prompt(3))
    assert not made.core.has_work
    assert made.core.totals.stale_events == 1


def test_a_repeated_handle_is_accepted_once() -> None:
    made = driver()
    key = made.submit(prompt(3), greedy(1))
    again = w.Submitted(
        at_s=0.0, key=key, request_id=RequestId("r1"), attempt=1, prompt_token_ids=(1,), sampling=greedy(1)
    )
    assert made.feed(again) == []
    made.run_to_end()
    assert len(made.received[key].token_ids) == 1


@pytest.mark.parametrize("running", [True, False])
def test_a_deadline_ends_a_request_whether_it_runs_or_waits(running: bool) -> None:
    made = driver(max_running_count=1)
    if not running:
        made.submit(prompt(3), greedy(30))
    key = made.submit(prompt(3), greedy(30), deadline_at_s=1.0)
    made.step()
    assert made.core.next_deadline_at_s == 1.0
    assert made.feed(w.Tick(0.99)) == []
    made.feed(w.Tick(1.0))
    assert ending(made, key).finish_reason is FinishReason.DEADLINE
    assert made.core.next_deadline_at_s is None


def test_a_batch_excludes_requests_past_their_deadline() -> None:
    made = driver()
    key = made.submit(prompt(3), greedy(30), deadline_at_s=1.0)
    made.at_s = 2.0
    assert made.want_batch() is None
    assert ending(made, key).finish_reason is FinishReason.DEADLINE


def test_a_request_that_arrives_after_its_deadline_never_runs() -> None:
    made = driver()
    made.at_s = 5.0
    key = made.submit(prompt(3), deadline_at_s=5.0)
    assert ending(made, key).finish_reason is FinishReason.DEADLINE
    assert not made.core.has_work


def test_deadlines_of_requests_that_have_ended_do_not_pile_up() -> None:
    made = driver(max_waiting_count=8)
    for _ in range(1_000):
        key = made.submit(prompt(2), deadline_at_s=1e9)
        made.core.handle(w.Aborted(made.at_s, key))
    assert len(made.core._request_table._deadlines._heap) < 100


def test_a_failed_step_ends_its_requests_and_no_others() -> None:
    made = driver(max_running_count=1)
    failed, spared = made.submit(prompt(3), greedy(3)), made.submit(prompt(4), greedy(3))
    made.want_batch()
    made.fail_step()
    assert ending(made, failed) == w.Ending(failed.handle, FinishReason.ERROR, error="step 1 failed: out of luck")
    made.run_to_end()
    assert ending(made, spared).finish_reason is FinishReason.LENGTH
    made.assert_empty()


def test_end_of_sequence_stops_and_names_the_token() -> None:
    made = driver()
    start = next(p for p in ((a, b) for a in range(60) for b in range(60)) if next_token(list(p)) == EOS)
    key = made.submit(start, greedy(5, ignore_eos=False))
    made.run_to_end()
    assert made.received[key].token_ids == [EOS]
    assert made.received[key].text == ""
    assert (ending(made, key).finish_reason, ending(made, key).matched_stop) == (FinishReason.STOP, str(EOS))


def test_the_model_length_ends_a_request() -> None:
    made = driver(max_model_len=20)
    key = made.submit(prompt(15), greedy(50))
    made.run_to_end()
    assert len(made.received[key].token_ids) == 5
    assert ending(made, key).finish_reason is FinishReason.LENGTH


def test_held_back_text_is_released_at_a_deadline() -> None:
    made = driver()
    stop = tuple(p + "zz" for p in ("a", "b", "c", "é", " "))  # so that any last character may begin a stop string
    key = made.submit(prompt(4), greedy(30, stop=stop), deadline_at_s=1.0)
    for _ in range(6):
        made.step()
    made.feed(w.Tick(1.0))
    assert made.received[key].text == "".join(piece(t) for t in made.received[key].token_ids)


# ---------------------------------------------------------------- attempts


def test_a_resumed_request_continues_where_it_was_and_repeats_no_text() -> None:
    made = driver()
    whole = undisturbed(prompt(5), greedy(12), made.limits.max_model_len)
    text = "".join(piece(t) for t in whole.token_ids[:7])
    key = made.submit(prompt(5), greedy(12), output=whole.token_ids[:7], delivered_chars=len(text) - 1)
    made.run_to_end()
    assert tuple(made.received[key].token_ids) == whole.token_ids[7:]
    assert made.received[key].text == whole.text[len(text) - 1 :]


def test_a_complete_resumed_request_ends_at_once_with_its_last_text() -> None:
    made = driver()
    whole = undisturbed(prompt(5), greedy(6), made.limits.max_model_len)
    key = made.submit(prompt(5), greedy(6), output=whole.token_ids, delivered_chars=1)
    assert (made.received[key].token_ids, made.received[key].text) == ([], whole.text[1:])
    assert ending(made, key).finish_reason is FinishReason.LENGTH
    made.assert_empty()


# ---------------------------------------------------------------- drain, load


def test_a_draining_worker_finishes_its_requests_and_refuses_new_ones() -> None:
    made = driver(max_running_count=1)
    keys = [made.submit(prompt(3), greedy(2)) for _ in range(2)]
    assert made.feed(w.DrainRequested(0.0)) == []
    late = made.submit(prompt(3))
    assert ending(made, late).refused
    assert made.core.load(0.0, MEMORY).draining
    made.run_to_end()
    assert [ending(made, k).finish_reason for k in keys] == [FinishReason.LENGTH] * 2
    assert made.core.is_drained


def test_an_idle_worker_is_drained_at_once() -> None:
    made = driver()
    assert not made.core.is_drained
    made.feed(w.DrainRequested(0.0))
    assert made.core.is_drained


def test_draining_waits_for_the_step_of_an_aborted_request() -> None:
    made = driver()
    key = made.submit(prompt(3))
    made.want_batch()
    made.feed(w.DrainRequested(0.0))
    made.feed(w.Aborted(0.0, key))
    assert not made.core.is_drained
    made.finish_step()
    assert made.core.is_drained


def test_the_load_report_counts_requests_and_blocks() -> None:
    made = driver(block_count=20, block_tokens=4, max_running_count=2, max_batch_tokens=16)
    made.at_s = 10.0
    for length in (8, 9, 4):  # with the next token 3, 3 and 2 blocks
        made.submit(prompt(length), greedy(3))
    for _ in range(2):
        made.step()
    load = made.core.load(made.at_s + 2.0, MEMORY)
    assert (load.running_count, load.waiting_count, load.max_running_count) == (2, 1, 2)
    assert (load.block_count, load.used_block_count, load.waiting_block_count) == (20, 3 + 3, 2)
    assert (load.steps_total, load.prompt_tokens_total, load.generation_tokens_total) == (2, 17, 3)
    assert load.step_age_s == pytest.approx(2.0)
    made.run_to_end()
    made.assert_empty()


def test_the_age_of_a_step_counts_from_the_end_of_idleness() -> None:
    made = driver()
    made.submit(prompt(3), greedy(1))
    made.run_to_end()
    made.at_s = 100.0
    assert made.core.load(made.at_s, MEMORY).step_age_s == 0.0
    made.submit(prompt(3), greedy(1))
    assert made.core.load(101.0, MEMORY).step_age_s == pytest.approx(1.0)

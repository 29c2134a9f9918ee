"""States of a batch."""

import itertools
from collections.abc import Callable

import pytest

from ballast.common.errors import NotPossible
from services.jobs.core.batch import BatchState, JobBatch, Problem


def batch() -> JobBatch:
    return JobBatch(
        id="b", owner="", url="/v1/completions", input_file_id="f", window="1h", created_s=10.0, expires_s=3610.0
    )


def sending(total: int = 3) -> JobBatch:
    return batch().checked(total, 11.0)


def test_all_lines_have_results() -> None:
    one = sending().counted(1, 1)
    assert one.due(20.0, calls=1) is one
    ended = one.counted(1, 0).due(21.0, calls=0)
    assert (ended.state, ended.outcome) == (BatchState.FINALIZING, BatchState.COMPLETED)
    done = ended.finished("out", None, 22.0)
    assert done.has_ended
    assert (done.state, done.output_file_id, done.error_file_id) == (BatchState.COMPLETED, "out", None)
    assert done.at_s == {BatchState.IN_PROGRESS: 11.0, BatchState.FINALIZING: 21.0, BatchState.COMPLETED: 22.0}


def test_an_expired_batch_preserves_its_results() -> None:
    one = sending().counted(1, 0)
    assert one.due(3609.9, calls=2) is one
    over = one.due(3610.0, calls=2)
    assert (over.state, over.outcome, over.completed) == (BatchState.FINALIZING, BatchState.EXPIRED, 1)
    assert batch().due(3610.0, calls=0).outcome is BatchState.EXPIRED


def test_a_cancelled_batch_waits_for_its_calls() -> None:
    one = sending().cancel(12.0)
    assert one.state is BatchState.CANCELLING
    assert one.cancel(13.0) is one
    assert one.due(9999.0, calls=1) is one
    ending = one.due(14.0, calls=0)
    assert (ending.state, ending.outcome) == (BatchState.FINALIZING, BatchState.CANCELLED)
    assert ending.cancel(15.0) is ending
    assert ending.finished(None, "errors", 16.0).state is BatchState.CANCELLED


def test_a_refused_file_ends_a_batch_with_its_problems() -> None:
    problem = Problem("invalid_url", "url: no", "url", 7)
    failed = batch().refused((problem,), 11.0)
    assert failed.has_ended
    assert (failed.state, failed.problems) == (BatchState.FAILED, (problem,))


def test_a_finished_batch_does_not_change() -> None:
    done = sending(0).due(12.0, calls=0).finished(None, None, 13.0)
    assert done.due(99999.0, calls=0) is done
    with pytest.raises(NotPossible, match="is completed and cannot become cancelling"):
        done.cancel(14.0)
    with pytest.raises(NotPossible):
        sending().due(3610.0, calls=0).cancel(3611.0)


def test_every_order_of_events_ends_in_an_end_or_can_still_end() -> None:
    """After any order of events, a finalizing batch can be finished, and any other unfinished one is in progress or
    cancelling.
    """
    events: tuple[Callable[[JobBatch], JobBatch], ...] = (
        lambda one: one.cancel(20.0),
        lambda one: one.counted(1, 0),
        lambda one: one.due(20.0, calls=0),
        lambda one: one.due(4000.0, calls=1),
    )
    for order in itertools.product(events, repeat=4):
        one = sending(2)
        for event in order:
            try:
                one = event(one)
            except NotPossible:
                continue
        if one.state is BatchState.FINALIZING:
            one = one.finished(None, None, 30.0)
            assert one.has_ended
        else:
            assert one.state in (BatchState.IN_PROGRESS, BatchState.CANCELLING)

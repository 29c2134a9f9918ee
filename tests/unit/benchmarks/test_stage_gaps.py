"""Idle time of stages is told apart: waiting for a neighbour, and latency once nothing is missing."""

import pytest

from benchmarks.stage_gaps import shares
from services.worker.pipeline.stage_clock import Span


def runs(*times_s: tuple[float, float]) -> list[Span]:
    return [Span(began_s, ended_s, "run", 1, step_id, 1) for step_id, (began_s, ended_s) in enumerate(times_s, 1)]


def test_waiting_for_a_neighbour_and_latency_are_told_apart() -> None:
    first = runs((0.0, 2.0), (2.0, 4.0), (6.5, 8.0))  # the third could go at 6, when the first came back
    second = runs((2.5, 6.0), (6.0, 7.0), (8.0, 9.0))
    found = shares([first, second], 0.0, 8.0)
    assert found.busy == pytest.approx((5.5 + 4.5) / 16)
    assert found.waiting == pytest.approx((2.0 + 2.0 + 1.0) / 16)  # 4 to 6; 0 to 2, 7 to 8
    assert found.latency == pytest.approx((0.5 + 0.5) / 16)
    assert found.bubble == pytest.approx(1 - found.busy)


def test_the_first_stage_waits_for_no_result_if_more_are_in_flight_than_stages() -> None:
    first = runs((0.0, 1.0), (1.0, 2.0), (2.5, 3.0))  # the third before anything has come back
    second = runs((1.0, 3.0), (3.0, 4.0), (4.0, 5.0))
    found = shares([first, second], 0.0, 3.0)
    assert found.waiting == pytest.approx(1.0 / 6)  # the second stage's, for its first
    assert found.latency == pytest.approx(0.5 / 6)


def test_only_what_lies_between_the_instants_counts() -> None:
    first, second = runs((0.0, 2.0), (2.0, 4.0)), runs((2.0, 4.0), (4.0, 6.0))
    found = shares([first, second], 2.0, 4.0)
    assert (found.busy, found.waiting, found.latency) == pytest.approx((1.0, 0.0, 0.0))


def test_spans_that_begin_too_late_are_refused() -> None:
    with pytest.raises(ValueError, match="keep more"):
        shares([runs((5.0, 6.0)), runs((6.0, 7.0))], 0.0, 10.0)

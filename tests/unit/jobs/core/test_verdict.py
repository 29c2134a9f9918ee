"""The effect of an answer or a failed call on a line."""

import pytest

from services.jobs.core.verdict import Again, KeepResult, of_answer, of_broken_call, of_no_connection, of_timeout


@pytest.mark.parametrize("status", [200, 201])
def test_an_answer_is_the_result(status: int) -> None:
    assert of_answer(status, None, 0) == KeepResult(is_success=True)


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_a_line_at_fault_is_not_retried(status: int) -> None:
    assert of_answer(status, None, 0) == KeepResult(is_success=False)


@pytest.mark.parametrize(("status", "why"), [(429, "busy"), (503, "busy"), (504, "deadline"), (401, "no_rights")])
def test_failures_that_are_not_the_lines_fault_do_not_count(status: int, why: str) -> None:
    said = of_answer(status, None, 1000)
    assert isinstance(said, Again)
    assert (said.counts, said.why) == (False, why)


def test_a_busy_cluster_sets_the_retry_delay() -> None:
    assert of_answer(503, 7.0, 0) == Again(7.0, counts=False, why="busy")
    assert of_answer(503, 1e9, 0) == Again(60.0, counts=False, why="busy")


@pytest.mark.parametrize("status", [500, 502, 408, 409, 499])
def test_errors_are_retried_five_times_with_growing_delays(status: int) -> None:
    pauses: list[float] = []
    for failed_count in range(4):
        said = of_answer(status, None, failed_count)
        assert isinstance(said, Again)
        assert said.counts
        pauses.append(said.after_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    assert of_answer(status, None, 4) == KeepResult(is_success=False)


def test_calls_without_an_answer() -> None:
    assert not of_no_connection().counts
    assert not of_timeout().counts
    assert of_broken_call(0) == Again(1.0, counts=True, why="broken")
    assert of_broken_call(4) is None

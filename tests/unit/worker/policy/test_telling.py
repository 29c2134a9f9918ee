"""A dispatcher that has no tokens to receive gets a load report only when routing would notice a change, not after
every step.
"""

from dataclasses import replace

import pytest

from ballast.common.load import LoadReport, MemoryReport
from services.worker.policy.telling import INTERVAL_S, is_due

BUSY = LoadReport(
    block_tokens=16,
    block_count=320,
    used_block_count=100,
    waiting_block_count=0,
    running_count=4,
    waiting_count=0,
    max_running_count=64,
    steps_total=10,
    preemptions_total=0,
    prompt_tokens_total=0,
    generation_tokens_total=40,
    step_age_s=0.0,
    draining=False,
    memory=MemoryReport(budget_bytes=1, parameter_bytes=0, kv_bytes=1, free_bytes=0),
)
LATER_S = 4 * INTERVAL_S


def test_a_new_dispatcher_gets_a_report_at_once() -> None:
    assert is_due(None, BUSY, 0.0, 4, counts_more=False)


def test_a_step_that_changes_little_is_reported_late() -> None:
    after = replace(BUSY, used_block_count=109, steps_total=30, generation_tokens_total=120)
    assert not is_due(BUSY, after, LATER_S, 4, counts_more=False)
    assert is_due(BUSY, after, 2.0, 4, counts_more=False)


@pytest.mark.parametrize(
    "change",
    [
        {"running_count": 5},
        {"waiting_count": 1},
        {"waiting_block_count": 3},
        {"block_count": 300},
        {"draining": True},
        {"used_block_count": 110},
        {"used_block_count": 90},
    ],
)
def test_changes_that_routing_sees_are_reported_once_per_interval(change: dict[str, int]) -> None:
    after = replace(BUSY, **change)  # pyright: ignore[reportArgumentType]
    assert is_due(BUSY, after, LATER_S, 4, counts_more=False)
    assert not is_due(BUSY, after, LATER_S, 5, counts_more=False), "more dispatchers must not raise the message rate"


def test_newly_counted_requests_are_reported() -> None:
    assert is_due(BUSY, BUSY, LATER_S, 4, counts_more=True)
    assert not is_due(BUSY, BUSY, 0.0, 4, counts_more=True)


def test_the_final_report_is_exact_and_sent_at_once() -> None:
    told = replace(BUSY, used_block_count=1)
    quiet = replace(BUSY, running_count=0, used_block_count=0)
    assert is_due(told, quiet, 0.0, 4, counts_more=False)
    assert is_due(replace(quiet, used_block_count=1), quiet, 0.0, 4, counts_more=False)
    assert not is_due(quiet, replace(quiet, steps_total=99), 0.0, 4, counts_more=False)

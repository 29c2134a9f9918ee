"""Priority classes order admission, but no online class starves another."""

from ballast.common.sampling import PriorityClass
from services.worker.core.line import LIFT_S
from tests.support.worker_core import greedy
from tests.unit.worker.core.stories import driver, prompt


def steps_until_served(priority: PriorityClass) -> int | None:
    """Steps until the request gets a token while more interactive requests arrive than fit; None if it gets none within
    30 s.
    """
    made = driver(block_count=8, block_tokens=4, max_running_count=2, max_batch_tokens=64, max_waiting_count=100_000)
    for number in range(4):
        made.submit(prompt(3, first=number), greedy(3), priority=PriorityClass.INTERACTIVE)
    waiting = made.submit(prompt(3, first=50), greedy(3), priority=priority)
    for step in range(300):
        made.submit(prompt(3, first=step), greedy(3), priority=PriorityClass.INTERACTIVE)
        made.at_s += 0.1
        made.step()
        if made.received[waiting].token_ids:
            return step
    return None


def test_a_default_request_is_overtaken_by_interactive_ones_for_some_seconds_only() -> None:
    steps = steps_until_served(PriorityClass.DEFAULT)
    assert steps is not None
    assert LIFT_S <= steps * 0.1 < LIFT_S + 1.0


def test_offline_work_waits_as_long_as_online_requests_arrive() -> None:
    assert steps_until_served(PriorityClass.BATCH) is None

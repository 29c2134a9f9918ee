"""A TPOT target limits how many sequences run. It decides which sequences wait, but running ones are never preempted
for it.
"""

import math

import pytest

from ballast.common.cost import CostModel
from ballast.common.sampling import PriorityClass
from ballast.common.targets import Targets
from services.worker.policy.harvest import Harvest
from services.worker.policy.token_target import TokenTarget
from tests.support.leader import Leader
from tests.support.worker_core import MEMORY, Driver, greedy
from tests.unit.worker.core.stories import driver, prompt

COST = CostModel(attention_s=0.0, token_s=0.001, chunk_s=0.01, shared_s=0.01)  # 10 ms, 1 ms per running sequence


def counts(made: Driver | Leader) -> tuple[int, int, int]:
    """Running sequences, waiting sequences, and the number of places reported to dispatchers."""
    load = made.core.load(made.at_s, MEMORY)
    return load.running_count, load.waiting_count, load.max_running_count


def test_a_sequence_that_would_make_tokens_late_waits() -> None:
    made = driver(64, TokenTarget(0.0135, lambda: COST), max_running_count=8, max_batch_tokens=64)
    keys = [made.submit(prompt(3), greedy(4 + number)) for number in range(6)]
    made.step()
    assert counts(made) == (3, 3, 3)
    made.run_to_end()
    assert [len(made.received[key].token_ids) for key in keys] == [4 + number for number in range(6)]
    assert max(len(execute.batch.slices) for execute in made.executed) == 3
    assert made.core.totals.preemptions == 0
    made.assert_empty()


def test_sequences_waiting_for_a_target_are_admitted_in_order() -> None:
    made = driver(64, TokenTarget(0.0115, lambda: COST))
    classes = (PriorityClass.DEFAULT, PriorityClass.DEFAULT, PriorityClass.INTERACTIVE)
    keys = [made.submit(prompt(3), greedy(2), priority=priority) for priority in classes]
    ended = list[int]()
    while made.step() is not None:
        ended += [i for i, key in enumerate(keys) if made.received[key].ending is not None and i not in ended]
    assert ended == [0, *range(len(keys) - 1, 0, -1)]  # the first request was admitted before the others arrived
    made.assert_empty()


def test_the_strictest_running_target_decides_which_sequences_wait() -> None:
    classes = {PriorityClass.INTERACTIVE: Targets(tpot_s=0.0125), PriorityClass.DEFAULT: Targets(tpot_s=0.0145)}
    made = driver(64, TokenTarget(math.inf, lambda: COST), Harvest(targets=classes), max_batch_tokens=64)
    for _ in range(6):
        made.submit(prompt(3), greedy(4))
    made.step()
    assert counts(made) == (4, 2, 4)
    made.run_to_end()
    made.submit(prompt(3), greedy(4), priority=PriorityClass.INTERACTIVE)
    for _ in range(5):
        made.submit(prompt(3), greedy(4))
    made.step()
    assert counts(made) == (2, 4, 2)
    made.run_to_end()
    made.assert_empty()


def test_a_request_has_a_target_of_its_own() -> None:
    made = driver(64, TokenTarget(math.inf, lambda: COST), max_running_count=8, max_batch_tokens=64)
    made.submit(prompt(3), greedy(4), targets=Targets(tpot_s=0.0125))
    for _ in range(5):
        made.submit(prompt(3), greedy(9))
    made.step()
    assert counts(made) == (2, 4, 2)
    made.run_to_end()
    made.assert_empty()


def test_a_target_limits_nothing_after_its_request_has_ended() -> None:
    made = driver(64, TokenTarget(math.inf, lambda: COST), max_running_count=8)
    made.submit(prompt(3), greedy(4), targets=Targets(tpot_s=0.0125))
    made.submit(prompt(3), greedy(40))
    made.step()
    scheduler = made.core.group_scheduler.scheduler
    assert scheduler.has_limit
    for _ in range(5):
        made.step()
    assert counts(made) == (1, 0, 8)
    assert not scheduler.has_limit


def test_one_sequence_runs_however_low_the_target_is() -> None:
    made = driver(64, TokenTarget(1e-9, lambda: COST))
    for _ in range(3):
        made.submit(prompt(3), greedy(2))
    made.step()
    assert counts(made) == (1, 2, 1)
    made.run_to_end()
    made.assert_empty()


def test_running_sequences_are_not_preempted_when_tokens_become_slow() -> None:
    costs = [COST]
    made = driver(64, TokenTarget(0.0135, lambda: costs[-1]))
    for number in range(4):
        made.submit(prompt(3), greedy(9 + number))
    made.step()
    costs.append(COST.scaled(10.0))
    made.step()
    assert counts(made) == (3, 1, 3)
    costs.append(COST.scaled(0.5))
    made.step()
    assert counts(made) == (4, 0, 4)
    assert made.core.totals.preemptions == 0


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 6), (3, 9)])
def test_in_a_pipeline_as_many_sequences_run_as_fit_its_microbatches(stages: int, count: int) -> None:
    leader = Leader(
        64, stages=stages, target=TokenTarget(0.01301, lambda: COST), max_running_count=8, max_waiting_count=12
    )
    for number in range(12):
        leader.submit(f"r{number}")
    for _ in range(6):
        leader.step()
    assert counts(leader) == (count, 12 - count, count)


def test_a_sequence_that_arrives_with_its_kv_is_admitted_whatever_the_target() -> None:
    giver = Leader(ordinal=5)
    giver.submit("theirs")
    giver.step()
    leader = Leader(target=TokenTarget(1e-9, lambda: COST))
    leader.submit("mine")
    leader.step()
    leader.adopt(giver.hand_over(), last=True)
    leader.submit("next")
    leader.step()
    assert counts(leader) == (2, 1, 2)
    assert leader.core.totals.preemptions == 0

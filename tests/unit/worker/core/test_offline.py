"""Offline sequences use the capacity that online ones leave free, and release it at once."""

import pytest

from ballast.common.cost import Chunk, CostModel
from ballast.common.sampling import PriorityClass
from ballast.common.targets import for_all
from services.worker.core.events import Aborted, AdmissionLimited
from services.worker.policy.harvest import Harvest
from tests.support.leader import Leader
from tests.support.worker_core import MEMORY, Driver, greedy
from tests.unit.worker.core.stories import driver, prompt, slices

BATCH = PriorityClass.BATCH
# A step takes 10 ms; tokens above the 32nd take 1 ms each.
COST = CostModel(attention_s=0.0, token_s=0.0, chunk_s=0.01, shared_s=0.01, beyond_s=0.001, knee_tokens=32)
FREE = Harvest(cost=lambda: COST, targets=for_all(tpot_s=1e9))


def running(made: Driver) -> list[int]:
    return [s.sequence_id for s in made.core.group_scheduler.scheduler.running]


def test_reports_count_online_and_offline_work_separately() -> None:
    made = driver(block_count=20, block_tokens=4)
    made.submit(prompt(7), greedy(8), priority=BATCH)
    made.step()
    load = made.core.load(made.at_s, MEMORY)
    assert (load.used_block_count, load.running_count, load.prompt_token_count) == (0, 0, 0)
    assert (load.offline_block_count, load.offline_running_count, load.offline_waiting_count) == (2, 1, 0)
    assert load.offline_wanted_tokens > 0
    assert (load.prompt_tokens_total, load.generation_tokens_total, load.offline_tokens_total) == (0, 0, 7 + 1)
    made.run_to_end()
    assert made.core.load(made.at_s, MEMORY).generation_tokens_total == 0


def test_a_new_online_sequence_takes_the_blocks_of_the_newest_offline_one() -> None:
    made = driver(block_count=6, block_tokens=4, harvest=FREE)
    for number in range(3):
        made.submit(prompt(4, first=10 * number), greedy(3), priority=BATCH)
    made.step()
    made.submit(prompt(6), greedy(3))
    made.step()
    assert running(made) == [4, 1, 2], "the newest offline sequence is preempted, the oldest continues"
    load = made.core.load(made.at_s, MEMORY)
    assert (load.offline_yields_total, load.preemptions_total) == (1, 0)
    made.run_to_end()
    made.assert_empty()


def test_a_new_online_sequence_takes_the_place_of_an_offline_one() -> None:
    made = driver(block_count=20, block_tokens=4, max_running_count=2, harvest=FREE)
    made.submit(prompt(4), greedy(9), priority=BATCH)
    made.submit(prompt(4), greedy(9), priority=BATCH)
    made.step()
    made.submit(prompt(4), greedy(3))
    made.step()
    assert running(made) == [3, 1]
    made.run_to_end()
    made.assert_empty()


def test_running_sequences_grow_into_blocks_of_offline_ones() -> None:
    made = driver(block_count=4, block_tokens=4, harvest=FREE)
    made.submit(prompt(6), greedy(8))
    made.submit(prompt(5), greedy(9), priority=BATCH)
    made.run_to_end()
    load = made.core.load(made.at_s, MEMORY)
    assert (load.offline_yields_total, load.preemptions_total) == (1, 0)
    assert load.offline_lost_tokens_total >= 5


def test_no_offline_request_is_admitted_while_an_online_one_waits() -> None:
    made = driver(block_count=4, block_tokens=4, max_batch_tokens=16)
    made.submit(prompt(9), greedy(6))
    made.submit(prompt(9, first=30), greedy(2))
    made.step()
    made.submit(prompt(2), greedy(1), priority=BATCH)
    made.step()
    load = made.core.load(made.at_s, MEMORY)
    assert (load.waiting_count, load.offline_waiting_count, load.offline_running_count) == (1, 1, 0)
    assert load.offline_wanted_tokens == 0
    made.run_to_end()
    made.assert_empty()


def test_no_offline_request_is_admitted_while_admissions_are_limited() -> None:
    made = driver(block_count=8, block_tokens=4)
    made.feed(AdmissionLimited(made.at_s, 6))
    made.submit(prompt(2), greedy(1), priority=BATCH)
    assert made.step() is None
    made.feed(AdmissionLimited(made.at_s, None))
    made.run_to_end()
    made.assert_empty()


@pytest.mark.parametrize("slowdown", [0.0, 0.5])
def test_a_step_with_online_work_takes_no_longer_than_allowed(slowdown: float) -> None:
    made = driver(
        block_count=200, max_model_len=600, max_batch_tokens=200, harvest=Harvest(cost=lambda: COST, slowdown=slowdown)
    )
    made.submit(prompt(4), greedy(20))
    made.submit(prompt(100), greedy(4), priority=BATCH)
    made.submit(prompt(100), greedy(4), priority=BATCH)
    made.step()
    for number in range(8):
        made.step()
        parts = [Chunk(first, count) for _, first, count, _ in slices(made.executed[-1])]
        assert COST.batch_cost_s(parts) <= 0.01 * (1.0 + slowdown) + 1e-12
        assert number > 1 or sum(count for _, count in parts) >= 32, "tokens that cost no additional time must be used"
    made.run_to_end()
    made.assert_empty()


def test_an_offline_batch_is_as_short_as_is_efficient() -> None:
    made = driver(block_count=200, max_model_len=600, max_batch_tokens=512, harvest=Harvest(cost=lambda: COST))
    made.submit(prompt(300), greedy(2), priority=BATCH)
    made.step()
    (part,) = slices(made.executed[-1])
    efficient = made.core.group_scheduler.scheduler.offline_work.efficient_tokens
    assert part[2] == efficient < 300


def test_without_known_costs_no_offline_work_runs_alongside_online_work() -> None:
    made = driver(block_count=40, block_tokens=4)
    made.submit(prompt(4), greedy(3))
    made.submit(prompt(4), greedy(3), priority=BATCH)
    for _ in range(3):
        made.step()
        assert [part[0] for part in slices(made.executed[-1])] == [1]
    made.step()
    assert [part[0] for part in slices(made.executed[-1])] == [2]
    made.run_to_end()


def test_in_a_group_offline_sequences_fill_a_bubble_and_yield_when_they_have_landed() -> None:
    leader = Leader(8, stages=2, harvest=FREE, max_running_count=2)
    leader.submit("offline", tuple(range(1, 14)), priority=BATCH)
    leader.step()
    assert leader.core.load(leader.at_s, MEMORY).offline_running_count == 1
    leader.submit("person", tuple(range(1, 20)))
    for _ in range(4):
        leader.step()
    load = leader.core.load(leader.at_s, MEMORY)
    assert (load.running_count, load.offline_running_count) == (1, 0)
    assert load.offline_yields_total == 1


def test_online_and_offline_requests_have_separate_queues() -> None:
    made = driver(20, max_running_count=1, max_waiting_count=1)
    made.submit(prompt(4), greedy(2))
    made.submit(prompt(4), greedy(2))
    keys = [made.submit(prompt(4), greedy(2), priority=BATCH) for _ in range(2)]
    assert made.received[keys[0]].ending is None
    ending = made.received[keys[1]].ending
    assert ending is not None
    assert "max_num_queued_reqs" in ending.error


CUT = Harvest(cost=lambda: COST, targets=for_all(ttft_s=0.01), layer_count=8)


def test_only_offline_work_alone_has_safepoints() -> None:
    made = driver(block_count=40, block_tokens=4, harvest=CUT)
    made.submit(prompt(7), greedy(9), priority=BATCH)
    made.step()
    assert made.executed[-1].batch.safepoint_layers == 1, "a slice takes a sixteenth of the TTFT, but at least a layer"
    made.submit(prompt(7, first=20), greedy(3))
    made.step()
    assert made.executed[-1].batch.safepoint_layers == 0
    made.run_to_end()
    made.assert_empty()


def test_slices_of_a_preempted_step_are_recomputed() -> None:
    made = driver(block_count=40, block_tokens=4, harvest=CUT)
    first = made.submit(prompt(7), greedy(9), priority=BATCH)
    made.step()
    made.submit(prompt(5, first=3), greedy(4), priority=BATCH)
    decode_and_prompt = slices(made.want_batch())
    online = made.submit(prompt(4, first=20), greedy(2))
    made.preempt_step()
    made.step()
    taken = [part[:3] for part in slices(made.executed[-1])]
    assert sorted(taken) == sorted([(3, 0, 4), *(part[:3] for part in decode_and_prompt)])
    assert made.received[online].token_ids
    load = made.core.load(made.at_s, MEMORY)
    assert (load.offline_lost_tokens_total, load.offline_yields_total) == (1 + 5, 0)
    made.run_to_end()
    made.assert_empty()
    assert len(made.received[first].token_ids) == 9


def test_a_sequence_that_ends_during_a_preempted_step_leaves_no_blocks() -> None:
    made = driver(block_count=40, block_tokens=4, harvest=CUT)
    key = made.submit(prompt(7), greedy(9), priority=BATCH)
    made.want_batch()
    made.feed(Aborted(made.at_s, key))
    made.preempt_step()
    made.run_to_end()
    made.assert_empty()

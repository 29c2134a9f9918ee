"""Preempted offline sequences keep in host memory the blocks that were copied while they ran."""

import pytest

from ballast.common.cost import CostModel
from ballast.common.sampling import PriorityClass, SamplingParams
from ballast.common.targets import for_all
from services.worker.core.events import Aborted, CapacityChanged, OfflinePaused, RoleChanged, RoomWanted, SequenceKey
from services.worker.core.swapping import SwapSpace
from services.worker.policy.harvest import Harvest
from tests.support.worker_core import MEMORY, Driver, greedy, limits

COST = CostModel(attention_s=0.0, token_s=0.0, chunk_s=0.01, shared_s=0.01, beyond_s=0.001, knee_tokens=64)
HARVEST = Harvest(cost=lambda: COST, targets=for_all(tpot_s=1e9))


def mirroring(block_count: int = 12, host: int = 40, per_step: int = 8, *, swaps_online: bool = False) -> Driver:
    bounds = limits(swap_block_count=host, swap_blocks_per_step=per_step, swaps_online=swaps_online)
    made = Driver(bounds, block_count, harvest=HARVEST)
    made.open(1)
    return made


def space(made: Driver) -> SwapSpace:
    return made.core.group_scheduler.scheduler.swap


def prompt(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + i) % 90 for i in range(count))


def offline(made: Driver, count: int = 13, answer: int = 20, first: int = 0) -> SequenceKey:
    return made.submit(prompt(count, first), greedy(answer), priority=PriorityClass.BATCH)


def steps(made: Driver, count: int) -> None:
    for _ in range(count):
        made.step()


def computed_tokens(made: Driver) -> int:
    return sum(len(s.token_ids) for e in made.executed for s in e.batch.slices)


def judge(made: Driver, key: SequenceKey, asked: tuple[int, ...]) -> None:
    assert tuple(made.received[key].token_ids) == made.expected(key, asked).token_ids


def test_a_yielding_sequence_leaves_at_once_and_returns_with_its_full_blocks() -> None:
    made = mirroring(block_count=8)
    mine = offline(made)
    steps(made, 5)
    assert space(made).mirrored_block_count == 4, "the full blocks of 17 tokens with KV"
    newcomer = made.submit(prompt(27, 40), greedy(4))
    execute = made.step()
    assert execute is not None
    assert [part.sequence_id for part in execute.batch.slices] == [2], "the new sequence must not wait for a copy"
    load = made.core.load(made.at_s, MEMORY)
    assert (load.offline_waiting_count, load.offline_running_count, load.offline_block_count) == (1, 0, 0)
    assert (load.offline_yields_total, load.offline_lost_tokens_total) == (1, 17 - 16)
    assert (load.waiting_count, load.used_block_count, load.offline_wanted_tokens) == (0, 7, 0)
    made.run_to_end()
    judge(made, mine, prompt(13))
    judge(made, newcomer, prompt(27, 40))
    made.assert_empty()
    assert computed_tokens(made) == (13 + 20 - 1) + (27 + 4 - 1) + 1
    assert space(made).used_block_count == 0


def test_without_host_memory_everything_is_recomputed() -> None:
    made = mirroring(block_count=8, host=0)
    mine = offline(made)
    steps(made, 5)
    made.submit(prompt(27, 40), greedy(4))
    made.run_to_end()
    judge(made, mine, prompt(13))
    assert made.core.load(made.at_s, MEMORY).offline_lost_tokens_total == 17
    assert made.engine.copied_blocks == 0


def test_a_returning_sequence_that_yields_again_retains_its_mirror() -> None:
    made = mirroring(block_count=16, per_step=1)
    beside = made.submit(prompt(4, 70), greedy(40))  # its steps limit copies to one block each
    mine = offline(made)
    steps(made, 8)
    made.submit(prompt(35, 40), greedy(2))
    for _ in range(20):
        made.step()
        if space(made).returning:
            break
    assert [s.sequence_id for s in space(made).returning] == [2]
    before = made.core.load(made.at_s, MEMORY)
    assert before.offline_block_count > 0
    made.submit(prompt(35, 50), greedy(2))
    made.step()
    load = made.core.load(made.at_s, MEMORY)
    assert (load.offline_waiting_count, load.offline_yields_total) == (1, before.offline_yields_total + 1)
    assert load.offline_lost_tokens_total == before.offline_lost_tokens_total
    made.run_to_end()
    judge(made, mine, prompt(13))
    judge(made, beside, prompt(4, 70))
    made.assert_empty()


def test_mirror_copies_take_half_of_the_budget_hidden_behind_a_step() -> None:
    made = mirroring(block_count=40, per_step=4)
    offline(made, 16)
    offline(made, 16, first=30)
    counts: list[int] = []
    for _ in range(6):
        execute = made.step()
        assert execute is not None
        counts.append(sum(len(copy.host_blocks) for copy in execute.copies))
    assert max(counts) == 2
    assert space(made).mirrored_block_count == sum(counts)


def test_a_full_host_mirrors_the_sequences_that_yield_first() -> None:
    made = mirroring(block_count=40, host=6)
    first = offline(made, 16)
    steps(made, 3)
    assert space(made)._mirrors == {1: 4}
    second = offline(made, 16, first=30)
    steps(made, 3)
    assert space(made)._mirrors == {1: 2, 2: 4}
    made.run_to_end()
    judge(made, first, prompt(16))
    judge(made, second, prompt(16, 30))
    made.assert_empty()


def test_online_sequences_displace_offline_ones_from_host_memory() -> None:
    made = mirroring(block_count=12, host=7, swaps_online=True)
    mine = offline(made, 16)
    steps(made, 3)
    asked = [made.submit(prompt(8, first), greedy(30)) for first in (30, 50, 70)]
    made.run_to_end()
    assert space(made).swapped_total > 0
    for key, first in zip(asked, (30, 50, 70), strict=True):
        judge(made, key, prompt(8, first))
    judge(made, mine, prompt(16))
    made.assert_empty()
    assert made.core.load(made.at_s, MEMORY).offline_lost_tokens_total >= 16, "its blocks on the host must be evicted"


@pytest.mark.parametrize("yields", [False, True])
def test_an_ended_sequence_frees_device_and_host_blocks(yields: bool) -> None:
    made = mirroring(block_count=8)
    mine = offline(made)
    steps(made, 5)
    if yields:
        made.submit(prompt(27, 40), greedy(4))
        made.step()
    made.feed(Aborted(made.at_s, mine))
    assert space(made).used_block_count == 0
    made.run_to_end()
    made.assert_empty()


@pytest.mark.parametrize(
    "event", [RoleChanged(0.0, leads=True, stage_count=2), CapacityChanged(0.0, 12, swap_block_count=1)]
)
def test_a_change_of_the_group_discards_mirrors(event: RoleChanged | CapacityChanged) -> None:
    made = mirroring()
    offline(made)
    steps(made, 5)
    assert space(made).mirrored_block_count
    made.feed(event)
    assert space(made).used_block_count == 0
    assert [s.sequence_id for s in made.core.group_scheduler.scheduler.offline] == [1]


def test_offline_sequences_are_preempted_before_a_group_change_and_return_afterwards() -> None:
    made = mirroring(block_count=20)
    mine = [offline(made), offline(made, first=30)]
    made.submit(prompt(4, 70), greedy(12))
    steps(made, 5)
    made.want_batch()
    made.feed(OfflinePaused(made.at_s, paused=True))
    assert made.core.load(made.at_s, MEMORY).offline_running_count == 2, "both are in the batch in flight"
    made.finish_step()
    load = made.core.load(made.at_s, MEMORY)
    assert (load.offline_running_count, load.offline_wanted_tokens, load.running_count) == (0, 0, 1)
    assert set(made.core.group_scheduler.kv_tokens) == {3}, "KV of offline sequences must not be exchanged"
    assert made.core.group_scheduler.longest_token_count < 13
    steps(made, 4)
    assert made.core.load(made.at_s, MEMORY).offline_running_count == 0
    made.feed(OfflinePaused(made.at_s, paused=False))
    made.run_to_end()
    for key, first in zip(mine, (0, 30), strict=True):
        judge(made, key, prompt(13, first))
    made.assert_empty()


def test_arriving_kv_gets_the_blocks_of_offline_sequences() -> None:
    made = mirroring(block_count=8, host=0)  # no copies, which would hold blocks until the next batch
    offline(made)
    steps(made, 3)
    group_scheduler = made.core.group_scheduler
    made.want_batch()
    made.feed(RoomWanted(made.at_s, 7))
    assert "are free before the next batch" in group_scheduler.why_no_room(7, new=True), "it is in a batch"
    made.finish_step()
    made.feed(RoomWanted(made.at_s, 9))
    assert group_scheduler.why_no_room(9, new=True), "the cache has only 8 blocks"
    assert made.core.load(made.at_s, MEMORY).offline_running_count == 1, "so the offline sequence must not be preempted"
    made.feed(RoomWanted(made.at_s, 7))
    assert not group_scheduler.why_no_room(7, new=True)
    assert group_scheduler.book.free_count >= 7, "the blocks must be free at once"


def test_a_scored_prompt_starts_over_after_it_has_yielded() -> None:
    """Prompt logprobs require a single pass over the whole prompt, so nothing is mirrored before that pass ends."""
    bounds = limits(swap_block_count=40, swap_blocks_per_step=8, swaps_online=False, max_batch_tokens=8)
    made = Driver(bounds, 12, harvest=HARVEST)
    made.open(1)
    scored = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    mine = made.submit(prompt(40), scored, priority=PriorityClass.BATCH)
    steps(made, 4)
    assert computed_tokens(made) > 16
    assert not space(made).mirrored_block_count
    made.submit(prompt(27, 40), greedy(4))
    made.run_to_end()
    assert made.core.load(made.at_s, MEMORY).offline_yields_total == 1
    assert len(made.received[mine].token_ids) == 4
    made.assert_empty()

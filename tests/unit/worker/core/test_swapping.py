"""Preempted sequences whose KV stays in host memory. The core runs with a model that reads its KV back."""

import random
from typing import Any

import pytest

from ballast.common.errors import ConfigError
from ballast.common.ids import WorkerId
from ballast.common.sampling import PriorityClass
from services.worker.core import events as w
from services.worker.core.swapping import SwapSpace
from services.worker.policy.swapping import FIRST_BLOCKS, CopyPace, copy_budget
from tests.support.worker_core import MEMORY, Driver, greedy, limits


def swapping(block_count: int = 12, host: int = 40, per_step: int = 1, **changes: Any) -> Driver:
    driver = Driver(limits(swap_block_count=host, swap_blocks_per_step=per_step, **changes), block_count)
    driver.open(1)
    return driver


def space(driver: Driver) -> SwapSpace:
    return driver.core.group_scheduler.scheduler.swap


def submit(driver: Driver, *lengths: tuple[int, int]) -> list[tuple[w.SequenceKey, tuple[int, ...]]]:
    """Submits a request for each pair (prompt tokens, answer tokens)."""
    asked: list[tuple[w.SequenceKey, tuple[int, ...]]] = []
    for number, (prompt_count, answer_count) in enumerate(lengths):
        prompt = tuple((7 * number + i) % 90 for i in range(prompt_count))
        asked.append((driver.submit(prompt, greedy(answer_count)), prompt))
        driver.at_s += 0.001
    return asked


def judge(driver: Driver, asked: list[tuple[w.SequenceKey, tuple[int, ...]]]) -> None:
    for key, prompt in asked:
        want = driver.expected(key, prompt)
        assert tuple(driver.received[key].token_ids) == want.token_ids
        ending = driver.received[key].ending
        assert ending is not None
        assert ending.finish_reason is want.finish_reason
    driver.assert_empty()
    assert len(space(driver).entries) == space(driver).used_block_count == 0


def computed_tokens(driver: Driver) -> int:
    return sum(len(s.token_ids) for e in driver.executed for s in e.batch.slices)


@pytest.mark.parametrize("per_step", [0, 1, 2, 50])
def test_a_swapped_out_sequence_returns_and_nothing_is_recomputed(per_step: int) -> None:
    driver = swapping(per_step=per_step)
    asked = submit(driver, (8, 30), (8, 30), (8, 30))
    driver.run_to_end()
    judge(driver, asked)
    assert driver.core.totals.preemptions == space(driver).swapped_total > 0
    assert driver.engine.copied_blocks >= 2 * 3
    # The KV of every token but the last has been computed exactly once.
    assert computed_tokens(driver) == 3 * (8 + 30 - 1)


def test_without_host_memory_victims_are_recomputed() -> None:
    driver = swapping(host=0)
    asked = submit(driver, (8, 30), (8, 30), (8, 30))
    driver.run_to_end()
    judge(driver, asked)
    assert driver.core.totals.preemptions > 0
    assert driver.engine.copied_blocks == 0
    assert computed_tokens(driver) > 3 * (8 + 30 - 1)


def test_if_host_memory_is_full_victims_are_recomputed() -> None:
    driver = swapping(block_count=14, host=5, max_running_count=6)
    asked = submit(driver, *[(6, 30)] * 6)
    driver.run_to_end()
    judge(driver, asked)
    assert 0 < space(driver).swapped_total < driver.core.totals.preemptions


def test_no_step_copies_more_than_its_budget_unless_it_computes_nothing() -> None:
    driver = swapping(per_step=2, max_running_count=6)
    asked = submit(driver, *[(8, 30)] * 5)
    driver.run_to_end()
    judge(driver, asked)
    counts = [sum(len(c.device_blocks) for c in e.copies) for e in driver.executed]
    assert max(counts) == 2
    assert all(e.batch.slices for e in driver.executed)


def test_the_first_in_the_queue_is_never_swapped_out_and_never_waits_for_long() -> None:
    driver = swapping(block_count=10, per_step=1, max_running_count=6)
    asked = submit(driver, (4, 36), *[(4, 30)] * 4)
    first = asked[0][0]
    steps = 0
    while driver.received[first].ending is None:
        assert driver.step() is not None
        steps += 1
    assert steps < 36 + 12, "only a step or two may be skipped while another's blocks are copied"
    driver.run_to_end()
    judge(driver, asked)


def until_away(driver: Driver) -> None:
    for _ in range(200):
        if space(driver).away:
            return
        driver.step()
    raise AssertionError("no sequence was swapped out")


def test_an_end_in_any_phase_frees_device_and_host_blocks() -> None:
    for wanted in ("leaving", "away", "returning"):
        driver = swapping(block_count=22, per_step=1)
        asked = submit(driver, (8, 20), (8, 40), (8, 30), (8, 30))
        for _ in range(300):
            entries = [e for e in space(driver).entries.values() if e.phase.value == wanted]
            if entries:
                break
            driver.step()
        else:
            raise AssertionError(f"no sequence was ever {wanted}")
        ended = entries[0].sequence.key
        driver.want_batch()
        driver.feed(w.Aborted(driver.at_s, ended))  # its copy may be under way
        driver.run_to_end()
        judge(driver, [one for one in asked if one[0] != ended])


def test_a_change_of_the_group_makes_swapped_sequences_recompute() -> None:
    driver = swapping()
    asked = submit(driver, (8, 30), (8, 30), (8, 30))
    until_away(driver)
    assert space(driver).enabled
    assert not driver.core.handle(w.RoleChanged(driver.at_s, leads=True, stage_count=2)), "stages have nothing to free"
    driver.core.check()
    assert len(space(driver).entries) == 0
    assert not space(driver).enabled, "the other stages' host memory is not known yet"
    assert driver.core.load(driver.at_s, MEMORY).waiting_count == 1
    assert len(asked) == 3


def test_without_host_memory_stages_are_ordered_to_forget_active_copies() -> None:
    driver = swapping(block_count=22, per_step=1)
    submit(driver, (8, 20), (8, 40), (8, 30), (8, 30))
    while not space(driver).leaving_block_count:
        driver.step()
    (entry,) = space(driver).entries.values()
    blocks = driver.core.group_scheduler.scheduler.block_count
    told, removed = driver.core.handle(w.CapacityChanged(driver.at_s, blocks, swap_block_count=0))
    assert isinstance(told, w.Emit)
    assert told.preempted == (entry.sequence.key.handle,)
    assert isinstance(removed, w.Removed)
    assert removed.batch.removed == (entry.sequence.sequence_id,)
    driver.core.check()
    assert space(driver).used_block_count == 0


def test_swaps_are_reported_once_blocks_are_free_and_at_readmission() -> None:
    driver = swapping(per_step=1)
    submit(driver, (8, 30), (8, 30), (8, 30))
    while not space(driver).leaving_block_count:
        driver.step()
        assert not driver.preempted
    (entry,) = space(driver).entries.values()
    key = entry.sequence.key
    while space(driver).leaving_block_count:
        assert not driver.preempted, "its blocks are not free yet"
        driver.step()
    assert driver.preempted == {key}
    while space(driver).away:
        driver.step()
    assert not driver.preempted, "its KV is being copied back"
    driver.run_to_end()


def test_a_handed_over_sequence_frees_its_host_blocks() -> None:
    driver = swapping()
    submit(driver, (8, 30), (8, 30), (8, 30))
    until_away(driver)
    commands = driver.core.handle(w.HandOver(driver.at_s, WorkerId("other")))
    (snapshots,) = (c.snapshots for c in commands if isinstance(c, w.HandedOver))
    ((_, moved),) = snapshots
    assert len(moved) == 3
    assert space(driver).used_block_count == 0
    assert min(s.computed_tokens for s in moved) == 0 < max(s.computed_tokens for s in moved)
    assert len(space(driver).entries) == 0


def test_a_shrinking_cache_discards_swapped_sequences() -> None:
    driver = swapping(block_count=12)
    asked = submit(driver, (8, 20), (8, 20), (8, 20))
    until_away(driver)
    driver.feed(w.CapacityChanged(driver.at_s, 9))
    assert len(space(driver).entries) == 0
    driver.run_to_end()
    judge(driver, asked)


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_give_the_undisturbed_tokens(seed: int) -> None:
    rng = random.Random(seed)
    driver = swapping(
        block_count=rng.randint(12, 20), host=rng.choice([6, 40]), per_step=rng.choice([0, 1, 3]), max_running_count=6
    )
    asked: list[tuple[w.SequenceKey, tuple[int, ...]]] = []
    for number in range(30):
        prompt = tuple(rng.randrange(90) for _ in range(rng.randint(1, 16)))
        priority = rng.choice(list(PriorityClass))
        key = driver.submit(prompt, greedy(rng.randint(5, 30)), priority=priority)
        if driver.received[key].ending is None:  # not refused
            asked.append((key, prompt))
        for _ in range(rng.randint(0, 6)):
            driver.step()
        if number % 7 == 6:
            driver.want_batch()
            if driver.pending is not None:
                driver.finish_step()
    driver.run_to_end()
    judge(driver, asked)
    assert space(driver).swapped_total > 0


def test_the_budget_is_the_copies_hidden_behind_a_step() -> None:
    pace = CopyPace()
    assert copy_budget(pace, 0) == FIRST_BLOCKS
    assert copy_budget(pace, 3) == 3
    pace = pace.after(step_s=0.02, copied_blocks=0, copy_s=0.0)
    assert copy_budget(pace, 0) == FIRST_BLOCKS
    pace = pace.after(step_s=0.02, copied_blocks=4, copy_s=0.004)
    assert copy_budget(pace, 0) == 20
    for _ in range(50):
        pace = pace.after(step_s=0.002, copied_blocks=1, copy_s=0.01)
    assert copy_budget(pace, 0) == 1


def test_negative_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="swap_space_bytes"):
        limits(swap_block_count=-1)

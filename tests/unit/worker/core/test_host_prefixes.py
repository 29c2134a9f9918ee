"""Prefix blocks evicted from the device stay in host memory and are copied back if that is faster than recomputing."""

from typing import Any

from ballast.common.cost import CostModel
from ballast.common.sampling import PriorityClass
from ballast.common.targets import for_all
from services.worker.core.blocks import BlockBook
from services.worker.core.events import Aborted, RoleChanged, RoomWanted
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.host_prefixes import HostPrefixes
from services.worker.policy.harvest import Harvest
from services.worker.policy.swapping import CopyPace, bringing_s
from tests.support.worker_core import MEMORY, VOCAB_SIZE, Driver, greedy, limits


def driver_of(block_count: int = 20, *, harvest: Harvest | None = None, **bounds: Any) -> Driver:
    """Any: each bound has the type of its field in the limits."""
    wide: dict[str, Any] = {"max_model_len": 256, "max_batch_tokens": 256, "swap_block_count": 40}
    wide |= {"prefix_caching": True, "swaps_online": False, "swap_blocks_per_step": 8}
    driver = Driver(limits(**(wide | bounds)), block_count, harvest=harvest)
    driver.open(1)
    return driver


def group_of(driver: Driver) -> GroupScheduler:
    return driver.core.group_scheduler


def host_of(driver: Driver) -> HostPrefixes:
    return group_of(driver).scheduler.swap.prefixes


def tokens(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + i * i) % VOCAB_SIZE for i in range(count))


def run(driver: Driver, prompt: tuple[int, ...], max_tokens: int = 6) -> int:
    """Runs a request to its end. Returns how many of its prompt tokens were cached."""
    key = driver.submit(prompt, greedy(max_tokens))
    driver.run_to_end()
    ending = driver.received[key].ending
    assert ending is not None
    assert tuple(driver.received[key].token_ids) == driver.expected(key, prompt).token_ids
    return ending.cached_token_count


def give_up(driver: Driver, kept: int = 0) -> None:
    driver.feed(RoomWanted(driver.at_s, group_of(driver).free_block_count - kept))


def test_evicted_blocks_return_from_the_host_and_are_counted() -> None:
    driver = driver_of()
    run(driver, tokens(17))
    run(driver, tokens(5, first=3))  # its steps leave enough time to copy the first request's blocks to host memory
    give_up(driver)
    computed = sum(len(s.token_ids) for e in driver.executed for s in e.batch.slices)
    assert run(driver, tokens(18)) == 16
    assert sum(len(s.token_ids) for e in driver.executed for s in e.batch.slices) - computed == 2 + 5
    load = driver.core.load(driver.at_s, MEMORY)
    assert (load.prefix_hits_total, load.prefix_host_hits_total) == (16, 16)
    assert load.retained_fraction == load.retained_block_count / 20 > 0.0
    assert run(driver, tokens(18)) == 16
    assert driver.core.load(driver.at_s, MEMORY).prefix_host_hits_total == 16, "the prefix is on the device again"


def test_blocks_on_the_device_take_precedence_over_those_of_the_host() -> None:
    driver = driver_of()
    run(driver, tokens(17))
    run(driver, tokens(5, first=3))
    give_up(driver, kept=2)
    run(driver, tokens(17))
    load = driver.core.load(driver.at_s, MEMORY)
    assert (load.prefix_hits_total, load.prefix_host_hits_total) == (16, 16)


def test_each_block_is_copied_once() -> None:
    driver = driver_of()
    run(driver, tokens(17))
    for _ in range(5):
        run(driver, tokens(5, first=3))
    assert driver.engine.copied_blocks == len(host_of(driver)) == 5 + 1, "5 of the first prompt, 1 of an answer"


def test_least_recently_used_copies_are_evicted_first() -> None:
    driver = driver_of(swap_block_count=6)
    for first in (0, 1, 2):
        run(driver, tokens(17, first=first), 2)
    run(driver, tokens(5, first=9), 8)
    assert len(host_of(driver)) == 6
    give_up(driver)
    assert run(driver, tokens(17, first=0)) == 0
    assert run(driver, tokens(17, first=2)) > 0


def test_a_copy_is_not_used_before_it_has_landed() -> None:
    driver = driver_of()
    run(driver, tokens(17))
    key = driver.submit(tokens(5, first=3), greedy(8))
    execute = driver.want_batch()
    assert execute is not None
    assert [len(copy.numbers) for copy in execute.batch.copies] == [5]
    assert len(host_of(driver)) == 0
    give_up(driver)
    driver.finish_step()
    driver.run_to_end()
    assert len(driver.received[key].token_ids) == 8
    assert run(driver, tokens(17)) == 0, "its blocks were evicted before the copy had completed"


def test_a_step_that_fails_has_copied_nothing() -> None:
    driver = driver_of()
    run(driver, tokens(17))
    driver.submit(tokens(5, first=3), greedy(8))
    driver.want_batch()
    driver.fail_step()
    assert len(host_of(driver)) == 0
    assert group_of(driver).scheduler.swap.used_block_count == 0


def test_a_request_may_be_aborted_while_its_blocks_return() -> None:
    driver = driver_of(swap_blocks_per_step=1)
    run(driver, tokens(17))
    run(driver, tokens(5, first=3), 12)
    give_up(driver)
    driver.submit(tokens(30, first=5), greedy(12))
    driver.step()
    key = driver.submit(tokens(18), greedy(2))
    driver.step()
    driver.feed(Aborted(driver.at_s, key))
    driver.run_to_end()
    assert run(driver, tokens(18)) > 0


def test_copies_are_forgotten_when_the_group_changes() -> None:
    driver = driver_of()
    run(driver, tokens(17))
    run(driver, tokens(5, first=3))
    driver.feed(RoleChanged(driver.at_s, leads=True))
    assert len(host_of(driver)) == 0
    assert run(driver, tokens(17)) == 0


def test_swapped_sequences_and_mirrors_take_precedence_over_copies() -> None:
    driver = driver_of(block_count=12, swap_block_count=6, swaps_online=True, max_running_count=4)
    run(driver, tokens(17), 4)
    for first in (3, 5):
        driver.submit(tokens(20, first=first), greedy(20), priority=PriorityClass.DEFAULT)
    driver.run_to_end()
    assert group_of(driver).scheduler.swap.swapped_total


def test_blocks_that_are_faster_to_recompute_do_not_return() -> None:
    driver = driver_of(harvest=Harvest(cost=lambda: CostModel(0.0, 1e-9, 0.0, 0.0)))
    run(driver, tokens(17))
    run(driver, tokens(5, first=3))
    group_of(driver).scheduler.swap.measured(0.001, 1, 0.01)
    give_up(driver)
    assert run(driver, tokens(18)) == 0


def test_the_cost_of_copies_is_measured() -> None:
    assert bringing_s(CopyPace(step_s=0.01, block_s=0.001), 4) == 0.004
    assert bringing_s(CopyPace(None, None), 11) == 0.0


def test_one_block_that_was_not_copied_does_not_hide_the_others() -> None:
    driver = driver_of()
    run(driver, tokens(17))
    driver.at_s = 5.0
    run(driver, tokens(5, first=3))
    give_up(driver)
    assert group_of(driver).scheduler.prefixes.kept_since_s == 0.0


def test_steps_are_not_simulated_together_while_copies_are_due() -> None:
    driver = driver_of(swap_blocks_per_step=1)
    run(driver, tokens(17), 2)
    driver.submit(tokens(5, first=3), greedy(40, ignore_eos=True))
    seen = [group_of(driver).scheduler.decides_nothing for _ in range(8) if driver.step()]
    assert seen == sorted(seen)
    assert seen[0] is False
    assert seen[-1] is True


def test_dispatchers_learn_that_a_prefix_is_still_cached() -> None:
    driver = driver_of()
    run(driver, tokens(17))
    driver.at_s = 5.0
    run(driver, tokens(5, first=3))
    give_up(driver, kept=2)
    assert group_of(driver).scheduler.prefixes.kept_since_s == 0.0
    group_of(driver).scheduler.swap.limit(0)
    assert 0.0 < group_of(driver).scheduler.prefixes.kept_since_s < 5.0


def test_copies_in_use_are_not_evicted() -> None:
    host = HostPrefixes(BlockBook(8, 4), 4)
    assert len(host.copy([(1, b"one"), (2, b"two")])) == 2
    host.landed([1, 2], good=True)
    host.read((b"one",))
    assert host.removable_count == 1
    host.make_room(2)
    assert [b"one" in host, b"two" in host] == [True, False]
    host.done((b"one",))
    host.make_room(2)
    assert len(host) == 0


def test_copies_made_during_a_preempted_step_are_complete() -> None:
    """If such copies never completed, their host blocks would count as swapped KV, which offline sequences cannot
    displace.
    """
    cost = CostModel(attention_s=0.0, token_s=0.0, chunk_s=0.01, shared_s=0.01)
    driver = driver_of(40, harvest=Harvest(cost=lambda: cost, targets=for_all(ttft_s=0.01), layer_count=8))
    run(driver, tokens(17))
    driver.submit(tokens(5, first=3), greedy(6), priority=PriorityClass.BATCH)
    execute = driver.want_batch()
    assert execute is not None
    assert execute.copies
    driver.preempt_step()
    assert len(host_of(driver)) == len(execute.copies[0].host_blocks)
    assert group_of(driver).scheduler.swap.used_block_count == 0
    driver.run_to_end()

"""Prefix caching on a worker that serves alone: which blocks are found, reported to dispatchers, and evicted first."""

from dataclasses import replace
from typing import Any

import pytest

from ballast.common.ids import WorkerId
from ballast.common.marks import marks_of
from ballast.common.sampling import PriorityClass
from services.worker.core import events as w
from services.worker.core.batch import Batch, NamedBlocks, TakenBlocks
from services.worker.core.blocks import BlockBook
from services.worker.core.prefixes import PrefixIndex
from tests.support.worker_core import MEMORY, VOCAB_SIZE, Driver, greedy, limits


def driver_of(block_count: int = 64, **bounds: Any) -> Driver:
    """Any: each bound has the type of its field in the limits."""
    wide: dict[str, Any] = {"max_model_len": 4096, "max_batch_tokens": 4096, "max_running_count": 200}
    wide |= {"max_waiting_count": 200, "max_waiting_tokens": 1 << 20, "prefix_caching": True}
    driver = Driver(limits(**(wide | bounds)), block_count)
    driver.open(1)
    return driver


def index_of(driver: Driver) -> PrefixIndex:
    return driver.core.group_scheduler.scheduler.prefixes


def tokens(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + i * i) % VOCAB_SIZE for i in range(count))


def cached(driver: Driver, key: w.SequenceKey) -> int:
    ending = driver.received[key].ending
    assert ending is not None
    return ending.cached_token_count


def run(driver: Driver, prompt: tuple[int, ...], max_tokens: int = 2, *, salt: bytes = b"") -> int:
    """Runs a request to its end. Returns how many of its prompt tokens were cached."""
    key = driver.submit(prompt, greedy(max_tokens), cache_salt=salt)
    driver.run_to_end()
    assert tuple(driver.received[key].token_ids) == driver.expected(key, prompt).token_ids
    return cached(driver, key)


def test_whole_blocks_are_found_and_never_the_last_token() -> None:
    driver = driver_of()
    assert run(driver, tokens(16)) == 0
    assert run(driver, tokens(16)) == 12
    assert run(driver, tokens(19)) == 16
    assert run(driver, (*tokens(9), 1, 2, 3, 4)) == 8
    assert sum(len(s.token_ids) for s in driver.executed[2].batch.slices) == 4, "the last block is computed"


def test_equal_tokens_after_different_ones_are_not_found() -> None:
    driver = driver_of()
    run(driver, (*range(1, 5), *range(11, 15), 9))
    run(driver, (*range(21, 25), *range(31, 35), 9))
    assert run(driver, (*range(1, 5), *range(31, 35), 9)) == 4


def test_answers_are_found_by_the_next_turn() -> None:
    driver = driver_of()
    key = driver.submit(tokens(8), greedy(9))
    driver.run_to_end()
    assert run(driver, (*tokens(8), *driver.received[key].token_ids, 5)) == 16


def test_other_salts_find_nothing() -> None:
    driver = driver_of()
    assert run(driver, tokens(16), salt=b"a") == 0
    assert run(driver, tokens(16), salt=b"b") == run(driver, tokens(16)) == 0
    assert run(driver, tokens(16), salt=b"a") == 12


def test_waiting_requests_need_a_common_prefix_once() -> None:
    driver = driver_of(block_count=500, block_tokens=16, max_running_count=1)
    trunk = tokens(2000)
    for n in range(101):
        driver.submit((*trunk, n % VOCAB_SIZE, n // 2), greedy(4))
    load = driver.core.load(0.0, MEMORY)
    assert (load.running_count, load.waiting_count) == (1, 100)
    assert load.waiting_block_count == 125 + 100
    driver.want_batch()
    driver.finish_step()
    load = driver.core.load(0.0, MEMORY)
    assert load.waiting_block_count == 100, "the running request holds the common blocks"
    assert load.prompt_token_count == 100 * 2


def test_the_tail_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    driver = driver_of(block_count=20)
    old, new = tokens(17), tokens(17, first=3)
    run(driver, old)
    run(driver, new)
    run(driver, old[:9])
    assert index_of(driver).retained_count == 8
    driver.feed(w.RoomWanted(driver.at_s, 20 - 3))
    assert index_of(driver).retained_count == 3
    assert run(driver, new) == 4, "its last blocks were least recently used"
    assert run(driver, old[:13]) == 8, "its first two blocks were used last"


def test_blocks_used_only_offline_are_evicted_first() -> None:
    driver = driver_of(block_count=40)
    run(driver, tokens(17))
    for n in range(6):
        driver.submit(tokens(60, first=10 + n), greedy(2), priority=PriorityClass.BATCH)
        driver.run_to_end()
    assert run(driver, tokens(17)) == 16
    driver.submit(tokens(17), greedy(2), priority=PriorityClass.BATCH)
    driver.run_to_end()
    driver.feed(w.RoomWanted(driver.at_s, 40 - 4))
    assert run(driver, tokens(17)) == 16, "use by offline work must not cause their eviction"


def test_a_preempted_sequence_recomputes_only_evicted_blocks() -> None:
    driver = driver_of(block_count=8, max_model_len=64)
    first = driver.submit(tokens(12), greedy(16), priority=PriorityClass.INTERACTIVE)
    second = driver.submit(tokens(8, first=5), greedy(12))
    driver.run_to_end()
    assert driver.core.totals.preemptions >= 1
    for key, prompt in ((first, tokens(12)), (second, tokens(8, first=5))):
        assert tuple(driver.received[key].token_ids) == driver.expected(key, prompt).token_ids
    assert cached(driver, second) == 0, "a preempted request that finds its own blocks is no cache hit"


def test_simultaneous_equal_prompts_are_computed_once() -> None:
    driver = driver_of(block_count=600, block_tokens=16, max_batch_tokens=512)
    trunk = tokens(2000)
    keys = [driver.submit((*trunk, n), greedy(4)) for n in range(64)]
    other = driver.submit(tokens(300, first=9), greedy(4))
    driver.run_to_end()
    computed = sum(len(s.token_ids) for e in driver.executed for s in e.batch.slices if s.first_position < 2000)
    assert computed <= 2001 + 300 + 3
    for n, key in enumerate(keys):
        assert tuple(driver.received[key].token_ids) == driver.expected(key, (*trunk, n)).token_ids
    assert driver.received[other].ending is not None


def test_a_request_that_shares_little_does_not_wait() -> None:
    driver = driver_of(block_count=600, block_tokens=16, max_batch_tokens=512)
    driver.submit(tokens(2000), greedy(4))
    driver.submit((*tokens(300), *tokens(400, first=7)), greedy(4))
    assert driver.core.load(0.0, MEMORY).running_count == 2
    driver.submit((*tokens(500), *tokens(400, first=7)), greedy(4))
    assert driver.core.load(0.0, MEMORY).waiting_count == 1


def test_a_step_that_fails_leaves_nothing_to_be_found() -> None:
    driver = driver_of(max_batch_tokens=200)
    driver.submit(tokens(40), greedy(4))
    driver.want_batch()
    driver.fail_step()
    assert run(driver, tokens(40)) == 0


def test_a_change_of_role_forgets_all() -> None:
    driver = driver_of()
    run(driver, tokens(16))
    told = driver.core.handle(w.HandOver(driver.at_s, WorkerId("other")))
    assert index_of(driver).retained_count == 0
    assert driver.core.group_scheduler.book.used_count == 0
    driver.core.handle(w.RoleChanged(driver.at_s, leads=True))
    driver.core.check()
    assert told
    assert run(driver, tokens(16)) == 0


def test_sequences_that_run_across_a_group_change_get_no_numbers() -> None:
    """The stages of the new group do not have the KV of these sequences yet."""
    named = list[bool]()
    for changes in (False, True):
        driver = driver_of()
        driver.submit(tokens(13), greedy(9))
        driver.step()
        index, scheduler = index_of(driver), driver.core.group_scheduler.scheduler
        index.drain_changes()
        if changes:
            scheduler.forget_prefixes()
        scheduler.running[0].computed_tokens += 4
        index.name(scheduler.running[0])
        named.append(bool(index.drain_changes()[0]))
    assert named == [True, False]


def test_dispatchers_are_notified_of_marks_and_of_the_last_eviction() -> None:
    driver = driver_of(block_count=80, block_tokens=16)
    prompt = tokens(700)
    marks: list[int] = []
    feed = driver.feed

    def feed_and_note(event: w.Event) -> list[w.Command]:
        commands = feed(event)
        for command in commands:
            marks.extend(command.marks if isinstance(command, w.Emit) else ())
        return commands

    driver.feed = feed_and_note
    driver.submit(prompt, greedy(2))
    driver.run_to_end()
    assert tuple(marks) == marks_of(prompt)
    assert index_of(driver).marks == marks
    driver.at_s = 100.0
    driver.feed(w.RoomWanted(driver.at_s, 0))
    assert driver.core.load(driver.at_s, MEMORY).prefixes_kept_s == pytest.approx(100.0)
    used_at_s = driver.at_s = 130.0
    driver.feed(w.RoomWanted(driver.at_s, 79))
    assert driver.core.load(driver.at_s, MEMORY).prefixes_kept_s >= used_at_s - 1.0
    assert index_of(driver).marks == []


def test_a_lost_group_leaves_no_marks_for_its_streams() -> None:
    driver = driver_of(block_count=100, max_model_len=400, max_batch_tokens=400)
    driver.open(2)  # gets no output, and so no marks yet
    run(driver, tokens(300))
    assert driver.core._outbox._marks
    driver.core.handle(w.GroupLost(driver.at_s))
    assert not driver.core._outbox._marks


def test_without_caching_no_block_is_numbered_or_reported() -> None:
    driver = Driver(limits(), 32)
    driver.open(1)
    for _ in range(2):
        assert run(driver, tokens(16)) == 0
    assert all(not (e.batch.named or e.batch.taken or e.batch.forgotten) for e in driver.executed)
    assert driver.core.group_scheduler.book.used_count == 0


def test_a_sequence_that_ends_in_a_failed_step_leaves_nothing_to_be_found() -> None:
    driver = driver_of()
    aborted = driver.submit(tokens(17))
    driver.want_batch()
    driver.feed(w.Aborted(driver.at_s, aborted))
    driver.fail_step()
    assert run(driver, tokens(17)) == 0


def test_keys_depend_on_the_model() -> None:
    chains = list[list[bytes]]()
    for seed in (b"a model", b"with an adapter"):
        driver = Driver(replace(limits(prefix_caching=True), prefix_seed=seed), 20)
        driver.open(1)
        driver.submit(tokens(17))
        chains.append(driver.core.group_scheduler.scheduler.running[0].block_keys)
    assert not {*chains[0]} & {*chains[1]}


def test_keys_depend_on_the_adapter() -> None:
    driver = Driver(replace(limits(prefix_caching=True, max_model_len=64), adapters=frozenset({"a", "b"})), 40)
    driver.open(1)
    hits: list[int] = []
    for adapter in ("a", "b", "", "a", "b", ""):
        before = index_of(driver).hit_tokens_total
        driver.submit(tokens(17), replace(greedy(2), adapter=adapter))
        driver.run_to_end()
        hits.append(index_of(driver).hit_tokens_total - before)
    assert hits == [0, 0, 0, 16, 16, 16]


def test_kv_that_is_lost_is_not_found() -> None:
    driver = driver_of()
    driver.submit(tokens(17), greedy(8))
    driver.step()
    (sequence,) = driver.core.group_scheduler.scheduler.running
    driver.feed(w.KvLost(driver.at_s, sequence.sequence_id))
    driver.run_to_end()
    assert sum(len(s.token_ids) for e in driver.executed for s in e.batch.slices if s.first_position < 17) == 17 + 18


def test_a_shared_block_is_moved_once() -> None:
    book = BlockBook(8, 4)
    book.hold(1, 12)
    book.hold(2, 8)
    book.apply(Batch(2, (1,), (), (), named=(NamedBlocks(2, 0, 1, 2),), taken=(TakenBlocks(3, ((1, 2),)),)))
    moves = book.compaction_plan(3)
    assert len(moves) == len({source for source, _ in moves}) == 2
    book.compacted(moves)
    book.shrink(3)
    book.check()
    assert book.table(2) == book.table(3)

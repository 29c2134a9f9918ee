"""Batches from the input file to the result files, with kills at every write, full disks, other processes, cancels and
clock changes.
"""

import asyncio
import errno
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.common.errors import NotFound, NotPossible, Unavailable
from services.jobs.core.batch import BatchState
from services.jobs.gateways import GatewayAnswer
from services.jobs.runner import Runner
from services.jobs.store import Fenced, Full, Store, StoredFile
from tests.support.jobs import (
    RULES,
    START_S,
    ScriptedGateway,
    batch,
    ended,
    expected,
    line,
    put_file,
    results,
    running,
    until,
)
from tests.support.waiting import soon

COUNT = 40


def stored(folder: Path, before_write: Callable[[str], None] = lambda _: None, count: int = COUNT) -> Store:
    store = Store(folder, 1, before_write)
    put_file(store, [line(i) for i in range(count)])
    store.add_batch(batch())
    return store


def test_every_line_gets_its_result_although_gateways_fail(tmp_path: Path) -> None:
    async def check() -> None:
        store = stored(tmp_path)
        gateway = ScriptedGateway(1, fails=0.02)
        async with running(store, gateway) as runner:
            done = await ended(runner)
        assert (done.state, done.total, done.completed, done.failed) == (BatchState.COMPLETED, COUNT, 36, 4)
        assert results(tmp_path, done) == expected(COUNT)
        assert store.results("batch_1", 0, 10) == []  # results are in the files instead
        store.close()

    asyncio.run(check())


def test_results_survive_a_stop_while_their_batch_is_being_ended(tmp_path: Path) -> None:
    begun = threading.Event()

    def slow(what: str) -> None:
        if what == "commit end a batch":
            begun.set()
            time.sleep(0.3)

    async def check() -> None:
        store = stored(tmp_path, slow)
        async with running(store, ScriptedGateway()):
            await soon(begun.is_set)
        store.close()
        store = Store(tmp_path, 2)
        assert store.batch("batch_1", "").has_ended, "the transaction is not interrupted"
        assert results(tmp_path, store.batch("batch_1", "")) == expected(COUNT)
        store.close()

    asyncio.run(check())


def test_after_a_kill_at_any_write_the_next_process_finishes_the_job(tmp_path: Path) -> None:
    """Copies the folder before each write of a job. From every copy, another process must finish the job."""
    folder, images = tmp_path / "whole", list[Path]()

    def copy(what: str) -> None:
        images.append(tmp_path / f"{len(images):03}-{what.replace(' ', '-')}")
        shutil.copytree(folder, images[-1])

    async def live(at: Path, store: Store) -> None:
        async with running(store, ScriptedGateway(2)) as runner:
            assert results(at, await ended(runner)) == expected(COUNT)
        store.close()
        left = {path.name for path in (at / "files").iterdir()}
        done = Store(at, 3)
        assert left == {file.id for file in done.files("", purpose=None, after=None, limit=9, newest_first=True)}
        done.close()

    asyncio.run(live(folder, stored(folder, copy)))
    kinds = {image.name.partition("-")[2] for image in images}
    assert kinds >= {"commit-save-results", "rename-a-file", "commit-end-a-batch", "save-a-batch", "sync-a-file"}
    tried = 0
    for image in images:
        store = Store(image, 2)
        try:
            store.batch("batch_1", "")
        except NotFound:  # the client has not received a response
            assert image <= next(one for one in images if one.name.endswith("commit-add-a-batch"))
            store.close()
            continue
        asyncio.run(live(image, store))
        tried += 1
    assert tried > 10


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """Two consecutive writes fail, starting at any write; the batch continues once there is space again."""
    for first in range(3, 12):
        folder, writes = tmp_path / str(first), 0

        def refuse(_: str, first: int = first) -> None:
            nonlocal writes
            writes += 1
            if first <= writes < first + 2:
                raise OSError(errno.ENOSPC, "No space left on device")

        async def check(folder: Path = folder, refuse: Callable[[str], None] = refuse) -> None:
            plain = stored(folder)
            plain.close()
            store = Store(folder, 1, lambda what: None if what.endswith("take over") else refuse(what))
            async with running(store, ScriptedGateway(3)) as runner:
                done = await ended(runner)
                assert not runner.is_full
            assert results(folder, done) == expected(COUNT)
            store.close()

        asyncio.run(check())
        assert writes >= first


def test_a_full_disk_refuses_batches_and_files(tmp_path: Path) -> None:
    def refuse(what: str) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    async def check() -> None:
        nonlocal full
        store = Store(tmp_path, 1, refuse)
        put_file(store, [line(0)])
        full = True
        async with running(store, ScriptedGateway()) as runner:
            with pytest.raises(Full, match="No space left"):
                await runner.add(batch())
            upload = store.new_file("file-b", "", "batch", "b", START_S)
            with pytest.raises(Full):
                upload.write(b"x")
            upload.abort()
            full = False
            await runner.add(batch())
            await ended(runner)
        assert len(list((tmp_path / "files").iterdir())) == 2
        store.close()

    full = False
    asyncio.run(check())


def test_a_replaced_process_writes_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        first = stored(tmp_path)
        gateway = ScriptedGateway(4, takes_s=0.02)
        async with running(first, gateway) as asleep:
            await until(asleep, lambda one: one.completed > 0)
            second = Store(tmp_path, 2)
            async with running(second, gateway) as awake:
                done = await ended(awake)
            assert results(tmp_path, done) == expected(COUNT)
            with pytest.raises(Fenced, match="token 2"):
                await asleep.add(batch("batch_2"))
            with pytest.raises(Fenced):
                Store(tmp_path, 1)
        assert results(tmp_path, second.batch("batch_1", "")) == expected(COUNT)
        second.close()
        first.close()
        assert Store.last_epoch(tmp_path) == 2

    asyncio.run(check())


def test_a_take_over_does_not_undo_a_later_one(tmp_path: Path) -> None:
    later = list[Store]()

    def take_over_first(what: str) -> None:
        if what == "take over":
            later.append(Store(tmp_path, 6))
            put_file(later[0], [line(0)])

    with pytest.raises(Fenced, match="token 6"):
        Store(tmp_path, 5, take_over_first)
    assert Store.last_epoch(tmp_path) == 6
    later[0].add_batch(batch())
    later[0].close()


def test_the_process_that_holds_the_lock_is_waited_for_and_named(tmp_path: Path) -> None:
    """The process that holds the lock was stopped in the middle of a write."""
    first = stored(tmp_path)
    first.close()
    stuck = sqlite3.connect(tmp_path / "jobs.sqlite", isolation_level=None)
    stuck.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="another process writes"):
        Store(tmp_path, 2, busy_timeout_s=0.1)
    stuck.execute("ROLLBACK")
    Store(tmp_path, 2, busy_timeout_s=0.1).close()
    stuck.close()


def test_a_cancelled_batch_aborts_its_calls_and_preserves_its_results(tmp_path: Path) -> None:
    async def check() -> None:
        store = stored(tmp_path)
        gateway = ScriptedGateway(5, takes_s=0.3)
        async with running(store, gateway) as runner:
            await until(runner, lambda one: one.completed > 0)
            await asyncio.sleep(0.1)  # the next calls are in flight
            assert (await runner.cancel("batch_1", "")).state is BatchState.CANCELLING
            done = await ended(runner)
            with pytest.raises(NotPossible, match="is cancelled"):
                await runner.cancel("batch_1", "")
            with pytest.raises(NotFound):
                await runner.cancel("batch_1", "somebody")
        assert done.state is BatchState.CANCELLED
        found = results(tmp_path, done)
        assert found.keys() == expected(COUNT).keys()
        kept = [status for status in found.values() if status in (200, 400)]
        assert len(kept) == done.completed + done.failed
        assert 0 < len(kept) < COUNT
        assert set(found.values()) - {200, 400} == {"batch_cancelled"}
        assert gateway.broken_off > 0
        store.close()

    asyncio.run(check())


def test_answers_that_arrived_just_before_a_cancel_are_in_the_files(tmp_path: Path) -> None:
    """The results of these answers are not committed yet when the batch begins to end."""

    async def check() -> None:
        store = stored(tmp_path)
        gateway = ScriptedGateway(8)
        async with running(store, gateway) as runner:
            await soon(lambda: gateway.asked.total() >= RULES.in_flight)
            await asyncio.sleep(0.01)  # answers have arrived
            await runner.cancel("batch_1", "")
            done = await ended(runner)
        kept = [status for status in results(tmp_path, done).values() if status in (200, 400)]
        assert RULES.in_flight <= len(kept) == done.completed + done.failed
        store.close()

    asyncio.run(check())


def test_a_batch_expires_after_its_window(tmp_path: Path) -> None:
    now_s = START_S

    async def check() -> None:
        nonlocal now_s
        store = Store(tmp_path, 1)
        put_file(store, [line(i) for i in range(COUNT)])
        store.add_batch(batch(window_s=60.0))
        async with running(store, ScriptedGateway(6, takes_s=0.2), now_s=lambda: now_s) as runner:
            await until(runner, lambda one: one.completed > 0)
            now_s += 60.0
            done = await ended(runner)
        assert done.state is BatchState.EXPIRED
        found = results(tmp_path, done)
        assert found.keys() == expected(COUNT).keys()
        assert "batch_expired" in found.values()
        assert store.last_s == now_s
        store.close()

    asyncio.run(check())


def test_a_bad_file_fails_its_batch_with_the_lines_number(tmp_path: Path) -> None:
    async def check() -> None:
        store = Store(tmp_path, 1)
        put_file(store, [line(0), line(1), line(1)])
        gateway = ScriptedGateway()
        async with running(store, gateway) as runner:
            await runner.add(batch())
            failed = await ended(runner)
            await runner.add(batch("batch_2", "file-none"))
            gone = await ended(runner, "batch_2")
        assert failed.state is BatchState.FAILED
        assert [(one.code, one.line) for one in failed.problems] == [("duplicate_custom_id", 3)]
        assert [one.code for one in gone.problems] == ["missing_file"]
        assert not gateway.asked
        store.close()

    asyncio.run(check())


def test_a_batch_whose_file_cannot_be_read_expires_nevertheless(tmp_path: Path) -> None:
    now_s = START_S

    async def check() -> None:
        nonlocal now_s
        store = stored(tmp_path, count=1)
        store.path("file-in").unlink()
        store.path("file-in").mkdir()  # reading fails, but not because the file is missing
        async with running(store, ScriptedGateway(), now_s=lambda: now_s) as runner:
            await asyncio.sleep(0.1)
            now_s += 1e6
            assert (await ended(runner)).state is BatchState.EXPIRED
        store.close()

    asyncio.run(check())


def test_keys_share_the_calls_in_flight_which_stay_within_their_limit(tmp_path: Path) -> None:
    class Counting(ScriptedGateway):
        now, most = 0, 0

        async def ask(self, url: str, body: bytes) -> GatewayAnswer:
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return await super().ask(url, body)
            finally:
                self.now -= 1

    async def check() -> None:
        store = Store(tmp_path, 1)
        for owner, count in (("many", 120), ("few", 12)):
            put_file(store, [line(i) for i in range(count)], f"file-{owner}", owner)
        gateway = Counting(7, takes_s=0.02)
        async with running(store, gateway) as runner:
            await runner.add(batch("batch_many", "file-many", owner="many"))
            await runner.add(batch("batch_few", "file-few", owner="few"))
            await ended(runner, "batch_few", "few")
            many = await runner.stored(store.batch, "batch_many", "many")
            assert many.completed + many.failed < 80
            await ended(runner, "batch_many", "many")
        assert gateway.most == RULES.in_flight
        store.close()

    asyncio.run(check())


def test_a_line_due_for_a_retry_does_not_make_the_runner_spin_while_no_slot_is_free(tmp_path: Path) -> None:
    class Stuck(ScriptedGateway):
        async def ask(self, url: str, body: bytes) -> GatewayAnswer:
            self.asked["all"] += 1
            if self.asked["all"] == 1:
                return GatewayAnswer(503, "r", 0.01, {"error": {}})
            await asyncio.sleep(60.0)
            raise AssertionError("the call is cancelled before")

    async def check() -> None:
        store, gateway = stored(tmp_path, count=2), Stuck()
        async with running(store, gateway, replace(RULES, in_flight=1)) as runner:
            await soon(lambda: gateway.asked["all"] == 2)
            await asyncio.sleep(0.05)  # the first line may be sent again
            reads = 0
            read_lines = runner._read_lines

            async def counted() -> None:
                nonlocal reads
                reads += 1
                await read_lines()

            runner._read_lines = counted
            await asyncio.sleep(0.3)
            assert reads < 5
        store.close()

    asyncio.run(check())


def test_old_files_and_batches_are_deleted_and_files_in_use_are_not(tmp_path: Path) -> None:
    async def check() -> None:
        store = Store(tmp_path, 1)
        put_file(store, [line(0)])
        put_file(store, [line(0)], "file-idle")
        store.add_batch(batch(window_s=1e9))
        gateway = ScriptedGateway(takes_s=0.3)
        rules = replace(RULES, keep_s=100.0)
        async with running(store, gateway, rules, now_s=lambda: START_S + 200.0) as runner:
            await asyncio.sleep(0.1)
            assert [one.id for one in _files(runner)] == ["file-in"]
            await ended(runner)
        async with running(store, gateway, rules, now_s=lambda: START_S + 250.0):
            await asyncio.sleep(0.1)
            assert store.batch("batch_1", "").completed == 1, "it ended 50 s ago"
        async with running(store, gateway, rules, now_s=lambda: START_S + 900.0) as runner:
            await asyncio.sleep(0.1)
            assert _files(runner) == []
            with pytest.raises(NotFound):
                store.batch("batch_1", "")
        assert list((tmp_path / "files").iterdir()) == []
        store.close()

    asyncio.run(check())


def _files(runner: Runner) -> list[StoredFile]:
    return runner.store.files("", purpose=None, after=None, limit=9, newest_first=True)

"""Runs batches: validates input files, sends lines, stores results, writes output files.

After a crash, the next process repeats the unfinished work: it restarts validations, sends lines without a result
again, and writes output files again.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from ballast.common.errors import NotPossible, Unavailable
from ballast.service.http_client import BrokenCall
from ballast.service.logs import get_logger
from ballast.service.tasks import note_failure, run_supervised
from services.jobs import metrics
from services.jobs.core import verdict
from services.jobs.core.batch import BatchState, JobBatch, Problem
from services.jobs.core.lines import Checker, JobLine, answered, request_of, unanswered, unrun
from services.jobs.core.queue import Pick, Queue
from services.jobs.core.verdict import Again, KeepResult
from services.jobs.gateways import Gateways
from services.jobs.store import Full, Result, Store, Upload

_GROUP_S: Final = 0.05  # results that arrive within this time are stored in one transaction
_TICK_S: Final = 0.5  # interval of checks for expired batches
_HOUSE_S: Final = 300.0
_LINES_AT_ONCE: Final = 512  # number of lines read from the store at a time

P = ParamSpec("P")
T = TypeVar("T")
Attempt = Callable[[], Coroutine[Any, Any, Any]]  # Any: send and receive types of coroutines


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    in_flight: int
    line_timeout_s: float
    max_lines: int
    max_line_bytes: int
    keep_s: float
    full_pause_s: float = 1.0  # interval of checks for free disk space


class Runner:
    """Runs the batches of a store until `run` is cancelled. `now_s`: returns wall-clock time that never goes back.
    `is_full`: True while the disk is full.
    """

    def __init__(self, store: Store, gateways: Gateways, rules: Rules, now_s: Callable[[], float]) -> None:
        self.is_full = False
        self.store = store
        self.now_s = now_s
        self._gateways = gateways
        self._rules = rules
        self._thread = ThreadPoolExecutor(1, "store")
        self._queue = Queue(low=min(_LINES_AT_ONCE, rules.in_flight))
        self._batches: dict[str, JobBatch] = {}  # batches that have not ended, by id
        self._changing = asyncio.Lock()  # guards `_batches`
        self._calls: dict[str, set[asyncio.Task[None]]] = {}  # calls to gateways in progress, by batch
        self._stages: dict[str, asyncio.Task[None]] = {}  # validations and finalisations in progress
        self._unsaved: list[tuple[Pick, Result]] = []
        self._results_came = asyncio.Event()
        self._wake = asyncio.Event()
        self._is_over = False

    async def stored(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a method of the store in the store's thread.

        Raises:
            Unavailable: `run` has ended, so this replica is no longer the leader.
        """
        if self._is_over:
            raise Unavailable("jobs", "another replica of the jobs service takes over")
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(call, *args, **kwargs))

    async def run(self) -> None:
        """Run the open batches of the store, and those added later, until cancelled."""
        try:
            for batch in await self.stored(self.store.open_batches):
                self._take(batch)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run_supervised(self._save_results, "save results"))
                tasks.create_task(run_supervised(self._delete_outdated, "keep house"))
                tasks.create_task(run_supervised(partial(self._drive, tasks), "batches"))
        finally:
            self._is_over = True
            self._thread.shutdown(wait=True)
            self._has_room()
            for gauge in (metrics.BATCHES, metrics.OPEN_LINES, metrics.IN_FLIGHT, metrics.FILE_BYTES):
                gauge.set(0)  # the next leader, which may be another process, reports them

    async def add(self, batch: JobBatch) -> None:
        """Store a new batch and run it.

        Raises:
            Full: there is no disk space; nothing was stored.
        """
        async with self._changing:
            await self.stored(self.store.add_batch, batch)
            self._has_room()
            self._take(batch)
        self._wake.set()

    async def cancel(self, batch_id: str, owner: str) -> JobBatch:
        """Cancel a batch.

        Raises:
            NotFound: the owner has no such batch.
            NotPossible: the batch has ended, or is FINALIZING.
            Full: there is no disk space.
            Unavailable: `run` has not loaded the batches yet.
        """
        await self.stored(self.store.batch, batch_id, owner)
        with contextlib.suppress(KeyError):
            return await self._change(batch_id, lambda batch: batch.cancel(self.now_s()))
        batch = await self.stored(self.store.batch, batch_id, owner)
        if not batch.has_ended:
            raise Unavailable("jobs", "its batches are being loaded")
        raise NotPossible(f"batch {batch_id} is {batch.state} and cannot be cancelled")

    # ------------------------------------------------------------------------------------------ driving

    def _take(self, batch: JobBatch) -> None:
        self._batches[batch.id] = batch
        if batch.is_sending:
            self._queue.open(batch.id, batch.owner)

    async def _drive(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._wake.clear()
            with self._noting_full():
                await self._look(tasks)
            await self._read_lines()
            self._send(tasks)
            self._show()
            # Without a free slot no line can be sent, and the end of a call or of a save wakes this loop.
            next_s = self._queue.next_s() if self._outstanding < self._rules.in_flight else None
            wait_s = _TICK_S if next_s is None else min(_TICK_S, max(0.0, next_s - _monotonic_s()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Advance the state of each batch (`JobBatch.due`), and start validations and finalisations."""
        for batch_id in list(self._batches):
            open_count = len(self._calls.get(batch_id, ()))
            try:
                batch = await self._change(batch_id, lambda one, calls=open_count: one.due(self.now_s(), calls=calls))
            except KeyError:
                continue  # the batch has ended meanwhile
            if batch_id in self._stages:
                continue
            if batch.state is BatchState.VALIDATING:
                self._begin(tasks, batch_id, partial(self._check, batch))
            elif batch.state is BatchState.FINALIZING:
                self._begin(tasks, batch_id, partial(self._end, batch_id))

    def _begin(self, tasks: asyncio.TaskGroup, batch_id: str, stage: Attempt) -> None:
        async def run() -> None:
            try:
                await run_supervised(stage, "a batch")
            finally:
                self._stages.pop(batch_id, None)
                self._wake.set()

        self._stages[batch_id] = tasks.create_task(run(), name=f"stage of {batch_id}")

    async def _change(
        self, batch_id: str, make: Callable[[JobBatch], JobBatch], lines: list[JobLine] | None = None
    ) -> JobBatch:
        """Store the next state of a batch, `make(batch)`, then apply it. `lines`: its lines, if they have just been
        validated.

        Raises:
            KeyError: the batch has ended.
            Full: there is no disk space.
        """
        async with self._changing:
            old = self._batches[batch_id]
            new = make(old)
            if new == old:
                return old
            await self.stored(self.store.save_batch, new, self.now_s(), (new.is_sending and lines) or ())
            self._has_room()
            get_logger().info("batch", batch=batch_id, state=str(new.state))
            if new.has_ended:
                del self._batches[batch_id]
            else:
                self._take(new)
        if not new.is_sending:
            self._queue.close(batch_id)
            for call in self._calls.get(batch_id, ()):
                call.cancel()
        self._wake.set()
        return new

    @contextlib.contextmanager
    def _noting_full(self) -> Generator[None]:
        """Context manager that suppresses `Full` and records it in `is_full`."""
        try:
            yield
        except Full as error:
            if not self.is_full:
                get_logger().error("no room for jobs", why=str(error))
            self.is_full = True
            metrics.IS_FULL.set(1)

    def _has_room(self) -> None:
        self.is_full = False
        metrics.IS_FULL.set(0)

    # ------------------------------------------------------------------------------------------ lines

    async def _read_lines(self) -> None:
        for batch_id, after in self._queue.wants():
            self._queue.add(batch_id, await self.stored(self.store.open_lines, batch_id, after, _LINES_AT_ONCE))

    def _send(self, tasks: asyncio.TaskGroup) -> None:
        while self._outstanding < self._rules.in_flight:
            pick = self._queue.pick(_monotonic_s())
            if pick is None:
                return
            calls = self._calls.setdefault(pick.batch_id, set())
            call = tasks.create_task(self._answer(pick), name=f"line {pick.line.number} of {pick.batch_id}")
            calls.add(call)
            call.add_done_callback(partial(self._call_ended, pick.batch_id))

    @property
    def _outstanding(self) -> int:
        return sum(map(len, self._calls.values())) + len(self._unsaved)

    def _call_ended(self, batch_id: str, call: asyncio.Task[None]) -> None:
        calls = self._calls[batch_id]
        calls.discard(call)
        if not calls:
            del self._calls[batch_id]
        self._wake.set()

    async def _answer(self, pick: Pick) -> None:
        batch, line = self._batches[pick.batch_id], pick.line
        line_id = f"batch_req_{secrets.token_hex(12)}"
        status, request_id, body, why = 0, "", None, ""
        try:
            request = request_of(await asyncio.to_thread(self._read, batch.input_file_id, line), batch.owner)
            async with asyncio.timeout(self._rules.line_timeout_s):
                answer = await self._gateways.ask(batch.url, request)
            status, request_id, body = answer.status, answer.request_id, answer.body
            said = verdict.of_answer(status, answer.retry_after_s, pick.failed_count)
        except Unavailable:
            said = verdict.of_no_connection()
        except TimeoutError:
            said = verdict.of_timeout()
        except BrokenCall as error:
            why = str(error)
            said = verdict.of_broken_call(pick.failed_count) or KeepResult(is_success=False)
        except Exception as error:  # noqa: BLE001 - one line must not end the others
            note_failure("a line", error)
            why = f"the jobs service failed: {type(error).__name__}"
            said = verdict.of_broken_call(pick.failed_count) or KeepResult(is_success=False)
        if isinstance(said, Again):
            metrics.RETRIES.labels(said.why).inc()
            tried = replace(pick, failed_count=pick.failed_count + said.counts)
            self._queue.again(tried, _monotonic_s() + said.after_s)
            return
        if status:
            text = answered(line_id, line.custom_id, status, request_id, body)
        else:
            text = unanswered(line_id, line.custom_id, "server_error", why)
        self._unsaved.append((pick, Result(batch.id, line.number, said.is_success, text)))
        self._results_came.set()

    def _read(self, file_id: str, line: JobLine) -> bytes:
        with self.store.path(file_id).open("rb") as file:
            file.seek(line.offset)
            return file.read(line.length)

    async def _save_results(self) -> None:
        while True:
            await self._results_came.wait()
            await asyncio.sleep(self._rules.full_pause_s if self.is_full else _GROUP_S)
            self._results_came.clear()
            saving = list(self._unsaved)
            if not saving:
                continue
            try:
                with self._noting_full():
                    await self._save(saving)
            finally:
                if self._unsaved:
                    self._results_came.set()

    async def _save(self, saving: list[tuple[Pick, Result]]) -> None:
        async with self._changing:
            counts = await self.stored(self.store.save_results, [result for _, result in saving], self.now_s())
            del self._unsaved[: len(saving)]
            for batch_id, (good, bad) in counts.items():
                if batch_id in self._batches:
                    self._batches[batch_id] = self._batches[batch_id].counted(good, bad)
                metrics.LINES.labels("success").inc(good)
                metrics.LINES.labels("failure").inc(bad)
        for pick, _ in saving:
            self._queue.ended(pick)
        self._has_room()
        self._wake.set()

    # ------------------------------------------------------------------------------------------ begin and end

    async def _check(self, batch: JobBatch) -> None:
        if self._batches[batch.id].state is not BatchState.VALIDATING:  # cancelled or expired after a failed attempt
            return
        checker = Checker(batch.url, max_lines=self._rules.max_lines, max_line_bytes=self._rules.max_line_bytes)
        try:
            await asyncio.to_thread(self._read_all, batch.input_file_id, checker)
        except FileNotFoundError:
            checker.problems.append(Problem("missing_file", f"file {batch.input_file_id} does not exist"))

        def decide(one: JobBatch) -> JobBatch:
            if one.state is not BatchState.VALIDATING:  # cancelled meanwhile
                return one
            if checker.problems:
                return one.refused(tuple(checker.problems), self.now_s())
            return one.checked(len(checker.lines), self.now_s())

        await self._until_there_is_room(lambda: self._change(batch.id, decide, checker.lines))

    def _read_all(self, file_id: str, checker: Checker) -> None:
        most = self._rules.max_line_bytes
        with self.store.path(file_id).open("rb") as file:
            while raw := file.readline(most + 1):
                if not checker.take(raw) or len(raw) > most:
                    break
        checker.end()

    async def _end(self, batch_id: str) -> None:
        """Wait until no call of the batch is open, write its result files and end it."""
        while self._is_under_way(batch_id):  # noqa: ASYNC110 - calls and unsaved results have no common event
            await asyncio.sleep(_GROUP_S)
        await self._until_there_is_room(lambda: self._write_files(self._batches[batch_id]))

    def _is_under_way(self, batch_id: str) -> bool:
        return batch_id in self._calls or any(result.batch_id == batch_id for _, result in self._unsaved)

    async def _write_files(self, batch: JobBatch) -> None:
        uploads = [self._output(batch, name) for name in ("output", "error")]
        try:
            after = 0
            while rows := await self.stored(self.store.results, batch.id, after, _LINES_AT_ONCE):
                after = rows[-1][0]
                texts: tuple[list[str], list[str]] = ([], [])
                for _, custom_id, is_success, text in rows:
                    line_id = f"batch_req_{secrets.token_hex(12)}"
                    texts[not is_success].append(text or unrun(line_id, custom_id, batch.outcome))
                for upload, lines in zip(uploads, texts, strict=True):
                    if lines:
                        await asyncio.to_thread(upload.write, "".join(f"{line}\n" for line in lines).encode())
            files = [await asyncio.to_thread(one.commit) if one.bytes else None for one in uploads]
            output, errors = (None if file is None else file.id for file in files)
            async with self._changing:
                ended = self._batches[batch.id].finished(output, errors, self.now_s())
                kept = [file for file in files if file is not None]
                try:
                    await self.stored(self.store.end_batch, ended, self.now_s(), kept)
                except asyncio.CancelledError:
                    uploads.clear()  # it may still be committed; otherwise the next start removes the files
                    raise
                self._has_room()
                del self._batches[batch.id]
        except BaseException:
            for upload in uploads:
                upload.abort()
            raise
        get_logger().info("batch", batch=batch.id, state=str(ended.state))

    def _output(self, batch: JobBatch, name: str) -> Upload:
        file_id, shown = f"file-{secrets.token_hex(12)}", f"{batch.id}_{name}.jsonl"
        return self.store.new_file(file_id, batch.owner, "batch_output", shown, self.now_s())

    async def _until_there_is_room(self, attempt: Attempt) -> None:
        while True:
            with self._noting_full():
                await attempt()
                return
            await asyncio.sleep(self._rules.full_pause_s)

    # ------------------------------------------------------------------------------------------ all else

    async def _delete_outdated(self) -> None:
        """Delete files and ended batches older than `keep_s` every five minutes, until cancelled."""
        while True:
            before_s = self.now_s() - self._rules.keep_s
            for file_id in await self.stored(self.store.outdated_files, before_s):
                await self.stored(self.store.delete_file, file_id)
            with self._noting_full():
                await self.stored(self.store.forget_batches, before_s)
                self._has_room()
            metrics.FILE_BYTES.set((await self.stored(self.store.usage)).file_bytes)
            await asyncio.sleep(_HOUSE_S)

    def _show(self) -> None:
        metrics.BATCHES.set(len(self._batches))
        metrics.OPEN_LINES.set(sum(one.total - one.completed - one.failed for one in self._batches.values()))
        metrics.IN_FLIGHT.set(self._outstanding)


def _monotonic_s() -> float:
    return asyncio.get_running_loop().time()

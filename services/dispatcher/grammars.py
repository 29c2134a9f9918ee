"""Validates grammars in subprocesses. A subprocess that compiles for too long is killed without delaying others.

Each caller can validate one grammar at a time, so that a caller with many large ones delays only itself. Results are
cached. Subprocesses are started on demand and end with this process, because their input closes.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path

from ballast.common.errors import InvalidRequest, Overloaded, Unavailable
from ballast.common.sampling import Grammar
from ballast.service.logs import get_logger

_PROCESSES = 2
_MOST_KEPT = 1024  # number of cached results
_MOST_WAITING_OF_ONE = 256
_WAIT_S = 15.0
_START_S = 30.0  # timeout for the start of a process, including loading the tokenizer
_RETRY_S = 1.0
_STARTS, _START_AGAIN_S = 4, 0.1
_LINE_BYTES = 1 << 16
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


class GrammarChecks:
    """Validates grammars. Used on a single event loop; call `close` at the end.

    Args:
        tokenizer_file: tokenizer.json of the model.
        deadline_s: Time limit to compile one grammar; a slower one is refused.
    """

    def __init__(self, tokenizer_file: Path, deadline_s: float = 5.0) -> None:
        self._file = tokenizer_file
        self._deadline_s = deadline_s
        self._found: OrderedDict[Grammar, InvalidRequest | None] = OrderedDict()
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()
        self._processes: list[Process] = []  # processes that run or have just ended
        self._free: list[Process] = []
        self._places = asyncio.Semaphore(_PROCESSES)
        self._running: set[asyncio.Task[InvalidRequest | None]] = set()

    async def check(self, grammar: Grammar, token_ids: Sequence[int], caller: str) -> None:
        """Validate a grammar.

        Raises:
            InvalidRequest: the grammar is invalid, too slow to compile, or violated by these tokens.
            Overloaded: the caller has too many grammars waiting.
        """
        if token_ids or grammar not in self._found:
            fault = await self._in_turn(grammar, token_ids, caller)
        else:
            self._found.move_to_end(grammar)
            fault = self._found[grammar]
        if fault is not None:
            raise InvalidRequest(fault.field, fault.why)

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for process in self._processes:
            _kill(process)
        for process in list(self._processes):
            await process.wait()

    async def _in_turn(self, grammar: Grammar, token_ids: Sequence[int], caller: str) -> InvalidRequest | None:
        if self._waiting[caller] >= _MOST_WAITING_OF_ONE:
            raise Overloaded(f"{self._waiting[caller]} grammars of this caller wait to be compiled", _RETRY_S)
        turn = self._turns.setdefault(caller, asyncio.Lock())
        self._waiting[caller] += 1
        try:
            async with asyncio.timeout(_WAIT_S):
                await turn.acquire()
        except TimeoutError:
            why = f"other grammars of this caller have been compiled for {_WAIT_S:g} s, one at a time"
            raise Overloaded(why, _RETRY_S) from None
        finally:
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]
        # Shielded from a client's disconnect, because the process is in use until it has answered.
        task = asyncio.create_task(self._run(grammar, token_ids), name="grammar")
        self._running.add(task)

        def over(_: object) -> None:
            self._running.discard(task)
            turn.release()
            if caller not in self._waiting and not turn.locked():
                self._turns.pop(caller, None)

        task.add_done_callback(over)
        return await asyncio.shield(task)

    async def _run(self, grammar: Grammar, token_ids: Sequence[int]) -> InvalidRequest | None:
        if not token_ids and grammar in self._found:
            return self._found[grammar]
        async with self._places:
            try:
                fault = await self._ask(grammar, token_ids)
            except TimeoutError:  # not cached, because the machine may be busy
                why = f"takes more than {self._deadline_s:g} s to compile ({len(grammar.text):,} characters)"
                get_logger().warning("grammar refused", why=why)
                return InvalidRequest(f"sampling.grammar.{grammar.kind}", why)
        if not token_ids:
            self._found[grammar] = fault
            if len(self._found) > _MOST_KEPT:
                self._found.popitem(last=False)
        return fault

    async def _ask(self, grammar: Grammar, token_ids: Sequence[int]) -> InvalidRequest | None:
        question = json.dumps([dataclasses.astuple(grammar), list(token_ids)]).encode() + b"\n"
        answer, self._free = b"", [one for one in self._free if one.returncode is None]
        if self._free:
            answer = await self._answer(self._free.pop(), question)
        if not answer:  # an idle process may have been killed, so only the end of a new one is due to the grammar
            answer = await self._answer(await self._start(), question)
        if not answer:  # the process ran out of memory or stack
            return InvalidRequest(f"sampling.grammar.{grammar.kind}", "is too large to be compiled")
        return InvalidRequest(*fault) if (fault := json.loads(answer)) else None

    async def _answer(self, process: Process, question: bytes) -> bytes:
        """Return the process's answer; empty if the process has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._deadline_s):
                process.stdin.write(question)
                await process.stdin.drain()
                answer = await process.stdout.readline()
        except (ConnectionError, RuntimeError):  # a closed pipe, which uvloop reports as RuntimeError
            answer = b""
        except (OSError, asyncio.CancelledError):  # a TimeoutError is an OSError
            _kill(process)
            raise
        if answer:
            self._free.append(process)
        else:
            _kill(process)
            get_logger().warning("a process that compiled a grammar has ended", status=await process.wait())
        return answer

    async def _start(self) -> Process:
        """Start a process and wait until it has loaded the tokenizer. Retried if the process exits early.

        Raises:
            Unavailable: several attempts have failed.
        """
        why = ""
        for tried in range(1, _STARTS + 1):
            try:
                return await self._begin()
            except ChildProcessError as error:
                why = str(error)
                get_logger().warning("a process that compiles grammars has ended", why=why, started=tried)
            await asyncio.sleep(_START_AGAIN_S)
        raise Unavailable("the process that compiles grammars", why)

    async def _begin(self) -> Process:
        command = (sys.executable, "-m", "services.dispatcher.grammar_process", str(self._file))
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            limit=_LINE_BYTES,
            env=os.environ | _ONE_THREAD,
            start_new_session=True,  # shields the process from a terminal's signals
        )
        self._processes = [one for one in self._processes if one.returncode is None] + [process]
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b'[["regex", ""], []]\n')  # answered when it is ready
            async with asyncio.timeout(_START_S):
                ready = await process.stdout.readline()
        except (OSError, RuntimeError):  # timeout, or a closed pipe, which uvloop reports as RuntimeError
            ready = b""
        except asyncio.CancelledError:
            _kill(process)
            raise
        if not ready:
            _kill(process)
            raise ChildProcessError(f"{' '.join(command)} ended with status {await process.wait()}")
        return process


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    if process.stdin is not None:
        process.stdin.close()

"""Grammars are checked in other processes, so that a large grammar delays only its own caller."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ballast.common.errors import InvalidRequest, Overloaded
from ballast.common.sampling import Grammar, GrammarKind
from services.dispatcher import grammars as module
from services.dispatcher.grammars import GrammarChecks
from tools.model.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grammars") / "tokenizer.json"
    train_tokenizer(600, qwen=False).save(str(path))
    return path


@asynccontextmanager
async def checks(tokenizer_file: Path, deadline_s: float = 30.0) -> AsyncGenerator[GrammarChecks]:
    made = GrammarChecks(tokenizer_file, deadline_s)
    try:
        yield made
    finally:
        await made.close()


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def large(name: str) -> Grammar:
    """A JSON schema that takes at least half a second to check."""
    objects = {
        f"{name}{i}": {
            "type": "object",
            "properties": {f"q{j}": {"type": "string", "maxLength": 9} for j in range(100)},
        }
        for i in range(60)
    }
    schema = {"type": "object", "properties": objects, "required": list(objects)}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


async def test_the_end_of_an_idle_process_fails_no_grammar(tokenizer_file: Path) -> None:
    async with checks(tokenizer_file) as made:
        await made.check(regex("a"), (), "one")
        [process] = made._free  # pyright: ignore[reportPrivateUsage]
        for pause_s, text in ((0.0, "b"), (0.3, "c")):
            process.kill()
            await asyncio.sleep(pause_s)
            await made.check(regex(text), (), "one")
            [process] = made._free  # pyright: ignore[reportPrivateUsage]


async def test_an_invalid_grammar_is_refused_each_time(tokenizer_file: Path) -> None:
    async with checks(tokenizer_file) as made:
        for _ in range(2):
            await made.check(regex("[ab]{3}"), (), "one")
            with pytest.raises(InvalidRequest, match="unclosed group") as caught:
                await made.check(regex("(ab"), (), "one")
            assert caught.value.field == "sampling.grammar.regex"
        with pytest.raises(InvalidRequest, match="does not follow the grammar"):
            await made.check(regex("[ab]{3}"), (599,), "one")


async def test_a_grammar_that_takes_too_long_is_refused_and_its_process_killed(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    kill = module._kill

    def seen(process: asyncio.subprocess.Process) -> None:
        killed.append(process.pid)
        kill(process)

    monkeypatch.setattr(module, "_kill", seen)
    async with checks(tokenizer_file, 0.1) as made:
        with pytest.raises(InvalidRequest, match=r"takes more than 0.1 s to compile"):
            await made.check(large("p"), (), "one")
        assert len(killed) == 1
        made._deadline_s = 30.0
        await made.check(regex("a"), (), "one")


async def test_a_caller_with_many_large_grammars_delays_only_itself(tokenizer_file: Path) -> None:
    async with checks(tokenizer_file) as made:
        await asyncio.gather(made.check(regex("x"), (), "a"), made.check(regex("y"), (), "b"))  # starts both processes
        flood = [asyncio.create_task(made.check(large(f"p{i}_"), (), "many")) for i in range(6)]
        await asyncio.sleep(0.05)
        began_s = time.monotonic()
        for i in range(5):
            await made.check(regex(f"a{i}"), (), "few")
        took_s = time.monotonic() - began_s
        still = sum(not task.done() for task in flood)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        assert still >= 4, f"five small grammars of another caller took {took_s:.1f} s"


async def test_a_disconnect_does_not_give_the_caller_a_second_concurrent_check(tokenizer_file: Path) -> None:
    async with checks(tokenizer_file) as made:
        await made.check(regex("x"), (), "one")
        first = asyncio.create_task(made.check(large("p"), (), "one"))
        await asyncio.sleep(0.05)
        first.cancel()
        second = asyncio.create_task(made.check(regex("b"), (), "one"))
        await asyncio.sleep(0.05)
        assert not second.done()
        await second
        assert large("p") in made._found


async def test_too_many_waiting_grammars_are_refused(tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING_OF_ONE", 2)
    async with checks(tokenizer_file) as made:
        waiting = [asyncio.create_task(made.check(regex(f"c{i}"), (), "one")) for i in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 grammars of this caller"):
            await made.check(regex("d"), (), "one")
        await made.check(regex("d"), (), "another")
        await asyncio.gather(*waiting)
        assert not made._turns


async def test_a_process_that_dies_refuses_its_grammar_and_no_other(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with checks(tokenizer_file) as made:
        start = made._start

        async def dying() -> asyncio.subprocess.Process:
            process = await start()
            process.kill()
            return process

        with monkeypatch.context() as patch:
            patch.setattr(made, "_start", dying)
            with pytest.raises(InvalidRequest, match="too large"):
                await made.check(regex("y"), (), "one")
        await made.check(regex("y1"), (), "one")


async def test_a_process_that_ends_before_it_is_ready_is_restarted(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = asyncio.create_subprocess_exec, list[asyncio.subprocess.Process]()

    async def ends_first(*command: str, **options: Any) -> asyncio.subprocess.Process:
        started.append(await start(*command, **options))
        if len(started) == 1:
            started[0].kill()
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", ends_first)
    async with checks(tokenizer_file) as made:
        await made.check(regex("[ab]{3}"), (), "one")
    assert len(started) == 2


def test_the_process_lowers_its_priority_before_slow_imports() -> None:
    """Without a low priority, streams would stutter while it starts."""
    code = "import sys, services.dispatcher.grammar_process; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"numpy", "llguidance"} & set(loaded)

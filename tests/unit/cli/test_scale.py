"""`ballast scale` with commands that fail."""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from ballast.common.wanted import Wanted
from tools.cli import scale


def test_a_failed_command_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    @contextlib.asynccontextmanager
    async def hearing(_: bytes, take: Callable[[Wanted], None], *__: object) -> AsyncGenerator[str]:
        take(Wanted(3, (), ()))
        yield "http://nowhere"

    monkeypatch.setattr(scale, "hearing", hearing)
    monkeypatch.setattr(scale, "_AGAIN_S", 0.01)
    command = ["sh", "-c", f"echo {{wanted}} >> {out}; test $(wc -l < {out}) -ge 3"]
    args = argparse.Namespace(command=command, least=1, most=8, listen="h:1")

    async def story() -> None:
        following = asyncio.create_task(scale._follow(args, "h", 1, b""))
        await asyncio.sleep(1.0)
        following.cancel()
        await asyncio.wait([following])

    asyncio.run(story())
    assert out.read_text().split() == ["3", "3", "3"], "twice after a failure, and not after a success"


def test_a_command_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scale, "_ENDS_WITHIN_S", 0.2)
    monkeypatch.setattr(scale, "_STOPS_WITHIN_S", 0.2)
    for script in (
        "exec sleep 60",
        "trap '' TERM; while true; do sleep 0.1; done",
        "trap 'exit 0' TERM; while true; do sleep 0.1; done",
    ):
        args = argparse.Namespace(command=["sh", "-c", script, "{wanted}"], least=1, most=8)
        assert not asyncio.run(asyncio.wait_for(scale._carry_out(args, Wanted(3, (), ())), 10))
        assert "was stopped" in capsys.readouterr().out

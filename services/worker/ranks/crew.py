"""The processes of the other ranks, as the first one has them. They end when it does, however it ends."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ballast.common.errors import ConfigError
from services.worker.ranks.channel import Channel, Done, Failed, RankLog, RankLost, Ready, Start

if TYPE_CHECKING:
    from services.worker.engine.load import Engine

_START_S = 120.0  # until a process has loaded torch
_LOAD_S = 1800.0  # until it has loaded its share of the model
_ANSWER_S = 30.0  # of a rank between two steps
_END_S = 5.0

_NO_FILE = -1


class _Rank:
    def __init__(self, number: int, memory_fd: int | None) -> None:
        self.name = f"rank {number}"
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, self.name)
        fds = [theirs.fileno()] if memory_fd is None else [theirs.fileno(), memory_fd]
        command = [sys.executable, "-m", "services.worker.ranks", str(fds[0]), str([*fds, _NO_FILE][1])]
        try:
            # What it prints is for people: on standard output this process says when it is ready.
            self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=sys.__stderr__)
        finally:
            theirs.close()


class Crew:
    """Used by one thread at a time, but for `lost`."""

    def __init__(self, memory_fds: Sequence[int | None]) -> None:
        """Starts a process for each; `memory_fds`: the files of their memory, None where it is elsewhere."""
        self._ranks: list[_Rank] = []
        self._closing = False
        try:
            for number, fd in enumerate(memory_fds, start=1):
                self._ranks.append(_Rank(number, fd))
        except BaseException:
            self.close()
            raise

    def start(self, devices: Sequence[str], meeting: Path, log: RankLog, load_one: Callable[..., Engine]) -> None:
        """Returns when all are about to meet. `devices`: of all ranks, the first one included."""
        for number, rank in enumerate(self._ranks, start=1):
            rank.channel.send(Start(number, devices, str(meeting), log, load_one), _ANSWER_S)
        for rank in self._ranks:
            self._answer(rank, _START_S)

    def loaded(self) -> list[Ready]:
        """Waits until each has its share.

        Raises:
            ConfigError: one cannot have it.
        """
        answers = [self._answer(rank, _LOAD_S) for rank in self._ranks]
        return [answer for answer in answers if isinstance(answer, Ready)]

    def tell(self, message: object) -> None:
        for rank in self._ranks:
            rank.channel.send(message, _ANSWER_S)

    def require(self, result: object) -> None:
        """Waits for everybody's answer.

        Raises:
            RankLost: one has another result.
        """
        for rank in self._ranks:
            answer = self._answer(rank, _ANSWER_S)
            if answer != Done(result):
                raise RankLost(f"{rank.name} is not where the first one is: {answer}, not {Done(result)}")

    def lost(self) -> str | None:
        """Who has ended, and how. From any thread."""
        for rank in self._ranks:
            if not self._closing and (status := rank.process.poll()) is not None:
                return f"{rank.name} has ended with status {status}"
        return None

    def close(self) -> None:
        """May be called again."""
        self._closing = True
        for rank in self._ranks:
            rank.channel.close()  # which ends it
        until_s = time.monotonic() + _END_S
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, until_s - time.monotonic()))
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait()

    def _answer(self, rank: _Rank, within_s: float) -> object:
        answer = rank.channel.receive(within_s)
        if isinstance(answer, Failed):
            if answer.where:
                raise ConfigError(answer.where, f"{answer.why} ({rank.name})")
            raise RankLost(f"{rank.name}: {answer.why}")
        return answer

"""The processes of the other ranks, as seen by rank 0. They end when it does, for any reason."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ballast.common.errors import ConfigError
from services.worker.ranks.channel import (
    Done,
    Export,
    Failed,
    RankChannel,
    RankLog,
    RankLost,
    RankReady,
    Start,
    body_of,
)

if TYPE_CHECKING:
    from services.worker.engine.load import Engine

_START_S = 120.0  # time limit for a process to load torch
_LOAD_S = 1800.0  # time limit for a rank to load its shard
_ANSWER_S = 30.0  # time limit for a rank's answer between two steps
_END_S = 5.0
_FILES = 64  # files sent at once: each is open on both sides meanwhile


class _Rank:
    def __init__(self, number: int) -> None:
        self.name = f"rank {number}"
        ours, theirs = socket.socketpair()
        self.channel = RankChannel(ours, self.name)
        command = [sys.executable, "-m", "services.worker.ranks", str(theirs.fileno())]
        try:
            # Its output goes to standard error: standard output has this process's ready message.
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=sys.__stderr__
            )
        finally:
            theirs.close()


class Crew:
    """The processes of the other ranks. Used by one thread at a time, except for `lost`."""

    def __init__(self, count: int) -> None:
        """Start a process for each rank but 0. `count`: number of all ranks."""
        self._ranks: list[_Rank] = []
        self._closing = False
        try:
            for number in range(1, count):
                self._ranks.append(_Rank(number))
        except BaseException:
            self.close()
            raise

    def start(self, devices: Sequence[str], meeting: Path, log: RankLog, load_one: Callable[..., Engine]) -> None:
        """Configure the ranks; returns when all are about to join the group. `devices`: devices of all ranks."""
        for number, rank in enumerate(self._ranks, start=1):
            rank.channel.send(Start(number, devices, str(meeting), log, load_one), _ANSWER_S)
        for rank in self._ranks:
            self._answer(rank, _START_S)

    def loaded(self) -> list[RankReady]:
        """Wait until each rank has loaded its shard.

        Raises:
            ConfigError: one could not load it.
        """
        answers = [self._answer(rank, _LOAD_S) for rank in self._ranks]
        return [answer for answer in answers if isinstance(answer, RankReady)]

    def complain(self) -> None:
        """Raise the error of a rank that has ended while others may wait for it.

        Raises:
            ConfigError: it could not load its shard.
        """
        for rank in sorted(self._ranks, key=lambda rank: rank.process.poll() is None):
            with contextlib.suppress(RankLost):
                self._answer(rank, _END_S)

    def files(self, rank: int) -> Iterator[int]:
        """Files that map a rank's memory; the caller closes them.

        Raises:
            ConfigError: sharing is not permitted.
        """
        of, first = self._ranks[rank - 1], 0
        while True:
            of.channel.send(Export(first, _FILES), _ANSWER_S)
            answer = self._answer(of, _ANSWER_S)
            if not isinstance(answer, Done) or not isinstance(count := answer.result, int) or not count:
                return
            files = of.channel.receive_files(count, _ANSWER_S)
            try:
                while files:
                    yield files.pop(0)
            finally:
                for file in files:
                    os.close(file)
            first += count

    def tell(self, message: object) -> None:
        body = body_of(message)
        for rank in self._ranks:
            rank.channel.send_body(body, _ANSWER_S)

    def answers(self) -> dict[str, object]:
        """Wait for all answers to a change, by rank name."""
        return {rank.name: self._answer(rank, _ANSWER_S) for rank in self._ranks}

    def lost(self) -> str | None:
        """Text that says which rank has ended, and how; None: no rank has. Callable from any thread."""
        for rank in self._ranks:
            if not self._closing and (status := rank.process.poll()) is not None:
                return f"{rank.name} has ended with status {status}"
        return None

    def close(self) -> None:
        """End all processes. Idempotent."""
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

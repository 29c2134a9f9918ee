"""The other ranks, as rank 0 sees them: processes on this host and on others. All end when rank 0 does."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ballast.common.errors import ConfigError
from services.worker.ranks.channel import (
    Done,
    Export,
    Failed,
    RankChannel,
    RankLost,
    RankReady,
    Start,
    body_of,
)
from services.worker.ranks.nodes import CONTROL, FarRank

START_S = 120.0  # time limit for a process to load torch
LOAD_S = 1800.0  # time limit for a rank to load its shard
_ANSWER_S = 30.0  # time limit for a rank's answer between two steps
_END_S = 5.0
_FILES = 64  # files sent at once; each is open on both sides until it has been received


class _RankProcess:
    """Another rank on this host."""

    def __init__(self, number: int) -> None:
        self.name = f"rank {number}"
        ours, theirs = socket.socketpair()
        self.channel = RankChannel(ours, self.name)
        command = [sys.executable, "-m", "services.worker.ranks", str(theirs.fileno())]
        try:
            # Its output is sent to standard error, because standard output has this process's ready message.
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=sys.__stderr__
            )
        finally:
            theirs.close()

    def ended(self) -> str | None:
        status = self.process.poll()
        return None if status is None else f"{self.name} has ended with status {status}"

    def end(self, until_s: float) -> None:
        """Wait for the process to exit, after its channel has been closed; kill it if it has not by `until_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until_s - time.monotonic()))
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class _RankElsewhere:
    """A rank on another host."""

    def __init__(self, number: int, far: FarRank) -> None:
        self.name = f"rank {number} on {far.host}"
        self.channel = RankChannel(far.lanes[CONTROL], self.name)
        self.far = far

    def ended(self) -> str | None:
        return f"{self.name} has ended, or its host does not answer" if self.channel.hung_up() else None

    def end(self, until_s: float) -> None:
        """Close the rank's connections, which makes it exit. Does not wait."""
        self.far.close()


class Crew:
    """The processes of the other ranks. Used by one thread at a time, except for `lost`."""

    def __init__(self, count: int, elsewhere: Mapping[int, FarRank] | None = None) -> None:
        """Start a process for each rank except 0 and those in `elsewhere`. `count`: number of all ranks. `elsewhere`:
        ranks on other hosts; takes ownership of them.
        """
        self._ranks: list[_RankProcess | _RankElsewhere] = []
        self._closing = False
        far = elsewhere or {}
        try:
            for number in range(1, count):
                self._ranks.append(_RankElsewhere(number, far[number]) if number in far else _RankProcess(number))
        except BaseException:
            self.close()
            raise

    def start(self, start: Start) -> None:
        """Send each rank its configuration: rank 0's `start` with the rank's own number and host. Returns when all
        ranks are about to join the group.
        """
        for number, rank in enumerate(self._ranks, start=1):
            host = rank.far.host if isinstance(rank, _RankElsewhere) else start.host
            rank.channel.send(replace(start, rank=number, host=host), _ANSWER_S)
        for rank in self._ranks:
            self._answer(rank, START_S)

    def loaded(self) -> list[RankReady]:
        """Wait until each rank has loaded its shard.

        Raises:
            ConfigError: a rank could not load its shard.
        """
        answers = [self._answer(rank, LOAD_S) for rank in self._ranks]
        return [answer for answer in answers if isinstance(answer, RankReady)]

    def complain(self) -> None:
        """Raise the error of a rank that has ended while others may wait for it.

        Raises:
            ConfigError: the rank could not load its shard.
        """
        for rank in sorted(self._ranks, key=lambda rank: rank.ended() is None):
            with contextlib.suppress(RankLost):
                self._answer(rank, _END_S)

    def files(self, rank: int) -> Iterator[int]:
        """Yield files that map a rank's memory. The caller closes them.

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

    def far(self, rank: int) -> FarRank | None:
        """The connections of a rank on another host; None if the rank is on this host."""
        of = self._ranks[rank - 1]
        return of.far if isinstance(of, _RankElsewhere) else None

    def tell(self, message: object) -> None:
        body = body_of(message)
        for rank in self._ranks:
            rank.channel.send_body(body, _ANSWER_S)

    def answers(self) -> dict[str, object]:
        """Wait for the answers of all ranks to a change, and return them by rank name."""
        return {rank.name: self._answer(rank, _ANSWER_S) for rank in self._ranks}

    def lost(self) -> str | None:
        """Describe which rank has ended and how; None: no rank has. Thread-safe."""
        for rank in self._ranks:
            if not self._closing and (how := rank.ended()) is not None:
                return how
        return None

    def close(self) -> None:
        """End all processes. Idempotent."""
        self._closing = True
        for rank in self._ranks:
            rank.channel.close()  # the rank exits when its channel closes
        until_s = time.monotonic() + _END_S
        for rank in self._ranks:
            rank.end(until_s)

    def _answer(self, rank: _RankProcess | _RankElsewhere, within_s: float) -> object:
        answer = rank.channel.receive(within_s)
        if isinstance(answer, Failed):
            if answer.where:
                raise ConfigError(answer.where, f"{answer.why} ({rank.name})")
            raise RankLost(f"{rank.name}: {answer.why}")
        return answer

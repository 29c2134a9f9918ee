"""Keeps a local cluster alive: restarts processes that have ended, and reports each such event in one line.

A process is restarted at once, or after increasingly long pauses if it keeps failing within 30 s of its start. After
four such restarts the keeper gives up on it, and the cluster continues without it. The keeper never gives up on the
state server.
"""

import asyncio
import contextlib
import itertools
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ballast.client import AsyncClient
from ballast.common.errors import BallastError
from ballast.service.tasks import run_supervised
from tools.local.cluster import LocalCluster, ServiceProcess
from tools.local.process import ChildProcess
from tools.local.state_server import PrivateStateServer

_POLL_S = 0.05
_ROTATE_S = 10.0
_COUNT_INTERVAL_S = 1.0
_PAUSES_S = (0.0, 1.0, 3.0, 10.0)  # pauses before the restarts; after the last one the keeper gives up on a process
_STABLE_S = 30.0  # after a process has run for this long, pauses start over
_START_TIMEOUT_S = 300.0
_REPLAYS_WITHIN_S = 1.0
_EVENT_COUNT = 200


@dataclass(frozen=True, slots=True)
class KeeperEvent:
    """An event of a process. `at_s`: wall-clock time."""

    at_s: float
    text: str


@dataclass(slots=True)
class _KeptRecord:
    """The restarts of one child process. `failed_count`: number of restarts since it last ran for 30 s."""

    started_at_s: float
    failed_count: int = 0


class Keeper:
    """Restarts the processes of a cluster while `run` runs. Calls `say` with each event; `events` has the last 200."""

    def __init__(self, cluster: LocalCluster, say: Callable[[str], None]) -> None:
        self.events: deque[KeeperEvent] = deque(maxlen=_EVENT_COUNT)
        self.ended_by_themselves: list[str] = []  # processes that ended without being killed, and how they ended
        self._cluster = cluster
        self._say = say
        self._records: dict[str, _KeptRecord] = {}  # by name of the child process
        self._reviving: set[str] = set()
        self._replay_count = 0  # replays of all dispatchers, as last counted
        self._looks: deque[tuple[float, int]] = deque(maxlen=8)  # the last (time, `_replay_count`)
        self._counts: dict[str, int] = {}  # dispatcher's address -> its counter of replays; 0 again after a restart

    async def run(self) -> None:
        """Watch and restart processes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_supervised(self._keep_count, "count replays"))
            tasks.create_task(run_supervised(self._keep_state_server, "keep the state server"))
            tasks.create_task(run_supervised(self._keep_logs_small, "rotate logs"))
            while True:
                for child in self._dead():
                    self._reviving.add(child.name)
                    tasks.create_task(run_supervised(lambda child=child: self._revive(child), "revive"))
                await asyncio.sleep(_POLL_S)

    async def _keep_logs_small(self) -> None:
        while True:
            for child in [process.child for each in self._cluster.processes.values() for process in each]:
                await asyncio.to_thread(child.rotate_log)
            await asyncio.sleep(_ROTATE_S)

    def kill(self, worker_id: str) -> bool:
        """Kill the process of a worker, as a fault would. Returns False if no such worker runs."""
        for process in self._cluster.processes["worker"]:
            if process.id == worker_id and process.child.returncode is None:
                process.child.send_signal(signal.SIGKILL)
                return True
        return False

    def _dead(self) -> list[ChildProcess]:
        """The child processes that have ended unexpectedly and are not being restarted."""
        found: dict[str, ChildProcess] = {}
        for processes in self._cluster.processes.values():
            for process in processes:
                child = process.child
                if child.returncode is not None and not process.may_end and child.name not in self._reviving:
                    found[child.name] = child
        return list(found.values())

    def _tell(self, text: str) -> None:
        self.events.append(KeeperEvent(time.time(), text))
        self._say(text)

    async def _revive(self, child: ChildProcess) -> None:
        """Restart a child process until it serves, or give up on it."""
        name, ended_at_s = child.name, time.monotonic()
        self._cluster.keep_logs = True
        before = self._count_before(ended_at_s - _COUNT_INTERVAL_S)
        record = self._records.setdefault(name, _KeptRecord(ended_at_s))
        if ended_at_s - record.started_at_s > _STABLE_S:
            record.failed_count = 0
        self._tell(self._note_end(child))
        while record.failed_count < len(_PAUSES_S):
            await asyncio.sleep(_PAUSES_S[record.failed_count])
            if all(process.may_end for process in self._cluster.find(name)):  # it was ended on purpose meanwhile
                self._reviving.discard(name)
                return
            record.failed_count += 1
            record.started_at_s = time.monotonic()
            processes = self._cluster.respawn(name)
            if await self._wait_until_ready(processes):
                took_s = time.monotonic() - ended_at_s
                self._tell(f"{name} is back after {took_s:.1f} s{await self._replays_since(before)}")
                self._reviving.discard(name)
                return
            ended = self._note_end(processes[0].child)
            processes[0].child.kill()
            self._tell(f"it did not come up again: {ended}")
        for process in self._cluster.find(name):
            process.may_end = True
        self._reviving.discard(name)
        self._tell(
            f"{name} is given up after {record.failed_count} attempts, and the others go on; see {child.log_path}"
        )

    def _note_end(self, child: ChildProcess) -> str:
        if child.returncode not in (None, -signal.SIGKILL):
            self.ended_by_themselves.append(f"{child.name} {child.how_it_ended}")
        return f"{child.name} {_ended(child)}"

    async def _keep_state_server(self) -> None:
        server = self._cluster.state_server
        while server is not None:
            await asyncio.sleep(_POLL_S)
            if not server.is_running:
                await self._revive_state_server(server)

    async def _revive_state_server(self, server: PrivateStateServer) -> None:
        """Restart the state server until it runs. It starts empty; services restore its data."""
        began_at_s = time.monotonic()
        self._tell("the state server has ended")
        for pause_s in itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1])):
            await asyncio.sleep(pause_s)
            try:
                await server.restart_async()
            except (BallastError, OSError) as error:
                self._tell(f"the state server did not come up again: {error}")
            else:
                self._tell(f"the state server is back, empty, after {time.monotonic() - began_at_s:.1f} s")
                return

    async def _wait_until_ready(self, processes: list[ServiceProcess]) -> bool:
        child, give_up_at_s = processes[0].child, time.monotonic() + _START_TIMEOUT_S
        while child.returncode is None and time.monotonic() < give_up_at_s:
            if all(process.read_ready() for process in processes):
                workers = {process.id for process in processes if process.service == "worker"}
                if not workers or await self._cluster.is_routable(workers):
                    return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _replays_since(self, before: int) -> str:
        await self._count_replays()
        count = self._replay_count - before
        return f"; {count} request{'' if count == 1 else 's'} replayed" if count > 0 else ""

    def _count_before(self, at_s: float) -> int:
        """Replays counted up to `at_s`. Requests may already have been replayed when the end of a process is
        noticed.
        """
        return next((count for looked_at_s, count in reversed(self._looks) if looked_at_s <= at_s), 0)

    async def _keep_count(self) -> None:
        while True:
            if not self._reviving:
                at_s = time.monotonic()
                await self._count_replays()
                self._looks.append((at_s, self._replay_count))
            await asyncio.sleep(_COUNT_INTERVAL_S)

    async def _count_replays(self) -> None:
        """Add to `_replay_count` the new replays of all dispatchers that respond."""
        for process in self._cluster.processes["dispatcher"]:
            if process.child.returncode is not None or not process.address:
                continue
            with contextlib.suppress(BallastError, TimeoutError):
                async with (
                    asyncio.timeout(_REPLAYS_WITHIN_S),
                    AsyncClient(
                        process.address, connect_timeout_s=_REPLAYS_WITHIN_S, **self._cluster.credentials
                    ) as client,
                ):
                    count = (await client.status()).recent.replays_total
                    self._replay_count += max(0, count - self._counts.get(process.address, 0))
                    self._counts[process.address] = count


def _ended(child: ChildProcess) -> str:
    if child.returncode == -signal.SIGKILL:
        return "was killed"
    if child.returncode is None:
        return f"was not ready within {_START_TIMEOUT_S:g} s; see {child.log_path}"
    return f"{child.how_it_ended}; see {child.log_path}"

"""What clients do that nobody wants, and whether anybody else notices.

    python -m benchmarks.clients                  # everything, full size, with 1,024 files for each process
    python -m benchmarks.clients --scale 0.05 --cases "silent connections" "stalled readers"

Each case is a crowd of processes (`benchmarks.crowd`) against a cluster; meanwhile a well-behaved client asks its
dispatcher for something small every 20 ms, and for tokens. Then the crowd is killed, and everything has to be as it
was: no request, no block, no file descriptor more. The table says how long the well-behaved client waited before
there was a crowd, and meanwhile, the crowd's end included. The exit status is 1 if a process ended, something was left,
or a small question waited more than 100 ms longer than before.
"""

import argparse
import asyncio
import contextlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ballast.client import AsyncClient
from ballast.client.types import ClusterStatus
from ballast.common.errors import BallastError
from ballast.common.sampling import SamplingParams
from benchmarks.crowd import DRIP, EMPTY, HUGE, LARGE, PREFACE, READERS, SILENT, STALLED
from benchmarks.fuzz import link_addresses
from tools.local.cluster import LocalCluster
from tools.model.tiny import make_tiny

_FILES = 1024
_SOCKETS_OF_A_PROCESS = 900
_STREAMS_OF_A_PROCESS = 250
_ASK_EVERY_S = 0.02
_BACK_WITHIN_S = 60.0
_MORE_FILES = 8  # than before, that are no leak: connections of its own that a service has made meanwhile
_MOST_S = 0.1
_GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Case:
    """`count`: connections, streams, messages; of EMPTY, turns of a conversation. `seconds`: how long it lasts."""

    name: str
    kind: str
    count: int
    seconds: float
    everywhere: bool = False  # at every port there is; else at the dispatcher

    def scaled(self, scale: float) -> "Case":
        return Case(self.name, self.kind, max(1, round(self.count * scale)), self.seconds, self.everywhere)


CASES = (
    Case("silent connections", SILENT, 10_000, 15.0, everywhere=True),
    Case("connections that only begin", PREFACE, 10_000, 15.0, everywhere=True),
    Case("a byte every second", DRIP, 400, 20.0, everywhere=True),
    Case("stalled readers that vanish", STALLED, 1_000, 15.0),
    Case("readers that vanish", READERS, 1_000, 15.0),
    Case("prompts of 16 MiB at once", HUGE, 100, 30.0),
    Case("prompts of 4 MiB at once", LARGE, 100, 30.0),
    Case("a message of empty turns", EMPTY, 8_000_000, 5.0),
)


@dataclass
class Waits:
    """Waits of the well-behaved client, in seconds."""

    asked_s: list[float] = field(default_factory=list[float])  # something small
    tokens_s: list[float] = field(default_factory=list[float])  # a whole short answer
    failures: list[str] = field(default_factory=list[str])

    def ms(self, share: float) -> float:
        ordered = sorted(self.asked_s) or [0.0]
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3


@dataclass
class Crowd:
    there: int = 0  # how many came, of all that wanted to
    answers: list[str] = field(default_factory=list[str])


@dataclass
class Outcome:
    case: Case
    before: Waits
    during: Waits
    there: int = 0  # how many came, of all that wanted to
    answers: list[str] = field(default_factory=list[str])
    peak_mib: float = 0.0  # of the dispatcher, more than before
    back_s: float | None = None  # until everything was as before; None: never
    left: str = ""
    ended: str = ""

    @property
    def why_not(self) -> str:
        reasons = [self.ended, f"left behind: {self.left}" * (self.back_s is None), *self.during.failures[:1]]
        if self.during.ms(1.0) > self.before.ms(1.0) + _MOST_S * 1e3:
            reasons.append(f"somebody else waited {self.during.ms(1.0):.0f} ms")
        return "; ".join(filter(None, reasons))


class Clients:
    """A crowd beside a well-behaved client, on a cluster that is there. `ports`: all that are reached from outside."""

    def __init__(self, cluster: LocalCluster, ports: Sequence[str]) -> None:
        self._cluster = cluster
        self._ports = list(ports)
        everyone = [process for processes in cluster.processes.values() for process in processes]
        self._processes = {process.id: psutil.Process(process.pid) for process in everyone}
        self._dispatcher = psutil.Process(cluster.processes["dispatcher"][0].pid)

    async def run(self, case: Case) -> Outcome:
        async with self._client() as client:
            await client.generate(token_ids=(5, 6, 7), sampling=_GREEDY)
            outcome = Outcome(case, before=await self._watch(client, min(3.0, case.seconds)), during=Waits())
            files, memory = self._files(), self._dispatcher.memory_info().rss
            peak = asyncio.create_task(self._watch_memory(outcome, memory))
            watching = asyncio.create_task(self._watch(client, case.seconds + min(3.0, case.seconds)))
            async with self.crowd(case) as there:
                await asyncio.sleep(case.seconds)
            outcome.there, outcome.answers = there.there, there.answers
            outcome.during = await watching
            peak.cancel()
            await self._settle(client, files, outcome)
        crash = self._cluster.crash()
        outcome.ended = str(crash) if crash is not None else ""
        return outcome

    def _client(self) -> AsyncClient:
        return AsyncClient(self._cluster.address, **self._cluster.credentials)

    @contextlib.asynccontextmanager
    async def crowd(self, case: Case) -> AsyncGenerator["Crowd"]:
        """Its processes. Inside, the first of them is there, or thirty seconds are over; in the end they are killed."""
        addresses = self._ports if case.everywhere else [self._cluster.address]
        at_most = {STALLED: _STREAMS_OF_A_PROCESS, READERS: _STREAMS_OF_A_PROCESS, HUGE: 25, LARGE: 25}.get(
            case.kind, _SOCKETS_OF_A_PROCESS
        )
        left, processes, crowd = case.count, list[asyncio.subprocess.Process](), Crowd()
        while left > 0:
            count = left if case.kind == EMPTY else min(left, at_most)
            left -= count
            command = [sys.executable, "-m", "benchmarks.crowd", case.kind, str(count), *addresses]
            processes.append(await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE))
        readers = [asyncio.create_task(_read(process, crowd)) for process in processes]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30.0):
                    while crowd.there == 0:  # noqa: ASYNC110 - a number, and no event
                        await asyncio.sleep(0.05)
            yield crowd
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*(process.wait() for process in processes), *readers)

    async def _watch(self, client: AsyncClient, seconds: float) -> Waits:
        waits, until_s = Waits(), time.monotonic() + seconds

        async def ask() -> None:
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                try:
                    await client.model_info()
                except BallastError as error:
                    waits.failures.append(f"a small question failed: {error}")
                waits.asked_s.append(time.monotonic() - began_s)
                await asyncio.sleep(_ASK_EVERY_S)

        async def want_tokens() -> None:
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                with contextlib.suppress(BallastError):
                    await client.generate(token_ids=(5, 6, 7), sampling=_GREEDY, deadline_s=60.0)
                    waits.tokens_s.append(time.monotonic() - began_s)
                await asyncio.sleep(0.1)

        await asyncio.gather(ask(), want_tokens())
        return waits

    async def _watch_memory(self, outcome: Outcome, before: int) -> None:
        while True:
            outcome.peak_mib = max(outcome.peak_mib, (self._dispatcher.memory_info().rss - before) / (1 << 20))
            await asyncio.sleep(0.05)

    async def _settle(self, client: AsyncClient, files: dict[str, int], outcome: Outcome) -> None:
        began_s = time.monotonic()
        while time.monotonic() - began_s < _BACK_WITHIN_S:
            with contextlib.suppress(BallastError):
                more = [
                    f"{now - files[name]} file descriptors of {name}"
                    for name, now in self._files().items()
                    if now > files[name] + _MORE_FILES
                ]
                outcome.left = ", ".join([*more, *_busy(await client.status())])
                if not outcome.left:
                    outcome.back_s = time.monotonic() - began_s
                    return
            await asyncio.sleep(0.1)

    def _files(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.Error):
                found[name] = process.num_fds()
        return found


async def _read(process: asyncio.subprocess.Process, crowd: Crowd) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        word, _, rest = line.decode().strip().partition(" ")
        if word == "there":
            crowd.there += int(rest)
        elif word == "answer":
            crowd.answers.append(rest)


def _busy(status: ClusterStatus) -> list[str]:
    loads = [group.load for group in status.groups if group.load is not None]
    held = sum(load.used_block_count for load in loads)
    running = status.running_request_count + sum(load.running_count + load.waiting_count for load in loads)
    waiting = status.backlog_request_count
    return [f"{running} requests run, {waiting} wait, {held} blocks are held"] if held or running or waiting else []


async def every_port(cluster: LocalCluster) -> list[str]:
    """Addresses of services, links and metrics."""
    services = [process.address for processes in cluster.processes.values() for process in processes]
    return [*services, *cluster.metrics_targets.values(), *await link_addresses(cluster)]


async def _run(cases: Sequence[Case], log_dir: Path) -> list[Outcome]:
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny("llama", Path(folder) / "tiny", max_len=4096)
        cluster = LocalCluster(
            model, workers=2, gateways=1, metrics_port=0, device_memory_bytes=64 << 20, log_dir=log_dir
        )
        outcomes: list[Outcome] = []
        async with cluster:
            for case in cases:
                outcomes.append(await Clients(cluster, await every_port(cluster)).run(case))
                _print(outcomes[-1])
        return outcomes


def _print(outcome: Outcome) -> None:
    case, before, during = outcome.case, outcome.before, outcome.during
    waits = f"{before.ms(0.5):5.1f} {before.ms(0.99):6.1f} {before.ms(1):6.1f} | "
    waits += f"{during.ms(0.5):5.1f} {during.ms(0.99):6.1f} {during.ms(1):6.1f}"
    back = "never" if outcome.back_s is None else f"{outcome.back_s:.1f} s"
    why = f"FAILED: {outcome.why_not}" if outcome.why_not else "ok"
    print(f"{case.name:<28}{case.count:>9,} | {waits} | {outcome.peak_mib:>+7.0f} MiB | {back:>7} | {why}", flush=True)
    for answer in outcome.answers[:3]:
        print(f"{'':<10}{answer}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of the crowds")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--log-dir", type=Path, default=Path("out/clients"))
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))  # for every process that is started from here on
    cases = [case.scaled(args.scale) for case in CASES if not args.cases or case.name in args.cases]
    print(f"{os.cpu_count()} cores, {_FILES} files for each process; what others wait for something small, in ms:")
    print(f"{'':<28}{'':>9} | {'before':<19} | {'meanwhile':<19} | {'dispatcher':>11} | {'as it':>7} |")
    print(f"{'crowd':<28}{'':>9} | {'p50':>5} {'p99':>6} {'max':>6} | {'p50':>5} {'p99':>6} {'max':>6} |", end="")
    print(f" {'grew by':>11} | {'was':>7} |")
    outcomes = asyncio.run(_run(cases, args.log_dir))
    return 1 if any(outcome.why_not for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Processor time that a monitor of many instances spends on each of its tasks, and the minimum age of reports.

    python -m benchmarks.monitor_scale [--instances 1000,10000] [--rounds 3]

Instances are simulated in this process, so that gRPC's share of a message (about 0.1 ms) is not included; the servicer,
the shell and the core are those of the service. Reports are those of busy instances.
"""

import argparse
import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ballast.common.ids import DispatcherId, Epoch, GroupId, Incarnation, WorkerId
from ballast.common.instance import Instance
from ballast.common.layout import Group, Layout, Member
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.model import ModelInfo
from ballast.rpc import codec
from ballast.rpc.announce import INSTANCE
from ballast.service.leadership import LeaderAddress
from ballast.service.logs import silence
from ballast.service.state import StateServer
from ballastpb.monitor.v1 import monitor_pb2 as pb
from services.monitor.core import messages as m
from services.monitor.core.machine import TICK_S, MonitorCore, MonitorRules, pressure_rules
from services.monitor.servicer import MonitorServicer
from services.monitor.shell import InstanceRow, MonitorShell
from services.planner.peers import MonitorEvents

_MODEL = ModelInfo(
    name="scale",
    architecture="llama",
    layer_count=40,
    vocab_size=32_000,
    max_model_len=4096,
    dtype="bfloat16",
    parameter_count=13_000_000_000,
    kv_bytes_per_token=819_200,
    eos_token_ids=(2,),
)
_LOAD = LoadReport(
    block_tokens=16,
    block_count=2000,
    used_block_count=700,
    waiting_block_count=20,
    running_count=40,
    waiting_count=1,
    max_running_count=256,
    steps_total=100_000,
    preemptions_total=10,
    prompt_tokens_total=10_000_000,
    generation_tokens_total=4_000_000,
    step_age_s=0.02,
    draining=False,
    memory=MemoryReport(budget_bytes=40 << 30, parameter_bytes=26 << 30, kv_bytes=12 << 30, free_bytes=2 << 30),
)


class _ReportCall:
    """The part of a gRPC context that the servicer uses."""

    def add_done_callback(self, act: Callable[[object], None]) -> None:
        pass

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


class _NoRegistry:
    async def write(self, rows: list[InstanceRow], forget: set[WorkerId]) -> None:
        pass

    async def read(self) -> list[InstanceRow]:
        return []


class _NoState:
    monitor_addresses: tuple[str, ...] = ("127.0.0.1:1",)

    async def read(self) -> tuple[Layout | None, tuple[m.BacklogWord, ...]]:
        return None, ()

    async def forget(self, dispatcher_ids: tuple[DispatcherId, ...]) -> None:
        pass


async def _nobody(address: str) -> bool:
    return False


class _ReportingInstance:
    """One instance's report stream to the servicer."""

    def __init__(self, servicer: MonitorServicer, number: int) -> None:
        self._sent: asyncio.Queue[pb.ReportRequest] = asyncio.Queue()
        self.name = WorkerId(f"worker-{number:05}")
        self._number = number
        self._answers = servicer.Report(self._requests(), cast(Any, _ReportCall()))

    async def _requests(self) -> AsyncIterator[pb.ReportRequest]:
        while True:
            yield await self._sent.get()

    async def say(self, request: pb.ReportRequest) -> None:
        self._sent.put_nowait(request)
        await anext(self._answers)

    async def announce(self) -> None:
        one = Instance(self.name, Incarnation(1), f"127.0.0.1:{self._number + 1}", _MODEL)
        await self.say(pb.ReportRequest(announce=INSTANCE.message(one)))

    def report(self, turn: int) -> bytes:
        load = replace(_LOAD, used_block_count=600 + (self._number + 7 * turn) % 100, steps_total=100_000 + turn)
        return pb.ReportRequest(load=codec.LOAD.message(load)).SerializeToString()


def layout_of(streams: Sequence[_ReportingInstance]) -> Layout:
    members = (Member(s.name, Incarnation(1), f"127.0.0.1:{i + 1}", 0, 40) for i, s in enumerate(streams))
    return Layout(Epoch(1), 40, tuple(Group(GroupId(member.worker_id), (member,)) for member in members), "scale")


@dataclass(slots=True)
class MonitorCosts:
    """Costs of the monitor's tasks: rows of (task, processor seconds, times per second)."""

    rows: list[tuple[str, float, float]]

    def add(self, what: str, seconds: float, per_s: float) -> None:
        self.rows.append((what, seconds, per_s))

    @property
    def share(self) -> float:
        """Fraction of a core that the tasks take, without reports."""
        return sum(seconds * per_s for _, seconds, per_s in self.rows)


def timed(act: Callable[[], object], times: int = 5) -> float:
    """Processor seconds of `act`: the minimum of several runs."""
    least_s = math.inf
    for _ in range(times):
        began_s = time.process_time()
        act()
        least_s = min(least_s, time.process_time() - began_s)
    return least_s


def _read_as_planner(answer: bytes) -> None:
    """Read a cluster status like a planner to which all reports in it are new."""
    monitor = LeaderAddress(StateServer("redis://127.0.0.1:1"), "monitor", None)
    MonitorEvents(monitor).loads_of(pb.GetClusterStatusResponse.FromString(answer))


async def measure(count: int, rounds: int) -> None:
    pressure = pressure_rules(overload_threshold_fraction=0.95, relief_threshold_fraction=0.5, dwell_s=3.0)
    rules = MonitorRules(lease_s=3600.0, warmup_s=0.0, pressure=pressure)
    shell = MonitorShell(MonitorCore(rules), _NoRegistry(), _NoState(), monitor_id="m", is_refused=_nobody)
    servicer = MonitorServicer(shell)
    shell.core.handle(m.LeadershipChanged(time.monotonic(), "c", 1))  # leads without a registry to read
    streams = [_ReportingInstance(servicer, number) for number in range(count)]
    for stream in streams:
        await stream.announce()
    layout = layout_of(streams)

    def read_state() -> None:
        shell.feed(m.SurroundingsRead(time.monotonic(), "c", layout, ()))

    read_state()
    shell.feed(m.Ticked(time.monotonic(), "c"))
    each_s = math.inf
    for turn in range(rounds):
        reports = [stream.report(turn) for stream in streams]
        began_s = time.process_time()
        for stream, report in zip(streams, reports, strict=True):
            await stream.say(pb.ReportRequest.FromString(report))
        each_s = min(each_s, (time.process_time() - began_s) / count)
    costs = MonitorCosts([])
    costs.add("tick", timed(lambda: shell.feed(m.Ticked(time.monotonic(), "c"))), 1 / TICK_S)
    costs.add("check", timed(shell.core.check), 1 / TICK_S)
    costs.add("gauges", timed(shell._update_gauges, 2), 1 / TICK_S)  # pyright: ignore[reportPrivateUsage]
    costs.add("state server", timed(read_state), 2 / TICK_S)
    costs.add("trends of groups", timed(lambda: shell.core.group_demands(time.monotonic()), 2), min(1.0, 1e3 / count))
    began_s = time.process_time()
    await shell.rows()
    costs.add("rows of the registry", time.process_time() - began_s, 1.0)
    status_s, answer = math.inf, b""
    for _ in range(4):
        began_s = time.process_time()
        said = await servicer.GetClusterStatus(pb.GetClusterStatusRequest(), cast(Any, _ReportCall()))
        answer = said.SerializeToString()
        status_s = min(status_s, time.process_time() - began_s)
    costs.add("status", status_s, 2.0)
    for what, seconds, per_s in costs.rows:
        print(f"| {count:,} | {what} | {1e3 * seconds:.1f} ms | {per_s:.0f} | {seconds * per_s:.1%} |", flush=True)
    left = max(0.0, 1.0 - costs.share)
    age_s = count * each_s / left if left else math.inf
    print(f"| {count:,} | a report | {1e6 * each_s:.0f} us | | {age_s:.2f} s old at best |", flush=True)
    planner_s = timed(lambda: _read_as_planner(answer))
    print(f"| {count:,} | planner reads a status | {1e3 * planner_s:.1f} ms | 2 | {2 * planner_s:.1%} |", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", default="1000,10000", metavar="COUNTS", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    args = parser.parse_args(argv)
    print(f"| instances | what | each | a second | of a core |\n|{'---|' * 5}")
    with silence():
        for count in map(int, args.instances.split(",")):
            asyncio.run(measure(count, args.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())

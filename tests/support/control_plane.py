"""Monitors, planners and reporting workers as processes around a private state server.

Leases are short, but long enough that a process starved of processor time keeps its own.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from ballast.common.layout import Layout
from ballast.rpc import codec
from ballast.rpc.channel import open_channel
from ballastpb.monitor.v1 import monitor_pb2, monitor_pb2_grpc
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from tools.local.process import ChildProcess
from tools.local.state_server import PrivateStateServer

ENVIRON = {
    "BALLAST_MONITOR__LEASE_S": "6",
    "BALLAST_MONITOR__DEV": "{leadership_ttl_s: 2}",
    "BALLAST_PLANNER__DEV": "{leadership_ttl_s: 2}",
}


class ControlPlane:
    """Starts processes, and kills them when the context ends. Waits that time out fail with the logs of all
    processes.
    """

    def __init__(self, state: PrivateStateServer, folder: Path) -> None:
        self.state = state
        self.processes: list[ChildProcess] = []
        self._folder = folder

    def start(self, module: str, *flags: str, redis_url: str | None = None) -> ChildProcess:
        name = f"{module.rsplit('.', 1)[-1]}-{len(self.processes)}"
        command = [sys.executable, "-m", module, "--redis-url", redis_url or self.state.url, *flags]
        environ = {**os.environ, **ENVIRON}
        process = ChildProcess(name, command, log_path=self._folder / f"{name}.log", environ=environ)
        self.processes.append(process)
        return process

    async def monitor(self, name: str, *flags: str) -> ChildProcess:
        return await self.ready(self.start("services.monitor", "--port", "0", "--monitor-id", name, *flags))

    async def planner(self, name: str, *flags: str) -> ChildProcess:
        return await self.ready(self.start("services.planner", "--port", "0", "--planner-id", name, *flags))

    async def worker(self, name: str, *flags: str) -> ChildProcess:
        return await self.ready(self.start("tests.support.reporting_worker", "--worker-id", name, *flags))

    async def ready(self, process: ChildProcess) -> ChildProcess:
        await self.until(lambda: process.find_line("ready ") is not None or process.returncode is not None, "ready")
        assert process.returncode is None, process.describe_end()
        return process

    async def until(self, holds: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + within_s
        while not holds():
            assert loop.time() < give_up_at_s, f"not within {within_s} s: {what}\n{self.logs()}"
            await asyncio.sleep(0.02)

    async def layout_until(
        self, planner: ChildProcess, holds: Callable[[Layout], bool], what: str, within_s: float = 60.0
    ) -> Layout:
        """Waits for the first layout of `planner` for which `holds` is true, and returns it."""
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + within_s
        async with open_channel(address(planner)) as channel:
            stub = planner_pb2_grpc.PlannerServiceStub(channel)
            while True:
                answer = await stub.GetLayout(planner_pb2.GetLayoutRequest(), timeout=60)
                layout = codec.LAYOUT.record(answer.layout)
                if holds(layout):
                    return layout
                assert loop.time() < give_up_at_s, f"not within {within_s} s: {what}\nlast {layout}\n{self.logs()}"
                await asyncio.sleep(0.02)

    async def status(self, monitor: ChildProcess) -> monitor_pb2.GetClusterStatusResponse:
        async with open_channel(address(monitor)) as channel:
            stub = monitor_pb2_grpc.MonitorServiceStub(channel)
            return await stub.GetClusterStatus(monitor_pb2.GetClusterStatusRequest(), timeout=60)

    def logs(self) -> str:
        return "\n".join(f"--- {process.name}\n{process.log_tail(30)}" for process in self.processes)


def address(process: ChildProcess) -> str:
    line = process.find_line("ready ")
    assert line is not None
    return line.rsplit("address=", 1)[1]


def names(layout: Layout) -> set[str]:
    return {member.worker_id for group in layout.groups for member in group.members}


@asynccontextmanager
async def control_plane() -> AsyncGenerator[ControlPlane]:
    with tempfile.TemporaryDirectory(prefix="ballast-test-") as folder:
        async with PrivateStateServer() as state:
            plane = ControlPlane(state, Path(folder))
            try:
                yield plane
            finally:
                for process in plane.processes:
                    if process.returncode is None:
                        process.send_signal(signal.SIGKILL)
                for process in plane.processes:
                    process.kill()

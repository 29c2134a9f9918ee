"""The worker's client of the monitor: finds the active monitor, announces this instance, and reports its load."""

import asyncio
import contextlib
from collections.abc import Callable

import grpc.aio

from ballast.common.errors import BallastError, DeadlineExceeded, NotActive, StaleEpoch, Unavailable
from ballast.common.instance import Instance
from ballast.common.layout import Place
from ballast.common.load import HASTY_REPORT_S, LoadReport
from ballast.common.traffic import Pace
from ballast.rpc import codec
from ballast.rpc.announce import INSTANCE
from ballast.rpc.channel import Dial, open_channel
from ballast.rpc.errors import asking
from ballast.service.leadership import LeaderAddress
from ballast.service.logs import get_logger
from ballast.service.state import StateServer
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.monitor.v1 import monitor_pb2 as pb
from ballastpb.monitor.v1 import monitor_pb2_grpc

_LONGEST_INTERVAL_S = 1.0  # maximum reporting interval, regardless of what the monitor requests
_ANSWER_TIMEOUT_S = 3.0
_GOODBYE_TIMEOUT_S = 1.0
_FIRST_BACK_OFF_S = 0.1
_LONGEST_BACK_OFF_S = 1.0
_MOST_MONITORS = 16

# grpc's type of the Report stream, which is generic over the messages.
_Call = grpc.aio.StreamStreamCall[pb.ReportRequest, pb.ReportResponse]


def alone() -> None:
    """The place of a worker without transitions."""


class MonitorReporter:
    """Reports load: `run` keeps a Report stream to the active monitor open until `leave` is called or it is cancelled.

    Monitors report the addresses of all monitors, so the active one is found even without the state server.

    Args:
        load: Called before each report, on the event loop, so it must be fast.
        place: Returns the instance's place in the layout; None: no transition yet.
        pace: Returns the instance's learned batch costs; None: not known yet.
        monitor_address: host:port; None: the holder of the lease in the state server.
    """

    def __init__(
        self,
        *,
        instance: Instance,
        load: Callable[[], LoadReport],
        place: Callable[[], Place | None] = alone,
        pace: Callable[[], Pace | None] = lambda: None,
        monitor_address: str | None,
        state: StateServer,
        interval_s: float = 0.2,
        dial: Dial = open_channel,
    ) -> None:
        self._dial = dial
        self._announce = INSTANCE.message(instance)
        self._load = load
        self._place, self._pace = place, pace
        self._monitor = LeaderAddress(state, "monitor", monitor_address)
        self._others: tuple[str, ...] = ()  # addresses of all monitors
        self._interval_s = interval_s
        self._told: LoadReport | None = None  # last report on the open stream
        self._leaving = asyncio.Event()
        self._due = asyncio.Event()  # set to report at once, when leaving or after a jump in demand
        self.connected = False  # True: the last report was answered

    def leave(self) -> None:
        """Announce the departure in the next report, after which `run` returns."""
        self._leaving.set()
        self._due.set()

    def on_requests_arrived(self, load: LoadReport) -> None:
        """Report at once, because a burst fills the memory within a few regular reports."""
        if self._told is not None and load.has_jumped(self._told):
            self._due.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            lookup = tasks.create_task(self._monitor.follow(), name="find monitor")
            await self._keep_reporting()
            lookup.cancel()

    async def _keep_reporting(self) -> None:
        back_off_s, last_why, attempts = _FIRST_BACK_OFF_S, "", 0
        while not self._leaving.is_set():
            target = self._target(attempts)
            why = "no monitor is active"
            if target is not None:
                try:
                    await self._report_to(target)
                    attempts = 0
                    continue  # left, or another monitor took over
                except BallastError as error:
                    why = str(error)
                    self._log_refusal(error, target, last_why)
            if self.connected:
                back_off_s, attempts = _FIRST_BACK_OFF_S, 0
            attempts += 1
            self.connected, last_why = False, why
            await self._pause(back_off_s)
            back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S)

    def _target(self, attempts: int) -> str | None:
        """Return the active monitor according to the state server, or the next known one if that fails."""
        found = self._monitor.current
        targets = ([] if found is None else [found]) + [address for address in self._others if address != found]
        return targets[attempts % len(targets)] if targets else None

    def _log_refusal(self, error: BallastError, target: str, last_why: str) -> None:
        log = get_logger().bind(monitor=target)
        if isinstance(error, StaleEpoch):
            log.error("a newer process uses the name of this worker", newest=error.want, own=error.have)
        elif str(error) != last_why and not isinstance(error, NotActive):
            log.warning("monitor not reached, trying again", why=str(error))

    async def _report_to(self, target: str) -> None:
        """Report until this instance leaves or another monitor is active. Raises BallastError if the stream fails."""
        with asking(target):
            await self._report_over(target)

    async def _report_over(self, target: str) -> None:
        found = self._monitor.current
        async with self._dial(target) as channel:
            stub = monitor_pb2_grpc.MonitorServiceStub(channel)
            call = stub.Report()
            try:
                await self._exchange(call, self._report(announce=self._announce), target)
                get_logger().info("reporting to the monitor", monitor=target)
                while not self._leaving.is_set() and self._monitor.current in (found, target):
                    self._due.clear()
                    self._told = load = self._load()
                    answer = await self._exchange(call, self._report(load=codec.LOAD.message(load)), target)
                    self.connected = True
                    self._others = tuple(answer.monitor_addresses)[:_MOST_MONITORS]
                    if target == found:
                        self._monitor.confirm()
                    least_s = min(answer.least_interval_s, _LONGEST_INTERVAL_S)
                    regular_s = max(self._interval_s, least_s)
                    hasty_s = min(regular_s, max(HASTY_REPORT_S, least_s))
                    await self._pause(hasty_s)
                    await self._until_due(regular_s - hasty_s)
                if self._leaving.is_set():
                    await self._announce_exit(call)
            finally:
                self._told = None
                call.cancel()

    def _report(
        self, announce: pb.Announce | None = None, load: cluster_pb2.LoadReport | None = None
    ) -> pb.ReportRequest:
        pace = self._pace()
        told = None if pace is None else codec.PACE.message(pace)
        return pb.ReportRequest(announce=announce, load=load, place=codec.place_to_proto(self._place()), pace=told)

    async def _exchange(self, call: _Call, request: pb.ReportRequest, target: str) -> pb.ReportResponse:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await call.write(request)
                answer = await call.read()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{target}: no answer within {_ANSWER_TIMEOUT_S} s") from error
        if not isinstance(answer, pb.ReportResponse):
            raise Unavailable(target, "the monitor closed the stream")
        return answer

    async def _announce_exit(self, call: _Call) -> None:
        try:
            async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
                await call.done_writing()
                await call.code()
        except TimeoutError:
            get_logger().warning("the monitor did not confirm the departure")

    async def _pause(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._leaving.wait()

    async def _until_due(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._due.wait()

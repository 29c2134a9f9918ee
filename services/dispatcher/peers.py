"""The dispatcher's client of the planner."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from ballast.common.errors import BallastError, DeadlineExceeded, NotActive, Unavailable
from ballast.common.ids import Epoch, WorkerId
from ballast.rpc.channel import Dial, open_channel
from ballast.rpc.errors import asking
from ballast.service.leadership import LeaderAddress
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc

if TYPE_CHECKING:
    from ballastpb.planner.v1.planner_pb2_grpc import PlannerServiceAsyncStub

T = TypeVar("T")

_PATIENCE_S = 8.0  # a new active monitor needs 4 s to detect missing instances and only then reports to the planner
_RETRY_S = 0.25
_AT_ONCE_S, _FRESH_S = 0.5, 1.0


class PlannerClient:
    """Implements PlannerPort with gRPC. Its owner keeps `where`, the active planner's address, up to date."""

    def __init__(self, where: LeaderAddress, dial: Dial = open_channel) -> None:
        self._where = where
        self._dial = dial
        self._kept_out: Mapping[str, str] = {}
        self._kept_out_until_s = 0.0

    @property
    def address(self) -> str:
        return self._where.current or ""

    async def drain_worker(self, worker_id: WorkerId, request_id: str, timeout_s: float) -> Epoch:
        request = planner_pb2.DrainWorkerRequest(worker_id=worker_id, request_id=request_id)
        return Epoch(
            (await self.ask(lambda planner, left_s: planner.DrainWorker(request, timeout=left_s), timeout_s)).epoch
        )

    async def kept_out(self) -> Mapping[str, str]:
        """Return the workers currently kept out of groups, with the reasons. The answer may be a second old; it is
        empty if the planner does not answer at once.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._kept_out_until_s:
            self._kept_out_until_s, self._kept_out = now_s + _FRESH_S, {}
            with contextlib.suppress(BallastError):
                async with self._stub() as planner:
                    answer = await planner.GetLayout(planner_pb2.GetLayoutRequest(), timeout=_AT_ONCE_S)
                    self._kept_out = dict(answer.kept_out)
        return self._kept_out

    async def ask(self, call: "Callable[[PlannerServiceAsyncStub, float], Awaitable[T]]", timeout_s: float) -> T:
        """Call the active planner.

        The call is retried while there is no active planner, or while it has only just become active, so that operators
        do not notice a failover. All calls are idempotent; changes have the caller's request id.

        Args:
            call: Called with the stub and the timeout of this attempt in seconds.

        Raises:
            BallastError: the planner's error, or no planner has answered within `timeout_s`.
        """
        clock = asyncio.get_running_loop()
        ends_s = clock.time() + timeout_s
        give_up_s = clock.time() + min(_PATIENCE_S, 0.8 * timeout_s)
        reason: BallastError | None = None
        while True:
            try:
                async with self._stub() as planner:
                    return await call(planner, ends_s - clock.time())
            except (Unavailable, NotActive) as error:
                if clock.time() > give_up_s:
                    raise
                reason = error
            except DeadlineExceeded as error:
                raise reason or error from error  # an earlier error is more informative than the last timeout
            await asyncio.sleep(_RETRY_S)

    async def watch_layout(
        self, request: planner_pb2.WatchLayoutRequest
    ) -> AsyncGenerator[planner_pb2.WatchLayoutResponse, None]:
        """Yield layouts until the planner ends the stream. Raises BallastError; Unavailable if there is no active
        planner.
        """
        async with self._stub() as planner:
            async for response in planner.WatchLayout(request):
                yield response

    @asynccontextmanager
    async def _stub(self) -> "AsyncGenerator[PlannerServiceAsyncStub]":
        address = self.address
        if not address:
            raise Unavailable("planner", "none is known yet; is one running?")
        async with self._dial(address) as channel:
            with asking(f"planner at {address}"):
                yield planner_pb2_grpc.PlannerServiceStub(channel)

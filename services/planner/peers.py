"""Who the planner talks to by gRPC: the monitor, to which it listens, and the workers, which it asks to drain."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator

import grpc

from ballast.common.errors import BallastError, DeadlineExceeded, NotActive, StaleEpoch
from ballast.common.ids import Incarnation, WorkerId
from ballast.rpc import codec
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballast.service.leadership import LeaderAddress
from ballast.service.logs import get_logger
from ballastpb.monitor.v1 import monitor_pb2 as pb
from ballastpb.monitor.v1 import monitor_pb2_grpc
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc
from services.planner.core.messages import (
    InstanceDraining,
    InstanceLost,
    InstanceUp,
    MonitorEvent,
    SnapshotBegan,
    SnapshotEnded,
)

_FIRST_BACK_OFF_S = 0.1
_LONGEST_BACK_OFF_S = 1.0
_LOOK_UP_S = 0.5  # how often a silent stream is checked for a monitor that has taken over
_ANSWER_TIMEOUT_S = 3.0


class MonitorEvents:
    """The events of whichever monitor is active, for ever. Each new connection begins with SnapshotBegan."""

    def __init__(self, monitor: LeaderAddress) -> None:
        self._monitor = monitor
        self._numbers = itertools.count(1)

    async def events(self) -> AsyncGenerator[MonitorEvent, None]:
        back_off_s, last_why = _FIRST_BACK_OFF_S, ""
        while True:
            target = self._monitor.current
            if target is not None:
                try:
                    async for event in self._listen(target):
                        back_off_s, last_why = _FIRST_BACK_OFF_S, ""
                        yield event
                except BallastError as error:
                    if str(error) != last_why and not isinstance(error, NotActive):
                        get_logger().warning("monitor not heard, trying again", monitor=target, why=str(error))
                    last_why = str(error)
            await asyncio.sleep(back_off_s)
            back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S)

    async def _listen(self, target: str) -> AsyncGenerator[MonitorEvent, None]:
        """Ends when the stream ends or another monitor takes over; raises when the stream fails."""
        async with open_channel(target) as channel:
            call = monitor_pb2_grpc.MonitorServiceStub(channel).WatchEvents(pb.WatchEventsRequest())
            reading: asyncio.Future[pb.WatchEventsResponse | object] | None = None
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    await call.initial_metadata()
                yield SnapshotBegan(time.monotonic(), f"snapshot-{next(self._numbers)}")
                get_logger().info("listening to the monitor", monitor=target)
                while target == self._monitor.current:
                    # Cancelling a read cancels the call, so the same read is waited for again and again.
                    reading = reading or asyncio.ensure_future(call.read())
                    done, _ = await asyncio.wait((reading,), timeout=_LOOK_UP_S)
                    if not done:
                        continue
                    message, reading = reading.result(), None
                    if not isinstance(message, pb.WatchEventsResponse):
                        return
                    event = _event_from_proto(message)
                    if event is not None:
                        yield event
            except TimeoutError as error:
                raise DeadlineExceeded(f"{target}: no answer within {_ANSWER_TIMEOUT_S} s") from error
            except grpc.RpcError as error:
                raise from_rpc_error(error, target) from error
            finally:
                call.cancel()
                if reading is not None:
                    reading.cancel()


async def drain_worker(address: str, worker_id: WorkerId, incarnation: Incarnation, timeout_s: float) -> int:
    """Asks that life of a worker to take nothing new; gives the number of its running requests.

    Raises:
        BallastError: not reached, or another process answers at the address.
    """
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            status = await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=timeout_s)
            if (status.worker_id, status.incarnation) != (worker_id, incarnation):
                raise StaleEpoch(f"{address} is {status.worker_id}", incarnation, status.incarnation)
            answer = await stub.Drain(worker_pb2.DrainRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, address) from error
    return answer.running_request_count


def _event_from_proto(message: pb.WatchEventsResponse) -> MonitorEvent | None:
    """None for an event of a newer monitor that this planner does not know."""
    at_s, cause_id = time.monotonic(), message.cause_id
    match message.WhichOneof("event"):
        case "instance_up":
            instance = message.instance_up.instance
            return InstanceUp(
                at_s=at_s,
                cause_id=cause_id,
                worker_id=WorkerId(instance.worker_id),
                incarnation=Incarnation(instance.incarnation),
                address=instance.address,
                model=codec.model_from_proto(instance.model),
                draining=message.instance_up.draining,
            )
        case "instance_lost":
            lost = message.instance_lost
            return InstanceLost(at_s, cause_id, WorkerId(lost.worker_id), Incarnation(lost.incarnation), lost.why)
        case "instance_draining":
            draining = message.instance_draining
            return InstanceDraining(at_s, cause_id, WorkerId(draining.worker_id), Incarnation(draining.incarnation))
        case "snapshot_end":
            return SnapshotEnded(at_s, cause_id)
        case _:
            return None

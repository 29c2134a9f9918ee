"""MonitorService: converts protobuf."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import grpc.aio

from ballast.common.errors import InvalidRequest
from ballast.common.instance import Instance
from ballast.common.layout import Place
from ballast.common.load import LoadReport
from ballast.rpc import border, codec
from ballast.rpc.announce import INSTANCE
from ballast.rpc.mapping import Choice, Mapper
from ballast.rpc.server import when_done
from ballast.service.refusals import Refusals
from ballast.service.security import require_worker
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.monitor.v1 import monitor_pb2 as pb
from ballastpb.monitor.v1 import monitor_pb2_grpc
from services.monitor.core import messages as m
from services.monitor.core.messages import StreamId
from services.monitor.policy.demand import GroupDemand
from services.monitor.policy.pressure import LongRequest, Overload, Relief, Signal
from services.monitor.shell import InstanceRow, MonitorShell, ReportStream

_GOODBYE_PROOF_S = 0.05
_MOST_INT64 = (1 << 63) - 1

# Any: the message types of a call do not matter to its context.
_Context = grpc.aio.ServicerContext[Any, Any]
_Sums = TypeVar("_Sums", bound=GroupDemand | Signal)


class MonitorServicer(monitor_pb2_grpc.MonitorServiceServicer):
    def __init__(self, shell: MonitorShell) -> None:
        self._shell = shell
        self._refusals = Refusals()
        self._heard: dict[StreamId, _Heard] = {}  # last messages of open streams, for GetClusterStatus
        self._groups: tuple[tuple[GroupDemand, ...], list[pb.GroupDemand]] = ((), [])
        self._answered: tuple[pb.ReportResponse, float, tuple[str, ...]] = (pb.ReportResponse(), math.nan, ())
        # the last answer, its interval, and its addresses

    async def Report(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[pb.ReportRequest], context: _Context
    ) -> AsyncIterator[pb.ReportResponse]:
        stream = self._shell.open_stream()
        announced_exit = False

        def ended() -> None:
            self._shell.forget_stream(stream)
            self._heard.pop(stream.stream_id, None)
            cause_id = self._shell.next_cause("stream")
            self._shell.feed(m.StreamEnded(time.monotonic(), cause_id, stream.stream_id, announced_exit))

        when_done(context, ended)
        instance: Instance | None = None
        while (request := await _next_unless_closed(request_iterator, stream)) is not None:
            try:
                instance = self._take(request, stream, instance)
            except InvalidRequest as error:
                self._refusals.note(instance.worker_id if instance is not None else _host_of(context), error)
                raise
            if stream.error is not None:
                raise stream.error
            yield self._answer()
        # A broken connection first looks like a closed stream, but the call is cancelled a little later.
        await asyncio.sleep(_GOODBYE_PROOF_S)
        announced_exit = instance is not None

    def _answer(self) -> pb.ReportResponse:
        """The answer to a report: the same message until something in it changes."""
        core, addresses = self._shell.core, self._shell.monitor_addresses
        answer, interval_s, told = self._answered
        if interval_s != core.least_report_interval_s or told != addresses:
            interval_s = core.least_report_interval_s
            answer = pb.ReportResponse(
                lease_s=core.rules.lease_s, least_interval_s=interval_s, monitor_addresses=addresses
            )
            self._answered = answer, interval_s, addresses
        return answer

    def _take(self, request: pb.ReportRequest, stream: ReportStream, instance: Instance | None) -> Instance:
        """Handle a message and return the announced instance. Raises InvalidRequest."""
        at_s, cause_id = time.monotonic(), self._shell.next_cause("report")
        place = codec.place_from_proto(request.place)
        match request.WhichOneof("message"):
            case "announce" if instance is None:
                require_worker(request.announce.worker_id)
                instance = INSTANCE.record(request.announce)
                self._check_place(place, instance)
                self._heard[stream.stream_id] = _Heard(request.announce)
                self._shell.feed(m.Announced(at_s, cause_id, stream.stream_id, instance, place))
            case "load" if instance is not None:
                load = codec.LOAD.record(request.load)
                pace = codec.PACE.record(request.pace) if request.HasField("pace") else None
                self._check_load(load, instance)
                self._check_place(place, instance)
                heard = self._heard[stream.stream_id]
                heard.load, heard.message = load, request.load
                self._shell.feed(m.LoadReported(at_s, cause_id, stream.stream_id, load, place, pace))
            case other:
                raise InvalidRequest("message", f"expected Announce first, then LoadReports; got {other}")
        return instance

    def _check_place(self, place: Place | None, instance: Instance) -> None:
        if place is None:
            return
        border.claimed_epoch("place.epoch", place.epoch, self._shell.layout_epoch)
        me = (instance.worker_id, instance.incarnation)
        if me not in {(member.worker_id, member.incarnation) for member in place.group.members}:
            raise InvalidRequest("place.group", f"{me[0]} (incarnation {me[1]}) is not in the group that it reports")
        last_layer = max(member.last_layer for member in place.group.members)
        border.within("place.group.members.last_layer", last_layer, 1, instance.model.layer_count)

    def _check_load(self, load: LoadReport, instance: Instance) -> None:
        border.adds_up("load.memory", load.memory)
        border.claimed_epoch("load.newest_epoch", load.newest_epoch, self._shell.layout_epoch)
        most_blocks = max(load.block_count, load.used_block_count, load.waiting_block_count, load.spare_block_count)
        bytes_at_most = most_blocks * load.block_tokens * instance.model.kv_bytes_per_token
        border.within("load: KV of its blocks in bytes", bytes_at_most, 0, border.MAX_BYTES)

    async def WatchEvents(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.WatchEventsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        watcher = self._shell.watch()
        when_done(context, lambda: self._shell.unwatch(watcher))
        # Acknowledges the call, even if the snapshot is empty.
        await context.send_initial_metadata(())
        while True:
            yield _change_to_proto(*await watcher.next())

    async def GetClusterStatus(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.GetClusterStatusRequest, context: _Context
    ) -> pb.GetClusterStatusResponse:
        rows = await self._shell.rows()
        demand = self._shell.cluster_demand()
        traffic, fresh = self._shell.traffic()
        pace, slowness = self._shell.core.pace(), self._shell.core.slowness()
        status = pb.GetClusterStatusResponse(
            monitor_id=self._shell.monitor_id,
            active=self._shell.core.active,
            groups=self._group_messages(),
            demand_bytes=_int64(demand.wanted_bytes),
            capacity_bytes=_int64(demand.capacity_bytes),
            undropped_capacity_bytes=_int64(demand.undropped_bytes),
            traffic=codec.TRAFFIC.message(traffic),
            fresh_traffic=None if fresh is None else codec.TRAFFIC.message(fresh),
            pace=None if pace is None else codec.PACE.message(pace),
        )
        for row in rows:
            self._add_instance(status, row, slowness.get(row.instance.worker_id, 0.0))
        return status

    def _group_messages(self) -> list[pb.GroupDemand]:
        groups = self._shell.group_demands()
        if groups is not self._groups[0]:
            self._groups = groups, list(map(_group_to_proto, groups))
        return self._groups[1]

    def _add_instance(self, status: pb.GetClusterStatusResponse, row: InstanceRow, slowness: float) -> None:
        """Add an instance, reusing the protobuf messages of its stream if they are current.

        Each message is copied once; a list of messages would be copied again.
        """
        entry = self._shell.core.entries.get(row.instance.worker_id)
        heard = None if entry is None or entry.stream_id is None else self._heard.get(entry.stream_id)
        if heard is None or heard.load is not row.load:
            heard = _Heard(INSTANCE.message(row.instance))
            heard.message = None if row.load is None else codec.LOAD.message(row.load)
        made = status.instances.add(report_age_s=row.report_age_s, slowness=slowness)
        made.instance.CopyFrom(heard.announce)
        if heard.message is not None:
            made.load.CopyFrom(heard.message)


class _Heard:
    """The last messages of a stream."""

    __slots__ = ("announce", "load", "message")

    def __init__(self, announce: pb.Announce) -> None:
        self.announce = announce
        self.load: LoadReport | None = None
        self.message: cluster_pb2.LoadReport | None = None  # message from which `load` was converted


async def _next_unless_closed(
    requests: AsyncIterator[pb.ReportRequest], stream: ReportStream
) -> pb.ReportRequest | None:
    """Wait for the next message; None once the worker has closed its side. Raises an error when the core closes the
    stream. That interrupts the wait directly, because a task for each message would take longer than the message
    itself.
    """
    if stream.error is not None:
        raise stream.error
    stream.reader = asyncio.current_task()
    try:
        return await anext(requests, None)
    except asyncio.CancelledError:
        if stream.error is None:
            raise
        if stream.reader is not None:
            stream.reader.uncancel()
        raise stream.error from None
    finally:
        stream.reader = None


def _host_of(context: _Context) -> str:
    """Return the host of a caller without a name: "ipv4:10.0.0.7:41234" without the port, which changes with each
    connection.
    """
    return context.peer().rpartition(":")[0]


_GROUP = Mapper(GroupDemand, pb.GroupDemand)
_EVENT = Choice(
    pb.WatchEventsResponse,
    "event",
    {
        "instance_up": Mapper(m.InstanceUp, pb.InstanceUp),
        "instance_lost": Mapper(m.InstanceLost, pb.InstanceLost),
        "instance_draining": Mapper(m.InstanceDraining, pb.InstanceDraining),
        "snapshot_end": Mapper(m.SnapshotEnd, pb.SnapshotEnd),
        "overload": Mapper(Overload, pb.Overload, given=("groups",)),
        "relief": Mapper(Relief, pb.Relief, given=("groups",)),
        "long_request": Mapper(LongRequest, pb.LongRequest, given=("groups",)),
    },
)


def _change_to_proto(change: m.Change, cause_id: str) -> pb.WatchEventsResponse:
    if not isinstance(change, m.Raised):
        return _EVENT.message(change, cause_id=cause_id)
    groups = list(map(_group_to_proto, change.groups))
    return _EVENT.message(_within_int64(change.signal), inner={"groups": groups}, cause_id=cause_id)


def _group_to_proto(group: GroupDemand) -> pb.GroupDemand:
    return _GROUP.message(_within_int64(group))


def _within_int64(record: _Sums) -> _Sums:
    """Return the record with its integers limited to int64, because sums over instances may exceed that even if single
    values do not.
    """
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    beyond = {name: _int64(value) for name, value in values.items() if type(value) is int and value != _int64(value)}
    return replace(record, **beyond) if beyond else record


def _int64(value: int) -> int:
    return max(-_MOST_INT64, min(_MOST_INT64, value))

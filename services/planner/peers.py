"""The planner's gRPC clients for the monitor, whose events it follows, and for the workers."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence, Set
from dataclasses import fields
from math import inf

import grpc.aio

from ballast.common.errors import (
    BallastError,
    DeadlineExceeded,
    InvalidRequest,
    NotActive,
    NotPossible,
    PeerViolation,
    StaleEpoch,
    Unavailable,
)
from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Member
from ballast.common.load import LoadReport
from ballast.common.transition import Phase, Status
from ballast.rpc import border, codec
from ballast.rpc.announce import check_announce
from ballast.rpc.channel import Dial, is_refused, open_channel
from ballast.rpc.errors import answered, asking
from ballast.rpc.fencing import MAX_TOKEN, PLANNER_TOKEN, with_token
from ballast.rpc.mapping import Choice, Mapper
from ballast.rpc.transition import KIND, STATUS
from ballast.service.leadership import LeaderAddress
from ballast.service.logs import get_logger
from ballast.service.refusals import Refusals
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.monitor.v1 import monitor_pb2 as pb
from ballastpb.monitor.v1 import monitor_pb2_grpc
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc
from services.planner.core.messages import (
    CallMember,
    ClusterLoad,
    InstanceDraining,
    InstanceLost,
    InstanceUp,
    LongRequestRaised,
    MonitorEvent,
    OverloadRaised,
    Probed,
    ReliefRaised,
    SnapshotBegan,
    SnapshotEnded,
    WorkerCall,
)
from services.planner.core.transition import Journal, MemberSaid
from services.planner.policy.migrate import Move

_FIRST_BACK_OFF_S = 0.1
_LONGEST_BACK_OFF_S = 1.0
_LOOK_UP_S = 0.5  # interval of checks for a new active monitor while the stream is silent
_ANSWER_TIMEOUT_S = 3.0
_MAX_WHY_CHARS = 16_384
PROBE_TIMEOUT_S = 1.0
_LOAD_SERVES_S = 0.5  # maximum time for which load reports are reused
_MOST_PROBES = 64  # concurrent probes
_CALLS_END_S = 10.0  # longer than the timeout of any call to a worker

_Answer = (
    worker_pb2.PrepareResponse | worker_pb2.CommitResponse | worker_pb2.AbortResponse | worker_pb2.GetTransitionResponse
)


class MonitorEvents:
    """Endless stream of the active monitor's events. Each new connection begins with SnapshotBegan."""

    def __init__(self, monitor: LeaderAddress, dial: Dial = open_channel) -> None:
        self._monitor = monitor
        self._dial = dial
        self._numbers = itertools.count(1)
        self._refusals = Refusals()
        self._reports: dict[WorkerId, tuple[cluster_pb2.LoadReport, LoadReport]] = {}  # reports of the last answer
        self._load, self._serves_until_s = ClusterLoad({}), -inf

    async def events(self) -> AsyncGenerator[MonitorEvent, None]:
        back_off_s, last_why = _FIRST_BACK_OFF_S, ""
        while True:
            target = self._monitor.current
            if target is not None:
                try:
                    with asking(target):
                        async for event in self._listen(target):
                            back_off_s, last_why = _FIRST_BACK_OFF_S, ""
                            yield event
                except BallastError as error:
                    if str(error) != last_why and not isinstance(error, NotActive):
                        get_logger().warning("monitor not heard, trying again", monitor=target, why=str(error))
                    last_why = str(error)
            await asyncio.sleep(back_off_s)
            back_off_s = min(2 * back_off_s, _LONGEST_BACK_OFF_S)

    async def load(self, timeout_s: float) -> ClusterLoad:
        """Return the load reports known to the active monitor. An answer is reused for as long as the call took, but at
        most `_LOAD_SERVES_S`.

        Raises:
            BallastError: no monitor is active, or it does not answer.
        """
        target = self._monitor.current
        if target is None:
            raise Unavailable("monitor", "none is active")
        began_s = time.monotonic()
        if began_s < self._serves_until_s:
            return self._load
        async with self._dial(target) as channel:
            stub = monitor_pb2_grpc.MonitorServiceStub(channel)
            with asking(target):
                call = stub.GetClusterStatus(pb.GetClusterStatusRequest(), timeout=timeout_s)
                answer = answered(await call, target)
        self._load, now_s = self.loads_of(answer), time.monotonic()
        self._serves_until_s = now_s + min(now_s - began_s, _LOAD_SERVES_S)
        return self._load

    def loads_of(self, answer: pb.GetClusterStatusResponse) -> ClusterLoad:
        """Convert the valid reports of an answer, reusing results for reports that have not changed since the last
        answer.
        """
        before, self._reports = self._reports, {}
        slowness: dict[WorkerId, float] = {}
        for row in answer.instances:
            name = row.instance.worker_id
            if not row.HasField("load"):
                continue
            known = before.get(worker_id := WorkerId(name))
            try:
                if known is None or known[0] != row.load:
                    known = (row.load, codec.LOAD.record(row.load))
                    border.name("instance.worker_id", name)
            except InvalidRequest as error:
                self._refusals.note(name, error)
                continue
            self._reports[worker_id] = known
            if 0.0 < row.slowness < inf:
                slowness[worker_id] = row.slowness
        loads = {worker_id: report for worker_id, (_, report) in self._reports.items()}
        pace = codec.PACE.record(answer.pace) if answer.HasField("pace") else None
        fresh = codec.TRAFFIC.record(answer.fresh_traffic) if answer.HasField("fresh_traffic") else None
        return ClusterLoad(loads, codec.TRAFFIC.record(answer.traffic), pace, slowness, fresh)

    async def _listen(self, target: str) -> AsyncGenerator[MonitorEvent, None]:
        """Yield a monitor's events until its stream ends or another monitor takes over. Raises if the stream fails."""
        async with self._dial(target) as channel:
            call = monitor_pb2_grpc.MonitorServiceStub(channel).WatchEvents(pb.WatchEventsRequest())
            reading: asyncio.Future[pb.WatchEventsResponse | object] | None = None
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    await call.initial_metadata()
                yield SnapshotBegan(time.monotonic(), f"snapshot-{next(self._numbers)}")
                get_logger().info("listening to the monitor", monitor=target)
                while target == self._monitor.current:
                    # Cancelling a read would cancel the call, so the same read is awaited again.
                    reading = reading or asyncio.ensure_future(call.read())
                    done, _ = await asyncio.wait((reading,), timeout=_LOOK_UP_S)
                    if not done:
                        continue
                    message, reading = reading.result(), None
                    if not isinstance(message, pb.WatchEventsResponse):
                        return
                    event = self._event_of(message, target)
                    if event is not None:
                        yield event
            except TimeoutError as error:
                raise DeadlineExceeded(f"{target}: no answer within {_ANSWER_TIMEOUT_S} s") from error
            finally:
                call.cancel()
                if reading is not None:
                    reading.cancel()

    def _event_of(self, message: pb.WatchEventsResponse, target: str) -> MonitorEvent | None:
        """Convert a message to an event; None if it is unknown or invalid, which does not end the stream."""
        try:
            return _event_from_proto(message)
        except InvalidRequest as error:
            self._refusals.note(message.instance_up.instance.worker_id or target, error)
            return None


_WHEN = ("at_s", "cause_id")
_UP = Mapper(InstanceUp, pb.Announce, given=(*_WHEN, "draining", "place", "parked"), check=check_announce)
_EVENT = Choice(
    pb.WatchEventsResponse,
    "event",
    {
        "instance_lost": Mapper(InstanceLost, pb.InstanceLost, given=_WHEN),
        "instance_draining": Mapper(InstanceDraining, pb.InstanceDraining, given=_WHEN),
        "overload": Mapper(OverloadRaised, pb.Overload, given=_WHEN, ignored=("horizon_s", "groups")),
        "relief": Mapper(
            ReliefRaised, pb.Relief, given=_WHEN, ignored=("used_bytes", "undropped_capacity_bytes", "groups")
        ),
        "long_request": Mapper(LongRequestRaised, pb.LongRequest, given=_WHEN, ignored=("groups",)),
        "snapshot_end": Mapper(SnapshotEnded, pb.SnapshotEnd, given=_WHEN),
    },
)


def _event_from_proto(message: pb.WatchEventsResponse) -> MonitorEvent | None:
    """Convert a message to an event; None if its type is unknown, because the monitor is newer."""
    when = {"at_s": time.monotonic(), "cause_id": message.cause_id}
    if message.HasField("instance_up"):
        up = message.instance_up
        place = codec.place_from_proto(up.place)
        return _UP.record(up.instance, **when, draining=up.draining, place=place, parked=up.parked)
    return _EVENT.record(message, **when)


class Members:
    """Calls workers. Connections stay open while in use. Orders carry the lease's token."""

    def __init__(self, on_fenced: Callable[[int], None], dial: Dial = open_channel) -> None:
        """`on_fenced`: called with a higher token that a worker has seen."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._orders = with_token(0)
        self._on_fenced = on_fenced
        self._dial = dial
        self._refusals = Refusals()
        self._probes = asyncio.Semaphore(_MOST_PROBES)

    def lead(self, token: int | None) -> None:
        """Use this token for orders. None: a former leader keeps its old token, which workers refuse."""
        if token is not None:
            self._orders = with_token(token)

    async def drain(self, address: str, worker_id: WorkerId, incarnation: Incarnation, timeout_s: float) -> int:
        """Drain the incarnation and return the number of its running requests.

        Raises:
            BallastError: the worker is unreachable, or another process answers.
        """
        async with self._dial(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            with self._asking(address):
                status = answered(await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=timeout_s), address)
                if (status.worker_id, status.incarnation) != (worker_id, incarnation):
                    raise StaleEpoch(f"{address} is {status.worker_id}", incarnation, status.incarnation)
                drain = stub.Drain(worker_pb2.DrainRequest(), timeout=timeout_s, metadata=self._orders)
                answer = answered(await drain, address)
        return answer.running_request_count

    async def order_standing(self, member: Member, timeout_s: float, *, park: bool) -> None:
        """Order the incarnation to park or to wake."""
        request = worker_pb2.ParkRequest(incarnation=member.incarnation, wake=not park)
        with self._asking(member.worker_id):
            await self._stub(member.address).Park(request, timeout=timeout_s, metadata=self._orders)

    async def probe(self, address: str, worker_id: WorkerId, incarnation: Incarnation) -> Probed:
        """Check whether the incarnation is at its address."""
        async with self._probes, self._dial(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                with asking(address):
                    call = stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=PROBE_TIMEOUT_S)
                    status = answered(await call, address)
            except BallastError:
                return Probed.GONE if await is_refused(address, PROBE_TIMEOUT_S) else Probed.SILENT
        return Probed.ALIVE if (status.worker_id, status.incarnation) == (worker_id, incarnation) else Probed.GONE

    async def call(self, command: CallMember, timeout_s: float) -> MemberSaid | None:
        """Call a member and return its answer; None if there is no timely and valid answer. A refused Prepare is
        FAILED.
        """
        worker_id, epoch = command.member.worker_id, command.journal.epoch
        try:
            with self._asking(worker_id):
                answer = await self._ask(command, timeout_s)
        except BallastError as why:
            if command.call is WorkerCall.PREPARE and isinstance(why, (InvalidRequest, StaleEpoch, NotPossible)):
                return MemberSaid(time.monotonic(), worker_id, Phase.FAILED, str(why))
            if not isinstance(why, (Unavailable, DeadlineExceeded)):
                get_logger().warning("member does not do as asked", worker=worker_id, epoch=epoch, why=str(why))
            return None
        try:
            status = STATUS.record(answered(answer, worker_id).status)
            _bound_figures(status)
        except (InvalidRequest, PeerViolation) as error:
            field = error.field if isinstance(error, InvalidRequest) else "status"
            self._refusals.note(worker_id, InvalidRequest(field, error.why))
            return None
        if status.epoch != epoch:
            return None
        return MemberSaid(time.monotonic(), worker_id, status.phase, status.why, status)

    async def name_partners(
        self, member: Member, partners: Sequence[Member], settled_epoch: Epoch, timeout_s: float
    ) -> Epoch:
        request = worker_pb2.NamePartnersRequest(
            partners=[worker_pb2.Partner(worker_id=p.worker_id, data_address=p.data_address) for p in partners],
            settled_epoch=settled_epoch,
        )
        with self._asking(member.worker_id):
            call = self._stub(member.address).NamePartners(request, timeout=timeout_s, metadata=self._orders)
            answer = answered(await call, member.worker_id)
        border.within("newest_epoch", answer.newest_epoch, 0, border.MAX_EPOCH)
        return Epoch(answer.newest_epoch)

    async def migrate(self, epoch: Epoch, move: Move, within_s: float, cause_id: str, timeout_s: float) -> None:
        """Order a migration from all members of both groups, because links need both sides. The targets are called
        first, so that they wait.
        """
        request = worker_pb2.MigrateRequest(
            epoch=epoch,
            source=[_party(member) for member in move.source.members],
            target=[_party(member) for member in move.target.members],
            block_budget=move.block_budget,
            within_s=within_s,
            cause_id=cause_id,
            longest_first=move.longest_first,
        )
        for member in (*move.target.members, *reversed(move.source.members)):
            with self._asking(member.worker_id):
                await self._stub(member.address).Migrate(request, timeout=timeout_s, metadata=self._orders)

    @contextlib.contextmanager
    def _asking(self, target: str) -> Generator[None]:
        try:
            with asking(target):
                yield
        except StaleEpoch as error:
            if error.what == PLANNER_TOKEN and error.want <= MAX_TOKEN:
                self._on_fenced(error.want)
            raise

    def _stub(self, address: str) -> "worker_pb2_grpc.WorkerServiceAsyncStub":
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._dial(address)
        return worker_pb2_grpc.WorkerServiceStub(channel)

    async def _ask(self, command: CallMember, timeout_s: float) -> _Answer:
        stub, epoch, orders = self._stub(command.member.address), command.journal.epoch, self._orders
        match command.call:
            case WorkerCall.PREPARE:
                call = stub.Prepare(_prepare_request(command), timeout=timeout_s, metadata=orders)
            case WorkerCall.COMMIT:
                call = stub.Commit(worker_pb2.CommitRequest(epoch=epoch), timeout=timeout_s, metadata=orders)
            case WorkerCall.ABORT:
                request = worker_pb2.AbortRequest(epoch=epoch, why=command.why)
                call = stub.Abort(request, timeout=timeout_s, metadata=orders)
            case WorkerCall.POLL:
                call = stub.GetTransition(worker_pb2.GetTransitionRequest(epoch=epoch), timeout=timeout_s)
        return await call

    async def keep(self, addresses: Set[str]) -> None:
        """Close the connections to all other addresses, once their calls have ended."""
        gone = [self._channels.pop(address) for address in self._channels.keys() - addresses]
        await asyncio.gather(*(channel.close(_CALLS_END_S) for channel in gone))

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()


def _bound_figures(status: Status) -> None:
    """Clamp the numbers, which are summed for metrics, instead of rejecting the answer, because a transition waits for
    the reported phase.
    """
    status.why = status.why[:_MAX_WHY_CHARS]
    for field in fields(Status):
        value = getattr(status, field.name)
        if isinstance(value, (int, float)) and not 0 <= value <= border.MAX_EPOCH:
            setattr(status, field.name, border.MAX_EPOCH if value > border.MAX_EPOCH else type(value)(0))


def _party(member: Member) -> worker_pb2.MigrationParty:
    return worker_pb2.MigrationParty(
        worker_id=member.worker_id, incarnation=member.incarnation, data_address=member.data_address
    )


def _prepare_request(command: CallMember) -> worker_pb2.PrepareRequest:
    journal: Journal = command.journal
    return worker_pb2.PrepareRequest(
        kind=KIND.number_of[journal.kind],
        base=codec.LAYOUT.message(journal.base),
        target=codec.LAYOUT.message(journal.target),
        sources=[worker_pb2.LayerSource(layer=layer, worker_id=holder or "") for layer, holder in command.sources],
        cause_id=command.cause_id,
    )

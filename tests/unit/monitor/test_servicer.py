"""MonitorService over real calls: what it refuses, what watchers receive, and which streams it closes."""

import asyncio
import dataclasses
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest

from ballast.common.errors import BallastError, InvalidRequest, NotActive, Overloaded, StaleEpoch, Unavailable
from ballast.common.ids import DispatcherId, Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.traffic import Traffic
from ballast.rpc import border, codec
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballast.rpc.server import RpcServer
from ballast.service.metrics import REGISTRY
from ballast.service.refusals import Refusals
from ballast.service.state import StateServer
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.monitor.v1 import monitor_pb2 as pb
from ballastpb.monitor.v1 import monitor_pb2_grpc
from services.monitor.core.machine import MonitorCore, MonitorRules
from services.monitor.core.messages import BacklogWord, Instance, InstanceUp
from services.monitor.servicer import MonitorServicer
from services.monitor.shell import InstanceRow, MonitorShell, Watcher
from services.worker.reporter import MonitorReporter
from tests.support.pressure import RULES
from tests.support.reporting_worker import load_report, model_info
from tests.support.waiting import soon

# The generated async stub exists for type checkers only.
Stub: TypeAlias = "monitor_pb2_grpc.MonitorServiceAsyncStub"


QUICK = dataclasses.replace(RULES, dwell_s=0.3, relief_after_s=0.2)


class MemoryRegistry:
    def __init__(self) -> None:
        self.rows: list[InstanceRow] = []

    async def write(self, rows: list[InstanceRow], forget: set[WorkerId]) -> None:
        kept = {r.instance.worker_id: r for r in self.rows if r.instance.worker_id not in forget}
        kept.update({r.instance.worker_id: r for r in rows})
        self.rows = list(kept.values())

    async def read(self) -> list[InstanceRow]:
        return self.rows


class MemorySurroundings:
    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.backlogs: tuple[BacklogWord, ...] = ()
        self.monitor_addresses: tuple[str, ...] = ()
        self.forgotten: set[DispatcherId] = set()

    async def read(self) -> tuple[Layout | None, tuple[BacklogWord, ...]]:
        return self.layout, self.backlogs

    async def forget(self, dispatcher_ids: tuple[DispatcherId, ...]) -> None:
        self.forgotten.update(dispatcher_ids)


async def refuses_nobody(address: str) -> bool:
    return False


@asynccontextmanager
async def monitor(
    *, active: bool, environment: MemorySurroundings | None = None
) -> AsyncGenerator[tuple[MonitorShell, Stub]]:
    async with served(active=active, environment=environment) as (shell, address), open_channel(address) as channel:
        yield shell, monitor_pb2_grpc.MonitorServiceStub(channel)


@asynccontextmanager
async def served(
    *, active: bool, environment: MemorySurroundings | None = None
) -> AsyncGenerator[tuple[MonitorShell, str]]:
    """Yield a served monitor and its address."""
    rules = MonitorRules(
        lease_s=5.0,
        warmup_s=0.2,
        registry_interval_s=0.1,
        max_instances=2,
        history_length=5,
        pressure=QUICK,
        backlog_forget_s=0.1,
    )
    shell = MonitorShell(
        MonitorCore(rules),
        MemoryRegistry(),
        environment or MemorySurroundings(),
        monitor_id="m1",
        tick_s=0.02,
        max_watchers=2,
        watcher_queue_length=5,
        is_refused=refuses_nobody,
    )

    def register(server: grpc.aio.Server) -> None:
        monitor_pb2_grpc.add_MonitorServiceServicer_to_server(MonitorServicer(shell), server)

    bugs: list[BallastError] = []
    descriptor = pb.DESCRIPTOR.services_by_name["MonitorService"]
    server = RpcServer(host="127.0.0.1", port=0, services=[(descriptor, register)], on_bug=bugs.append)
    port = await server.start()
    running = asyncio.create_task(shell.run())
    await asyncio.sleep(0)
    if active:
        shell.change_leadership(7)
    try:
        async with asyncio.timeout(60):
            yield shell, f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        running.cancel()
        await asyncio.wait((running,))
    assert not bugs


def tell(story: Callable[[MonitorShell, Stub], Coroutine[Any, Any, None]], *, active: bool = True) -> None:
    async def run() -> None:
        async with monitor(active=active) as (shell, stub):
            await story(shell, stub)

    asyncio.run(run())


def announce(
    worker_id: str = "w1",
    incarnation: int = 3,
    address: str = "host:1",
    layers: int = 4,
    data_address: str = "host:2",
) -> pb.ReportRequest:
    model = codec.MODEL.message(model_info(layers))
    return pb.ReportRequest(
        announce=pb.Announce(
            worker_id=worker_id, incarnation=incarnation, address=address, model=model, data_address=data_address
        )
    )


def load() -> pb.ReportRequest:
    return pb.ReportRequest(load=codec.LOAD.message(load_report(5)))


def announced(**model: Any) -> pb.ReportRequest:
    request = announce()
    request.announce.model.MergeFrom(cluster_pb2.ModelInfo(**model))
    return request


def loaded(**changes: Any) -> pb.ReportRequest:
    """A valid report except for `changes` to its load."""
    request = load()
    for name, value in changes.items():
        if name == "memory":
            request.load.memory.CopyFrom(value)
        else:
            setattr(request.load, name, value)
    return request


def placed(
    *,
    epoch: int = 1,
    worker_id: str = "w1",
    group_id: str = "w1",
    first_layer: int = 0,
    last_layer: int = 4,
    twice: bool = False,
) -> pb.ReportRequest:
    """A report whose place is a group with this worker as its only member, listed a second time if `twice`."""
    member = cluster_pb2.Member(worker_id=worker_id, incarnation=3, first_layer=first_layer, last_layer=last_layer)
    request = load()
    group = cluster_pb2.Group(group_id=group_id, members=[member] * (2 if twice else 1))
    request.place.CopyFrom(cluster_pb2.Place(epoch=epoch, group=group))
    return request


async def refusal(stub: Stub, *requests: pb.ReportRequest) -> BallastError:
    """The error with which a Report stream of these messages ends."""
    call = stub.Report()
    try:
        for request in requests:
            await call.write(request)
            await call.read()
        await call.read()
    except grpc.RpcError as error:
        return from_rpc_error(error, "monitor")
    except asyncio.InvalidStateError:
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        return from_rpc_error(caught.value, "monitor")
    raise AssertionError("it was not refused")


@pytest.mark.parametrize(
    ("requests", "field"),
    [
        ([load()], "message"),
        ([pb.ReportRequest()], "message"),
        ([announce(), announce()], "message"),
        ([announce(worker_id="")], "announce.worker_id"),
        ([announce(incarnation=0)], "announce.incarnation"),
        ([announce(address="nowhere")], "announce.address"),
        ([announce(data_address="nowhere")], "announce.data_address"),
        ([announce(layers=0)], "announce.model.layer_count"),
        ([announce(worker_id="x" * 129)], "announce.worker_id"),
        ([announce(worker_id="w 1")], "announce.worker_id"),
        ([announce(worker_id="w\n1")], "announce.worker_id"),
        ([announce(incarnation=2**63 - 1)], "announce.incarnation"),
        ([announce(address="host:99999")], "announce.address"),
        ([announce(address="host:²")], "announce.address"),
        ([announce(address="x" * 600 + ":1")], "announce.address"),
        ([announced(layer_parameter_bytes=[1])], "model.layer_parameter_bytes"),
        ([announced(kv_bytes_per_token=-1)], "model.kv_bytes_per_token"),
        ([announced(name="x" * 2000)], "model.name"),
        ([announce(), loaded(block_count=-1)], "load"),
        ([announce(), loaded(block_tokens=0)], "load"),
        ([announce(), loaded(generation_tokens_total=-(2**63))], "load"),
        ([announce(), loaded(newest_epoch=2**63 - 1)], "load.newest_epoch"),
        ([announce(), loaded(newest_epoch=border.MAX_CLAIMED_EPOCH + border.CLAIM_SLACK + 1)], "load.newest_epoch"),
        ([announce(), loaded(step_age_s=math.nan)], "load.step_age_s"),
        ([announce(), loaded(step_age_s=math.inf)], "load.step_age_s"),
        ([announce(), loaded(step_age_s=-1.0)], "load.step_age_s"),
        ([announce(), loaded(memory=cluster_pb2.MemoryReport(budget_bytes=5, kv_bytes=4))], "load.memory"),
        ([announce(), loaded(memory=cluster_pb2.MemoryReport(parameter_bytes=-5, kv_bytes=5))], "load.memory"),
        (
            [announced(kv_bytes_per_token=1 << 40), loaded(waiting_block_count=2**31 - 1)],
            "load: KV of its blocks in bytes",
        ),
        ([announce(), placed(epoch=2**63 - 1)], "place.epoch"),
        ([announce(), placed(epoch=-1)], "place.epoch"),
        ([announce(), placed(worker_id="w2")], "place.group"),
        ([announce(), placed(last_layer=5)], "place.group.members.last_layer"),
        ([announce(), placed(first_layer=4, last_layer=4)], "member.last_layer"),
        ([announce(), placed(twice=True)], "group.members"),
        ([announce(), placed(group_id="")], "group.group_id"),
    ],
)
def test_an_invalid_report_is_refused_by_name(requests: list[pb.ReportRequest], field: str) -> None:
    async def story(shell: MonitorShell, stub: Stub) -> None:
        error = await refusal(stub, *requests)
        assert isinstance(error, InvalidRequest)
        assert error.field == field
        # A valid stream is still accepted.
        call = stub.Report()
        for request in (announce(incarnation=4), load()):
            await call.write(request)
            assert isinstance(await call.read(), pb.ReportResponse)
        shell.core.check()
        status = await stub.GetClusterStatus(pb.GetClusterStatusRequest())
        assert [row.instance.incarnation for row in status.instances] == [4]

    tell(story)


def test_senders_of_invalid_reports_are_counted_in_bounded_memory() -> None:
    def count(sender: str) -> float:
        return REGISTRY.get_sample_value("ballast_messages_refused_total", {"sender": sender}) or 0.0

    async def story(shell: MonitorShell, stub: Stub) -> None:
        before = count("w1")
        for _ in range(3):
            await refusal(stub, announce(), loaded(block_count=-1))
        assert count("w1") == before + 3

    tell(story)
    refusals = Refusals()
    before = count("others")
    for i in range(1000):
        refusals.note(f"stranger-{i}", InvalidRequest("load", "no"))
    assert count("others") == before + 1000 - 256


def test_reports_are_answered_and_seen_in_the_status() -> None:
    async def story(shell: MonitorShell, stub: Stub) -> None:
        call = stub.Report()
        for request in (announce(), load(), load()):
            await call.write(request)
            answer = await call.read()
            assert isinstance(answer, pb.ReportResponse)
            assert answer.lease_s == 5.0
        status = await stub.GetClusterStatus(pb.GetClusterStatusRequest())
        assert (status.monitor_id, status.active) == ("m1", True)
        assert status.instances[0].instance == announce().announce
        assert status.instances[0].load == load().load
        await call.write(loaded(used_block_count=7))
        await call.read()
        status = await stub.GetClusterStatus(pb.GetClusterStatusRequest())
        assert status.instances[0].load.used_block_count == 7
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        await soon(lambda: not shell.core.entries)

    tell(story)


def test_an_instance_whose_engine_hangs_does_not_count_as_alive() -> None:
    async def story(shell: MonitorShell, stub: Stub) -> None:
        call = stub.Report()
        for request, count in ((announce(), 1), (loaded(step_age_s=61.0), 0), (load(), 1)):
            await call.write(request)
            await call.read()
            await soon(lambda count=count: REGISTRY.get_sample_value("ballast_instances") == count)

    tell(story)


async def test_gauges_of_groups_end_with_them() -> None:
    def demand() -> float | None:
        return REGISTRY.get_sample_value("ballast_kv_demand_bytes", {"leader": "w1"})

    environment = MemorySurroundings()
    alone = Group(GroupId("w1"), (Member(WorkerId("w1"), Incarnation(3), "host:1", 0, 4),))
    environment.layout = Layout(Epoch(1), 4, (alone,), "test")
    async with monitor(active=True, environment=environment) as (shell, stub):
        call = stub.Report()
        for request in (announce(), load()):
            await call.write(request)
            await call.read()
        await soon(lambda: demand() is not None, 5.0)
        shell.change_leadership(None)
        await asyncio.sleep(0.01)
        assert shell.group_demands() == (), "another caller asks before the next round of gauges"
        await soon(lambda: demand() is None, 5.0)


def test_an_old_incarnation_and_a_second_stream() -> None:
    async def story(shell: MonitorShell, stub: Stub) -> None:
        first = stub.Report()
        await first.write(announce(incarnation=3))
        await first.read()
        stale = await refusal(stub, announce(incarnation=2))
        assert isinstance(stale, StaleEpoch)
        assert (stale.have, stale.want) == (2, 3)
        second = stub.Report()
        await second.write(announce(incarnation=4))
        await second.read()
        with pytest.raises(grpc.RpcError) as superseded:
            await first.read()
        assert isinstance(from_rpc_error(superseded.value, "monitor"), Unavailable)
        assert shell.core.entries[WorkerId("w1")].instance.incarnation == 4
        second.cancel()

    tell(story)


def test_instances_beyond_the_limit_are_refused_with_a_clear_error() -> None:
    async def story(shell: MonitorShell, stub: Stub) -> None:
        calls = [stub.Report() for _ in range(2)]
        for number, call in enumerate(calls):
            await call.write(announce(worker_id=f"w{number}"))
            await call.read()
        assert isinstance(await refusal(stub, announce(worker_id="w9")), Overloaded)
        for call in calls:
            call.cancel()

    tell(story)


def test_a_standby_redirects_all_callers() -> None:
    async def story(shell: MonitorShell, stub: Stub) -> None:
        assert isinstance(await refusal(stub, announce()), NotActive)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.WatchEvents(pb.WatchEventsRequest()).read()
        assert isinstance(from_rpc_error(caught.value, "monitor"), NotActive)
        assert not (await stub.GetClusterStatus(pb.GetClusterStatusRequest())).active

    tell(story, active=False)


def test_a_watcher_gets_the_snapshot_then_events_then_the_end_of_leadership() -> None:
    async def story(shell: MonitorShell, stub: Stub) -> None:
        worker = stub.Report()
        await worker.write(announce())
        await worker.read()
        watch = stub.WatchEvents(pb.WatchEventsRequest())
        heard = [await watch.read() for _ in range(2)]
        worker.cancel()
        events = [event for event in heard if isinstance(event, pb.WatchEventsResponse)]
        assert [event.WhichOneof("event") for event in events] == ["instance_up", "snapshot_end"]
        assert all(event.cause_id for event in events)
        shell.change_leadership(None)
        with pytest.raises(grpc.RpcError) as caught:
            await watch.read()
        assert isinstance(from_rpc_error(caught.value, "monitor"), NotActive)

    tell(story)


async def test_memory_pressure_reaches_watchers_and_the_status() -> None:
    """First a full worker alone in its group; then an empty second worker joins the group."""
    environment = MemorySurroundings()
    members = tuple(
        Member(WorkerId(name), Incarnation(3), "host:1", first, first + 2) for name, first in (("w1", 0), ("w2", 2))
    )
    alone = dataclasses.replace(members[0], last_layer=4)
    layouts = [
        Layout(Epoch(epoch), 4, (Group(GroupId("g"), group),), "test") for epoch, group in ((1, (alone,)), (2, members))
    ]

    async def story(shell: MonitorShell, stub: Stub) -> None:
        streams: list[Any] = [stub.Report(), stub.Report()]
        for name, stream in zip(("w1", "w2"), streams, strict=True):
            await stream.write(announce(name))
            await stream.read()

        async def report(used: int, seen: list[str], until: str) -> pb.WatchEventsResponse:
            while True:
                for stream in streams:
                    await stream.write(pb.ReportRequest(load=codec.LOAD.message(load_report(used))))
                    await stream.read()
                if not reading.done():
                    await asyncio.sleep(0.02)
                    continue
                event = reading.result()
                assert isinstance(event, pb.WatchEventsResponse)
                seen.append(event.WhichOneof("event") or "")
                if seen[-1] == until:
                    return event
                read_next()

        def read_next() -> None:
            nonlocal reading
            reading = asyncio.ensure_future(watch.read())

        watch = stub.WatchEvents(pb.WatchEventsRequest())
        reading: asyncio.Future[Any] = asyncio.ensure_future(watch.read())
        environment.layout = layouts[0]
        seen: list[str] = []
        overload = (await report(99, seen, "overload")).overload
        assert overload.required_bytes > 0
        assert overload.horizon_s == RULES.horizon_s
        assert [(g.leader_id, g.used_bytes, g.capacity_bytes) for g in overload.groups] == [
            ("w1", 99 * 16 * 1024, 100 * 16 * 1024)
        ]
        status = await stub.GetClusterStatus(pb.GetClusterStatusRequest())
        assert [g.leader_id for g in status.groups] == ["w1"]
        assert (status.demand_bytes, status.capacity_bytes) == (99 * 16 * 1024, 100 * 16 * 1024)

        read_next()
        environment.layout = layouts[1]
        relief = (await report(10, seen, "relief")).relief
        assert (relief.used_bytes, relief.undropped_capacity_bytes) == (10 * 16 * 1024, 200 * 16 * 1024)
        watch.cancel()

    async with monitor(active=True, environment=environment) as (shell, stub):
        await story(shell, stub)


async def test_entries_of_dead_dispatchers_are_deleted() -> None:
    environment = MemorySurroundings()
    environment.backlogs = (BacklogWord(DispatcherId("d"), "1", Traffic(queued_count=1, queued_tokens=1)),)

    async with monitor(active=True, environment=environment):
        await soon(lambda: environment.forgotten == {"d"})


def test_the_number_of_watchers_is_limited() -> None:
    async def story(shell: MonitorShell, stub: Stub) -> None:
        watches = [stub.WatchEvents(pb.WatchEventsRequest()) for _ in range(2)]
        for watch in watches:
            await watch.initial_metadata()
        third = stub.WatchEvents(pb.WatchEventsRequest())
        with pytest.raises(grpc.RpcError) as caught:
            await third.read()
        assert isinstance(from_rpc_error(caught.value, "monitor"), Overloaded)
        watches[0].cancel()
        await soon(lambda: len(shell._watchers) == 1)
        await stub.WatchEvents(pb.WatchEventsRequest()).initial_metadata()

    tell(story)


async def test_a_slow_watcher_is_disconnected_and_its_memory_freed() -> None:
    up = InstanceUp(Instance(WorkerId("w1"), Incarnation(1), "host:1", model_info()), draining=False)
    watcher = Watcher([], limit=3)
    assert [watcher.push(up, "c") for _ in range(4)] == [True, True, True, False]
    with pytest.raises(Overloaded):
        await watcher.next()


async def test_a_jump_of_the_demand_is_reported_at_once() -> None:
    """Regular reports are four seconds apart here, the longest interval that a lease of five seconds allows."""

    loads = [load_report(10)]
    async with served(active=True) as (shell, address):
        state = StateServer("redis://127.0.0.1:1")  # never contacted, since the address is known
        reporter = MonitorReporter(
            instance=Instance(WorkerId("w0"), Incarnation(1), "127.0.0.1:1", model_info()),
            load=lambda: loads[-1],
            monitor_address=address,
            state=state,
            interval_s=4.0,
        )
        running = asyncio.create_task(reporter.run())
        entries, w0 = shell.core.entries, WorkerId("w0")
        await soon(lambda: w0 in entries and entries[w0].load is not None)
        before = loads[-1]
        slightly_more = dataclasses.replace(before, used_block_count=before.used_block_count + 1)
        much_more = dataclasses.replace(before, waiting_block_count=before.block_count)
        assert not slightly_more.has_jumped(before)
        nothing = dataclasses.replace(before, block_count=0)
        assert not nothing.has_jumped(nothing)
        clock = asyncio.get_running_loop().time
        asked_at_s = clock()
        for load in (slightly_more, much_more):
            loads.append(load)
            reporter.on_requests_arrived(load)
        await soon(lambda: entries[w0].load == much_more)
        assert clock() - asked_at_s < 3.0
        reporter.leave()
        await running
        await state.close()


async def test_a_worker_finds_the_leading_monitor_without_the_state_server() -> None:
    """The worker knows only the first monitor, which then loses leadership; the state server is unreachable."""
    addresses = MemorySurroundings()
    async with (
        served(active=True, environment=addresses) as (first, first_address),
        served(active=False, environment=addresses) as (second, second_address),
    ):
        addresses.monitor_addresses = (first_address, second_address)
        state = StateServer("redis://127.0.0.1:1")
        instance = Instance(WorkerId("w1"), Incarnation(3), "host:1", model_info())
        reporter = MonitorReporter(
            instance=instance, load=load_report, monitor_address=first_address, state=state, interval_s=0.02
        )
        reporting = asyncio.create_task(reporter.run())
        await soon(lambda: reporter.connected)
        first.change_leadership(None)
        second.change_leadership(8)
        await soon(lambda: "w1" in second.core.entries)
        second.change_leadership(None)
        first.change_leadership(9)
        await soon(lambda: "w1" in first.core.entries)
        reporting.cancel()
        await state.close()

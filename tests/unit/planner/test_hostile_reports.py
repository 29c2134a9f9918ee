"""The planner ignores reports of instances that cannot be true, and continues."""

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from ballast.common.errors import InvalidRequest
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member, Place
from ballast.common.load import MemoryReport
from ballast.common.transition import Phase, Status
from ballast.rpc import border, codec
from ballast.rpc.server import RpcServer
from ballast.service.leadership import LeaderAddress
from ballast.service.state import StateServer
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.monitor.v1 import monitor_pb2 as pb
from ballastpb.monitor.v1 import monitor_pb2_grpc
from services.planner.core import messages as p
from services.planner.peers import MonitorEvents, _bound_figures
from services.planner.store import META_KEY, RedisLayoutStore
from tests.support.planner_core import LOAD, MODEL, Planner
from tests.support.reporting_worker import load_report, model_info
from tools.local.state_server import PrivateStateServer


def member(worker_id: str, first_layer: int = 0, last_layer: int = 4) -> Member:
    return Member(WorkerId(worker_id), Incarnation(1), "", first_layer, last_layer)


def up(planner: Planner, worker_id: str, place: Place) -> None:
    planner.lives[worker_id] = 1
    planner.tell(
        p.InstanceUp(planner.now_s, "c", WorkerId(worker_id), Incarnation(1), f"{worker_id}:1", MODEL, False, "", place)
    )


def test_a_group_that_names_a_worker_twice_is_ignored() -> None:
    planner = Planner()
    planner.start("w0")
    twice = (member("w9", 0, 2), member("w9", 2, 4))
    up(planner, "w9", Place(Epoch(10), Group(GroupId("g"), twice)))
    planner.wait(1)
    assert "w0" in " ".join(planner.shape)


def test_a_group_with_the_name_of_another_does_not_replace_it() -> None:
    planner = Planner()
    planner.start("w0")
    [group] = planner.core.layout.groups
    up(planner, "w9", Place(Epoch(10), Group(group.group_id, (member("w9"),))))
    planner.wait(1)
    assert "w0" in " ".join(planner.shape)
    planner.core.layout.check()
    assert len({g.group_id for g in planner.core.layout.groups}) == len(planner.core.layout.groups)


@pytest.mark.parametrize(
    "load",
    [
        replace(LOAD, memory=replace(LOAD.memory, budget_bytes=0)),
        replace(LOAD, memory=MemoryReport(budget_bytes=0, parameter_bytes=0, kv_bytes=0, free_bytes=0)),
        replace(LOAD, block_tokens=0),
        replace(LOAD, used_block_count=-1),
    ],
    ids=["no budget", "nothing at all", "blocks without tokens", "counts below zero"],
)
def test_an_impossible_report_influences_no_plan(load: Any) -> None:
    planner = Planner()
    planner.start("w0", "w1")
    planner.load = load
    planner.tell(p.OverloadRaised(planner.now_s, "c", 1000))
    assert planner.told(p.NothingDone)
    assert not planner.core.conductor.busy


def test_epochs_in_messages_are_bounded() -> None:
    message = codec.place_to_proto(Place(Epoch(1), Group(GroupId("w9"), (member("w9"),))))
    assert message is not None
    message.epoch = 2**63 - 1
    with pytest.raises(InvalidRequest, match=r"place\.epoch"):
        codec.place_from_proto(message)
    report = codec.LOAD.message(load_report(5))
    report.newest_epoch = 2**63 - 1
    with pytest.raises(InvalidRequest, match="newest_epoch"):
        codec.LOAD.record(report)


def test_epochs_can_grow_beyond_the_highest_claim() -> None:
    """An instance may claim a false epoch. The cluster then continues above that epoch, and the instance's later claims
    are still accepted.
    """
    planner = Planner()
    planner.start("w0")
    highest = border.MAX_CLAIMED_EPOCH
    up(planner, "w9", Place(Epoch(highest), Group(GroupId("w9"), (member("w9"),))))
    planner.wait(1)
    epoch = planner.core.layout.epoch
    assert highest < epoch
    border.claimed_epoch("place.epoch", epoch + 1000, epoch)
    codec.LAYOUT.record(codec.LAYOUT.message(planner.core.layout))


class Monitor(monitor_pb2_grpc.MonitorServiceServicer):
    """A monitor of another version, which passes on reports that it should have refused."""

    async def WatchEvents(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.WatchEventsRequest, context: Any
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        await context.send_initial_metadata(())
        model = codec.MODEL.message(model_info(4))
        for worker_id, incarnation in (("w1", 1), ("", 1), ("w2", -5), ("w" * 200, 1), ("w3", 1)):
            instance = pb.Announce(worker_id=worker_id, incarnation=incarnation, address="h:1", model=model)
            yield pb.WatchEventsResponse(instance_up=pb.InstanceUp(instance=instance))
        yield pb.WatchEventsResponse(snapshot_end=pb.SnapshotEnd())
        await asyncio.sleep(60)

    async def GetClusterStatus(self, request: pb.GetClusterStatusRequest, context: Any) -> pb.GetClusterStatusResponse:
        good = codec.LOAD.message(load_report(5))
        bad = cluster_pb2.LoadReport(block_count=-1)
        rows = [("w1", good), ("w2", bad), ("", good)]
        return pb.GetClusterStatusResponse(
            instances=[pb.InstanceStatus(instance=pb.Announce(worker_id=w), load=load) for w, load in rows]
        )


async def test_other_reports_of_the_monitor_still_count() -> None:
    def register(server: grpc.aio.Server) -> None:
        monitor_pb2_grpc.add_MonitorServiceServicer_to_server(
            Monitor(),  # pyright: ignore[reportAbstractUsage]
            server,
        )

    descriptor = pb.DESCRIPTOR.services_by_name["MonitorService"]
    server = RpcServer(host="127.0.0.1", port=0, services=[(descriptor, register)], on_bug=lambda bug: None)
    port = await server.start()
    state = StateServer("redis://127.0.0.1:1")
    events = MonitorEvents(LeaderAddress(state, "monitor", f"127.0.0.1:{port}"))
    heard: list[p.MonitorEvent] = []
    try:
        async with asyncio.timeout(30):
            assert list((await events.load(10)).workers) == ["w1"]
            async for event in events.events():
                heard.append(event)
                if isinstance(event, p.SnapshotEnded):
                    break
    finally:
        await server.stop(0)
        await state.close()
    assert [event.worker_id for event in heard if isinstance(event, p.InstanceUp)] == ["w1", "w3"]


async def test_only_changed_reports_are_converted_and_lost_instances_forgotten() -> None:
    state = StateServer("redis://127.0.0.1:1")
    events = MonitorEvents(LeaderAddress(state, "monitor", None))

    def answer(**used: int) -> pb.GetClusterStatusResponse:
        return pb.GetClusterStatusResponse(
            instances=[
                pb.InstanceStatus(instance=pb.Announce(worker_id=w), load=codec.LOAD.message(load_report(count)))
                for w, count in used.items()
            ]
        )

    first = events.loads_of(answer(w1=5, w2=6)).workers
    second = events.loads_of(answer(w1=5, w2=7)).workers
    assert second == {"w1": load_report(5), "w2": load_report(7)}
    assert second[WorkerId("w1")] is first[WorkerId("w1")]
    assert list(events.loads_of(answer(w2=7)).workers) == ["w2"]
    await state.close()


def test_figures_of_a_member_are_clamped_and_its_phase_counts() -> None:
    """Clock rounding once made a wait negative, and the planner waited forever for a restore that had ended."""
    status = Status(epoch=Epoch(5), phase=Phase.DONE, boundary_wait_s=-0.007, remap_s=math.nan, kv_bytes_sent=2**62)
    _bound_figures(status)
    assert status == Status(epoch=Epoch(5), phase=Phase.DONE, kv_bytes_sent=border.MAX_EPOCH)


async def test_garbage_in_the_state_server_is_overwritten() -> None:
    async with PrivateStateServer() as server, asyncio.timeout(60):
        state = StateServer(server.url)
        store = RedisLayoutStore(state)
        try:
            for epoch in ("abc", str(2**63), "-1", "²"):
                await state.run(state.redis.hset(META_KEY, mapping={"epoch": epoch}))
                assert await store.load() is None
            await state.run(state.redis.hset(META_KEY, mapping={"epoch": "7"}))
            assert await store.load() == p.StoredLayout(Layout(Epoch(7), 0, (), "unreadable"), None)
        finally:
            await state.close()

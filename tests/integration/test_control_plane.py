"""Monitor and planner as processes with a real state server: membership, leadership and the layout."""

import asyncio
import signal
import urllib.request
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ballast.common.errors import StaleEpoch
from ballast.rpc import codec
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballastpb.monitor.v1 import monitor_pb2, monitor_pb2_grpc
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from tests.support.control_plane import ControlPlane, address, control_plane, names
from tests.support.reporting_worker import model_info
from tools.local.ports import free_port
from tools.local.process import ChildProcess
from tools.local.proxy import Proxy

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def plane() -> AbstractAsyncContextManager[ControlPlane]:
    return control_plane()


async def test_workers_join_and_leave_the_layout(plane: ControlPlane) -> None:
    await plane.monitor("m1")
    planner = await plane.planner("p1")
    w1, w2, w3 = [await plane.worker(name) for name in ("w1", "w2", "w3")]
    layout = await plane.layout_until(planner, lambda now: names(now) == {"w1", "w2", "w3"}, "three workers")
    assert [len(group.members) for group in layout.groups] == [1, 1, 1]
    assert {(m.first_layer, m.last_layer) for g in layout.groups for m in g.members} == {(0, 4)}

    w1.send_signal(signal.SIGKILL)
    layout = await plane.layout_until(planner, lambda now: names(now) == {"w2", "w3"}, "w1 is dead")
    assert "connection refused" in layout.reason, "the refused connection should be noticed before the lease expires"

    w3.send_signal(signal.SIGSTOP)
    layout = await plane.layout_until(planner, lambda now: names(now) == {"w2"}, "w3 is silent")
    assert "does not answer the planner" in layout.reason
    w3.send_signal(signal.SIGCONT)
    await plane.layout_until(planner, lambda now: names(now) == {"w2", "w3"}, "w3 speaks again")

    w2.send_signal(signal.SIGTERM)
    layout = await plane.layout_until(planner, lambda now: names(now) == {"w3"}, "w2 said goodbye")
    assert "it left" in layout.reason


async def test_a_new_monitor_without_reports_removes_no_worker_from_the_layout(plane: ControlPlane) -> None:
    """The workers know only the first monitor's address; the second monitor has another one."""
    m1 = await plane.monitor("m1")
    planner = await plane.planner("p1")
    for name in ("w1", "w2", "w3"):
        await plane.worker(name, "--monitor-address", address(m1), "--heeds-no-other")
    before = await plane.layout_until(planner, lambda now: names(now) == {"w1", "w2", "w3"}, "three workers")
    m2 = await plane.monitor("m2")
    m1.send_signal(signal.SIGKILL)
    await plane.until(lambda: "warmed up" in m2.log_tail(30), "the second monitor leads")
    await plane.until(lambda: planner.log_tail(30).count("planner_finds_it=alive") == 3, "the planner has asked them")
    await asyncio.sleep(3.0)
    after = await plane.layout_until(planner, lambda _: True, "any")
    assert after == before
    assert not (await plane.status(m2)).instances


async def test_workers_find_the_next_monitor_without_the_state_server(plane: ControlPlane) -> None:
    m1 = await plane.monitor("m1")
    planner = await plane.planner("p1")
    async with Proxy(f"127.0.0.1:{plane.state.port}") as proxy:
        for name in ("w1", "w2"):
            await plane.ready(
                plane.start(
                    "tests.support.reporting_worker", "--worker-id", name, redis_url=f"redis://{proxy.address}/0"
                )
            )
        before = await plane.layout_until(planner, lambda now: names(now) == {"w1", "w2"}, "two workers")
        m2 = await plane.monitor("m2")
        await asyncio.sleep(1.5)  # the first one discovers the second one and notifies the workers
        proxy.to_server.swallows = proxy.to_client.swallows = True
        m1.send_signal(signal.SIGKILL)
        await plane.until(lambda: "warmed up" in m2.log_tail(30), "the second monitor leads")
        await plane.until(lambda: m2.log_tail(30).count("instance up") == 2, "it hears both")
    assert await plane.layout_until(planner, lambda _: True, "any") == before


async def test_a_standby_monitor_takes_over_without_losing_a_worker(plane: ControlPlane) -> None:
    m1 = await plane.monitor("m1")
    m2 = await plane.monitor("m2")
    planner = await plane.planner("p1")
    await plane.worker("w1")
    await plane.worker("w2")
    before = await plane.layout_until(planner, lambda now: names(now) == {"w1", "w2"}, "two workers")
    await plane.until(lambda: "registry" in m1.log(), "registry")
    assert not (await plane.status(m2)).active

    m1.send_signal(signal.SIGKILL)
    await plane.until(lambda: "leading=True" in m2.log(), "m2 leads")
    await plane.until(lambda: "warmed up" in m2.log(), "m2 is warm")
    status = await plane.status(m2)
    assert status.active
    assert {i.instance.worker_id for i in status.instances} == {"w1", "w2"}
    after = await plane.layout_until(planner, lambda now: True, "any")
    assert after == before, "a new leading monitor changes nothing in the layout"

    w3 = await plane.worker("w3")
    await plane.layout_until(planner, lambda now: names(now) == {"w1", "w2", "w3"}, "the planner follows m2")
    w3.send_signal(signal.SIGKILL)
    await plane.layout_until(planner, lambda now: names(now) == {"w1", "w2"}, "m2 sees losses")


async def test_a_standby_planner_continues_where_the_other_one_stopped(plane: ControlPlane) -> None:
    await plane.monitor("m1")
    p1 = await plane.planner("p1")
    p2 = await plane.planner("p2")
    await plane.worker("w1")
    w2 = await plane.worker("w2")
    before = await plane.layout_until(p1, lambda now: names(now) == {"w1", "w2"}, "two workers")
    followed = await plane.layout_until(p2, lambda now: names(now) == {"w1", "w2"}, "the standby follows")
    assert followed == before

    p1.send_signal(signal.SIGKILL)
    w2.send_signal(signal.SIGKILL)
    after = await plane.layout_until(p2, lambda now: names(now) == {"w1"}, "p2 plans")
    assert after.epoch == before.epoch + 1
    await plane.worker("w3")
    await plane.layout_until(p2, lambda now: names(now) == {"w1", "w3"} and now.epoch > after.epoch, "p2 goes on")


async def test_a_released_lease_is_taken_at_once(plane: ControlPlane) -> None:
    p1 = await plane.planner("p1", "--dev", "leadership_ttl_s=90")  # the default lease would expire during the test
    await plane.until(lambda: "leading=True" in p1.log(), "p1 leads")
    p2 = await plane.planner("p2")
    p1.send_signal(signal.SIGTERM)
    await plane.until(lambda: p1.returncode is not None, "p1 stops")
    assert p1.returncode == 0
    await plane.until(lambda: "leading=True" in p2.log(), "p2 leads")


async def test_the_state_server_restarts_empty(plane: ControlPlane) -> None:
    monitor = await plane.monitor("m1")
    planner = await plane.planner("p1")
    await plane.worker("w1")
    before = await plane.layout_until(planner, lambda now: names(now) == {"w1"}, "one worker")

    plane.state.restart()
    after = await plane.layout_until(planner, lambda now: now.epoch > before.epoch, "written again")
    assert after.groups == before.groups
    unknown = planner.log_path.read_text().count("layout not written")
    assert after.epoch <= before.epoch + 1 + unknown, "only writes of unknown outcome use up an epoch"
    await plane.worker("w2")
    await plane.layout_until(planner, lambda now: names(now) == {"w1", "w2"}, "life goes on")
    assert "instance lost" not in monitor.log()


async def test_an_unreachable_state_server_delays_plans_and_loses_none(plane: ControlPlane) -> None:
    await plane.monitor("m1")
    planner = await plane.planner("p1")
    w1 = await plane.worker("w1")
    before = await plane.layout_until(planner, lambda now: names(now) == {"w1"}, "one worker")

    plane.state.stop()
    w1.send_signal(signal.SIGKILL)
    await plane.until(lambda: "layout not written" in planner.log() or "cannot be renewed" in planner.log(), "away")
    assert await plane.layout_until(planner, lambda now: True, "any") == before
    plane.state.restart()
    after = await plane.layout_until(planner, lambda now: not names(now), "the pending plan is written")
    unknown = planner.log_path.read_text().count("layout not written")
    assert before.epoch < after.epoch <= before.epoch + 1 + unknown, "only writes of unknown outcome use up an epoch"


async def test_an_earlier_incarnation_of_a_worker_is_refused(plane: ControlPlane) -> None:
    monitor = await plane.monitor("m1")
    planner = await plane.planner("p1")
    await plane.worker("w1", "--incarnation", "7")
    await plane.layout_until(planner, lambda now: names(now) == {"w1"}, "w1 in life 7")

    async with open_channel(address(monitor)) as channel:
        call = monitor_pb2_grpc.MonitorServiceStub(channel).Report()
        announce = monitor_pb2.Announce(
            worker_id="w1", incarnation=6, address="127.0.0.1:1", model=codec.MODEL.message(model_info())
        )
        await call.write(monitor_pb2.ReportRequest(announce=announce))
        error = None
        try:
            await call.read()
        except grpc.RpcError as failure:
            error = from_rpc_error(failure, "m1")
    assert isinstance(error, StaleEpoch)
    assert (error.have, error.want) == (6, 7)

    await plane.worker("w1", "--incarnation", "8")
    layout = await plane.layout_until(
        planner, lambda now: [m.incarnation for g in now.groups for m in g.members] == [8], "life 8 replaces 7"
    )
    assert names(layout) == {"w1"}


async def test_an_instance_with_another_model_is_kept_out(plane: ControlPlane) -> None:
    await plane.monitor("m1")
    planner = await plane.planner("p1")
    w1 = await plane.worker("w1")
    await plane.layout_until(planner, lambda now: names(now) == {"w1"}, "one worker")
    await plane.worker("w2", "--layers", "6")
    await plane.until(lambda: "layer_count is 6, the cluster has 4" in planner.log(), "rejected by name")
    assert names(await plane.layout_until(planner, lambda now: True, "any")) == {"w1"}
    w1.send_signal(signal.SIGKILL)
    layout = await plane.layout_until(planner, lambda now: names(now) == {"w2"}, "the other model may take its place")
    assert layout.layer_count == 6


async def test_draining_a_worker(plane: ControlPlane) -> None:
    await plane.monitor("m1")
    planner = await plane.planner("p1")
    w1 = await plane.worker("w1")
    await plane.worker("w2")
    before = await plane.layout_until(planner, lambda now: names(now) == {"w1", "w2"}, "two workers")
    async with open_channel(address(planner)) as channel:
        stub = planner_pb2_grpc.PlannerServiceStub(channel)
        request = planner_pb2.DrainWorkerRequest(worker_id="w1", request_id="d1")
        answers = [(await stub.DrainWorker(request, timeout=60)).epoch for _ in range(2)]
    assert answers == [before.epoch + 1] * 2, "a repeated request gets the same answer"
    layout = await plane.layout_until(planner, lambda now: now.epoch >= answers[0], "drained")
    assert {m.worker_id: m.draining for g in layout.groups for m in g.members} == {"w1": True, "w2": False}
    await plane.until(lambda: "worker drains" in planner.log(), "the worker was told")
    assert w1.returncode is None


async def test_a_service_whose_port_is_in_use_names_it_and_ends_with_status_2(plane: ControlPlane) -> None:
    m1 = await plane.monitor("m1")
    port = address(m1).rsplit(":", 1)[1]
    for module in ("services.monitor", "services.planner"):
        process = plane.start(module, "--port", port)
        await plane.until(lambda process=process: process.returncode is not None, "exit")
        assert process.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}" in process.log()


async def test_a_service_waits_for_the_state_server_and_starts_once_it_is_up(plane: ControlPlane) -> None:
    url = plane.state.url
    plane.state.stop()
    processes = [plane.start(f"services.{name}", "--port", "0", redis_url=url) for name in ("monitor", "planner")]
    for process in processes:
        await plane.until(lambda process=process: "waiting for the state server" in process.log(), "says so")
        assert process.find_line("ready ") is None
    plane.state.restart()
    for process in processes:
        await plane.ready(process)
    processes[0].send_signal(signal.SIGTERM)
    await plane.until(lambda: processes[0].returncode == 0, "stops")


async def test_a_service_that_waits_for_the_state_server_can_be_stopped(plane: ControlPlane) -> None:
    process = plane.start("services.planner", "--port", "0", redis_url="redis://127.0.0.1:1")
    await plane.until(lambda: "waiting for the state server" in process.log(), "waits")
    process.send_signal(signal.SIGTERM)
    await plane.until(lambda: process.returncode == 0, "stops")


async def test_readiness_shows_the_active_process_and_metrics_the_instances(plane: ControlPlane) -> None:
    port = free_port()
    m1 = await plane.monitor("m1", "--metrics-port", str(port))
    m2 = await plane.monitor("m2")
    planner = await plane.planner("p1")
    monitor_name, planner_name = "ballastpb.monitor.v1.MonitorService", "ballastpb.planner.v1.PlannerService"
    await becomes(m1, monitor_name, SERVING)
    await becomes(planner, planner_name, SERVING)
    await becomes(m2, monitor_name, NOT_SERVING)
    await becomes(m2, "", SERVING)

    await plane.worker("w1")
    await plane.layout_until(planner, lambda now: names(now) == {"w1"}, "one worker")
    wanted = ("ballast_instances 1.0", 'ballast_instance_kv_usage_fraction{worker="w1"} 0.25')
    await plane.until(lambda: all(line in scrape(port).splitlines() for line in wanted), "metrics")
    assert "ballast_invariant_violations_total 0.0" in scrape(port)

    plane.state.stop()
    await becomes(m1, monitor_name, NOT_SERVING)
    await becomes(m1, "", SERVING)
    await becomes(planner, planner_name, NOT_SERVING)
    plane.state.restart()
    await becomes(planner, planner_name, SERVING)


async def becomes(process: ChildProcess, service: str, wanted: int, within_s: float = 60.0) -> None:
    async with open_channel(address(process)) as channel, asyncio.timeout(within_s):
        # Any: the generated health stub has no types.
        watch = cast(Any, health_pb2_grpc).HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        while (await watch.read()).status != wanted:
            pass
        watch.cancel()


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode()

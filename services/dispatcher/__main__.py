"""`python -m services.dispatcher`: constructs the parts, connects them, and runs until a stop signal."""

import asyncio
import contextlib
import gc
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio

from ballast.common.ids import DispatcherId
from ballast.common.layout import Layout
from ballast.common.reach import Reach
from ballast.common.traffic import Traffic
from ballast.rpc.bounds import CallBounds
from ballast.rpc.callers import Admit
from ballast.rpc.channel import Dial
from ballast.rpc.server import RpcServer, room_for_connections
from ballast.service import logs
from ballast.service.leadership import LeaderAddress
from ballast.service.lifecycle import Lifecycle, advertised_address, run_service, say_ready
from ballast.service.metrics import REGISTRY, MetricsServer
from ballast.service.models import find_model
from ballast.service.otlp import Exporter
from ballast.service.security import Role, Security, TokenAuthority
from ballast.service.settings import load_settings
from ballast.service.state import StateServer, state_server
from ballast.service.tasks import run_supervised
from ballast.service.tokens import TokenBook
from ballastpb.inference.v1 import inference_pb2, inference_pb2_grpc
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from services.dispatcher.config import DispatcherSettings
from services.dispatcher.core.backlog import Order
from services.dispatcher.core.dispatcher import DispatcherCore
from services.dispatcher.core.events import LayoutChanged, ReachChanged
from services.dispatcher.core.limits import Limits
from services.dispatcher.core.placement import PlacementRules
from services.dispatcher.operators import OperatorServicer
from services.dispatcher.peers import PlannerClient
from services.dispatcher.policy.freeness import RoutingRules
from services.dispatcher.servicer import DispatcherServicer, ServingBounds
from services.dispatcher.shell.chronicle import Chronicle
from services.dispatcher.shell.dispatcher import DispatcherShell
from services.dispatcher.shell.links import Identity
from services.dispatcher.shell.metrics import DispatcherMetrics
from services.dispatcher.shell.tracing import Tracer
from services.dispatcher.store import DispatcherStore
from services.dispatcher.text import PromptEncoder

T = TypeVar("T")

_NAME = "dispatcher"
_PLANNER_LOOKUP_S = 2.0
_LAYOUT_POLL_S = 1.0
_CONNECTION_AGE_S = 300.0  # maximum age of a connection; clients then re-resolve the name and find new dispatchers
_CLOSE_GRACE_S = 1.0  # maximum time for the last responses to reach their clients


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


async def main(life: Lifecycle) -> None:
    settings = load_settings(DispatcherSettings, sys.argv[1:])
    dispatcher_id = DispatcherId(settings.dispatcher_id or f"dispatcher-{uuid.uuid4().hex[:8]}")
    logs.configure(service=_NAME, instance=dispatcher_id, level=settings.log_level, form=settings.log_format)
    logs.get_logger().info("starting", settings=settings.model_dump(mode="json"))
    security = Security(Role.DISPATCHER, settings)
    tokens = security.tokens(settings.tokens_file)
    security.ensure_guarded([settings.host], tokens=tokens is not None)
    model = await asyncio.to_thread(find_model, settings.model, weights=False)
    encoder = PromptEncoder(model.folder, settings.chat_template, settings.generation_config)
    state = state_server(settings)
    metrics = MetricsServer(settings.metrics_host, settings.metrics_port, service=_NAME, instance=dispatcher_id)
    try:
        incarnation = await _unless_stopped(life, state.take_incarnation(_NAME, dispatcher_id))
        if incarnation is not None:
            doors = Doors(security, tokens)
            await _serve(life, settings, Identity(dispatcher_id, incarnation), encoder, state, doors, metrics)
    finally:
        await state.close()
        metrics.close()


async def _unless_stopped(life: Lifecycle, waiting: Coroutine[Any, Any, T]) -> T | None:
    """Await a coroutine and return its result; cancel it and return None if the stop signal comes first."""
    work, stop = asyncio.ensure_future(waiting), asyncio.ensure_future(life.stopping.wait())
    try:
        await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        stop.cancel()


@dataclass(frozen=True, slots=True)
class Doors:
    """Authenticates callers, and holds the credentials for outgoing calls."""

    security: Security
    tokens: TokenBook | None

    @property
    def admit(self) -> Admit | None:
        return None if self.tokens is None else TokenAuthority(self.tokens)

    async def follow_tokens(self) -> None:
        if self.tokens is not None:
            await self.tokens.follow()


async def _serve(
    life: Lifecycle,
    settings: DispatcherSettings,
    identity: Identity,
    encoder: PromptEncoder,
    state: StateServer,
    doors: Doors,
    metrics: MetricsServer,
) -> None:
    clock = MonotonicClock()
    store = DispatcherStore(state, identity)
    shell = build_shell(settings, identity, clock, life, doors.security.dial(Role.WORKER, watchful=True))
    metrics.shown.model_name = lambda: shell.model.name if shell.model is not None else ""
    planner = LeaderAddress(state, "planner", None, interval_s=_PLANNER_LOOKUP_S)
    operators = PlannerClient(planner, doors.security.dial(Role.PLANNER))
    servicer = DispatcherServicer(
        shell=shell,
        claims=store,
        encoder=encoder,
        identity=identity,
        bounds=ServingBounds(
            max_deadline_s=settings.max_deadline_s,
            max_queued_request_count=settings.max_num_queued_reqs,
            max_queued_token_count=settings.max_num_queued_tokens,
            resume=settings.resume,
        ),
        clock=clock,
        planner=operators,
        traces=settings.otlp_traces_endpoint is not None,
    )

    def register(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)

    def register_operators(server: grpc.aio.Server) -> None:
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(OperatorServicer(operators), server)

    server = RpcServer(
        host=settings.host,
        port=settings.port,
        services=[
            (inference_pb2.DESCRIPTOR.services_by_name["InferenceService"], register),
            (planner_pb2.DESCRIPTOR.services_by_name["PlannerService"], register_operators),
        ],
        on_bug=life.report_bug,
        on_failure=life.report_failure,
        credentials=doors.security.credentials(),
        admit=doors.admit,
        bounds=CallBounds(
            per_connection=settings.max_calls_per_connection,
            per_caller=settings.max_calls_per_token,
            connections=settings.max_connections or room_for_connections(),
            large_bytes=settings.max_request_bytes,
            message_bytes=settings.max_message_bytes,
        ),
        connection_age_s=_CONNECTION_AGE_S,
    )
    port = await server.start()
    address = advertised_address(settings.host, settings.advertise_host, port)

    watching: list[Callable[[Layout], None]] = []

    def on_layout(layout: Layout) -> None:
        for tell in watching:
            tell(layout)
        shell.feed(LayoutChanged(clock.now_s(), layout))
        shell.ready_changed.set()

    def on_reach(reach: Reach) -> None:
        shell.feed(ReachChanged(clock.now_s(), reach))

    def traffic() -> Traffic | None:
        now_s = clock.now_s()
        return shell.core.traffic(now_s) if shell.core.carries_changes(now_s) else None

    exporter = None
    if settings.otlp_traces_endpoint is not None:
        exporter = Exporter(settings.otlp_traces_endpoint, _NAME, identity.dispatcher_id)
        tracer = Tracer(exporter, clock, time.time)
        shell.chronicle.tell = tracer.ended
        watching.append(tracer.layout)
    try:
        async with _running(
            shell.run(),
            run_supervised(lambda: store.watch_layout(_LAYOUT_POLL_S, on_layout, on_reach), "layout"),
            run_supervised(lambda: store.listen(servicer.taken), "announcements"),
            run_supervised(lambda: store.register(address), "registration"),
            run_supervised(lambda: store.share_traffic(traffic), "traffic"),
            run_supervised(store.run_claims, "claims"),
            run_supervised(store.run_releases, "releases"),
            run_supervised(planner.follow, "find planner"),
            run_supervised(doors.follow_tokens, "tokens"),
            run_supervised(lambda: _keep_health(shell, server), "health"),
        ):
            gc.freeze()  # exclude loaded objects from garbage collection
            say_ready(_NAME, identity.dispatcher_id, address)
            await life.stopping.wait()
            shell.drain(for_good=True)
            await server.set_ready(False)
            await shell.drained(settings.shutdown_timeout_s)
            await server.stop(_CLOSE_GRACE_S)
            await store.unregister()
    finally:
        await server.stop(0.0)
        await encoder.close()
        shell.chronicle.write_the_rest()
        if exporter is not None:
            await exporter.close()


def build_shell(
    settings: DispatcherSettings, identity: Identity, clock: MonotonicClock, life: Lifecycle, dial: Dial
) -> DispatcherShell:
    core = DispatcherCore(
        identity.dispatcher_id,
        Limits(
            max_queued_request_count=settings.max_num_queued_reqs,
            max_queued_token_count=settings.max_num_queued_tokens,
            max_offline_queued_count=settings.max_offline_queued,
            replay_limit=settings.replay_limit,
            no_worker_timeout_s=settings.no_worker_timeout_s,
            long_wait_s=settings.long_wait_s,
        ),
        PlacementRules(
            order=Order(settings.queue_order),
            prefix_marks=settings.prefix_marks,
        ),
        RoutingRules(
            growth_tokens=settings.growth_tokens,
        ),
    )
    return DispatcherShell(
        core,
        identity=identity,
        clock=clock,
        metrics=DispatcherMetrics(core, REGISTRY),
        chronicle=Chronicle(core, keep_count=settings.request_history_count, log_each=settings.access_log),
        on_bug=life.report_bug,
        client_stall_timeout_s=settings.client_stall_timeout_s,
        dial=dial,
    )


@contextlib.asynccontextmanager
async def _running(*loops: Coroutine[Any, Any, None]) -> AsyncGenerator[None, None]:
    """Context manager that runs endless loops. All are cancelled when one of them raises an exception, or when the
    block is left.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop) for loop in loops]
        yield
        for task in tasks:
            task.cancel()


async def _keep_health(shell: DispatcherShell, server: RpcServer) -> None:
    """Keep the server's health status equal to `shell.ready`, which is True while the dispatcher is connected to a
    worker and not draining.
    """
    told = False
    while True:
        if shell.ready != told:
            told = shell.ready
            await server.set_ready(told)
        await shell.ready_changed.wait()
        shell.ready_changed.clear()


if __name__ == "__main__":
    run_service(main)

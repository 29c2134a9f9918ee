"""`python -m services.planner`: constructs the parts, connects them, and runs until a stop signal."""

import asyncio
import sys

import grpc.aio

from ballast.common.errors import ConfigError
from ballast.common.overload import OverloadPolicy
from ballast.rpc.server import RpcServer
from ballast.service import logs
from ballast.service.elected import ElectionCandidate, serve_elected
from ballast.service.leadership import Floor, LeaderAddress
from ballast.service.lifecycle import Lifecycle, advertised_address, run_service
from ballast.service.metrics import MetricsServer
from ballast.service.otlp import Exporter
from ballast.service.security import Role, Security, read_secret
from ballast.service.settings import load_settings
from ballast.service.state import StateServer, state_server
from ballast.service.tasks import run_supervised
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from services.planner.config import PlannerSettings
from services.planner.core.change_requests import Planning
from services.planner.core.conductor import ConductorRules
from services.planner.core.machine import PlannerCore, PlannerRules
from services.planner.core.sizing import SizingRules
from services.planner.core.stages import CoordinatorRules
from services.planner.metrics import PlannerMetrics
from services.planner.peers import Members, MonitorEvents
from services.planner.policy.compare import ComparisonTargets
from services.planner.policy.migrate import MigrationRules
from services.planner.servicer import PlannerServicer
from services.planner.shell.planner import PlannerShell
from services.planner.shell.webhook import Webhook
from services.planner.spans import tracing
from services.planner.store import RedisLayoutStore

_NAME = "planner"


async def main(life: Lifecycle) -> None:
    settings = load_settings(PlannerSettings, sys.argv[1:])
    logs.configure(service=_NAME, instance=settings.planner_id, level=settings.log_level, form=settings.log_format)
    security = Security(Role.PLANNER, settings)
    security.ensure_guarded([settings.host])
    state = state_server(settings)
    monitor = LeaderAddress(state, "monitor", settings.monitor_address)
    lease = Floor()
    members = Members(lease.fenced, security.dial(Role.WORKER))
    collector = settings.otlp_traces_endpoint
    exporter = None if collector is None else Exporter(collector, _NAME, settings.planner_id)
    metered = PlannerMetrics(None if exporter is None else tracing(exporter))
    shell = build_shell(settings, state, MonitorEvents(monitor, security.dial(Role.MONITOR)), members, metered)
    servicer = PlannerServicer(shell)

    def register(server: grpc.aio.Server) -> None:
        planner_pb2_grpc.add_PlannerServiceServicer_to_server(servicer, server)

    async def work() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(shell.run(), name="shell")
            tasks.create_task(run_supervised(monitor.follow, "find monitor"), name="find monitor")

    server = RpcServer(
        host=settings.host,
        port=settings.port,
        services=[(planner_pb2.DESCRIPTOR.services_by_name["PlannerService"], register)],
        on_bug=life.report_bug,
        on_failure=life.report_failure,
        credentials=security.credentials(),
        admit=security.admit_peers(),
    )
    metrics = MetricsServer(settings.metrics_host, settings.metrics_port, service=_NAME, instance=settings.planner_id)
    try:
        port = await server.start()
        address = advertised_address(settings.host, settings.advertise_host, port)
        logs.get_logger().info("starting", address=address, settings=settings.model_dump())
        await serve_elected(
            ElectionCandidate(_NAME, settings.planner_id, address, settings.leadership_ttl_s),
            state=state,
            server=server,
            stopping=life.stopping,
            work=work,
            on_change=shell.change_leadership,
            floor=lease,
        )
    finally:
        await server.stop(settings.shutdown_timeout_s)
        await state.close()
        metrics.close()
        if exporter is not None:
            await exporter.close()


def build_shell(
    settings: PlannerSettings,
    state: StateServer,
    monitor: MonitorEvents,
    members: Members,
    metered: PlannerMetrics | None = None,
) -> PlannerShell:
    rules = PlannerRules(
        transitions=ConductorRules(
            policy=settings.overload_policy,
            pipeline_degree=settings.pipeline_degree,
            restores=settings.restore,
            sizing=SizingRules(
                parks=settings.park,
                advises=True,
                least_instances=settings.least_instances,
                dwell_s=settings.park_dwell_s,
                last_name=settings.park_order == "last-name",
            ),
            planning=Planning(targets=ComparisonTargets(ttft_s=settings.ttft_target_s)),
            coordinator=CoordinatorRules(restore_prepare_timeout_s=settings.restore_timeout_s),
        ),
    )
    return PlannerShell(
        PlannerCore(rules),
        RedisLayoutStore(state),
        monitor,
        members,
        metered or PlannerMetrics(),
        planner_id=settings.planner_id,
        migrations=MigrationRules(
            balances=settings.overload_policy is OverloadPolicy.MIGRATE,
            relieves=settings.overload_policy is OverloadPolicy.DROP,
            below_tokens=settings.migrate_below_tokens,
            above_tokens=settings.migrate_above_tokens,
        ),
        webhook=webhook(settings),
    )


def webhook(settings: PlannerSettings) -> Webhook | None:
    """Create the webhook for scaling, if configured.

    Raises:
        ConfigError: a secret is missing, cannot be read or is too short.
    """
    if not settings.scale_webhook:
        return None
    if settings.scale_webhook_secret_file is None:
        raise ConfigError(
            "planner.scale_webhook", "needs --scale-webhook-secret-file: the receiver must be able to verify the sender"
        )
    return Webhook(settings.scale_webhook, read_secret(settings.scale_webhook_secret_file))


if __name__ == "__main__":
    run_service(main)

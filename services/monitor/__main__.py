"""`python -m services.monitor`: constructs the parts, connects them, and runs until a stop signal."""

import sys

import grpc.aio

from ballast.rpc.channel import is_refused
from ballast.rpc.server import RpcServer
from ballast.service import logs
from ballast.service.elected import ElectionCandidate, serve_elected
from ballast.service.lifecycle import Lifecycle, advertised_address, run_service
from ballast.service.metrics import MetricsServer
from ballast.service.security import Role, Security
from ballast.service.settings import load_settings
from ballast.service.state import StateServer, state_server
from ballastpb.monitor.v1 import monitor_pb2, monitor_pb2_grpc
from services.monitor.config import MonitorSettings
from services.monitor.core.machine import MonitorCore, MonitorRules, pressure_rules
from services.monitor.servicer import MonitorServicer
from services.monitor.shell import MonitorShell
from services.monitor.store import RedisRegistry, RedisSurroundings

_NAME = "monitor"


async def main(life: Lifecycle) -> None:
    settings = load_settings(MonitorSettings, sys.argv[1:])
    logs.configure(service=_NAME, instance=settings.monitor_id, level=settings.log_level, form=settings.log_format)
    security = Security(Role.MONITOR, settings)
    security.ensure_guarded([settings.host])
    state = state_server(settings)
    shell = build_shell(settings, state)
    servicer = MonitorServicer(shell)

    def register(server: grpc.aio.Server) -> None:
        monitor_pb2_grpc.add_MonitorServiceServicer_to_server(servicer, server)

    descriptor = monitor_pb2.DESCRIPTOR.services_by_name["MonitorService"]
    server = RpcServer(
        host=settings.host,
        port=settings.port,
        services=[(descriptor, register)],
        on_bug=life.report_bug,
        on_failure=life.report_failure,
        credentials=security.credentials(),
        admit=security.admit_peers(),
    )
    metrics = MetricsServer(settings.metrics_host, settings.metrics_port, service=_NAME, instance=settings.monitor_id)
    try:
        port = await server.start()
        address = advertised_address(settings.host, settings.advertise_host, port)
        logs.get_logger().info("starting", address=address, settings=settings.model_dump())
        await serve_elected(
            ElectionCandidate(_NAME, settings.monitor_id, address, settings.leadership_ttl_s),
            state=state,
            server=server,
            stopping=life.stopping,
            work=shell.run,
            on_change=shell.change_leadership,
        )
    finally:
        await server.stop(settings.shutdown_timeout_s)
        await state.close()
        metrics.close()


def build_shell(settings: MonitorSettings, state: StateServer) -> MonitorShell:
    rules = MonitorRules(
        lease_s=settings.lease_s,
        step_timeout_s=settings.step_timeout_s,
        pressure=pressure_rules(
            overload_threshold_fraction=settings.overload_threshold_fraction,
            relief_threshold_fraction=settings.relief_threshold_fraction,
            dwell_s=settings.dwell_s,
        ),
    )
    # Registry rows outlive one missed write.
    ttl_s = max(settings.lease_s, 3 * rules.registry_interval_s)
    return MonitorShell(
        MonitorCore(rules),
        RedisRegistry(state, ttl_s=ttl_s),
        RedisSurroundings(state),
        monitor_id=settings.monitor_id,
        is_refused=is_refused,
    )


if __name__ == "__main__":
    run_service(main)

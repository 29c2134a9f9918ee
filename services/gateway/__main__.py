"""`python -m services.gateway`: constructs the parts of a gateway and serves until a signal stops it."""

import contextlib
import sys
import uuid

from ballast.client import AsyncClient
from ballast.client.access import Access
from ballast.common.errors import ConfigError, InvalidRequest
from ballast.rpc.tls import CA
from ballast.service import logs
from ballast.service.http_client import HttpClient
from ballast.service.http_server import HttpServer
from ballast.service.lifecycle import Lifecycle, advertised_address, run_service, say_ready
from ballast.service.metrics import REGISTRY, MetricsServer
from ballast.service.otlp import Exporter
from ballast.service.security import Role, Security
from ballast.service.settings import load_settings
from ballast.service.tokens import cluster_token
from services.gateway.app import Bounds, allowing, build_app
from services.gateway.config import GatewaySettings
from services.gateway.endpoints import HttpEndpoints
from services.gateway.generation import Generator
from services.gateway.metrics import ClusterGauges, GatewayMetrics
from services.gateway.models import ServedModel
from services.gateway.openai.formats import ReasoningParser, ToolFormat
from tools.dashboard.app import Dashboard
from tools.dashboard.app import build_app as build_page
from tools.dashboard.watched import Watched

_NAME = "gateway"
_MODEL_REFRESH_S = 10.0  # time for which facts about the model are cached


async def main(life: Lifecycle) -> None:
    settings = load_settings(GatewaySettings, sys.argv[1:])
    gateway_id = settings.gateway_id or f"gateway-{uuid.uuid4().hex[:8]}"
    logs.configure(service=_NAME, instance=gateway_id, level=settings.log_level, form=settings.log_format)
    logs.get_logger().info("starting", settings=settings.model_dump(mode="json"))
    # The gateway forwards clients' tokens; dispatchers check them.
    security = Security(Role.GATEWAY, settings)
    security.ensure_guarded([settings.host])
    try:
        client = AsyncClient(
            settings.dispatchers,
            resume_s=settings.resume_s,
            token="",  # not BALLAST_TOKEN of the environment, because every client would get its rights
            ca_file=None if settings.tls_dir is None else settings.tls_dir / CA,
        )
    except InvalidRequest as error:
        raise ConfigError("gateway.dispatchers", error.why) from error
    async with contextlib.AsyncExitStack() as running:
        await running.enter_async_context(client)
        names = tuple(name.strip() for name in (settings.served_model_name or "").split(",") if name.strip())
        metrics = GatewayMetrics(REGISTRY)
        model = ServedModel(client, names, _MODEL_REFRESH_S)
        tool_format = None if settings.tool_call_parser == "auto" else ToolFormat(settings.tool_call_parser)
        reasoning = ReasoningParser(settings.reasoning_parser)
        exposition = MetricsServer("", 0, service=_NAME, instance=gateway_id).shown  # served on the gateway's own port
        exposition.model_name = lambda: model.name
        jobs = None
        if settings.jobs is not None:
            jobs = HttpClient(settings.jobs, tls_dir=settings.tls_dir, server_name=f"{Role.JOBS}.ballast")
            running.callback(jobs.close)
        exporter = None
        if settings.otlp_traces_endpoint is not None:
            exporter = Exporter(settings.otlp_traces_endpoint, _NAME, gateway_id)
            running.push_async_callback(exporter.close)
        app = build_app(
            HttpEndpoints(client, Generator(client, metrics), model, settings.max_choices, tool_format, reasoning),
            metrics,
            exposition,
            Bounds(
                max_concurrent_requests=settings.max_concurrent_requests,
                max_body_bytes=settings.max_body_bytes,
                body_timeout_s=settings.body_timeout_s,
            ),
            is_stopping=life.stopping.is_set,
            exporter=exporter,
            jobs=jobs,
            cluster=ClusterGauges(client, own_right(security)),
        )
        if settings.dashboard:
            watched = Watched(settings.dispatchers, access=page_access(security, settings))
            page = Dashboard([watched], with_load=False, by_token=True)
            await running.enter_async_context(page.running())
            app.mount("/dashboard", build_page(page, hosts=["*"]))
        server = HttpServer(
            allowing(app, settings.allowed_origins),
            host=settings.host,
            port=settings.port,
            shutdown_timeout_s=settings.shutdown_timeout_s,
            client_stall_timeout_s=settings.client_stall_timeout_s,
            tls_dir=settings.tls_dir,
        )
        await server.start()
        say_ready(_NAME, gateway_id, advertised_address(settings.host, settings.advertise_host, server.port))
        await server.serve(life.stopping)


def own_right(security: Security) -> dict[str, str]:
    """Metadata with the cluster's token, for calls that the gateway makes on its own behalf."""
    return {} if security.secret is None else {"authorization": f"Bearer {cluster_token(security.secret)}"}


def page_access(security: Security, settings: GatewaySettings) -> Access:
    """Credentials that the dashboard sends to dispatchers for every viewer."""
    return Access(
        token=None if security.secret is None else cluster_token(security.secret),
        ca_file=None if settings.tls_dir is None else settings.tls_dir / CA,
        tls_dir=settings.tls_dir,
    )


if __name__ == "__main__":
    run_service(main)

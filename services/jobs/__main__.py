"""`python -m services.jobs`: constructs the parts of the jobs service and serves until a signal stops it."""

import asyncio
import sys
from functools import partial

from ballast.common.errors import ConfigError
from ballast.service import logs
from ballast.service.elected import ElectionCandidate, serve_elected
from ballast.service.http_client import HttpClient
from ballast.service.http_server import HttpServer
from ballast.service.leadership import Floor, LeaderAddress
from ballast.service.lifecycle import Lifecycle, advertised_address, run_service
from ballast.service.metrics import MetricsServer
from ballast.service.security import Role, Security
from ballast.service.settings import load_settings
from ballast.service.state import state_server
from ballast.service.tasks import run_supervised
from ballast.service.tokens import cluster_token
from services.jobs.app import Desk, Quotas, build_app
from services.jobs.config import JobsSettings
from services.jobs.gateways import Gateways
from services.jobs.runner import Rules
from services.jobs.shell import JobsShell, Leader

_NAME = "jobs"
_STALL_S = 60.0


async def main(life: Lifecycle) -> None:
    settings = load_settings(JobsSettings, sys.argv[1:])
    logs.configure(service=_NAME, instance=settings.jobs_id, level=settings.log_level, form=settings.log_format)
    security = Security(Role.JOBS, settings)
    security.ensure_guarded([settings.host], tokens=settings.tokens_file is not None)
    book = security.tokens(settings.tokens_file)
    headers: dict[str, str] = {}
    if book is not None:
        if security.secret is None:
            why = "is needed with --tokens-file, because lines are sent with the cluster's own token"
            raise ConfigError("jobs.cluster_secret_file", why)
        headers["authorization"] = f"Bearer {cluster_token(security.secret)}"
    try:
        await asyncio.to_thread(settings.folder.mkdir, parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError("jobs.folder", f"{settings.folder} cannot be created: {error.strerror}") from error
    scheme = "http" if settings.tls_dir is None else "https"
    urls = [url.strip().rstrip("/").removesuffix("/v1") for url in settings.gateways.split(",") if url.strip()]
    urls = [url if "://" in url else f"{scheme}://{url}" for url in urls]
    if not urls:
        raise ConfigError("jobs.gateways", "must name at least one: http://HOST:PORT")
    dial = partial(HttpClient, tls_dir=settings.tls_dir)
    gateways = Gateways([dial(url, server_name=f"{Role.GATEWAY}.ballast") for url in urls], headers)

    desk = Desk(_quotas(settings), book)
    server = HttpServer(
        build_app(desk),
        host=settings.host,
        port=settings.port,
        shutdown_timeout_s=settings.shutdown_timeout_s,
        client_stall_timeout_s=_STALL_S,
        tls_dir=settings.tls_dir,
    )
    address = advertised_address(settings.host, settings.advertise_host, server.port)
    logs.get_logger().info("starting", address=address, settings=settings.model_dump(mode="json"))
    metrics = MetricsServer(settings.metrics_host, settings.metrics_port, service=_NAME, instance=settings.jobs_id)
    state = state_server(settings)
    floor = Floor()
    shell = JobsShell(desk, settings.folder, gateways, _rules(settings), floor)
    leading = LeaderAddress(state, _NAME, None)
    desk.leader = Leader(leading, address, lambda at: dial(f"{scheme}://{at}", server_name=f"{Role.JOBS}.ballast"))
    try:
        await server.start()
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(server.serve(life.stopping), name="http")]
            beside.append(tasks.create_task(run_supervised(leading.follow, "leader's address")))
            if book is not None:
                beside.append(tasks.create_task(run_supervised(book.follow, "tokens")))
            await serve_elected(
                ElectionCandidate(_NAME, settings.jobs_id, address, settings.leadership_ttl_s),
                state=state,
                server=None,
                stopping=life.stopping,
                work=shell.run,
                on_change=shell.change_leadership,
                floor=floor,
            )
            await beside[0]
            for task in beside[1:]:
                task.cancel()
    finally:
        gateways.close()
        await state.close()
        metrics.close()


def _quotas(settings: JobsSettings) -> Quotas:
    return Quotas(
        max_file_bytes=settings.max_file_bytes,
        max_bytes=settings.max_bytes,
        max_key_bytes=settings.max_key_bytes,
        max_key_batches=settings.max_key_batches,
        max_key_lines=settings.max_key_lines,
        max_window_s=settings.max_window_s,
    )


def _rules(settings: JobsSettings) -> Rules:
    return Rules(
        in_flight=settings.in_flight,
        line_timeout_s=settings.line_timeout_s,
        max_lines=settings.max_lines,
        max_line_bytes=settings.max_line_bytes,
        keep_s=settings.keep_s,
    )


if __name__ == "__main__":
    run_service(main)

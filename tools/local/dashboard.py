"""The dashboard of clusters on this machine, with buttons that kill workers."""

import contextlib
from collections.abc import Iterable, Sequence
from functools import partial

from ballast.common.errors import ConfigError
from tools.local.cluster import LocalCluster
from tools.local.keeper import Keeper

_DEFAULT_PORT = 8088


def dashboard_of(
    clusters: Sequence[LocalCluster],
    keepers: Sequence[Keeper],
    policies: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
) -> contextlib.AbstractAsyncContextManager[str]:
    """A context manager that serves the dashboard and yields its URL.

    Args:
        clusters: The running clusters. Bursts and traffic go to all of them.
        keepers: The keepers of these clusters, whose events are shown, and which restart killed workers.
        policies: The overload policies of these clusters.
        host: Host to listen on.
        port: Port to listen on; None: 8088, or the next free one.

    Raises:
        ConfigError: starlette or uvicorn is not installed, or no such port is free.
    """
    try:
        from tools.dashboard.app import Dashboard
        from tools.dashboard.serving import serving
        from tools.dashboard.watched import Line, Watched
    except ImportError as error:
        raise ConfigError("--dashboard", f"needs starlette and uvicorn, which are not installed ({error})") from error

    def lines(keeper: Keeper) -> Iterable[Line]:
        return [Line(event.at_s, "process", event.text) for event in keeper.events]

    def worker_ids(cluster: LocalCluster) -> list[str]:
        return [process.id for process in cluster.processes["worker"]]

    watched = [
        Watched(
            cluster.addresses,
            title=f"with {policy}" if len(clusters) > 1 else "",
            policy=policy,
            process_lines=partial(lines, keeper),
            worker_ids=partial(worker_ids, cluster),
            access=cluster.access,
        )
        for cluster, keeper, policy in zip(clusters, keepers, policies, strict=True)
    ]
    dashboard = Dashboard(watched, kills=[keeper.kill for keeper in keepers])
    return serving(dashboard, host, _DEFAULT_PORT if port is None else port, exact=port is not None)

"""The dashboard's page and API as a Starlette app, to be mounted or served (`serving`).

Anyone who can open the page can read it. Requests that change something (`POST`) need a header that neither a form nor
a page of another site can send. All requests need an expected `Host`. If people other than the operator can reach the
page (`by_token`), an order is forwarded only with the token of its own request, and dispatchers decide whether the
order is permitted.
"""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ballast.common.errors import BallastError, PermissionDenied, Unauthenticated
from tools.dashboard.load import DashboardLoad
from tools.dashboard.watched import Watched

_PAGE: Final = Path(__file__).parent / "page"
_HEADER: Final = "x-ballast-dashboard"
_EVERY_S: Final = 0.5
_WATCHED_S: Final = 30.0  # the cluster is polled for this long after a page's last request
_MAX_ORDERS: Final = 16  # limit on concurrent orders
_ASKED_AGAIN_S: Final = 10.0  # how long it is cached, for orders, whether dispatchers demand tokens
_BEARER: Final = re.compile(r"bearer +([\x21-\x7e]{1,512})", re.IGNORECASE)
_SAFETY: Final = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Kill = Callable[[str], bool]  # kills the process of a worker by its id; returns whether there was one


class Dashboard:
    """The handlers of the page's API, for one or more clusters side by side.

    Args:
        clusters: The clusters. Drops and restores go to the one that a request names, bursts and traffic to all.
        kills: For each cluster the function that kills a worker; None if its processes are not on this machine.
        with_load: Whether bursts and traffic may be sent.
        by_token: An order for a drop or a restore needs a token (`Authorization: Bearer`), which is forwarded to
            dispatchers; orders are refused if dispatchers demand no tokens. False: orders need no token, and use this
            process's credentials.
    """

    def __init__(
        self,
        clusters: Sequence[Watched],
        *,
        kills: Sequence[Kill | None] = (),
        with_load: bool = True,
        by_token: bool = False,
    ) -> None:
        self.clusters = clusters
        self.load = DashboardLoad(clusters) if with_load else None
        self._kills = [*kills, *[None] * (len(clusters) - len(kills))]
        self._by_token = by_token
        self._order_count = 0
        self._asked_at_s = -_WATCHED_S

    async def follow(self) -> None:
        """Poll the clusters while a page is open or a burst runs, so that charts have no gaps. Runs until cancelled."""
        while True:
            is_watched = time.monotonic() - self._asked_at_s < _WATCHED_S
            if is_watched or (self.load is not None and self.load.is_bursting):
                await asyncio.gather(*(cluster.snapshot() for cluster in self.clusters))
            await asyncio.sleep(_EVERY_S)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Context manager that polls the clusters. If the app is mounted, the surrounding app must enter it, because
        Starlette runs no lifespan of mounted apps.
        """
        following = asyncio.create_task(self.follow(), name="follow clusters")
        try:
            yield
        finally:
            following.cancel()
            await asyncio.wait([following])
            if self.load is not None:
                await self.load.close()
            for cluster in self.clusters:
                await cluster.close()

    async def state(self, request: Request) -> Response:
        self._asked_at_s = time.monotonic()
        clusters: list[dict[str, Any]] = []
        for index, cluster in enumerate(self.clusters):
            shown = dict(await cluster.snapshot())
            shown["can_kill"] = self._kills[index] is not None
            shown["can_operate"] = cluster.policy in ("", "drop") and await self._takes_orders(cluster)
            shown["by_token"] = self._by_token
            if self.load is not None and index < len(self.load.results):
                shown["burst"] = self.load.results[index].as_json()
            clusters.append(shown)
        load = {"steady": self.load.is_steady, "bursting": self.load.is_bursting} if self.load else None
        return JSONResponse({"clusters": clusters, "load": load}, headers=_SAFETY)

    async def _takes_orders(self, cluster: Watched, asked_within_s: float = math.inf) -> bool:
        return not self._by_token or await cluster.demands_tokens(asked_within_s)

    async def act(self, request: Request) -> Response:
        if request.headers.get(_HEADER) is None:
            return _answer(403, f"the header {_HEADER} is missing")
        if self._order_count >= _MAX_ORDERS:
            return _answer(503, f"{_MAX_ORDERS} orders are under way, which is the limit")
        self._order_count += 1
        try:
            return _answer(200, await self._do(request))
        except LookupError as error:
            return _answer(404, str(error.args[0]))
        except Unauthenticated as error:
            return _answer(401, str(error), {"WWW-Authenticate": "Bearer"})
        except PermissionDenied as error:
            return _answer(403, str(error))
        except BallastError as error:
            return _answer(409, str(error))
        finally:
            self._order_count -= 1

    async def _do(self, request: Request) -> str:
        action, query = request.path_params["action"], request.query_params
        number = query.get("cluster", "0")
        known = {str(index): found for index, found in enumerate(zip(self.clusters, self._kills, strict=True))}
        if number not in known:
            raise LookupError(f"no cluster {number[:32]}")
        cluster, kill = known[number]
        match action:
            case "burst" if self.load is not None:
                return await self.load.burst()
            case "steady" if self.load is not None:
                return await self.load.steady()
            case "drop":
                return await cluster.drop(await self._right(request, cluster))
            case "restore":
                return await cluster.restore(await self._right(request, cluster))
            case "kill" if kill is not None:
                worker_id = query.get("worker", "")
                if not kill(worker_id):
                    raise LookupError(f"no worker {worker_id!r} runs on this machine")
                return f"{worker_id} is killed"
            case _:
                raise LookupError(f"{action!r} cannot be done here")

    async def _right(self, request: Request, cluster: Watched) -> str | None:
        """The token to send with an order; None: the order uses this process's credentials.

        Raises:
            LookupError: dispatchers demand no tokens.
            Unauthenticated: the request has no token.
        """
        if not self._by_token:
            return None
        if not await self._takes_orders(cluster, _ASKED_AGAIN_S):
            why = "dispatchers do not demand tokens (docs/security.md)"
            raise LookupError(f"{request.path_params['action']!r} cannot be done here: {why}; `ballast` can")
        found = _BEARER.fullmatch(request.headers.get("authorization", ""))
        if found is None:
            raise Unauthenticated("this needs a token with the role operate: enter one above")
        return found[1]


def build_app(dashboard: Dashboard, *, hosts: Sequence[str] = ("localhost", "127.0.0.1", "[::1]")) -> Starlette:
    """Build the app. `hosts`: accepted names in the `Host` header; "*": all, for use behind a server that checks it."""

    async def page(request: Request) -> Response:
        return FileResponse(_PAGE / "index.html", headers=_SAFETY)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        async with dashboard.running():
            yield

    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/state", dashboard.state),
            Route("/api/{action}", dashboard.act, methods=["POST"]),
            Mount("/static", StaticFiles(directory=_PAGE)),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        lifespan=lifespan,
    )


def _answer(status: int, message: str, headers: Mapping[str, str] = _SAFETY) -> Response:
    return JSONResponse({"message": message}, status_code=status, headers={**_SAFETY, **headers})

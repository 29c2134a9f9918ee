"""Tells dispatchers, through the state server, how long a context one instance holds, and a group of them."""

import asyncio
from collections.abc import Awaitable, Callable

from ballast.common.errors import BallastError
from ballast.common.layout import Layout
from ballast.common.model import ModelInfo
from ballast.common.reach import Reach
from ballast.service.logs import get_logger
from services.planner.core.messages import ClusterLoad
from services.planner.core.survey import NoSurvey, survey
from services.planner.policy.reach import reach_of
from services.planner.shell.ports import LayoutStore

INTERVAL_S = 5.0  # instances come and go, and are told of at once: this is for those that have not reported yet
SOON_S = 0.5


def reach_now(layout: Layout, model: ModelInfo | None, load: ClusterLoad) -> Reach | None:
    """None: too little is known of the instances."""
    try:
        snapshot = survey(layout, model, load.workers).snapshot
    except NoSurvey:
        return None
    return None if model is None else reach_of(snapshot, model.max_model_len)


class ReachTelling:
    def __init__(
        self,
        store: LayoutStore,
        at_rest: Callable[[], tuple[Layout, ModelInfo | None, int] | None],
        load: Callable[[], Awaitable[ClusterLoad]],
    ) -> None:
        """`at_rest`: the layout, its model and the token of the lease; None while it is about to change, or another
        planner leads.
        """
        self._store, self._at_rest, self._load = store, at_rest, load
        self._due = asyncio.Event()
        self._told: tuple[Reach, int] | None = None

    def soon(self) -> None:
        """The layout has changed."""
        self._due.set()

    async def run(self) -> None:
        while True:
            self._due.clear()
            known = await self._tell()
            try:
                async with asyncio.timeout(INTERVAL_S if known else SOON_S):
                    await self._due.wait()
            except TimeoutError:
                pass

    async def _tell(self) -> bool:
        """Whether dispatchers know it now."""
        now = self._at_rest()
        if now is None:
            return False
        layout, model, token = now
        try:
            reach = reach_now(layout, model, await self._load())
            if reach is None:
                return False
            if self._told != (reach, token):
                await self._store.write_reach(reach, token)
                self._told = reach, token
                get_logger().info("longest context", of=reach.told())
        except BallastError as error:
            get_logger().debug("reach not told", why=str(error))
            return False
        return True

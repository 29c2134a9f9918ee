"""Publishes the longest context of one instance and of a group in the state server, for dispatchers."""

import asyncio
from collections.abc import Awaitable, Callable

from ballast.common.errors import BallastError
from ballast.common.model import ModelInfo
from ballast.common.reach import Reach
from ballast.service.logs import get_logger
from services.planner.core.messages import ClusterLoad
from services.planner.core.survey import NoSurvey, shape_of
from services.planner.policy.reach import reach_of
from services.planner.shell.ports import LayoutStore

INTERVAL_S = 5.0  # interval for noticing new reports; other changes are published at once
SOON_S = 0.5


def reach_now(model: ModelInfo | None, load: ClusterLoad) -> Reach | None:
    """Return the longest context over all instances that report and are not leaving, including temporarily stranded
    ones. None: too little is known.
    """
    there = [one.memory for one in load.workers.values() if not (one.draining or one.parked)]
    try:
        shape = shape_of(model, load.workers)
    except NoSurvey:
        return None
    return None if model is None or not there else reach_of(shape, there, model.max_model_len)


class ReachTelling:
    def __init__(
        self,
        store: LayoutStore,
        leads: Callable[[], tuple[ModelInfo | None, int] | None],
        load: Callable[[], Awaitable[ClusterLoad]],
    ) -> None:
        """`leads`: returns the layout's model and the lease's token; None: another planner leads."""
        self._store, self._leads, self._load = store, leads, load
        self._due = asyncio.Event()
        self._told: tuple[Reach, int] | None = None

    def soon(self) -> None:
        """Publish at once, because the layout has changed."""
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
        """Publish the reach if it has changed. Returns True if the stored one is current."""
        now = self._leads()
        if now is None:
            return False
        model, token = now
        try:
            reach = reach_now(model, await self._load())
            if reach is None:
                return False
            if self._told != (reach, token):
                await self._store.write_reach(reach, token)
                self._told = reach, token
                get_logger().info("longest context", of=reach.told())
        except BallastError as error:
            get_logger().debug("reach not published", why=str(error))
            return False
        return True

"""Periodic load balancing by migration, stateless between rounds.

The two groups of an order execute it. If the planner ends, they finish or cancel the migration, and the next round
starts from new reports.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable

from ballast.common.errors import BallastError
from ballast.common.layout import Layout
from ballast.service.logs import get_logger
from services.planner.core.messages import ClusterLoad
from services.planner.policy.migrate import MigrationRules, Move, is_round_due, migrations
from services.planner.shell.ports import Counting, MembersPort

INTERVAL_S = 0.25
WITHIN_S = 2 * INTERVAL_S  # deadline of an order, unless a newer order replaces it earlier
_TIMEOUT_S = 2.0
_LOOKED_AT_PER_S = 1000.0


def look_interval_s(group_count: int) -> float:
    """Return the interval of searches for nearly full groups, each of which reads the reports of all groups."""
    return max(1.0, group_count / _LOOKED_AT_PER_S)


class Balancing:
    def __init__(
        self,
        members: MembersPort,
        rules: MigrationRules,
        counting: Counting,
        *,
        at_rest: Callable[[], Layout | None],
        load: Callable[[], Awaitable[ClusterLoad]],
        next_cause: Callable[[str], str],
    ) -> None:
        """`at_rest`: returns the core's layout; None while it changes or another planner leads."""
        self._members = members
        self._rules = rules
        self._counting = counting
        self._at_rest = at_rest
        self._load = load
        self._next_cause = next_cause
        self._looked_at_s = -math.inf

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            if (layout := self._at_rest()) is None:
                continue
            looks = time.monotonic() - self._looked_at_s >= look_interval_s(len(layout.groups))
            if is_round_due(layout, self._rules, looks=looks):
                self._looked_at_s = time.monotonic()
                await self._round(layout)

    async def _round(self, layout: Layout) -> None:
        try:
            load = await self._load()
        except BallastError as error:
            get_logger().debug("nothing is migrated: loads are not known", why=str(error))
            return
        if self._at_rest() == layout:
            moves = migrations(layout, load.workers, self._rules)
            await asyncio.gather(*(self._order(layout, move) for move in moves))

    async def _order(self, layout: Layout, move: Move) -> None:
        cause_id = self._next_cause("migrate")
        names = {"source": move.source.leader.worker_id, "target": move.target.leader.worker_id, "cause_id": cause_id}
        try:
            await self._members.migrate(layout.epoch, move, WITHIN_S, cause_id, _TIMEOUT_S)
        except BallastError as error:
            get_logger().info("migrations not ordered", why=str(error), **names)
        else:
            self._counting.migrations_ordered()
            get_logger().debug("migrations ordered", blocks=move.block_budget, **names)

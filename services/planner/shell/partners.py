"""Tells workers with whom they may soon share a group, again and again: they keep links to these ready."""

import asyncio
from collections.abc import Callable, Sequence

from ballast.common.errors import BallastError
from ballast.common.layout import Layout, Member
from ballast.service.logs import get_logger
from services.planner.policy.partners import likely_partners
from services.planner.shell.ports import MembersPort

_INTERVAL_S = 10.0  # workers keep a link for a minute after it was named last
_TIMEOUT_S = 2.0
_MOST = 8  # for each worker; it has a bound of its own


class PartnerNaming:
    def __init__(self, members: MembersPort, at_rest: Callable[[], Layout | None]) -> None:
        """`at_rest`: the layout; None while it is about to change or another planner leads."""
        self._members = members
        self._at_rest = at_rest
        self._due = asyncio.Event()

    def soon(self) -> None:
        """Somebody has come, or has used up the links that were ready."""
        self._due.set()

    async def run(self) -> None:
        while True:
            self._due.clear()
            layout = self._at_rest()
            if layout is not None:
                named = likely_partners(layout, _MOST)
                await asyncio.gather(*(self._name(member, partners) for member, partners in named))
            try:
                async with asyncio.timeout(_INTERVAL_S):
                    await self._due.wait()
            except TimeoutError:
                pass

    async def _name(self, member: Member, partners: Sequence[Member]) -> None:
        try:
            await self._members.name_partners(member, partners, _TIMEOUT_S)
        except BallastError as error:  # the next round will do; without links made ahead a drop takes a little longer
            get_logger().debug("partners not named", worker=member.worker_id, why=str(error))

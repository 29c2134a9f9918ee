"""Periodically sends each worker its likely future group members, and the epoch up to which transitions are settled.

Workers keep links to these partners open, and cancel preparations that no planner remembers.
"""

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from ballast.common.errors import BallastError
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import Layout, Member
from ballast.service.logs import get_logger
from services.planner.policy.partners import likely_partners
from services.planner.shell.ports import MembersPort

_INTERVAL_S = 10.0  # workers keep a link for a minute after its partner was last sent
_TIMEOUT_S = 2.0
MOST = 8  # partners per worker; workers have their own bound


@dataclass(frozen=True, slots=True)
class AtRest:
    layout: Layout
    settled_epoch: Epoch  # no further transition up to this epoch will be committed; 0: unknown
    apart: Container[WorkerId] = ()  # workers that cannot share a group with others


class PartnerNaming:
    def __init__(self, members: MembersPort, at_rest: Callable[[], AtRest | None]) -> None:
        """`at_rest`: returns None while a transition is under way or another planner leads."""
        self._members = members
        self._at_rest = at_rest
        self._due = asyncio.Event()
        self._heard: dict[WorkerId, Epoch] = {}  # highest epoch that each member has reported

    def soon(self) -> None:
        """Send the partners at once, because the layout has changed or a transition has ended."""
        self._due.set()

    async def run(self) -> None:
        while True:
            self._due.clear()
            now = self._at_rest()
            if now is not None:
                named = likely_partners(now.layout, MOST, now.apart)
                self._heard = {m.worker_id: self._heard.get(m.worker_id, Epoch(0)) for m, _ in named}
                await asyncio.gather(*(self._name(member, partners, now.settled_epoch) for member, partners in named))
            try:
                async with asyncio.timeout(_INTERVAL_S):
                    await self._due.wait()
            except TimeoutError:
                pass

    async def _name(self, member: Member, partners: Sequence[Member], settled_epoch: Epoch) -> None:
        if settled_epoch:  # transitions unknown to the leader will not be committed
            settled_epoch = max(settled_epoch, self._heard[member.worker_id])
        try:
            heard_of = await self._members.name_partners(member, partners, settled_epoch, _TIMEOUT_S)
        except BallastError as error:  # retried in the next round
            get_logger().debug("partners not named", worker=member.worker_id, why=str(error))
        else:
            self._heard[member.worker_id] = heard_of

"""Tells workers, again and again, with whom they may soon share a group, and up to which epoch all is decided.

They keep links to these ready, and take back what they are still prepared for though nobody remembers it.
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

_INTERVAL_S = 10.0  # workers keep a link for a minute after it was named last
_TIMEOUT_S = 2.0
MOST = 8  # for each worker; it has a bound of its own


@dataclass(frozen=True, slots=True)
class AtRest:
    layout: Layout
    settled_epoch: Epoch  # no transition up to it will be committed any more; 0: not known
    apart: Container[WorkerId] = ()  # workers that can share no group with others


class PartnerNaming:
    def __init__(self, members: MembersPort, at_rest: Callable[[], AtRest | None]) -> None:
        """`at_rest`: None while a transition is under way or another planner leads."""
        self._members = members
        self._at_rest = at_rest
        self._due = asyncio.Event()
        self._heard: dict[WorkerId, Epoch] = {}  # what members said last that they have heard of

    def soon(self) -> None:
        """Somebody has come, or has used up the links that were ready."""
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
        if settled_epoch:  # what the one that leads does not know, and is not about to begin, nobody will commit
            settled_epoch = max(settled_epoch, self._heard[member.worker_id])
        try:
            heard_of = await self._members.name_partners(member, partners, settled_epoch, _TIMEOUT_S)
        except BallastError as error:  # the next round will do; without links made ahead a drop takes a little longer
            get_logger().debug("partners not named", worker=member.worker_id, why=str(error))
        else:
            self._heard[member.worker_id] = heard_of

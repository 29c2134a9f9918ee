"""Decides which instances are parked, and the steps that park them (pure).

An instance's standing follows from two facts: whether it should be away, which is decided here and stored in the
layout, and whether it is parked, which it reports. Standings therefore converge despite changes of leader, late reports
and lost orders. An order is sent only after the layout marks the instance as leaving or waking, so that dispatchers
know first, and it is repeated while that mark remains.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from ballast.common.ids import WorkerId
from ballast.common.layout import Layout, Member, Standing, group_of
from services.planner.core import messages as p
from services.planner.core.membership import Membership

_ORDERS_S = 0.25  # interval of orders to the same instance
_MOST_WAITING = 1000
_HELP_S = 60.0  # if no instance serves, time that a waking instance is given before another one is woken


@dataclass(slots=True)
class Standings:
    membership: Membership
    order_at_s: float = math.inf  # time of the next orders
    _help_at_s: float = math.inf  # time from which another instance is woken, if none serves by then
    _waiting: OrderedDict[str, p.StandingRequested] = field(default_factory=OrderedDict[str, p.StandingRequested])

    def requested(self, event: p.StandingRequested, layout: Layout, *, busy: bool) -> list[p.Command]:
        """Handle an operator's request to park or wake an instance. `settle` answers it once the layout contains the
        change.
        """
        earlier = self._waiting.get(event.request_id)
        if earlier is not None and (earlier.worker_id, earlier.away) != (event.worker_id, event.away):
            why = f"request id {event.request_id!r} was already used for another change"
            return [p.RefuseChange(event.request_id, p.ChangeRefusal.ID_REUSED, why)]
        if why := self._why_not(event, layout, busy=busy):
            return [p.RefuseChange(event.request_id, p.ChangeRefusal.NOT_POSSIBLE, why)]
        self.put(event.worker_id, away=event.away)
        self._waiting[event.request_id] = event
        refused: list[p.Command] = []
        while len(self._waiting) > _MOST_WAITING:
            oldest, _ = self._waiting.popitem(last=False)
            refused.append(
                p.RefuseChange(oldest, p.ChangeRefusal.BUSY, "too many instances are parked or woken at once")
            )
        return refused

    def _why_not(self, event: p.StandingRequested, layout: Layout, *, busy: bool) -> str:
        known, group = self.membership.known.get(event.worker_id), group_of(layout, event.worker_id)
        if known is None or group is None:
            return f"{event.worker_id} is not in the layout; `ballast status` lists its instances"
        if not event.away or known.away:
            return ""
        if known.placeable.draining:
            return f"{event.worker_id} is draining"
        if len(group.members) > 1:
            return f"{event.worker_id} serves in a group: restore first"
        if busy:
            return "a transition is under way: try again when it has ended"
        serving = (m.worker_id for g in layout.groups for m in g.members if m.takes_new)
        others = (self.membership.known.get(worker_id) for worker_id in serving if worker_id != event.worker_id)
        if all(other is None or other.away for other in others):  # another request may not be in the layout yet
            return f"no instance but {event.worker_id} serves"
        return ""

    def put(self, worker_id: WorkerId, *, away: bool) -> bool:
        """Set whether an instance should be parked. Returns True if that is a change."""
        known = self.membership.known.get(worker_id)
        if known is None or known.away is away:
            return False
        known.away = away
        known.stand()
        return True

    def refused(self, event: p.ParkRefused) -> bool:
        """Let an instance that cannot be parked serve again. Returns True if that is a change."""
        known = self.membership.known.get(event.worker_id)
        is_same = known is not None and known.placeable.incarnation == event.incarnation
        return is_same and self.put(event.worker_id, away=False)

    def help_out(self, layout: Layout, at_s: float) -> bool:
        """If no instance serves, let leaving instances or a parked one serve again, and another parked one if the first
        does not wake in time. Returns True if the intended state of an instance changed.
        """
        members = [m for group in layout.groups for m in group.members]
        if any(m.takes_new for m in members):
            self._help_at_s = math.inf
            return False
        if any(m.standing is Standing.WAKING for m in members):
            self._help_at_s = min(self._help_at_s, at_s + _HELP_S)
            if at_s < self._help_at_s:
                return False
        self._help_at_s = at_s + _HELP_S
        leaving, parked = ([m for m in members if m.standing is s] for s in (Standing.LEAVING, Standing.PARKED))
        back = [self.put(m.worker_id, away=False) for m in leaving or parked[:1]]
        return any(back)

    def settle(self, layout: Layout) -> list[p.Command]:
        """Remove the requests fulfilled by this layout and return their answers."""
        of = {m.worker_id: m for group in layout.groups for m in group.members}
        settled = [
            request_id
            for request_id, event in self._waiting.items()
            if (member := of.get(event.worker_id)) is None or is_away(member) is event.away
        ]
        commands: list[p.Command] = []
        for request_id in settled:
            del self._waiting[request_id]
            commands.append(p.AnswerChange(request_id, layout.epoch, ()))
        return commands

    def due(self, layout: Layout, at_s: float, cause_id: str) -> list[p.Command]:
        """Return the orders to send now to leaving and waking instances, and set the time of the next orders.

        `layout`: the stored one.
        """
        members = [m for g in layout.groups for m in g.members if m.standing in (Standing.LEAVING, Standing.WAKING)]
        if not members:
            self.order_at_s = math.inf
            return []
        if self.order_at_s == math.inf:
            self.order_at_s = at_s
        if at_s < self.order_at_s:
            return []
        self.order_at_s = at_s + _ORDERS_S
        return [p.OrderStanding(member, member.standing is Standing.LEAVING, cause_id) for member in members]

    def give_up(self) -> list[p.Command]:
        """Drop and refuse all requests, because another planner leads."""
        waiting, self._waiting = self._waiting, OrderedDict[str, p.StandingRequested]()
        self.order_at_s = self._help_at_s = math.inf
        return [p.RefuseChange(request_id, p.ChangeRefusal.STANDBY, "") for request_id in waiting]


def is_away(member: Member) -> bool:
    return member.standing in (Standing.LEAVING, Standing.PARKED)

"""Instances that must serve alone, with the reasons: most workers use another protocol, or their group broke (pure)."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ballast.common.ids import GroupId, Incarnation, WorkerId
from ballast.common.layout import Layout, Member
from services.planner.core.membership import Membership

_BROKE_WITHIN_S = 30.0  # age of a group up to which a failure is attributed to its combination of members
_FIRST_S, _MOST_S = 30.0, 600.0
_MOST_REMEMBERED = 1000


@dataclass(slots=True)
class _BrokenGroup:
    incarnation: Incarnation
    count: int
    until_s: float


class KeptOut:
    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._broken: dict[WorkerId, _BrokenGroup] = {}
        self._since_s: dict[WorkerId, float] = {}  # worker -> time since which it is kept out

    def why(self, at_s: float) -> dict[WorkerId, str]:
        """Return the workers currently kept out of groups, with the reasons. Workers of another model are kept out of
        the layout.
        """
        backing_off = {
            worker_id: f"its group broke soon after it was formed (failure {broken.count});"
            f" it serves alone for {broken.until_s - at_s:.0f} s more"
            for worker_id, broken in self._broken.items()
            if at_s < broken.until_s and self._membership.has(worker_id, broken.incarnation)
        }
        found = self.of_another_protocol() | backing_off | self._membership.of_another_model()
        self._since_s = {worker_id: self._since_s.get(worker_id, at_s) for worker_id in found}
        return {w: _since(why, at_s - self._since_s[w]) for w, why in found.items()}

    def of_another_protocol(self) -> dict[WorkerId, str]:
        """Return the workers whose protocol is not the most common one, with the reasons. If two protocols are equally
        common, the newer one is preferred.
        """
        protocols = self._membership.protocols()
        counts = Counter(protocols.values())
        if len(counts) < 2:
            return {}
        most = max(counts, key=lambda protocol: (counts[protocol], protocol))
        return {
            worker_id: f"it uses protocol {protocol}, but most workers use protocol {most}: upgrade one or the other"
            for worker_id, protocol in protocols.items()
            if protocol != most
        }

    def why_not_together(self, names: Iterable[WorkerId]) -> str:
        """Return the reason why these workers cannot form a group; empty if they use the same protocol."""
        protocols = self._membership.protocols()
        spoken = {name: protocols[name] for name in names if name in protocols}
        if len(set(spoken.values())) < 2:
            return ""
        return "they do not use the same protocol: " + ", ".join(f"{name} {number}" for name, number in spoken.items())

    def regrouped(self, before: Layout, after: Layout, age_s: Callable[[GroupId, float], float], at_s: float) -> None:
        """Handle a change of the layout outside a transition. If a young pipeline has disappeared although all its
        members are alive, it counts as broken, and its members are not merged again for a while. `age_s`: returns the
        age of a group at that time.
        """
        left = {group.group_id for group in after.groups if len(group.members) > 1}
        for group in before.groups:
            if (
                len(group.members) > 1
                and group.group_id not in left
                and age_s(group.group_id, at_s) <= _BROKE_WITHIN_S
                and all(self._membership.has(m.worker_id, m.incarnation) for m in group.members)
            ):
                for member in group.members:
                    self._broke(member, at_s)

    def _broke(self, member: Member, at_s: float) -> None:
        before = self._broken.pop(member.worker_id, None)
        count = 1
        if before is not None and before.incarnation == member.incarnation:
            count += before.count
        until_s = at_s + min(_MOST_S, _FIRST_S * 2.0 ** (count - 1))
        self._broken[member.worker_id] = _BrokenGroup(member.incarnation, count, until_s)
        if len(self._broken) > _MOST_REMEMBERED:
            del self._broken[next(iter(self._broken))]


def _since(why: str, seconds: float) -> str:
    return f"{why} (for {seconds:.0f} s)" if seconds >= 1.0 else why

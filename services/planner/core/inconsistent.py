"""Instances whose reports contradict the layout, with the duration of the contradiction (pure).

A persistent contradiction is resolved in favour of the report: the next plan places the instance in no group, so that
it is stranded, loads its missing layers, and is placed again.
"""

import math
from collections.abc import KeysView
from dataclasses import dataclass, field

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, worker_ids
from services.planner.core.membership import Membership
from services.planner.core.messages import Event, InstanceLost, InstanceUp, SnapshotEnded

_COUNTS = -math.inf  # in `_since_s`: the worker already counts as inconsistent


@dataclass(slots=True)
class Inconsistent:
    disagree_s: float  # duration after which a contradiction counts
    _since_s: dict[WorkerId, float] = field(default_factory=dict[WorkerId, float])
    _compared: Layout = field(default_factory=lambda: Layout(Epoch(0), 0, (), ""))  # layout last compared with reports
    grouped: dict[WorkerId, Group] = field(default_factory=dict[WorkerId, Group])  # member -> its group in `_compared`

    def __bool__(self) -> bool:
        return bool(self._since_s)

    @property
    def worker_ids(self) -> KeysView[WorkerId]:
        return self._since_s.keys()

    def clear(self) -> None:
        self._since_s.clear()

    def compare(self, event: Event, layout: Layout, membership: Membership, layer_count: int) -> bool:
        """Compare reports with the layout: all reports if the layout is new, otherwise only that of the event's
        instance. Returns True if any report was compared.
        """
        if layout is not self._compared:
            membership.regrouped(self._compared, layout)
            self._compared = layout
            self.grouped = {m.worker_id: g for g in layout.groups for m in g.members}
            named = set(membership.known)
        elif isinstance(event, InstanceUp | InstanceLost):
            named = {event.worker_id}
        elif isinstance(event, SnapshotEnded):
            named = set(membership.known) | self._since_s.keys()
        else:
            return False
        for worker_id in sorted(named | (self._since_s.keys() - membership.known.keys())):
            if membership.disagrees(worker_id, self.grouped.get(worker_id), layer_count):
                self._since_s.setdefault(worker_id, event.at_s)
            else:
                self._since_s.pop(worker_id, None)
        return True

    def transition_ended(self, at_s: float, before_s: float) -> None:
        """Restart all durations of contradictions, except those that began before `before_s` and are still too short to
        count.
        """
        odd = self._since_s.items()
        self._since_s = {w: since_s if _COUNTS < since_s < before_s else at_s for w, since_s in odd}

    def lives(self, layout: Layout, membership: Membership) -> dict[WorkerId, Incarnation]:
        """Return the incarnations that count as inconsistent. Instances outside the layout count at once, its members
        after `disagree_s`.
        """
        placed, found = worker_ids(layout), dict[WorkerId, Incarnation]()
        for worker_id, since_s in self._since_s.items():
            known = membership.known.get(worker_id)
            if known is None or (known.place is not None and known.place.epoch > layout.epoch):
                continue  # the layout is older than the report; see `claims`
            if worker_id not in placed or since_s == _COUNTS:
                found[worker_id] = known.placeable.incarnation
        return found

    def overdue(self, at_s: float) -> list[WorkerId]:
        """Mark and return the workers that count as inconsistent from now on."""
        found = [w for w, since_s in self._since_s.items() if since_s > _COUNTS and at_s >= since_s + self.disagree_s]
        self._since_s.update(dict.fromkeys(found, _COUNTS))
        return found

    @property
    def due_at_s(self) -> float:
        """Time at which the next instance counts as inconsistent; infinity if there is none."""
        waiting = [since_s for since_s in self._since_s.values() if since_s != _COUNTS]
        return min(waiting, default=math.inf) + self.disagree_s

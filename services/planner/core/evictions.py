"""Evicts members that do not report to the monitor, but only with evidence, because silence alone is not enough (pure).

A monitor that has just become active, or is cut off from the workers, receives no reports although all members are
healthy. A member that is missing from a snapshot, or silent for too long, therefore stays in the layout until the
planner has probed it:

- the same incarnation answers: it stays, and is probed repeatedly until it reports again;
- no process or another incarnation listens at its address: it is evicted;
- no answer: it is evicted if another member reports that it has left their group, which is evidence. Without such a
  witness only a minority is evicted, because the network is suspected if most members answer neither the monitor nor
  the planner.
"""

import math
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ballast.common.ids import Incarnation, WorkerId
from ballast.common.layout import Group
from services.planner.core.messages import InstanceProbed, Probed, ProbeInstance
from services.planner.policy.replicate import Placeable

_INTERVAL_S = 1.0  # minimum time between an answer and the next probe of the same instance
_PROBES_PER_S = 100.0  # maximum probes of all instances together
_WORDS = {Probed.SILENT: "does not answer the planner", Probed.GONE: "nobody listens at its address"}


@dataclass(slots=True)
class _Suspect:
    incarnation: Incarnation
    address: str
    why: str
    due_at_s: float  # time of the next probe; inf during a probe
    found: Probed | None = None  # result of the last probe


@dataclass(slots=True)
class Suspects:
    _by_id: dict[WorkerId, _Suspect] = field(default_factory=dict[WorkerId, _Suspect])

    def __contains__(self, worker_id: object) -> bool:
        return worker_id in self._by_id

    def __bool__(self) -> bool:
        return bool(self._by_id)

    @property
    def due_at_s(self) -> float:
        return min((suspect.due_at_s for suspect in self._by_id.values()), default=math.inf)

    def add(self, placeable: Placeable, why: str, at_s: float) -> None:
        known = self._by_id.get(placeable.worker_id)
        if known is None or known.incarnation != placeable.incarnation:
            self._by_id[placeable.worker_id] = _Suspect(placeable.incarnation, placeable.address, why, at_s)

    def keep(self, worker_ids: AbstractSet[WorkerId]) -> None:
        """Forget all suspects except these workers."""
        self._by_id = {worker_id: suspect for worker_id, suspect in self._by_id.items() if worker_id in worker_ids}

    def clear(self, worker_id: WorkerId) -> None:
        self._by_id.pop(worker_id, None)

    def due(self, at_s: float, cause_id: str) -> Iterator[ProbeInstance]:
        for worker_id, suspect in sorted(self._by_id.items()):
            if suspect.due_at_s <= at_s:
                suspect.due_at_s = math.inf
                yield ProbeInstance(worker_id, suspect.incarnation, suspect.address, cause_id, suspect.found)

    def probed(self, event: InstanceProbed) -> None:
        suspect = self._by_id.get(event.worker_id)
        if suspect is not None and suspect.incarnation == event.incarnation:
            interval_s = max(_INTERVAL_S, len(self._by_id) / _PROBES_PER_S)
            suspect.found, suspect.due_at_s = event.found, event.at_s + interval_s

    def gone(
        self, member_count: int, groups: Mapping[WorkerId, Group], left: AbstractSet[WorkerId]
    ) -> list[tuple[WorkerId, Incarnation, str]]:
        """Return the members to evict now, with the evidence.

        Args:
            member_count: Number of all known members, including suspects.
            groups: Groups of the layout, each as its members.
            left: Members that report to the monitor that they have left their group.
        """
        doubtful = sum(suspect.found is not Probed.ALIVE for suspect in self._by_id.values())
        found: list[tuple[WorkerId, Incarnation, str]] = []
        for worker_id, suspect in sorted(self._by_id.items()):
            group = groups.get(worker_id)
            witnessed = group is not None and any(m.worker_id in left for m in group.members)
            is_gone = suspect.found is Probed.GONE
            is_gone |= suspect.found is Probed.SILENT and (witnessed or 2 * doubtful <= member_count)
            if is_gone and suspect.found is not None:
                found.append((worker_id, suspect.incarnation, f"{suspect.why}; {_WORDS[suspect.found]}"))
        return found

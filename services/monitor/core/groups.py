"""Demand and capacity of each group, from the layout and the instances' reports."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from ballast.common.ids import WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.load import LoadReport
from services.monitor.core.entry import WorkerEntry
from services.monitor.policy.demand import (
    GroupDemand,
    GroupLoad,
    used_bytes,
    waiting_bytes,
)
from services.monitor.policy.trend import Point, slope_per_s

Entries = Mapping[WorkerId, WorkerEntry]


@dataclass(slots=True)
class Groups:
    """The serving groups of the layout. Without a layout there are none, because dispatchers then know no group."""

    layout: Layout | None = None
    _formed: dict[WorkerId, tuple[tuple[Member, ...], float]] = field(  # leader -> (members, when they began to serve)
        default_factory=dict[WorkerId, tuple[tuple[Member, ...], float]]
    )
    _serving: list[Group] = field(default_factory=list[Group])  # groups that take new requests, sorted by leader

    def adopt(self, at_s: float, layout: Layout | None) -> None:
        """Adopt a layout. None: the state server has lost it, and the previous layout remains current, as for
        dispatchers.
        """
        if layout is None or layout is self.layout or layout == self.layout:
            return
        before, self.layout = self._formed, layout
        self._formed = {}
        for group in layout.groups:
            leader_id, known = group.leader.worker_id, before.get(group.leader.worker_id)
            same = known is not None and known[0] == group.members
            self._formed[leader_id] = (group.members, known[1] if known is not None and same else at_s)
        serving = [group for group in layout.groups if group.leader.takes_new]
        self._serving = sorted(serving, key=lambda group: group.leader.worker_id)

    def clear(self) -> None:
        self.layout = None
        self._formed.clear()
        self._serving.clear()

    def loads(self, entries: Entries) -> tuple[tuple[GroupLoad, ...], bool]:
        """Return the serving groups, and whether all their reports are known.

        Draining, leaving and parked groups are left out, because they get no new requests, and their memory is released
        as their current requests end.
        """
        if self.layout is None:
            return (), False
        found: list[GroupLoad] = []
        complete = True
        for group in self._serving:
            members = group.members
            leader = entries.get(members[0].worker_id)
            if leader is not None and leader.instance.incarnation != members[0].incarnation:
                leader = None
            if leader is not None and leader.draining:
                continue
            if leader is None or leader.load is None:
                complete = False
                continue
            if len(members) == 1:  # cached until the instance's next report, because there may be thousands of groups
                if (known := leader.as_group) is None:
                    known = leader.as_group = _group_load(group, leader, entries)
                found.append(known)
                continue
            found.append(_group_load(group, leader, entries))
            complete = complete and all(_living(member, entries) is not None for member in members)
        return tuple(found), complete

    def led(self, entries: Entries, among: Set[WorkerId]) -> list[tuple[WorkerId, LoadReport]]:
        """Return (id, last report) of each worker in `among` that leads a serving group, sorted by id."""
        leaders = [
            (group.members[0].worker_id, _living(group.members[0], entries))
            for group in self._serving
            if group.members[0].worker_id in among
        ]
        return [(name, entry.load) for name, entry in leaders if entry is not None and entry.load is not None]

    def demands(self, at_s: float, entries: Entries, *, window_s: float, horizon_s: float) -> tuple[GroupDemand, ...]:
        return tuple(self._demand(at_s, load, entries, window_s, horizon_s) for load in self.loads(entries)[0])

    def _demand(self, at_s: float, load: GroupLoad, entries: Entries, window_s: float, horizon_s: float) -> GroupDemand:
        leader = entries[load.leader_id]
        token_bytes = leader.instance.model.kv_bytes_per_token
        since_s = max(at_s - window_s, self._formed[load.leader_id][1])
        recent = [sample for sample in reversed(leader.history) if sample.at_s >= since_s]
        used: list[Point] = [(sample.at_s, used_bytes(sample.load, token_bytes)) for sample in reversed(recent)]
        queued = [waiting_bytes(sample.load, token_bytes) for sample in reversed(recent)]
        wanted = [(at, held + more) for (at, held), more in zip(used, queued, strict=True)]
        generated = slope_per_s([(s.at_s, s.load.generation_tokens_total * token_bytes) for s in reversed(recent)])
        # Admission moves demand from waiting to used, so only generated tokens add to it.
        growth = max(0.0, min(slope_per_s(used), generated)) * horizon_s
        return GroupDemand(
            leader_id=load.leader_id,
            demand_bytes=load.wanted_bytes + int(growth),
            capacity_bytes=load.capacity_bytes,
            used_bytes=load.used_bytes,
            demand_growth_bytes_per_s=slope_per_s(wanted),
        )


def _living(member: Member, entries: Entries) -> WorkerEntry | None:
    entry = entries.get(member.worker_id)
    return entry if entry is not None and entry.instance.incarnation == member.incarnation else None


def _group_load(group: Group, leader: WorkerEntry, entries: Entries) -> GroupLoad:
    load = leader.load
    assert load is not None  # checked by the caller
    block_bytes = load.block_tokens * leader.instance.model.kv_bytes_per_token
    living = [entry for member in group.members if (entry := _living(member, entries)) is not None]
    return GroupLoad(
        leader_id=group.leader.worker_id,
        member_ids=tuple([member.worker_id for member in group.members]),
        used_bytes=load.used_block_count * block_bytes,
        spare_bytes=load.spare_block_count * block_bytes,
        waiting_bytes=load.waiting_block_count * block_bytes,
        capacity_bytes=load.block_count * block_bytes,
        undropped_bytes=sum([entry.whole.kv_bytes for entry in living if entry.whole is not None]),
    )

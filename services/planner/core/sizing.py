"""Decides by prediction how many instances serve, and which are parked or woken (pure).

To avoid oscillation, an instance is woken as soon as the current number does not suffice for the expected rate, but one
is parked only if the others have sufficed for a higher rate for some time. If an instance was needed again soon after
one had been parked, the next parking waits twice as long.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ballast.common.ids import WorkerId
from ballast.common.layout import Group, Layout, Member, Standing
from ballast.common.load import LoadReport
from ballast.common.model import ModelInfo
from ballast.common.wanted import Wanted
from services.planner.core.messages import ClusterLoad
from services.planner.core.survey import NoSurvey, running_of, survey
from services.planner.policy.compare import Comparison, ComparisonTargets, compare_sizes
from services.planner.policy.reserve import Jumps, Learnt, Reserve, pair_gain, wanted_memory

_LOOK_S, _LOOK_TO_ADVISE_S = 0.5, 5.0  # evaluation intervals, with and without parking
_REACTS_S = 1.0  # time until dispatchers are notified, in addition to the time to wake and the evaluation interval
_REGRET_S = 60.0  # an instance that is needed again within this time should not have been parked
_MOST_DWELL_S = 600.0
_MOST_LEAVING = 2
_STARTS = 6.0  # factor on the dwell time if processes end instead of parking
_SOONER = 0.5  # when an instance is parked, fraction of the dwell time credited to the next one
_WAKES = 2.0  # minimum dwell time as a multiple of the time to wake
_OVERDUE = 3.0  # multiple of the time to wake (at least `_REACTS_S`) after which a waking instance no longer counts
_REPORTS_S = 5.0  # maximum wait for missing reports, for example after a change of the monitor


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRules:
    parks: bool = False  # True: idle instances are parked
    advises: bool = False  # True: compute the wanted number of instances for an external autoscaler; nothing is parked
    drops: bool = False  # True: parameters are dropped under memory pressure, which bridges the time to wake
    least_instances: int = 1  # minimum number of serving instances
    dwell_s: float = 10.0  # time for which one fewer instance must suffice before one is parked
    last_name: bool = False  # True: the highest name is parked, as with StatefulSets; False: the emptiest instance


@dataclass(slots=True)
class Sizing:
    rules: SizingRules
    wanted_count: int = 0  # number of instances wanted by the last evaluation; 0: unknown
    why: str = ""  # reason for `wanted_count`
    look_at_s: float = math.inf
    _jumps: Jumps = field(default_factory=Jumps)
    _calm_since_s: float | None = None
    _left_at_s: float = -math.inf
    _dwell_s: float = 0.0  # learned minimum of the dwell time
    _waking_since_s: dict[WorkerId, float] = field(default_factory=dict[WorkerId, float])
    _missing_since_s: float | None = None  # time since which serving instances have not reported; None: all have

    def __post_init__(self) -> None:
        if self.rules.parks or self.rules.advises:
            self.look_at_s = 0.0

    def look(
        self,
        layout: Layout,
        model: ModelInfo | None,
        load: ClusterLoad,
        targets: ComparisonTargets,
        at_s: float,
        *,
        may_shrink: bool = True,
    ) -> tuple[Mapping[WorkerId, bool], Comparison | None]:
        """Evaluate how many instances should serve. Returns the workers to park (True) or to wake (False), and the
        comparison, which is None if too little is known.

        Args:
            may_shrink: Whether an instance may be parked, because no drop or restore is pending.
        """
        if self.look_at_s == math.inf:
            return {}, None
        self.later(at_s)
        reserve, members = self._reserve(layout, load, at_s)
        if self._awaits_reports(members, load, at_s):
            self._calm_since_s = None
            return {}, None
        compared = self._compared(layout, model, load, targets, reserve, at_s, may_shrink=may_shrink)
        if compared is None:
            self._calm_since_s, self.wanted_count = None, 0
            return {}, None
        added, self.why = compared.chosen.candidate.added, compared.chosen.told()
        on_count = sum(m.takes_new for m in members) + len(reserve.waking_s)
        if (lacking := self.rules.least_instances - on_count) > max(0, added):
            added, self.why = lacking, f"the minimum is {self.rules.least_instances}"
        if added >= 0:
            self._calm_since_s = None
            self.wanted_count = on_count + added
            return (self._back(members, load, added, at_s) if added and self.rules.parks else {}), compared
        # While jumps of demand are unknown, at least half of the instances stay.
        is_unknown = not self._jumps.known and 2 * (on_count - 1) < len(members)
        if not self._is_calm(reserve, at_s) or is_unknown:
            self.wanted_count = on_count
            return {}, compared
        self.wanted_count = on_count - 1
        leaver = self._leaver(layout, load) if self.rules.parks else None
        if leaver is None:
            return {}, compared
        self._calm_since_s, self._left_at_s = at_s - _SOONER * self._wait_s(reserve), at_s
        return {leaver: True}, compared

    def wanted(self, layout: Layout) -> Wanted:
        """Return the number of instances that should serve (the current number while unknown), and those that serve
        now.
        """
        members = [m for group in layout.groups for m in group.members]
        away = (Standing.LEAVING, Standing.PARKED)
        return Wanted(
            self.wanted_count or len(members),
            serving=tuple(sorted(m.worker_id for m in members if m.standing not in away)),
            parked=tuple(sorted(m.worker_id for m in members if m.standing in away)),
            reason=self.why,
        )

    @property
    def learnt(self) -> Learnt:
        return Learnt(self._jumps.largest, self._dwell_s)

    def begin(self, before: Learnt) -> None:
        """Continue with the data that the previous planner has learned."""
        self._jumps.begin(before.jumps)
        self._dwell_s = max(self._dwell_s, min(_MOST_DWELL_S, before.dwell_s))

    def later(self, at_s: float) -> None:
        """Schedule the next evaluation."""
        if self.look_at_s < math.inf:
            self.look_at_s = at_s + (_LOOK_S if self.rules.parks else _LOOK_TO_ADVISE_S)

    def _awaits_reports(self, members: list[Member], load: ClusterLoad, at_s: float) -> bool:
        """True while missing reports of serving instances are still expected. Without these reports, capacity would be
        underestimated.
        """
        if all(m.worker_id in load.workers for m in members if m.takes_new):
            self._missing_since_s = None
            return False
        self._missing_since_s = at_s if self._missing_since_s is None else self._missing_since_s
        return at_s - self._missing_since_s < _REPORTS_S

    def _reserve(self, layout: Layout, load: ClusterLoad, at_s: float) -> tuple[Reserve, list[Member]]:
        """Return the reserve and all members. The reserve assumes that an external scaler could double the number of
        instances.
        """
        members = [m for group in layout.groups for m in group.members]
        wake_s = max([load.workers[m.worker_id].wake_s for m in members if m.worker_id in load.workers], default=0.0)
        waking = [m.worker_id for m in members if m.standing is Standing.WAKING]
        self._waking_since_s = {w: self._waking_since_s.get(w, at_s) for w in waking}
        left_s = [since_s + wake_s - at_s for since_s in self._waking_since_s.values()]
        reserve = Reserve(
            parked_count=sum(m.standing is Standing.PARKED for m in members) + len(members),
            waking_s=tuple(max(0.0, s) for s in left_s if s > -_OVERDUE * max(wake_s, _REACTS_S)),
            wake_s=wake_s,
        )
        return reserve, members

    def _compared(
        self,
        layout: Layout,
        model: ModelInfo | None,
        load: ClusterLoad,
        targets: ComparisonTargets,
        reserve: Reserve,
        at_s: float,
        *,
        may_shrink: bool,
    ) -> Comparison | None:
        if load.pace is None or not load.traffic.known_s:
            return None
        try:
            snapshot, led = survey(layout, model, load.workers, load.slowness)
            leaving = _as_serving(layout, Standing.LEAVING)
            left = () if leaving is None else survey(leaving, model, load.workers, load.slowness).snapshot.groups
        except NoSurvey:
            return None
        running = running_of(led)
        serving_count = sum(len(group.members) for group in layout.groups if group.leader.takes_new)
        by_load = tuple(sorted(left, key=lambda group: (-group.load_blocks, group.group_id)))
        reserve = replace(reserve, leaving=by_load, gain=pair_gain(snapshot) if self.rules.drops else 1.0)
        wanted = wanted_memory(snapshot, reserve, load.traffic)
        within_s = reserve.wake_s + _REACTS_S + (_LOOK_S if self.rules.parks else _LOOK_TO_ADVISE_S)
        reserve = self._jumps.look(reserve, wanted, load.traffic.recent_count, within_s, at_s)
        return compare_sizes(
            snapshot,
            running,
            load.traffic,
            load.pace,
            reserve,
            may_shrink=may_shrink
            and not reserve.waking_s
            and len(by_load) < _MOST_LEAVING
            and serving_count > self.rules.least_instances,
            targets=targets,
        )

    def _back(self, members: list[Member], load: ClusterLoad, count: int, at_s: float) -> dict[WorkerId, bool]:
        """Choose instances to wake: first those about to be parked, most loaded first, then parked ones. Adapts the
        learned dwell time.
        """
        if at_s - self._left_at_s < _REGRET_S:
            self._dwell_s = min(_MOST_DWELL_S, 2 * max(self._dwell_s, self.rules.dwell_s))
            self._left_at_s = -math.inf
        elif self._left_at_s > -math.inf:  # the last parked instance was not needed again soon
            self._dwell_s, self._left_at_s = self._dwell_s / 2, -math.inf
        leaving = [m.worker_id for m in members if m.standing is Standing.LEAVING]
        leaving.sort(key=lambda w: (-_held(load.workers.get(w)), w))
        parked = sorted(m.worker_id for m in members if m.standing is Standing.PARKED)
        return dict.fromkeys([*leaving, *parked][:count], False)

    def _is_calm(self, reserve: Reserve, at_s: float) -> bool:
        """True if one fewer instance has sufficed for long enough. Starts to measure this time if it has not begun."""
        self._calm_since_s = at_s if self._calm_since_s is None else self._calm_since_s
        return at_s - self._calm_since_s >= self._wait_s(reserve)

    def _wait_s(self, reserve: Reserve) -> float:
        wait_s = max(self.rules.dwell_s, self._dwell_s, _WAKES * reserve.wake_s)
        return wait_s if self.rules.parks else _STARTS * wait_s

    def _leaver(self, layout: Layout, load: ClusterLoad) -> WorkerId | None:
        alone = [g.leader.worker_id for g in layout.groups if len(g.members) == 1 and g.leader.takes_new]
        may_leave = [w for w in alone if (report := load.workers.get(w)) is not None and report.wake_s]
        if not may_leave:
            return None
        if self.rules.last_name:
            return max(may_leave, key=_by_number)
        # Ties go to the instance with the least memory, because the comparison assumes the mean memory.
        of = load.workers
        return min(may_leave, key=lambda w: (_held(of[w]), of[w].running_count, of[w].block_count, w))


def _held(report: LoadReport | None) -> int:
    return 0 if report is None else report.used_block_count + report.waiting_block_count


def _by_number(name: str) -> tuple[int, str]:
    """Return a sort key that orders numbered names by their numbers: w-10 after w-2."""
    return len(name), name


def _as_serving(layout: Layout, standing: Standing) -> Layout | None:
    """Return a layout of the instances with this standing, as if they served; None: there are none."""
    groups = tuple(
        Group(g.group_id, (replace(g.leader, standing=Standing.SERVING),))
        for g in layout.groups
        if g.leader.standing is standing
    )
    return replace(layout, groups=groups) if groups else None

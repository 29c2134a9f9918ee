"""Record of a transition (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import Group
from ballast.common.transition import Status, TransitionKind
from ballast.common.units import counted, human_bytes, layer_ranges, thousands
from services.planner.core.stages import Stage
from services.planner.core.transition import Journal
from services.planner.policy.snapshot import ModelShape


@dataclass(slots=True)
class TransitionRecord:
    """One transition. Other modules may read it; only the core writes."""

    journal: Journal
    began_at_s: float
    by: str  # why it began, for example overload, relief, operator, loss or drain
    request_id: str = ""
    shape: ModelShape | None = None  # sizes of the model; None: unknown
    reached_at_s: dict[Stage, float] = field(default_factory=dict[Stage, float])
    statuses: Mapping[WorkerId, Status] = field(default_factory=dict[WorkerId, Status])
    lost: tuple[WorkerId, ...] = ()
    dropped_at_s: float | None = None  # for a restore: when the oldest of its groups was merged

    @property
    def epoch(self) -> Epoch:
        return self.journal.epoch

    @property
    def ended_at_s(self) -> float | None:
        return next((at_s for stage, at_s in self.reached_at_s.items() if stage.over), None)

    def seconds_in(self, stage: Stage) -> float:
        """Return the seconds in this stage, as observed by this planner; 0 if it was not reached."""
        stages = list(self.reached_at_s)
        if stage not in stages or stages[-1] is stage:
            return 0.0
        return self.reached_at_s[stages[stages.index(stage) + 1]] - self.reached_at_s[stage]

    @property
    def prepare_s(self) -> float:
        """Seconds from the plan to the decision or the end."""
        until_s = self.reached_at_s.get(Stage.COMMITTING, self.ended_at_s)
        return 0.0 if until_s is None else until_s - self.began_at_s

    def total(self, name: str) -> int:
        return sum(getattr(status, name) for status in self.statuses.values())

    def longest_s(self, name: str) -> float:
        return max((getattr(status, name) for status in self.statuses.values()), default=0.0)

    @property
    def waves(self) -> int:
        """Number of waves of the KV exchange."""
        return max((status.waves for status in self.statuses.values()), default=0)

    @property
    def victim_count(self) -> int:
        """Number of moved sequences. Each group's leader reports for its whole group."""
        leaders = [
            self.statuses[g.leader.worker_id] for g in self.changed_groups if g.leader.worker_id in self.statuses
        ]
        return sum(status.victim_count for status in leaders)

    @property
    def changed_groups(self) -> tuple[Group, ...]:
        """Groups changed by the transition, in their final form."""
        before = set(self.journal.base.groups)
        return tuple(group for group in self.journal.target.groups if group not in before)

    @property
    def summary(self) -> str:
        """Return a summary in one line."""
        if self.journal.kind is TransitionKind.DROP:
            groups = "; ".join(self._drop_line(group) for group in self.changed_groups)
        else:
            groups = "; ".join(self._restore_line(group) for group in self._dissolved_groups())
        return f"{groups}{self._ending()}"

    def _dissolved_groups(self) -> list[Group]:
        after = set(self.journal.target.groups)
        gone = [group for group in self.journal.base.groups if group not in after]
        returned = {m.worker_id for g in self.changed_groups for m in g.members}
        returned -= {m.worker_id for g in gone for m in g.members}
        alone = [g for g in self.changed_groups if g.leader.worker_id in returned]
        return gone + alone

    def _drop_line(self, group: Group) -> str:
        held = {m.worker_id: range(m.first_layer, m.last_layer) for g in self.journal.base.groups for m in g.members}
        dropped = ", ".join(
            f"{layer_ranges(lost)} of {m.worker_id}"
            for m in group.members
            if (lost := [layer for layer in held.get(m.worker_id, ()) if not m.first_layer <= layer < m.last_layer])
        )
        names = ",".join(m.worker_id for m in group.members)
        return f"group {{{names}}}: dropped layers {dropped or 'none'}{self._kv_change(group)}"

    def _restore_line(self, group: Group) -> str:
        names = ",".join(m.worker_id for m in group.members)
        after = f", restored after {self._since_drop_s:.0f} s" if self._since_drop_s is not None else ""
        what = "dissolved" if len(group.members) > 1 else "has all layers again"
        return f"group {{{names}}}: {what}{after}"

    @property
    def _since_drop_s(self) -> float | None:
        if self.dropped_at_s is None or self.ended_at_s is None:
            return None
        return self.ended_at_s - self.dropped_at_s

    def _kv_change(self, group: Group) -> str:
        shape, names = self.shape, [m.worker_id for m in group.members]
        if shape is None or any(name not in self.statuses for name in names):
            return ""
        of = {name: self.statuses[name] for name in names}
        olds = [g for g in self.journal.base.groups if any(m.worker_id in of for m in g.members)]
        before = sum(min(of[m.worker_id].block_count_before for m in g.members if m.worker_id in of) for g in olds)
        after = min(status.block_count_after for status in of.values())
        added_bytes = (after - before) * shape.block_bytes * shape.layer_count
        tokens = [thousands(count * shape.block_tokens) for count in (before, after)]
        return f", {human_bytes(added_bytes, signed=True)} KV ({tokens[0]} -> {tokens[1]} tokens)"

    def _ending(self) -> str:
        journal = self.journal
        if journal.stage in (Stage.ABORTING, Stage.ABORTED):
            return f"; taken back: {journal.failure}"
        if not journal.stage.over:
            return f"; {journal.stage}"
        told = [f", {counted(self.victim_count, 'request')} moved"]
        if recomputed := self.total("victims_recomputed"):
            told.append(f" ({recomputed} computed anew)")
        if refilled := self.total("refilled_tokens"):
            told.append(f", lost KV of {counted(refilled, 'token')} computed from logged activations")
        exchanged, took_s = self.total("kv_bytes_sent"), self.longest_s("exchange_s")
        told.append(f", {human_bytes(exchanged)} of KV exchanged in {took_s:.2f} s")
        if self.waves > 1:
            told.append(f", in {self.waves} waves")
        if pulled := self.total("parameter_bytes_pulled"):
            told.append(f", pulled {human_bytes(pulled)} of parameters in {self.longest_s('layers_s'):.2f} s")
        told.append(f", longest stall {self.longest_s('max_stall_s'):.2f} s")
        if self.lost:
            told.append(f"; lost on the way: {' '.join(self.lost)}")
        return "".join(told)

"""Plans in words, for `ballast plan --explain` and a log line per transition."""

from ballast.common.units import human_bytes, layer_ranges, thousands
from services.planner.policy.drop import DropPlan
from services.planner.policy.merged import GroupPlan
from services.planner.policy.restore import RestorePlan
from services.planner.policy.snapshot import ModelShape

MOST_GROUPS = 32  # maximum number of described groups; the layout has all


def explain(plan: DropPlan, model: ModelShape) -> list[str]:
    """Return one line for the need, one for the moved KV, and one for each of the first `MOST_GROUPS` changing
    groups.
    """
    lines = [_need_line(plan)]
    if not plan.groups:
        return [*lines, "nothing changes"]
    lines.append(f"{human_bytes(plan.exchange_bytes)} of KV to move")
    if plan.usable_bytes < plan.needed_bytes <= plan.freed_bytes:
        lines.append(
            f"only {human_bytes(plan.usable_bytes)} of it count for admission:"
            " the stage with most layers has room for fewest blocks"
        )
    lines += [group_line(group, model) for group in plan.groups[:MOST_GROUPS]]
    if len(plan.groups) > MOST_GROUPS:
        lines.append(f"and {len(plan.groups) - MOST_GROUPS} groups more")
    if plan.unchanged:
        lines.append(f"unchanged: {len(plan.unchanged)} of {len(plan.unchanged) + _merged_count(plan)} groups")
    return lines


def group_line(group: GroupPlan, model: ModelShape) -> str:
    names = ",".join(member.worker_id for member in group.members)
    dropped = ", ".join(f"{layer_ranges(m.dropped_layers)} of {m.worker_id}" for m in group.members if m.dropped_layers)
    added_bytes = (group.block_count - group.block_count_before) * model.block_bytes * model.layer_count
    before, after = (count * model.block_tokens for count in (group.block_count_before, group.block_count))
    return (
        f"group {{{names}}}: dropped layers {dropped or 'none'},"
        f" {human_bytes(added_bytes, signed=True)} KV ({thousands(before)} -> {thousands(after)} tokens)"
        f"{_uneven(group)}"
    )


def _uneven(group: GroupPlan) -> str:
    """Describe the member with most layers, if they exceed its share because it has more memory or is faster."""
    counts = {member.worker_id: member.last_layer - member.first_layer for member in group.members}
    all_layers, (most, name) = sum(counts.values()), max((count, name) for name, count in counts.items())
    if most <= -(-all_layers // len(counts)):
        return ""
    instances = [instance for merged in group.merged for instance in merged.members]
    own = next(instance for instance in instances if instance.worker_id == name)
    others = [instance for instance in instances if instance.worker_id != name]
    memory = own.budget_bytes * len(others) / sum(instance.budget_bytes for instance in others)
    speed = max(instance.slowness for instance in others) / own.slowness
    has = [f"{memory:.1f} x the memory"] * (memory >= 1.1) + [f"is {speed:.1f} x as fast"] * (speed >= 1.1)
    why = f": it has {' and '.join(has)}".replace("has is", "is") if has else ""
    return f"; {most} of {all_layers} layers on {name}{why}"


def explain_restore(plan: RestorePlan) -> list[str]:
    lines = [
        f"group {{{','.join(d.members)}}}: dissolved, {human_bytes(d.pull_bytes)} of parameters to pull from"
        f" {', '.join(sorted({p.source or 'host or disk' for p in d.pulls})) or 'nobody'}"
        for d in plan.dissolutions
    ]
    lines += [f"group {group_id} stays: {why}" for group_id, why in plan.kept]
    return lines or ["no group is a pipeline: nothing to restore"]


def _need_line(plan: DropPlan) -> str:
    outcome = f"falls short by {human_bytes(plan.shortfall_bytes)}" if plan.shortfall_bytes else "meets it"
    return f"needed {human_bytes(plan.needed_bytes)}, the plan frees {human_bytes(plan.freed_bytes)} and {outcome}"


def _merged_count(plan: DropPlan) -> int:
    return sum(len(group.merged) for group in plan.groups)

"""Table of groups with their members, layers and load. An instance that serves alone has one row; larger groups have an
additional row per member.
"""

from collections.abc import Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ballast.client import ClusterStatus, GroupStatus, WorkerStatus
from ballast.common.layout import Member, Standing
from ballast.common.load import LoadReport

_BAR_CELLS = 8
_HOT_FRACTION, _FULL_FRACTION = 0.8, 0.95


def load_table(status: ClusterStatus, tokens_per_s: Mapping[str, float] | None) -> Table:
    table = plain_table("worker", "layers", "state")
    for heading in ("running", "waiting", "KV blocks used"):
        table.add_column(heading, justify="right", no_wrap=True)
    if tokens_per_s is not None:
        table.add_column("tokens/s", justify="right", no_wrap=True)
    for group in status.groups:
        for row in _rows(group, tokens_per_s):
            table.add_row(*row)
    placed = {member.worker_id for group in status.groups for member in group.members}
    for worker in status.workers:
        if worker.worker_id not in placed:
            table.add_row(worker.worker_id, "-", _state(worker, None), *_load_cells(worker, tokens_per_s))
    return table


def plain_table(*left_columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in left_columns:
        table.add_column(heading, no_wrap=True)
    return table


def group_name(group: GroupStatus) -> str:
    """Display name of a group: that of its worker if it has only one."""
    return group.group_id if len(group.members) > 1 else group.leader_id


def load_style(fraction: float) -> str:
    return "red" if fraction >= _FULL_FRACTION else "yellow" if fraction >= _HOT_FRACTION else "green"


def _rows(group: GroupStatus, tokens_per_s: Mapping[str, float] | None) -> list[list[RenderableType]]:
    leader, first, last = group.leader, group.members[0], group.members[-1]
    cells = _load_cells(leader, tokens_per_s)
    state = _state(leader, first)
    rows: list[list[RenderableType]] = [[group_name(group), _layers(first.first_layer, last.last_layer), state, *cells]]
    if len(group.members) > 1:
        for member in group.members:
            branch = "└ " if member is last else "├ "
            role = Text("leads" if member is first else "follows", style="dim")
            if member.draining:
                role = Text("draining", style="yellow")
            rows.append([branch + member.worker_id, _layers(member.first_layer, member.last_layer), role])
    return rows


def _layers(first: int, last: int) -> str:
    return f"{first}-{last - 1}"


def _state(worker: WorkerStatus | None, member: Member | None) -> Text:
    if worker is None or not worker.connected:
        return Text("not connected", style="red")
    if (member is not None and member.draining) or (worker.load is not None and worker.load.draining):
        return Text("draining", style="yellow")
    if member is not None and not member.takes_new:
        return Text(member.standing, style="dim" if member.standing is Standing.PARKED else "yellow")
    return Text("serving", style="green")


def _load_cells(worker: WorkerStatus | None, tokens_per_s: Mapping[str, float] | None) -> list[RenderableType]:
    load = worker.load if worker is not None else None
    cells: list[RenderableType] = ["-"] * 3
    if load is not None:
        cells = [f"{load.running_count} of {load.max_running_count}", str(load.waiting_count), _kv_usage(load)]
    if tokens_per_s is not None:
        cells.append(f"{tokens_per_s.get(worker.worker_id if worker is not None else '', 0.0):,.1f}")
    return cells


def _kv_usage(load: LoadReport) -> Text:
    fraction = load.kv_usage_fraction
    # Round up, so that any use is visible, and show a full bar only at 100 %.
    cells = _BAR_CELLS if fraction >= 1.0 else min(_BAR_CELLS - 1, -int(-fraction * _BAR_CELLS // 1))
    usage = Text("█" * cells, style=load_style(fraction))
    retained = min(_BAR_CELLS - cells, -(-load.retained_block_count * _BAR_CELLS // max(1, load.block_count)))
    usage.append("▒" * retained, style="cyan")  # blocks with cached prefixes count as free
    usage.append("░" * (_BAR_CELLS - cells - retained), style="dim")
    usage.append(f" {fraction:4.0%} of {load.block_count:,}", style="default")
    if load.prefix_hits_total:
        usage.append(f", {load.prefix_hit_fraction:.0%} hits", style="cyan")
    return usage

"""KV demand relative to capacity over time, for `ballast top`."""

from collections import deque

from rich.table import Table
from rich.text import Text

from ballast.client import ClusterStatus
from tools.cli.groups import group_name, load_style, plain_table

_LEVELS = "▁▂▃▄▅▆▇█"
_CELLS = 24
_ALL = ""


class DemandHistory:
    """History of KV demand as a fraction of capacity, of each group and the cluster, one value per refresh. A group is
    identified by its leader.
    """

    def __init__(self) -> None:
        self._fractions: dict[str, deque[float]] = {}  # leader or `_ALL` -> fractions, newest last

    def add(self, status: ClusterStatus) -> None:
        now = {g.leader_id: _fraction(g.demand_tokens, g.capacity_tokens) for g in status.groups}
        now[_ALL] = _fraction(*cluster_demand(status))
        self._fractions = {
            name: deque([*self._fractions.get(name, ()), fraction], maxlen=_CELLS) for name, fraction in now.items()
        }

    def table(self, status: ClusterStatus) -> Table:
        """The table of the history and of the values in `status`, the most recent one."""
        table = plain_table("KV demand")
        table.add_column("last looks", no_wrap=True, min_width=_CELLS)
        table.add_column("now", justify="right", no_wrap=True)
        table.add_column("demand of capacity, tokens", justify="right", no_wrap=True)
        for group in status.groups:
            self._add_row(table, group_name(group), group.leader_id, group.demand_tokens, group.capacity_tokens)
        self._add_row(table, "all, with backlog", _ALL, *cluster_demand(status))
        return table

    def _add_row(self, table: Table, label: str, key: str, demand_tokens: int, capacity_tokens: int) -> None:
        line = Text("")
        for fraction in self._fractions.get(key, ()):
            line.append(_LEVELS[min(len(_LEVELS) - 1, int(fraction * len(_LEVELS)))], style=load_style(fraction))
        now = f"{_fraction(demand_tokens, capacity_tokens):.0%}" if capacity_tokens else "-"
        table.add_row(label, line, now, f"{demand_tokens:,} of {capacity_tokens:,}")


def cluster_demand(status: ClusterStatus) -> tuple[int, int]:
    """(KV demand of the cluster, the dispatcher's backlog included; KV capacity), both in tokens."""
    demand_tokens = sum(group.demand_tokens for group in status.groups) + status.backlog_token_count
    return demand_tokens, sum(group.capacity_tokens for group in status.groups)


def _fraction(demand_tokens: int, capacity_tokens: int) -> float:
    return demand_tokens / capacity_tokens if capacity_tokens else 0.0

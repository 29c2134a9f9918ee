"""A cluster's status as people read it. Pure: a snapshot in, something `rich` can print out."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ballast.client import ClusterStatus, WorkerStatus
from ballast.common.errors import InvariantViolation
from ballast.common.layout import Group as WorkerGroup
from ballast.common.layout import Member
from ballast.common.load import LoadReport, MemoryReport
from ballast.model.info import human_bytes

_BAR_CELLS = 8
_HOT_FRACTION, _FULL_FRACTION = 0.8, 0.95


def render_status(status: ClusterStatus, tokens_per_s: Mapping[str, float] | None = None) -> RenderableType:
    """Everything about the cluster on a page. `tokens_per_s`: generated per second, for each worker."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for line in (_dispatcher_line, _model_line, _layout_line, _backlog_line, _endings_line):
        facts.add_row(*line(status))
    if not status.workers:
        return Group(facts, Text("\nno workers yet: start one, or see `ballast doctor`", style="yellow"))
    return Group(facts, Text(), _load_table(status, tokens_per_s), Text(), _memory_table(status.workers))


def _line(label: str, *parts: str | Text) -> tuple[str, Text]:
    return label, Text(" · ", style="dim").join(Text(part) if isinstance(part, str) else part for part in parts)


def _dispatcher_line(status: ClusterStatus) -> tuple[str, Text]:
    parts: list[str | Text] = [f"{status.dispatcher_id} at {status.address}", f"version {status.version}"]
    parts.append(f"up {human_duration(status.uptime_s)}")
    if status.draining:
        parts.append(Text("draining", style="yellow"))
    reachable = status.state_server_reachable
    parts.append("state server reachable" if reachable else Text("state server not reachable", style="red"))
    return _line("dispatcher", *parts)


def _model_line(status: ClusterStatus) -> tuple[str, Text]:
    model = status.model
    if model is None:
        return _line("model", "unknown until the first worker is there")
    return _line(
        "model",
        model.name,
        model.architecture,
        f"{model.layer_count} layers",
        f"{human_count(model.parameter_count)} parameters",
        model.dtype,
        f"up to {model.max_model_len:,} tokens",
        f"{human_bytes(model.kv_bytes_per_token)} of KV per token",
    )


def _layout_line(status: ClusterStatus) -> tuple[str, Text]:
    layout = status.layout
    if layout is None:
        return _line("layout", "none yet: is a planner running?")
    groups = len(layout.groups)
    return _line("layout", f"epoch {layout.epoch} ({layout.reason})", f"{groups} group{'' if groups == 1 else 's'}")


def _backlog_line(status: ClusterStatus) -> tuple[str, Text]:
    return _line(
        "backlog",
        f"{status.backlog_request_count:,} of {status.max_queued_request_count:,} requests",
        f"{status.backlog_token_count:,} of {status.max_queued_token_count:,} tokens",
        f"{status.running_request_count:,} with workers",
    )


def _endings_line(status: ClusterStatus) -> tuple[str, Text]:
    endings = [f"{count:,} {ending}" for ending, count in status.requests_total.items() if count]
    return _line("ended", *(endings or ["no request yet"]))


def _load_table(status: ClusterStatus, tokens_per_s: Mapping[str, float] | None) -> Table:
    places = _places(status)
    merged = any(len(group.members) > 1 for group, _ in places.values())  # else each worker is its own group
    table = _table("worker", *(["group"] if merged else []), "layers", "state")
    for heading in ("running", "waiting", "KV blocks used"):
        table.add_column(heading, justify="right", no_wrap=True)
    if tokens_per_s is not None:
        table.add_column("tokens/s", justify="right", no_wrap=True)
    for worker in status.workers:
        group, member = places.get(worker.worker_id, (None, None))
        row: list[RenderableType] = [worker.worker_id]
        if merged:
            row.append(group.group_id if group else "-")
        row += [f"{member.first_layer}-{member.last_layer - 1}" if member else "-", _state(worker, member)]
        load = worker.load
        if load is None:
            row += ["-"] * 3
        else:
            row += [f"{load.running_count} of {load.max_running_count}", str(load.waiting_count), _kv_usage(load)]
        if tokens_per_s is not None:
            row.append(f"{tokens_per_s.get(worker.worker_id, 0.0):,.1f}")
        table.add_row(*row)
    return table


def _memory_table(workers: Sequence[WorkerStatus]) -> Table:
    """The sum is shown so that anybody can check it: parameters + KV + free = budget."""
    table = _table("device memory")
    for heading in ("parameters", "+ KV", "+ free", "= budget"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for worker in workers:
        if worker.load is None:
            table.add_row(worker.worker_id, "-", "-", "-", "-", "")
            continue
        memory = worker.load.memory
        sizes = (memory.parameter_bytes, memory.kv_bytes, memory.free_bytes, memory.budget_bytes)
        table.add_row(worker.worker_id, *(human_bytes(size) for size in sizes), _verdict(memory))
    return table


def _table(*left_columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in left_columns:
        table.add_column(heading, no_wrap=True)
    return table


def _verdict(memory: MemoryReport) -> Text:
    try:
        memory.check()
    except InvariantViolation:
        sum_bytes = memory.parameter_bytes + memory.kv_bytes + memory.free_bytes
        return Text(f"does not add up: {sum_bytes - memory.budget_bytes:+,} B", style="bold red")
    return Text("adds up", style="dim")


def _places(status: ClusterStatus) -> dict[str, tuple[WorkerGroup, Member]]:
    groups = status.layout.groups if status.layout is not None else ()
    return {member.worker_id: (group, member) for group in groups for member in group.members}


def _state(worker: WorkerStatus, member: Member | None) -> Text:
    if not worker.connected:
        return Text("not connected", style="red")
    if (member is not None and member.draining) or (worker.load is not None and worker.load.draining):
        return Text("draining", style="yellow")
    return Text("serving", style="green")


def _kv_usage(load: LoadReport) -> Text:
    fraction = load.kv_usage_fraction
    style = "red" if fraction >= _FULL_FRACTION else "yellow" if fraction >= _HOT_FRACTION else "green"
    # Anything in use shows, and only full looks full.
    cells = _BAR_CELLS if fraction >= 1.0 else min(_BAR_CELLS - 1, -int(-fraction * _BAR_CELLS // 1))
    usage = Text("█" * cells, style=style)
    usage.append("░" * (_BAR_CELLS - cells), style="dim")
    return usage.append(f" {fraction:4.0%} of {load.block_count:,}", style="default")


def human_count(number: int) -> str:
    """1536 -> '1.5 thousand'."""
    for size, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= size:
            return f"{number / size:.1f} {name}"
    return str(number)


def human_duration(duration_s: float) -> str:
    """3725 -> '1 h 2 min'."""
    whole_s = int(duration_s)
    for size_s, name, rest_s, rest_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole_s >= size_s:
            return f"{whole_s // size_s} {name} {whole_s % size_s // rest_s} {rest_name}"
    return f"{whole_s} s"

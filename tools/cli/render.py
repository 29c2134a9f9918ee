"""Renders a snapshot of a cluster for a terminal, as a `rich` renderable."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ballast.client import ClusterStatus, WorkerStatus
from ballast.common.errors import InvariantViolation
from ballast.common.load import MemoryReport
from ballast.common.units import human_bytes, human_count, human_duration
from tools.cli.groups import load_table, plain_table
from tools.cli.history import DemandHistory
from tools.cli.looks import DispatcherFacts, Look


def render_status(
    look: Look,
    tokens_per_s: Mapping[str, float] | None = None,
    history: DemandHistory | None = None,
    harvest_per_s: Mapping[str, float] | None = None,
) -> RenderableType:
    """The whole status page. `tokens_per_s`: generated tokens per second, by group leader. `history`: KV demand over
    time. `harvest_per_s`: tokens per second computed for offline requests, by group leader.
    """
    status = look.status
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for dispatcher in look.dispatchers:
        facts.add_row(*_dispatcher_line(dispatcher))
    for line in (_model_line, _layout_line, _backlog_line, _endings_line):
        facts.add_row(*line(status))
    if (offline := _offline_line(status, harvest_per_s)) is not None:
        facts.add_row(*offline)
    if callers := sorted(status.waiting_by_caller.items(), key=lambda item: -item[1]):
        facts.add_row(*_line("waiting", *(f"{count:,} of {caller or 'one caller'}" for caller, count in callers)))
    for worker_id, why in sorted(status.kept_out.items()):
        facts.add_row(*_line("kept out", Text(f"{worker_id}: {why}", style="yellow")))
    if not status.workers:
        return Group(facts, Text("\nno workers yet: start one, or see `ballast doctor`", style="yellow"))
    parts: list[RenderableType] = [facts, Text(), load_table(status, tokens_per_s)]
    if history is not None:
        parts += [Text(), history.table(status)]
    return Group(*parts, Text(), _memory_table(status.workers))


def _line(label: str, *parts: str | Text) -> tuple[str, Text]:
    return label, Text(" · ", style="dim").join(Text(part) if isinstance(part, str) else part for part in parts)


def _dispatcher_line(status: DispatcherFacts) -> tuple[str, Text]:
    if status.error:
        return _line("dispatcher", status.address, Text(status.error, style="red"))
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
        return _line("model", "unknown until the first worker joins")
    kind = f" in {model.kv_cache_dtype}" if model.kv_cache_dtype else ""
    return _line(
        "model",
        model.name,
        model.architecture,
        f"{model.layer_count} layers",
        f"{human_count(model.parameter_count)} parameters",
        model.dtype,
        f"up to {model.max_model_len:,} tokens",
        f"{human_bytes(model.kv_bytes_per_token)} of KV per token{kind}",
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


def _offline_line(status: ClusterStatus, tokens_per_s: Mapping[str, float] | None) -> tuple[str, Text] | None:
    """The line about offline requests; None if there have never been any."""
    loads = [worker.load for worker in status.workers if worker.load is not None]
    running = sum(load.offline_running_count for load in loads)
    waiting = status.offline_queued_count + sum(load.offline_waiting_count for load in loads)
    done = sum(load.offline_tokens_total for load in loads)
    if not (running or waiting or done):
        return None
    rate = "" if tokens_per_s is None else f", {sum(tokens_per_s.values()):,.0f} tokens/s"
    yields, lost = (
        sum(load.offline_yields_total for load in loads),
        sum(load.offline_lost_tokens_total for load in loads),
    )
    gave_way = [f"{yields:,} preemptions, {lost / max(1, done):.1%} recomputed"] if yields else []
    return _line("offline", f"{running:,} running", f"{waiting:,} waiting", f"{done:,} tokens{rate}", *gave_way)


def _endings_line(status: ClusterStatus) -> tuple[str, Text]:
    endings = [f"{count:,} {ending}" for ending, count in status.requests_total.items() if count]
    return _line("ended", *(endings or ["no request yet"]))


def _memory_table(workers: Sequence[WorkerStatus]) -> Table:
    """Table of device memory, with a check of its sum: parameters + KV + free = budget."""
    table = plain_table("device memory")
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


def _verdict(memory: MemoryReport) -> Text:
    try:
        memory.check()
    except InvariantViolation:
        sum_bytes = memory.parameter_bytes + memory.kv_bytes + memory.free_bytes
        return Text(f"does not add up: {sum_bytes - memory.budget_bytes:+,} B", style="bold red")
    return Text("adds up", style="dim")

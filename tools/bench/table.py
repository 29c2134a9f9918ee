"""Renders a result as terminal tables, each figure with its unit."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ballast.common.units import duration, human_bytes, share
from tools.bench.results import BenchResult, PolicyResult, Summary

_LATENCIES = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("ITL", "itl_s"), ("e2e", "e2e_s"), ("send lag", "send_lag_s"))
_COLUMNS = ("mean", "p50", "p90", "p99", "p999")
_SHOWN_SCALES = (2, 5, 10)


def render(result: BenchResult) -> RenderableType:
    parts: list[RenderableType] = [Text(_headline(result), style="bold")]
    for name, policy in result.policies.items():
        parts += [_latency_table(name, policy, measured=result.kind != "sim"), *(Text(line) for line in _facts(policy))]
    if not result.complete:
        parts.append(Text("interrupted: the figures cover what was seen until then", style="bold yellow"))
    return Group(*parts)


def _headline(result: BenchResult) -> str:
    trace = result.trace
    cut = f", {trace.clamped_count} cut to the maximum length" if trace.clamped_count else ""
    return f"{trace.source}: {trace.request_count} requests over {trace.span_s:.1f} s ({trace.describe_scales()}{cut})"


def _latency_table(name: str, policy: PolicyResult, *, measured: bool) -> Table:
    table = Table(title=f"overload policy: {name}", title_justify="left")
    table.add_column("")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for label, field in _LATENCIES if measured else _LATENCIES[:-1]:  # in virtual time there is no send lag
        summary: Summary = getattr(policy, field)
        table.add_row(label, *(duration(getattr(summary, column)) for column in _COLUMNS))
    return table


def _facts(policy: PolicyResult) -> list[str]:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in policy.outcomes.items() if count)
    rate = policy.throughput_tokens_per_s
    peak_demand = max(policy.series.kv_demand_bytes, default=None)
    capacity = max(policy.series.kv_capacity_bytes, default=None)
    violations = ", ".join(f"x{scale}: {share(policy.slo_violation_fraction[scale])}" for scale in _SHOWN_SCALES)
    lines = [
        f"requests       {outcomes} in {policy.duration_s:.1f} s",
        f"throughput     {'-' if rate is None else f'{rate:,.0f}'} output tokens/s"
        f" ({policy.output_token_count:,} output, {policy.input_token_count:,} input tokens)",
        f"KV at its peak {_bytes(peak_demand)} wanted of {_bytes(capacity)}",
        f"over the SLO   {violations} (multiples of the median of {_reference(policy)})",
    ]
    if policy.offline_token_count is not None:
        per_s = policy.offline_token_count / policy.duration_s
        lines.append(
            f"offline work   {policy.offline_token_count:,} tokens of prompts and answers, {per_s:,.0f} a second"
        )
    if policy.verified_count is not None:
        lines.append(
            f"verified       {policy.verified_count} answers: {policy.token_mismatches} differing tokens,"
            f" {policy.near_ties} near-ties"
        )
    return lines


def _reference(policy: PolicyResult) -> str:
    reference = policy.slo_reference
    return reference.policy + (", while memory sufficed" if reference.calm else "")


def _bytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else human_bytes(size_bytes)

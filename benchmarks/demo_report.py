"""The demo's table: two overload policies on the same trace, side by side.

    python -m benchmarks.demo_report out/demo/results.json [--quote docs/demo.md README.md]

The command prints the table as Markdown. With --quote it also replaces the text between two marks in these files by the
whole report or by its verdicts only.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ballast.common.errors import BallastError
from ballast.common.units import duration
from benchmarks.quoting import quote
from tools.bench.results import BenchResult, PolicyResult, read_result

_GOAL_TTFT_TIMES, _GOAL_TPOT_FRACTION = 10.0, 0.25
MARK, VERDICTS_MARK = "demo", "demo verdicts"


def compare(result: BenchResult) -> RenderableType:
    trace, policies = result.trace, result.policies
    headline = (
        f"{trace.source}: {trace.request_count} requests over {trace.span_s:.0f} s"
        f" (time x{trace.time_scale:g}, length x{trace.length_scale:g})"
    )
    table = Table()
    table.add_column("")
    for name in policies:
        table.add_column(name, justify="right")
    for label, cell in _ROWS:
        table.add_row(label, *map(cell, policies.values()))
    lines = [Text(line) for line in (*_transition_lines(result), *_verdicts(result))]
    return Group(Text(headline, style="bold"), table, *lines)


def markdown(result: BenchResult) -> str:
    """Markdown of the table, the verdicts, and the conditions of the measurement."""
    policies = result.policies
    head = ["", *policies]
    rows = [[label, *map(cell, policies.values())] for label, cell in _ROWS]
    lines = [head, ["---", *["---:"] * len(policies)], *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([table, "", verdicts(result)])


def verdicts(result: BenchResult) -> str:
    """Markdown of the verdicts and the conditions of the measurement."""
    machine = result.environment
    where = (
        f"{result.trace.request_count} requests over {result.trace.span_s:.0f} s (time x{result.trace.time_scale:g},"
        f" length x{result.trace.length_scale:g}); {machine.cpu}, {machine.core_count} cores, commit"
        f" {(machine.git_commit or 'unknown')[:7]}."
    )
    said = [f"- {line}" for line in _verdicts(result)]
    return "\n".join([*said, "", where])


def differing_answers(one: PolicyResult, other: PolicyResult) -> tuple[list[int], int]:
    """(indices of answers that differ, number of answers that both runs finished). Both runs have the same requests."""
    answers = {r.index: r.output_token_ids for r in one.requests if r.end_s is not None and not r.error}
    both = [r for r in other.requests if not r.error and r.index in answers]
    return [r.index for r in both if answers[r.index] != r.output_token_ids], len(both)


def _throughput(policy: PolicyResult) -> str:
    rate = policy.throughput_tokens_per_s
    return "-" if rate is None else f"{rate:,.0f} tokens/s"


def _transitions(policy: PolicyResult) -> str:
    kinds = [t.kind for t in policy.transitions if t.phase == "done"]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds) if kind}
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "0"


def _differing(policy: PolicyResult) -> str:
    if policy.verified_count is None:
        return "-"
    ties = f", {policy.near_ties} near-ties" if policy.near_ties else ""
    return f"{policy.token_mismatches} of {policy.verified_count} answers{ties}"


def _preemptions(policy: PolicyResult) -> str:
    return str(max(policy.series.preemptions_total, default=0))


_ROWS: tuple[tuple[str, Callable[[PolicyResult], str]], ...] = (
    ("TTFT p50", lambda p: duration(p.ttft_s.p50)),
    ("TTFT p99", lambda p: duration(p.ttft_s.p99)),
    ("TPOT p50", lambda p: duration(p.tpot_s.p50)),
    ("TPOT p99", lambda p: duration(p.tpot_s.p99)),
    ("throughput", _throughput),
    ("run", lambda p: duration(p.duration_s)),
    ("preemptions", _preemptions),
    ("transitions", _transitions),
    ("differing tokens", _differing),
)


def _transition_lines(result: BenchResult) -> list[str]:
    return [
        f"{t.at_s:6.1f} s  {t.kind}: {t.summary or t.phase}"
        for policy in result.policies.values()
        for t in policy.transitions
        if t.kind
    ]


def _verdicts(result: BenchResult) -> list[str]:
    if len(result.policies) < 2:
        return []
    before, after = list(result.policies.values())[:2]
    lines: list[str] = []
    if before.ttft_s.p99 and after.ttft_s.p99:
        times = before.ttft_s.p99 / after.ttft_s.p99
        goal = f"(goal: at least {_GOAL_TTFT_TIMES:g}"
        told = (
            f"{times:.1f} times better {goal})" if times >= 1.0 else f"{1 / times:.1f} times worse {goal} times better)"
        )
        lines.append(f"p99 TTFT {told}")
    if before.tpot_s.p50 and after.tpot_s.p50:
        worse = after.tpot_s.p50 / before.tpot_s.p50 - 1
        lines.append(f"p50 TPOT {worse:+.0%} (goal: at most {_GOAL_TPOT_FRACTION:+.0%})")
    demand, capacity = before.series.kv_demand_bytes, before.series.kv_capacity_bytes
    if demand and max(capacity):
        lines.append(f"average KV demand {_mean_share(after):.0%} of un-dropped capacity (with drop)")
    differ, count = differing_answers(before, after)
    wrong = [policy.token_mismatches for policy in (before, after)]
    why = ", where rounding to float32 decides between two tokens" if differ and wrong == [0, 0] else ""
    lines.append(f"{len(differ)} of {count} answers differ between the two runs{why}")
    return lines


def _mean_share(policy: PolicyResult) -> float:
    series = policy.series
    return sum(series.kv_demand_bytes) / len(series.kv_demand_bytes) / series.kv_capacity_bytes[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("--quote", type=Path, nargs="+", default=[], metavar="FILE.md")
    given = parser.parse_args(arguments)
    try:
        result = read_result(given.results)
        for page in given.quote:
            short = f"<!-- begin {VERDICTS_MARK}:" in page.read_text()
            quote(page, VERDICTS_MARK if short else MARK, verdicts(result) if short else markdown(result))
    except BallastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a comparison says, in sentences made from its figures: ours against the rivals, and against the paper."""

from collections.abc import Callable, Sequence
from statistics import median

from ballast.common.units import duration, share
from tools.bench.figures import EXTREME_SCALE
from tools.bench.plot import merged_spans
from tools.bench.results import PolicyResult
from tools.bench.study import Contestant, Spread, WorkloadStudy, first_violation_s

_SLO_SCALE = 5
_PLAIN, _STATIC = "recompute", "static-pipeline"

Figure = Callable[[PolicyResult], float | None]


def verdicts(workload: WorkloadStudy) -> list[str]:
    """Nothing where ours is missing; without rivals only for how long it has dropped parameters."""
    ours = next((c for c in workload.contestants if c.is_ours), None)
    rivals = [c for c in workload.contestants if not c.is_ours]
    if ours is None:
        return []
    if not rivals:
        return _dropped(workload.contestants)
    return [
        *_tail_latency(ours, rivals),
        *_token_time(ours, rivals),
        *_violations(workload, ours, rivals),
        *_throughput(workload.contestants),
        *_dropped(workload.contestants),
        *_restore(ours, workload.contestants),
        *(_first_violations(workload, ours) if workload.name.startswith("extreme-") else []),
    ]


def _middles(contestants: Sequence[Contestant], figure: Figure) -> dict[str, float]:
    """Medians over the repetitions by label, lowest first; who has none is left out."""
    found = {c.label: middle for c in contestants if (middle := c.spread(figure).middle)}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _tail_latency(ours: Contestant, rivals: Sequence[Contestant]) -> list[str]:
    p99_s, others_s = ours.spread(_ttft_p99_s).middle, _middles(rivals, _ttft_p99_s)
    if not p99_s or not others_s:
        return []
    lower = [f"{label} ({duration(at_s)})" for label, at_s in others_s.items() if at_s < p99_s]
    return [
        f"P99 TTFT of {ours.label} is {median(others_s.values()) / p99_s:.1f} times lower than the median rival's,"
        f" {min(others_s.values()) / p99_s:.1f} times lower than the best one's (KunServe reports 12.7 to 72.2 times).",
        _in_every_repetition(ours, rivals),
        f"Lower than its {duration(p99_s)}: {', '.join(lower) or 'nobody'}.",
    ]


def _in_every_repetition(ours: Contestant, rivals: Sequence[Contestant]) -> str:
    repetitions = min(len(c.runs) for c in (ours, *rivals))
    won = sum(
        all((ours.results[i].ttft_s.p99 or 0.0) < (c.results[i].ttft_s.p99 or 0.0) for c in rivals)
        for i in range(repetitions)
    )
    return f"It is the lowest of all in {won} of {repetitions} repetitions."


def _token_time(ours: Contestant, rivals: Sequence[Contestant]) -> list[str]:
    p50_s, others_s = ours.spread(_tpot_p50_s).middle, _middles(rivals, _tpot_p50_s)
    if not p50_s or not others_s:
        return []
    label, best_s = next(iter(others_s.items()))
    static_s = others_s.get(_STATIC)
    beside = "" if static_s is None else f", {p50_s / static_s - 1:+.1%} against that of {_STATIC}"
    return [
        f"P50 TPOT is {p50_s / best_s - 1:+.1%} against the best rival's, {label} (KunServe: up to +22.7 %){beside}."
    ]


def _violations(workload: WorkloadStudy, ours: Contestant, rivals: Sequence[Contestant]) -> list[str]:
    named = [ours, *(c for c in rivals if c.label in (_PLAIN, _STATIC))]
    shares = {c.label: workload.violations(c, _SLO_SCALE).middle for c in named}
    told = ", ".join(f"{share(part)} with {label}" for label, part in shares.items() if part is not None)
    return [f"Over {_SLO_SCALE} times the reference are {told}."] if told else []


def _throughput(contestants: Sequence[Contestant]) -> list[str]:
    rates = _middles([c for c in contestants if c.policy != _STATIC], _tokens_per_s)
    if len(rates) < 2:
        return []
    slowest, best = next(iter(rates.items())), max(rates.values())
    return [f"Of those without a static pipeline {slowest[0]} has the lowest throughput: {slowest[1] / best - 1:+.1%}."]


def _dropped(contestants: Sequence[Contestant]) -> list[str]:
    """Requests outside that time are served as if nothing had been dropped: what restoring early is worth."""
    lines: list[str] = []
    for c in contestants:
        spent, came = c.spread(_dropped_s), c.spread(_share_while_dropped)
        whole_s = c.spread(lambda result: result.duration_s).middle
        if c.is_ours and spent.middle:
            lines.append(
                f"With {c.label} parameters are dropped for {_range(spent, duration)} of {duration(whole_s)};"
                f" {_range(came, share)} of the requests come then."
            )
    return lines


def _range(spread: Spread, text: Callable[[float | None], str]) -> str:
    among = f" ({text(spread.low)} to {text(spread.high)})" if spread.count > 1 else ""
    return f"{text(spread.middle)}{among}"


def _dropped_s(result: PolicyResult) -> float:
    return sum(end_s - begin_s for begin_s, end_s, _ in merged_spans(result))


def _share_while_dropped(result: PolicyResult) -> float | None:
    spans = merged_spans(result)
    came = sum(any(begin_s <= r.planned_s < end_s for begin_s, end_s, _ in spans) for r in result.requests)
    return came / len(result.requests) if result.requests else None


def _restore(ours: Contestant, contestants: Sequence[Contestant]) -> list[str]:
    """Ours is the one that comes first; beside it there may be one that never restores."""
    without = next((c for c in contestants if c.is_ours and _never_restores(c)), None)
    if without is None or _never_restores(ours):
        return []
    saved: list[str] = []
    for what, figure in (("TTFT", _ttft_p50_s), ("TPOT", _tpot_p50_s)):
        kept_s, never_s = ours.spread(figure).middle, without.spread(figure).middle
        if kept_s and never_s:
            saved.append(f"P50 {what} by {kept_s / never_s - 1:+.1%}{_within_repetitions(ours, without, figure)}")
    return [f"Restoring changes {' and '.join(saved)} (KunServe: -28 % and -23 %)."] if saved else []


def _within_repetitions(one: Contestant, other: Contestant, figure: Figure) -> str:
    """From the least to the most; a machine's speed may differ more between repetitions than the two do."""
    figures = [(figure(a), figure(b)) for a, b in zip(one.results, other.results, strict=False)]
    changes = sorted(a_s / b_s - 1 for a_s, b_s in figures if a_s and b_s)
    return f" ({changes[0]:+.1%} to {changes[-1]:+.1%} within repetitions)" if len(changes) > 1 else ""


def _never_restores(c: Contestant) -> bool:
    facts = c.runs[0].comparison
    return facts is not None and facts.knobs.get("restore") == "off"


def _first_violations(workload: WorkloadStudy, ours: Contestant) -> list[str]:
    """A run without any counts as one whose first is after its last arrival."""

    def until_s(result: PolicyResult) -> float:
        found_s = first_violation_s(result, workload.reference, EXTREME_SCALE)
        return workload.sample.trace.span_s if found_s is None else found_s

    lines: list[str] = []
    times_s: dict[str, float] = {}
    for c in workload.contestants:
        none = sum(first_violation_s(r, workload.reference, EXTREME_SCALE) is None for r in c.results)
        middle_s = Spread.of([until_s(r) for r in c.results]).middle
        if middle_s is None:
            continue
        times_s[c.label] = middle_s
        but = f", in {none} of {len(c.runs)} runs none at all" if none else ""
        lines.append(f"{c.label}: first TTFT over {EXTREME_SCALE:g} times the reference after {middle_s:.1f} s{but}.")
    if ours.label in times_s and times_s.get(_PLAIN):
        lines.append(f"{ours.label} holds out {times_s[ours.label] / times_s[_PLAIN]:.2f} times as long as {_PLAIN}.")
    return lines


def _ttft_p99_s(result: PolicyResult) -> float | None:
    return result.ttft_s.p99


def _ttft_p50_s(result: PolicyResult) -> float | None:
    return result.ttft_s.p50


def _tpot_p50_s(result: PolicyResult) -> float | None:
    return result.tpot_s.p50


def _tokens_per_s(result: PolicyResult) -> float | None:
    return result.throughput_tokens_per_s

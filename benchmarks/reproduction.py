"""The papers' figures beside those of a simulation: what is compared, and how each figure is taken from results.

Every figure of a paper is a range as the paper states it; a single value is a range of one. The ratio is the simulated
figure over the nearest end of that range, and 1 inside of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tools.bench.results import SLO_SCALES, BenchResult, PolicyResult

_PLAIN, _OURS, _STATIC = "recompute", "drop", "static-pipeline"
_WITHIN = 1.5
BURST_AT_S = 45.0  # in all scenarios


@dataclass(frozen=True, slots=True)
class Claim:
    """One line of the table."""

    figure: str
    what: str
    workload: str
    low: float
    high: float
    unit: str  # "x", "%", "points" or "s"
    measure: Callable[[BenchResult], float | None]


@dataclass(frozen=True, slots=True)
class Line:
    claim: Claim
    simulated: float | None  # None: there was nothing to measure

    @property
    def ratio(self) -> float | None:
        claim, value = self.claim, self.simulated
        if value is None:
            return None
        if claim.low <= value <= claim.high:
            return 1.0
        nearest = claim.low if value < claim.low else claim.high
        return value / nearest if nearest else math.inf

    @property
    def within(self) -> bool:
        return self.ratio is not None and 1.0 / _WITHIN <= self.ratio <= _WITHIN


def lines_of(results: Mapping[str, BenchResult]) -> list[Line]:
    """Lines of the workloads that have been simulated."""
    return [Line(claim, claim.measure(results[claim.workload])) for claim in CLAIMS if claim.workload in results]


def table(lines: Sequence[Line]) -> str:
    """Markdown."""
    rows = ["| figure | what | workload | paper | simulated | ratio | within 1.5 x |", "|---|---|---|---|---|---|---|"]
    for line in lines:
        claim = line.claim
        paper = _figure(claim.low, claim.unit)
        if claim.high != claim.low:
            paper = f"{_figure(claim.low, '')} to {_figure(claim.high, claim.unit)}"
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
        rows.append(
            f"| {claim.figure} | {claim.what} | {claim.workload} | {paper} | {_figure(line.simulated, claim.unit)} |"
            f" {ratio} | {'yes' if line.within else 'no'} |"
        )
    return "\n".join(rows)


def regime(results: Mapping[str, BenchResult]) -> str:
    """Under what load the figures were taken, in Markdown: a cluster that computes all the time cannot use memory."""
    rows = [
        "| workload (prompts' share of the densest half minute) | policy | mean KV demand | peak | P50 / P99 TTFT (s) |"
        " P50 / P99 TPOT (ms) | bubbles | drops | recomputed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for workload, result in results.items():
        prompts = result.config.cluster.get("prompt_share")
        told = f"{workload} ({prompts:.0%})" if isinstance(prompts, float) else workload
        for name, policy in result.policies.items():
            demand = _demand(result, policy)
            bubbles = "-" if policy.bubble_fraction is None else f"{policy.bubble_fraction:.1%}"
            drops = sum(t.kind == "drop" and t.phase == "done" for t in policy.transitions)
            recomputed = sum(t.victims_recomputed or 0 for t in policy.transitions)
            rows.append(
                f"| {told} | {name} | {fmean(demand):.0%} | {max(demand):.0%} |"
                f" {_plain(policy.ttft_s.p50)} / {_plain(policy.ttft_s.p99)} |"
                f" {_plain(policy.tpot_s.p50, 1e3)} / {_plain(policy.tpot_s.p99, 1e3)} | {bubbles} | {drops} |"
                f" {recomputed} |"
            )
    return "\n".join(rows)


def _plain(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value * unit:,.3g}"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    shown = f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{shown} {unit}".rstrip()


# ---------------------------------------------------------------- how a figure is taken


def _over(result: BenchResult, ours: str, theirs: str, of: Callable[[PolicyResult], float | None]) -> float | None:
    """Theirs in units of ours."""
    if ours not in result.policies or theirs not in result.policies:
        return None
    mine, other = of(result.policies[ours]), of(result.policies[theirs])
    return other / mine if mine and other is not None else None


def _gain(rival: str, ours: str = _OURS) -> Callable[[BenchResult], float | None]:
    return lambda result: _over(result, ours, rival, lambda p: p.ttft_s.p99)


def _change(of: Callable[[PolicyResult], float | None], new: str, old: str) -> Callable[[BenchResult], float | None]:
    """The change in percent: above 0 when the new one is larger."""

    def measure(result: BenchResult) -> float | None:
        ratio = _over(result, old, new, of)
        return None if ratio is None else 100.0 * (ratio - 1.0)

    return measure


def _less(of: Callable[[PolicyResult], float | None], new: str, old: str) -> Callable[[BenchResult], float | None]:
    change = _change(of, new, old)

    def measure(result: BenchResult) -> float | None:
        value = change(result)
        return None if value is None else -value

    return measure


def _violations(result: BenchResult) -> float | None:
    """Percentage points by which fewer requests violate the SLO, on average over scales and rivals."""
    ours = result.policies.get(_OURS)
    rivals = [policy for name, policy in result.policies.items() if not name.startswith(_OURS)]
    if ours is None or not rivals:
        return None

    def share(policy: PolicyResult) -> float:
        return fmean(policy.slo_violation_fraction[scale] or 0.0 for scale in SLO_SCALES)

    return 100.0 * (fmean(share(rival) for rival in rivals) - share(ours))


def _throughput(result: BenchResult, policy: PolicyResult) -> float | None:
    """Tokens per second while requests arrive: afterwards everybody only empties what is left."""
    span_s = result.trace.span_s
    count = 0
    for request in policy.requests:
        begin_s, end_s = request.first_token_s, request.end_s
        if begin_s is None or end_s is None:
            continue
        if end_s <= span_s:
            count += request.output_tokens
        elif begin_s < span_s:
            share = (span_s - begin_s) / (end_s - begin_s)
            count += round(request.output_tokens * share)
    return count / span_s if span_s else None


def _pipeline_loss(result: BenchResult) -> float | None:
    rivals = [name for name in result.policies if not name.startswith(_STATIC)]
    if _STATIC not in result.policies or not rivals:
        return None
    static = _throughput(result, result.policies[_STATIC])
    others = [_throughput(result, result.policies[name]) for name in rivals]
    known = [value for value in others if value]
    return 100.0 * (1.0 - static / fmean(known)) if known and static is not None else None


def _bubbles(name: str) -> Callable[[BenchResult], float | None]:
    def measure(result: BenchResult) -> float | None:
        fraction = result.policies[name].bubble_fraction if name in result.policies else None
        return None if fraction is None else 100.0 * fraction

    return measure


def _demand(result: BenchResult, policy: PolicyResult) -> list[float]:
    """KV demand over the memory there is with all parameters, until the last arrival."""
    capacity = min(p.series.kv_capacity_bytes[0] for p in result.policies.values())
    span_s = result.trace.span_s
    pairs = zip(policy.series.at_s, policy.series.kv_demand_bytes, strict=True)
    return [wanted / capacity for at_s, wanted in pairs if at_s <= span_s] or [0.0]


def _full_s(policy: PolicyResult) -> float | None:
    """From the burst's beginning until more KV is wanted for the first time than there ever is, whatever is dropped."""
    series = policy.series
    most = max(series.kv_capacity_bytes)
    pairs = zip(series.at_s, series.kv_demand_bytes, strict=True)
    return next((at_s - BURST_AT_S for at_s, wanted in pairs if wanted > most), None)


def _stands(result: BenchResult) -> float | None:
    return _over(result, _PLAIN, _OURS, _full_s)


def _freed(result: BenchResult) -> float | None:
    ours = result.policies.get(_OURS)
    return None if ours is None else 100.0 * (max(ours.series.kv_capacity_bytes) / ours.series.kv_capacity_bytes[0] - 1)


def _spike(name: str) -> Callable[[BenchResult], float | None]:
    def measure(result: BenchResult) -> float | None:
        ttft = result.policies[name].ttft_s if name in result.policies else None
        return ttft.max / ttft.p50 if ttft is not None and ttft.max is not None and ttft.p50 else None

    return measure


def _p50_ttft(policy: PolicyResult) -> float | None:
    return policy.ttft_s.p50


def _p50_tpot(policy: PolicyResult) -> float | None:
    return policy.tpot_s.p50


def _p99_tpot(policy: PolicyResult) -> float | None:
    return policy.tpot_s.p99


_RIVALS = ((_PLAIN, "vLLM"), ("swap", "InferCept"), (_STATIC, "vLLM with pipelines"), ("migrate", "Llumnix"))
_SMALL = ("burstgpt-14b", "sharegpt-14b", "longbench-14b")
_BARE, _COORDINATED, _WHOLE = "dynamic drop", "coordinated exchange", "lookahead"
_STAYS = "drop:restore=off"

CLAIMS: tuple[Claim, ...] = (
    Claim("2", "longest TTFT over the median, recompute", "long-14b", 239, 239, "x", _spike(_PLAIN)),
    Claim("2", "longest TTFT over the median, swap", "long-14b", 92, 92, "x", _spike("swap")),
    *(
        Claim("13", f"P99 TTFT gain over {name} ({rival})", workload, 12.7, 72.2, "x", _gain(rival))
        for workload in _SMALL
        for rival, name in _RIVALS
    ),
    *(
        Claim("13", f"P99 TTFT gain over {name} ({rival})", "longbench-72b", 8.4, 11.9, "x", _gain(rival))
        for rival, name in _RIVALS
    ),
    *(
        Claim("13", f"P50 TPOT above {name}", "longbench-14b", 15.8, 22.7, "%", _change(_p50_tpot, _OURS, rival))
        for rival, name in _RIVALS[:2]
    ),
    *(
        Claim("13", f"P50 TPOT above {name}", "longbench-72b", 18.3, 22.7, "%", _change(_p50_tpot, _OURS, rival))
        for rival, name in _RIVALS[:2]
    ),
    *(
        Claim("13", "fewer SLO violations", workload, 7.2, 12.8, "points", _violations)
        for workload in (*_SMALL, "longbench-72b")
    ),
    *(
        Claim("12", "throughput that static pipelines lose", workload, 3.3, 21.8, "%", _pipeline_loss)
        for workload in (*_SMALL, "longbench-72b")
    ),
    Claim("14", "P99 TTFT gain by dropping alone", "ablation-14b", 11.7, 11.7, "x", _gain(_PLAIN, _BARE)),
    Claim("14", "P99 TTFT gain by coordination", "ablation-14b", 1.5, 1.5, "x", _gain(_BARE, _COORDINATED)),
    Claim("14", "P99 TPOT less by lookahead", "ablation-14b", 10.6, 10.6, "%", _less(_p99_tpot, _WHOLE, _COORDINATED)),
    Claim("14", "bubbles without lookahead", "ablation-14b", 21.9, 21.9, "%", _bubbles(_COORDINATED)),
    Claim("14", "bubbles with lookahead", "ablation-14b", 8.3, 8.3, "%", _bubbles(_WHOLE)),
    Claim("16", "P50 TTFT less with restore", "long-14b", 28, 28, "%", _less(_p50_ttft, _OURS, _STAYS)),
    Claim("16", "P50 TPOT less with restore", "long-14b", 23, 23, "%", _less(_p50_tpot, _OURS, _STAYS)),
    Claim("16", "P99 TTFT gain by restore", "long-14b", 6.4, 6.4, "x", _gain(_STAYS)),
    Claim("17", "time from the burst until memory is full", "extreme-72b", 1.5, 1.5, "x", _stands),
    Claim("17", "KV memory that drops add", "extreme-72b", 57, 57, "%", _freed),
)

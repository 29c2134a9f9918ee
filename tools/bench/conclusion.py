"""The conclusion of a comparison of policies, as one paragraph."""

import math

from ballast.common.units import counted, duration, human_bytes, share
from tools.bench.records import RequestOutcome
from tools.bench.results import BenchResult, PolicyResult
from tools.bench.shortage import in_words, is_memory_short, shortage
from tools.bench.slo import LENIENT, Slo

_PLAIN = "recompute"  # baseline
_ALIKE = 1.1  # figures within this factor are called equal
_UNSERVED = (RequestOutcome.REFUSED, RequestOutcome.FAILED, RequestOutcome.DEADLINE)
_BEARABLE_TPOT = 1.25  # a TPOT worse by more than this factor is reported as the cost of dropping


def conclude(result: BenchResult, slo: Slo = LENIENT) -> str:
    """The conclusion, from the figures of `result` only. `slo`: the goal by which drop is judged."""
    drop = result.policies.get("drop")
    others = {name: policy for name, policy in result.policies.items() if name != "drop"}
    sentences = [_demand(result), _unserved(result)]
    if drop is not None:
        sentences.append(_drops(drop))
    if drop is not None and others:
        plain = _plain(result)
        sentences += [_latency(drop, name, others[name]) for name in (plain, *(n for n in others if n != plain))]
        sentences += [_price(drop, plain, others[plain]), _advice(result, drop, plain, slo)]
    return " ".join(sentence for sentence in sentences if sentence)


def _plain(result: BenchResult) -> str:
    """Name of the baseline: recompute if it was run, because it differs only in not dropping; otherwise another policy,
    or drop if no other was run.
    """
    names = [_PLAIN, *(name for name in result.policies if name != "drop"), *result.policies]
    return next(name for name in names if name in result.policies)


def _demand(result: BenchResult) -> str:
    name = _plain(result)
    policy = result.policies[name]
    series = policy.series
    capacity = series.kv_capacity_bytes[0] if series.kv_capacity_bytes else 0
    if not capacity:
        return "The run was too short to see how much memory was wanted."
    peak = max(series.kv_demand_bytes) / capacity
    short_s = sum(demand > capacity for demand in series.kv_demand_bytes) * _interval_s(policy)
    if not short_s:
        return f"The KV cache is never short: at its peak the trace wants {peak:.0%} of it."
    return (
        f"With {name} the requests want up to {peak:.0%} of the KV cache, and more than there is for {short_s:.0f} s."
    )


def _unserved(result: BenchResult) -> str:
    """A sentence with the requests that were not answered, per policy. Latencies leave out those without a token."""
    counts = {
        name: sum(policy.outcomes.get(outcome, 0) for outcome in _UNSERVED) for name, policy in result.policies.items()
    }
    told = [
        f"{count} of {counted(result.policies[name].request_count, 'request')} with {name}"
        for name, count in counts.items()
        if count
    ]
    return f"Refused, failed or out of time, and left out of latencies: {', '.join(told)}." if told else ""


def _interval_s(policy: PolicyResult) -> float:
    at_s = policy.series.at_s
    return (at_s[-1] - at_s[0]) / (len(at_s) - 1) if len(at_s) > 1 else 0.0


def _drops(drop: PolicyResult) -> str:
    done = [t.kind for t in drop.transitions if t.phase == "done"]
    count, restores = done.count("drop"), done.count("restore")
    if not count:
        return "Nothing has to be dropped."
    freed = sum(t.freed_parameter_bytes or 0 for t in drop.transitions if t.kind == "drop")
    times = "once" if count == 1 else f"{count} times"
    back = (
        "they do not come back before the end" if not restores else f"they come back ({counted(restores, 'restore')})"
    )
    return f"Ballast drops parameters {times}, {human_bytes(freed)} in all, and {back}."


def _latency(drop: PolicyResult, name: str, other: PolicyResult) -> str:
    ours, theirs = drop.ttft_s.p99, other.ttft_s.p99
    if not ours or not theirs:
        return ""
    times = f"{duration(ours)} against {duration(theirs)} with {name}"
    if theirs > ours * _ALIKE:
        return f"The p99 of the time to the first token is {theirs / ours:.1f} times better: {times}."
    if ours > theirs * _ALIKE:
        return f"The p99 of the time to the first token is {ours / theirs:.1f} times worse: {times}."
    return f"The p99 of the time to the first token is about the same: {times}."


def _price(drop: PolicyResult, name: str, other: PolicyResult) -> str:
    ours, theirs = drop.tpot_s.p50, other.tpot_s.p50
    if not ours or not theirs:
        return ""
    change = ours / theirs - 1.0
    if abs(change) < 0.005:
        return f"The median time per output token is that with {name}, {duration(ours)}."
    return f"Compared with {name} the median time per output token changes by {change:+.0%} to {duration(ours)}."


def _advice(result: BenchResult, drop: PolicyResult, name: str, slo: Slo) -> str:
    """Whether dropping helps to meet the goal, and which resource is scarce if the goal is missed."""
    other = result.policies[name]
    ours, theirs = slo.met_share(drop), slo.met_share(other)
    keeps, other_keeps = ours >= slo.share, theirs >= slo.share
    dropped = any(t.kind == "drop" for t in drop.transitions)
    goal = f"The goal is that {slo}: {share(ours)} do with drop, {share(theirs)} with {name}."
    short = in_words(result, shortage(result, "drop"))
    if not dropped and (keeps or not is_memory_short(other)):
        enough = "This cluster has enough memory for this trace."
        return enough if keeps else " ".join([goal, enough, short, _size(result, drop, other)])
    if not (keeps or other_keeps):
        small = "This cluster is too small for this trace, whatever the policy."
        return " ".join([goal, small, short, _size(result, drop, other)])
    if other_keeps and not keeps:
        return " ".join([goal, "Dropping parameters is not worth it here.", short])
    better, worse = (drop.ttft_s.p99 or 0.0), (other.ttft_s.p99 or 0.0)
    if not other_keeps or worse > better * _ALIKE:
        return f"{goal} {_worth(drop, other)}"
    if better > worse * _ALIKE:
        return f"{goal} Dropping parameters gains nothing here: the goal is kept without it, and sooner."
    return f"{goal} Dropping parameters neither helps nor harms here."


def _size(result: BenchResult, drop: PolicyResult, other: PolicyResult) -> str:
    """A sentence with the number of GPUs that this load needs: the present number, times the ratio of the faster run's
    duration to the trace's.
    """
    gpus, span_s = result.config.cluster.get("gpu_count"), result.trace.span_s
    if not isinstance(gpus, int) or span_s <= 0.0:
        return ""
    least = math.ceil(gpus * max(1.0, min(drop.duration_s, other.duration_s) / span_s))
    return f"It takes about {max(least, gpus + 1)} GPUs or more; `ballast size` tells how many."


def _worth(drop: PolicyResult, other: PolicyResult) -> str:
    ours, theirs = drop.tpot_s.p50, other.tpot_s.p50
    if ours and theirs and ours > theirs * _BEARABLE_TPOT:
        return (
            "Dropping parameters is worth it here at a price: the first token comes sooner, and each further one takes"
            f" {ours / theirs:.1f} times as long ({duration(ours)} instead of {duration(theirs)})."
        )
    return "Dropping parameters is worth it here."

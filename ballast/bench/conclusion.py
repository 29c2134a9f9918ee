"""What a comparison says, in one paragraph for somebody who has not read the table."""

import math

from ballast.bench.records import Outcome
from ballast.bench.results import BenchResult, PolicyResult
from ballast.common.units import counted, duration, human_bytes, share

_PLAIN = "recompute"
_LONG_WAIT = 5.0  # p99 of the time to the first token, of its median
_ALIKE = 1.1  # two figures within this factor are called equal
_GOOD_TTFT_S = 2.0  # a first token later than this is late
_BEARABLE_SHARE = 0.9  # of requests in time; below it with both policies a cluster is too small
_BEARABLE_TPOT = 1.25  # times as long per token; more is a price to be named


def conclude(result: BenchResult) -> str:
    """Words for what the figures say; no figure that is not in the result."""
    drop = result.policies.get("drop")
    others = {name: policy for name, policy in result.policies.items() if name != "drop"}
    sentences = [_demand(result)]
    if drop is not None:
        sentences.append(_drops(drop))
    if drop is not None and others:
        plain = _plain(result)
        sentences += [_latency(drop, name, others[name]) for name in (plain, *(n for n in others if n != plain))]
        sentences += [_price(drop, plain, others[plain]), _advice(result, drop, others[plain])]
    return " ".join(sentence for sentence in sentences if sentence)


def _plain(result: BenchResult) -> str:
    """The policy that drop differs from in dropping alone; else another one; else itself."""
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


def _advice(result: BenchResult, drop: PolicyResult, other: PolicyResult) -> str:
    """More memory that does not shorten the wait says that something else is short, and there is only one other."""
    ours, theirs = drop.ttft_s.p99 or 0.0, other.ttft_s.p99 or 0.0
    if not any(t.kind == "drop" for t in drop.transitions):
        return f"This cluster has enough memory for this trace.{_waits_for_computing(result, other)}"
    if max(_met(drop), _met(other)) < _BEARABLE_SHARE:
        return _too_small(result, drop, other)
    if theirs > ours * _ALIKE:
        return _worth(drop, other)
    if ours > theirs * _ALIKE:
        return (
            "What is short here is computing and not memory: with more KV cache the requests do not wait less, and a"
            " pipeline wastes a part of the GPUs' time. More GPUs help, dropping parameters does not."
        )
    return "Dropping parameters neither helps nor harms here."


def _met(policy: PolicyResult) -> float:
    """Share of all requests that finished and got their first token in good time."""
    waits = [
        request.first_token_s is not None
        and request.outcome is Outcome.FINISHED
        and request.first_token_s - request.planned_s <= _GOOD_TTFT_S
        for request in policy.requests
    ]
    return sum(waits) / len(waits) if waits else 1.0


def _too_small(result: BenchResult, drop: PolicyResult, other: PolicyResult) -> str:
    """The size is what would do the same work while the trace lasts, computing at the pace of the quicker run."""
    told = (
        f"This cluster is too small for this trace, whatever the policy: {share(_met(drop))} of the requests get their"
        f" first token within {duration(_GOOD_TTFT_S)} with drop, {share(_met(other))} without."
    )
    gpus = result.config.cluster.get("gpu_count")
    span_s = result.trace.span_s
    if not isinstance(gpus, int) or span_s <= 0.0:
        return told
    least = math.ceil(gpus * max(1.0, min(drop.duration_s, other.duration_s) / span_s))
    return f"{told} It takes about {max(least, gpus + 1)} GPUs or more; `ballast sim --find-gpus` tells how many."


def _worth(drop: PolicyResult, other: PolicyResult) -> str:
    ours, theirs = drop.tpot_s.p50, other.tpot_s.p50
    if ours and theirs and ours > theirs * _BEARABLE_TPOT:
        return (
            "Dropping parameters is worth it here at a price: the first token comes sooner, and each further one takes"
            f" {ours / theirs:.1f} times as long ({duration(ours)} instead of {duration(theirs)})."
        )
    return "Dropping parameters is worth it here."


def _waits_for_computing(result: BenchResult, other: PolicyResult) -> str:
    """What else makes requests wait that much longer at some times than at others."""
    p50, p99 = other.ttft_s.p50, other.ttft_s.p99
    busy = result.config.cluster.get(f"{_plain(result)}.busy_fraction")
    if not p50 or not p99 or p99 < _LONG_WAIT * p50 or not isinstance(busy, float):
        return ""
    return (
        f" Requests wait for computing: at the worst times {p99 / p50:.0f} times as long as the median for the first"
        f" token, with GPUs that compute {busy:.0%} of the time. More or faster GPUs shorten that."
    )

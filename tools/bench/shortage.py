"""Determines from a run's result which resource its requests waited for."""

from enum import StrEnum

from tools.bench.results import BenchResult, PolicyResult

COMPUTING_SHARE = 0.85  # compute is scarce if prefills take more than this share of the busiest half minute
_MOSTLY = 0.5  # fraction of the waiting time that counts as most of it
_FULL, _FREE = 0.95, 0.9


class Shortage(StrEnum):
    MEMORY = "memory"
    COMPUTING = "computing"
    READING = "reading of KV"
    PLACES = "places"
    PLACEMENT = "placement"  # no resource is scarce: requests wait on full instances while others have room


def shortage(result: BenchResult, name: str) -> Shortage | None:
    """The resource that the requests of policy `name` waited for; None if no resource was found."""
    policy, cluster = result.policies[name], result.config.cluster
    stranded, prompts = cluster.get(f"{name}.stranded_fraction"), cluster.get("prompt_share")
    if isinstance(stranded, float) and stranded > _MOSTLY:
        return Shortage.PLACEMENT
    most = cluster.get("max_num_seqs")
    if isinstance(most, int) and _waits_for_places(policy, most):
        return Shortage.PLACES
    if isinstance(prompts, float) and prompts > COMPUTING_SHARE:
        return Shortage.COMPUTING
    if cluster.get("reading_is_short") is True:
        return Shortage.READING
    return Shortage.MEMORY if is_memory_short(policy) else None


def is_memory_short(policy: PolicyResult) -> bool:
    """True if KV demand has exceeded the KV capacity at the start."""
    series = policy.series
    return bool(series.kv_capacity_bytes) and max(series.kv_demand_bytes) > series.kv_capacity_bytes[0]


def _waits_for_places(policy: PolicyResult, most: int) -> bool:
    series = policy.series
    columns = zip(
        series.waiting_count,
        series.running_count,
        series.group_sizes,
        series.kv_used_bytes,
        series.kv_capacity_bytes,
        strict=False,
    )
    waiting = full = 0
    for count, running, groups, used, capacity in columns:
        if count:
            waiting += 1
            full += running >= _FULL * most * len(groups) and used < _FREE * capacity
    return waiting > 0 and full > _MOSTLY * waiting


def in_words(result: BenchResult, short: Shortage | None) -> str:
    match short:
        case None:
            return ""
        case Shortage.MEMORY:
            return "What is short is memory."
        case Shortage.COMPUTING:
            prompts = result.config.cluster.get("prompt_share")
            taken = f"prompts take {prompts:.0%} of the GPUs' time in the densest half minute"
            return f"What is short is computing: {taken}. More or faster GPUs help, a larger KV cache does not."
        case Shortage.READING:
            return (
                "What is short is the reading of KV: with endless memory, too, each token would take longer and longer"
                " in the densest time. Faster memory or more GPUs help, a larger KV cache does not."
            )
        case Shortage.PLACES:
            most = result.config.cluster.get("max_num_seqs")
            return (
                f"What is short are places: the workers run as many requests at once as they may"
                f" (--max-num-seqs {most}) while memory is free."
            )
        case Shortage.PLACEMENT:
            return (
                "Nothing is short: most of the waiting is on instances that are full while another one has room. That"
                " is Ballast's own fault; please report it."
            )

"""What the core remembers about load: samples per instance and sums over the cluster, kept in rings of fixed length."""

from collections.abc import Iterable
from dataclasses import dataclass

from ballast.common.load import LoadReport


@dataclass(frozen=True, slots=True)
class LoadSample:
    at_s: float
    load: LoadReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """Sums over all instances that have reported, in tokens, because block sizes may differ."""

    at_s: float
    instance_count: int
    kv_tokens: int
    used_kv_tokens: int
    waiting_kv_tokens: int  # wanted by the prompts of accepted requests that do not run yet
    running_count: int
    waiting_count: int


def sum_load(at_s: float, loads: Iterable[LoadReport]) -> ClusterLoad:
    reports = list(loads)
    return ClusterLoad(
        at_s=at_s,
        instance_count=len(reports),
        kv_tokens=sum(r.block_count * r.block_tokens for r in reports),
        used_kv_tokens=sum(r.used_block_count * r.block_tokens for r in reports),
        waiting_kv_tokens=sum(r.waiting_block_count * r.block_tokens for r in reports),
        running_count=sum(r.running_count for r in reports),
        waiting_count=sum(r.waiting_count for r in reports),
    )

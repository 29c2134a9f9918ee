"""Demand for KV memory and its capacity, in bytes of KV over all layers.

Only these bytes can be summed over groups: blocks of pipeline stages differ in size, but a token's KV over all layers
does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ballast.common.ids import WorkerId
from ballast.common.load import LoadReport

LIKE_MEMORY = 1.5  # instances with more than this multiple of the next smaller KV memory count as another size


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """Load of one group according to its leader's latest report. The counts of other members are ignored."""

    leader_id: WorkerId
    member_ids: tuple[WorkerId, ...]
    used_bytes: int  # bytes held by running requests
    spare_bytes: int = 0  # part of used and waiting bytes that the leader's draining group holds but does not need
    waiting_bytes: int  # needed by prompts in the leader's waiting queue, including its head
    capacity_bytes: int
    undropped_bytes: int  # KV bytes of the members if each held all layers

    @property
    def wanted_bytes(self) -> int:
        return self.used_bytes + self.waiting_bytes


@dataclass(frozen=True, slots=True)
class BacklogDemand:
    """Requests waiting in dispatchers."""

    request_count: int
    token_count: int  # tokens of prompts and of the output of earlier attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDemand:
    """Demand and capacity of one group, for watchers and status tools."""

    leader_id: WorkerId
    demand_bytes: int  # current demand, plus the growth of running requests until the horizon
    capacity_bytes: int
    used_bytes: int
    demand_growth_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterDemand:
    """Demand and capacity of the whole cluster at one moment."""

    at_s: float
    wanted_bytes: int  # held by running requests and needed by all waiting ones
    engaged_bytes: int  # `wanted_bytes` without the dispatchers' backlogs
    used_bytes: int
    capacity_bytes: int
    undropped_bytes: int
    groups: tuple[tuple[WorkerId, ...], ...]  # members of each group, leaders first
    complete: bool  # True: all reports are known
    small_fill: float = 0.0  # used fraction of the smaller instances' memory, if others have much more

    @property
    def backlog_bytes(self) -> int:
        """Bytes needed by requests that wait in dispatchers."""
        return self.wanted_bytes - self.engaged_bytes

    @property
    def merged(self) -> tuple[tuple[WorkerId, ...], ...]:
        """Groups whose members have dropped layers."""
        return tuple(group for group in self.groups if len(group) > 1)


def capacity_bytes(load: LoadReport, kv_bytes_per_token: int) -> int:
    return load.block_count * load.block_tokens * kv_bytes_per_token


def used_bytes(load: LoadReport, kv_bytes_per_token: int) -> int:
    return load.used_block_count * load.block_tokens * kv_bytes_per_token


def spare_bytes(load: LoadReport, kv_bytes_per_token: int) -> int:
    return load.spare_block_count * load.block_tokens * kv_bytes_per_token


def waiting_bytes(load: LoadReport, kv_bytes_per_token: int) -> int:
    return load.waiting_block_count * load.block_tokens * kv_bytes_per_token


def backlog_bytes(backlog: BacklogDemand, block_tokens: int, kv_bytes_per_token: int) -> int:
    """Return the KV bytes that waiting requests are expected to need: for their tokens, the next token, and half a
    block each.
    """
    tokens = backlog.token_count + backlog.request_count * (1 + block_tokens // 2)
    return tokens * kv_bytes_per_token


def sum_demand(
    at_s: float, groups: tuple[GroupLoad, ...], backlog_need_bytes: int, *, complete: bool = True
) -> ClusterDemand:
    used = waiting = spare = capacity = undropped = 0
    for group in groups:
        used += group.used_bytes
        waiting += group.waiting_bytes
        spare += group.spare_bytes
        capacity += group.capacity_bytes
        undropped += group.undropped_bytes
    engaged_bytes = max(0, used + waiting - spare)
    return ClusterDemand(
        at_s=at_s,
        wanted_bytes=engaged_bytes + backlog_need_bytes,
        engaged_bytes=engaged_bytes,
        used_bytes=max(0, used - spare),
        capacity_bytes=capacity,
        undropped_bytes=undropped,
        groups=tuple([group.member_ids for group in groups]),
        complete=complete,
        small_fill=_small_fill(groups),
    )


def _small_fill(groups: Sequence[GroupLoad]) -> float:
    sizes = sorted({group.undropped_bytes // len(group.member_ids) for group in groups})
    ratio, limit = max(((b / max(1, a), b) for a, b in pairwise(sizes)), default=(1.0, 0))
    if ratio <= LIKE_MEMORY:
        return 0.0
    small = [group for group in groups if group.undropped_bytes // len(group.member_ids) < limit]
    return sum(g.wanted_bytes - g.spare_bytes for g in small) / max(1, sum(g.capacity_bytes for g in small))

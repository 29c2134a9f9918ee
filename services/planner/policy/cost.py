"""What pipelining costs: load-weighted extra stages.

Latency grows with the number of instances that a token passes (EuroSys '26, figure 5), for every request of a group.
So a group of s stages costs `weight * (s - 1)`, where the weight of a group is the load of its members; 1.0 is one
instance's mean load passing one extra stage. For identical instances that is s * (s - 1) per group: convex, which the
exact methods rely on, and an even partition is the best one. A group of its own costs nothing.
"""

from collections.abc import Sequence

from services.planner.policy.snapshot import GroupState

WEIGHT_UNIT = 1000  # weights are whole numbers of 1/1000 of the mean, so that sums do not depend on their order
# How much of today's differences in load counts: dispatchers even loads out, so that an instance that is idle now will
# not stay so. 0: all instances weigh the same; 1: only the present load counts.
_LOAD_SHARE = 0.5


def factors(stage_count: int) -> list[float]:
    """Cost of a group by its number of stages, 0 .. stage_count, per unit of weight."""
    return [float(max(0, stages - 1)) for stages in range(stage_count + 1)]


def weights(groups: Sequence[GroupState]) -> list[int]:
    """One per group, at least 1."""
    total_load = sum(group.load_blocks for group in groups)
    total_stages = sum(len(group.members) for group in groups)
    if total_load == 0:
        return [WEIGHT_UNIT * len(group.members) for group in groups]
    even = WEIGHT_UNIT * (1.0 - _LOAD_SHARE)
    per_block = WEIGHT_UNIT * _LOAD_SHARE * total_stages / total_load
    return [max(1, round(even * len(group.members) + per_block * group.load_blocks)) for group in groups]

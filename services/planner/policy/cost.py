"""What pipelining costs: load-weighted extra stages.

Latency grows with the number of instances that a token passes (EuroSys '26, figure 5), for every request of a group.
So a group of s stages costs `weight * (s - 1) ** exponent`, where the weight of a group is the load of its members;
1.0 is one instance's mean load passing one extra stage. For identical instances that is s * (s - 1) per group:
convex, an even partition is the best one. A group of its own costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.common.errors import ConfigError
from services.planner.policy.snapshot import GroupState

WEIGHT_UNIT = 1000  # weights are whole numbers of 1/1000 of the mean, so that sums do not depend on their order


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """`exponent` >= 1 keeps the cost of a group convex, which the exact methods rely on.

    `load_share` is how much of today's differences in load counts: dispatchers even loads out, so that an instance
    that is idle now will not stay so. 0: all instances weigh the same; 1: only the present load counts.
    """

    exponent: float = 1.0
    load_share: float = 0.5

    def __post_init__(self) -> None:
        if self.exponent < 1.0:
            raise ConfigError("stage_cost.exponent", f"must be at least 1, got {self.exponent}")
        if not 0.0 <= self.load_share <= 1.0:
            raise ConfigError("stage_cost.load_share", f"must be in [0, 1], got {self.load_share}")

    def factors(self, stage_count: int) -> list[float]:
        """Cost of a group by its number of stages, 0 .. stage_count, per unit of weight."""
        return [float(max(0, stages - 1)) ** self.exponent for stages in range(stage_count + 1)]

    def weights(self, groups: Sequence[GroupState]) -> list[int]:
        """One per group, at least 1."""
        total_load = sum(group.load_blocks for group in groups)
        total_stages = sum(len(group.members) for group in groups)
        if total_load == 0 or self.load_share == 0.0:
            return [WEIGHT_UNIT * len(group.members) for group in groups]
        even = WEIGHT_UNIT * (1.0 - self.load_share)
        per_block = WEIGHT_UNIT * self.load_share * total_stages / total_load
        return [max(1, round(even * len(group.members) + per_block * group.load_blocks)) for group in groups]

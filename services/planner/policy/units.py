"""Partitions of groups into larger groups: the vocabulary that the grouping methods share."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Partition = list[list[int]]  # indices of units; every unit once
CanMerge = Callable[[Sequence[int]], bool]  # whether these units can form one pipeline


@dataclass(frozen=True, slots=True)
class Units:
    """The groups that exist, each of which may be merged with others and is never split. In order of group id."""

    stages: list[int]
    weights: list[int]
    factors: list[float]  # cost per weight by number of stages
    max_stages: int  # a stage executes at least one layer

    def cost_of(self, members: Sequence[int]) -> float:
        stages = sum(self.stages[i] for i in members)
        return sum(self.weights[i] for i in members) * self.factors[stages]

    def cost(self, partition: Partition) -> float:
        stages, weights, factors = self.stages, self.weights, self.factors
        return math.fsum(
            weights[members[0]] * factors[stages[members[0]]] if len(members) == 1 else self.cost_of(members)
            for members in partition
        )

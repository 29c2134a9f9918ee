"""Grouping by what admission can use, where layers do not divide evenly.

A pipeline has as many blocks as its tightest stage. Of three members for four layers one executes two, so that the
three together hold no more sequences than a pair does, although a further copy is free. Sizes of groups that do worse
than two smaller groups of the same members are therefore left out.
"""

from itertools import accumulate
from math import inf

from services.planner.policy.snapshot import ModelShape
from services.planner.policy.units import Partition, Units


def blocks_by_size(model: ModelShape, budget_bytes: int, most: int) -> list[int]:
    """Blocks of a group of 1 .. `most` equal members with equal layers, in places 1 .. `most`."""
    largest = (-(-model.layer_count // size) for size in range(1, most + 1))
    return [0, *(model.block_count(budget_bytes, 0, layers) for layers in largest)]


def useful_sizes(blocks: list[int]) -> list[int]:
    """Sizes that hold more than any two groups of the same members would."""
    return [
        size
        for size in range(1, len(blocks))
        if all(blocks[size] > blocks[part] + blocks[size - part] for part in range(1, size // 2 + 1))
    ]


def even_group_count(blocks: list[int], count: int, wanted: int) -> int:
    """The largest number of groups of even sizes, of `count` instances, with so many blocks; if none has, the best.

    Groups of sizes n and n + 1 have blocks linear in their number, so that looking at each n is enough.
    """
    most_blocks, best = -1, count
    for size in range(1, len(blocks)):
        fewest, most = count // (size + 1) + 1, count // size
        larger_blocks = blocks[size + 1] if size + 1 < len(blocks) else 0
        if not larger_blocks:
            fewest = most if count == most * size else most + 1
        if fewest > most:
            continue
        lost = blocks[size] * (size + 1) - larger_blocks * size  # by one group fewer
        here = blocks[size] * most + (larger_blocks - blocks[size]) * (count - size * most)
        merges = 0 if here >= wanted else -((wanted - here) // lost) if lost < 0 else most
        if most - merges >= fewest:
            return most - merges
        for group_count in (most, fewest):
            if (total := here - lost * (most - group_count)) > most_blocks:
                most_blocks, best = total, group_count
    return best


def cheapest_by_count(units: Units, sizes: list[int]) -> list[Partition | None]:
    """The least costly partition into 0 .. N groups of these sizes, for units of one stage each.

    Exact for each number of groups: as in `services.planner.policy.exact`, the heaviest units belong into the
    smallest groups, so that runs in descending order of weight are enough. O(N^2 x sizes).
    """
    count = len(units.stages)
    order = sorted(range(count), key=lambda i: (-units.weights[i], i))
    before = [0, *accumulate(units.weights[i] for i in order)]
    costs = [0.0] + [inf] * count
    last_sizes: list[list[int]] = [[0] * (count + 1)]
    found: list[Partition | None] = [None]
    for group_count in range(1, count + 1):
        longer, chosen = [inf] * (count + 1), [0] * (count + 1)
        for end in range(group_count, count + 1):
            for size in sizes:
                if size > end:
                    break
                cost = costs[end - size] + (before[end] - before[end - size]) * units.factors[size]
                if cost < longer[end]:
                    longer[end], chosen[end] = cost, size
        costs = longer
        last_sizes.append(chosen)
        found.append(None if costs[count] == inf else _trace(order, last_sizes))
    return found


def _trace(order: list[int], last_sizes: list[list[int]]) -> Partition:
    partition: Partition = []
    end = len(order)
    for chosen in reversed(last_sizes[1:]):
        partition.append(order[end - chosen[end] : end])
        end -= chosen[end]
    return partition

"""The greedy ways to group: EuroSys '26 figure 6, and the memory-greedy variant of the first arXiv version."""

import heapq

from services.planner.policy.units import CanMerge, Partition, Units

_Entry = tuple[int, int, list[int]]  # stages, lowest unit (ties go to it), units


def figure6(units: Units, merge_count: int, can_merge: CanMerge) -> Partition:
    """Merge the two groups with the fewest stages, `merge_count` times or until none are left: O(N log N).

    Each merge frees one copy of the layers. Beyond the paper: a pair that no split of the layers allows is passed
    over for the next smallest partner.
    """
    heap: list[_Entry] = [(stages, i, [i]) for i, stages in enumerate(units.stages)]
    heapq.heapify(heap)
    alone: Partition = []
    while merge_count > 0 and len(heap) >= 2:
        smallest = heapq.heappop(heap)
        partner = _pop_partner(heap, smallest, units.max_stages, can_merge)
        if partner is None:
            alone.append(smallest[2])
        else:
            merged = (smallest[0] + partner[0], min(smallest[1], partner[1]), smallest[2] + partner[2])
            heapq.heappush(heap, merged)
            merge_count -= 1
    return alone + [members for _, _, members in heap]


def _pop_partner(heap: list[_Entry], smallest: _Entry, max_stages: int, can_merge: CanMerge) -> _Entry | None:
    passed_over: list[_Entry] = []
    partner: _Entry | None = None
    while heap and smallest[0] + heap[0][0] <= max_stages:
        candidate = heapq.heappop(heap)
        if can_merge(smallest[2] + candidate[2]):
            partner = candidate
            break
        passed_over.append(candidate)
    for candidate in passed_over:
        heapq.heappush(heap, candidate)
    return partner


def memory_greedy(units: Units, merge_limit: int, can_merge: CanMerge) -> Partition:
    """Grow one group, the largest units first, until `merge_limit` copies are free; it goes on in a second group
    where the first can take no more stages. For comparison: much memory, long pipelines.
    """
    waiting = sorted(range(len(units.stages)), key=lambda i: (-units.stages[i], i))
    done: Partition = []
    while waiting:
        members = [waiting.pop(0)]
        stages = units.stages[members[0]]
        rest: list[int] = []
        for unit in waiting:
            fits = stages + units.stages[unit] <= units.max_stages
            if merge_limit > 0 and fits and can_merge([*members, unit]):
                members.append(unit)
                stages += units.stages[unit]
                merge_limit -= 1
            else:
                rest.append(unit)
        waiting = rest
        done.append(members)
    return done

"""Predicts likely future group members of each worker, for opening links in advance."""

from collections.abc import Container, Sequence

from ballast.common.ids import WorkerId
from ballast.common.layout import Layout, Member


def likely_partners(
    layout: Layout, most: int, apart: Container[WorkerId] = ()
) -> list[tuple[Member, Sequence[Member]]]:
    """Return up to `most` other workers for each member: first those of its own group, then the nearest in the layout.

    Merges depend on the loads at the time of the merge. In a cluster of up to `most` + 1 instances all are returned. In
    a larger one, neighbours are a guess, and missing links are opened while a plan is prepared. `apart`: workers
    without partners.
    """
    order = [(member, place) for place, group in enumerate(layout.groups) for member in group.members]
    staying = [(member, place) for member, place in order if member.data_address and member.takes_new]
    free = [(member, place) for member, place in staying if member.worker_id not in apart]

    def nearest(index: int) -> list[Member]:
        near = range(max(0, index - most), min(len(free), index + most + 1))  # holds them all: groups are contiguous
        others = [i for i in near if i != index]
        others.sort(key=lambda i: (free[i][1] != free[index][1], abs(i - index), i))
        return [free[i][0] for i in others[:most]]

    without = [(member, ()) for member, _ in staying if member.worker_id in apart]
    return [*((member, nearest(index)) for index, (member, _) in enumerate(free)), *without]

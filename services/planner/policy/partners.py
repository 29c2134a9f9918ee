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

    def nearest(index: int) -> list[Member]:
        group = staying[index][1]
        others = [i for i, (member, _) in enumerate(staying) if i != index and member.worker_id not in apart]
        others.sort(key=lambda i: (staying[i][1] != group, abs(i - index), i))
        return [] if staying[index][0].worker_id in apart else [staying[i][0] for i in others[:most]]

    return [(member, nearest(index)) for index, (member, _) in enumerate(staying)]

"""The layout without overload: every instance is a group of its own and holds all layers."""

from collections.abc import Iterable
from dataclasses import dataclass

from ballast.common.ids import GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Member


@dataclass(frozen=True, slots=True)
class Placeable:
    """An instance as a policy sees it."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    draining: bool


def one_group_each(instances: Iterable[Placeable], layer_count: int) -> tuple[Group, ...]:
    """Groups in order of worker id; a group keeps its id over restarts of its instance."""
    return tuple(
        Group(
            GroupId(instance.worker_id),
            (
                Member(
                    worker_id=instance.worker_id,
                    incarnation=instance.incarnation,
                    address=instance.address,
                    first_layer=0,
                    last_layer=layer_count,
                    draining=instance.draining,
                ),
            ),
        )
        for instance in sorted(instances, key=lambda i: i.worker_id)
    )

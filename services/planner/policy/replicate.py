"""The layout without change requests, in which pipelines stay and all other instances serve alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from ballast.common.ids import GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Member, Standing

Partial = tuple[tuple[WorkerId, Incarnation], ...]  # incarnations of workers that hold only some layers; by worker id


@dataclass(frozen=True, slots=True)
class Placeable:
    """An instance, for policies."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    draining: bool
    data_address: str = ""
    standing: Standing = Standing.SERVING

    def member(self, first_layer: int, last_layer: int, standing: Standing = Standing.SERVING) -> Member:
        return Member(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            address=self.address,
            first_layer=first_layer,
            last_layer=last_layer,
            draining=self.draining,
            data_address=self.data_address,
            standing=standing,
        )


def one_group_each(instances: Iterable[Placeable], layer_count: int) -> tuple[Group, ...]:
    """Return groups sorted by worker id. A group keeps its id over restarts of its instance."""
    return tuple(
        Group(GroupId(instance.worker_id), (instance.member(0, layer_count, instance.standing),))
        for instance in sorted(instances, key=lambda i: i.worker_id)
    )


def keep_pipelines(
    before: Iterable[Group], instances: Iterable[Placeable], partial: Partial, layer_count: int
) -> tuple[tuple[Group, ...], Partial]:
    """Return the groups that can serve, sorted by id, and the instances that hold only some layers and do not serve.

    A pipeline stays while all its members are alive. If one is lost, the others hold only a part of the model until
    they have loaded the rest. A new incarnation has loaded all layers.
    """
    there = {instance.worker_id: instance for instance in instances}
    waiting = {w for w, incarnation in partial if w in there and there[w].incarnation == incarnation}
    pipelines: list[Group] = []
    placed: set[WorkerId] = set()
    for group in before:
        if len(group.members) == 1:
            continue
        alive = [m for m in group.members if _is_there(m, there) and m.worker_id not in waiting]
        if len(alive) == len(group.members) and alive[-1].last_layer == layer_count:
            members = tuple(there[m.worker_id].member(m.first_layer, m.last_layer) for m in alive)
            pipelines.append(Group(group.group_id, members))
            placed.update(m.worker_id for m in alive)
        else:
            waiting.update(m.worker_id for m in alive)
    alone = one_group_each((i for w, i in there.items() if w not in placed and w not in waiting), layer_count)
    groups = tuple(sorted((*pipelines, *alone), key=lambda group: group.group_id))
    return groups, tuple((w, there[w].incarnation) for w in sorted(waiting))


def _is_there(member: Member, there: dict[WorkerId, Placeable]) -> bool:
    found = there.get(member.worker_id)
    return found is not None and found.incarnation == member.incarnation

"""Input of drop and restore plans: the cluster at one moment, as plain numbers."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, overload

from ballast.common.errors import InvariantViolation
from ballast.common.ids import GroupId, WorkerId


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Memory needs of the model, which are equal on all instances. Layers may differ in size, but not in execution
    time.
    """

    layer_parameter_bytes: tuple[int, ...]
    other_parameter_bytes: int  # embedding, head ...: held by every instance
    block_tokens: int
    block_bytes: int  # bytes of a KV block in one layer
    extent_bytes: int = 1  # granularity of memory

    @property
    def layer_count(self) -> int:
        return len(self.layer_parameter_bytes)

    def at(self, extent_bytes: int) -> "ModelShape":
        """Return this shape with another extent size; 0: unchanged."""
        if not extent_bytes or extent_bytes == self.extent_bytes:
            return self
        known = self._others
        if extent_bytes not in known:
            known[extent_bytes] = replace(self, extent_bytes=extent_bytes)
        return known[extent_bytes]

    @cached_property
    def _others(self) -> dict[int, "ModelShape"]:
        return {}

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Extents of each layer's parameters."""
        return tuple(-(-size // self.extent_bytes) for size in self.layer_parameter_bytes)

    @cached_property
    def extents_before(self) -> tuple[int, ...]:
        """Prefix sums of `extents`."""
        return (0, *accumulate(self.extents))

    @cached_property
    def is_uniform(self) -> bool:
        """True if all layers have equal size."""
        return len(set(self.extents)) == 1

    @cached_property
    def copy_bytes(self) -> int:
        """Memory of one copy of all layers, which a merge of two groups frees."""
        return self.extents_before[-1] * self.extent_bytes

    def occupied_bytes(self, layers: tuple[int, ...]) -> int:
        if len(layers) == self.layer_count:
            return self.copy_bytes
        return sum(self.extents[layer] for layer in layers) * self.extent_bytes

    def block_count(self, budget_bytes: int, first_layer: int, last_layer: int) -> int:
        """Return the KV blocks of an instance that holds exactly these layers; negative if they do not fit."""
        taken = -(-self.other_parameter_bytes // self.extent_bytes)
        taken += self.extents_before[last_layer] - self.extents_before[first_layer]
        free = budget_bytes // self.extent_bytes - taken
        return free // (last_layer - first_layer) * self.extent_bytes // self.block_bytes


class InstanceState(NamedTuple):  # a tuple, for fast construction of thousands
    worker_id: WorkerId
    budget_bytes: int  # device memory: parameters + KV + free
    first_layer: int  # executes [first_layer, last_layer)
    last_layer: int
    held_layers: tuple[int, ...]  # parameters in memory, ascending; at least the executed ones
    extent_bytes: int = 0  # granularity of its memory; 0: the model shape's
    slowness: float = 1.0  # factor on the pace's durations


class GroupState(NamedTuple):
    """One group. Its leader reports the block counts, which are equal on all stages; the capacity is the minimum over
    the stages.
    """

    group_id: GroupId
    members: tuple[InstanceState, ...]  # in stage order
    block_count: int
    used_block_count: int
    waiting_block_count: int
    running_count: int = 0
    uncomputed_tokens: int = 0  # prompt tokens of running requests that are not computed
    max_running_count: int = 0  # maximum of all members together; 0: not reported

    @property
    def load_blocks(self) -> int:
        return self.used_block_count + self.waiting_block_count


class Columns(NamedTuple):
    """Groups as columns, which are faster to build and scan for thousands of groups."""

    group_ids: Sequence[GroupId]
    stages: Sequence[int]
    blocks: Sequence[int]
    used: Sequence[int]
    waiting: Sequence[int]
    running: Sequence[int]
    uncomputed: Sequence[int]
    members: AbstractSet[tuple[int, int, float]]  # distinct (budget, extent size, slowdown)
    max_running: Sequence[int]  # maximum of all members of a group together; 0: not reported


class GroupSnapshots(Sequence[GroupState]):
    """A lazy sequence of groups over known columns."""

    def __init__(self, columns: Columns, make: Callable[[Iterable[int]], Sequence[GroupState]]) -> None:
        self.columns = columns
        self._make = make

    @cached_property
    def _made(self) -> tuple[GroupState, ...]:
        return tuple(self._make(range(len(self))))

    def __len__(self) -> int:
        return len(self.columns.group_ids)

    @overload
    def __getitem__(self, index: int) -> GroupState: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[GroupState, ...]: ...
    def __getitem__(self, index: int | slice) -> GroupState | tuple[GroupState, ...]:
        return self._make([index])[0] if isinstance(index, int) else self._made[index]

    def __iter__(self) -> Iterator[GroupState]:
        return iter(self._made)


def columns_of(groups: Sequence[GroupState]) -> Columns:
    if isinstance(groups, GroupSnapshots):
        return groups.columns
    return Columns(
        [group.group_id for group in groups],
        [len(group.members) for group in groups],
        [group.block_count for group in groups],
        [group.used_block_count for group in groups],
        [group.waiting_block_count for group in groups],
        [group.running_count for group in groups],
        [group.uncomputed_tokens for group in groups],
        {(m.budget_bytes, m.extent_bytes, m.slowness) for group in groups for m in group.members},
        [group.max_running_count for group in groups],
    )


@dataclass(frozen=True, slots=True)
class Snapshot:
    model: ModelShape
    groups: Sequence[GroupState]

    def check(self) -> None:
        """Raise InvariantViolation unless every group holds and executes a complete replica within its budgets."""
        _check_model(self.model)
        for group in self.groups:
            _check_group(self.model, group)
        names = Counter(member.worker_id for group in self.groups for member in group.members)
        for name, count in names.items():
            if count > 1:
                raise InvariantViolation(f"{name} occurs twice in the snapshot")
        if len({group.group_id for group in self.groups}) != len(self.groups):
            raise InvariantViolation("two groups of the snapshot have the same id")


def _check_model(model: ModelShape) -> None:
    sizes = (*model.layer_parameter_bytes, model.block_tokens, model.block_bytes, model.extent_bytes)
    if not model.layer_parameter_bytes or min(sizes) < 1 or model.other_parameter_bytes < 0:
        raise InvariantViolation(f"a model has layers, and sizes are positive: {model}")


def _check_group(model: ModelShape, group: GroupState) -> None:
    if not group.members:
        raise InvariantViolation(f"group {group.group_id} has no members")
    if min(group.block_count, group.used_block_count, group.waiting_block_count) < 0:
        raise InvariantViolation(f"group {group.group_id} counts blocks below zero")
    next_layer = 0
    for member in group.members:
        if member.first_layer != next_layer or member.last_layer <= member.first_layer:
            raise InvariantViolation(
                f"group {group.group_id}: {member.worker_id} executes [{member.first_layer}, {member.last_layer}),"
                f" expected to begin at layer {next_layer}"
            )
        next_layer = member.last_layer
        _check_memory(model, member)
    if next_layer != model.layer_count:
        raise InvariantViolation(f"group {group.group_id} ends at layer {next_layer} of {model.layer_count}")


def _check_memory(model: ModelShape, member: InstanceState) -> None:
    held = member.held_layers
    if list(held) != sorted(set(held)) or not set(range(member.first_layer, member.last_layer)) <= set(held):
        raise InvariantViolation(f"{member.worker_id} does not hold the layers that it executes: {held}")
    if held[0] < 0 or held[-1] >= model.layer_count:
        raise InvariantViolation(f"{member.worker_id} holds layers that the model lacks: {held}")
    if model.at(member.extent_bytes).occupied_bytes(held) + model.other_parameter_bytes > member.budget_bytes:
        raise InvariantViolation(f"{member.worker_id}: its parameters exceed its budget of {member.budget_bytes} bytes")

"""Capacity of a group while a restore loads its members' parameters (pure).

The parameters need the memory that the drop has given to KV. Meanwhile the group continues to run in the remaining
blocks, minus a minimum that each member needs to begin serving alone (`DeviceMemory.leaving_block_count`). The leader
limits the group to the remaining blocks of the smallest stage. Once no block beyond the limit is held, it announces the
limit, in order with its batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.events import CapacityChanged
from services.worker.core.waves import Leading


@dataclass(frozen=True, slots=True)
class RoomSizes:
    """Block counts of one stage: in the draining group, when serving alone, and in host memory."""

    leaving: int  # in its group, once all parameters are loaded as well
    home: int  # when serving alone, with all layers
    host: int = 0  # in host memory, for swapped KV


class GroupRoom:
    """Blocks of each stage of the current group, and the limit set by a restore.

    A leader uses the sizes of the smallest stage. A follower knows its own sizes and the restore for which its leader
    has granted or withdrawn room.
    """

    def __init__(self, me: WorkerId, own: Callable[[], RoomSizes]) -> None:
        """`own()`: current sizes of this stage."""
        self._me = me
        self.own = own
        self._granted = (Epoch(0), 0)  # epoch of the last restore for which room was granted, and its blocks
        self.withdrawn = Epoch(0)  # epoch of the last restore whose room the leader has withdrawn
        self.begin((), 0)

    def begin(self, stages: Sequence[WorkerId], block_count: int, *, before_block_count: int = 0) -> None:
        """Start a new group without a restore under way. Only this stage's `block_count` is known.
        `before_block_count`: blocks that the group will have once the previous group has released its memory.
        """
        self.stages = tuple(stages) or (self._me,)
        self.counts: dict[WorkerId, int] = {self._me: block_count}
        self._told: dict[WorkerId, RoomSizes] = {}
        self._limited_epoch = Epoch(0)  # last restore that limited the group; reports before its end are out of date
        self._limited: set[WorkerId] = set()  # stages that have not reported since that limit
        self._before_block_count = before_block_count  # 0: the group has all its blocks
        self.leading: Leading | None = None  # after a drop, decides when suspended sequences get room

    @property
    def smallest(self) -> int:
        return min(self.counts.values())

    @property
    def sizes(self) -> Mapping[WorkerId, RoomSizes] | None:
        """Sizes of every stage; None until all are known."""
        known = {**self._told, self._me: self.own()}
        return {stage: known[stage] for stage in self.stages} if known.keys() >= set(self.stages) else None

    @property
    def homes(self) -> Mapping[WorkerId, int]:
        """Blocks of each member when it holds all layers. Until all have reported, this stage's number is used for
        each.
        """
        own, sizes = self.own(), self.sizes or {}
        return {stage: sizes.get(stage, own).home for stage in self.stages}

    def why_too_long(self, token_count: int, block_tokens: int) -> str:
        """Return why the group cannot dissolve: its longest request does not fit into a single member. Empty if it
        fits.

        A batch in flight may still append a token to the request, and the next batch needs room for another one.
        """
        home = min(self.homes.values()) * block_tokens
        if token_count + 2 <= home:
            return ""
        return f"a request has {token_count} tokens, but a member has room for {home} without its group"

    def told(self, stage: WorkerId, block_count: int, sizes: RoomSizes, withdrawn: Epoch) -> bool:
        """Record a stage's report. Returns False if the stage is not in this group, or sent the report before it knew
        that the last restore had ended. `withdrawn`: the last restore that it knows to be withdrawn.
        """
        if stage not in self.stages or (stage != self._me and withdrawn < self._limited_epoch):
            return False
        self.counts[stage], self._told[stage] = block_count, sizes
        self._limited.discard(stage)
        if not self._limited:
            self._before_block_count = 0
        return True

    def capacity(self, now_s: float, *, ends: bool = False) -> CapacityChanged:
        """Return the capacity for the leader's core. `ends`: the group is about to end."""
        if self.leading is not None and self.leading.waiting_ids:  # swapping begins when none waits for room
            change = self.leading.capacity(now_s, self.counts)
        else:
            change = CapacityChanged(now_s, self.smallest, before_block_count=self._before_block_count)
            change = replace(change, swap_block_count=self._swap_block_count)
        return replace(change, swap_block_count=0) if ends else change

    @property
    def _swap_block_count(self) -> int:
        """Host blocks of the group. 0 once its end has begun, because host memory then belongs to another group."""
        if self._before_block_count or (sizes := self.sizes) is None:
            return 0
        return min(size.host for size in sizes.values())

    # ---------------------------------------------------------------- a restore before its commit

    def limit(self, epoch: Epoch) -> int:
        """Leader: limit the group to the blocks that its smallest stage keeps in a restore, and return their number."""
        block_count = min(size.leaving for size in (self.sizes or {self._me: self.own()}).values())
        self._limited_epoch = epoch
        self._before_block_count = max(self._before_block_count, self.smallest)
        self.counts = dict.fromkeys(self.stages, block_count)
        self._limited = set(self.stages)
        return block_count

    def grant(self, epoch: Epoch, block_count: int) -> None:
        """Follower: record that its leader uses no block beyond `block_count`. May arrive before the planner's
        Prepare.
        """
        if epoch >= self._granted[0]:  # otherwise the grant is for an earlier restore
            self._granted = epoch, block_count

    def granted(self, epoch: Epoch) -> int | None:
        return self._granted[1] if self._granted[0] == epoch else None

    def withdraw(self, epoch: Epoch) -> None:
        self.withdrawn = max(self.withdrawn, epoch)

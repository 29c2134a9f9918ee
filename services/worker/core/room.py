"""What room a group has while its members become whole workers again (pure).

Parameters want back what the drop has given. Beside them the group goes on with the blocks that are left, but for a
least room in which each member begins to serve alone: see `DeviceMemory.leaving_block_count`. The leader limits the
group to that of the smallest stage, and says so behind its batches once nothing beyond is held.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.events import CapacityChanged
from services.worker.core.waves import Leading


@dataclass(frozen=True, slots=True)
class RoomSizes:
    """Blocks of a stage, now in host memory and in a restore."""

    leaving: int  # that its group may have when all parameters are here
    home: int  # in all layers afterwards
    host: int = 0  # in host memory, for KV that is swapped


class GroupRoom:
    """Blocks of each stage of the group in force, and what a restore takes of them.

    A leader counts on the smallest; a follower knows its own alone, and which restore its leader has granted room for
    or has given up.
    """

    def __init__(self, me: WorkerId, own: Callable[[], RoomSizes]) -> None:
        """`own`: the sizes of this stage as they are now."""
        self._me = me
        self.own = own
        self._granted = (Epoch(0), 0)  # the last restore for which there is room, and how much
        self.withdrawn = Epoch(0)  # the last restore that the leader has given up
        self.begin((), 0)

    def begin(self, stages: Sequence[WorkerId], block_count: int, *, before_block_count: int = 0) -> None:
        """A new group, of which only this stage's `block_count` is known. No restore of it is under way.
        `before_block_count`: blocks that it is going to have, while the group before gives its memory back.
        """
        self.stages = tuple(stages) or (self._me,)
        self.counts: dict[WorkerId, int] = {self._me: block_count}
        self._told: dict[WorkerId, RoomSizes] = {}
        self._limited_epoch = Epoch(0)  # the restore whose end a stage must know, to be believed what it has
        self._limited: set[WorkerId] = set()  # stages that have not said since what they have
        self._before_block_count = before_block_count  # 0: what the group has is all there is
        self.leading: Leading | None = None  # of the drop that made this group, as long as running requests wait

    @property
    def smallest(self) -> int:
        return min(self.counts.values())

    @property
    def sizes(self) -> Mapping[WorkerId, RoomSizes] | None:
        """Room of every stage; None while that of some stage is not known."""
        known = {**self._told, self._me: self.own()}
        return {stage: known[stage] for stage in self.stages} if known.keys() >= set(self.stages) else None

    @property
    def homes(self) -> Mapping[WorkerId, int]:
        """Blocks of each member of the group when it holds all layers. Until all are known those of this one."""
        own, sizes = self.own(), self.sizes or {}
        return {stage: sizes.get(stage, own).home for stage in self.stages}

    def why_too_long(self, token_count: int, block_tokens: int) -> str:
        """Why the group must stay: its longest request would end with an error in a member of its own.

        A batch in flight may still add a token to it, and the next batch wants room for one more.
        """
        home = min(self.homes.values()) * block_tokens
        if token_count + 2 <= home:
            return ""
        return f"a request has {token_count} tokens, and a member has room for {home} without its group"

    def told(self, stage: WorkerId, block_count: int, sizes: RoomSizes, withdrawn: Epoch) -> bool:
        """What a stage has, as it says. False: it is none of this group, or has said so before it heard of the end of
        the last restore: it may yet make room, or has done. `withdrawn`: the last restore that it knows to be given up.
        """
        if stage not in self.stages or (stage != self._me and withdrawn < self._limited_epoch):
            return False
        self.counts[stage], self._told[stage] = block_count, sizes
        self._limited.discard(stage)
        if not self._limited:
            self._before_block_count = 0
        return True

    def capacity(self, now_s: float, *, ends: bool = False) -> CapacityChanged:
        """What the leader's core may count on. `ends`: the group is about to end."""
        if self.leading is not None and self.leading.waiting_ids:  # nothing is swapped out before that has room
            change = self.leading.capacity(now_s, self.counts)
        else:
            change = CapacityChanged(now_s, self.smallest, before_block_count=self._before_block_count)
            change = replace(change, swap_block_count=self._swap_block_count)
        return replace(change, swap_block_count=0) if ends else change

    @property
    def _swap_block_count(self) -> int:
        """None from when a group begins to make room for its end until it is over: then host memory is another's."""
        if self._before_block_count or (sizes := self.sizes) is None:
            return 0
        return min(size.host for size in sizes.values())

    # ---------------------------------------------------------------- a restore before its commit

    def limit(self, epoch: Epoch) -> int:
        """Leader: the group may have only what its smallest stage keeps in a restore, from now on. Returns that."""
        block_count = min(size.leaving for size in (self.sizes or {self._me: self.own()}).values())
        self._limited_epoch = epoch
        self._before_block_count = max(self._before_block_count, self.smallest)
        self.counts = dict.fromkeys(self.stages, block_count)
        self._limited = set(self.stages)
        return block_count

    def grant(self, epoch: Epoch, block_count: int) -> None:
        """Follower: its leader holds no block beyond, perhaps before the planner asks for that restore."""
        if epoch >= self._granted[0]:  # else it is of one that is over
            self._granted = epoch, block_count

    def granted(self, epoch: Epoch) -> int | None:
        return self._granted[1] if self._granted[0] == epoch else None

    def withdraw(self, epoch: Epoch) -> None:
        self.withdrawn = max(self.withdrawn, epoch)

"""How many blocks each stage has: a leader admits against the smallest, its followers say what they have."""

from collections.abc import Mapping
from dataclasses import replace

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.events import CapacityChanged, PrefillLimited
from services.worker.core.room import GroupSizes, RoomSizes
from services.worker.core.waves import Leading
from services.worker.links.traffic import TrafficClass
from services.worker.pipeline.context import MemberContext
from services.worker.pipeline.events import CapacityTold
from services.worker.pipeline.wire import Topic, capacity_to_bytes

# Of prompts in a batch beside decodes. Layers that come take bandwidth, and time of the processor, from every batch:
# a long piece of a prompt on top of it would be the longest gap that a request has. In a pipeline a token waits for
# the pieces in all microbatches that are in flight.
_PROMPT_BLOCKS = 0.5


class Capacities:
    def __init__(
        self,
        context: MemberContext,
    ) -> None:
        self._role = role = context.role
        self._links = context.links
        self._published = context.published
        self._context = context
        self._memory = context.memory
        self._tell = context.answers.tell
        self._now = context.now
        self._counts: dict[WorkerId, int] = {}  # leader: stage -> blocks
        self._sizes = GroupSizes(role.me, context.memory, context.core.swap_block_count)  # leader
        self._limited_epoch = Epoch(0)  # leader: the restore whose end a stage must know, to be believed what it has
        self._limited: set[WorkerId] = set()  # leader: stages that have not said since what they have
        self._before_block_count = 0  # leader: what the group had then, or will have; 0: what it has is all there is
        self.leading: Leading | None = None  # leader: of the drop that made this group, as long as victims wait

    @property
    def smallest(self) -> int:
        return min(self._counts.values(), default=self._context.book.block_count)

    @property
    def counts(self) -> Mapping[WorkerId, int]:
        """Leader: of every stage."""
        return self._counts

    @property
    def sizes(self) -> Mapping[WorkerId, RoomSizes] | None:
        """Leader: of all stages in a restore. None: some have not been told yet."""
        return self._sizes.of([stage.worker_id for stage in self._role.stages])

    @property
    def own_sizes(self) -> RoomSizes:
        return RoomSizes.of(self._memory, self._context.core.swap_block_count)

    @property
    def homes(self) -> Mapping[WorkerId, int]:
        """Blocks of each member of the group when it holds all layers. Until all are known those of this one."""
        own, sizes = self.own_sizes, self.sizes or {}
        names = [stage.worker_id for stage in self._role.stages] or [self._role.me]
        return {name: sizes.get(name, own).home for name in names}

    @property
    def smallest_leaving(self) -> int:
        """Blocks that the group may have while it dissolves."""
        return min(size.leaving for size in (self.sizes or {self._role.me: self.own_sizes}).values())

    def why_too_long(self) -> str:
        """Why the group must stay: a request that it runs would end with an error in a member of its own.

        A batch in flight may still add a token to it, and the next batch wants room for one more.
        """
        longest = self._context.group_scheduler.longest_token_count
        home = min(self.homes.values()) * self._memory.kv.shape.block_tokens
        if longest + 2 <= home:
            return ""
        return f"a request has {longest} tokens, and a member has room for {home} without its group"

    # ------------------------------------------------------------ what is known

    def begin(self) -> None:
        """A new role: nobody has said anything yet, and there is no restore of this group."""
        self._counts = {self._role.me: self._context.book.block_count}
        self._limited_epoch, self._limited, self._before_block_count = Epoch(0), set(), 0
        self._sizes.clear()
        self.leading = None

    def comes_home(self) -> None:
        """Alone, while the group before gives its memory back."""
        self._before_block_count = self._memory.home_block_count
        self.tell_core()

    def grown(self) -> None:
        """Alone: there is more."""
        self._counts = {self._role.me: self._context.book.block_count}
        self.tell_core()

    def add(self, counts: Mapping[WorkerId, int]) -> None:
        self._counts |= counts

    def told(self, event: CapacityTold) -> None:
        role = self._role
        known = event.source == role.me or role.has_stage(event.source)
        early = event.source != role.me and event.withdrawn < self._limited_epoch  # may yet make room, or has done
        if event.epoch != role.epoch or not role.leads or not known or early:
            self._published.stale_total += 1
            return
        self._counts[event.source] = event.block_count
        self._sizes.told(event.source, event.sizes)
        self._limited.discard(event.source)
        if not self._limited:
            self._before_block_count = 0
        self.tell_core()

    # ------------------------------------------------------------ who hears of it

    def limit(self, epoch: Epoch, block_count: int) -> None:
        """Leader: the group is about to have so many blocks; nothing is counted on beyond them from now on."""
        self._limited_epoch = epoch
        self._before_block_count = max(self._before_block_count, min(self._counts.values(), default=0))
        self._counts = {stage.worker_id: block_count for stage in self._role.stages} or {self._role.me: block_count}
        self._limited = set(self._counts)
        self.tell_core()

    def limit_prompts(self, *, beside: bool = False) -> None:
        """In a restore until `lift_limit`. `beside`: of this worker\'s own requests, while the group that dissolves
        computes on the same devices.
        """
        token_count = max(1, int(_PROMPT_BLOCKS * self._memory.kv.shape.block_tokens))
        self._tell(PrefillLimited(self._now(), token_count, always=beside))

    def lift_limit(self) -> None:
        self._tell(PrefillLimited(self._now(), None))

    def tell_core(self, *, ends: bool = False) -> None:
        """`ends`: the group is about to end, and its stages are told of all that they are to forget."""
        now_s = self._now()
        if self.leading is not None and self.leading.waiting_ids:  # nothing is swapped out before that has room
            change = self.leading.capacity(now_s, self._counts)
        else:
            change = CapacityChanged(now_s, self.smallest, before_block_count=self._before_block_count)
            change = replace(change, swap_block_count=self._swap_block_count)
        self._tell(replace(change, swap_block_count=0) if ends else change)

    @property
    def _swap_block_count(self) -> int:
        """None from when a group begins to make room for its end until it is over: then host memory is another's."""
        if self._before_block_count or (sizes := self.sizes) is None:
            return 0
        return min(size.host for size in sizes.values())

    def tell_leader(self, withdrawn: Epoch) -> None:
        """What this member has. `withdrawn` is the newest restore that it knows to be given up."""
        role, block_count = self._role, self._context.book.block_count
        if role.leads:
            self.told(CapacityTold(role.epoch, role.me, block_count, self.own_sizes, withdrawn))
        else:
            body = capacity_to_bytes(withdrawn, block_count, self.own_sizes)
            self._links.send(role.leader, TrafficClass.CONTROL, Topic.CAPACITY, body)

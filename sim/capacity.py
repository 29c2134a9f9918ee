"""How many blocks each stage has: the counterpart of `services.worker.pipeline.capacity`."""

from collections.abc import Callable, Mapping

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.events import CapacityChanged, Event
from services.worker.core.leading import Leading
from services.worker.core.room import GroupSizes, RoomSizes
from services.worker.core.stage import StageBook
from sim.clock import Clock
from sim.memory import VirtualMemory
from sim.role import Role
from sim.voice import Voice


class Capacities:
    def __init__(
        self,
        role: Role,
        voice: Voice,
        clock: Clock,
        book: StageBook,
        memory: VirtualMemory,
        tell: Callable[[Event], None],
    ) -> None:
        """`tell` is how the core hears of it."""
        self._role = role
        self._voice = voice
        self._clock = clock
        self._book = book
        self._memory = memory
        self._tell = tell
        self._counts: dict[WorkerId, int] = {}  # leader: stage -> blocks
        self._sizes = GroupSizes(role.me, memory)  # leader
        self._limited_epoch = Epoch(0)  # leader: the restore whose end a stage must know, to be believed what it has
        self.leading: Leading | None = None  # leader: of the transition under way

    @property
    def counts(self) -> Mapping[WorkerId, int]:
        return self._counts

    def begin(self) -> None:
        """A new role: nobody has said anything yet, and there is no restore of this group. If this is the end of one,
        there will be as many blocks as at home: see `core.room.lent_count`.
        """
        ending = self._book.split is not None
        self._counts = {self._role.me: self._memory.home_block_count if ending else self._book.block_count}
        self._limited_epoch = Epoch(0)
        self._sizes.clear()

    @property
    def sizes(self) -> Mapping[WorkerId, RoomSizes] | None:
        """Leader: of all stages in a restore. None: some have not been told yet."""
        return self._sizes.of([stage.worker_id for stage in self._role.stages])

    @property
    def own_sizes(self) -> RoomSizes:
        return RoomSizes.of(self._memory, max(1, len(self._role.stages)))

    @property
    def smallest_narrow(self) -> int:
        """What every member has for the sequences that it is going to lead, while KV is copied."""
        return min(size.narrow for size in (self.sizes or {self._role.me: self.own_sizes}).values())

    def add(self, counts: Mapping[WorkerId, int]) -> None:
        self._counts |= counts

    def limit(self, epoch: Epoch, block_count: int) -> None:
        """Leader: the group is about to have so many blocks; nothing is counted on beyond them from now on."""
        self._limited_epoch = epoch
        self._counts = {stage.worker_id: block_count for stage in self._role.stages} or {self._role.me: block_count}
        self.tell_smallest()

    def tell_smallest(self) -> None:
        smallest = min(self._counts.values(), default=self._book.block_count)
        self._tell(CapacityChanged(self._clock.now_s, smallest))

    def tell_leader(self, withdrawn: Epoch) -> None:
        """What this member has. `withdrawn` is the newest restore that it knows to be given up."""
        epoch, me, count, sizes = self._role.epoch, self._role.me, self._book.block_count, self.own_sizes
        if self._role.leads:
            self.told(epoch, me, count, sizes, withdrawn)
        else:
            self._voice.tell(self._role.leader, lambda m: m.capacity_told(epoch, me, count, sizes, withdrawn))

    def told(self, epoch: Epoch, source: WorkerId, block_count: int, sizes: RoomSizes, withdrawn: Epoch) -> None:
        role = self._role
        known = source == role.me or role.has_stage(source)
        early = source != role.me and withdrawn < self._limited_epoch  # it may yet make room, or has done
        if epoch != role.epoch or not role.leads or not known or early:
            return
        self._counts[source] = block_count
        self._sizes.told(source, sizes)
        if self.leading is None:
            self.tell_smallest()
        else:
            self._tell(self.leading.capacity(self._clock.now_s, self._counts))

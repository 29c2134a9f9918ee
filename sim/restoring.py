"""A restore, from the room that it needs to its layers, or to its end: the counterpart of
`services.worker.pipeline.restoring`.
"""

from collections.abc import Callable, Mapping, Sequence

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.plan import Kind, Phase, Plan
from services.worker.core.stage import StageBook
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import Event, MemoryReady, PreparationFailed
from services.worker.core.worker import WorkerCore
from services.worker.pipeline.status import Progress
from sim.capacity import Capacities
from sim.clock import Clock
from sim.homecoming import Homecoming
from sim.memory import VirtualMemory
from sim.role import Role
from sim.voice import Voice


class Restoring:
    def __init__(
        self,
        role: Role,
        voice: Voice,
        capacities: Capacities,
        homecoming: Homecoming,
        *,
        clock: Clock,
        core: WorkerCore,
        book: StageBook,
        memory: VirtualMemory,
        under_way: Callable[[], Transition | None],
        drive: Callable[[Event], None],
        publish: Callable[[], None],
    ) -> None:
        """`core` is only read; `drive` tells the transition that is under way."""
        self._role = role
        self._voice = voice
        self._capacities = capacities
        self._homecoming = homecoming
        self._clock = clock
        self._core = core
        self._book = book
        self._memory = memory
        self._under_way = under_way
        self._drive = drive
        self._publish = publish
        self._links_up = False
        self._room_epoch = Epoch(0)  # the restore for which the leader has granted room
        self.withdrawn_epoch = Epoch(0)  # the restore that the leader has given up
        self.undoing = False  # a restore was aborted

    @property
    def at_rest(self) -> bool:
        """Whether `poll` has nothing to wait for."""
        return not (self.undoing or self._homecoming.wants_room)

    def plan(self) -> None:
        """A transition begins: its links are not there yet."""
        self._links_up = False

    def links_are_up(self) -> None:
        self._links_up = True

    def why_not(self, epoch: Epoch) -> str:
        """Why there can be none; empty: there can."""
        return f"the leader has given epoch {epoch} up" if epoch <= self.withdrawn_epoch else ""

    def why_too_long(self) -> str:
        """Why the group must stay."""
        home = self._memory.home_block_count
        largest = max((view.block_count for view in self._core.placements()), default=0)
        return (
            f"a request holds {largest} blocks, more than the {home} there are without its group"
            if largest > home
            else ""
        )

    def begin(self, epoch: Epoch, sources: Mapping[int, Sequence[WorkerId]], progress: Progress) -> None:
        self._homecoming.begin(epoch, sources, progress)
        if self._role.leads:
            self._capacities.limit(epoch, self._memory.home_block_count)

    def poll(self, transition: Transition | None) -> None:
        """Between two turns: whatever waits for room."""
        wanted = self._homecoming.wants_room and self._role.leads and self._links_up
        if wanted and transition is not None and self._core.settled:
            self.room_is_granted(transition.epoch)
        elif self._homecoming.wants_room:
            self._take_room()
        if self.undoing:
            self._undo()

    # ------------------------------------------------------------ room

    def room_is_granted(self, epoch: Epoch) -> None:
        """Told down the pipeline, behind all batches."""
        self._voice.pass_on(lambda m: m.room_is_granted(epoch))
        self._room_epoch = max(self._room_epoch, epoch)
        self._take_room()

    def give_up(self, plan: Plan) -> None:
        """What has been prepared is undone. The leader's followers hear of it."""
        self.undoing = plan.kind is Kind.RESTORE
        if self.undoing and self._role.leads:
            self._pass_on_withdrawal(plan.epoch)

    def _pass_on_withdrawal(self, epoch: Epoch) -> None:
        """Down the pipeline, behind the grant of room if there was one."""
        self._voice.pass_on(lambda m: m.room_is_withdrawn(epoch))
        self.withdrawn_epoch = max(self.withdrawn_epoch, epoch)

    def room_is_withdrawn(self, epoch: Epoch) -> None:
        """Follower: what it has from now on, it has for good, and the leader may count on it."""
        if self._role.leads:
            return
        self._pass_on_withdrawal(epoch)
        transition = self._under_way()
        if transition is not None and transition.epoch == epoch:
            self._drive(PreparationFailed(self._clock.now_s, epoch, "the leader has given it up"))
        if not self.undoing:  # else it is said then
            self._capacities.tell_leader(self.withdrawn_epoch)

    def _take_room(self) -> None:
        transition = self._under_way()
        if transition is None or transition.epoch != self._room_epoch or transition.phase is not Phase.PREPARING:
            return
        if self._homecoming.wants_room and self._links_up:
            self._homecoming.make_room(self._layer_came)
            self._after_pull(transition)

    # ------------------------------------------------------------ layers

    def _layer_came(self, epoch: Epoch, layer: int) -> None:
        """From the network's side."""
        self._voice.post_here(lambda: self._layer_is_here(epoch, layer))

    def _layer_is_here(self, epoch: Epoch, layer: int) -> None:
        transition = self._under_way()
        if not self._homecoming.arrived(epoch, layer, self._layer_came):
            return
        if transition is not None and transition.phase is Phase.PREPARING:
            self._after_pull(transition)

    def _after_pull(self, transition: Transition) -> None:
        if self._homecoming.complete:
            self._drive(MemoryReady(self._clock.now_s, transition.epoch))
        else:
            self._publish()

    def _undo(self) -> None:
        """The burst is back: layers are given up again, once nothing writes into them any more."""
        block_count = self._homecoming.undo(self._role.layers)
        if block_count is not None:
            self.undoing = False
            self._book.grow(block_count - self._book.block_count)
            self._capacities.tell_leader(self.withdrawn_epoch)

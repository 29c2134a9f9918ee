"""A restore, from the room that it needs to its layers, or to its end: the counterpart of
`services.worker.pipeline.restoring`.
"""

from collections.abc import Callable, Mapping, Sequence

from ballast.common.ids import Epoch, WorkerId
from ballast.common.transition import Phase, TransitionKind
from services.worker.core.plan import Plan
from services.worker.core.room import Room, RoomKeeper
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
        self._keeper: RoomKeeper | None = None  # leader: of the restore that is being prepared
        self._granted: dict[Room, Epoch] = {}  # the last restore for which the leader has granted it
        self.withdrawn_epoch = Epoch(0)  # the restore that the leader has given up
        self.undoing = False  # a restore was aborted

    @property
    def at_rest(self) -> bool:
        """Whether `poll` has nothing to wait for."""
        return not (self.undoing or self._keeper is not None or self._homecoming.wants is not Room.NONE)

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

    @property
    def may_begin(self) -> bool:
        """Stages say how large they are when the transition before is over for them."""
        return not self._role.leads or self._capacities.sizes is not None

    def begin(
        self, epoch: Epoch, sources: Mapping[int, Sequence[WorkerId]], progress: Progress, *, patient: bool
    ) -> None:
        self._homecoming.begin(epoch, sources, progress)
        if self._role.leads:
            self._keeper = RoomKeeper(self._capacities.sizes or {}, patient=patient)

    def poll(self, transition: Transition | None) -> None:
        """Between two turns: whatever waits for room."""
        if transition is not None and self._keeper is not None:
            self._lead(self._keeper, transition)
        if self._homecoming.wants is not Room.NONE:
            self._take_room()
        if self.undoing:
            self._undo()

    # ------------------------------------------------------------ room

    def _lead(self, keeper: RoomKeeper, transition: Transition) -> None:
        if transition.phase is not Phase.PREPARING or not self._links_up:
            return
        largest = max((view.block_count for view in self._core.placements()), default=0)
        block_count = keeper.seek(self._core.wanted_block_count, largest)
        if block_count is not None:
            self._capacities.limit(transition.epoch, block_count)
        if keeper.sought is not Room.NONE and self._core.settled:
            self.room_is_granted(transition.epoch, keeper.grant())

    def layers_are_back(self, epoch: Epoch, stage: WorkerId) -> None:
        """Leader: of that one."""
        transition = self._under_way()
        if self._keeper is not None and transition is not None and transition.epoch == epoch:
            self._keeper.layers_are_back([stage])

    def room_is_granted(self, epoch: Epoch, room: Room) -> None:
        """Told down the pipeline, behind all batches."""
        self._voice.pass_on(lambda m: m.room_is_granted(epoch, room))
        self._granted[room] = max(self._granted.get(room, Epoch(0)), epoch)
        self._take_room()

    def commit(self) -> None:
        self._keeper = None
        self._book.confine()

    def give_up(self, plan: Plan) -> None:
        """What has been prepared is undone. The leader's followers hear of it."""
        self._keeper = None
        self.undoing = plan.kind is TransitionKind.RESTORE
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
        transition, room = self._under_way(), self._homecoming.wants
        if transition is None or transition.epoch != self._granted.get(room) or transition.phase is not Phase.PREPARING:
            return
        if room is Room.LAYERS and self._links_up:
            self._homecoming.make_room_for_layers(self._layer_came)
            self._after_pull(transition)
        elif room is Room.KV:
            self._homecoming.make_room_for_kv(max(1, len(self._role.stages)))
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
        elif self._homecoming.wants is not Room.KV:
            self._publish()
        elif self._role.leads:
            self.layers_are_back(transition.epoch, self._role.me)
        else:
            epoch, me = transition.epoch, self._role.me
            self._voice.tell(self._role.leader, lambda m: m.layers_are_back(epoch, me))

    def _undo(self) -> None:
        """The burst is back: layers are given up again, once nothing writes into them any more."""
        block_count = self._homecoming.undo(self._role.layers)
        if block_count is not None:
            self.undoing = False
            self._book.grow(block_count - self._book.block_count)
            self._capacities.tell_leader(self.withdrawn_epoch)

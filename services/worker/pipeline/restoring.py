"""A member's part in a restore until its commit: room is granted or withdrawn, layers come, and KV is copied ahead.

`RoomKeeper` says which room is sought, `Homecoming` makes it and takes the layers back, `PrecopyRun` copies; here is
what the group hears of it.
"""

from collections.abc import Callable, Mapping, Sequence

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.transition import Phase, TransitionKind
from ballast.service.logs import get_logger
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.events import PrefillLimited
from services.worker.core.plan import Plan
from services.worker.core.room import Room, RoomKeeper
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import Event, MemoryReady, PreparationFailed
from services.worker.links.traffic import TrafficClass
from services.worker.pipeline.capacity import Capacities
from services.worker.pipeline.events import (
    KvAheadArrived,
    KvAheadAsked,
    LayerArrived,
    LayerAsked,
    LayerChecked,
    LayersBack,
    ShareTold,
    Woken,
)
from services.worker.pipeline.ground import Ground
from services.worker.pipeline.homecoming import Homecoming
from services.worker.pipeline.precopy import Place, PrecopyRun
from services.worker.pipeline.status import Progress
from services.worker.pipeline.wire import Topic

BEFORE_COMMIT = (Phase.PREPARING, Phase.PREPARED)
# Of prompts in a batch beside decodes. Layers that come take bandwidth, and time of the processor, from every batch:
# a long piece of a prompt on top of it would be the longest gap that a request has. In a pipeline a token waits for
# the pieces in all microbatches that are in flight.
_PROMPT_BLOCKS = 0.5
PROMPT_BLOCKS_ALONE = 2
_GRANTS = {Room.LAYERS: Topic.ROOM, Room.KV: Topic.KV_ROOM}


class Restoring:
    """`plan` with every plan, also a drop's, for which nothing is copied ahead."""

    def __init__(
        self,
        ground: Ground,
        capacities: Capacities,
        homecoming: Homecoming,
        *,
        max_running_count: int,
        under_way: Callable[[], Transition | None],
        drive: Callable[[Event], None],
    ) -> None:
        """`drive` tells the transition that is under way."""
        self._ground = ground
        self._role = ground.role
        self._links = ground.links
        self._capacities = capacities
        self._homecoming = homecoming
        self._published = ground.published
        self._lane = ground.lane
        self._book = ground.book
        self._memory = ground.memory
        self._max_running_count = max_running_count
        self._under_way = under_way
        self._drive = drive
        self._tell = ground.answers.tell
        self._now = ground.now
        self._post = ground.post
        self._keeper: RoomKeeper | None = None  # leader: of the restore that is being prepared
        self._granted: dict[Room, Epoch] = {}  # the last restore for which the leader has granted it
        self._withdrawn_epoch = Epoch(0)  # the restore that the leader has given up
        self.undoing = False  # a restore was aborted
        self.precopy: PrecopyRun | None = None  # of one that has ended until nothing is read for it
        self._asked_early: list[KvAheadAsked] = []  # before this member has made room: its blocks are still to move

    @property
    def idle(self) -> bool:
        """Nothing is left of the restore before."""
        return not self.undoing and self.copies_idle

    @property
    def at_rest(self) -> bool:
        return self.idle and self._keeper is None and self._homecoming.wants is Room.NONE

    @property
    def copies_idle(self) -> bool:
        """Nothing of the cache is read to be copied ahead."""
        return self.precopy is None or self.precopy.idle

    @property
    def withdrawn_epoch(self) -> Epoch:
        return self._withdrawn_epoch

    def plan(self, transition: Transition, progress: Progress) -> PrecopyRun:
        role = self._role
        narrow = self._capacities.smallest_narrow
        where = Place(role.me, transition.plan, role.leads, narrow, self._max_running_count)
        self._asked_early = []
        self.precopy = PrecopyRun(
            where, progress, self._ground, lambda ids, evacuate: self._homecoming.arrange(ids, evacuate=evacuate)
        )
        return self.precopy

    def poll(self, transition: Transition | None) -> None:
        """Between two batches: what waits for room, or for the end of what is on its way."""
        if self._role.leads and transition is not None and transition.plan.kind is TransitionKind.RESTORE:
            self._lead(transition)
        if self._homecoming.wants is not Room.NONE:
            self._take_room()
        elif transition is not None and self._homecoming.maps_kv and transition.phase is Phase.PREPARING:
            self._homecoming.map_kv()
            self._after_pull(transition)
        if self.undoing:
            self._undo()

    # ------------------------------------------------------------ its begin

    def why_not(self, epoch: Epoch) -> str:
        """Why there can be none, whatever memory there is; empty: there can."""
        return f"the leader has given epoch {epoch} up" if epoch <= self._withdrawn_epoch else ""

    def why_too_long(self) -> str:
        """Why the group must stay: a request that it runs would end with an error in a member of its own.

        A batch in flight may still add a token to it, and the next batch wants room for one more.
        """
        longest = self._lane.longest_token_count
        home = self._capacities.smallest_home * self._memory.kv.shape.block_tokens
        if longest + 2 <= home:
            return ""
        return f"a request has {longest} tokens, and a member has room for {home} without its group"

    @property
    def may_begin(self) -> bool:
        """Stages say how large they are when the transition before is over for them: a moment later than the planner
        hears of it, perhaps.
        """
        return not self._role.leads or self._capacities.sizes is not None

    def begin(self, epoch: Epoch, sources: Mapping[int, Sequence[WorkerId]], *, patient: bool) -> None:
        self._homecoming.begin(epoch, sources, self._published.counted)
        if self._role.leads:
            self._keeper = RoomKeeper(self._capacities.sizes or {}, patient=patient)

    def _limit_prefill(self, token_count: int | None) -> None:
        self._tell(PrefillLimited(self._now(), token_count))

    # ------------------------------------------------------------ room

    def _lead(self, transition: Transition) -> None:
        keeper, epoch = self._keeper, transition.epoch
        if transition.phase in BEFORE_COMMIT and (why := self.why_too_long()):
            self._drive(PreparationFailed(self._now(), epoch, why))
        if keeper is None or transition.phase is not Phase.PREPARING or self._links.missing:
            return
        longest = blocks_for(self._lane.longest_token_count + 2, self._memory.kv.shape.block_tokens)
        block_count = keeper.seek(self._lane.wanted_block_count, longest)
        if block_count is not None:
            self._capacities.limit(epoch, block_count)
            self._limit_prefill(max(1, int(_PROMPT_BLOCKS * self._memory.kv.shape.block_tokens)))
        if keeper.sought is not Room.NONE and self._lane.settled:  # nobody holds or will take a block beyond the limit
            self.room_is_granted(epoch, keeper.grant())

    def layers_are_back(self, event: LayersBack) -> None:
        """Leader: of that stage."""
        transition = self._under_way()
        if self._keeper is None or transition is None or transition.epoch != event.epoch:
            self._published.stale_total += 1
            return
        self._keeper.layers_are_back([event.source])
        self._post(Woken())
        if self._keeper.waits_for_demand:  # nothing comes, and nothing is copied yet
            get_logger().info(
                "layers are back; KV is copied when what is wanted fits",
                epoch=event.epoch,
                wanted_blocks=self._lane.wanted_block_count,
                room_blocks=self._keeper.room_blocks,
            )
            self._limit_prefill(None)

    def room_is_granted(self, epoch: Epoch, room: Room) -> None:
        """Told down the pipeline, behind all batches."""
        self._links.pass_on(_GRANTS[room], epoch)
        self._granted[room] = max(self._granted.get(room, Epoch(0)), epoch)
        self._take_room()

    def room_is_withdrawn(self, epoch: Epoch) -> None:
        """Follower: what it has from now on, it has for good, and the leader may count on it."""
        if self._role.leads:
            self._published.stale_total += 1
            return
        self._pass_on_withdrawal(epoch)
        transition = self._under_way()
        if transition is not None and transition.epoch == epoch:
            self._drive(PreparationFailed(self._now(), epoch, "the leader has given it up"))
        if not self.undoing:  # else it is said then
            self._capacities.tell_leader(self._withdrawn_epoch)

    def _pass_on_withdrawal(self, epoch: Epoch) -> None:
        """Down the pipeline, behind the grant of room if there was one."""
        self._links.pass_on(Topic.ROOM_WITHDRAWN, epoch)
        self._withdrawn_epoch = max(self._withdrawn_epoch, epoch)

    def _take_room(self) -> None:
        transition, room = self._under_way(), self._homecoming.wants
        if transition is None or transition.epoch != self._granted.get(room) or transition.phase is not Phase.PREPARING:
            return  # the leader's word may come before the planner's
        if room is Room.LAYERS and not self._links.missing:  # else peers could not be asked for layers
            self._homecoming.make_room_for_layers()
            self._after_pull(transition)
        elif room is Room.KV:
            self._homecoming.make_room_for_kv(max(1, len(self._role.stages)))
            self._after_pull(transition)

    # ------------------------------------------------------------ layers

    def layer_asked(self, event: LayerAsked) -> None:
        link, transition = event.link, self._under_way()
        if transition is not None and transition.epoch == event.epoch and transition.phase in BEFORE_COMMIT:
            self._homecoming.serve(link, event, self._role.layers)
        else:
            self._homecoming.refuse(link, event)

    def layer_news(self, event: LayerArrived | LayerChecked) -> None:
        if not self._homecoming.handle(event):
            return
        transition = self._under_way()
        if transition is not None and transition.phase is Phase.PREPARING:
            self._after_pull(transition)

    def _after_pull(self, transition: Transition) -> None:
        now_s, precopy = self._now(), self.the_precopy()
        if self._homecoming.failure:
            self._drive(PreparationFailed(now_s, transition.epoch, self._homecoming.failure))
        elif self._homecoming.wants is Room.KV:
            self._tell_layers_back(transition.epoch)
        elif self._homecoming.complete and not precopy.is_ready:
            precopy.ready(now_s)  # and MemoryReady when enough has been copied: see `copy_ahead`
        else:
            self._published.publish(transition)

    def _tell_layers_back(self, epoch: Epoch) -> None:
        if self._role.leads:
            self.layers_are_back(LayersBack(epoch, self._role.me))
        else:
            self._links.send(self._role.leader, TrafficClass.CONTROL, Topic.LAYERS_BACK, b"", stream=epoch)

    # ------------------------------------------------------------ KV ahead of the commit

    def the_precopy(self) -> PrecopyRun:
        if self.precopy is None:
            raise InvariantViolation("KV is copied ahead and no transition is under way")
        return self.precopy

    def ahead(self, event: ShareTold | KvAheadAsked | KvAheadArrived) -> None:
        """A peer may have made its room before this member hears that it may. What it asks for is not read until this
        member's blocks lie where they stay: they would be moved, and unmapped, meanwhile.
        """
        transition = self._under_way()
        moves = transition is not None and transition.phase is Phase.PREPARING and not self.the_precopy().arranged
        if isinstance(event, KvAheadAsked) and moves:
            self._asked_early.append(event)
            return
        self.the_precopy().handle(event, self._now())

    def copy_ahead(self, transition: Transition) -> None:
        """Between two batches."""
        if self.precopy is None:
            return
        now_s = self._now()
        self.precopy.poll(now_s, self._lane.placements)
        if self._asked_early and self.precopy.arranged:
            early, self._asked_early = self._asked_early, []
            for event in early:
                self.ahead(event)
        if transition.phase is Phase.PREPARING and self.precopy.enough(now_s):
            self._drive(MemoryReady(now_s, transition.epoch))

    def destinations(self) -> Mapping[SequenceId, WorkerId]:
        """Leader: who is going to lead which sequence."""
        return self.the_precopy().destinations(self._lane.placements())

    # ------------------------------------------------------------ its end

    def commit(self) -> None:
        """Nothing is copied ahead any more."""
        self.the_precopy().end()
        self._homecoming.end()
        self._book.confine()
        self._keeper = None

    def give_up(self, plan: Plan) -> None:
        """What has been prepared is undone. The leader's followers hear of it, behind its grant of room."""
        self.the_precopy().end()
        self._keeper = None
        self.undoing = plan.kind is TransitionKind.RESTORE
        if self.undoing and self._role.leads:
            self._pass_on_withdrawal(plan.epoch)
            self._limit_prefill(None)

    def _undo(self) -> None:
        """The burst is back: layers are given up again, once nothing writes into them any more."""
        if not self.the_precopy().idle:
            return
        block_count = self._homecoming.undo(self._role.layers)
        if block_count is not None:
            self.undoing = False
            self._book.grow(block_count - self._book.block_count)
            self._capacities.tell_leader(self._withdrawn_epoch)

    def abandon(self) -> None:
        """The group is no more: `Rescue` takes the layers back."""
        if self.precopy is not None:
            self.precopy.end()
        self.precopy, self._keeper, self.undoing = None, None, False
        self._asked_early = []

    def check(self) -> None:
        if self.precopy is not None:
            self.precopy.check()

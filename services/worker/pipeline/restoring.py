"""A member's part in a restore until its commit: the group is limited, and layers come into the memory that it leaves.

`LayerLoading` makes the room and takes the layers back; here is what the group hears of it.
"""

from collections.abc import Mapping, Sequence

from ballast.common.ids import Epoch, WorkerId
from ballast.common.transition import Phase, TransitionKind
from services.worker.core.events import PrefillLimited
from services.worker.core.phases import BEFORE_COMMIT
from services.worker.core.plan import Plan
from services.worker.core.transition import Transition
from services.worker.core.transition_messages import Event, MemoryReady, PreparationFailed
from services.worker.pipeline.capacity import Capacities
from services.worker.pipeline.context import MemberContext
from services.worker.pipeline.events import LayerArrived, LayerAsked, LayerChecked
from services.worker.pipeline.layer_loading import LayerLoading
from services.worker.pipeline.wire import Topic, room_to_bytes

# Of prompts in a batch beside decodes. Layers that come take bandwidth, and time of the processor, from every batch:
# a long piece of a prompt on top of it would be the longest gap that a request has. In a pipeline a token waits for
# the pieces in all microbatches that are in flight.
_PROMPT_BLOCKS = 0.5


class Restoring:
    """What it is asked to do returns the events that the transition is to be told."""

    def __init__(self, context: MemberContext, capacities: Capacities, layer_loading: LayerLoading) -> None:
        self._context = context
        self._role = context.role
        self._links = context.links
        self._capacities = capacities
        self.layer_loading = self._layer_loading = layer_loading
        self._published = context.published
        self._memory = context.memory
        self._tell = context.answers.tell
        self._now = context.now
        self._limit: int | None = None  # leader: of the restore that is being prepared, not granted yet
        self._leads = False  # leader: one is being prepared
        self._granted: tuple[Epoch, int] = (Epoch(0), 0)  # the last restore for which there is room, and how much
        self._withdrawn_epoch = Epoch(0)  # the restore that the leader has given up
        self.undoing = False  # a restore was aborted

    @property
    def idle(self) -> bool:
        """Nothing is left of the restore before."""
        return not self.undoing

    @property
    def at_rest(self) -> bool:
        return not (self.undoing or self._leads or self._layer_loading.wants_room)

    @property
    def withdrawn_epoch(self) -> Epoch:
        return self._withdrawn_epoch

    # ------------------------------------------------------------ its begin

    def why_not(self, transition: Transition) -> str:
        """Why there can be none, whatever memory there is; empty: there can."""
        if not transition.part.dissolves:
            return "a restore makes every member a whole worker of its own"
        epoch = transition.epoch
        return f"the leader has given epoch {epoch} up" if epoch <= self._withdrawn_epoch else ""

    def why_too_long(self) -> str:
        """Why the group must stay: a request that it runs would end with an error in a member of its own.

        A batch in flight may still add a token to it, and the next batch wants room for one more.
        """
        longest = self._context.group_scheduler.longest_token_count
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

    def begin(self, epoch: Epoch, sources: Mapping[int, Sequence[WorkerId]]) -> None:
        self._layer_loading.begin(epoch, sources, self._published.counted)
        self._leads, self._limit = self._role.leads, None

    def limit_prompts(self, *, beside: bool = False) -> None:
        """Until `commit` or the end of this restore. `beside`: of this worker's own requests, while the group that
        dissolves computes on the same devices.
        """
        token_count = max(1, int(_PROMPT_BLOCKS * self._memory.kv.shape.block_tokens))
        self._tell(PrefillLimited(self._now(), token_count, always=beside))

    def lift_limit(self) -> None:
        self._tell(PrefillLimited(self._now(), None))

    # ------------------------------------------------------------ room

    def lead(self, transition: Transition) -> Sequence[Event]:
        """Between two batches: the leader limits its group, and grants room once nobody holds a block beyond that."""
        epoch = transition.epoch
        if not self._role.leads or transition.plan.kind is not TransitionKind.RESTORE:
            return ()
        if transition.phase in BEFORE_COMMIT and (why := self.why_too_long()):
            return [PreparationFailed(self._now(), epoch, why)]
        if not self._leads or transition.phase is not Phase.PREPARING or self._links.missing:
            return ()
        if self._limit is None:
            self._limit = self._capacities.smallest_leaving
            self._capacities.limit(epoch, self._limit)
            self.limit_prompts()
        if not self._context.group_scheduler.settled:
            return ()
        self._leads = False
        return self.room_is_granted(transition, epoch, self._limit)

    def room_is_granted(self, transition: Transition | None, epoch: Epoch, block_count: int) -> Sequence[Event]:
        """Told down the pipeline, behind all batches."""
        self._links.pass_down(Topic.ROOM, room_to_bytes(epoch, block_count))
        if epoch >= self._granted[0]:  # else it is of one that is over
            self._granted = (epoch, block_count)
        return () if transition is None else self._take_room(transition)

    def room_is_withdrawn(self, transition: Transition | None, epoch: Epoch) -> Sequence[Event]:
        """Follower: what it has from now on, it has for good, and the leader may count on it."""
        if self._role.leads:
            self._published.stale_total += 1
            return ()
        self._pass_on_withdrawal(epoch)
        if transition is not None and transition.epoch == epoch and transition.phase in BEFORE_COMMIT:
            return [PreparationFailed(self._now(), epoch, "the leader has given it up")]
        if not self.undoing:  # else it is said then
            self._capacities.tell_leader(self._withdrawn_epoch)
        return ()

    def _pass_on_withdrawal(self, epoch: Epoch) -> None:
        """Down the pipeline, behind the grant of room if there was one."""
        self._links.pass_on(Topic.ROOM_WITHDRAWN, epoch)
        self._withdrawn_epoch = max(self._withdrawn_epoch, epoch)

    def take_awaited_room(self, transition: Transition) -> Sequence[Event]:
        """Between two batches: what was granted before the plan had come, or links were up."""
        return self._take_room(transition) if self._layer_loading.wants_room else ()

    def _take_room(self, transition: Transition) -> Sequence[Event]:
        epoch, block_count = self._granted
        if transition.epoch != epoch or transition.phase not in BEFORE_COMMIT:
            return ()  # the leader's word may come before the planner's
        if not self._layer_loading.wants_room:  # the leader has committed already, and its group needs less
            self._layer_loading.shrink(block_count)
            self._memory.make_room_for_layers((), block_count=self._context.book.block_count)
        elif not self._links.missing:  # else peers could not be asked for layers
            self._layer_loading.make_room(block_count)
            return self._after_pull(transition)
        return ()

    # ------------------------------------------------------------ layers

    def layer_asked(self, transition: Transition | None, event: LayerAsked) -> None:
        link = event.link
        if transition is not None and transition.epoch == event.epoch and transition.phase in BEFORE_COMMIT:
            self._layer_loading.serve(link, event, self._role.layers)
        else:
            self._layer_loading.refuse(link, event)

    def layer_news(self, transition: Transition | None, event: LayerArrived | LayerChecked) -> Sequence[Event]:
        if not self._layer_loading.handle(event) or transition is None or transition.phase is not Phase.PREPARING:
            return ()
        return self._after_pull(transition)

    def _after_pull(self, transition: Transition) -> Sequence[Event]:
        if self._layer_loading.failure:
            return [PreparationFailed(self._now(), transition.epoch, self._layer_loading.failure)]
        if self._layer_loading.complete:
            return [MemoryReady(self._now(), transition.epoch)]
        self._published.publish(transition)
        return ()

    # ------------------------------------------------------------ its end

    def commit(self) -> None:
        self._layer_loading.end()
        self._leads = False

    def give_up(self, plan: Plan) -> None:
        """What has been prepared is undone. The leader's followers hear of it, behind its grant of room."""
        self._leads = False
        self.undoing = plan.kind is TransitionKind.RESTORE
        if self.undoing and self._role.leads:
            self._pass_on_withdrawal(plan.epoch)
            self.lift_limit()

    def undo(self) -> None:
        """Between two batches, after an abort: layers are given up again, once nothing writes into them any more."""
        block_count = self._layer_loading.undo(self._role.layers) if self.undoing else None
        if block_count is not None:
            self.undoing = False
            self._context.grow_book(block_count)
            self._capacities.tell_leader(self._withdrawn_epoch)

    def abandon(self) -> None:
        """The group is no more: `Rescue` takes the layers back."""
        self._leads = self.undoing = False

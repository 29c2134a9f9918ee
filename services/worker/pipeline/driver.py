"""Executes one transition at a time: `core.transition` decides, its commands are executed here.

`drive` is the only loop. Each command has a case in `_execute`, which returns its result as the next event. Functions
that execute a command never drive the transition themselves. The member's parts execute commands that take more than
one message.
"""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.transition import Phase, TransitionKind
from ballast.service.logs import get_logger
from services.worker.core import transition_messages as t
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import BlockBook
from services.worker.core.draining import Draining
from services.worker.core.events import BatchesLost, GroupOpened, KvArrived, OfflinePaused, RoleChanged
from services.worker.core.phases import BEFORE_COMMIT
from services.worker.core.plan import Victim
from services.worker.core.transition import AFTER_COMMIT, Transition
from services.worker.links.traffic import TrafficClass
from services.worker.pipeline import events as e
from services.worker.pipeline.activations import Refill
from services.worker.pipeline.context import MemberContext
from services.worker.pipeline.handover import Handover
from services.worker.pipeline.layers import LayerLoading
from services.worker.pipeline.leaving import Leaving
from services.worker.pipeline.migrations import Migrations
from services.worker.pipeline.mover import KvMover
from services.worker.pipeline.role import MemberRole, own_layers
from services.worker.pipeline.stage_runner import StageRunner
from services.worker.pipeline.wire import Topic, room_to_bytes, roster_to_bytes
from services.worker.policy.placement import MemberView

_OVER = (Phase.DONE, Phase.ABORTED, Phase.FAILED)


class TransitionDriver:
    def __init__(
        self,
        context: MemberContext,
        *,
        stage: StageRunner,
        mover: KvMover,
        layer_loading: LayerLoading,
        migrations: Migrations,
        refill: Refill,
        broken: Callable[[Epoch, WorkerId, str], None],
        second: Callable[[MemberContext, MemberRole], tuple[MemberContext, StageRunner]],
    ) -> None:
        """`broken`: called when the loss of a member ends the group. `second`: creates the context and stage of a
        draining group, in addition to the context and stage of the current group.
        """
        self._context = context
        self._role = context.role
        self._links = context.links
        self._published = context.published
        self._answers = context.answers
        self._stage = stage
        self._handover = Handover(context)
        self._mover = mover
        self._layer_loading = layer_loading
        self._migrations = migrations
        self._memory = context.memory
        self._broken = broken
        self._second = second
        self._refill = refill
        self._now = context.now
        self.transition: Transition | None = None  # current or last one
        self._received: e.PlanReceived | None = None
        self.leaving: Leaving | None = None  # the draining group
        self._early: list[e.RosterArrived] = []  # rosters that arrived before this worker's Commit
        self._offline_paused = False

    # ------------------------------------------------------------ notifications

    def receive(self, event: e.PlanReceived) -> None:
        """Accept a plan that `core.transition.reception` has approved."""
        plan, current = event.plan, self.transition
        if current is not None and current.phase in BEFORE_COMMIT:  # the planner has dropped the current plan
            why = f"epoch {plan.epoch} is prepared instead"
            self.drive(t.AbortRequested(self._now(), current.epoch, why))
        self._migrations.give_up("the layout changes")
        if self.undoing or not self._migrations.idle:
            return  # memory must not be unmapped while a migration reads or writes it
        if plan.kind is TransitionKind.RESTORE and self._role.leads and self._context.room.sizes is None:
            return  # stages report their capacity when their previous transition ends
        self._links.retire(self._role.epoch)
        self.transition = Transition(self._role.me, plan)
        self._received = event
        self._published.begin(plan.epoch, self._context.book.block_count)
        self._handover.begin()
        self._early = []
        self._mover.core.begin(self._context.book)
        self.drive(t.PrepareRequested(self._now(), plan, self._context.room.granted(plan.epoch)))

    def told(self, epoch: Epoch, event: t.Event) -> None:
        transition = self.transition
        if transition is None or transition.epoch != epoch:
            self._published.stale_total += 1
            return
        match event:
            case t.EpochEnded() if not transition.part.lost:
                self._pass_end_on(epoch)
            case t.CommitRequested() if transition.phase is Phase.PREPARED:
                self._published.note_commit()
            case _:
                pass
        self.drive(event)

    def drive(self, *events: t.Event | e.RosterArrived) -> None:
        """Handle events, execute the resulting commands, and handle their results in turn until no event is left. Then
        send KV and publish once. If the group is lost, its transition and the remaining commands are dropped.
        """
        if not events:
            return
        queue = deque(events)
        while queue and self.transition is not None:
            for command in self._handle(self.transition, queue.popleft()):
                queue.extend(self._execute(command))
        self._mover.flush()
        if self.transition is not None:
            self._published.publish(self.transition)
        self._pause_offline(paused=self.under_way)
        self._stage.run_early()

    def _pause_offline(self, *, paused: bool) -> None:
        """Preempt offline sequences before the group changes, so that their KV is not moved and takes no room."""
        if paused != self._offline_paused:
            self._offline_paused = paused
            self._answers.tell(OfflinePaused(self._now(), paused))

    def _handle(self, transition: Transition, event: t.Event | e.RosterArrived) -> list[t.Command]:
        if isinstance(event, e.RosterArrived):
            self._make_room_for(event)
            event = replace(event.event, source=self._role.leader) if event.event.wave else event.event
        self._published.note(event)
        return transition.handle(event)

    @property
    def may_form(self) -> bool:
        return self.transition is None or self.transition.may_form

    @property
    def has_lost_batches(self) -> bool:
        return self.transition is not None and self.transition.has_lost_batches

    def poll(self) -> None:
        """Continue work that waits for a step boundary; called between two batches."""
        transition, group_scheduler = self.transition, self._context.group_scheduler
        if (
            transition is not None
            and transition.quiesces
            and not (group_scheduler.in_flight_count or group_scheduler.suspended_ids)
        ):
            # Release sequences that have ended since the last batch, while the stages still follow this leader.
            self._context.report_capacity(ends=True)
            self.drive(t.BoundaryReached(self._now(), transition.epoch))
        if transition is not None and transition.part.dissolves:
            self._poll_restore(transition)
        if transition is not None and transition.drains and self._the_leaving().poll():
            self.drive(t.GroupEnded(self._now(), transition.epoch))
        if transition is not None and transition.takes_checksums and self._layer_loading.server.idle:
            self.drive(t.MemoryReady(self._now(), transition.epoch))

    def _poll_restore(self, transition: Transition) -> None:
        epoch, before_commit = transition.epoch, transition.phase in BEFORE_COMMIT
        if before_commit and self._role.leads and (why := self._why_too_long()):
            self.drive(t.PreparationFailed(self._now(), epoch, why))
        if transition.limits and not transition.has_room():
            self.drive(self._limit_group(epoch))
        if transition.limits and self._context.group_scheduler.settled:
            self.drive(t.LimitHeld(self._now(), epoch))
        if transition.undoing and (block_count := self._layer_loading.undo(self._role.layers)) is not None:
            self._context.grow_book(block_count)
            self.drive(t.LayersGivenUp(self._now(), epoch))

    def link_made(self, event: e.LinkMade) -> None:
        if not self.is_current(event.epoch):  # a link of a cancelled plan; the current plan may still lack links
            return
        news = self._links.made(event)
        if news is not None:
            self.drive(news)

    def handover_arrived(self, event: e.HandoverArrived) -> None:
        transition = self.transition
        if transition is None or transition.epoch != event.epoch or self._handover.is_complete_from(event.source):
            self._published.stale_total += 1
            return
        if event.more:
            self._handover.on_partial_handover(event)
            if transition.phase is Phase.EXCHANGING:
                self._handover.adopt_by_tokens(self._now())
            return
        victims = self._handover.came(event)
        self.drive(t.HandoverReceived(self._now(), event.epoch, event.source, victims))

    def roster_arrived(self, event: e.RosterArrived) -> None:
        if not self.is_current(event.epoch):
            return
        if self._current().phase in BEFORE_COMMIT:
            self._early.append(event)
            return
        self.drive(event)

    def _make_room_for(self, event: e.RosterArrived) -> None:
        """Free the blocks of recomputed sequences, for sequences that keep their KV."""
        if event.event.wave:
            roster = replace(event.event, source=self._role.leader)
            self._links.pass_down(Topic.WAVE, roster_to_bytes(roster, event.recomputed))
            # KV that arrives over links is written into blocks that earlier batches have freed, which no kernel may
            # still use.
            self._memory.pool.backend.synchronise()
        else:
            for sequence_id in event.recomputed:
                self._context.book.release(sequence_id)
        self._mover.core.forget(event.recomputed)

    def kv_asked(self, event: e.KvAsked) -> None:
        if self.is_current(event.epoch):
            self._mover.asked(event)

    def activations_arrived(self, event: e.ActivationsArrived) -> None:
        if self.is_current(event.epoch) and (news := self._refill.arrived(event)) is not None:
            self.drive(news)

    def kv_left(self, event: e.KvLeft) -> None:
        if self.is_current(event.send.epoch):
            self.drive(*self._mover.left(event))

    def room_granted(self, epoch: Epoch, block_count: int) -> None:
        """Handle the leader's grant of room, which may arrive before the planner's Prepare."""
        if self.leaving is not None and self._current().epoch == epoch:
            self.leaving.limited(block_count)
            return
        self._links.pass_down(Topic.ROOM, room_to_bytes(epoch, block_count))
        self._context.room.grant(epoch, block_count)
        if self.transition is not None and self.transition.epoch == epoch:
            self.drive(t.RoomGranted(self._now(), epoch, block_count))

    def room_withdrawn(self, epoch: Epoch) -> None:
        """Handle the leader's withdrawal of a restore. The capacity that is then reported is final, and the leader may
        use it.
        """
        if self._role.leads:
            self._published.stale_total += 1
            return
        self._pass_on_withdrawal(epoch)
        if self.transition is not None and self.transition.epoch == epoch:
            self.drive(t.PreparationFailed(self._now(), epoch, "the leader has withdrawn it"))
        if not self.undoing:  # otherwise it is reported after undoing
            self._context.report_room()

    def _pass_on_withdrawal(self, epoch: Epoch) -> None:
        """Record a withdrawal and pass it down the pipeline, after the grant of room if there was one."""
        self._links.pass_on(Topic.ROOM_WITHDRAWN, epoch)
        self._context.room.withdraw(epoch)

    def layer_asked(self, event: e.LayerAsked) -> None:
        transition = self.transition
        if transition is not None and transition.epoch == event.epoch and transition.phase in BEFORE_COMMIT:
            self._layer_loading.server.serve(event, self._role.layers)
        else:
            self._layer_loading.server.refuse(event.link, event.layer)

    def on_layer(self, event: e.LayerArrived | e.LayerChecked) -> None:
        transition = self.transition
        if not self._layer_loading.handle(event) or transition is None or transition.phase is not Phase.PREPARING:
            return
        self.drive(*self._layers_loaded())
        self._published.publish(transition)

    def abandon(self) -> None:
        """Drop the transition and the draining group, because the group is lost."""
        self._handover.begin()
        self._refill.forget()
        self.transition = self.leaving = None
        self._offline_paused = False

    def end_leaving(self, why: str) -> None:
        """End the draining group on this worker, independently of its other members."""
        transition = self._current()
        for peer in transition.part.peers:
            self.drive(t.PeerLost(self._now(), peer, why))
        self._links.retire(Epoch(transition.epoch + 1))  # the other members see the links end

    # ------------------------------------------------------------ queries

    def is_current(self, epoch: Epoch) -> bool:
        """True for the epoch of the current transition. Other epochs are counted as stale."""
        current = self.transition is not None and self.transition.epoch == epoch
        self._published.stale_total += not current
        return current

    @property
    def under_way(self) -> bool:
        """True while a transition has begun and not ended."""
        return self.transition is not None and self.transition.phase not in _OVER

    @property
    def at_rest(self) -> bool:
        """True if no work waits for a step boundary, for room or for time to pass."""
        return not (self.under_way or self.undoing)

    @property
    def undoing(self) -> bool:
        return self.transition is not None and self.transition.undoing

    @property
    def epoch_in_force(self) -> Epoch:
        """Epoch of this worker's group, or of the group to which it is changing."""
        transition = self.transition
        if transition is not None and transition.phase in AFTER_COMMIT:
            return transition.epoch
        return self._role.epoch

    def awaits_roster(self, epoch: Epoch) -> bool:
        transition = self.transition
        return transition is not None and transition.epoch == epoch and transition.awaits_roster

    def check(self) -> None:
        if self.transition is not None:
            self.transition.check()
        if self.leaving is not None:
            self.leaving.check()

    # ------------------------------------------------------------ commands

    def _execute(self, command: t.Command) -> Sequence[t.Event | e.RosterArrived]:
        """Execute a command. Returns its result as an event if it is known at once."""
        match command:
            case t.ConnectLinks(epoch=epoch, peers=peers):
                received = self._plan_received()
                return self._links.connect(epoch, peers, received.data_addresses, received.lives)
            case t.PrepareMemory():
                return self._prepare_memory()
            case t.GrantRoom(epoch=epoch, block_count=block_count):
                self._links.pass_down(Topic.ROOM, room_to_bytes(epoch, block_count))
            case t.LoadLayers(epoch=epoch, block_count=block_count):
                sources = self._plan_received().sources
                self._layer_loading.load(epoch, sources, self._published.counted, block_count)
                return self._layers_loaded()
            case t.ShrinkGroup(block_count=block_count):
                self._layer_loading.shrink(block_count)
                self._memory.make_room_for_layers((), block_count=self._context.book.block_count)
            case t.WithdrawRoom(epoch=epoch):
                if self._role.leads:
                    self._pass_on_withdrawal(epoch)
                    self._context.lift_limit()
            case t.ReportRoom():
                self._context.report_room()
            case t.Quiesce():
                self._published.note_commit()
                if self._current().part.lost:
                    self._answers.tell(BatchesLost(self._now(), in_force=True))
            case t.SendEpochEnded(epoch=epoch, to=to):
                if self._current().part.lost:
                    self._handover.end_for(epoch, to)
                else:
                    self._pass_end_on(epoch)
            case t.TakeUp():
                return self._dissolve() if self._current().part.dissolves else [self._take_up()]
            case t.Empty(epoch=epoch):
                self._the_leaving().empty(self._current().lost)
                return [t.GroupEnded(self._now(), epoch)]
            case t.CloseSeat():
                self._the_leaving().close()
                self._context.lift_limit()
            case t.SendHandover(epoch=epoch, to=to):
                self._handover.send(epoch, to)
            case t.Lead(victims=victims):
                return [self._lead(victims, 0)]
            case t.LeadWave(wave=wave):
                return [self._lead((), wave)]
            case t.SendRoster():
                self._handover.send_roster(command)
            case t.SendKv():
                self._mover.send(command)
            case t.ExpectKv():
                self._mover.expect(command)
            case t.RefillKv(epoch=epoch, victim=victim, giver=giver):
                self._refill.begin(epoch, victim, giver)
            case t.SendKvComplete(sequence_id=sequence_id, to=to):
                self._links.send(to, TrafficClass.CONTROL, Topic.KV_COMPLETE, b"", stream=sequence_id)
            case t.Resume(sequence_id=sequence_id):
                self._resume(sequence_id)
            case t.ReleaseSent():
                self._release_sent()
            case t.SendWaveDone(wave=wave, to=to):
                self._links.send(to, TrafficClass.CONTROL, Topic.WAVE_DONE, b"", stream=wave)
            case t.ReleaseLost():
                self._release_lost()
            case t.Broken(peer=peer, why=why):
                self._broken(self._current().epoch, peer, why)
        return ()

    # ------------------------------------------------------------ prepare

    def _prepare_memory(self) -> Sequence[t.PreparationFailed]:
        """Check that this worker can execute the plan. If so, `MemoryReady` follows; in a drop, as soon as no job reads
        layers (`poll`).
        """
        transition, progress = self._current(), self._published.counted
        why = self._why_unfit(transition)
        if not why and transition.plan.kind is TransitionKind.RESTORE:
            progress.block_count_after = self._memory.home_block_count
        elif not why:
            dropped = self._layers_lost(transition)
            progress.block_count_after = self._memory.blocks_after_drop(dropped)
            self._layer_loading.learn(dropped)
        return [t.PreparationFailed(self._now(), transition.epoch, why)] if why else ()

    def _why_unfit(self, transition: Transition) -> str:
        """Return why this worker cannot take part in the transition; empty if it can."""
        restores, base = transition.plan.kind is TransitionKind.RESTORE, transition.part.old
        if restores and not transition.part.dissolves:
            return "after a restore every member must serve alone with all layers"
        if restores and transition.epoch <= self._context.room.withdrawn:
            return f"the leader has withdrawn epoch {transition.epoch}"
        if base is not None and (why := self._role.why_not_as_in(base)):
            return why
        if restores:
            return self._why_too_long()
        lacking = set(self._missing_layers(transition)) - set(self._memory.parameters.held_layers)
        return f"{self._role.me} does not hold layers {sorted(lacking)}, which it must execute" if lacking else ""

    def _why_too_long(self) -> str:
        longest = self._context.group_scheduler.longest_token_count
        return self._context.room.why_too_long(longest, self._memory.kv.shape.block_tokens)

    def _limit_group(self, epoch: Epoch) -> t.GroupLimited:
        block_count = self._context.room.limit(epoch)
        self._context.report_capacity()
        self._context.limit_prompts()
        return t.GroupLimited(self._now(), epoch, block_count)

    def _layers_loaded(self) -> Sequence[t.PreparationFailed | t.MemoryReady]:
        epoch = self._current().epoch
        if self._layer_loading.failure:
            return [t.PreparationFailed(self._now(), epoch, self._layer_loading.failure)]
        return [t.MemoryReady(self._now(), epoch)] if self._layer_loading.complete else ()

    def _missing_layers(self, transition: Transition) -> range:
        return own_layers(self._role.me, transition.part.new.members)

    def _layers_lost(self, transition: Transition) -> list[int]:
        kept = self._missing_layers(transition)
        return [layer for layer in self._memory.parameters.held_layers if layer not in kept]

    # ------------------------------------------------------------ commit

    def _take_up(self) -> t.TakenUp:
        """Between two batches: hand over sequences, move memory, change role."""
        transition, now_s, role = self._current(), self._now(), self._role
        self._published.note_commit()
        new, logged = transition.part.new, self._refill.logged
        if lost := transition.part.lost:
            self._handover.keep_only(transition, logged, gives=not role.is_last and role.next_stage in lost)
        elif logged is not None:
            logged.clear()
        own = self._handover.give(new.leader.worker_id, now_s) if transition.led_before else ()
        self._stage.forget_all()
        self._remap(transition)
        role.take_up(transition.epoch, new)
        self._published.clock.begin_layout()
        self._context.begin_room()
        self._answers.tell(RoleChanged(now_s, role.leads, len(new.members)))
        self._context.limit_prompts(beside=True, batch_count=len(new.members))
        progress = self._published.counted
        progress.halted_at_s = progress.commit_at_s
        progress.taken_up_at_s = self._now()
        progress.boundary_wait_s = progress.taken_up_at_s - progress.commit_at_s - progress.remap_s
        get_logger().info("layout taken up", epoch=transition.epoch, **progress.before_takeover())
        return t.TakenUp(self._now(), transition.epoch, own)

    def _dissolve(self) -> Sequence[t.Event | e.RosterArrived]:
        """Between two batches: begin to serve alone while the old group drains. Then handle the rosters that arrived
        early from faster peers.
        """
        transition, now_s, role, context = self._current(), self._now(), self._role, self._context
        progress = self._published.counted
        self._published.note_commit()
        self._layer_loading.end()
        if role.leads:
            progress.victim_count = progress.victims_waiting = len(context.group_scheduler.sequence_ids)
        homes, places = context.room.homes, context.core.limits.max_running_count
        targets = [MemberView(stage.worker_id, homes[stage.worker_id], places) for stage in role.stages]
        old_context, stage = self._second(context, copy.copy(role))
        draining = Draining(role.me, now_s, role.stages, targets, context.book.block_count)
        self.leaving = Leaving(
            old_context, stage, self._handover, draining, epoch=transition.epoch, grown=self._has_grown
        )
        block_count = self._memory.open_window()
        context.book = BlockBook(block_count, self._memory.kv.shape.block_tokens, self._memory.kv.window.first_block)
        progress.remap_s += self._now() - now_s
        self._answers.tell(GroupOpened(now_s, context.book))
        self._context.limit_prompts(beside=True)
        role.take_up(transition.epoch, transition.part.new)
        self._published.clock.begin_layout()
        context.begin_room(before_block_count=self._memory.home_block_count)
        context.report_capacity()
        progress.halted_at_s = progress.taken_up_at_s = self._now()
        progress.boundary_wait_s = max(0.0, progress.taken_up_at_s - progress.commit_at_s - progress.remap_s)
        get_logger().info("layout taken up", epoch=transition.epoch, **progress.before_takeover())
        self._handover.adopt_by_tokens(now_s)
        early, self._early = self._early, []
        return [t.TakenUp(self._now(), transition.epoch, draining=draining), *early]

    def _has_grown(self, block_count: int) -> None:
        self._context.grow_book(block_count)
        self._context.room.counts[self._role.me] = block_count
        self._context.report_capacity()

    def _pass_end_on(self, epoch: Epoch) -> None:
        """Pass the end of the epoch down the pipeline, after its last batch."""
        if self.leaving is not None:
            self.leaving.pass_end_on()
        else:
            self._links.pass_on(Topic.EPOCH_ENDED, epoch)

    def _remap(self, transition: Transition) -> None:
        lost, began_s = self._layers_lost(transition), self._now()
        progress = self._published.counted
        progress.freed_parameter_bytes = self._memory.parameter_bytes_of(lost)
        self._handover.note_final(self._memory.blocks_after_drop(lost))
        block_count = self._memory.drop_layers(lost)
        if self._memory.kv.retired_layers:
            block_count = self._memory.shrink_retired(self._mover.core.retire())
        self._context.grow_book(block_count)
        progress.remap_s += self._now() - began_s

    def _lead(self, victims: tuple[Victim, ...], wave: int) -> t.Led:
        """Decide which victims keep their KV now. There are further waves only if all holders of KV are stages of the
        new group, because only these receive every roster.
        """
        transition, now_s, progress = self._current(), self._now(), self._published.counted
        if wave:
            decision = self._handover.lead_on(progress, now_s)
            self._memory.pool.backend.synchronise()  # see `_make_room_for`
        else:
            decision = self._handover.lead(transition, victims, progress, now_s)
        self._mover.core.forget(decision.recomputed)
        admitted = self._context.group_scheduler.with_donors(decision.wave.admitted)
        return t.Led(self._now(), transition.epoch, admitted, wave, decision.wave.last)

    # ------------------------------------------------------------ exchange

    def _resume(self, sequence_id: SequenceId) -> None:
        now_s, progress = self._now(), self._published.counted
        progress.victims_waiting -= 1
        progress.note_stall(now_s - progress.halted_at_s)
        self._answers.tell(KvArrived(now_s, sequence_id))

    def _release_sent(self) -> None:
        """Release the room of KV that has been sent, for the next wave."""
        progress, began_s = self._published.counted, self._now()
        self._context.grow_book(self._memory.shrink_retired(*self._mover.core.compact()))
        progress.remap_s += self._now() - began_s
        self._context.report_room()

    def _release_lost(self) -> None:
        progress, began_s = self._published.counted, self._now()
        if self.leaving is not None:
            self.leaving.release()
            self.leaving = None
        else:
            self._context.grow_book(self._memory.release_retired())
            self._context.lift_limit()
            progress.remap_s += self._now() - began_s
            self._links.retire(self._role.epoch)
        progress.exchange_s = self._now() - progress.taken_up_at_s
        progress.block_count_after = self._context.book.block_count
        self._context.report_room()

    # ------------------------------------------------------------ preconditions

    def _current(self) -> Transition:
        if self.transition is None:
            raise InvariantViolation("no transition is under way")
        return self.transition

    def _the_leaving(self) -> Leaving:
        if self.leaving is None:
            raise InvariantViolation("no group is dissolving here")
        return self.leaving

    def _plan_received(self) -> e.PlanReceived:
        if self._received is None:
            raise InvariantViolation("no plan has been received")
        return self._received

"""This worker as a member of its group: dispatches events to its parts, and recovers when the group is lost. Used by
the engine thread only.

Decisions are pure (`core.transition`, `core.worker`); the parts execute them. `StageRunner` runs batches,
`TransitionDriver` executes transitions, and `MemberRole` is the role that all parts share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import Member as LayoutMember
from ballast.common.layout import Place
from ballast.common.transition import Phase
from ballast.service.logs import get_logger
from services.worker.core.blocks import BlockBook
from services.worker.core.events import Execute, GroupLost, GroupOpened, Removed, RoleChanged
from services.worker.core.mover import Mode
from services.worker.core.report import Parks
from services.worker.core.room import GroupRoom, RoomSizes
from services.worker.core.transition import LostStage, Reception, lost_stage, reception
from services.worker.core.transition_messages import KvReceived, PeerLost
from services.worker.core.turns import LaunchedBatch, MemberEvent, StepOutcome
from services.worker.core.worker import WorkerCore
from services.worker.memory.device import DeviceMemory
from services.worker.pipeline import events as e
from services.worker.pipeline.activations import ActivationLog, Refill
from services.worker.pipeline.context import Answer, MemberAnswers, MemberContext, MemberEnvironment
from services.worker.pipeline.driver import TransitionDriver
from services.worker.pipeline.grammars import GrammarsAhead
from services.worker.pipeline.layers import LayerLoading, Rescue
from services.worker.pipeline.links import LAYERS, Links
from services.worker.pipeline.migrations import Migrations
from services.worker.pipeline.mover import KvMover
from services.worker.pipeline.parking import Parking
from services.worker.pipeline.progress import Published, TransitionProgress
from services.worker.pipeline.role import MemberRole
from services.worker.pipeline.stage_clock import HostWatch
from services.worker.pipeline.stage_runner import StageRunner


class GroupMember:
    """This worker's `TurnMember` (`services.worker.core.turns`)."""

    def __init__(
        self,
        me: WorkerId,
        core: WorkerCore,
        book: BlockBook,
        memory: DeviceMemory,
        environment: MemberEnvironment,
    ) -> None:
        self.me = me
        self._now = now = environment.now
        self.published = published = Published(now)
        self._memory = memory
        self._hub = hub = environment.hub
        self._role = role = MemberRole(me, memory.kv.shape.layer_count)
        self._links = links = environment.links(environment.plane, role, now, environment.post)
        self._answers = answers = MemberAnswers(core, self.run)
        compile_grammar = environment.compile_grammar
        self._grammars = None if compile_grammar is None else GrammarsAhead(role, links, compile_grammar)
        self._rescue: Rescue | None = None  # recovery after the loss of the group; None: not under way
        self._lost: LostStage | None = None  # lost stage that a stand-in may replace
        self._is_awake = True  # True: `poll` may have work to do
        pace = environment.plane.pace

        def sizes() -> RoomSizes:
            return RoomSizes(memory.leaving_block_count, memory.home_block_count, core.limits.swap_block_count)

        self._context = context = MemberContext(
            me, core, book, memory, role, links, hub, published, answers, now, environment.post, GroupRoom(me, sizes)
        )
        context.begin_room()
        self._layer_loading = layer_loading = LayerLoading(
            context,
            background=environment.background,
            hurried=lambda: pace.memory_is_awaited,
        )
        watch = environment.watch or partial(HostWatch, now)

        def awaits_roster(epoch: Epoch) -> bool:
            return self._driver.awaits_roster(epoch)

        store, block_tokens = environment.activations, memory.kv.shape.block_tokens
        log = None if store is None else ActivationLog(store, block_tokens)
        self._refill = Refill(context, environment.engine, log, core.limits.max_batch_tokens)
        self._copier = environment.copier
        self._stage = stage = StageRunner(
            context,
            environment.engine,
            environment.copier,
            pace=pace,
            watch=watch(),
            awaits_roster=awaits_roster,
            preempts=environment.preempts,
            log=log,
        )
        stage.launch = environment.launch

        def second(context: MemberContext, role: MemberRole) -> tuple[MemberContext, StageRunner]:
            links = environment.links(environment.plane, role, now, environment.post)
            context = replace(context, role=role, links=links, leaving=True)
            engine, copier = environment.engine, environment.copier
            return context, StageRunner(
                context, engine, copier, pace=pace, watch=watch(), awaits_roster=lambda _: False
            )

        self._mover = mover = KvMover(context)
        self._migrations = migrations = Migrations(
            context, mover, layout_changes=lambda: self._rescue is not None or self._driver.under_way
        )
        self._driver = TransitionDriver(
            context,
            stage=stage,
            mover=mover,
            layer_loading=layer_loading,
            migrations=migrations,
            refill=self._refill,
            broken=self._break_up,
            second=second,
        )

        self._parking = Parking(context, environment.background, layer_loading, self._why_not_park, self._open_group)

    # ------------------------------------------------------------ called by the shell

    @property
    def may_form(self) -> bool:
        return self._driver.may_form

    @property
    def wakes_at_s(self) -> float | None:
        leaving, transition = self._driver.leaving, self._driver.transition
        if self._lost is not None and self._now() < self._lost.until_s:
            return self._lost.until_s
        return leaving.wakes_at_s if leaving is not None and transition is not None and transition.drains else None

    @property
    def pipeline_request_count(self) -> int | None:
        leaving, count = self._driver.leaving, len(self._context.book.sequence_ids)
        if leaving is not None:
            return count + leaving.request_count
        return count if self._role.stages or self._driver.under_way else None

    @property
    def memory(self) -> DeviceMemory:
        return self._memory

    @property
    def role(self) -> MemberRole:
        return self._role

    @property
    def at_rest(self) -> bool:
        """True if there was no event since the last `poll`, and no work under way depends on `poll`."""
        return not self._is_awake

    @property
    def led_stage_count(self) -> int:
        """Number of stages of the pipeline that this worker leads, or of a draining one; 0: it leads none."""
        leaving = self._driver.leaving
        role = self._role if leaving is None else leaving.role
        return len(role.stages) if role.leads else 0

    @property
    def leads(self) -> bool:
        return self._role.leads

    @property
    def place(self) -> Place | None:
        """This worker's group, and the epoch that created it. Thread-safe."""
        return self._role.place

    @property
    def parks(self) -> Parks:
        """Whether this worker is parked. Thread-safe."""
        return self._parking.parks

    @property
    def newest_epoch(self) -> Epoch:
        return self.published.newest_epoch

    @property
    def progress(self) -> dict[Epoch, TransitionProgress]:
        return self.published.progress

    @property
    def links(self) -> Links:
        return self._links

    def handle(self, event: MemberEvent) -> list[Answer]:
        self._is_awake = self._is_awake or not isinstance(event, e.BatchArrived | e.ResultArrived)
        driver = self._driver
        match event:
            case e.PlanReceived():
                self._plan_received(event)
            case e.Told(epoch=epoch, event=PeerLost() as lost):
                self._peer_lost(epoch, lost)
            case e.Told(epoch=epoch, event=told):
                driver.told(epoch, told)
            case e.BatchArrived():
                self._stage_of(event.epoch).arrived(event)
            case e.ResultArrived() if driver.has_lost_batches:
                self.published.stale_total += 1
            case e.ResultArrived():
                if (outcome := self._stage_of(event.epoch).outcome(event)) is not None:
                    self._answers.add(outcome)
            case e.GrammarAnnounced(grammar=grammar):
                if self._grammars is not None:
                    self._grammars.comes(grammar)
            case e.HandoverArrived():
                driver.handover_arrived(event)
            case e.RosterArrived():
                driver.roster_arrived(event)
            case e.KvAsked():
                driver.kv_asked(event)
            case e.ActivationsAsked():
                self._refill.asked(event)
            case e.ActivationsArrived():
                driver.activations_arrived(event)
            case e.KvLeft(send=send) if send.mode is Mode.EXCHANGE:
                driver.kv_left(event)
            case e.KvLanded():
                for news in self._mover.landed(event):
                    if isinstance(news, KvReceived):
                        driver.drive(news)
                    else:
                        self._migrations.answer((news,))
            case e.LinkMade():
                driver.link_made(event)
            case e.CapacityTold():
                self._on_capacity(event)
            case e.RoomGranted(epoch=epoch, block_count=block_count):
                driver.room_granted(epoch, block_count)
            case e.RoomWithdrawn(epoch=epoch):
                driver.room_withdrawn(epoch)
            case e.LayerAsked() if event.epoch == LAYERS:
                self._layer_asked(event)
            case e.LayerAsked():
                driver.layer_asked(event)
            case e.LayerArrived() | e.LayerChecked():
                driver.on_layer(event)
            case e.ParkOrdered():
                self._parking.ordered(event)
            case e.PartnersNamed(partners=partners):
                self._links.keep(partners)
            case e.MigrationOrdered() | e.MigrationTold() | e.KvLeft():
                self._migrations.handle(event)
            case e.Woken():
                pass  # see `poll`
            case _:
                raise InvariantViolation(f"unknown event {type(event).__name__}")
        return self._answers.take()

    def poll(self) -> list[Answer]:
        if self._role.leads:
            group_scheduler = self._context.group_scheduler
            has_work = bool(group_scheduler.in_flight_count) or group_scheduler.has_work
            self.published.clock.note_work(self._now(), has_work=has_work)
        if not self._is_awake:
            return []
        self._driver.poll()
        if self._lost is not None:
            self._wait_for_stand_in(self._lost)
        self._migrations.poll()
        if self._rescue is not None and self._rescue.poll(self._now(), self._context.grow_book):
            self._become_full_replica(self._rescue)
        self._parking.poll()
        rests = (
            self._rescue is self._lost is None
            and self._driver.at_rest
            and self._migrations.at_rest
            and self._parking.at_rest
        )
        self._is_awake = not rests
        return self._answers.take()

    def run(self, command: Execute | Removed) -> StepOutcome | LaunchedBatch | None:
        tables = command.block_tables if isinstance(command, Execute) else ()
        leaving = self._driver.leaving
        stage = leaving.stage if command.leaving and leaving is not None else self._stage
        return stage.run(command.batch, tables, None, command.copies)

    def _stage_of(self, epoch: Epoch) -> StageRunner:
        """Return the stage runner of the epoch's group, which is the current group, or the draining one while it
        computes.
        """
        leaving, transition = self._driver.leaving, self._driver.transition
        if leaving is None or transition is None or not transition.drains or leaving.role.epoch != epoch:
            return self._stage
        return leaving.stage

    def check(self) -> None:
        self._context.book.check()
        self._memory.check()
        self._migrations.check()
        self._mover.check()
        self._driver.check()
        if self._context.book.block_count > self._memory.kv.block_count:
            raise InvariantViolation(
                f"{self._context.book.block_count} blocks in the book, but {self._memory.kv.block_count} mapped"
            )

    def close(self) -> None:
        self._layer_loading.close()
        self._links.close()
        if self._copier is not None:
            self._copier.close()

    def _plan_received(self, event: e.PlanReceived) -> None:
        """Handle a plan. A plan in which this worker has no group means that its group has ended because a member
        counted as lost, perhaps without a broken link. The planner repeats such a plan until this worker holds all
        layers.
        """
        if self._rescue is not None or self._parking.under_way:
            return
        plan, role, driver = event.plan, self._role, self._driver
        whole = driver.at_rest and not role.stages and len(role.layers) == role.layer_count
        answer = reception(
            plan, self.me, self.newest_epoch, driver.transition, in_group=bool(role.stages), is_whole=whole
        )
        epoch = plan.epoch
        if answer is Reception.TAKE:
            driver.receive(event)
        elif answer is Reception.LEAVE:
            why = f"epoch {epoch} begins without this group"
            if driver.leaving is not None:
                driver.end_leaving(why)  # this worker then holds all layers, and the planner repeats the plan
            else:
                self._break_up(driver.epoch_in_force, self.me, why)
        elif answer is Reception.CONFIRM:
            role.take_up(epoch, plan.target_of(self.me))
            progress = self.published.begin(epoch, self._context.book.block_count)
            progress.block_count_after = self._context.book.block_count
            self.published.publish_as(epoch, Phase.DONE)

    def _layer_asked(self, event: e.LayerAsked) -> None:
        """Handle a worker's request for a layer outside of any transition. Layers about to be dropped are no longer
        read.
        """
        if self._parking.under_way or not self._driver.at_rest:
            self._layer_loading.server.refuse(event.link, event.layer)
        else:
            self._layer_loading.server.serve(event, self._role.layers)

    def _on_capacity(self, event: e.CapacityTold) -> None:
        if self._rescue is None:
            self._context.on_capacity(event)
        else:
            self.published.stale_total += 1

    # ------------------------------------------------------------ loss of a member

    def _peer_lost(self, epoch: Epoch, event: PeerLost) -> None:
        """Handle a lost link. Before a commit, the preparation fails. In the current group, the group ends unless a
        stand-in may replace the lost stage.
        """
        if epoch == LAYERS:
            self._layer_loading.peer_lost(event.peer)
            return
        self._migrations.peer_lost(epoch, event.peer, event.why)
        if self._rescue is not None:
            return
        role, transition = self._role, self._driver.transition
        in_group = epoch == role.epoch and role.has_stage(event.peer)
        if in_group and transition is not None and event.peer in transition.part.lost:
            return
        at_rest = self._driver.at_rest and self._lost is None
        if transition is not None and (transition.epoch == epoch or in_group):
            self._driver.drive(event)
        if not in_group or self._rescue is not None or (self._lost is not None and self._lost.peer == event.peer):
            return
        self._lost = lost_stage(self._now(), epoch, event, role.stages, self.me, at_rest=at_rest)
        if self._lost is None:
            self._break_up(role.epoch, event.peer, event.why)
        else:
            get_logger().warning("a stage is lost: its group waits for a stand-in", peer=event.peer, why=event.why)

    def _wait_for_stand_in(self, lost: LostStage) -> None:
        if lost.epoch != self._role.epoch or not self._role.stages:
            self._lost = None
        elif not lost.waits(self._now(), self._driver.transition):
            self._break_up(self._role.epoch, lost.peer, lost.why)

    def _break_up(self, epoch: Epoch, peer: WorkerId, why: str) -> None:
        """End all requests, which dispatchers replay, then load the missing layers."""
        get_logger().error("the group is left", peer=peer, why=why, epoch=epoch)
        now_s, role, self._lost = self._now(), self._role, None
        survivors = [stage for stage in role.stages if stage.worker_id not in (self.me, peer)]
        self.published.fail_open(f"{peer}: {why}")
        self._migrations.abandon(f"{peer}: {why}")
        self._mover.abandon()
        self._links.retire(Epoch(max(epoch, role.epoch) + 1))
        self._driver.abandon()
        role.leave_group()
        self._answers.tell(GroupLost(now_s))
        self._answers.tell(RoleChanged(now_s, leads=False))
        for sequence_id in self._context.book.sequence_ids:
            self._context.book.release(sequence_id)
        self._stage.abandon()
        progress = self.published.counted
        progress.why = f"{peer}: {why}"
        self._rescue = Rescue(
            epoch,
            progress,
            self._layer_loading,
            quiet=lambda: not self._hub.receives and self._migrations.idle,
            sources=lambda: self._holders(survivors),
            kept=role.layers,
            began_s=now_s,
        )
        self.published.publish_as(epoch, Phase.FAILED)

    def _holders(self, survivors: Sequence[LayoutMember]) -> dict[int, list[WorkerId]]:
        """Return, for each layer, the peers from which to request it: survivors of the group that hold it, then all
        other peers, which may hold it.
        """
        givers = self._links.givers()
        of_group = [stage for stage in survivors if stage.worker_id in givers]
        others = [peer for peer in givers if all(stage.worker_id != peer for stage in survivors)]
        if others:  # each worker begins with a different peer
            turn = sorted([*others, self.me]).index(self.me) % len(others)
            others = others[turn:] + others[:turn]
        return {
            layer: [*(s.worker_id for s in of_group if s.first_layer <= layer < s.last_layer), *others]
            for layer in range(self._role.layer_count)
        }

    def _become_full_replica(self, rescue: Rescue) -> None:
        """Lead a group of this worker alone, once all layers are loaded."""
        self._rescue = None
        self._role.become_full_replica()
        self._open_group()
        rescue.progress.block_count_after = self._context.book.block_count
        self.published.publish_as(rescue.epoch, Phase.DONE)

    def _open_group(self) -> None:
        """Open a group of this worker alone."""
        self._memory.open_window()
        block_count, kv = self._memory.close_leaving(), self._memory.kv
        book = BlockBook(block_count, kv.shape.block_tokens, kv.window.first_block)
        self._context.book = book
        self._answers.tell(GroupOpened(self._now(), book))
        self._context.begin_room()

    # ------------------------------------------------------------ parking

    def _why_not_park(self) -> str:
        core, driver = self._context.core, self._driver
        if not self._memory.can_park:
            return "not all of its ranks share their memory with this process"
        if self._role.stages or self._rescue is not None or driver.under_way or driver.undoing or driver.leaving:
            return "it is in a group or a transition"
        if not core.is_empty or core.in_flight_count or self._context.book.sequence_ids:
            return "it has requests"
        return "" if self._migrations.at_rest and self._migrations.idle and not self._hub.receives else "it moves KV"

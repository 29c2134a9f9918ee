"""Handles the planner's calls: converts protobuf to events of the member, and reports the progress of transitions."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ballast.common.errors import InvalidRequest, InvariantViolation, NotPossible, StaleEpoch
from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.transition import Phase
from ballast.rpc.codec import LAYOUT
from ballast.rpc.transition import KIND, STATUS
from ballastpb.worker.v1 import worker_pb2 as pb
from services.worker.core.phases import BEFORE_COMMIT, deadline_s
from services.worker.core.plan import Plan, part_of
from services.worker.core.transition_messages import AbortRequested, CommitRequested, PreparationFailed
from services.worker.core.turns import MemberEvent
from services.worker.pipeline.events import MigrationOrdered, ParkOrdered, PartnersNamed, PlanReceived, Told
from services.worker.pipeline.member import GroupMember
from services.worker.pipeline.progress import TransitionProgress

HOLD_S = 0.05
NOT_PREPARED: tuple[Phase | None, ...] = (None, Phase.PREPARING)
NOT_TAKEN_UP: tuple[Phase | None, ...] = (Phase.PREPARED, Phase.COMMITTING)
_SILENCE_S = 3.0  # a planner polls a transition in progress several times a second
_MOST_PARTNERS = 16  # maximum partners to which links are kept open
_LONGEST_ORDER_S = 60.0  # maximum validity of an order to migrate


class Timer(Protocol):
    def cancel(self) -> None: ...


class Later(Protocol):
    """Calls a function after a delay (seconds)."""

    def __call__(self, delay_s: float, act: Callable[[Epoch], None], epoch: Epoch, /) -> Timer: ...


def _on_the_loop(delay_s: float, act: Callable[[Epoch], None], epoch: Epoch, /) -> Timer:
    return asyncio.get_running_loop().call_later(delay_s, act, epoch)


class Transitions:
    """Receives the planner's calls. Used on the event loop, while the member runs on the engine thread."""

    def __init__(
        self,
        member: GroupMember,
        incarnation: Incarnation,
        post: Callable[[MemberEvent], None],
        now: Callable[[], float] = time.monotonic,
        later: Later = _on_the_loop,
    ) -> None:
        self._member = member
        self._incarnation = incarnation
        self._post = post
        self._now = now
        self._later = later
        self._aborted: dict[Epoch, str] = {}  # epochs aborted before their Prepare, which is then stale
        self._joined = Epoch(0)  # newest epoch whose links have been opened
        self._heard_at_s = 0.0  # time of the last call about a transition
        self._published = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog: Timer | None = None
        member.published.on_publish = self._wake

    def prepare(self, request: pb.PrepareRequest) -> None:
        """Pass a plan on to the member. Raises InvalidRequest or StaleEpoch; a known plan is no error."""
        plan = Plan(KIND.member(request.kind, "kind"), LAYOUT.record(request.base), LAYOUT.record(request.target))
        try:
            plan.base.check()
            plan.target.check()
        except InvariantViolation as error:
            raise InvalidRequest("target", error.why) from error
        self.take(plan, [(s.layer, WorkerId(s.worker_id) or None) for s in request.sources])

    def take(self, plan: Plan, sources: Sequence[tuple[int, WorkerId | None]]) -> None:
        """Pass a valid plan on to the member. `sources`: (layer, holder) in the order of attempts; None: host copy or
        checkpoint.

        Raises InvalidRequest or StaleEpoch, like `prepare`.
        """
        newest, self._heard_at_s = self._member.newest_epoch, self._now()
        if plan.epoch < newest:
            raise StaleEpoch("layout epoch", plan.epoch, newest)
        if plan.epoch in self._aborted:
            return
        me = self._member.me
        part = part_of(plan, me)
        if part is None:
            raise InvalidRequest("target", f"{me} has no part in it")
        life = next(m.incarnation for m in part.new.members if m.worker_id == me)
        if life != self._incarnation:  # meant for an earlier process at this address
            raise StaleEpoch("worker incarnation", life, self._incarnation)
        addresses = {m.worker_id: m.data_address for g in plan.target.groups for m in g.members}
        holders: dict[int, tuple[WorkerId, ...]] = {}
        for layer, holder in sources:
            holders[layer] = holders.get(layer, ()) + ((holder,) if holder else ())
        event = PlanReceived(plan, addresses, holders)
        if part.peers and plan.epoch > max(newest, self._joined):
            self._joined = plan.epoch
            self._member.links.join(event, part.peers)
        self._post(event)
        self._watch(plan.epoch)

    def _watch(self, epoch: Epoch) -> None:
        """Withdraw a plan when its planner falls silent. A late Commit is answered with this failure."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        phase = self._phase(epoch) or Phase.PREPARING
        if phase in BEFORE_COMMIT:
            self._watchdog = self._later(deadline_s(phase), self._take_back_if_silent, epoch)

    def _take_back_if_silent(self, epoch: Epoch) -> None:
        phase, silent_s = self._phase(epoch) or Phase.PREPARING, self._now() - self._heard_at_s
        if phase not in BEFORE_COMMIT or silent_s < deadline_s(phase):
            self._watch(epoch)
            return
        why = f"no planner has asked about it for {silent_s:.0f} s"
        self._post(Told(epoch, PreparationFailed(self._now(), epoch, why)))

    async def when_prepared(self, epoch: int) -> pb.TransitionStatus:
        """Wait briefly for the end of the preparation and return the status, so that the planner need not poll for a
        phase of a few milliseconds.
        """
        return await self._status_beyond(NOT_PREPARED, epoch)

    async def when_taken_up(self, epoch: int) -> pb.TransitionStatus:
        return await self._status_beyond(NOT_TAKEN_UP, epoch)

    async def _status_beyond(self, phases: Collection[Phase | None], epoch: int) -> pb.TransitionStatus:
        """Return the status as soon as the phase is not in `phases` (None: unknown epoch), or after a short timeout."""
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOLD_S):
                while self._phase(epoch) in phases:
                    self._published.clear()
                    if self._phase(epoch) in phases:
                        await self._published.wait()
        return self.status(epoch)

    def _phase(self, epoch: int) -> Phase | None:
        progress = self._member.progress.get(Epoch(epoch))
        return Phase.ABORTED if epoch in self._aborted else None if progress is None else progress.phase

    def _wake(self) -> None:
        """Wake waiting calls. Runs on the engine thread."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: the process is exiting
                loop.call_soon_threadsafe(self._published.set)

    def commit(self, epoch: int) -> None:
        self._post(Told(Epoch(epoch), CommitRequested(self._now(), Epoch(epoch))))

    def abort(self, epoch: int, why: str) -> None:
        if Epoch(epoch) not in self._member.progress:
            self._aborted = {Epoch(epoch): why}
        self._post(Told(Epoch(epoch), AbortRequested(self._now(), Epoch(epoch), why)))

    def migrate(self, request: pb.MigrateRequest) -> None:
        """Pass an order to migrate requests on to the member. Raises InvalidRequest if it does not apply to this
        worker.
        """
        me = self._member.me
        source, target = [p.worker_id for p in request.source], [p.worker_id for p in request.target]
        if not source or not target or (source + target).count(me) != 1:
            raise InvalidRequest("target", f"{me} must be in one of two different groups: {source}, {target}")
        if request.block_budget < 1 or not 0 < request.within_s <= _LONGEST_ORDER_S:
            raise InvalidRequest("block_budget, within_s", f"out of range: {request.block_budget}, {request.within_s}")
        others = request.target if me in source else request.source
        self._post(
            MigrationOrdered(
                epoch=Epoch(request.epoch),
                source=WorkerId(source[0]),
                target=WorkerId(target[0]),
                peers={WorkerId(other.worker_id): other.data_address for other in others},
                block_budget=request.block_budget,
                until_s=self._now() + request.within_s,
                cause_id=request.cause_id,
                longest_first=request.longest_first,
            )
        )

    def park(self, incarnation: int, *, park: bool) -> None:
        """Pass an order to park or wake on to the member. Raises StaleEpoch if the order is for another incarnation,
        NotPossible if this worker cannot be parked.
        """
        if incarnation != self._incarnation:
            raise StaleEpoch("worker incarnation", incarnation, self._incarnation)
        if park and not self._member.parks.wake_s:
            why = "its parameters do not fit into this host's memory, or its ranks share none: see its log"
            raise NotPossible(f"this instance cannot be parked, because {why}")
        self._post(ParkOrdered(park))

    def name_partners(self, request: pb.NamePartnersRequest) -> Epoch:
        me = self._member.me
        partners = {WorkerId(one.worker_id): one.data_address for one in request.partners if one.worker_id != me}
        self._post(PartnersNamed(dict(itertools.islice(partners.items(), _MOST_PARTNERS))))
        self._take_back(Epoch(request.settled_epoch))
        return self._member.newest_epoch

    def _take_back(self, settled_epoch: Epoch) -> None:
        """Abort a transition that no planner will commit. Does nothing if the planner has just called, because calls
        may be reordered.
        """
        epoch = self._member.newest_epoch
        waits = self._phase(epoch) in BEFORE_COMMIT and epoch <= settled_epoch
        if waits and self._now() - self._heard_at_s >= _SILENCE_S:
            why = f"no planner remembers it; all epochs up to {settled_epoch} are decided"
            self._post(Told(epoch, AbortRequested(self._now(), epoch, why)))

    def status(self, epoch: int) -> pb.TransitionStatus:
        """Return the status of a transition; phase UNSPECIFIED for an unknown epoch."""
        phase, why, progress = self.said(Epoch(epoch))
        if progress is not None:
            return STATUS.message(progress)
        if phase is Phase.ABORTED:
            return pb.TransitionStatus(epoch=epoch, phase=pb.TRANSITION_PHASE_ABORTED, why=why)
        return pb.TransitionStatus(epoch=epoch)

    def said(self, epoch: Epoch) -> tuple[Phase, str, TransitionProgress | None]:
        """Return the phase of a transition here, its reason and its progress; phase NONE for an unknown epoch."""
        self._heard_at_s = self._now()
        progress = self._member.progress.get(epoch)
        if progress is not None:
            return progress.phase, progress.why, progress
        aborted = self._aborted.get(epoch)
        return (Phase.NONE, "", None) if aborted is None else (Phase.ABORTED, aborted, None)

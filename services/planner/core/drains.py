"""Drains requested by operators, stored by request id so that a repeated request gets the same answer (pure)."""

from dataclasses import dataclass, field

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout
from services.planner.core import messages as p
from services.planner.core.membership import Membership


@dataclass(slots=True)
class Drain:
    worker_id: WorkerId
    incarnation: Incarnation  # the incarnation to drain; later ones are not affected
    epoch: Epoch | None = None  # first epoch in which it drains; None: no epoch yet


@dataclass(slots=True)
class Drains:
    limit: int
    _by_request: dict[str, Drain] = field(default_factory=dict[str, Drain])  # by request id, oldest first

    def requested(self, event: p.WorkerDrainRequested, membership: Membership, *, all_known: bool) -> list[p.Command]:
        """Mark the worker as draining. A repeated request gets the first answer."""
        earlier = self._by_request.get(event.request_id)
        if earlier is not None:
            if earlier.worker_id != event.worker_id:
                return [p.RefuseDrain(event.request_id, p.DrainRefusal.ID_REUSED)]
            return [] if earlier.epoch is None else [p.AnswerDrain(event.request_id, earlier.epoch)]
        known = membership.known.get(event.worker_id)
        if known is None:
            why = p.DrainRefusal.NO_SUCH_WORKER if all_known else p.DrainRefusal.NOT_READY
            return [p.RefuseDrain(event.request_id, why)]
        target = known.placeable
        if not self._add(event.request_id, target.worker_id, target.incarnation):
            return [p.RefuseDrain(event.request_id, p.DrainRefusal.FULL)]
        membership.drain(target.worker_id, target.incarnation)
        return [p.AskWorkerToDrain(target.worker_id, target.incarnation, target.address, event.cause_id)]

    def _add(self, request_id: str, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """Add a drain, dropping the oldest answered one if there are too many. Returns False if all are pending."""
        if len(self._by_request) >= self.limit:
            answered = next((r for r, drain in self._by_request.items() if drain.epoch is not None), None)
            if answered is None:
                return False
            del self._by_request[answered]
        self._by_request[request_id] = Drain(worker_id, incarnation)
        return True

    def ordered(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """True if a drain of this incarnation was requested. The instance may have counted as lost meanwhile and
        returned without receiving the order.
        """
        return any((d.worker_id, d.incarnation) == (worker_id, incarnation) for d in self._by_request.values())

    def settle(self, layout: Layout) -> list[tuple[str, Epoch]]:
        """Settle the drains whose workers get no new requests in this layout. Returns request ids and epochs."""
        taking = {(m.worker_id, m.incarnation) for group in layout.groups for m in group.members if not m.draining}
        settled: list[tuple[str, Epoch]] = []
        for request_id, drain in self._by_request.items():
            if drain.epoch is None and (drain.worker_id, drain.incarnation) not in taking:
                drain.epoch = layout.epoch
                settled.append((request_id, layout.epoch))
        return settled

    def give_up(self) -> list[str]:
        """Drop the pending drains and return their ids."""
        waiting = [request_id for request_id, drain in self._by_request.items() if drain.epoch is None]
        for request_id in waiting:
            del self._by_request[request_id]
        return waiting

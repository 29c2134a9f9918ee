"""A drop of two workers by two successive planners with one store, for `tests.support.exhaustive`.

Planners are the real cores. Calls to members and store operations take time and complete in any order; some of them, or
their answers, are lost. A replaced planner continues until it learns of its replacement.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.transition import Phase
from services.planner.core import messages as p
from services.planner.core.conductor import ConductorRules
from services.planner.core.machine import PlannerCore, PlannerRules
from services.planner.core.stages import Stage
from services.planner.core.transition import MemberSaid
from tests.support.exhaustive import frozen
from tests.support.planner_core import LOAD, MODEL

A, B = WorkerId("a"), WorkerId("b")
_QUIET_S = 20.0  # later timers do not matter here
_NEXT = {Phase.PREPARING: Phase.PREPARED, Phase.COMMITTING: Phase.EXCHANGING, Phase.EXCHANGING: Phase.DONE}
_TAKEN_BACK = (Phase.NONE, Phase.PREPARING, Phase.PREPARED, Phase.FAILED, Phase.ABORTED)
_UNSEEN = (
    "history",
    "prediction_log",
    "record",
    "_requests",
    "sizing",
    "events",
)  # fields of a core that influence no decision

Operation = p.LoadLayout | p.WriteLayout | p.WriteJournal | p.ReadLoads


class Seat:
    """A planner with its outstanding operations and calls."""

    def __init__(self) -> None:
        rules = ConductorRules(restores=False, request_timeout_s=5.0, retry_s=1000.0)
        self.core = PlannerCore(
            PlannerRules(coalesce_s=0.1, verify_interval_s=1000.0, retry_s=0.5, max_drains=2, transitions=rules)
        )
        self.timer_s: float | None = None
        self.operations: list[Operation] = []
        self.calls: dict[WorkerId, list[tuple[p.CallMember, int]]] = {A: [], B: []}  # with the fencing token


class Handover:
    def __init__(self, losses: int, only: Sequence[str] = ("",)) -> None:
        """`losses`: total number of faults. `only`: allows only faults whose names contain one of these strings."""
        self.only = only
        self.seats = [Seat(), Seat()]
        self.losses, self.now_s, self.token = losses, 0.0, 1_000
        self.leader = 0
        self.stored: p.StoredLayout | None = None
        self.in_force: list[Epoch] = []
        self.phases: dict[tuple[WorkerId, Epoch], Phase] = {}
        self.fences: dict[WorkerId, int] = {A: 0, B: 0}  # the highest token seen by each member
        self.lead(0)
        for _ in range(20):
            self._settle(0)
            self.fire(0)
        self.tell(0, p.DropRequested(self.now_s, "c", "d1", None, worker_ids=(A, B)))
        while not any(self.seats[0].calls.values()):
            self.operate(0)

    def key(self) -> object:
        seats = [
            (frozen(seat.core, now_s=self.now_s, unseen=_UNSEEN), seat.operations, seat.calls, self._late(seat))
            for seat in self.seats
        ]
        return seats, self.losses, self.token, self.leader, self.stored, self.phases, self.fences

    def _late(self, seat: Seat) -> int:
        """Coarse duration of the current stage, which matters because a deadline ends the stage."""
        coordinator = seat.core.conductor.coordinator
        return min(8, int((self.now_s - coordinator._entered_s) / 8.0)) if coordinator is not None else 0

    # ------------------------------------------------------------------------------------------ actions

    def tell(self, seat: int, event: p.Event) -> None:
        one = self.seats[seat]
        for command in one.core.handle(event):
            match command:
                case p.SetTimer(at_s):
                    one.timer_s = at_s
                case p.LoadLayout() | p.WriteLayout() | p.WriteJournal() | p.ReadLoads():
                    one.operations.append(command)
                case p.CallMember():
                    one.calls[command.member.worker_id].append((command, one.core.store.token or 0))
                case p.ProbeInstance():
                    self.tell(seat, self._probed(command))
                case _:
                    pass

    def _probed(self, probe: p.ProbeInstance) -> p.InstanceProbed:
        return p.InstanceProbed(self.now_s, "c", probe.worker_id, probe.incarnation, p.Probed.ALIVE)

    def actions(self) -> Iterator[tuple[str, Callable[["Handover"], None]]]:
        for name, act in self._all_actions():
            if not name.startswith("fault") or any(word in name for word in self.only):
                yield name, act

    def _all_actions(self) -> Iterator[tuple[str, Callable[["Handover"], None]]]:
        for number, seat in enumerate(self.seats):
            if seat.operations:
                name = type(seat.operations[0]).__name__
                yield f"p{number}: {name} ends", lambda w, n=number: w.operate(n)
                if self.losses and not isinstance(seat.operations[0], p.ReadLoads):
                    yield f"fault: p{number}: the answer to {name} is lost", lambda w, n=number: w.operate(n, lost=True)
            for worker, calls in seat.calls.items():
                if not calls:
                    continue
                what = f"{calls[0][0].call.name} of p{number}"
                yield f"{worker} hears {what}", lambda w, n=number, k=worker: w.call(n, k)
                if self.losses:
                    yield f"fault: {what} is lost", lambda w, n=number, k=worker: w.lose(n, k)
                    yield (
                        f"fault: {worker}'s answer to {what} is lost",
                        lambda w, n=number, k=worker: w.call(n, k, True),
                    )
            busy = seat.operations or any(seat.calls.values())
            if not busy and seat.timer_s is not None and seat.timer_s < self.now_s + _QUIET_S:
                yield f"p{number}'s time comes", lambda w, n=number: w.fire(n)
            if number != self.leader and seat.core.active:
                yield f"p{number} hears that it leads no more", lambda w, n=number: w.depose(n)
        for (worker, epoch), phase in self.phases.items():
            if phase in _NEXT and (phase is not Phase.EXCHANGING or self._all_exchange(epoch)):
                yield f"{worker} is {_NEXT[phase].value}", lambda w, k=(worker, epoch): w.go_on(k)
            if phase is Phase.PREPARING and self.losses:
                yield f"fault: {worker} fails", lambda w, k=(worker, epoch): w.fail(k)
        if self.losses and self.leader == 0:
            yield "fault: p1 leads", lambda w: w.take_over()

    def _all_exchange(self, epoch: Epoch) -> bool:
        return all(self.phases.get((w, epoch)) in (Phase.EXCHANGING, Phase.DONE) for w in (A, B))

    def lead(self, seat: int) -> None:
        self.leader = seat
        self.token += 1_000
        self.tell(seat, p.LeadershipChanged(self.now_s, "c", self.token))
        self.tell(seat, p.SnapshotBegan(self.now_s, "c"))
        for worker in (A, B):
            self.tell(seat, p.InstanceUp(self.now_s, "c", worker, Incarnation(1), f"{worker}:1", MODEL, False))
        self.tell(seat, p.SnapshotEnded(self.now_s, "c"))

    def take_over(self) -> None:
        self.losses -= 1
        self.lead(1)

    def depose(self, seat: int) -> None:
        self.tell(seat, p.LeadershipChanged(self.now_s, "c", None))
        for calls in self.seats[seat].calls.values():
            calls.clear()
        self.seats[seat].operations.clear()

    def fire(self, seat: int) -> None:
        timer_s, self.seats[seat].timer_s = self.seats[seat].timer_s, None
        if timer_s is not None:
            self.now_s = max(self.now_s, timer_s)
            self.tell(seat, p.TimerFired(self.now_s, "c"))

    def _settle(self, seat: int) -> None:
        while self.seats[seat].operations:
            self.operate(seat)

    def operate(self, seat: int, *, lost: bool = False) -> None:
        """The store executes its first outstanding operation. `lost`: its answer is lost."""
        self.losses -= lost
        operation = self.seats[seat].operations.pop(0)
        match operation:
            case p.LoadLayout():
                failed, loaded = p.LoadFailed(self.now_s, "c"), p.LayoutLoaded(self.now_s, "c", self.stored)
                self.tell(seat, failed if lost else loaded)
            case p.ReadLoads(cause_id):
                self.tell(seat, p.LoadsRead(self.now_s, cause_id, p.ClusterLoad({A: LOAD, B: LOAD}), ""))
            case p.WriteLayout():
                outcome = p.WriteOutcome.UNAVAILABLE if (done := self._write_layout(operation)) and lost else done
                self.tell(seat, p.WriteSettled(self.now_s, "c", operation, outcome))
            case p.WriteJournal():
                outcome = p.WriteOutcome.UNAVAILABLE if (done := self._write_journal(operation)) and lost else done
                self.tell(seat, p.WriteSettled(self.now_s, "c", operation, outcome))

    def _write_layout(self, write: p.WriteLayout) -> p.WriteOutcome:
        if write.token != self.token:
            return p.WriteOutcome.FENCED
        if (self.stored.layout.epoch if self.stored else None) != write.expected_epoch:
            return p.WriteOutcome.CONFLICT
        journal = self.stored.journal if self.stored else None
        self.stored = p.StoredLayout(write.layout, write.model, write.partial, journal)
        self.in_force.append(write.layout.epoch)
        return p.WriteOutcome.WRITTEN

    def _write_journal(self, write: p.WriteJournal) -> p.WriteOutcome:
        journal, stored = write.journal, self.stored
        if write.token != self.token:
            return p.WriteOutcome.FENCED
        assert stored is not None
        if stored.journal == journal:
            return p.WriteOutcome.WRITTEN
        conditional = journal.stage in (Stage.PREPARING, Stage.COMMITTING)
        stale = stored.journal is not None and stored.journal.epoch > journal.epoch
        if stale or (conditional and stored.layout.epoch != write.expected_epoch):
            return p.WriteOutcome.CONFLICT
        if journal.stage is Stage.COMMITTING:
            stored = replace(stored, layout=journal.target, partial=write.partial)
            self.in_force.append(journal.target.epoch)
        self.stored = replace(stored, journal=journal)
        return p.WriteOutcome.WRITTEN

    def lose(self, seat: int, worker: WorkerId) -> None:
        self.losses -= 1
        self.seats[seat].calls[worker].pop(0)

    def call(self, seat: int, worker: WorkerId, lost: bool = False) -> None:
        """A member receives its first outstanding call. `lost`: its answer is lost."""
        self.losses -= lost
        command, token = self.seats[seat].calls[worker].pop(0)
        if token < self.fences[worker]:
            return
        self.fences[worker] = token
        key = worker, command.journal.epoch
        phase = self.phases.get(key, Phase.NONE)
        match command.call:
            case p.WorkerCall.PREPARE if phase is Phase.NONE:
                self.phases[key] = Phase.PREPARING
            case p.WorkerCall.COMMIT:
                assert command.journal.epoch in self.in_force, "commit was called before it was stored"
                assert phase not in (Phase.NONE, Phase.PREPARING, Phase.ABORTED), f"commit while {phase}"
                if phase is Phase.PREPARED:
                    self.phases[key] = Phase.COMMITTING
            case p.WorkerCall.ABORT:
                assert phase in _TAKEN_BACK, f"{worker} was asked to abort while {phase}"
                self.phases[key] = Phase.ABORTED
            case _:
                pass
        if not lost:
            said = MemberSaid(self.now_s, worker, self.phases.get(key, Phase.NONE), "")
            self.tell(seat, p.MemberAnswered(self.now_s, "c", command.journal.epoch, said))

    def go_on(self, key: tuple[WorkerId, Epoch]) -> None:
        self.phases[key] = _NEXT[self.phases[key]]

    def fail(self, key: tuple[WorkerId, Epoch]) -> None:
        self.losses -= 1
        self.phases[key] = Phase.FAILED

    # ------------------------------------------------------------------------------------------ invariants

    def check(self) -> None:
        for seat in self.seats:
            seat.core.check()
        assert self.in_force == sorted(set(self.in_force)), f"epochs must increase: {self.in_force}"
        for epoch in {epoch for _, epoch in self.phases}:
            said = {self.phases.get((worker, epoch), Phase.NONE) for worker in (A, B)}
            gone_on = said & {Phase.EXCHANGING, Phase.DONE}
            assert not (gone_on and Phase.ABORTED in said), f"one member went ahead, the other one undid it: {said}"

    def check_end(self) -> None:
        assert self.stored is not None
        assert self.stored.journal is not None
        journal, conductor = self.stored.journal, self.seats[self.leader].core.conductor
        assert not conductor.busy, f"the transition never ends: {conductor.coordinator and conductor.coordinator.stage}"
        assert journal.stage.over, f"the journal stays in {journal.stage}"
        said = {self.phases.get((worker, journal.epoch), Phase.NONE) for worker in (A, B)}
        if self.stored.layout.epoch == journal.epoch:
            assert said == {Phase.DONE}, f"the layout is in force, but members are {said}"
        else:
            assert said <= {Phase.NONE, Phase.FAILED, Phase.ABORTED}, f"it was aborted, but members are {said}"

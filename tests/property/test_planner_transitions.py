"""The planner's core with transitions, for any actions of members, store, monitor and operators, in any order."""

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout
from ballast.common.overload import OverloadPolicy
from ballast.common.transition import Phase, TransitionKind
from services.planner.core import messages as p
from services.planner.core.conductor import ConductorRules
from services.planner.core.machine import PlannerCore, PlannerRules
from services.planner.core.stages import Stage
from services.planner.core.transition import MemberSaid
from tests.support.planner_core import EXTENT, LOAD, MODEL

WORKERS = st.sampled_from([WorkerId("w0"), WorkerId("w1"), WorkerId("w2")])
FORWARD = {
    None: Phase.PREPARING,
    Phase.PREPARING: Phase.PREPARED,
    Phase.COMMITTING: Phase.EXCHANGING,
    Phase.EXCHANGING: Phase.DONE,
}


class TransitionMachine(RuleBasedStateMachine):
    """Members pass through the phases that the planner's calls allow; their answers arrive late, wrong or never."""

    policy = OverloadPolicy.DROP

    def __init__(self) -> None:
        super().__init__()
        transitions = ConductorRules(policy=self.policy, request_timeout_s=2.0, retry_s=0.5)
        self.core = PlannerCore(
            PlannerRules(coalesce_s=0.1, verify_interval_s=1.0, retry_s=0.2, max_drains=2, transitions=transitions)
        )
        self.now_s = 0.0
        self.token = 10_000
        self.stored: p.StoredLayout | None = None
        self.writes: list[p.WriteLayout | p.WriteJournal] = []  # in progress
        self.loads = 0
        self.reads: list[p.ReadLoads] = []
        self.lives: dict[WorkerId, int] = {}
        self.dead: set[WorkerId] = set()
        self.phases: dict[tuple[WorkerId, int, int], Phase] = {}  # (worker, incarnation, epoch) -> phase
        self.in_force: list[Layout] = []
        self.requests = 0
        self.probes: list[p.ProbeInstance] = []
        self.waiting: set[str] = set()
        self.change_leadership(lead=True)
        self.tell(p.SnapshotBegan(self.now_s, "c"))
        for name in ("w0", "w1", "w2"):
            self.up(WorkerId(name))
        self.tell(p.SnapshotEnded(self.now_s, "c"))
        self.time_goes_by(0.3)
        self.time_goes_by(0.3)

    def tell(self, event: p.Event) -> None:
        for command in self.core.handle(event):
            match command:
                case p.LoadLayout():
                    self.loads += 1
                case p.WriteLayout() | p.WriteJournal():
                    self.writes.append(command)
                case p.ReadLoads():
                    self.reads.append(command)
                case p.CallMember():
                    self.called(command)
                case p.AnswerChange(request_id) | p.RefuseChange(request_id):
                    self.waiting.discard(request_id)
                case p.ProbeInstance():
                    self.probes.append(command)
                case _:
                    pass

    def called(self, command: p.CallMember) -> None:
        """Delivers a call to its member, unless that incarnation is gone. Another rule lets members answer."""
        worker_id, epoch = command.member.worker_id, command.journal.epoch
        if worker_id in self.dead or self.lives.get(worker_id) != command.member.incarnation:
            return
        key = (worker_id, command.member.incarnation, epoch)
        phase = self.phases.get(key)
        match command.call:
            case p.WorkerCall.PREPARE if phase is None:
                self.phases[key] = Phase.PREPARING
            case p.WorkerCall.COMMIT if phase is Phase.PREPARED:
                assert self.stored is not None
                assert self.stored.journal is not None
                assert self.stored.journal.epoch >= epoch, "commit was called before the journal recorded it"
                assert any(layout.epoch == epoch for layout in self.in_force), "commit was called before it was stored"
                self.phases[key] = Phase.COMMITTING
            case p.WorkerCall.ABORT if command.journal.stage is Stage.EXCHANGING:
                assert command.journal.kind is TransitionKind.RESTORE, "only a restore can be aborted while exchanging"
                # A new planner may not know yet that a member has failed. Such a member has already left the
                # transition.
                assert phase in (Phase.EXCHANGING, Phase.DONE, Phase.FAILED)
            case p.WorkerCall.ABORT:
                assert phase in (None, *_TAKEN_BACK), f"{worker_id} was asked to abort epoch {epoch} while {phase}"
                self.phases[key] = Phase.ABORTED
            case _:
                pass

    # ------------------------------------------------------------ rules

    @rule(lead=st.sampled_from([True, True, False]), rarely=st.integers(0, 5))
    def leadership_changes(self, lead: bool, rarely: int) -> None:
        if rarely == 5:
            self.change_leadership(lead)

    def change_leadership(self, lead: bool) -> None:
        self.token += 1000
        self.tell(p.LeadershipChanged(self.now_s, "c", self.token if lead else None))

    @precondition(lambda self: self.loads or self.writes or self.reads)
    @rule(fails=st.sampled_from([False, False, False, False, True]))
    def operate(self, fails: bool) -> None:
        """Completes one operation of the store or of the monitor."""
        if self.writes:
            self.settle(fails)
        elif self.loads:
            self.loads -= 1
            self.tell(p.LoadFailed(self.now_s, "c") if fails else p.LayoutLoaded(self.now_s, "c", self.stored))
        else:
            self.read_loads(fails)

    @rule()
    def everybody_goes_on(self) -> None:
        self.time_goes_by(0.05)
        if self.core.conductor.busy:
            self.members_go_on()
        self.time_goes_by(0.05)

    @rule(pause_s=st.sampled_from([0.02, 0.3]))
    def time_goes_by(self, pause_s: float) -> None:
        """Completes all operations in progress successfully, then lets `pause_s` pass."""
        while self.loads or self.writes or self.reads:
            self.operate(fails=False)
        self.fire(pause_s)

    def settle(self, answer_is_lost: bool) -> None:
        write = self.writes.pop(0)
        outcome = self.carry_out(write)
        if answer_is_lost:
            outcome = p.WriteOutcome.UNAVAILABLE
        self.tell(p.WriteSettled(self.now_s, "c", write, outcome))

    def carry_out(self, write: p.WriteLayout | p.WriteJournal) -> p.WriteOutcome:
        """Applies a write according to the rules of the real Redis scripts."""
        if write.token != self.token:
            return p.WriteOutcome.FENCED
        stored_epoch = self.stored.layout.epoch if self.stored else None
        old = self.stored.journal if self.stored else None
        if isinstance(write, p.WriteLayout):
            if stored_epoch != write.expected_epoch:
                return p.WriteOutcome.CONFLICT
            self.stored = p.StoredLayout(write.layout, write.model, write.partial, old)
            self.in_force.append(write.layout)
            return p.WriteOutcome.WRITTEN
        if old == write.journal:
            return p.WriteOutcome.WRITTEN
        conditional = write.journal.stage in (Stage.PREPARING, Stage.COMMITTING)
        stale = old is not None and old.epoch > write.journal.epoch
        if self.stored is None or stale or (conditional and stored_epoch != write.expected_epoch):
            return p.WriteOutcome.CONFLICT
        if write.journal.stage is Stage.COMMITTING:
            self.stored = replace(self.stored, layout=write.journal.target, partial=write.partial)
            self.in_force.append(write.journal.target)
        self.stored = replace(self.stored, journal=write.journal)
        return p.WriteOutcome.WRITTEN

    @rule(worker_id=WORKERS)
    def up(self, worker_id: WorkerId) -> None:
        if worker_id in self.dead or worker_id not in self.lives:
            self.lives[worker_id] = self.lives.get(worker_id, 0) + 1
            self.dead.discard(worker_id)
        life = Incarnation(self.lives[worker_id])
        self.tell(p.InstanceUp(self.now_s, "c", worker_id, life, "host:1", MODEL, False))

    @precondition(lambda self: self.lives)
    @rule(worker_id=WORKERS, rarely=st.integers(0, 5))
    def die(self, worker_id: WorkerId, rarely: int) -> None:
        if rarely == 5 and worker_id in self.lives and worker_id not in self.dead:
            self.dead.add(worker_id)
            self.tell(p.InstanceLost(self.now_s, "c", worker_id, Incarnation(self.lives[worker_id]), "killed"))

    @rule(worker_ids=st.permutations(["w0", "w1", "w2"]), count=st.integers(0, 3))
    def drop(self, worker_ids: list[str], count: int) -> None:
        self.requests += 1
        request_id = f"d{self.requests}"
        self.waiting.add(request_id)
        names = tuple(WorkerId(w) for w in worker_ids[:count])
        required = None if names else EXTENT
        self.tell(p.DropRequested(self.now_s, "c", request_id, required, worker_ids=names))

    @rule()
    def restore(self) -> None:
        self.requests += 1
        self.waiting.add(f"r{self.requests}")
        self.tell(p.RestoreRequested(self.now_s, "c", f"r{self.requests}"))

    @rule(over=st.booleans())
    def signal(self, over: bool) -> None:
        self.tell(p.OverloadRaised(self.now_s, "c", EXTENT) if over else p.ReliefRaised(self.now_s, "c"))

    def read_loads(self, fails: bool) -> None:
        cause_id = self.reads.pop(0).cause_id
        loads = {} if fails else {w: LOAD for w in self.lives if w not in self.dead}
        self.tell(p.LoadsRead(self.now_s, cause_id, p.ClusterLoad(loads), "no monitor" if not loads else ""))

    @precondition(lambda self: self.core.conductor.coordinator is not None)
    @rule(worker_id=WORKERS, what=st.sampled_from(["goes on"] * 6 + ["says", "fails", "fails"]))
    def member(self, worker_id: WorkerId, what: str) -> None:
        coordinator = self.core.conductor.coordinator
        assert coordinator is not None
        key = (worker_id, self.lives.get(worker_id, 0), coordinator.journal.epoch)
        phase = self.phases.get(key)
        if phase is None or worker_id in self.dead:
            return
        if what == "goes on":
            self.phases[key] = FORWARD.get(phase, phase)
        elif what == "fails" and phase not in (Phase.DONE, Phase.ABORTED):
            self.phases[key] = Phase.FAILED
        self.answer(worker_id, coordinator.journal.epoch, self.phases[key])

    @precondition(lambda self: self.core.conductor.coordinator is not None)
    @rule()
    def members_go_on(self) -> None:
        coordinator = self.core.conductor.coordinator
        assert coordinator is not None
        for worker_id in coordinator.members:
            if self.core.conductor.coordinator is coordinator:
                self.member(worker_id, "goes on")

    def answer(self, worker_id: WorkerId, epoch: Epoch, phase: Phase) -> None:
        said = MemberSaid(self.now_s, worker_id, phase, "failed" if phase is Phase.FAILED else "")
        self.tell(p.MemberAnswered(self.now_s, "c", epoch, said))

    @rule(pause_s=st.sampled_from([0.01, 0.1, 0.6, 3.0]))
    def fire(self, pause_s: float) -> None:
        self.now_s += pause_s
        probes, self.probes = self.probes, []
        for probe in probes:
            lives = probe.worker_id not in self.dead and self.lives.get(probe.worker_id) == probe.incarnation
            found = p.Probed.ALIVE if lives else p.Probed.GONE
            self.tell(p.InstanceProbed(self.now_s, "c", probe.worker_id, probe.incarnation, found))
        self.tell(p.TimerFired(self.now_s, "c"))

    # ------------------------------------------------------------ invariants

    @invariant()
    def consistent(self) -> None:
        self.core.check()
        epochs = [layout.epoch for layout in self.in_force]
        assert epochs == sorted(set(epochs)), f"an epoch was used twice or decreased: {epochs}"
        for layout in self.in_force[-1:]:
            layout.check()

    def teardown(self) -> None:
        """Once all members answer, every transition must end, every request must be answered, and every living worker
        must serve.
        """
        self.token += 1000
        self.tell(p.LeadershipChanged(self.now_s, "c", self.token))
        self.tell(p.SnapshotBegan(self.now_s, "c"))
        for worker_id in sorted(self.lives):
            if worker_id not in self.dead:
                self.up(worker_id)
        self.tell(p.SnapshotEnded(self.now_s, "c"))
        for _ in range(60):
            self.time_goes_by(0.3)
            coordinator = self.core.conductor.coordinator
            for worker_id in sorted(coordinator.members if coordinator is not None else ()):
                self.member(worker_id, "goes on")
            self.time_goes_by(0.3)
        self.consistent()
        assert not self.core.conductor.busy, f"the transition never ends: {self.core.conductor.record}"
        assert not self.waiting, f"requests were never answered: {self.waiting}"
        groups = self.in_force[-1].groups if self.in_force else ()
        serving = {m.worker_id: m.incarnation for group in groups for m in group.members}
        ENDINGS.update(record.journal.stage for record in self.core.conductor.history)
        assert serving == {w: life for w, life in self.lives.items() if w not in self.dead}
        if self.policy is OverloadPolicy.STATIC_PIPELINE:
            kept_out = self.core.kept_out.why(self.now_s)  # after their groups broke up too soon
            fit = [g for g in groups if g.leader.worker_id not in kept_out]
            alone = [g for g in fit if len(g.members) == 1 and not g.leader.draining]
            assert len(alone) < 2, f"more lone workers could form a pipeline: {groups}"


class StaticPipelineMachine(TransitionMachine):
    policy = OverloadPolicy.STATIC_PIPELINE


ENDINGS: Counter[Stage] = Counter()
_TAKEN_BACK = (Phase.PREPARING, Phase.PREPARED, Phase.FAILED, Phase.ABORTED)


def test_transitions_keep_their_promises_in_any_history() -> None:
    """Also checks that every outcome of a transition occurs, since otherwise the run would prove nothing about it."""
    ENDINGS.clear()
    run_state_machine_as_test(
        TransitionMachine, settings=settings(max_examples=250, stateful_step_count=60, deadline=None)
    )
    assert ENDINGS[Stage.DONE] > 20, ENDINGS
    assert ENDINGS[Stage.ABORTED] > 3, ENDINGS


def test_static_pipelines_form_in_the_end_after_any_history() -> None:
    ENDINGS.clear()
    run_state_machine_as_test(
        StaticPipelineMachine, settings=settings(max_examples=100, stateful_step_count=40, deadline=None)
    )
    assert ENDINGS[Stage.DONE] > 50, ENDINGS

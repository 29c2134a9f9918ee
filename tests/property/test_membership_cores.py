"""Arbitrary histories of events, in any order and repeated, for the cores of the monitor and the planner."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ballast.common.ids import DispatcherId, Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.traffic import Traffic
from services.monitor.core import messages as m
from services.monitor.core.machine import MonitorCore, MonitorRules
from services.planner.core import messages as p
from services.planner.core.machine import PlannerCore, PlannerRules
from tests.support.pressure import RULES
from tests.support.reporting_worker import load_report, model_info

WORKERS = st.sampled_from([WorkerId(name) for name in ("w0", "w1", "w2")])
LIVES = st.integers(1, 4).map(Incarnation)
STREAMS = st.integers(1, 8)
PAUSES_S = st.sampled_from([0.0, 0.01, 0.2, 1.0, 5.0])


def _layout(epoch: int, *groups: tuple[tuple[str, int], ...]) -> Layout:
    """A layout of groups, each a list of (worker, incarnation) in stage order. Each stage has one layer, and the last
    one the rest of the four.
    """
    found: list[Group] = []
    for group in groups:
        ends = [*range(1, len(group)), 4]
        members = tuple(
            Member(WorkerId(name), Incarnation(life), "host:1", end - 1 if end < 4 else len(group) - 1, end)
            for (name, life), end in zip(group, ends, strict=True)
        )
        found.append(Group(GroupId(group[0][0]), members))
    result = Layout(Epoch(epoch), 4, tuple(found), "test")
    result.check()
    return result


LAYOUTS = [
    _layout(1, (("w0", 1),), (("w1", 1),)),
    _layout(2, (("w0", 1), ("w1", 1))),
    _layout(3, (("w1", 2), ("w0", 3), ("w2", 4))),
    _layout(4, (("w2", 2),), (("w0", 2), ("w1", 3))),
]


class MonitorMachine(RuleBasedStateMachine):
    """Whatever the streams deliver, the events that watchers receive must be consistent."""

    def __init__(self) -> None:
        super().__init__()
        rules = MonitorRules(
            lease_s=2.0,
            warmup_s=3.0,
            max_instances=2,
            history_length=3,
            pressure=RULES,
        )
        self.core = MonitorCore(rules)
        self.now_s = 0.0
        self.token = 0
        self.told: dict[WorkerId, Incarnation] = {}  # as known to a watcher that subscribed at the start
        self.newest: dict[WorkerId, Incarnation] = {}

    def tell(self, event: m.Event) -> list[m.Command]:
        commands = self.core.handle(event)
        for command in commands:
            match command:
                case m.Publish(m.InstanceUp(instance)):
                    assert instance.incarnation >= self.newest.get(instance.worker_id, 0), (
                        "an old incarnation was reported as up"
                    )
                    self.newest[instance.worker_id] = instance.incarnation
                    assert self.told.get(instance.worker_id, instance.incarnation) == instance.incarnation
                    self.told[instance.worker_id] = instance.incarnation
                case m.Publish(m.InstanceLost(worker_id, incarnation)):
                    assert self.told.pop(worker_id) == incarnation, "lost, but never up"
                case m.Publish(m.InstanceDraining(worker_id, incarnation)):
                    assert self.told[worker_id] == incarnation
                case m.DismissWatchers():
                    self.told.clear()
                    self.newest.clear()
                case _:
                    pass
        return commands

    @rule(worker_id=WORKERS, incarnation=LIVES, stream_id=STREAMS)
    def announce(self, worker_id: WorkerId, incarnation: Incarnation, stream_id: int) -> None:
        instance = m.Instance(worker_id, incarnation, "host:1", model_info())
        bound = self.core._streams.get(stream_id)
        if bound in (None, worker_id):  # the servicer allows one worker per stream
            self.tell(m.Announced(self.now_s, "c", stream_id, instance))

    @rule(stream_id=STREAMS, draining=st.booleans())
    def report(self, stream_id: int, draining: bool) -> None:
        self.tell(m.LoadReported(self.now_s, "c", stream_id, load_report(1, draining=draining)))

    @rule(stream_id=STREAMS, announced_exit=st.booleans())
    def end(self, stream_id: int, announced_exit: bool) -> None:
        self.tell(m.StreamEnded(self.now_s, "c", stream_id, announced_exit))

    @rule(worker_id=WORKERS, incarnation=LIVES)
    def refuse(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self.tell(m.ConnectionRefused(self.now_s, "c", worker_id, incarnation))

    @rule(worker_id=WORKERS, incarnation=LIVES)
    def load_registry(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self.tell(m.RegistryLoaded(self.now_s, "c", ((worker_id, incarnation),)))

    @rule(layout=st.sampled_from([None, *LAYOUTS]), serial=st.integers(0, 3), waiting=st.integers(0, 5))
    def look_around(self, layout: Layout | None, serial: int, waiting: int) -> None:
        word = m.BacklogWord(
            DispatcherId("d"), str(serial), Traffic(queued_count=waiting, queued_tokens=1000 * waiting)
        )
        self.tell(m.SurroundingsRead(self.now_s, "c", layout, (word,) if waiting else ()))

    @invariant()
    def demand_is_of_members_of_the_layout_that_are_there(self) -> None:
        demand = self.core.cluster_demand(self.now_s)
        leaders = {group[0] for group in demand.groups}
        assert leaders <= set(self.core.entries)
        assert 0 <= demand.used_bytes <= demand.engaged_bytes <= demand.wanted_bytes
        assert [g.leader_id for g in self.core.group_demands(self.now_s)] == sorted(leaders)

    @rule(pause_s=PAUSES_S)
    def tick(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.tell(m.Ticked(self.now_s, "c"))

    @rule(lead=st.booleans())
    def change_leadership(self, lead: bool) -> None:
        self.token += 1
        self.tell(m.LeadershipChanged(self.now_s, "c", self.token if lead else None))

    @invariant()
    def consistent(self) -> None:
        self.core.check()
        assert {w: e.instance.incarnation for w, e in self.core.entries.items()} == self.told
        ups = [c.instance.worker_id for c in self.core.snapshot() if isinstance(c, m.InstanceUp)]
        assert ups == sorted(self.told)


class PlannerMachine(RuleBasedStateMachine):
    """Plays a store that follows the real one's rules and whose answers arrive late, wrong or never."""

    def __init__(self) -> None:
        super().__init__()
        self.core = PlannerCore(PlannerRules(coalesce_s=0.1, verify_interval_s=1.0, retry_s=0.2, max_drains=2))
        self.now_s = 0.0
        self.token = 10
        self.stored: p.StoredLayout | None = None
        self.written: list[Layout] = []
        self.loads = 0
        self.write: p.WriteLayout | None = None
        self.newest: dict[WorkerId, Incarnation] = {}
        self.asked: dict[str, int] = {}  # unanswered drain request -> number of times it was sent

    def tell(self, event: p.Event) -> None:
        for command in self.core.handle(event):
            match command:
                case p.LoadLayout():
                    self.loads += 1
                case p.WriteLayout():
                    assert command.token == self.core.store.token
                    self.write = command
                case p.AnswerDrain(request_id, epoch):
                    assert epoch <= self.core.layout.epoch
                    self.asked.pop(request_id, None)
                case p.RefuseDrain(request_id):
                    self.asked.pop(request_id, None)
                case _:
                    pass

    @rule(lead=st.booleans())
    def change_leadership(self, lead: bool) -> None:
        self.token += 1
        self.tell(p.LeadershipChanged(self.now_s, "c", self.token if lead else None))

    @precondition(lambda self: self.loads > 0)
    @rule(fails=st.booleans())
    def load(self, fails: bool) -> None:
        self.loads -= 1
        if fails:
            self.tell(p.LoadFailed(self.now_s, "c"))
        else:
            self.tell(p.LayoutLoaded(self.now_s, "c", self.stored))

    @precondition(lambda self: self.write is not None)
    @rule(answer_is_lost=st.booleans(), fenced=st.booleans())
    def settle(self, answer_is_lost: bool, fenced: bool) -> None:
        write, self.write = self.write, None
        assert write is not None
        outcome = p.WriteOutcome.WRITTEN
        if fenced or write.token != self.core.store.token:
            outcome = p.WriteOutcome.FENCED
        elif (self.stored.layout.epoch if self.stored else None) != write.expected_epoch:
            outcome = p.WriteOutcome.CONFLICT
        else:
            self.stored = p.StoredLayout(write.layout, write.model)
            self.written.append(write.layout)
            for member in (member for group in write.layout.groups for member in group.members):
                assert member.incarnation >= self.newest.get(member.worker_id, 0), "an old incarnation entered"
                self.newest[member.worker_id] = member.incarnation
        if answer_is_lost:
            outcome = p.WriteOutcome.UNAVAILABLE
        self.tell(p.WriteSettled(self.now_s, "c", write, outcome))

    @rule()
    def the_store_is_emptied(self) -> None:
        self.stored = None

    @rule(worker_id=WORKERS, incarnation=LIVES, draining=st.booleans(), layers=st.sampled_from([4, 4, 4, 6]))
    def up(self, worker_id: WorkerId, incarnation: Incarnation, draining: bool, layers: int) -> None:
        self.tell(p.InstanceUp(self.now_s, "c", worker_id, incarnation, "host:1", model_info(layers), draining))

    @rule(worker_id=WORKERS, incarnation=LIVES, silent=st.booleans())
    def lose(self, worker_id: WorkerId, incarnation: Incarnation, silent: bool) -> None:
        self.tell(p.InstanceLost(self.now_s, "c", worker_id, incarnation, "silent", silent))

    @rule(worker_id=WORKERS, incarnation=LIVES, found=st.sampled_from(p.Probed))
    def probed(self, worker_id: WorkerId, incarnation: Incarnation, found: p.Probed) -> None:
        self.tell(p.InstanceProbed(self.now_s, "c", worker_id, incarnation, found))

    @rule(worker_id=WORKERS, incarnation=LIVES)
    def drain_by_itself(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self.tell(p.InstanceDraining(self.now_s, "c", worker_id, incarnation))

    @rule(began=st.booleans())
    def snapshot(self, began: bool) -> None:
        self.tell((p.SnapshotBegan if began else p.SnapshotEnded)(self.now_s, "c"))

    @rule(worker_id=WORKERS, request_id=st.sampled_from(["d0", "d1", "d2"]))
    def ask_to_drain(self, worker_id: WorkerId, request_id: str) -> None:
        self.asked[request_id] = self.asked.get(request_id, 0) + 1
        self.tell(p.WorkerDrainRequested(self.now_s, "c", request_id, worker_id))

    @rule(pause_s=PAUSES_S)
    def fire(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.tell(p.TimerFired(self.now_s, "c"))

    @invariant()
    def consistent(self) -> None:
        self.core.check()
        epochs = [layout.epoch for layout in self.written]
        assert epochs == sorted(set(epochs)), "an epoch was written twice or decreased"
        for layout in self.written[-1:]:
            layout.check()
        assert all(request_id in self.core._drains._by_request for request_id in self.asked)

    def teardown(self) -> None:
        """Once every process answers, the layout becomes the one that the planner wants, and every drain request is
        answered.
        """
        if not self.core.active:
            return
        self.snapshot(began=True)
        for worker_id in self.core.membership.known:
            self.core.membership.known[worker_id].confirmed = True
        self.snapshot(began=False)
        for _ in range(30):
            while self.loads:
                self.load(fails=False)
            if self.write is not None:
                self.settle(answer_is_lost=False, fenced=False)
            self.fire(pause_s=0.5)
        self.consistent()
        wanted = {placeable.worker_id: placeable.incarnation for placeable in self.core.membership.placeable()}
        layout = self.stored.layout if self.stored else Layout(Epoch(0), 0, (), "none")
        assert {m.worker_id: m.incarnation for g in layout.groups for m in g.members} == wanted
        assert not self.asked


TestMonitor = MonitorMachine.TestCase
TestMonitor.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPlanner = PlannerMachine.TestCase
TestPlanner.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

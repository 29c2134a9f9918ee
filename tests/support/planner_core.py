"""Drives the planner's core through transitions, and answers for store, monitor and members."""

from dataclasses import replace

from ballast.common.cost import CostModel
from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Place, group_of
from ballast.common.load import LoadReport, MemoryReport
from ballast.common.traffic import Pace, Traffic
from ballast.common.transition import Phase, Status
from services.planner.core import messages as p
from services.planner.core.change_requests import Planning
from services.planner.core.conductor import ConductorRules
from services.planner.core.machine import PlannerCore, PlannerRules
from services.planner.core.stages import Stage
from services.planner.core.transition import MemberSaid
from tests.support.reporting_worker import load_report, model_info

EXTENT = 1024
MODEL = replace(model_info(4), layer_parameter_bytes=(8 * EXTENT,) * 4, block_bytes=256, extent_bytes=EXTENT)
# 64 extents: 32 for parameters, 8 for the KV of each layer, of 4 blocks each.
MEMORY = MemoryReport(budget_bytes=64 * EXTENT, parameter_bytes=32 * EXTENT, kv_bytes=32 * EXTENT, free_bytes=0)
LOAD = replace(load_report(8), block_count=32, used_block_count=8, memory=MEMORY)
# For four layers of a small model: a decode step takes 10 ms, each thousand prompt tokens 0.1 s more.
PACE = Pace(CostModel(attention_s=0.0, token_s=1e-4, chunk_s=0.01, shared_s=0.01), 4, 512)


class Planner:
    """A core that is checked after each event, with a well-behaved store and members whose answers the test scripts. By
    default, overloads are handled by need, without comparing candidates.
    """

    def __init__(self, **rules: object) -> None:
        transitions = ConductorRules(**{"planning": Planning(compares=False), **rules})  # pyright: ignore[reportArgumentType]
        self.core = PlannerCore(
            PlannerRules(coalesce_s=0.1, verify_interval_s=100.0, retry_s=0.5, max_drains=2, transitions=transitions)
        )
        self.now_s = 0.0
        self.timer_s: float | None = None
        self.token = 1_700_000_000_000
        self.stored: p.StoredLayout | None = None
        self.outcomes: list[p.WriteOutcome] = []  # for the next writes, instead of WRITTEN
        self.journal: list[Stage] = []
        self.phases: dict[str, Phase] = {}  # scripted answers by member; a member without one is silent
        self.said: list[p.Command] = []
        self.events: list[p.Event] = []
        self.answered = 0  # number of handled events
        self.load: LoadReport | None = LOAD
        self.traffic, self.pace = Traffic(), PACE  # nothing is known about arrivals
        self.fresh_traffic: Traffic | None = None  # of reachable dispatchers; None: all are
        self.lives: dict[str, int] = {}

    def tell(self, event: p.Event) -> None:
        """Handles an event, and then the answers of store and monitor to the resulting commands."""
        self.events.append(event)
        while len(self.events) > self.answered:
            commands = self.core.handle(self.events[self.answered])
            self.answered += 1
            self.core.check()
            self.said += commands
            for command in commands:
                self.execute(command)

    def execute(self, command: p.Command) -> None:
        match command:
            case p.SetTimer(at_s):
                self.timer_s = at_s
            case p.LoadLayout():
                self.events.append(p.LayoutLoaded(self.now_s, "c", self.stored))
            case p.WriteLayout():
                outcome = self.outcomes.pop(0) if self.outcomes else p.WriteOutcome.WRITTEN
                if outcome is p.WriteOutcome.WRITTEN:
                    journal = self.stored.journal if self.stored else None
                    self.stored = p.StoredLayout(command.layout, command.model, command.partial, journal)
                self.events.append(p.WriteSettled(self.now_s, "c", command, outcome))
            case p.WriteJournal():
                outcome = self.outcomes.pop(0) if self.outcomes else p.WriteOutcome.WRITTEN
                if outcome is p.WriteOutcome.WRITTEN:
                    self.write(command)
                self.events.append(p.WriteSettled(self.now_s, "c", command, outcome))
            case p.ReadLoads(cause_id):
                loads = {WorkerId(w): self.load for w in self.lives if self.load is not None}
                failure = "" if loads else "no monitor"
                load = p.ClusterLoad(loads, self.traffic, self.pace, fresh_traffic=self.fresh_traffic)
                self.events.append(p.LoadsRead(self.now_s, cause_id, load, failure))
            case _:
                pass

    def write(self, command: p.WriteJournal) -> None:
        journal = command.journal
        assert self.stored is not None
        self.journal.append(journal.stage)
        self.stored = replace(self.stored, journal=journal)
        if journal.stage is Stage.COMMITTING:
            self.stored = replace(self.stored, layout=journal.target, partial=command.partial)

    def lead(self) -> None:
        self.tell(p.LeadershipChanged(self.now_s, "c", self.token))

    def start(self, *workers: str) -> None:
        self.lead()
        self.tell(p.SnapshotBegan(self.now_s, "c"))
        for worker in workers:
            self.up(worker)
        self.tell(p.SnapshotEnded(self.now_s, "c"))
        self.fire()
        self.said.clear()

    def up(self, worker: str) -> None:
        self.lives[worker] = self.lives.get(worker, 0) + 1
        life = Incarnation(self.lives[worker])
        self.tell(p.InstanceUp(self.now_s, "c", WorkerId(worker), life, f"{worker}:1", MODEL, False, f"{worker}:2"))

    def says(self, worker: str, group: Group | None = None, *, epoch: int | None = None) -> None:
        """The same incarnation announces itself again, as a member of `group` or of its group in the layout."""
        group = group or group_of(self.core.layout, WorkerId(worker))
        assert group is not None
        place = Place(self.core.layout.epoch if epoch is None else Epoch(epoch), group)
        life = Incarnation(self.lives[worker])
        address = f"{worker}:1"
        self.tell(p.InstanceUp(self.now_s, "c", WorkerId(worker), life, address, MODEL, False, f"{worker}:2", place))

    def lose(self, worker: str) -> None:
        self.tell(p.InstanceLost(self.now_s, "c", WorkerId(worker), Incarnation(self.lives[worker]), "silent"))

    def fire(self) -> None:
        assert self.timer_s is not None, "no timer is set"
        self.now_s = max(self.now_s, self.timer_s)
        self.timer_s = None
        self.tell(p.TimerFired(self.now_s, "c"))

    def wait(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.timer_s is not None and self.timer_s <= until_s:
            self.fire()
        self.now_s = until_s

    def answer(self, phase: Phase, *workers: str, why: str = "", status: Status | None = None) -> None:
        record = self.core.conductor.record
        for worker in workers:
            said = MemberSaid(self.now_s, WorkerId(worker), phase, why, status)
            self.tell(p.MemberAnswered(self.now_s, "c", record.epoch if record else Epoch(0), said))

    def go_through(self, *workers: str) -> None:
        for phase in (Phase.PREPARED, Phase.EXCHANGING, Phase.DONE):
            self.answer(phase, *workers)

    def drop(self, *workers: str, request_id: str = "d1") -> None:
        names = tuple(WorkerId(w) for w in workers)
        self.tell(p.DropRequested(self.now_s, "c", request_id, worker_ids=names))

    def told(self, kind: type[p.Command]) -> list[p.Command]:
        found = [command for command in self.said if isinstance(command, kind)]
        self.said.clear()
        return found

    def calls(self, call: p.WorkerCall) -> list[str]:
        return [c.member.worker_id for c in self.said if isinstance(c, p.CallMember) and c.call is call]

    @property
    def shape(self) -> list[str]:
        return shape(self.core.layout)


def shape(layout: Layout) -> list[str]:
    return ["+".join(f"{m.worker_id}[{m.first_layer}:{m.last_layer}]" for m in g.members) for g in layout.groups]

"""Faults in a simulated cluster: each seed draws kinds of faults, and the phases of transitions to aim them at."""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ballast.common.ids import RequestId, WorkerId
from ballast.common.transition import TransitionKind
from ballastpb.worker.v1 import worker_pb2 as pb
from services.dispatcher.core import events as d
from services.planner.core import messages as p
from services.planner.core.stages import Stage
from services.planner.core.transition import Journal, changed_members
from services.worker.core import events as w
from services.worker.policy.ending import may_end
from sim.faults import Fault, FaultKind
from sim.instance import SimInstance
from sim.planning import PlannerNode
from sim.state import STATE
from sim.troubles import Troubles
from sim.world import World

_AIM_S = 0.005  # interval of looking for a transition to aim at
_NEAR_S = 0.0005  # the same while one is in progress
_NEAR = {"prepared", "committing"}
_NEVER = "any"
_HASTE_S = 0.001
_MIGRATED_EVERY_S = 0.15
_LEAVES_EVERY_S = 0.1
_PARKED_EVERY_S = 0.7
_TOLD_S = 0.005  # until watchers have received a new layout
_LOOKS_S = 0.2  # interval of looking for a pipeline that can lose a follower


class Kind(StrEnum):
    CRASH = "crash"  # a worker's process ends permanently
    RESTART = "restart"  # and restarts with a new incarnation
    DRAIN = "drain"  # a worker is drained, ends when it is idle, and restarts
    PAUSE = "pause"
    SLOW = "slow"
    VANISH = "vanish"  # a worker's host fails without notice
    DEAF = "deaf"  # a worker gets no messages from one other worker
    APART = "apart"  # two workers get no messages from each other
    LATE = "late"  # messages from one worker to another are delayed
    RESET = "reset"  # the link between two workers ends
    UNHEARD = "unheard"  # a process of the control plane, or a dispatcher, gets no messages from a worker
    UNTOLD = "untold"  # a worker gets no messages from such a process
    ISOLATED = "isolated"  # a worker reaches only the other workers, and nothing reaches it
    DEMAND = "demand"  # the planner is notified of an overload, which stops a restore
    STOP_MONITOR = "stop monitor"
    NEW_MONITOR = "new monitor"  # one ends, another is started
    STOP_PLANNER = "stop planner"
    NEW_PLANNER = "new planner"
    STATE_AWAY = "state away"
    STATE_SLOW = "state slow"
    STATE_EMPTY = "state empty"
    STATE_BACK = "state back"  # the state server is rolled back
    FAILOVER = "failover"  # the state server is rolled back, and all planners end
    STATE_GARBAGE = "state garbage"  # the state server's leases never expire, and belong to no process
    NETWORK = "network"  # one role gets no messages from another; perhaps the reverse direction fails, too
    NO_DISCOVERY = "no discovery"  # the monitor ends while workers cannot reach the state server
    ALL_STOP = "all stop"  # all processes of one role in the control plane


# Stages as journaled, before any member has been notified.
_STAGES = {"planned": Stage.PREPARING, "decided": Stage.COMMITTING, "over": Stage.DONE}
# Drawn often, since transitions must survive these faults; the others are drawn less often.
_OFTEN = (
    *(Kind.CRASH, Kind.RESTART, Kind.DRAIN, Kind.PAUSE, Kind.PAUSE, Kind.VANISH, Kind.DEAF, Kind.APART, Kind.RESET),
    *(Kind.LATE, Kind.ISOLATED, Kind.DEMAND, Kind.FAILOVER, Kind.NETWORK, Kind.NETWORK, Kind.NO_DISCOVERY),
)
_AT_STAGES = (Kind.ISOLATED, Kind.FAILOVER)  # these matter while a message is in flight
_PHASES = ("preparing", "prepared", "committing", "exchanging", "layers", "any", *_STAGES)
_DURATIONS_S = (0.05, 0.3, 1.0, 2.5, 4.0, 7.0, 12.0)
_DELAYS_S = (0.0, 0.001, 0.01, 0.1, 0.5)
_LONG_S = 12.0  # duration of a network fault, longer than leases
# Roles that may stay separated forever: requests must end even then.
_APART = (
    ("workers", "monitors"),
    ("workers", "planners"),
    ("workers", "state"),
    ("monitors", "planners"),
    ("monitors", "state"),
    ("planners", "state"),
)
_APART_FOR_A_WHILE = (*_APART, _APART[0], ("dispatchers", "state"), ("workers", "dispatchers"))


@dataclass(frozen=True, slots=True)
class Trouble:
    """One fault, with its target."""

    kind: Kind
    victim: int  # index of a worker
    phase: str  # phase of the victim's transition in which the fault is injected
    at_s: float  # earliest time
    delay_s: float  # from the beginning of the phase
    duration_s: float

    def __str__(self) -> str:
        return f"{self.kind} w{self.victim} {self.phase}+{self.delay_s:g} for {self.duration_s:g} s"


def draw(rng: random.Random, worker_count: int, last_s: float) -> list[Trouble]:
    """Draws up to four faults of a few kinds; now and then only one, a network fault that lasts forever."""
    if rng.random() < 0.06:
        at_s = rng.uniform(0.0, 0.7 * last_s)
        return [Trouble(Kind.NETWORK, rng.randrange(worker_count), rng.choice(_PHASES), at_s, 0.0, math.inf)]
    count = rng.choice((0, 1, 2, 2, 2, 3, 3, 4))
    kinds = [rng.choice(_OFTEN if rng.random() < 0.6 else tuple(Kind)) for _ in range(count)]
    return [
        Trouble(
            kind,
            rng.randrange(worker_count),
            _NEVER if kind is Kind.NETWORK and rng.random() < 0.5 else _aim_of(kind, rng),
            rng.uniform(0.0, 0.7 * last_s),
            rng.choice(_DELAYS_S),
            rng.choice(_DURATIONS_S),
        )
        for kind in kinds
    ]


def _aim_of(kind: Kind, rng: random.Random) -> str:
    return rng.choice(tuple(_STAGES) if kind in _AT_STAGES and rng.random() < 0.6 else _PHASES)


@dataclass(slots=True)
class Swarm:
    """Injects faults into a world, and counts the phases of transitions that they hit."""

    world: World
    rng: random.Random
    last_s: float  # operators may request drops until then
    is_hasty: bool  # an operator requests a restore right after each drop, and a drop right after each restore
    migrates: bool  # requests are migrated between groups again and again
    clients_leave: bool  # now and then a client leaves before its request has ended
    parker: random.Random | None  # draws which workers an operator parks and wakes, again and again
    loser: random.Random | None  # draws the follower that a pipeline loses while a lone instance can replace it
    lost: Callable[[], None]  # called if all planners and the state server have lost the last epochs
    told: list[str] = field(default_factory=list[str])
    met: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    is_for_ever: bool = False  # a fault is permanent
    left: set[str] = field(default_factory=set[str])  # requests whose clients have left
    is_over: bool = False  # no more faults
    _aimed: list[tuple[Trouble, Callable[[], None]]] = field(default_factory=list[tuple[Trouble, Callable[[], None]]])

    def expect(self, troubles: Sequence[Trouble]) -> None:
        acts = Troubles(self.world)
        if any(trouble.kind in (Kind.STATE_BACK, Kind.FAILOVER) for trouble in troubles):
            self.world.state.remember()
        for trouble in troubles:
            self.world.clock.at(self.world.zero_s + trouble.at_s, b"aim", self._aim(trouble, acts))
        self.world.state.on_journal = self._journaled
        if self.migrates:
            self.world.clock.every(_MIGRATED_EVERY_S, b"migration", self._migrate, first_s=self.world.zero_s)
        if (parker := self.parker) is not None:
            self.world.clock.every(
                _PARKED_EVERY_S, b"operator parks", lambda: self._park(parker), first_s=self.world.zero_s
            )
        if (loser := self.loser) is not None:
            self.world.clock.every(
                _LOOKS_S, b"follower is lost", lambda: self._lose_follower(loser), first_s=self.world.zero_s
            )
        if self.clients_leave:
            self.world.clock.every(_LEAVES_EVERY_S, b"client leaves", self._leave, first_s=self.world.zero_s)

    def _park(self, parker: random.Random) -> None:
        """An operator parks or wakes a random worker, each with probability one half."""
        world, now_s = self.world, self.world.clock.now_s
        if self.is_over or not self._planners or world.planner.process.paused:
            return
        worker_id = parker.choice(sorted(world.instances))
        event = p.StandingRequested(now_s, "operator", f"park {now_s}", worker_id, away=parker.random() < 0.5)
        world.planner.feed(event)

    def _drain(self, worker_id: WorkerId, for_s: float) -> None:
        """An operator drains a worker, usually by asking the planner first, and restarts it when it is idle."""
        world, now_s, rng = self.world, self.world.clock.now_s, self.rng
        if self._planners and rng.random() < 0.7:
            ask = p.WorkerDrainRequested(now_s, "operator", f"drain {now_s}", worker_id)
            world.planner.process.run(lambda: world.planner.feed(ask))
        instance, begin_s = world.instances[worker_id], now_s + rng.choice(_DELAYS_S)
        world.clock.at(begin_s, b"drain", lambda: self._end_when_idle(instance, for_s, begin_s))

    def _end_when_idle(self, instance: SimInstance, for_s: float, busy_at_s: float) -> None:
        """Stop a worker as SIGTERM does: it refuses requests, and ends when no request or pipeline needs it."""
        world, now_s, count = self.world, self.world.clock.now_s, instance.member.pipeline_request_count
        if not instance.load().draining:
            instance.post(w.DrainRequested(now_s))
        elif instance.core.is_drained and not count:
            if not instance.paused and may_end(count, now_s - busy_at_s):
                number = int(instance.worker_id[1:])
                world.strike(Fault(at_s=0.0, kind=FaultKind.CRASH, worker=number, duration_s=for_s))
        else:
            busy_at_s = now_s
        if not instance.crashed:
            world.clock.after(_LOOKS_S, b"drain", lambda: self._end_when_idle(instance, for_s, busy_at_s))

    def _lose_follower(self, loser: random.Random) -> None:
        """An operator merges all workers but one; then, once, one of the pipeline's followers ends."""
        world, now_s, stored = self.world, self.world.clock.now_s, self.world.state.stored
        if self.is_over or stored is None or world.crashed or self.loser is None or not self._planners:
            return
        sizes = {len(group.members) for group in stored.layout.groups}
        if sizes == {1}:
            names = tuple(sorted(world.instances))[:-1]
            world.planner.feed(p.DropRequested(now_s, "operator", f"lose {now_s}", worker_ids=names, hold_s=2.0))
        elif 1 in sizes and loser.random() < 0.5:
            members = [m.worker_id for g in stored.layout.groups for m in g.members[1:]]
            victim, for_s = loser.choice(members), loser.choice((None, 0.3, 2.5, 7.0))
            self.loser = None
            self.told.append(f"follower {victim} ends for {for_s} s at {now_s - world.zero_s:.3f} s")
            world.strike(Fault(at_s=0.0, kind=FaultKind.CRASH, worker=int(victim[1:]), duration_s=for_s))

    def _journaled(self, journal: Journal) -> None:
        members, aimed = changed_members(journal.base, journal.target), self._aimed
        self._aimed = []
        if self.is_hasty and not self.is_over and journal.stage is Stage.DONE:
            self.world.clock.after(_HASTE_S, b"operator", lambda: self._ask(journal.kind))
        for trouble, strike in aimed:
            if _STAGES[trouble.phase] is journal.stage and f"w{trouble.victim}" in members:
                self.world.clock.after(trouble.delay_s, b"strike", strike)
            else:
                self._aimed.append((trouble, strike))

    def _aim(self, trouble: Trouble, acts: Troubles) -> Callable[[], None]:
        clock, zero_s = self.world.clock, self.world.zero_s

        def strike() -> None:
            if self.is_over:
                return
            phase = self._phase_of(trouble.victim)
            if self._strike(trouble, acts):
                self.is_for_ever |= trouble.duration_s == math.inf
                self.met[trouble.kind, phase] += 1
                self.told.append(f"{trouble} at {clock.now_s - zero_s:.3f} s, {phase}")

        def look() -> None:
            phases = self._phases(self._instance(trouble.victim))
            if trouble.phase in phases:
                clock.after(trouble.delay_s, b"strike", strike)
            elif not self.is_over:
                clock.after(_NEAR_S if phases & _NEAR else _AIM_S, b"aim", look)

        if trouble.phase in _STAGES:
            return lambda: self._aimed.append((trouble, strike))
        return strike if trouble.phase == _NEVER else look

    # ------------------------------------------------------------ the victim's phase

    def _instance(self, number: int) -> SimInstance:
        return self.world.instances[WorkerId(f"w{number}")]

    @staticmethod
    def _phases(instance: SimInstance) -> set[str]:
        progress = instance.member.progress.values()
        phases = {p.phase.name.lower() for p in progress}
        if any(p.parameter_bytes_to_pull and p.phase.name == "PREPARING" for p in progress):
            phases.add("layers")
        return phases

    def _phase_of(self, number: int) -> str:
        """The phase of the victim's transition, and whether it is in a group, for the table."""
        instance = self._instance(number)
        last = next(reversed(instance.member.progress.values()), None)
        where = "group" if instance.member.role.stages else "alone"
        under_way = last is not None and last.phase.name in ("PREPARING", "PREPARED", "COMMITTING", "EXCHANGING")
        return f"{last.phase.name.lower()} {where}" if last is not None and under_way else f"at rest {where}"

    # ------------------------------------------------------------ actions

    def _strike(self, trouble: Trouble, acts: Troubles) -> bool:
        """Injects the fault; returns False if it is not possible."""
        world, kind, rng = self.world, trouble.kind, self.rng
        me, for_s = WorkerId(f"w{trouble.victim}"), trouble.duration_s
        others = [name for name in world.instances if name != me]
        other = rng.choice(others)
        match kind:
            case Kind.CRASH | Kind.VANISH:
                if len(world.crashed) + 2 > len(world.instances) or me in world.crashed:
                    return False
                if kind is Kind.VANISH:
                    for name in self._everybody(me):
                        acts.cut(me, name, max(for_s, 12.0))
                        acts.cut(name, me, max(for_s, 12.0))
                world.strike(Fault(at_s=0.0, kind=FaultKind.CRASH, worker=trouble.victim))
            case Kind.RESTART:
                if me in world.crashed:
                    return False
                world.strike(Fault(at_s=0.0, kind=FaultKind.CRASH, worker=trouble.victim, duration_s=for_s))
            case Kind.DRAIN:
                if me in world.crashed or world.instances[me].load().draining:
                    return False
                self._drain(me, for_s)
            case Kind.PAUSE:
                world.strike(Fault(at_s=0.0, kind=FaultKind.PAUSE, worker=trouble.victim, duration_s=for_s))
            case Kind.SLOW:
                factor = rng.choice((0.2, 3.0, 20.0))
                slow = Fault(at_s=0.0, kind=FaultKind.SLOW, worker=trouble.victim, duration_s=for_s, factor=factor)
                world.strike(slow)
            case Kind.DEAF:
                acts.cut(other, me, for_s)
            case Kind.APART:
                acts.cut(other, me, for_s)
                acts.cut(me, other, for_s)
            case Kind.LATE:
                acts.slow(me, other, rng.choice((0.01, 0.1, 0.5, 2.0)), for_s)
            case Kind.RESET:
                acts.reset(me, other)
            case Kind.UNHEARD | Kind.UNTOLD:
                far = rng.choice([name for name in self._everybody(me) if name not in world.instances])
                acts.cut(*((me, far) if kind is Kind.UNHEARD else (far, me)), for_s)
            case Kind.ISOLATED:
                for far in self._everybody(me):
                    if far not in world.instances:
                        acts.cut(me, far, for_s)
                        acts.cut(far, me, for_s)
            case Kind.STOP_MONITOR:
                acts.stop(world.monitor, for_s)
            case Kind.NEW_MONITOR:
                acts.replace(world.monitor, for_s)
            case Kind.DEMAND | Kind.STOP_PLANNER | Kind.NEW_PLANNER if not self._planners:
                return False
            case Kind.DEMAND:
                raised = p.OverloadRaised(world.clock.now_s, "demand", 1)
                world.planner.process.run(lambda: world.planner.feed(raised))
            case Kind.STOP_PLANNER:
                acts.stop(world.planner, for_s)
            case Kind.NEW_PLANNER:
                acts.replace(world.planner, for_s)
            case Kind.NETWORK:
                roles = rng.choice(_APART if for_s == math.inf else _APART_FOR_A_WHILE)
                ways = (roles, roles[::-1])
                for source, to in rng.choice(((ways[0],), (ways[1],), ways)):
                    self._cut_roles(acts, source, to, for_s if for_s < 2.5 else max(for_s, _LONG_S))
            case Kind.NO_DISCOVERY:
                self._cut_roles(acts, "workers", "state", max(for_s, _LONG_S))
                acts.replace(world.monitor, for_s)
            case Kind.ALL_STOP:
                for node in rng.choice((list(world.monitors.values()), self._planners)):
                    acts.stop(node, for_s)
            case Kind.STATE_GARBAGE:
                world.state.become_corrupt()
            case Kind.STATE_AWAY:
                world.state.stop_for(for_s)
            case Kind.STATE_SLOW:
                world.state.slow_s = rng.choice((0.1, 0.5, 2.0))
                world.clock.after(for_s, b"state is fast", lambda: setattr(world.state, "slow_s", 0.0))
            case Kind.STATE_EMPTY:
                world.state.lose_everything()
            case Kind.STATE_BACK:
                world.state.go_back(for_s)
            case Kind.FAILOVER:
                world.state.go_back(for_s)
                world.clock.after(_TOLD_S, b"nobody remembers", self.lost)
                for node in self._planners:
                    acts.replace(node, rng.choice((0.01, 0.5, 2.0)))
        return True

    def _leave(self) -> None:
        world, now_s = self.world, self.world.clock.now_s
        live = [r for r in world.clients.records if r.end_s is None and r.arrival_s <= now_s - world.zero_s]
        if self.is_over or not live:
            return
        record = self.rng.choice(live)
        self.left.add(record.request_id)
        dispatcher = world.dispatchers[record.index % len(world.dispatchers)]
        dispatcher.feed(d.Withdrawn(now_s, RequestId(record.request_id), "its client has left"))

    def _migrate(self) -> None:
        world, stored = self.world, self.world.state.stored
        going = {name: each for name, each in world.instances.items() if not (each.crashed or each.paused)}
        if self.is_over or stored is None or len(stored.layout.groups) < 2:
            return
        sides = [[m.worker_id for m in group.members] for group in self.rng.sample(stored.layout.groups, 2)]
        source, target = ([pb.MigrationParty(worker_id=name, data_address=name) for name in side] for side in sides)
        epoch = stored.layout.epoch
        request = pb.MigrateRequest(epoch=epoch, source=source, target=target, block_budget=20, within_s=1.0)
        for name in (*sides[1], *sides[0]):
            if name in going:
                going[name].transitions.migrate(request)

    @property
    def _planners(self) -> list[PlannerNode]:
        """The planners that are alive."""
        return [node for node in self.world.planners.values() if not node.process.crashed]

    def _ask(self, ended: TransitionKind) -> None:
        """An operator requests the opposite of the transition that has ended."""
        world = self.world
        if self.is_over or not self._planners or world.planner.process.paused:
            return
        planner = world.planner
        now_s, name = world.clock.now_s, f"hasty {world.clock.now_s}"
        if ended is TransitionKind.DROP:
            planner.feed(p.RestoreRequested(now_s, "operator", name))
        elif now_s < world.zero_s + self.last_s:
            living = tuple(sorted(worker for worker in world.instances if worker not in world.crashed))
            planner.feed(p.DropRequested(now_s, "operator", name, worker_ids=living[:2]))

    def _cut_roles(self, acts: Troubles, source: str, to: str, for_s: float) -> None:
        world = self.world
        names = {
            "workers": list(world.instances),
            "monitors": list(world.monitors),
            "planners": list(world.planners),
            "dispatchers": [node.name for node in world.dispatchers],
            "state": [STATE],
        }
        for one in names[source]:
            for other in names[to]:
                acts.cut(one, other, for_s)

    def _everybody(self, me: str) -> list[str]:
        """All processes that a worker communicates with."""
        world = self.world
        dispatchers = [node.name for node in world.dispatchers]
        return [name for name in (*world.instances, *world.monitors, *world.planners, *dispatchers) if name != me]

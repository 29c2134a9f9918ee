"""The two sides of a transition in virtual time: messages lost, doubled, late; members and planner crashing anywhere.

What the state machines cannot do themselves is modelled: remaps, links (reliable, in order, broken when an end dies)
and calls (lost, doubled, re-ordered). KV is a set of layers per sequence and worker, so a victim that resumes without
all of its KV, or a batch that meets a stage in another layout, is seen at once.
"""

import hashlib
import heapq
import itertools
import random
import sys
from collections.abc import Callable, Collection

from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member, group_of
from ballast.common.transition import Phase, TransitionKind
from services.planner.core import transition as pt
from services.worker.core import plan as wp
from services.worker.core import transition as wt
from services.worker.core import transition_messages as wm
from services.worker.core.waves import may_wait
from tests.support.transition_copies import Copies, SimWorker


def layout(epoch: int, layers: int, groups: list[list[str]]) -> Layout:
    """Each group splits the layers as evenly as it goes."""
    made: list[Group] = []
    for names in groups:
        bounds = [round(i * layers / len(names)) for i in range(len(names) + 1)]
        members = tuple(
            Member(WorkerId(n), Incarnation(1), f"{n}:1", bounds[i], bounds[i + 1]) for i, n in enumerate(names)
        )
        made.append(Group(GroupId(names[0]), members))
    result = Layout(Epoch(epoch), layers, tuple(made), "test")
    result.check()
    return result


class World:
    def __init__(self, seed: int, groups: list[list[str]], layers: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self.trace = hashlib.sha256()
        self.layers = layers
        base = layout(1, layers, groups)
        self.in_force = base
        self.workers = {m.worker_id: SimWorker(m.worker_id, base) for g in base.groups for m in g.members}
        self.journal: pt.Journal | None = None
        self.coordinator: pt.Coordinator | None = None
        self.planner_life = 0
        self.vacant = False  # a planner has died, and none has followed it yet
        self.leased_life = 0  # writes of a planner before this one are refused: the state server fences them
        self.planned_epoch = 1
        self.forgotten_epoch = 0
        self.faults = True
        self.sequences = itertools.count()
        self.copies = Copies(self)
        self.later_waves = 0  # of victims that had to wait for others
        self.expected_count: int | None = None
        self._journal_at_s = 0.0
        self.link_clock: dict[tuple[WorkerId, WorkerId], float] = {}
        for group in base.groups:
            for _ in range(self.rng.randint(0, 4)):
                self.start_sequence(group.leader.worker_id)

    # ------------------------------------------------------------ time

    def after(self, delay_s: float, what: str, act: Callable[[], None]) -> None:
        def step() -> None:
            self.trace.update(f"{self.now_s!r} {what}\n".encode())
            act()
            self.check()

        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._serial), step))

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, step = heapq.heappop(self._queue)
            step()
        self.now_s = until_s

    # ------------------------------------------------------------ serving

    def start_sequence(self, leader: WorkerId) -> None:
        worker = self.workers[leader]
        sequence = next(self.sequences)
        worker.led[sequence] = self.rng.randint(0, 50)
        for member in self.group(worker).members:
            self.workers[member.worker_id].kv[sequence] = set(range(member.first_layer, member.last_layer))

    def group(self, worker: SimWorker) -> Group:
        found = group_of(worker.layout, worker.name)
        assert found is not None
        return found

    def leads(self, worker: SimWorker) -> bool:
        return self.group(worker).leader.worker_id == worker.name

    def batch(self, worker: SimWorker) -> None:
        """The leader runs a step: every stage must be in the same layout and have the KV of what runs."""
        if not worker.alive or not worker.forming or worker.broken:
            return
        group = self.group(worker)
        served = [sequence for sequence in worker.led if sequence not in worker.waiting]
        if group.leader.worker_id != worker.name or not served:
            return
        stages = [(self.workers[m.worker_id], set(range(m.first_layer, m.last_layer))) for m in group.members]
        if not all(stage.alive for stage, _ in stages):
            return
        for stage, _ in stages:
            assert self.group(stage) == group, "a stage in another layout"
        for sequence in served:
            for stage, wanted in stages:
                lacking = wanted - stage.kv.get(sequence, set()) if worker.led[sequence] else set[int]()
                assert not lacking, f"{stage.name} lacks KV of {sequence}"
                stage.kv.setdefault(sequence, set()).update(wanted)
            worker.led[sequence] += 1
        self.copies.tell_batch(worker, [stage for stage, _ in stages])

    def plan(self, kind: TransitionKind, groups: list[list[str]]) -> None:
        assert self.journal is None or self.journal.stage.over
        epoch = self.planned_epoch + 1
        target = layout(epoch, self.layers, groups)
        journal = pt.Journal(kind, self.in_force, target, pt.Stage.PREPARING, "test")
        self.planned_epoch = epoch
        self.coordinator = pt.Coordinator(journal, self.now_s, pt.CoordinatorRules())
        self.planner(self.coordinator.begin())

    def tell_planner(self, event: pt.Event) -> None:
        if self.coordinator is not None:
            self.planner(self.coordinator.handle(event))

    def tick_planner(self) -> None:
        self.tell_planner(pt.Tick(self.now_s))
        self.after(0.1, "tick", self.tick_planner)

    def crash_planner(self) -> None:
        """Another one takes over with what is in the journal by then."""
        self.planner_life += 1
        life, self.coordinator, self.vacant = self.planner_life, None, True

        def take_over() -> None:
            if life != self.planner_life:
                return
            self.leased_life, self.vacant = life, False
            if self.journal is not None and not self.journal.stage.over:
                self.coordinator, commands = pt.Coordinator.resume(self.journal, self.now_s, pt.CoordinatorRules())
                self.planner(commands)
                for worker in self.workers.values():
                    if not worker.alive:
                        self.tell_planner(pt.MemberLost(self.now_s, worker.name, "dead"))

        self.after(self.rng.uniform(0.1, 2.0), "take over", take_over)

    def forget(self, kind: TransitionKind, groups: list[list[str]]) -> None:
        """What is not decided is lost with the planner, journal and all; the next one plans something else."""
        undecided = self.coordinator is not None and self.coordinator.journal.stage is pt.Stage.PREPARING
        if not undecided:
            return
        self.planner_life += 1
        self.forgotten_epoch, self.coordinator, self.journal = self.planned_epoch, None, None

        def plan_anew() -> None:
            if self.vacant:
                self.after(0.1, "plan anew", plan_anew)
            elif self.coordinator is None and self.journal is None:
                self.plan(kind, groups)
                for worker in self.workers.values():
                    if not worker.alive:
                        self.tell_planner(pt.MemberLost(self.now_s, worker.name, "dead"))

        self.after(self.rng.uniform(0.0, 1.0), "plan anew", plan_anew)

    def planner(self, commands: list[pt.Command]) -> None:
        for command in commands:
            match command:
                case pt.WriteJournal(journal=journal):
                    # A planner that dies may have written already: its writes are carried out, its answers lost.
                    at_s = max(self.now_s + self.rng.uniform(0, 0.02), self._journal_at_s)
                    self._journal_at_s = at_s
                    told = self.for_life(lambda j=journal: self.tell_planner(pt.Journaled(self.now_s, j.stage)))
                    self.after(
                        at_s - self.now_s, "journal", lambda j=journal, t=told, n=self.planner_life: self.write(j, t, n)
                    )
                case pt.SendPrepare(worker_id=worker_id):
                    self.call(worker_id, self.prepare)
                case pt.SendCommit(worker_id=worker_id):
                    self.call(worker_id, self.commit)
                case pt.SendAbort(worker_id=worker_id):
                    self.call(worker_id, self.abort)
                case pt.Poll(worker_id=worker_id):
                    self.call(worker_id, lambda worker, journal: None)
                case pt.Ended():
                    pass

    def for_life(self, act: Callable[[], None]) -> Callable[[], None]:
        life = self.planner_life
        return lambda: act() if life == self.planner_life else None

    def write(self, journal: pt.Journal, told: Callable[[], None], life: int) -> None:
        if journal.epoch <= self.forgotten_epoch or life < self.leased_life:
            return
        self.journal = journal
        if journal.stage is pt.Stage.COMMITTING:
            self.in_force = journal.target
        told()

    def call(self, worker_id: WorkerId, act: Callable[[SimWorker, pt.Journal], None]) -> None:
        """A call by the planner: it or its answer may be lost, doubled, late."""
        assert self.coordinator is not None
        journal, life = self.coordinator.journal, self.planner_life

        def arrive() -> None:
            worker = self.workers[worker_id]
            if not worker.alive:
                return
            act(worker, journal)
            answer = self.status(worker, journal.epoch)

            def reply() -> None:
                current = self.coordinator
                if life == self.planner_life and current is not None and current.journal.epoch == journal.epoch:
                    self.tell_planner(answer)

            if not (self.faults and self.rng.random() < 0.15):
                self.after(self.rng.uniform(0, 0.1), "reply", reply)

        for _ in range(2 if self.faults and self.rng.random() < 0.15 else 1):
            if not (self.faults and self.rng.random() < 0.15):
                self.after(self.rng.uniform(0, 0.1), f"call {worker_id}", arrive)

    def status(self, worker: SimWorker, epoch: Epoch) -> pt.MemberSaid:
        transition = worker.transition
        if transition is not None and transition.epoch == epoch:
            return pt.MemberSaid(self.now_s, worker.name, transition.phase, transition.why)
        phase = Phase.ABORTED if worker.aborted == epoch else Phase.NONE
        return pt.MemberSaid(self.now_s, worker.name, phase)

    # ------------------------------------------------------------ workers

    def prepare(self, worker: SimWorker, journal: pt.Journal) -> None:
        plan = wp.Plan(journal.kind, journal.base, journal.target)
        current = worker.transition
        if worker.aborted >= plan.epoch or (current is not None and current.epoch >= plan.epoch):
            return
        if wp.part_of(plan, worker.name) is None or worker.layout.epoch > plan.base.epoch:
            return
        if current is not None and current.phase in _BEFORE_COMMIT:
            self.drive(worker, wm.AbortRequested(self.now_s, current.epoch, f"epoch {plan.epoch} is to be prepared"))
        if current is not None and current.phase in _AFTER_COMMIT:
            return
        worker.transition = wt.Transition(worker.name, plan)
        worker.precopy = self.copies.begin(plan, worker)
        self.execute(worker, worker.transition.begin())

    def commit(self, worker: SimWorker, journal: pt.Journal) -> None:
        if worker.transition is not None and worker.transition.epoch == journal.epoch:
            self.drive(worker, wm.CommitRequested(self.now_s, journal.epoch))

    def abort(self, worker: SimWorker, journal: pt.Journal) -> None:
        if worker.transition is None or worker.transition.epoch < journal.epoch:
            worker.aborted = max(worker.aborted, journal.epoch)
        elif worker.transition.epoch == journal.epoch:
            self.drive(worker, wm.AbortRequested(self.now_s, journal.epoch, journal.failure))

    def drive(self, worker: SimWorker, event: wm.Event) -> None:
        if worker.alive and worker.transition is not None:
            self.execute(worker, worker.transition.handle(event))
            worker.transition.check()

    def local(self, worker: SimWorker, delay_s: float, event: wm.Event) -> None:
        transition = worker.transition
        self.after(
            delay_s,
            f"{worker.name} {type(event).__name__}",
            lambda: self.drive(worker, event) if worker.transition is transition else None,
        )

    def over_link(self, source: SimWorker, to: WorkerId, event: wm.Event, epoch: int) -> None:
        """Reliable and in order, unless an end dies."""
        at_s = max(self.now_s + self.rng.uniform(0.001, 0.05), self.link_clock.get((source.name, to), 0.0))
        self.link_clock[source.name, to] = at_s

        def arrive() -> None:
            receiver = self.workers[to]
            if source.alive and receiver.transition is not None and receiver.transition.epoch == epoch:
                self.drive(receiver, event)

        self.after(at_s - self.now_s, f"{source.name}->{to} {type(event).__name__}", arrive)

    def execute(self, worker: SimWorker, commands: list[wm.Command]) -> None:
        transition = worker.transition
        assert transition is not None
        epoch = transition.epoch
        for command in commands:
            match command:
                case wm.ConnectLinks(peers=peers):
                    if any(not self.workers[p].alive for p in peers):
                        self.local(worker, 0.1, wm.PreparationFailed(self.now_s, epoch, "no link"))
                    else:
                        self.local(worker, self.rng.uniform(0, 0.1), wm.LinksUp(self.now_s, epoch))
                case wm.PrepareMemory():
                    if self.faults and self.rng.random() < 0.03:
                        self.local(worker, 0.01, wm.PreparationFailed(self.now_s, epoch, "too little memory"))
                    else:
                        self.after(
                            self.rng.uniform(0, 0.3), "memory", lambda w=worker, t=transition: self.copies.go_on(w, t)
                        )
                case wm.UndoPreparation():
                    worker.precopy = None
                case wm.Quiesce():
                    worker.forming = False
                    self.local(worker, self.rng.uniform(0, 0.05), wm.BoundaryReached(self.now_s, epoch))
                case wm.SendEpochEnded(to=to):
                    for name in to:
                        self.over_link(worker, name, wm.EpochEnded(self.now_s, epoch, worker.name), epoch)
                case wm.TakeUp():
                    self.take_up(worker)
                case wm.SendHandover(to=to):
                    self.over_link(
                        worker,
                        to,
                        wm.HandoverReceived(self.now_s, epoch, worker.name, self.hand_over(worker, to)),
                        epoch,
                    )
                case wm.Lead(victims=victims):
                    self.lead(worker, victims)
                case wm.LeadWave(wave=wave):
                    self.lead_wave(worker, wave)
                case wm.SendRoster(victims=victims, to=to, wave=wave, last=last):
                    self.later_waves += wave > 0
                    for name in to:
                        roster = wm.RosterReceived(self.now_s, epoch, worker.name, victims, wave, last)
                        self.over_link(worker, name, roster, epoch)
                case wm.SendKv(victim=victim, to=to, first_layer=first, last_layer=last):
                    self.send_kv(worker, victim, to, first, last, epoch)
                case wm.ExpectKv(victim=victim):
                    worker.kv.setdefault(victim.sequence_id, set())
                case wm.SendKvComplete(sequence_id=sequence_id, to=to):
                    event = wm.KvCompleteReceived(self.now_s, epoch, sequence_id, worker.name)
                    self.over_link(worker, to, event, epoch)
                case wm.Resume(sequence_id=sequence_id):
                    worker.waiting.discard(sequence_id)
                case wm.ReleaseSent():
                    self.release(worker, self.workers[transition.part.new.leader.worker_id].later)
                case wm.SendWaveDone(wave=wave, to=to):
                    self.over_link(worker, to, wm.WaveDone(self.now_s, epoch, worker.name, wave), epoch)
                case wm.ReleaseLost():
                    self.release(worker, ())
                    self.close_older_links(worker, epoch)
                case wm.Broken():
                    worker.broken = True

    def release(self, worker: SimWorker, needed: Collection[int]) -> None:
        """Layers that this worker has given up keep only KV of sequences `needed`."""
        member = next(m for m in self.group(worker).members if m.worker_id == worker.name)
        kept = set(range(member.first_layer, member.last_layer))
        for sequence, layers in worker.kv.items():
            if sequence not in needed:
                layers &= kept

    def lead(self, worker: SimWorker, victims: tuple[wp.Victim, ...]) -> None:
        """Adopts the victims; now and then there is no room for one, which begins anew or waits."""
        assert worker.transition is not None
        plan, part = worker.transition.plan, worker.transition.part
        worker.forming = True
        for victim in victims:
            worker.led[victim.sequence_id] = victim.computed_tokens
            worker.waiting.add(victim.sequence_id)
        worker.later = {v.sequence_id: v for v in victims}
        waits = 0.3 if may_wait(plan, part) and self.rng.random() < 0.5 else 0.0
        self.admit(worker, 0, waits)

    def lead_wave(self, worker: SimWorker, wave: int) -> None:
        assert worker.transition is not None
        for stage in worker.transition.part.new.members:
            open_ = self.workers[stage.worker_id].transition
            assert open_ is None or not (open_._is.outgoing or open_._is.incoming), "KV is on its way between two waves"
        assert worker.later, "a wave of nobody"
        self.admit(worker, wave, 0.3 if len(worker.later) > 1 else 0.0)

    def admit(self, worker: SimWorker, wave: int, waits: float) -> None:
        """Some of those that are left get room, some are given up, the others go on waiting."""
        assert worker.transition is not None
        admitted: list[wp.Victim] = []
        for sequence, victim in list(worker.later.items()):
            what = self.rng.random()
            if what < waits and not (wave and len(worker.later) == 1):
                continue
            del worker.later[sequence]
            if what >= 0.95:
                worker.led[sequence] = 0
                worker.waiting.discard(sequence)
            else:
                admitted.append(victim)
        led = wm.Led(self.now_s, worker.transition.epoch, tuple(admitted), wave, not worker.later)
        self.local(worker, 0.0, led)

    def take_up(self, worker: SimWorker) -> None:
        assert worker.transition is not None
        plan = worker.transition.plan
        worker.layout = plan.target
        if worker.precopy is not None:
            worker.precopy.end()
        mine = {s: n for s, n in worker.led.items() if self.assigned(plan, worker, s) == worker.name}
        worker.transition.own_victims(wp.Victim(s, n, self.old_leader(plan, worker)) for s, n in sorted(mine.items()))
        self.local(worker, self.rng.uniform(0, 0.02), wm.TakenUp(self.now_s, plan.epoch))

    def assigned(self, plan: wp.Plan, worker: SimWorker, sequence: int) -> WorkerId:
        """One of the new leaders that its old group's members go to."""
        old = group_of(plan.base, worker.name)
        assert old is not None
        groups = [group_of(plan.target, m.worker_id) for m in old.members]
        leaders = sorted({group.leader.worker_id for group in groups if group is not None})
        return leaders[sequence % len(leaders)]

    def old_leader(self, plan: wp.Plan, worker: SimWorker) -> WorkerId:
        old = group_of(plan.base, worker.name)
        assert old is not None
        return old.leader.worker_id

    def hand_over(self, worker: SimWorker, to: WorkerId) -> tuple[wp.Victim, ...]:
        assert worker.transition is not None
        plan = worker.transition.plan
        if self.old_leader(plan, worker) != worker.name:
            return ()
        going = sorted(s for s in worker.led if self.assigned(plan, worker, s) == to)
        return tuple(wp.Victim(s, worker.led.pop(s), worker.name) for s in going)

    def send_kv(self, worker: SimWorker, victim: wp.Victim, to: WorkerId, first: int, last: int, epoch: Epoch) -> None:
        wanted = set(range(first, last))
        assert wanted <= worker.kv[victim.sequence_id], "KV is sent that is not there"

        def arrive() -> None:
            receiver = self.workers[to]
            if (
                not worker.alive
                or not receiver.alive
                or receiver.transition is None
                or receiver.transition.epoch != epoch
            ):
                return
            self.copies.count_rest(victim, worker, receiver)
            receiver.kv.setdefault(victim.sequence_id, set()).update(wanted)
            self.drive(receiver, wm.KvReceived(self.now_s, epoch, victim.sequence_id, worker.name))
            self.local(worker, 0.001, wm.KvSent(self.now_s, epoch, victim.sequence_id, to))

        self.after(self.rng.uniform(0.01, 1.0), f"kv {victim.sequence_id} {worker.name}->{to}", arrive)

    def close_older_links(self, worker: SimWorker, epoch: Epoch) -> None:
        """A worker that is done with an epoch has no use for those before; the other side hears of it."""
        for other in self.workers.values():
            older = other.alive and other.transition is not None and other.transition.epoch < epoch
            if older and other.transition is not None and worker.name in other.transition.part.peers:
                self.local(other, 0.02, wm.PeerLost(self.now_s, worker.name, "closed"))

    def kill(self, worker: SimWorker) -> None:
        worker.alive = False
        for other in self.workers.values():
            if other.alive and other.transition is not None and worker.name in other.transition.part.peers:
                self.local(other, 0.02, wm.PeerLost(self.now_s, worker.name, "killed"))
        self.after(
            self.rng.uniform(0.1, 1.0),
            "lost",
            lambda: self.tell_planner(pt.MemberLost(self.now_s, worker.name, "killed")),
        )

    # ------------------------------------------------------------ judgement

    def check(self) -> None:
        for worker in self.workers.values():
            if worker.alive:
                self.batch(worker)

    def settled(self) -> bool:
        """Or it never was: the planner crashed before it had written anything."""
        journal = self.journal
        return journal is None or journal.stage.over


_BEFORE_COMMIT = (Phase.PREPARING, Phase.PREPARED)
_AFTER_COMMIT = (Phase.COMMITTING, Phase.EXCHANGING)


def story(seed: int) -> World:
    """A drop, a drop of everything, a restore, with faults of all kinds; each is judged when it has ended."""
    rng = random.Random(seed)
    count, layers = rng.choice([2, 3, 4, 5]), rng.choice([5, 7, 8])
    names = [f"w{i}" for i in range(count)]
    world = World(seed, [[name] for name in names], layers)
    world.tick_planner()
    first = partition(rng, names)
    alone = [[name] for name in names]
    for kind, groups in (
        (TransitionKind.DROP, first),
        (TransitionKind.DROP, [list(names)]),
        (TransitionKind.RESTORE, alone),
    ):
        if sorted(sorted(g) for g in groups) == sorted(
            sorted(m.worker_id for m in g.members) for g in world.in_force.groups
        ):
            continue
        _change(world, rng, kind, groups)
        if any(not worker.alive or worker.broken for worker in world.workers.values()):
            break
        _judge(world)
    return world


def _change(world: World, rng: random.Random, kind: TransitionKind, groups: list[list[str]]) -> None:
    world.faults = True
    world.plan(kind, groups)
    for _ in range(rng.choice([0, 0, 1, 2])):
        world.after(rng.uniform(0, 1.5), "planner crash", world.crash_planner)
    victim = world.workers[WorkerId(rng.choice(sorted(world.workers)))]
    if rng.random() < 0.2:
        world.after(rng.uniform(0, 1.5), "kill", lambda: world.kill(victim))
    if rng.random() < 0.2:
        other_kind, other = _another(world, rng)
        world.after(rng.uniform(0, 1.0), "forget", lambda: world.forget(other_kind, other))
    world.run(world.now_s + 4.0)
    world.faults = False
    for _ in range(16):
        world.run(world.now_s + 1.0)
        if world.settled():
            break
    said = world.coordinator.said if world.coordinator is not None else None
    assert world.settled(), f"{kind} ends at {world.journal}, {said}"


def _another(world: World, rng: random.Random) -> tuple[TransitionKind, list[list[str]]]:
    """A plan for whatever is in force: some groups merged, or all of them dissolved."""
    groups = [[str(m.worker_id) for m in g.members] for g in world.in_force.groups]
    if len(groups) == 1 or (any(len(g) > 1 for g in groups) and rng.random() < 0.5):
        return TransitionKind.RESTORE, [[name] for g in groups for name in g]
    one, other = rng.sample(groups, 2)
    return TransitionKind.DROP, [*(g for g in groups if g not in (one, other)), one + other]


def _judge(world: World) -> None:
    """No worker waits any more, every sequence has one leader, and none is gone."""
    assert world.journal is not None
    for worker in world.workers.values():
        assert not worker.waiting, f"{worker.name} still waits for {worker.waiting}"
        assert worker.forming or not world.leads(worker), f"{worker.name} serves nobody"
        phase = worker.transition.phase if worker.transition is not None else None
        # Of a plan that everybody has forgotten nothing is in force. Who has prepared it waits for a newer one: it
        # cannot know that nobody has decided.
        forgotten = worker.transition is not None and worker.transition.epoch <= world.forgotten_epoch
        harmless = (*_BEFORE_COMMIT, Phase.FAILED) if forgotten else ()
        if world.journal.stage is pt.Stage.ABORTED:  # who failed has undone its preparation, whether told or not
            harmless = (*harmless, Phase.FAILED)
        assert phase in (None, Phase.DONE, Phase.ABORTED, *harmless), f"{worker.name} ends as {phase}"
    led = [sequence for worker in world.workers.values() for sequence in worker.led]
    assert len(led) == len(set(led)), "a sequence has two leaders"
    world.expected_count = len(led) if world.expected_count is None else world.expected_count
    assert len(led) == world.expected_count, f"{len(led)} of {world.expected_count} sequences are left"


def partition(rng: random.Random, names: list[str]) -> list[list[str]]:
    shuffled = rng.sample(names, len(names))
    groups: list[list[str]] = []
    while shuffled:
        size = rng.randint(1, min(3, len(shuffled)))
        groups.append(shuffled[:size])
        shuffled = shuffled[size:]
    return groups


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        print(number, story(number).trace.hexdigest())

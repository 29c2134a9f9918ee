"""Whole clusters in virtual time, in which anything may fail while layouts change; afterwards they must recover.

Dispatchers, monitors, planners and group members are the real cores. KV and layers are tagged, so that a batch which
reads another sequence's KV is detected at once. Each seed draws its faults, most of them aimed at transitions.

    python -m tests.support.cluster_campaign FIRST LAST [--quiet]
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Standing
from ballast.common.sampling import PriorityClass
from ballast.common.transition import TransitionKind
from ballast.service.logs import silence
from services.planner.core import messages as p
from services.planner.core.stages import Stage
from sim.clients import Arrival
from sim.clock import Clock
from sim.memory import Geometry
from sim.offline import OfflineLoad
from sim.results import Outcome, SimRun
from sim.world import World, WorldOptions
from tests.support.agreement import Agreement
from tests.support.cluster_availability import Availability
from tests.support.cluster_swarm import Kind, Swarm, draw
from tests.support.simulated import options

_LAYERS = 6
_WORKER_COUNTS = (2, 2, 3, 3, 4)
_EXTENT_BYTES = 64 << 20
_BLOCKS_IN_EXTENT = 2
_OFFLINE = 0.3  # share of the clusters with offline work
_SWAP_BLOCKS = (*[0] * 18, 6, 40)  # most clusters recompute their victims, since swapping takes longer to simulate
_UNLIKE = 0.3  # share of the clusters whose members differ in memory, and perhaps in speed
_MORE_EXTENTS = (0, 0, 1, 2, 10, 40, 120, -4, -20)  # of an unlike member's memory
_MANY = 0.08  # share of the clusters with more workers
_CLASSES = 0.3  # share of the clusters with requests of several classes and callers
_CACHING = 0.7  # share of the clusters
_LOSES = 0.2  # share of the clusters that lose a follower while another instance serves alone
_LONG, _ALONE_TOKENS = 0.3, 400  # share of the clusters with longer requests, which hardly fit one instance
_STORY_S = 9.0  # duration of the arrivals, which come in two bursts
_HEALED_WITHIN_S = 60.0
_STANDS_WITHIN_S = 30.0  # from the last fault until an instance is parked or serves again
_PATIENCE_S = 300.0  # for all requests to end, even on one slow worker that swaps
_LONGEST_S = {Stage.COMMITTING: 25.0, Stage.EXCHANGING: 40.0, Stage.ABORTING: 20.0}  # the longest fault plus slack
_LEAVES_S = 100.0  # a member without memory for a second group restores only after the old group's requests have ended
_LOOK_S = 0.25
_GLANCE_S = 0.05


@dataclass(frozen=True, slots=True)
class Story:
    """The outcome of one seed."""

    run: SimRun
    setting: str  # the cluster's configuration
    troubles: tuple[str, ...]
    transitions: Counter[str]
    standings: Counter[str]  # of the members in all layouts
    met: Counter[tuple[str, str]]  # (fault, phase of the transition that it hit)
    migrated: Counter[str]  # outcomes of live migrations


class Epochs:
    """Each epoch has one layout, and no incarnation of a worker is followed by an earlier one."""

    def __init__(self) -> None:
        self._groups: dict[Epoch, tuple[Group, ...]] = {}
        self._lives: dict[WorkerId, Incarnation] = {}

    def forget(self) -> None:
        """Starts over, since a planner may know only what is stored: see `services.planner.core.machine`."""
        self._groups.clear()
        self._lives.clear()

    def see(self, layout: Layout) -> None:
        layout.check()
        if self._groups.setdefault(layout.epoch, layout.groups) != layout.groups:
            raise InvariantViolation(f"epoch {layout.epoch} is {self._groups[layout.epoch]} and {layout.groups}")
        if layout.epoch < max(self._groups):
            return  # the state server was rolled back
        for member in (member for group in layout.groups for member in group.members):
            newest = self._lives.setdefault(member.worker_id, member.incarnation)
            if member.incarnation < newest:
                raise InvariantViolation(f"{member.worker_id}: life {member.incarnation} after {newest}")
            self._lives[member.worker_id] = member.incarnation


def _options(seed: int, rng: random.Random, worker_count: int, *, several: bool) -> WorldOptions:
    """Options for workers with six layers and memory for about 500 tokens of KV, or unlike members."""
    of_members = random.Random(-seed - 4)
    is_unlike = of_members.random() < _UNLIKE
    cluster = _two_kinds(of_members, worker_count) if is_unlike else f"{worker_count}xA100-40G"
    made = options("drop", cluster=cluster, check_every=rng.choice((5, 30, 100)), seed=seed)
    elements = _EXTENT_BYTES // _BLOCKS_IN_EXTENT // (2 * made.rules.worker.block_tokens)
    model = made.model.model_copy(update={"layer_count": _LAYERS, "kv_elements_per_token_layer": elements})
    geometry = Geometry(
        extent_bytes=_EXTENT_BYTES,
        budget=36 * _LAYERS + 6,
        layer_count=_LAYERS,
        layer_parameters=20,
        other_parameters=6,
        block_bytes=elements * 2 * made.rules.worker.block_tokens,
    )
    geometries = [geometry]
    if is_unlike:
        geometries = [_unlike(geometry, of_members) for _ in range(worker_count)]
    rules, limits = made.rules, made.rules.dispatcher.limits
    worker, of_swap = rules.worker, random.Random(-seed)
    if swap_blocks := of_swap.choice(_SWAP_BLOCKS):
        worker = replace(
            worker,
            swap_space_bytes=swap_blocks * model.kv_bytes_per_token * worker.block_tokens,
            swap_blocks_per_step=of_swap.choice((0, 1, 3)),
            admission_reserve_fraction=0.0,
        )
    worker = replace(worker, prefix_caching=of_swap.random() < _CACHING, activation_log=seed % 4 != 0)
    offline = None
    if of_swap.random() < _OFFLINE:
        lengths = [(of_swap.randint(5, 120), of_swap.randint(3, 60)) for _ in range(64)]
        offline = OfflineLoad(lengths=lengths, waiting_count=3, until_s=_STORY_S)
        swap_bytes = of_swap.choice((0, 8, 60)) * model.kv_bytes_per_token * worker.block_tokens
        if not worker.swap_space_bytes:
            worker = replace(worker, swap_space_bytes=swap_bytes, swaps_online=False)
    patient = replace(limits, replay_limit=50, no_worker_timeout_s=120.0)
    rules = replace(
        rules,
        worker=worker,
        monitor=replace(rules.monitor, warmup_s=1.5),
        dispatcher=replace(rules.dispatcher, limits=patient),
    )
    link_fraction = made.timings.link_fraction * rng.choice((1.0, 1.0, 0.2, 0.02))
    return replace(
        made,
        timings=made.timings.model_copy(update={"link_fraction": link_fraction}),
        model=model,
        geometries=geometries,
        rules=rules,
        marks=True,
        offline=offline,
        dispatcher_count=rng.choice((1, 2)),
        monitor_count=2 if several else 1,
        planner_count=2 if several else 1,
        stop_after_s=_PATIENCE_S,
    )


def _two_kinds(rng: random.Random, worker_count: int) -> str:
    """A cluster with GPUs of one or two kinds."""
    faster = rng.randrange(worker_count)
    slower = f"{worker_count - faster}xA100-40G"
    return f"{slower}+{faster}xH100-80G" if faster else slower


def _unlike(geometry: Geometry, rng: random.Random) -> Geometry:
    """The geometry of a device with other memory, and perhaps with extents of half the size."""
    made = replace(geometry, budget=geometry.budget + rng.choice(_MORE_EXTENTS))
    if rng.random() < 0.8:
        return made
    return replace(
        made,
        extent_bytes=made.extent_bytes // 2,
        budget=2 * made.budget + rng.randrange(2),
        layer_parameters=2 * made.layer_parameters,
        other_parameters=2 * made.other_parameters,
    )


def _arrivals(rng: random.Random, worker_count: int, *, swaps: bool) -> list[Arrival]:
    """Two bursts that exceed memory; with `swaps`, also answers that outgrow memory."""
    arrivals, at_s, shared = list[Arrival](), 0.0, random.Random(worker_count)
    burst_per_s, answer = rng.uniform(9.0, 16.0) * worker_count, rng.choice((20, 30, 50))
    if swaps:
        answer *= 3
    while at_s < _STORY_S:
        prompt_tokens = rng.randint(5, 120)
        hash_ids = _hash_ids(shared, len(arrivals))
        arrivals.append(Arrival(at_s, prompt_tokens, rng.randint(3, answer), hash_ids=hash_ids, hash_tokens=16))
        at_s += rng.expovariate(burst_per_s if 0.3 <= at_s % 5.5 < 2.0 else 3.0)
    return arrivals


def _with_long_ones(arrivals: list[Arrival], rng: random.Random) -> list[Arrival]:
    """Gives a few of the requests prompts or answers that fit no single instance."""
    chosen = set(rng.sample(range(len(arrivals)), min(len(arrivals), rng.randint(1, 5))))
    return [_longer(one, rng) if number in chosen else one for number, one in enumerate(arrivals)]


def _longer(arrival: Arrival, rng: random.Random) -> Arrival:
    if rng.random() < 0.5:
        return arrival._replace(hash_ids=(), input_tokens=rng.randint(_ALONE_TOKENS, 3 * _ALONE_TOKENS))
    return arrival._replace(output_tokens=rng.randint(_ALONE_TOKENS, 2 * _ALONE_TOKENS))


def _hash_ids(rng: random.Random, serial: int) -> tuple[int, ...]:
    """Block hashes: a random part of one of three common prefixes, possibly empty, then unique blocks."""
    trunk = rng.randrange(1, 4)
    common = [trunk * 10 + place for place in range(rng.choice((0, 2, 4, 8)))]
    return (*common, *(1000 * (serial + 1) + place for place in range(8 - len(common))))


def story(seed: int) -> Story:
    """Runs one seed. Raises InvariantViolation or AssertionError if anything is wrong."""
    with silence():
        return _story(seed)


def _story(seed: int) -> Story:
    rng = random.Random(seed)
    worker_count = rng.choice(_WORKER_COUNTS)
    if (of_more := random.Random(-seed - 5)).random() < _MANY:
        worker_count = of_more.choice((5, 6, 8))
    troubles = draw(rng, worker_count, _STORY_S)
    several = any(trouble.kind in _OF_CONTROL for trouble in troubles) or rng.random() < 0.1
    made = _options(seed, rng, worker_count, several=several)
    worker = made.rules.worker
    arrivals = _arrivals(rng, worker_count, swaps=worker.swap_space_bytes > 0 and worker.swaps_online)
    if (of_long := random.Random(-seed - 2)).random() < _LONG:
        arrivals = _with_long_ones(arrivals, of_long)
    if (of_callers := random.Random(-seed - 6)).random() < _CLASSES:
        made = replace(made, classes=of_callers.sample(tuple(PriorityClass), of_callers.choice((2, 3))))
        callers = ("", "a", "a", "b")[: of_callers.randint(1, 4)]
        arrivals = [one._replace(caller=of_callers.choice(callers)) for one in arrivals]
    world, slowness = World(made, arrivals), rng.choice((4.0, 7.0, 10.0))
    world.wires.max_transfers, world.lines.forgets = rng.choice((2, 1024)), rng.random() < 0.5
    for instance in world.instances.values():
        instance.slowness = slowness
    setting = (
        f"{worker_count} workers of {[geometry.budget for geometry in made.geometries]} extents,"
        f" {made.dispatcher_count} dispatchers, {made.planner_count} planners,"
        f" {made.monitor_count} monitors, slowness {slowness:g}, {len(world.clients.records)} requests"
    )
    epochs = Epochs()
    swarm = Swarm(
        world,
        rng,
        _STORY_S,
        is_hasty=rng.random() < 0.25,
        migrates=rng.random() < 0.3,
        clients_leave=rng.random() < 0.3,
        parker=random.Random(-seed - 1) if seed % 3 == 1 else None,
        loser=of_loss if worker_count > 2 and (of_loss := random.Random(-seed - 3)).random() < _LOSES else None,
        lost=epochs.forget,
    )
    standings = Counter[str]()
    world.state.watch(epochs.see)
    world.state.watch(lambda layout: standings.update(m.standing for g in layout.groups for m in g.members))
    agreement = Agreement(world)
    world.clock.every(_GLANCE_S, b"look", agreement.look)
    availability = Availability(world)
    world.clock.every(_GLANCE_S, b"look", availability.look)
    swarm.expect(troubles)
    try:
        run = world.run()
        for record in run.records:
            is_long = record.input_tokens + record.wanted_tokens > _ALONE_TOKENS
            too_long = is_long and (record.outcome is Outcome.REFUSED or "max_model_len" in record.error)
            ended = record.outcome is Outcome.FINISHED or too_long or record.request_id in swarm.left
            assert ended, f"{record.request_id} is {record.outcome}: {record.error}"
        swarm.is_over = True
        if not swarm.is_for_ever:
            _heal(world)
            _check_stages(world)
        for node in world.planners.values():
            assert node.published == sorted(set(node.published)), f"{node.name} published {node.published}"
    except (InvariantViolation, AssertionError, ValueError, KeyError) as error:
        error.add_note(
            f"seed {seed}: {setting}; {'; '.join(swarm.told) or 'no trouble'};"
            f" at {world.clock.now_s - world.zero_s:.3f} s"
        )
        raise
    return Story(run, setting, tuple(swarm.told), _ended(world), standings, swarm.met, _migrated(world))


_OF_CONTROL = (
    *(Kind.STOP_MONITOR, Kind.NEW_MONITOR, Kind.STOP_PLANNER, Kind.NEW_PLANNER),
    *(Kind.STATE_AWAY, Kind.STATE_SLOW, Kind.STATE_EMPTY, Kind.STATE_BACK, Kind.FAILOVER),
    *(Kind.STATE_GARBAGE, Kind.NETWORK, Kind.NO_DISCOVERY, Kind.ALL_STOP),
)


# ---------------------------------------------------------------- recovery


def _heal(world: World) -> None:
    """Without further faults, every living worker must be whole and serve alone within a minute. Then a requested drop
    and a restore must succeed, and a worker must be parked and woken within half a minute each.
    """
    _until_well(world)
    world.check()
    living = sorted(name for name in world.instances if name not in world.crashed)
    if len(living) > 1:
        clock, done = world.clock, _ended(world)["drop done"]
        numbers = itertools.count()

        def ask_again() -> str:
            if _ended(world)["drop done"] > done:
                return ""
            ask = p.DropRequested(clock.now_s, "end", f"drop {next(numbers)}", worker_ids=tuple(living[:2]), hold_s=5.0)
            world.planner.feed(ask)
            return f"no drop is done: {_ended(world)}"

        _until(clock, ask_again)
        world.planner.feed(p.RestoreRequested(clock.now_s, "end", "restore"))
        _until_well(world)
        world.planner.feed(p.StandingRequested(clock.now_s, "end", "park", living[0], away=True))
        memory = world.instances[living[0]].member.memory
        _until(clock, lambda: "" if memory.is_parked else f"{living[0]} is not parked", _STANDS_WITHIN_S)
        _until_well(world, _STANDS_WITHIN_S)


def _check_stages(world: World) -> None:
    """Checks that every transition left each stage before its deadline: obstacles end, and members report that."""
    for record in (record for node in world.planners.values() for record in node.records):
        for stage, longest_s in _LONGEST_S.items():
            if stage is Stage.EXCHANGING and record.journal.kind is TransitionKind.RESTORE:
                longest_s = _LEAVES_S
            took_s = record.seconds_in(stage)
            assert took_s < longest_s, f"epoch {record.epoch} ({record.journal.kind}): {stage} for {took_s:.1f} s"


def _ended(world: World) -> Counter[str]:
    records = [record for node in world.planners.values() for record in node.records]
    found = Counter(f"{r.journal.kind} {r.journal.stage}" for r in records)
    stands_in = [r for r in records if r.by == "loss" and r.journal.kind is TransitionKind.DROP]
    return found + Counter(f"stand-in {r.journal.stage}" for r in stands_in)


def _migrated(world: World) -> Counter[str]:
    totals = [instance.member.published.migrations for instance in world.instances.values()]
    moved, anew = sum(each.moved for each in totals), sum(each.recomputed for each in totals)
    return Counter({"moved": moved - anew, "anew": anew, "stayed": sum(each.not_moved for each in totals)})


def _until_well(world: World, within_s: float = _HEALED_WITHIN_S) -> None:
    """Wakes all parked workers, and waits until the cluster has recovered."""

    def look() -> str:
        for worker_id in _away(world) if world.planner.core.active else ():
            name = f"wake {worker_id} {world.clock.now_s}"
            world.planner.feed(p.StandingRequested(world.clock.now_s, "end", name, worker_id, away=False))
        return _why_ill(world)

    _until(world.clock, look, within_s)


def _away(world: World) -> list[WorkerId]:
    stored = world.state.stored
    groups = stored.layout.groups if stored is not None else ()
    return [m.worker_id for g in groups for m in g.members if m.standing in (Standing.LEAVING, Standing.PARKED)]


def _until(clock: Clock, why_not: Callable[[], str], within_s: float = _HEALED_WITHIN_S) -> None:
    deadline_s, why = clock.now_s + within_s, ""
    while clock.now_s < deadline_s:
        until_s = clock.now_s + _LOOK_S
        while clock.now_s < until_s:
            clock.step()
        if not (why := why_not()):
            return
    raise AssertionError(f"the cluster has not recovered: {why}")


def _why_ill(world: World) -> str:
    living = {name for name in world.instances if name not in world.crashed}
    stored = world.state.stored
    groups = stored.layout.groups if stored is not None else ()
    placed = {m.worker_id for g in groups for m in g.members}
    stopped = [node.name for node in (*world.monitors.values(), *world.planners.values()) if node.process.paused]
    if world.silent or stopped or not world.state.is_up:
        return f"{sorted(world.silent)} and {stopped} are still stopped, the state server is up: {world.state.is_up}"
    if placed != living or any(len(g.members) > 1 for g in groups):
        return f"{sorted(living)} live, the layout is {[[m.worker_id for m in g.members] for g in groups]}"
    if waking := [m.worker_id for g in groups for m in g.members if m.standing is not Standing.SERVING]:
        return f"{waking} do not serve"
    if draining := sorted(name for name in living if world.instances[name].load().draining):
        return f"{draining} still drain"
    if not world.planner.core.active or world.planner.core.conductor.busy:
        return "the planner is busy"
    for name in sorted(living):
        instance = world.instances[name]
        member, book = instance.member, instance.core
        if member.role.stages or len(member.memory.parameters.held_layers) != _LAYERS:
            return f"{name} is {member.place}, holds {member.memory.parameters.held_layers}"
        if book.sequence_ids or book.group_scheduler.suspended_ids or not member.at_rest:
            last = list(member.progress.values())[-1:]
            return f"{name} is not at rest: {book.sequence_ids} {book.group_scheduler.suspended_ids} {last}"
    return ""


# ---------------------------------------------------------------- many


def table(met: Mapping[tuple[str, str], int]) -> str:
    """A table of how often each kind of fault hit each phase of a transition."""
    phases = sorted({phase for _, phase in met})
    lines = ["".join((f"{'':14}", *(f"{phase:>18}" for phase in phases)))]
    for kind in (str(kind) for kind in Kind):
        counts = [met.get((kind, phase), 0) for phase in phases]
        lines.append("".join((f"{kind:14}", *(f"{count:18}" for count in counts))))
    return "\n".join(lines)


def tell(seeds: Iterable[int], *, quiet: bool) -> None:
    met, ended, migrated, count = Counter[tuple[str, str]](), Counter[str](), Counter[str](), 0
    standings = Counter[str]()
    for seed in seeds:
        told = story(seed)
        met += told.met
        ended += told.transitions
        standings += told.standings
        migrated += told.migrated
        count += 1
        if not quiet:
            print(seed, told.run.trace_hash, told.setting, dict(told.transitions), "; ".join(told.troubles), flush=True)
    print(table(met))
    print(f"{count} stories, {met.total()} troubles; {dict(sorted(ended.items()))}; migrations: {dict(migrated)}")
    print(f"members in layouts: {dict(standings)}")


if __name__ == "__main__":
    tell(range(int(sys.argv[1]), int(sys.argv[2])), quiet="--quiet" in sys.argv)

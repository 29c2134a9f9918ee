"""Random histories of a cluster of real workers with changing layouts, and the answers of an undisturbed worker.

All random choices come from the seed, but timing does not, since threads race. A failing seed fails often, not always.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from unittest import mock

import torch

from ballast.common.cost import CostModel
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import Group, Layout
from ballast.common.sampling import FinishReason, PriorityClass
from ballast.common.targets import for_all
from ballast.common.transition import Phase, TransitionKind
from services.worker.core import transition_messages as t
from services.worker.core.batch import Batch, TokenLogprobs
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.plan import Victim
from services.worker.core.room import RoomSizes
from services.worker.core.spans import KvRange, Piece
from services.worker.core.turns import MemberEvent
from services.worker.links.config import TransportConfig
from services.worker.links.connection import Link
from services.worker.links.ports import Message
from services.worker.pipeline import events as e
from services.worker.policy.harvest import Harvest
from tests.support.group import HERE, Answer, Cluster, Place, Sizes, Unprepared, layout, running_group
from tests.support.shells import until
from tests.support.wishes import Wish, alike

OnMessage = Callable[[Link, Message], None]
# How pipelines form microbatches: by token counts, or with cost models that split prompts finely or hardly at all.
_COSTS = (None, CostModel(1e-6, 1e-5, 1e-6, 0.0), CostModel(1e-8, 1e-5, 1e-3, 1e-3), CostModel(1e-7, 1e-5, 1e-4, 5e-5))


@dataclass(frozen=True, slots=True)
class Expected:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    matched_stop: str
    logprobs: tuple[TokenLogprobs, ...]


def _harvest(seed: int) -> Harvest | None:
    """Limits of offline work, which may be preempted within a step; None for one of three seeds, without such work."""
    cost = CostModel(1e-7, 1e-5, 1e-4, 5e-5)
    return None if seed % 3 == 0 else Harvest(lambda: cost, 1.0, targets=for_all(ttft_s=1e-4), layer_count=32)


_with_donors = GroupScheduler.with_donors


async def undisturbed(model_dir: Path, wishes: Sequence[Wish], place: Place = HERE) -> list[Expected]:
    """The answers of a single worker without any disturbance."""
    sizes = Sizes(memory_bytes=8 << 20, max_waiting_count=len(wishes), place=place)
    async with running_group(model_dir, ["w0"], sizes) as cluster:
        answers = [await cluster.dispatcher.submit("w0", w.prompt, w.sampling) for w in wishes]
        for answer in answers:
            await cluster.dispatcher.end(answer)
    return [Expected(tuple(a.token_ids), a.text, a.finish_reason, a.matched_stop, tuple(a.logprobs)) for a in answers]


_MOST_DISTURBANCES = 12  # of each kind: more would keep a slow machine from finishing
_OVER = (Phase.DONE, Phase.ABORTED)
_LOSES = 0.15  # share of the transitions preceded by a loss, if possible
_CACHING = 0.75  # share of the clusters with a prefix cache
Spans = list[list[tuple[str, int, int]]]  # groups of (worker, first layer, last layer)


@dataclass
class Tally:
    """Counts of what happened, so that a test can check its coverage."""

    requests: int = 0
    whole: int = 0
    drops: int = 0
    restores: int = 0
    aborts: int = 0
    unprepared: int = 0
    victims: int = 0
    recomputed: int = 0
    by_tokens: int = 0  # of these, from pipelines that dissolved
    later_waves: int = 0  # additional waves of victims, because one wave had no room for all of them
    exchanged_bytes: int = 0
    moved: int = 0
    migrated: int = 0  # by live migrations
    not_migrated: int = 0  # begun, but abandoned
    migrated_anew: int = 0  # of the migrated ones, those that arrived without all of their KV
    stand_ins: int = 0  # replacements of lost followers
    refilled: int = 0  # tokens recomputed by stand-ins from a log
    swapped_in_pipelines: int = 0  # copies to host memory and back
    steps_ahead: int = 0  # lone workers' steps launched before all their tokens were known
    offline: int = 0  # offline requests
    yields: int = 0  # of offline requests
    preempted: int = 0  # offline steps preempted between two layers
    hits: int = 0  # tokens whose KV was found in the prefix cache
    sharing: int = 0  # victims whose first blocks had already been sent with another victim
    epochs: list[int] = field(default_factory=list[int])

    def add(self, other: "Tally") -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


class History:
    """One cluster with the requests and transitions that the seed determines."""

    def __init__(
        self,
        seed: int,
        model_dir: Path,
        wishes: Sequence[Wish],
        expected: Sequence[Expected],
        request_count: int,
        *,
        crowded_bytes: int = 0,
        layouts_change: bool = True,
        place: Place = HERE,
    ) -> None:
        """With `crowded_bytes`, two workers have that much memory, which long requests fill at once, so that a drop has
        no room for all KV at the same time.
        """
        self._layouts_change = layouts_change
        self._seed = seed
        self._crowded = crowded_bytes > 0
        self._rng = rng = random.Random(seed)
        self._model_dir = model_dir
        self._wishes = wishes
        self._expected = expected
        self._names = [f"w{i}" for i in range(rng.choice([2, 2, 3, 3, 4]))]
        rate = rng.choice([None, None, None, 2e6, 10e6])
        self._sizes = Sizes(
            memory_bytes=rng.choice([9, 10, 12]) << 19,
            max_running_count=rng.choice([4, 16]),
            max_batch_tokens=rng.choice([32, 64]),
            handover_timeout_s=1.0,
            swap_block_count=64 if seed % 4 == 1 else 0,
            prefix_caching=random.Random(f"prefixes {seed}").random() < _CACHING,
            cost=random.Random(f"microbatching {seed}").choice(_COSTS),
            activation_log_bytes=(seed % 3 != 0) << 20,
            harvest=_harvest(seed),
            transport=TransportConfig(rate_bytes_per_s=rate),
            async_scheduling=seed % 4 < 3,
            place=replace(place, host_copy="auto" if seed % 5 == 2 else "off"),
        )
        if self._crowded:
            self._names = self._names[:2]
            self._sizes = replace(self._sizes, memory_bytes=crowded_bytes, max_running_count=64, max_batch_tokens=64)
        shares = self._sizes.prefix_caching and random.Random(f"alike {seed}").random() < 0.5
        eligible = [i for i, wish in enumerate(wishes) if not self._crowded or _is_long(wish)]
        eligible = alike(wishes) if shares and not self._crowded else eligible
        self._offline_share = 0.5 if self._sizes.harvest is not None and not self._crowded else 0.0
        self._chosen = [eligible[rng.randrange(len(eligible))] for _ in range(request_count)]
        self._asked: list[tuple[int, Answer]] = []
        self._all_asked = False
        self._restores: set[int] = set()
        self._leaves_within_s = random.Random(f"patience {seed}").choice([0.0, 0.05, 10.0])
        self.tally = Tally()

    async def run(self) -> Tally:
        def with_donors(group: GroupScheduler, admitted: Iterable[Victim]) -> tuple[Victim, ...]:
            victims = _with_donors(group, admitted)
            self.tally.sharing += sum(victim.donated_count > 0 for victim in victims)
            return victims

        with (
            mock.patch("services.worker.policy.leaving.LEAVES_WITHIN_S", self._leaves_within_s),
            mock.patch.object(GroupScheduler, "with_donors", with_donors),
        ):
            return await self._run()

    async def _run(self) -> Tally:
        async with running_group(self._model_dir, self._names, self._sizes) as cluster:
            pristine = _checksums(cluster)
            if self._seed % 4 == 3:
                _delay(cluster, self._seed)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ask(cluster))
                tasks.create_task(self._disturb(cluster))
                tasks.create_task(self._migrate(cluster))
                if self._layouts_change:
                    tasks.create_task(self._change_layouts(cluster))
                elif len(self._names) > 2:
                    tasks.create_task(self._make_pipelines(cluster))
            await cluster.quiet()
            _check_at_rest(cluster, pristine)
            self._count(cluster)
        self._compare()
        return self.tally

    # ------------------------------------------------------------ actions

    async def _ask(self, cluster: Cluster) -> None:
        rng, pause_s = self._rng, self._rng.choice([0.0, 0.002, 0.01])
        pause_s = 0.0 if self._crowded else pause_s
        for index in self._chosen:
            wish = self._wishes[index]
            within_s = rng.uniform(0.01, 0.5) if rng.random() < 0.05 else None
            leader = rng.choice(self._names)
            offline = random.Random(f"offline {self._seed} {len(self._asked)}").random() < self._offline_share
            priority = PriorityClass.BATCH if offline else PriorityClass.DEFAULT
            self.tally.offline += offline
            answer = await cluster.dispatcher.submit(leader, wish.prompt, wish.sampling, within_s, priority)
            self._asked.append((index, answer))
            if pause_s:
                await asyncio.sleep(rng.expovariate(1 / pause_s))
        self._all_asked = True
        for _, answer in self._asked:
            await cluster.dispatcher.end(answer)

    def _under_way(self) -> bool:
        return not self._all_asked or any(a.finish_reason is None for _, a in self._asked)

    async def _disturb(self, cluster: Cluster) -> None:
        """Cancels requests, breaks streams and sends stale messages."""
        rng, cancelled, reattached = self._rng, 0, 0
        while self._under_way():
            await asyncio.sleep(rng.expovariate(1 / 0.05))
            what = rng.random()
            live = [a for _, a in self._asked if a.finish_reason is None]
            if what < 0.3 and live and cancelled < _MOST_DISTURBANCES:
                cancelled += 1
                await cluster.dispatcher.cancel(rng.choice(live))
            elif what < 0.4 and reattached < _MOST_DISTURBANCES:
                reattached += 1
                await cluster.dispatcher.reattach(rng.choice(self._names))
            else:
                name = rng.choice(self._names)
                for event in _stale(rng, cluster, name):
                    cluster.post(name, event)

    async def _migrate(self, cluster: Cluster) -> None:
        """Orders migrations as a planner does, sometimes for an outdated layout."""
        rng = random.Random(f"migrations {self._seed}")
        while self._under_way():
            await asyncio.sleep(rng.expovariate(1 / (0.4 if self._layouts_change else 0.03)))
            source, target = rng.sample(self._names, 2)
            epoch = cluster.in_force.epoch + rng.choice([0, 0, 0, 0, -1])
            cluster.migrate(source, target, rng.choice([1, 5, 20, 1000]), rng.uniform(0.01, 0.3), epoch)

    async def _make_pipelines(self, cluster: Cluster) -> None:
        """Makes two groups, at least one of which has several stages at random borders."""
        count, rng = cluster.layer_count, random.Random(f"pipelines {self._seed}")
        groups: Spans = []
        for names in (self._names[:2], self._names[2:]):
            borders = [0, *sorted(rng.sample(range(1, count), len(names) - 1)), count]
            groups.append([(name, *ends) for name, ends in zip(names, itertools.pairwise(borders), strict=True)])
        self.tally.drops += 1
        await cluster.change(TransitionKind.DROP, layout(1, groups, count))

    async def _change_layouts(self, cluster: Cluster) -> None:
        rng, epoch, said, give_up_at_s, silent = self._rng, 1, -1, 0.0, 0
        losses = random.Random(f"losses {self._seed}")
        if self._crowded:
            await until(lambda: not self._under_way() or _is_full(cluster))
        while self._under_way():
            now_said = sum(len(a.token_ids) + (a.finish_reason is not None) for _, a in self._asked)
            if now_said != said:
                said, give_up_at_s, silent = now_said, time.monotonic() + 90.0, 0
            elif time.monotonic() > give_up_at_s:
                stuck = [a.story for _, a in self._asked if a.finish_reason is None]
                raise AssertionError(f"epoch {epoch}; requests do not end: {stuck}; {cluster.describe()}")
            # On a slow machine a request may be recomputed after each change without getting a token in between.
            await asyncio.sleep(rng.choice([0.0, 0.02, 0.1]) * rng.random() + 0.05 * max(0, silent - 10))
            epoch, silent = epoch + 1, silent + 1
            if losses.random() < _LOSES and await self._lose_follower(cluster, losses, epoch):
                continue
            kind, target = self._next_layout(cluster, epoch)
            if rng.random() < 0.25:
                members = cluster.ask_to_prepare(kind, target)
                await asyncio.sleep(rng.choice([0.0, 0.01, 0.1]) * rng.random())
                await cluster.abort(members, target.epoch)
                self.tally.aborts += 1
                continue
            try:
                members = await cluster.prepare(kind, target)
            except Unprepared as failure:
                said = set(failure.why.values())
                missed = {why for why in said if "no link" in why}
                if not missed or not said - missed <= {"the leader has withdrawn it"}:
                    raise
                # A member was busy with the previous plan until the other members gave up. If it was the leader, its
                # followers may already have received its abort.
                await cluster.abort(cluster.members(target), target.epoch)
                self.tally.unprepared += 1
                continue
            if rng.random() < 0.15:
                await cluster.abort(members, target.epoch)
                self.tally.aborts += 1
                continue
            cluster.commit(members, target)
            self.tally.epochs.append(epoch)
            if kind is TransitionKind.DROP:
                self.tally.drops += 1
            else:
                self.tally.restores += 1
                self._restores.add(epoch)
            if rng.random() < 0.6:  # otherwise the next plan arrives during the KV exchange
                await cluster.done(members, target.epoch)
        await _all_done(cluster)

    async def _lose_follower(self, cluster: Cluster, rng: random.Random, epoch: int) -> bool:
        """A pipeline's follower loses its links, and a lone worker takes its place. The lost worker becomes whole and
        serves alone. Returns False if there is no such pipeline.
        """
        groups = cluster.in_force.groups
        followers = [m.worker_id for g in groups for m in g.members[1:]]
        alone = [g.leader.worker_id for g in groups if len(g.members) == 1]
        if not followers or not alone:
            return False
        await _all_done(cluster)
        lost, outside = rng.choice(followers), rng.choice(alone)
        spans: Spans = [
            [(outside if m.worker_id == lost else m.worker_id, m.first_layer, m.last_layer) for m in g.members]
            for g in groups
            if g.leader.worker_id != outside
        ]
        worker = cluster.workers[lost]
        for connection in list(worker.membership.plane._connections.values()):
            connection.give_up("the history has cut it")
        target = layout(epoch, spans, cluster.layer_count)
        members = await cluster.prepare(TransitionKind.DROP, target)
        cluster.commit(members, target)
        cluster.in_force = layout(epoch, [*spans, [(lost, 0, cluster.layer_count)]], cluster.layer_count)
        await cluster.done(members, target.epoch)
        await until(lambda: not worker.member.role.stages and worker.member._rescue is None)
        self.tally.epochs.append(epoch)
        self.tally.stand_ins += 1
        return True

    def _next_layout(self, cluster: Cluster, epoch: int) -> tuple[TransitionKind, Layout]:
        """Dissolves some pipelines or merges some groups, possibly several at once."""
        spans: Spans = [
            [(m.worker_id, m.first_layer, m.last_layer) for m in g.members] for g in cluster.in_force.groups
        ]
        while True:
            if any(len(g) > 1 for g in spans) and (len(spans) == 1 or self._rng.random() < 0.4):
                made = self._dissolve(spans, cluster.layer_count)
                kind = TransitionKind.RESTORE
            else:
                made = self._merge(spans, cluster.layer_count)
                kind = TransitionKind.DROP
            if made is not None:
                return kind, layout(epoch, made, cluster.layer_count)

    def _dissolve(self, spans: Spans, layer_count: int) -> Spans | None:
        made: Spans = []
        for group in spans:
            if len(group) > 1 and self._rng.random() < 0.7:
                made += [[(w, 0, layer_count)] for w, _, _ in group]
            else:
                made.append(group)
        return made if len(made) > len(spans) else None

    def _merge(self, spans: Spans, layer_count: int) -> Spans | None:
        rng, left, made = self._rng, self._rng.sample(spans, len(spans)), list[list[tuple[str, int, int]]]()
        while left:
            size = min(len(left), rng.choice([1, 2, 2, 3]))
            part, left = left[:size], left[size:]
            if size == 1:
                made.append(part[0])
            elif (merged := self._split([m for g in part for m in g], layer_count)) is not None:
                made.append(merged)
            else:
                return None
        return made if len(made) < len(spans) else None

    def _split(self, members: list[tuple[str, int, int]], layer_count: int) -> list[tuple[str, int, int]] | None:
        """A random order with random borders in which no member gets a layer that it does not hold; None if none is
        found.
        """
        for _ in range(300):
            order = self._rng.sample(members, len(members))
            cuts = [0, *sorted(self._rng.sample(range(1, layer_count), len(members) - 1)), layer_count]
            if all(first <= cuts[i] and cuts[i + 1] <= last for i, (_, first, last) in enumerate(order)):
                return [(w, cuts[i], cuts[i + 1]) for i, (w, _, _) in enumerate(order)]
        return None

    # ------------------------------------------------------------ results

    def _count(self, cluster: Cluster) -> None:
        for worker in cluster.workers.values():
            for group in worker.core._group_schedulers:
                self.tally.preempted += group.scheduler.offline_work.preemptions_total
            load = worker.shell.load()
            self.tally.yields += load.offline_yields_total
            self.tally.hits += load.prefix_hits_total
            self.tally.steps_ahead += worker.steps_ahead
            self.tally.moved += worker.core.totals.moved
            self.tally.swapped_in_pipelines += 0 if worker.copier is None else worker.copier.in_pipelines
            migrations = worker.member.published.migrations
            self.tally.migrated += migrations.moved
            self.tally.not_migrated += migrations.not_moved
            self.tally.migrated_anew += migrations.recomputed
            for epoch in self.tally.epochs:
                if progress := worker.progress(epoch):
                    self.tally.victims += progress.victim_count
                    self.tally.recomputed += progress.victims_recomputed
                    self.tally.by_tokens += progress.victims_recomputed if epoch in self._restores else 0
                    self.tally.later_waves += max(0, progress.waves - 1)
                    self.tally.exchanged_bytes += progress.kv_bytes_sent
                    self.tally.refilled += progress.refilled_tokens

    def _compare(self) -> None:
        for index, answer in self._asked:
            self.tally.requests += 1
            self.tally.whole += compare(self._expected[index], answer, self._sizes.place)


def compare(expected: Expected, answer: Answer, place: Place = HERE) -> bool:
    """Checks an answer. Returns whether it is complete, i.e. neither cancelled nor past its deadline."""
    tolerance = 2e-7 if place.dtype == "float64" else 1e-3  # relative, of logprobs
    cut = answer.finish_reason in (FinishReason.CANCELLED, FinishReason.DEADLINE)
    count = len(answer.token_ids) if cut else len(expected.token_ids)
    assert not answer.error, f"{answer.story}: {answer.error}"
    assert tuple(answer.token_ids) == expected.token_ids[:count], answer.story
    if answer.sampling.logprobs is not None:
        _compare_logprobs(expected.logprobs[:count], answer.logprobs, answer.story, tolerance)
    if cut:
        assert answer.cancelled or answer.deadline_at_s is not None
        assert expected.text.startswith(answer.text) or expected.matched_stop
        return False
    assert answer.text == expected.text, answer.story
    assert (answer.finish_reason, answer.matched_stop) == (expected.finish_reason, expected.matched_stop)
    return True


def _compare_logprobs(
    expected: Sequence[TokenLogprobs], found: Sequence[TokenLogprobs], name: str, tolerance: float
) -> None:
    """Compares log probabilities with a tolerance, since members exchange them in single precision. Wrong KV of one
    token with a small weight still exceeds the tolerance.
    """
    assert len(found) == len(expected), name
    for at, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one.token_id == other.token_id, f"{name}: token {at}"
        _compare_logprobs(one.prompt, other.prompt, f"{name}: prompt", tolerance)
        difference = abs(one.logprob - other.logprob)
        assert difference <= 1e-9 + tolerance * abs(one.logprob), (
            f"{name}: the logprob of token {at} of {len(found)} is off by {difference:g}"
        )


async def _all_done(cluster: Cluster) -> None:
    """Waits until every worker has finished its last transition."""
    for group in cluster.in_force.groups:
        for member in group.members:
            worker = cluster.workers[member.worker_id]
            await until(lambda w=worker: all(p.phase in _OVER for p in w.member.progress.values()))
            # A member reports ABORTED before it has undone its preparation.
            await until(lambda w=worker: not w.member._driver.undoing)
        leader = cluster.workers[group.leader.worker_id]
        # The leader learns the others' block counts over links.
        await until(lambda g=group, w=leader: w.shell.load().block_count == _smallest(cluster, g))


def _is_long(wish: Wish) -> bool:
    return len(wish.prompt) >= 90 and wish.sampling.ignore_eos and wish.sampling.max_tokens >= 25


def _is_full(cluster: Cluster) -> bool:
    books = [worker.book for worker in cluster.workers.values()]
    return sum(book.used_count for book in books) > 0.85 * sum(book.block_count for book in books)


def _smallest(cluster: Cluster, group: Group) -> int:
    return min(cluster.workers[m.worker_id].book.block_count for m in group.members)


def _checksums(cluster: Cluster) -> list[bytes]:
    parameters = next(iter(cluster.workers.values())).engine.memory.parameters
    return [parameters.layer_checksum(layer) for layer in range(cluster.layer_count)]


def _check_at_rest(cluster: Cluster, pristine: Sequence[bytes]) -> None:
    """Checks that requests left nothing behind, every byte is accounted for (I3), and each group has a complete copy
    (I1).
    """
    for group in cluster.in_force.groups:
        held: set[int] = set()
        for member in group.members:
            worker = cluster.workers[member.worker_id]
            worker.engine.check()
            worker.core.check()
            worker.member.check()
            parameters, kv = worker.engine.memory.parameters, worker.engine.memory.kv
            assert (
                set(parameters.held_layers) == set(kv.held_layers) == set(range(member.first_layer, member.last_layer))
            )
            assert not kv.retired_layers
            assert worker.engine.memory.leaving is None
            assert worker.book.block_count == kv.block_count
            assert worker.book.numbers == cluster.workers[group.leader.worker_id].book.numbers
            assert not worker.core.sequence_ids
            assert not worker.engine.runner.sequence_ids
            assert not worker.shell._turns.texts
            held.update(parameters.held_layers)
            for layer in parameters.held_layers:
                assert parameters.layer_checksum(layer) == pristine[layer], f"{member.worker_id} layer {layer}"
        assert held == set(range(cluster.layer_count))
        leader = cluster.workers[group.leader.worker_id]
        report = leader.core.load(0.0, leader.engine.memory_report())
        assert report.block_count == _smallest(cluster, group)
        assert (report.used_block_count, report.running_count, report.waiting_count) == (0, 0, 0)


def _delay(cluster: Cluster, seed: int) -> None:
    """Delays messages at random, so that messages of different links arrive out of order."""
    for name, worker in cluster.workers.items():
        hub, rng = worker.member._hub, random.Random(f"{seed} {name}")

        def late(link: Link, message: Message, rng: random.Random = rng, deliver: OnMessage = hub.on_message) -> None:
            if rng.random() < 0.04:
                time.sleep(rng.uniform(0.0, 0.1))
            deliver(link, message)

        hub.on_message = late


def _stale(rng: random.Random, cluster: Cluster, name: str) -> list[MemberEvent]:
    """Events of past or unknown epochs, which must change nothing (I5)."""
    worker = cluster.workers[name]
    own, leaving = int(worker.member._role.epoch), worker.member._driver.leaving
    peer = WorkerId(rng.choice(sorted(set(cluster.workers) - {name})))
    ids = worker.book.sequence_ids
    some_id = rng.choice(ids) if ids else 1
    hidden = torch.zeros(1, 64, dtype=torch.float64)
    found: list[MemberEvent] = []
    for epoch in (Epoch(max(0, own - 1)), Epoch(own - 2 if own > 2 else 0)):
        if epoch == own or (leaving is not None and epoch == leaving.role.epoch):
            continue
        found += [
            e.BatchArrived(epoch, Batch(1 << 30, (some_id,), (), ()), hidden),
            e.ResultArrived(epoch, (1, "from another time")),
            e.CapacityTold(epoch, peer, 1, RoomSizes(1, 1), epoch),
            e.HandoverArrived(epoch, peer, (), 1, 1),
            e.RosterArrived(epoch, t.RosterReceived(0.0, epoch, peer, ()), (some_id,)),
            e.RosterArrived(epoch, t.RosterReceived(0.0, epoch, peer, (), 1, rng.random() < 0.5), (some_id,)),
            e.Told(epoch, t.WaveDone(0.0, epoch, peer, 0)),
            e.KvAsked(epoch, peer, (some_id,)),
            e.RoomGranted(epoch, 1),
            e.RoomWithdrawn(epoch),
            e.Told(epoch, t.CommitRequested(0.0, epoch)),
            e.Told(epoch, t.AbortRequested(0.0, epoch, "late")),
            e.Told(epoch, t.EpochEnded(0.0, epoch, peer)),
            e.Told(epoch, t.HandoverReceived(0.0, epoch, peer, ())),
            e.Told(epoch, t.KvReceived(0.0, epoch, some_id, peer)),
            e.KvLanded(peer, Piece(epoch, some_id, 0, 1, KvRange(0, 1, 16, last=True)), delivered=True),
            e.Told(epoch, t.KvCompleteReceived(0.0, epoch, some_id, peer)),
        ]
    return [event for event in found if rng.random() < 0.5]

"""Offline work does not affect online work: compares two histories with the same online events, one of which also has
offline requests.
"""

import dataclasses
import random

import pytest

from ballast.common.cost import CostModel
from ballast.common.sampling import FinishReason, PriorityClass
from ballast.common.targets import for_all
from services.dispatcher.core import events as d
from services.dispatcher.core.dispatcher import DispatcherCore
from services.dispatcher.core.limits import Limits
from services.worker.core.events import Execute
from services.worker.policy.harvest import Harvest
from tests.support.dispatcher_core import MODEL, Story, key, load, request
from tests.support.worker_core import MEMORY, Driver, greedy, limits

BATCH, _STOP = PriorityClass.BATCH, FinishReason.STOP
ONLINE = (PriorityClass.INTERACTIVE, PriorityClass.DEFAULT)
COST = CostModel(attention_s=1e-6, token_s=1e-5, chunk_s=0.01, shared_s=0.0099, beyond_s=0.001, knee_tokens=8)


# ------------------------------------------------------------------------------------------------- dispatcher


class Played:
    """A dispatcher's core with simulated clients and workers; records its commands about online requests."""

    def __init__(self, *, offline: bool) -> None:
        self.offline = offline
        self.story = Story("a", "b", limits=Limits(max_queued_request_count=6, max_offline_queued_count=4))
        self.told: list[object] = []
        self.on: dict[str, str] = {}  # request -> worker

    @property
    def core(self) -> DispatcherCore:
        return self.story.core

    def take(self, commands: list[d.Command]) -> None:
        for command in commands:
            match command:
                case d.PlaceOnWorker(worker=worker, request=placed):
                    self.on[placed.request_id] = worker.worker_id
                    if not placed.priority.offline:
                        self.told.append(("place", placed.request_id, worker.worker_id, command.attempt))
                case (
                    d.Deliver(request_id=name)
                    | d.Finish(request_id=name)
                    | d.Fail(request_id=name)
                    | d.Refuse(request_id=name)
                ):
                    if not isinstance(command, d.Deliver):
                        self.on.pop(name, None)
                    if name.startswith("online"):
                        self.told.append((type(command).__name__, name))
                case d.AbortOnWorker(worker=worker_key, handle=handle):  # handles also count offline requests
                    worker = self.core.fleet.get(worker_key)
                    asked_back = None if worker is None else worker.placed.get(handle)
                    if asked_back is not None and not asked_back.offline:
                        self.told.append(("recall", asked_back.request.request_id, worker_key.worker_id))
                case _:
                    self.told.append(command)

    def online_at(self, worker: str) -> list[str]:
        return [name for name, at in self.on.items() if at == worker and name.startswith("online")]


def _events(rng: random.Random, played: Played, step: int) -> None:
    """One event. Its online part is the same in both histories; one of them adds offline requests."""
    story, core = played.story, played.core
    story.now_s += rng.choice((0.0, 0.01, 0.3))
    choice, name = rng.random(), rng.choice("ab")
    prompt, priority = rng.choice((8, 100, 300)), rng.choice(ONLINE)
    blocks, waiting, running = rng.randrange(65), rng.choice((0, 0, 3)), rng.randrange(9)
    picked, tokens = rng.random(), rng.randrange(1, 3)
    extra = random.Random(rng.random())
    if choice < 0.4:
        wanted = request(f"online{step}", prompt=prompt, priority=priority)
        played.take([*core.handle(d.RequestSubmitted(story.now_s, wanted))])
    elif choice < 0.85:
        report = load(
            used_block_count=blocks, waiting_count=waiting, waiting_block_count=waiting, running_count=running
        )
        mine = played.online_at(name)
        chosen = mine[: int(picked * (len(mine) + 1))]
        given = [(story.handle_of(one), tokens) for one in chosen]
        endings: list[d.Ending] = []
        if chosen and picked > 0.6:
            endings = [d.Ending(story.handle_of(chosen[-1]), finish_reason=_STOP)]
        if played.offline:
            report = dataclasses.replace(report, offline_wanted_tokens=extra.choice((0, 50, 500)))
            theirs = [one for one, at in played.on.items() if at == name and one.startswith("offline")]
            given += [(story.handle_of(one), 1) for one in theirs if extra.random() < 0.5]
            endings += [d.Ending(story.handle_of(one), _STOP) for one in theirs if extra.random() < 0.2]
        worker = core.fleet.get(key(name))
        waits = [story.handle_of(one) for one in mine if picked > 0.5 and one not in chosen]
        runs = [story.handle_of(one) for one in mine if picked < 0.2 and one not in chosen]
        if played.offline:
            rest = [story.handle_of(one) for one, at in played.on.items() if at == name and one.startswith("offline")]
            ended = {ending.handle for ending in endings}
            waits += [handle for handle in rest if handle not in ended and extra.random() < 0.5]
        if worker is not None and worker.connected:
            event = d.StepReceived(
                story.now_s,
                key(name),
                [handle for handle, _ in given],
                [count for _, count in given],
                [7] * sum(count for _, count in given),
                (),
                (),
                endings,
                report,
                1 << 60,
                preempted=waits,
                resumed=runs,
            )
            played.take([*core.handle(event)])
    elif choice < 0.9:
        played.on = {one: at for one, at in played.on.items() if at != name}
        played.take([*core.handle(d.WorkerLost(story.now_s, key(name), "gone"))])
        played.take([*core.handle(d.WorkerConnected(story.now_s, key(name), MODEL, load(), max_waiting_count=100))])
    elif choice < 0.95:
        open_ = [one for one in core.requests if one.startswith("online")]
        if open_:
            played.take([*core.handle(d.Withdrawn(story.now_s, open_[int(picked * len(open_))], "gone"))])
    else:
        played.take([*core.handle(d.DispatcherTick(story.now_s))])
    if played.offline:
        for number in range(extra.randrange(4)):
            offline = request(f"offline{step}-{number}", prompt=extra.choice((5, 200, 900)), priority=BATCH)
            played.take([*core.handle(d.RequestSubmitted(story.now_s, offline))])
        gone = [one for one in core.requests if one.startswith("offline")]
        if gone and extra.random() < 0.2:
            played.take([*core.handle(d.Withdrawn(story.now_s, extra.choice(gone), "gone"))])
    core.check()


@pytest.mark.rotating
@pytest.mark.parametrize("first_seed", range(0, 1000, 100))
def test_offline_requests_change_no_command_about_online_ones(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 100):
        worlds = [Played(offline=False), Played(offline=True)]
        for played in worlds:
            rng = random.Random(seed)
            for step in range(40):
                _events(rng, played, step)
        alone, beside = worlds
        assert beside.told == alone.told, seed
        assert beside.core.traffic(beside.story.now_s) == alone.core.traffic(alone.story.now_s), seed
        assert [t.request.request_id for t in beside.core.backlog] == [t.request.request_id for t in alone.core.backlog]


# ------------------------------------------------------------------------------------------------- worker


class Fed:
    """A worker's core to which the same online requests are submitted at the same steps in both histories."""

    def __init__(self, seed: int, *, offline: bool, swaps_online: bool = False) -> None:
        rng = random.Random(seed)
        bounds = limits(
            max_running_count=rng.choice((2, 4, 8)),
            max_batch_tokens=rng.choice((16, 32)),
            admission_reserve_fraction=rng.choice((0.0, 0.1)),
            max_waiting_count=1000,
            max_waiting_tokens=100_000,
            swap_block_count=rng.choice((15, 5, 30) if swaps_online else (0, 5, 30)),
            swap_blocks_per_step=rng.choice((0, 1, 4)),
            swaps_online=swaps_online,
        )
        harvest = Harvest(lambda: COST, rng.choice((0.0, 0.25, 2.0)), for_all(tpot_s=rng.choice((None, 0.02))))
        self.made = made = Driver(bounds, rng.choice((12, 20, 40)), harvest=harvest)
        self.steps: list[list[tuple[int, int, int]]] = []  # per step: (online request, first position, tokens)
        self._online: dict[int, int] = {}  # sequence id -> number of the online request
        self._count = 0
        made.open(1)
        for _ in range(40):
            if rng.random() < 0.25:
                self._online[self._count + 1] = len(self._online)
                self._submit(rng, rng.choice(ONLINE))
            extra = random.Random(rng.random())
            for _ in range(extra.randrange(3) if offline else 0):
                self._submit(extra, BATCH)
            self._step()

    def _submit(self, rng: random.Random, priority: PriorityClass) -> None:
        self._count += 1
        prompt = tuple(range(rng.randrange(2, 24)))
        self.made.submit(prompt, greedy(rng.randrange(1, 12)), priority=priority)

    def _only_copies(self, execute: Execute) -> bool:
        """Whether the batch copies KV of online sequences but computes none of them."""
        computes = any(part.sequence_id in self._online for part in execute.batch.slices)
        return not computes and any(copy.sequence_id in self._online for copy in execute.batch.copies)

    def _step(self) -> None:
        scheduler, made = self.made.core.group_scheduler.scheduler, self.made
        before = {s.sequence_id for s in scheduler.offline}
        done = len(made.executed)
        while (execute := made.step()) is not None and self._only_copies(execute):
            pass  # without offline work, these copies would not take a step of their own
        parts = [part for execute in made.executed[done:] for part in execute.batch.slices]
        self.steps.append(
            [
                (self._online[p.sequence_id], p.first_position, len(p.token_ids))
                for p in parts
                if p.sequence_id in self._online
            ]
        )
        waiting = [*scheduler.line, *scheduler.swap.offline_away]
        yielded = before & {s.sequence_id for s in waiting if s.rank == BATCH.rank}
        stayed = before & {s.sequence_id for s in scheduler.offline}
        assert not yielded or not stayed or min(yielded) > max(stayed), f"{yielded} yielded, {stayed} stayed"


@pytest.mark.rotating
@pytest.mark.parametrize("first_seed", range(0, 1000, 100))
def test_online_sequences_swap_as_they_would_without_offline_ones(first_seed: int) -> None:
    swapped = 0
    for seed in range(first_seed, first_seed + 100):
        alone, beside = (Fed(seed, offline=offline, swaps_online=True) for offline in (False, True))
        assert beside.steps == alone.steps, seed
        swaps = [one.made.core.group_scheduler.scheduler.swap.swapped_total for one in (alone, beside)]
        assert swaps[0] == swaps[1], seed
        swapped += swaps[0]
    assert swapped >= 5


@pytest.mark.rotating
@pytest.mark.parametrize("first_seed", range(0, 1000, 100))
def test_online_sequences_get_the_steps_that_they_would_get_without_offline_ones(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 100):
        alone, beside = Fed(seed, offline=False), Fed(seed, offline=True)
        assert beside.steps == alone.steps, seed
        reports = [one.made.core.load(one.made.at_s, MEMORY) for one in (alone, beside)]
        counts = [
            dataclasses.replace(
                report,
                step_age_s=0.0,
                steps_total=0,
                prefixes_kept_s=0.0,
                **{field.name: 0 for field in dataclasses.fields(report) if field.name.startswith("offline_")},
            )
            for report in reports
        ]
        assert counts[0] == counts[1], seed
        beside.made.run_to_end()
        beside.made.assert_empty()

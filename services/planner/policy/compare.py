"""Whether to drop, how much, and whether to give back: what is predicted of layouts, and which is taken (pure).

Nobody knows how long a burst lasts, so each candidate is judged in several futures. The loss of a prediction is the
logarithm of how far the P99 TTFT and the TPOT exceed their targets: a wait twice as long weighs as much as tokens that
take twice as long. Half of it counts waits since requests came, half what is still ahead: what cannot be helped any
more would hide what can, and without it a drop would seem to help what has waited for long. Of all candidates within
`_UNSURE` of the least loss the one that changes least is taken.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import add
from typing import NamedTuple

from ballast.common.ids import GroupId, WorkerId
from ballast.common.traffic import MINUTE_S, RECENT_S, Pace, Traffic
from services.planner.policy.fluid_model import PARTS, Future, Kind, Machine, Prediction, look_ahead, prompt_s, token_s
from services.planner.policy.merged import group_plan
from services.planner.policy.snapshot import GroupState, Snapshot, columns_of
from services.planner.policy.split import Splitter, SplitTolerance

LASTS_S = (2.0, 15.0, 60.0)  # the futures: so long the present rate may go on
_MIDDLE = len(LASTS_S) // 2
_UNSURE = 1.1  # how much better than doing less has to be what is done
_ANOTHER = 1.5  # machines are told apart by powers of this
# A drop keeps what it moves from running: so long, or until the KV has come over a card of 200 Gbps in both directions.
_STALL_S, _EXCHANGED_BYTES_PER_S = 0.3, 25e9
_LEAST_S, _MOST_S = 30.0, 120.0  # looked ahead: two stays of a request, within these
_PRIOR_COUNT, _PRIOR_TOKENS = 2, 128  # answers that nobody has seen, lest the first one says all


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is good enough; shorter is not counted."""

    ttft_s: float = 0.5  # or, if that is more, what a long prompt takes an instance whose memory is half full
    tpot_s: float | None = None  # None: what a token takes in an instance whose memory is half full


@dataclass(frozen=True, slots=True)
class Running:
    """What runs on the groups of a snapshot together, and on what."""

    max_running_count: int  # of an instance
    waiting_count: int  # in workers' queues
    slowness: Mapping[WorkerId, float] = field(default_factory=dict[WorkerId, float])  # of machines unlike the pace


@dataclass(frozen=True, slots=True)
class Judged:
    """One candidate."""

    name: str
    recipe: "Recipe | None"  # of an overload's; None: nothing is done
    prediction: Prediction  # in the future that lasts middling long
    loss: float  # at least so much, if it was clear before the end that it would not be chosen

    @property
    def merges(self) -> tuple[tuple[GroupId, ...], ...]:
        """Groups that become one each."""
        return () if self.recipe is None else self.recipe.merges()

    @property
    def change_count(self) -> int:
        """Groups that there are less."""
        return 0 if self.recipe is None else self.recipe.count * (self.recipe.size - 1)

    def told(self) -> str:
        return f"{self.name}: {self.prediction.told()}"


@dataclass(frozen=True, slots=True)
class Comparison:
    chosen: Judged
    candidates: tuple[Judged, ...]  # the one that changes nothing first
    horizon_s: float  # what is predicted is about what waits, and what comes within it
    targets: Targets  # by which candidates were judged, the one of TPOT too

    def lines(self) -> list[str]:
        """For people: what was predicted of each."""
        return [f"{'-> ' if c is self.chosen else '   '}{c.told()}" for c in self.candidates]


def compare(
    snapshot: Snapshot, running: Running, traffic: Traffic, pace: Pace, targets: Targets | None = None
) -> Comparison:
    """At an overload. The snapshot is consistent, and has at least one group."""
    judge = _Judge(snapshot, running, traffic, pace, targets or Targets())
    trials = [judge.begin(name, judge.board.kinds(recipe), recipe) for name, recipe in judge.board.recipes()]
    least = [trial.judged.loss for trial in trials]
    chosen = choose(least, [trial.judged.change_count for trial in trials], lambda i: judge.finish(trials[i]).loss)
    return Comparison(trials[chosen].judged, tuple([trial.judged for trial in trials]), judge.horizon_s, judge.targets)


def compare_restore(
    snapshot: Snapshot,
    running: Running,
    traffic: Traffic,
    pace: Pace,
    restored: Mapping[GroupId, Sequence[int]],
    targets: Targets | None = None,
) -> Comparison:
    """At a relief: whether these pipelines should be dissolved. That has a price, which is in no prediction: it is
    chosen where all is good enough afterwards, or better than before.

    Args:
        restored: Blocks of each member of a pipeline, once it has all layers.
    """
    judge = _Judge(snapshot, running, traffic, pace, targets or Targets())
    stay = judge.finish(judge.begin("stay", judge.board.kinds(None)))
    whole = judge.finish(judge.begin(f"give back {len(restored)}", judge.board.dissolved(restored)))
    unsure = math.log(_UNSURE)
    chosen = whole if whole.loss <= unsure or whole.loss <= stay.loss - unsure else stay
    return Comparison(chosen, (stay, whole), judge.horizon_s, judge.targets)


class _Judge:
    """What all candidates are judged by."""

    def __init__(self, snapshot: Snapshot, running: Running, traffic: Traffic, pace: Pace, targets: Targets) -> None:
        layer_count = snapshot.model.layer_count
        self.board = _Board(snapshot, running)
        self._machine = Machine(pace=pace, layer_count=layer_count, max_running_count=running.max_running_count)
        self._futures = _futures(snapshot, running, traffic)
        calm = _calm(self._machine, self.board.kinds(None), self._futures[0])
        tpot_s = targets.tpot_s or calm.token_s
        self.targets = Targets(ttft_s=max(targets.ttft_s, calm.prompt_s), tpot_s=tpot_s)
        stays_s = 2 * self._futures[0].answer_tokens * tpot_s
        self.horizon_s = min(_MOST_S, max(_LEAST_S, stays_s))

    def begin(self, name: str, kinds: Sequence[Kind], recipe: "Recipe | None" = None) -> "_Trial":
        """Looks at the middle future only."""
        prediction = look_ahead(self._machine, kinds, self._futures[_MIDDLE], self.horizon_s)
        return _Trial(kinds, Judged(name, recipe, prediction, self._loss([prediction])))

    def finish(self, trial: "_Trial") -> Judged:
        """Looks at the other futures."""
        others = (*self._futures[:_MIDDLE], *self._futures[_MIDDLE + 1 :])
        predicted = [look_ahead(self._machine, trial.kinds, future, self.horizon_s) for future in others]
        trial.judged = replace(trial.judged, loss=self._loss([trial.judged.prediction, *predicted]))
        return trial.judged

    def _loss(self, predicted: Sequence[Prediction]) -> float:
        """The mean over all futures, of which those without a prediction count as 0: at least so much it will be."""
        loss = math.fsum(loss_of(one, self.targets) for one in predicted) / len(self._futures)
        return loss if math.isfinite(loss) else math.inf


@dataclass(slots=True)
class _Trial:
    """A candidate, and what is known of it so far."""

    kinds: Sequence[Kind]
    judged: Judged


def choose(losses: Sequence[float], changes: Sequence[int], finish: Callable[[int], float]) -> int:
    """The candidate that changes least, the first of equals, among those whose loss is nearly the least.

    Only a candidate that can decide it is finished: one better than the best so far, or as good with less change.

    Args:
        losses: Of each candidate at least so much.
        changes: How much each changes.
        finish: Returns the loss of a candidate; that takes milliseconds.

    Returns:
        Its index.
    """
    losses, unsure, least, best = list(losses), math.log(_UNSURE), math.inf, 0
    change = list(zip(changes, range(len(changes)), strict=True))
    unfinished, finished = set(range(len(losses))), list[int]()
    while undecided := [
        i
        for i in unfinished
        if not finished
        or losses[i] < losses[best] - unsure
        or (losses[i] <= least + unsure and change[i] < change[best])
    ]:
        number = min(undecided, key=lambda i: (losses[i], i))
        unfinished.remove(number)
        finished.append(number)
        losses[number] = finish(number)
        least = min(least, losses[number])
        best = min((i for i in finished if losses[i] <= least + unsure), key=change.__getitem__)
    return best


def loss_of(one: Prediction, targets: Targets) -> float:
    """0: all is good enough."""
    ttft, tpot = targets.ttft_s, targets.tpot_s or one.tpot_s
    waits = math.log(max(one.ttft_p99_s, ttft) / ttft) + math.log(max(one.ahead_p99_s, ttft) / ttft)
    return waits / 2 + math.log(max(one.tpot_s, tpot) / tpot)


def _futures(snapshot: Snapshot, running: Running, traffic: Traffic) -> list[Future]:
    """The higher of the rates of ten seconds and of a minute, and what chance may bring beside it."""
    block_tokens = snapshot.model.block_tokens
    fast_per_s = traffic.recent_count / min(RECENT_S, max(1.0, traffic.known_s))
    slow_per_s = traffic.minute_count / min(MINUTE_S, max(RECENT_S, traffic.known_s))
    is_fast = fast_per_s > slow_per_s and traffic.recent_count > 3
    count = traffic.recent_count if is_fast else traffic.minute_count
    rate_per_s = (fast_per_s if is_fast else slow_per_s) * (1 + 1 / math.sqrt(max(4, count)))
    columns = columns_of(snapshot.groups)
    queued = sum(columns.waiting) * block_tokens
    waiting = traffic.queued_count + running.waiting_count
    prompt = traffic.minute_tokens / traffic.minute_count if traffic.minute_count else 1.0
    if not traffic.minute_count and waiting:
        prompt = (traffic.queued_tokens + queued) / waiting
    spread = [traffic.prompt_quantile(quantile) for _, quantile in PARTS]
    answer_tokens = _answer_tokens(traffic, sum(columns.running))
    return [
        Future(
            rate_per_s=rate_per_s,
            lasts_s=lasts_s,
            calm_per_s=min(traffic.calm_per_s, rate_per_s),
            prompt_tokens=max(1.0, prompt),
            answer_tokens=answer_tokens,
            waiting_count=float(waiting),
            waiting_tokens=float(traffic.queued_tokens + queued),
            waited_s=traffic.oldest_wait_s,
            prompts=tuple([max(1.0, prompt if length is None else length) for length in spread]),
        )
        for lasts_s in LASTS_S
    ]


def _answer_tokens(traffic: Traffic, running_count: int) -> float:
    """Tokens of an answer. Those that go on count too, else only short answers would.

    All tokens over all endings, as if each token might be the last with the same probability. Where hardly any answer
    has ended that says nothing: then those that run are half through, and it is at most twice what follows from that.
    """
    ended_count, tokens = traffic.ended_count + _PRIOR_COUNT, traffic.ended_tokens + traffic.open_tokens + _PRIOR_TOKENS
    half_through = (tokens + traffic.open_tokens) / (ended_count + running_count)
    return max(1.0, min(tokens / ended_count, 2 * half_through))


class _Calm(NamedTuple):
    """Of an instance whose memory is half full."""

    token_s: float
    prompt_s: float  # a long one


def _calm(machine: Machine, kinds: Sequence[Kind], future: Future) -> _Calm:
    instances = capacity = 0.0
    for kind in kinds:
        instances += kind.group_count * kind.stages
        capacity += kind.capacity_tokens
    context = capacity / instances / 2
    decodes = min(max(1.0, context / (future.prompt_tokens + future.answer_tokens / 2)), machine.max_running_count)
    cost, most_tokens = machine.cost_of(1), machine.pace.max_batch_tokens
    longest = max((future.prompt_tokens, *future.prompts))
    return _Calm(token_s(cost, decodes, context, 0.0, 0.0), prompt_s(cost, 1, most_tokens, decodes, context, longest))


class _Sums(NamedTuple):
    """Of some groups together."""

    block_count: int = 0
    running_count: int = 0
    used_block_count: int = 0
    uncomputed_tokens: int = 0

    def plus(self, other: "_Sums", sign: int = 1) -> "_Sums":
        return _Sums(*(mine + sign * its for mine, its in zip(self, other, strict=True)))


class _Pool:
    """Groups with as many stages, of like machines: those with most load first, and sums of the first 0, 1, 2 .."""

    def __init__(self, stages: int, groups: Sequence[GroupState], running: Running) -> None:
        self.stages = stages
        self.slowness = 1.0
        if running.slowness and groups:
            self.slowness = math.fsum(_slowness(group, running) for group in groups) / len(groups)
        self.groups = groups
        self.columns = columns = columns_of(groups)
        self.order = sorted(range(len(groups)), key=columns.group_ids.__getitem__)
        loads = list(map(add, columns.used, columns.waiting))
        self.order.sort(key=loads.__getitem__, reverse=True)  # which keeps the order of names
        summed = (columns.blocks, columns.running, columns.used, columns.uncomputed)  # as `_Sums` has them
        self._sums = [list(accumulate(map(column.__getitem__, self.order), initial=0)) for column in summed]

    def first(self, count: int) -> _Sums:
        """Of so many with most load."""
        return _Sums(*[column[count] for column in self._sums])

    @property
    def whole(self) -> _Sums:
        return self.first(-1)

    def kind(self, sums: _Sums, group_count: int, block_tokens: int) -> Kind:
        return Kind(
            stages=self.stages,
            group_count=group_count,
            capacity_tokens=float(sums.block_count * block_tokens),
            running_count=float(sums.running_count),
            used_tokens=float(sums.used_block_count * block_tokens),
            uncomputed_tokens=float(sums.uncomputed_tokens),
            slowness=self.slowness,
        )

    def told(self) -> str:
        return f" {self.slowness:.1f} x as slow" if self.slowness != 1.0 else ""


def _pools(groups: Sequence[GroupState], running: Running) -> list[_Pool]:
    stages = set(columns_of(groups).stages)
    if not running.slowness and len(stages) == 1:
        return [_Pool(stages.pop(), groups, running)]
    alike: dict[int, dict[int, list[GroupState]]] = {}
    for group in groups:
        speed = round(math.log(_slowness(group, running), _ANOTHER)) if running.slowness else 0
        alike.setdefault(len(group.members), {}).setdefault(speed, []).append(group)
    return [
        _Pool(stages, pooled, running)
        for stages, by_speed in sorted(alike.items())
        for pooled in _no_loners([of for _, of in sorted(by_speed.items())])
    ]


def _slowness(group: GroupState, running: Running) -> float:
    """The slowest stage sets the pace."""
    return max([running.slowness.get(member.worker_id, 1.0) for member in group.members])


def _no_loners(classes: Sequence[list[GroupState]]) -> list[list[GroupState]]:
    """Machines of which there is one only are taken with the others, or nobody could merge with them."""
    many = [groups for groups in classes if len(groups) > 1]
    loners = [group for groups in classes if len(groups) == 1 for group in groups]
    if not loners:
        return many
    largest = max(many, key=len) if many else loners
    return [[*groups, *loners] if groups is largest else groups for groups in many] or [loners]


@dataclass(frozen=True, slots=True)
class Recipe:
    """So many merges of `size` groups of a pool each: of those with most load and of those with least."""

    pool: _Pool
    size: int
    count: int

    @property
    def heavy(self) -> int:
        return self.size // 2 * self.count

    @property
    def light(self) -> int:
        return self.size * self.count - self.heavy

    def taken(self) -> _Sums:
        pool = self.pool
        return pool.first(self.heavy).plus(pool.whole).plus(pool.first(len(pool.order) - self.light), -1)

    def merges(self) -> tuple[tuple[GroupId, ...], ...]:
        names = self.pool.columns.group_ids
        return tuple(tuple([names[i] for i in self._merge(number)]) for number in range(self.count))

    def merge(self, number: int) -> list[GroupState]:
        return [self.pool.groups[i] for i in self._merge(number)]

    def _merge(self, number: int) -> list[int]:
        order, heavy = self.pool.order, self.heavy
        taken = range(number, self.size * self.count, self.count)
        return [order[i if i < heavy else heavy - i - 1] for i in taken]


class _Board:
    """What the layout is made of, and what it could be."""

    def __init__(self, snapshot: Snapshot, running: Running) -> None:
        self.model = snapshot.model
        self.pools = _pools(snapshot.groups, running)
        self._running = running
        self._splitter = Splitter(snapshot.model, SplitTolerance(capacity=0.0))
        self._groups = snapshot.groups

    def recipes(self) -> list[tuple[str, Recipe | None]]:
        """Nothing; some pairs of instances that serve alone; fours of them; pairs made fours."""
        found: list[tuple[str, Recipe | None]] = [("nothing", None)]
        layers = self.model.layer_count
        for pool in self.pools:
            there = len(pool.order)
            most = there // 2
            if pool.stages == 1 and layers >= 2:
                counts = range(1, most + 1) if most <= 4 else sorted({most >> halvings for halvings in range(4)} - {0})
                found += [(f"{n} pair{'s' if n > 1 else ''}{pool.told()}", Recipe(pool, 2, n)) for n in counts]
            if pool.stages == 1 and layers >= 4 and there >= 4:
                found.append((f"{there // 4} of four{pool.told()}", Recipe(pool, 4, there // 4)))
            if pool.stages == 2 and layers >= 4 and most and self._can_merge(recipe := Recipe(pool, 2, most)):
                found.append((f"{most} of four, of pairs{pool.told()}", recipe))
        return found

    def _can_merge(self, recipe: Recipe) -> bool:
        merged = ([m for group in recipe.merge(i) for m in group.members] for i in range(recipe.count))
        return all(self._splitter.is_feasible(members) for members in merged)

    def kinds(self, recipe: Recipe | None) -> list[Kind]:
        tokens = self.model.block_tokens
        found: list[Kind] = []
        for pool in self.pools:
            left, count = pool.whole, len(pool.order)
            if recipe is not None and recipe.pool is pool:
                left, count = left.plus(recipe.taken(), -1), count - recipe.size * recipe.count
            if count:
                found.append(pool.kind(left, count, tokens))
        if recipe is not None:
            merged = recipe.pool.kind(recipe.taken(), recipe.count, tokens)
            capacity = float(self._capacity_blocks(recipe) * tokens)
            stages = recipe.pool.stages * recipe.size
            found.append(replace(merged, stages=stages, capacity_tokens=capacity, stall_s=self._stall_s(recipe)))
        return found

    def _stall_s(self, recipe: Recipe) -> float:
        """Each group of a merge keeps its part of the layers of all that runs: it sends the rest, and gets as much."""
        held_bytes = recipe.taken().used_block_count * self.model.block_bytes * self.model.layer_count
        each_bytes = 2 * held_bytes * (1 - 1 / recipe.size) / (recipe.size * recipe.count * recipe.pool.stages)
        return max(_STALL_S, each_bytes / _EXCHANGED_BYTES_PER_S)

    def dissolved(self, restored: Mapping[GroupId, Sequence[int]]) -> list[Kind]:
        """Each member of these pipelines serves alone, and has its share of what runs there."""
        pools = _pools([group for group in self._groups if group.group_id not in restored], self._running)
        gone = _pools([group for group in self._groups if group.group_id in restored], self._running)
        tokens = self.model.block_tokens
        found = [pool.kind(pool.whole, len(pool.order), tokens) for pool in pools]
        blocks = [count for counts in restored.values() for count in counts]
        sums = _Sums()
        for pool in gone:
            sums = sums.plus(pool.whole)
        alone = _Pool(1, (), self._running).kind(sums._replace(block_count=sum(blocks)), len(blocks), tokens)
        slow = [self._running.slowness.get(m.worker_id, 1.0) for pool in gone for g in pool.groups for m in g.members]
        return [*found, replace(alone, slowness=math.fsum(slow) / len(slow))]

    def _capacity_blocks(self, recipe: Recipe) -> int:
        """Of all groups that it makes. Where all memories are alike, so are they."""
        if len(recipe.pool.columns.budgets_bytes) == 1:
            return recipe.count * self._blocks(recipe.merge(0))
        return sum(self._blocks(recipe.merge(i)) for i in range(recipe.count))

    def _blocks(self, merge: Sequence[GroupState]) -> int:
        return group_plan(merge, self._splitter).block_count

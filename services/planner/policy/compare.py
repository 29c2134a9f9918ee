"""Whether to drop, and how much: layouts that could be, what is predicted of each, and which is taken (pure).

Nobody knows how long a burst lasts, so each candidate is judged in several futures. The loss of a prediction is the
logarithm of how far the P99 TTFT and the TPOT exceed their targets: a wait twice as long weighs as much as tokens that
take twice as long. Of all candidates within `_UNSURE` of the least loss the one that changes least is taken.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ballast.common.ids import GroupId
from ballast.common.traffic import MINUTE_S, RECENT_S, Pace, Traffic
from services.planner.policy.merged import group_plan
from services.planner.policy.outlook import Future, Kind, Machine, Prediction, look_ahead, token_s
from services.planner.policy.snapshot import GroupState, Snapshot
from services.planner.policy.split import Splitter, SplitTolerance

LASTS_S = (2.0, 15.0, 60.0)  # the futures: so long the present rate may go on
_UNSURE = 1.1  # how much better than doing less has to be what is done
_STALL_S = 0.3  # of those that a drop moves
_LEAST_S, _MOST_S = 30.0, 120.0  # looked ahead: two stays of a request, within these
_PRIOR_COUNT, _PRIOR_TOKENS = 2, 128  # answers that nobody has seen, lest the first one says all


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is good enough; shorter is not counted."""

    ttft_s: float = 0.5
    tpot_s: float | None = None  # None: what a token takes in an instance whose memory is half full


@dataclass(frozen=True, slots=True)
class Running:
    """What runs on the groups of a snapshot, by group."""

    counts: dict[GroupId, int]
    max_running_count: int  # of an instance
    waiting_count: int  # in workers' queues
    uncomputed_tokens: Mapping[GroupId, int] = field(default_factory=dict[GroupId, int])  # of prompts of those that run


@dataclass(frozen=True, slots=True)
class Judged:
    """One candidate. `merges`: groups that become one each; none: nothing is done."""

    name: str
    merges: tuple[tuple[GroupId, ...], ...]
    prediction: Prediction  # in the future that lasts middling long
    loss: float

    def told(self) -> str:
        return f"{self.name}: {self.prediction.told()}"


@dataclass(frozen=True, slots=True)
class Comparison:
    chosen: Judged
    candidates: tuple[Judged, ...]  # the one that changes nothing first

    def lines(self) -> list[str]:
        """For people: what was predicted of each."""
        return [f"{'-> ' if c is self.chosen else '   '}{c.told()}" for c in self.candidates]


def compare(
    snapshot: Snapshot, running: Running, traffic: Traffic, pace: Pace, targets: Targets | None = None
) -> Comparison:
    """The snapshot is consistent, and has at least one group."""
    model = snapshot.model
    machine = Machine(pace=pace, layer_count=model.layer_count, max_running_count=running.max_running_count)
    present = _present(snapshot, running)
    futures = _futures(snapshot, running, traffic)
    targets = targets or Targets()
    tpot_target_s = targets.tpot_s or _calm_token_s(machine, present, futures[0])
    stay_s = futures[0].answer_tokens * tpot_target_s
    horizon_s = min(_MOST_S, max(_LEAST_S, 2 * stay_s))
    splitter = Splitter(model, SplitTolerance(capacity=0.0))
    judged: list[Judged] = []
    for name, merges in _candidates(snapshot, splitter):
        kinds = _merged(snapshot, running, present, merges, splitter)
        predicted = [look_ahead(machine, kinds, future, horizon_s) for future in futures]
        losses = [_loss(one, targets.ttft_s, tpot_target_s) for one in predicted]
        judged.append(Judged(name, merges, predicted[len(predicted) // 2], math.fsum(losses) / len(losses)))
    least = min(one.loss for one in judged)
    good = [one for one in judged if one.loss <= least + math.log(_UNSURE)]
    chosen = min(good, key=lambda one: sum(len(merge) - 1 for merge in one.merges))
    return Comparison(chosen, tuple(judged))


def _loss(prediction: Prediction, ttft_s: float, tpot_s: float) -> float:
    return math.log(max(prediction.ttft_p99_s, ttft_s) / ttft_s) + math.log(max(prediction.tpot_s, tpot_s) / tpot_s)


def _futures(snapshot: Snapshot, running: Running, traffic: Traffic) -> list[Future]:
    """The higher of the rates of ten seconds and of a minute, and what chance may bring beside it."""
    block_tokens = snapshot.model.block_tokens
    fast_per_s = traffic.recent_count / min(RECENT_S, max(1.0, traffic.known_s))
    slow_per_s = traffic.minute_count / min(MINUTE_S, max(RECENT_S, traffic.known_s))
    is_fast = fast_per_s > slow_per_s and traffic.recent_count > 3
    count = traffic.recent_count if is_fast else traffic.minute_count
    rate_per_s = (fast_per_s if is_fast else slow_per_s) * (1 + 1 / math.sqrt(max(4, count)))
    queued = sum(group.waiting_block_count for group in snapshot.groups) * block_tokens
    waiting = traffic.queued_count + running.waiting_count
    prompt = traffic.minute_tokens / traffic.minute_count if traffic.minute_count else 1.0
    if not traffic.minute_count and waiting:
        prompt = (traffic.queued_tokens + queued) / waiting
    used = sum(group.used_block_count for group in snapshot.groups) * block_tokens
    running_count = sum(running.counts.values())
    made_so_far = max(0.0, used - running_count * prompt)  # tokens of answers that have not ended: they count too
    answers = traffic.ended_tokens + made_so_far + _PRIOR_TOKENS
    return [
        Future(
            rate_per_s=rate_per_s,
            lasts_s=lasts_s,
            calm_per_s=min(traffic.calm_per_s, rate_per_s),
            prompt_tokens=max(1.0, prompt),
            answer_tokens=max(1.0, answers / (traffic.ended_count + _PRIOR_COUNT)),
            waiting_count=float(waiting),
            waiting_tokens=float(traffic.queued_tokens + queued),
        )
        for lasts_s in LASTS_S
    ]


def _calm_token_s(machine: Machine, kinds: Sequence[Kind], future: Future) -> float:
    instances = capacity = 0.0
    for kind in kinds:
        instances += kind.group_count * kind.stages
        capacity += kind.capacity_tokens
    context = capacity / instances / 2
    decodes = context / (future.prompt_tokens + future.answer_tokens / 2)
    return token_s(machine, 1, min(max(1.0, decodes), machine.max_running_count), context, 0.0, 0.0)


def _present(snapshot: Snapshot, running: Running) -> list[Kind]:
    by_stages: dict[int, list[GroupState]] = {}
    for group in snapshot.groups:
        by_stages.setdefault(len(group.members), []).append(group)
    return [_kind(snapshot, running, stages, groups) for stages, groups in sorted(by_stages.items())]


def _kind(snapshot: Snapshot, running: Running, stages: int, groups: Sequence[GroupState]) -> Kind:
    tokens = snapshot.model.block_tokens
    return Kind(
        stages=stages,
        group_count=len(groups),
        capacity_tokens=float(sum(group.block_count for group in groups) * tokens),
        running_count=float(sum(running.counts.get(group.group_id, 0) for group in groups)),
        used_tokens=float(sum(group.used_block_count for group in groups) * tokens),
        uncomputed_tokens=float(sum(running.uncomputed_tokens.get(group.group_id, 0) for group in groups)),
    )


def _candidates(snapshot: Snapshot, splitter: Splitter) -> list[tuple[str, tuple[tuple[GroupId, ...], ...]]]:
    """Nothing; some pairs of instances that serve alone; fours of them; pairs made fours."""
    ones, twos = ([g for g in snapshot.groups if len(g.members) == stages] for stages in (1, 2))
    found: list[tuple[str, tuple[tuple[GroupId, ...], ...]]] = [("nothing", ())]
    most = len(ones) // 2
    counts = range(1, most + 1) if most <= 4 else sorted({1, 2, 3, 4, most // 2, most})
    layers = snapshot.model.layer_count
    if layers >= 2:
        found += [(f"{n} pair{'s' if n > 1 else ''}", _dealt(ones, 2, n)) for n in counts]
    if layers >= 4 and len(ones) >= 4:
        fours = _dealt(ones, 4, len(ones) // 4)
        rest = [g for g in ones if not any(g.group_id in four for four in fours)]
        found.append((f"{len(fours)} of four", (*fours, *_dealt(rest, 2, len(rest) // 2))))
    if layers >= 4 and len(twos) >= 2:
        fours = _dealt(twos, 2, len(twos) // 2)
        members = {group.group_id: group.members for group in twos}
        if all(splitter.is_feasible([m for group_id in four for m in members[group_id]]) for four in fours):
            found.append((f"{len(fours)} of four, of pairs", fours))
    return found


def _dealt(groups: Sequence[GroupState], size: int, count: int) -> tuple[tuple[GroupId, ...], ...]:
    """So many merges of `size` groups each: those with most load together with those with least."""
    ordered = sorted(groups, key=lambda group: (-group.load_blocks, group.group_id))
    half = size // 2 * count
    taken = [*ordered[:half], *reversed(ordered[len(ordered) - (size * count - half) :])]
    return tuple(tuple(group.group_id for group in taken[i::count]) for i in range(count))


def _merged(
    snapshot: Snapshot,
    running: Running,
    present: list[Kind],
    merges: tuple[tuple[GroupId, ...], ...],
    splitter: Splitter,
) -> list[Kind]:
    if not merges:
        return present
    of = {group.group_id: group for group in snapshot.groups}
    gone = {group_id for merge in merges for group_id in merge}
    tokens = snapshot.model.block_tokens
    capacities: dict[tuple[tuple[int, ...], ...], int] = {}  # by what the merged groups are: all pairs are alike
    kinds = [*_present(Snapshot(snapshot.model, tuple(g for g in snapshot.groups if g.group_id not in gone)), running)]
    by_stages: dict[int, list[tuple[list[GroupState], int]]] = {}
    for merge in merges:
        groups = [of[group_id] for group_id in merge]
        alike = tuple(sorted(tuple(member.budget_bytes for member in group.members) for group in groups))
        if alike not in capacities:
            capacities[alike] = group_plan(groups, splitter).block_count
        by_stages.setdefault(sum(len(g.members) for g in groups), []).append((groups, capacities[alike]))
    for stages, made in sorted(by_stages.items()):
        groups = [group for merged, _ in made for group in merged]
        before = _kind(snapshot, running, stages, groups)
        kinds.append(
            Kind(
                stages=stages,
                group_count=len(made),
                capacity_tokens=float(sum(blocks for _, blocks in made) * tokens),
                running_count=before.running_count,
                used_tokens=before.used_tokens,
                uncomputed_tokens=before.uncomputed_tokens,
                stall_s=_STALL_S,
            )
        )
    return kinds

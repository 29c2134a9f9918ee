"""Decides whether to drop or restore, and how much, by predictions for each candidate (pure).

The duration of a burst is unknown, so each candidate is evaluated in several futures. The loss of a prediction is the
logarithm of the factors by which P99 TTFT and TPOT exceed their targets, so doubled waits count as much as doubled
token times. A wait beyond `LOST` times the target is lost, no matter how long it is. From there on the fraction of lost
requests counts, and slower tokens are not accepted for shortening lost waits. Half of the loss by waiting is computed
from the whole wait since arrival, and half from the remaining wait. With the whole wait alone, the past would hide the
differences between candidates. With the remaining wait alone, a drop would seem to help requests that have already
waited for a long time. Of all candidates within a factor `_UNSURE` of the least loss, the one with the smallest change
is chosen.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ballast.common.ids import GroupId
from ballast.common.traffic import MINUTE_S, RECENT_S, Pace, Traffic
from services.planner.policy.candidates import DISSOLVES_S, NOTHING, Candidate, Candidates, Running
from services.planner.policy.fluid_model import (
    PARTS,
    FluidMachine,
    Future,
    GroupKind,
    Prediction,
    look_ahead,
    prompt_s,
    token_s,
)
from services.planner.policy.long_request import LongGroup, LongNeed
from services.planner.policy.long_request import kinds_with as kinds_with_long
from services.planner.policy.reserve import FEWER, Reserve, home_tokens, more, wanted_memory
from services.planner.policy.reserve import kinds as kinds_with
from services.planner.policy.snapshot import Snapshot, columns_of

LASTS_S = (2.0, 15.0, 60.0)  # seconds for which the current rate continues; each is a future to predict
_MIDDLE = len(LASTS_S) // 2
LOST = 20.0  # waits beyond this multiple of the target are lost (10 s by default); chosen, not derived
_UNSURE = 1.1  # minimum advantage over a smaller change
_LEAST_S, _MOST_S = 30.0, 120.0  # horizon: two request durations, within these bounds
_OUTLIVED = 2.0  # multiple of the mean answer; requests that have run for longer are of another kind
_BEARABLE = 1.5  # factor by which the waits or token times of others may grow for one long request
# Predictions contain no sudden bursts. The current demand plus the largest jump of the last minutes must therefore fit
# into `_FULL` of the serving instances' memory. A jump counts up to `_FEARED` times the demand, or up to
# `_FEARED_AFTER` times before an instance is parked. If parameters can be dropped, the jump must fit after a drop, and
# `_BRIDGED` of it without one. Otherwise an instance is parked only if the peak demand of the last minute would fit,
# too. The highest arrival count of that minute may recur, up to `_JUMP` times the mean.
_FULL, _FEARED, _FEARED_AFTER, _JUMP, _BRIDGED = 0.95, 0.6, 1.1, 1.3, 0.25
_PRICED = 2.0  # to save costs, an instance is parked if the others keep latencies within this multiple of the targets
_MOST_GAIN = 50.0  # maximum logarithm of a reported gain
_DISSOLVED_WITHIN_S = (
    60.0  # maximum predicted drain time of a restore, after which the planner counts a member without progress as lost
)
_PRIOR_COUNT, _PRIOR_TOKENS = 2, 128  # pseudo-answers, so that the first one does not determine the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonTargets:
    """Latency targets. All values within a target count as equally good."""

    ttft_s: float = 0.5  # or, if longer, the time of a long prompt on an instance with half-full memory
    tpot_s: float | None = None  # None: the token time of an instance with half-full memory

    @property
    def lost_s(self) -> float:
        """Wait (s) beyond which requests count as lost, partly at first and entirely at twice this wait."""
        return LOST * self.ttft_s


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A candidate and its prediction."""

    candidate: Candidate
    prediction: Prediction  # for the middle assumed duration; see `_Evaluator.expect`
    loss: float  # a lower bound for candidates that could not be chosen

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def merges(self) -> tuple[tuple[GroupId, ...], ...]:
        """The groups of each merge."""
        return self.candidate.merges

    def told(self) -> str:
        return f"{self.name}: {self.prediction.told()}"


@dataclass(frozen=True, slots=True)
class Comparison:
    chosen: Evaluation
    candidates: tuple[Evaluation, ...]  # the candidate without change is first
    horizon_s: float  # the prediction covers waiting requests and those that arrive within it
    targets: ComparisonTargets  # the targets used, including that for TPOT

    @property
    def gain(self) -> float:
        """Lower bound of the factor by which the choice improves on no change."""
        return math.exp(min(_MOST_GAIN, self.candidates[0].loss - self.chosen.loss))

    def lines(self) -> list[str]:
        """The prediction of each candidate in words, one line each."""
        return [f"{'-> ' if c is self.chosen else '   '}{c.told()}" for c in self.candidates]


def compare(
    snapshot: Snapshot, running: Running, traffic: Traffic, pace: Pace, targets: ComparisonTargets | None = None
) -> Comparison:
    """Compare all candidates for an overload. The snapshot must have at least one group."""
    evaluator = _Evaluator(snapshot, running, traffic, pace, targets or ComparisonTargets())
    candidates = evaluator.candidates.all()
    kinds = [evaluator.candidates.kinds(candidate) for candidate in candidates]
    found = list(map(evaluator.begin, candidates, kinds))

    def finish(number: int) -> float:
        found[number] = evaluator.finish(found[number], kinds[number])
        return found[number].loss

    chosen = choose([one.loss for one in found], [one.change_count for one in candidates], finish)
    if evaluator.candidates.differ_in_size:  # only after the choice, because not every candidate supports `by_size`
        kinds[0] = evaluator.candidates.kinds(NOTHING, by_size=True)
    if traffic.burst_s or evaluator.candidates.differ_in_size:
        for number in {0, chosen}:
            found[number] = evaluator.expect(found[number], kinds[number], traffic)
    return Comparison(found[chosen], tuple(found), evaluator.horizon_s, evaluator.targets)


def compare_long(
    snapshot: Snapshot,
    running: Running,
    traffic: Traffic,
    pace: Pace,
    made: LongGroup,
    need: LongNeed,
    targets: ComparisonTargets | None = None,
) -> Comparison:
    """Compare a group for a long request with no change. The group is chosen if the latencies of other requests grow by
    at most `_BEARABLE`.
    """
    evaluator = _Evaluator(snapshot, running, traffic, pace, targets or ComparisonTargets())
    stay = evaluator.evaluate(NOTHING, evaluator.candidates.kinds(NOTHING))
    merged = evaluator.evaluate(Candidate(made.name), kinds_with_long(snapshot, made, need, running))
    chosen = merged if merged.loss <= stay.loss + math.log(_BEARABLE) else stay
    return Comparison(chosen, (stay, merged), evaluator.horizon_s, evaluator.targets)


def compare_restore(
    snapshot: Snapshot,
    running: Running,
    traffic: Traffic,
    pace: Pace,
    restored: Mapping[GroupId, Sequence[int]],
    targets: ComparisonTargets | None = None,
) -> Comparison:
    """Compare dissolving these pipelines with keeping them, for a relief. They are dissolved if latencies are good
    enough during and after the restore, or better than before, and if draining is short, because remaining requests are
    recomputed.

    Args:
        restored: Blocks of each member of a pipeline, once it holds all layers.
    """
    evaluator = _Evaluator(snapshot, running, traffic, pace, targets or ComparisonTargets())
    stay = evaluator.evaluate(Candidate("stay"), evaluator.candidates.kinds(NOTHING))
    kinds = evaluator.candidates.dissolved(restored, evaluator.remaining_s, evaluator.prompt_tokens)
    takes_s = max(kind.kept_s for kind in kinds)
    name = f"give back {len(restored)}" + (f" over {takes_s:.0f} s" if takes_s > DISSOLVES_S else "")
    whole = evaluator.evaluate(Candidate(name), kinds)
    unsure = math.log(_UNSURE)
    is_good = whole.loss <= unsure or whole.loss <= stay.loss - unsure
    chosen = whole if is_good and takes_s <= _DISSOLVED_WITHIN_S else stay
    return Comparison(chosen, (stay, whole), evaluator.horizon_s, evaluator.targets)


def compare_sizes(
    snapshot: Snapshot,
    running: Running,
    traffic: Traffic,
    pace: Pace,
    reserve: Reserve,
    *,
    may_shrink: bool,
    targets: ComparisonTargets | None = None,
) -> Comparison:
    """Compare numbers of serving instances, for parking: with some of the reserve, or with one fewer. Of all sizes that
    are about as good as the best, the smallest is chosen. An instance is parked only if the others are good enough,
    even at the highest arrival count of the last minute.
    """
    given = targets or ComparisonTargets()
    evaluator = _SizeEvaluator(snapshot, running, traffic, pace, given, reserve)
    stay = evaluator.of(NOTHING)
    if stay.loss <= math.log(_UNSURE):
        if not may_shrink or evaluator.alone_count < 2 or evaluator.fear(FEWER) > 0.0:
            return Comparison(stay, (stay,), evaluator.horizon_s, evaluator.targets)
        mean = max(traffic.recent_count, traffic.minute_count * RECENT_S / MINUTE_S)
        again = min(round(_JUMP * mean), reserve.recent_peak_count)
        as_it_was = replace(traffic, recent_count=max(traffic.recent_count, again))
        fewer = _SizeEvaluator(snapshot, running, as_it_was, pace, given, reserve).of(FEWER)
        chosen = fewer if fewer.loss <= stay.loss else stay
        return Comparison(chosen, (stay, fewer), evaluator.horizon_s, evaluator.targets)
    candidates = more(reserve)
    kinds = [evaluator.kinds(candidate) for candidate in candidates]
    found = [stay, *map(evaluator.begin, candidates, kinds)]

    def finish(number: int) -> float:
        if number:
            found[number] = evaluator.finish(found[number], kinds[number - 1])
        return found[number].loss

    chosen = choose([one.loss for one in found], [one.candidate.added for one in found], finish)
    return Comparison(found[chosen], tuple(found), evaluator.horizon_s, evaluator.targets)


class _Evaluator:
    """Evaluates all candidates of a comparison."""

    def __init__(
        self, snapshot: Snapshot, running: Running, traffic: Traffic, pace: Pace, targets: ComparisonTargets
    ) -> None:
        layer_count = snapshot.model.layer_count
        self.candidates = Candidates(snapshot, running)
        self._machine = FluidMachine(pace=pace, layer_count=layer_count, max_running_count=running.max_running_count)
        self._futures = _futures(snapshot, running, traffic)
        calm = _calm(self._machine, self.candidates.kinds(NOTHING), self._futures[0])
        tpot_s = targets.tpot_s or calm.token_s
        self.targets = ComparisonTargets(ttft_s=max(targets.ttft_s, calm.prompt_s), tpot_s=tpot_s)
        first = self._futures[0]
        stays_s = 2 * first.answer_tokens * tpot_s
        self.remaining_s = (first.remaining_tokens or first.answer_tokens) * tpot_s  # running requests' remaining time
        self.prompt_tokens = first.prompt_tokens
        self.horizon_s = min(_MOST_S, max(_LEAST_S, stays_s))

    def evaluate(self, candidate: Candidate, kinds: Sequence[GroupKind]) -> Evaluation:
        return self.finish(self.begin(candidate, kinds), kinds)

    def begin(self, candidate: Candidate, kinds: Sequence[GroupKind]) -> Evaluation:
        """Evaluate a candidate in the middle future only."""
        prediction = self._predict(kinds, self._futures[_MIDDLE])
        return Evaluation(candidate, prediction, self._loss([prediction]))

    def finish(self, begun: Evaluation, kinds: Sequence[GroupKind]) -> Evaluation:
        """Evaluate a candidate in the remaining futures as well."""
        others = (*self._futures[:_MIDDLE], *self._futures[_MIDDLE + 1 :])
        predicted = [self._predict(kinds, future) for future in others]
        return replace(begun, loss=self._loss([begun.prediction, *predicted]))

    def expect(self, found: Evaluation, kinds: Sequence[GroupKind], traffic: Traffic) -> Evaluation:
        """Replace the prediction. If burst statistics are known, the new prediction assumes a burst as long and as high
        as earlier ones. The choice of a candidate does not use it, because it must also be right for longer and shorter
        bursts.
        """
        future = self._futures[_MIDDLE]
        if traffic.burst_s:
            future = replace(
                future,
                rate_per_s=traffic.burst_per_s,
                lasts_s=max(0.0, traffic.burst_s - traffic.burst_since_s),
                calm_per_s=min(traffic.calm_per_s, traffic.burst_per_s),
            )
        return replace(found, prediction=self._predict(kinds, future))

    def _predict(self, kinds: Sequence[GroupKind], future: Future) -> Prediction:
        return look_ahead(self._machine, kinds, future, self.horizon_s, self.targets.lost_s)

    def _loss(self, predicted: Sequence[Prediction]) -> float:
        """Return the mean loss over all futures. Missing futures count as 0, so the result is then a lower bound."""
        loss = math.fsum(loss_of(one, self.targets) for one in predicted) / len(self._futures)
        return loss if math.isfinite(loss) else math.inf


class _SizeEvaluator(_Evaluator):
    """Evaluates numbers of serving instances. Too little free memory for sudden bursts adds to the loss."""

    def __init__(
        self,
        snapshot: Snapshot,
        running: Running,
        traffic: Traffic,
        pace: Pace,
        targets: ComparisonTargets,
        reserve: Reserve,
    ) -> None:
        super().__init__(snapshot, running, traffic, pace, targets)
        tpot_s = self.targets.tpot_s
        self.targets = ComparisonTargets(ttft_s=_PRICED * self.targets.ttft_s, tpot_s=tpot_s and _PRICED * tpot_s)
        self._snapshot, self._reserve, self._places = snapshot, reserve, running.max_running_count
        self._wanted = wanted_memory(snapshot, reserve, traffic)
        columns = columns_of(snapshot.groups)
        self.feared_part = _BRIDGED if reserve.gain > 1.0 and reserve.jump < math.inf else 1.0
        self._instances = sum(columns.stages) + len(reserve.waking_s)
        home_blocks = home_tokens(snapshot) / snapshot.model.block_tokens
        # Capacity, in instances; merged instances have more.
        self._room = sum(columns.blocks) / home_blocks + len(reserve.waking_s)
        self.alone_count = sum(stages == 1 for stages in columns.stages)

    def kinds(self, candidate: Candidate) -> list[GroupKind]:
        return kinds_with(self.candidates, self._snapshot, self._reserve, candidate.added, self._places)

    def of(self, candidate: Candidate) -> Evaluation:
        return self.evaluate(candidate, self.kinds(candidate))

    def begin(self, candidate: Candidate, kinds: Sequence[GroupKind]) -> Evaluation:
        begun = super().begin(candidate, kinds)
        return replace(begun, loss=begun.loss + self.fear(candidate))

    def finish(self, begun: Evaluation, kinds: Sequence[GroupKind]) -> Evaluation:
        finished = super().finish(begun, kinds)
        return replace(finished, loss=finished.loss + self.fear(begun.candidate))

    def fear(self, candidate: Candidate) -> float:
        """Return the loss for missing memory; 0: enough is free for a sudden burst."""
        reserve, count, room = self._reserve, self._instances + candidate.added, self._room + candidate.added
        most = self.feared_part * (_FEARED_AFTER if candidate.added < 0 else _FEARED)
        parts = [(self._wanted + min(reserve.jump, most * self._wanted), room)]
        if self.feared_part < 1.0:
            parts.append((self._wanted + reserve.jump, max(room, reserve.gain * count if count > 1 else 1.0)))
        elif candidate.added < 0:
            peak = reserve.peak + min(reserve.jump, _FEARED * reserve.peak)
            parts.append((peak / _UNSURE, room))
        return max([math.log(max(1.0, wanted / (_FULL * max(1.0, room)))) for wanted, room in parts])


def choose(losses: Sequence[float], changes: Sequence[int], finish: Callable[[int], float]) -> int:
    """Choose the candidate with the smallest change, or the first of equal ones, among those with nearly the least
    loss.

    Only candidates that can affect the choice are finished: those that are better than the best so far, or as good with
    a smaller change.

    Args:
        losses: Lower bound of the loss of each candidate.
        changes: Size of each change.
        finish: Returns the loss of a candidate, which takes milliseconds.

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


def loss_of(one: Prediction, targets: ComparisonTargets) -> float:
    """Return the loss of a prediction; 0: within the targets."""
    tpot_s = targets.tpot_s or one.tpot_s
    waits = _wait_loss(one.ttft_p99_s, one.lost_share, targets) + _wait_loss(
        one.ahead_p99_s, one.lost_ahead_share, targets
    )
    return waits / 2 + math.log(max(one.tpot_s, tpot_s) / tpot_s)


def _wait_loss(p99_s: float, lost_share: float, targets: ComparisonTargets) -> float:
    """Return the loss by waiting: the log of P99 TTFT over its target, up to `LOST`, and as much again if all requests
    are lost.
    """
    return math.log(min(max(p99_s / targets.ttft_s, 1.0), LOST)) + lost_share * math.log(LOST)


def _futures(snapshot: Snapshot, running: Running, traffic: Traffic) -> list[Future]:
    """Return a future for each of `LASTS_S`, with the higher of the arrival rates over ten seconds and a minute, plus
    statistical fluctuation.
    """
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
    running_count = sum(columns.running)
    answer_tokens = _answer_tokens(traffic, running_count)
    remaining_tokens = _remaining_tokens(traffic, running_count, answer_tokens)
    return [
        Future(
            rate_per_s=rate_per_s,
            lasts_s=lasts_s,
            calm_per_s=min(traffic.calm_per_s, rate_per_s),
            prompt_tokens=max(1.0, prompt),
            answer_tokens=answer_tokens,
            remaining_tokens=remaining_tokens,
            waiting_count=float(waiting),
            waiting_tokens=float(traffic.queued_tokens + queued),
            waited_s=traffic.oldest_wait_s,
            prompts=tuple([max(1.0, prompt if length is None else length) for length in spread]),
        )
        for lasts_s in LASTS_S
    ]


def _remaining_tokens(traffic: Traffic, running_count: int, answer_tokens: float) -> float:
    """Estimate the remaining tokens of running answers: in the steady state as many as they have generated.

    Returns 0, which means as many as for a new answer, unless the estimate exceeds `_OUTLIVED` times the mean of all
    answers.
    """
    age_tokens = traffic.open_tokens / running_count if running_count else 0.0
    return age_tokens if age_tokens > _OUTLIVED * answer_tokens else 0.0


def _answer_tokens(traffic: Traffic, running_count: int) -> float:
    """Estimate the mean tokens of an answer. Running answers count, too, because otherwise short answers would
    dominate.

    The estimate is all tokens divided by all endings, as if each token were the last with equal probability. With few
    endings, running answers are assumed to be half complete, and the estimate is bounded by twice the resulting mean.
    """
    ended_count, tokens = traffic.ended_count + _PRIOR_COUNT, traffic.ended_tokens + traffic.open_tokens + _PRIOR_TOKENS
    half_through = (tokens + traffic.open_tokens) / (ended_count + running_count)
    return max(1.0, min(tokens / ended_count, 2 * half_through))


class _Calm(NamedTuple):
    """Latencies of an instance with half-full memory."""

    token_s: float
    prompt_s: float  # prefill time of a long prompt


def _calm(machine: FluidMachine, kinds: Sequence[GroupKind], future: Future) -> _Calm:
    instances = capacity = 0.0
    for kind in kinds:
        instances += kind.group_count * kind.stages
        capacity += kind.capacity_tokens
    context = capacity / instances / 2
    decodes = min(max(1.0, context / (future.prompt_tokens + future.answer_tokens / 2)), machine.max_running_count)
    cost, most_tokens = machine.cost_of(1), machine.pace.max_batch_tokens
    longest = max((future.prompt_tokens, *future.prompts))
    return _Calm(token_s(cost, decodes, context, 0.0, 0.0), prompt_s(cost, 1, most_tokens, decodes, context, longest))

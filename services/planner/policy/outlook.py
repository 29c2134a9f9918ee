"""What would come of a layout: a fluid model of the next minutes (pure, no clock).

Groups with the same number of stages are one `Kind`. Requests come at a rate and wait in one line; a kind lets them in
while it has memory and places, computes their prompts beside the decodes of those that run, and loses those whose
answers end. The curves of who has come and who has had a first token give the waits; the length of the steps gives the
time of a token. What does not fit while it grows is preempted, and waits before all others to be computed anew.

Costs are those of `ballast.common.cost`, for the mean batch of each kind. Answers end at a constant rate for each
token, so long ones among those that run count as they should, and nobody needs to know how long an answer will be.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ballast.common.cost import KNEE_TOKENS, CostModel
from ballast.common.traffic import Pace

STEPS = 80  # of the horizon
_TAIL = 3  # so many horizons are looked at until all that came within the first have had a token
# Of a pipeline's time, by its stages: parts in which a stage waits for its neighbours. As pipelines of so many stages
# showed in the simulator and on two cores; between them and beyond them linearly.
_BUBBLES = ((1, 0.0), (2, 0.05), (4, 0.17), (8, 0.22))
_RESERVE = 0.05  # of the KV memory is kept by admission for what grows
_LEAST_STEP_S = 1e-6  # whatever the costs are that somebody tells
_NOTHING = (0.0, 0.0, 0.0, 0.0)
_NEARLY = 0.1  # of a request may be missing: flows have no last one


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Groups of so many stages, taken together."""

    stages: int
    group_count: int
    capacity_tokens: float  # of KV, of all of them
    running_count: float
    used_tokens: float  # of KV
    uncomputed_tokens: float = 0.0  # of prompts that have been let in: these requests run and have had no token
    stall_s: float = 0.0  # nobody runs before: a transition


@dataclass(frozen=True, slots=True, kw_only=True)
class Future:
    """What clients may want: a rate that lasts for a while, then the calm one."""

    rate_per_s: float
    lasts_s: float
    calm_per_s: float
    prompt_tokens: float
    answer_tokens: float
    waiting_count: float  # have had no token yet
    waiting_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance."""

    pace: Pace
    layer_count: int
    max_running_count: int

    def cost_of(self, stages: int) -> CostModel:
        """Of all layers in a pipeline of so many stages; the time in which a stage waits counts as work."""
        return self.pace.cost.scaled(self.layer_count / self.pace.layer_count / (1 - bubbles(stages)))


@dataclass(frozen=True, slots=True)
class Prediction:
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_s: float  # mean over the tokens; waits of what was preempted are in it

    def told(self) -> str:
        return f"P99 TTFT {self.ttft_p99_s:.2f} s, TPOT {1e3 * self.tpot_s:.0f} ms"


def bubbles(stages: int) -> float:
    """The share of a pipeline's time in which a stage waits."""
    for (low, less), (high, more) in pairwise(_BUBBLES):
        if stages <= high:
            return less + (more - less) * max(0, stages - low) / (high - low)
    return _BUBBLES[-1][1]


def token_s(cost: CostModel, decodes: float, context: float, chunk: float, prefix: float) -> float:
    """Seconds that all stages together take for a microbatch, and so from one token of a sequence to its next.

    Args:
        cost: Of all layers, bubbles included: `Machine.cost_of`.
        decodes: In each microbatch.
        context: Tokens whose KV these read.
        chunk: Tokens of a prompt in each microbatch, behind a prefix of so many.
    """
    tokens, begins = decodes + chunk, 1.0 if chunk else 0.0
    pairs = context + prefix * chunk + chunk * chunk / 2
    seconds = cost.attention_s * pairs + cost.prefix_s * (context + prefix * begins) + cost.token_s * tokens
    seconds += (cost.chunk_s - cost.shared_s) * (decodes + begins) + cost.shared_s
    if tokens > KNEE_TOKENS:
        seconds += cost.beyond_s * (tokens - KNEE_TOKENS)
    if tokens > 1:
        seconds += cost.many_s
    return seconds if seconds > _LEAST_STEP_S else _LEAST_STEP_S


class _Flow:
    """One kind as time goes on."""

    __slots__ = (
        "admitted",
        "capacity",
        "cost",
        "group_count",
        "instances",
        "places",
        "prefills",
        "running",
        "stall_s",
        "uncomputed",
        "used",
    )

    def __init__(self, kind: Kind, machine: Machine, prompt_tokens: float) -> None:
        self.cost, self.group_count, self.stall_s = machine.cost_of(kind.stages), kind.group_count, kind.stall_s
        self.instances = kind.group_count * kind.stages  # as many microbatches are in flight
        self.capacity = kind.capacity_tokens
        self.admitted = kind.capacity_tokens * (1 - _RESERVE)
        self.places = float(self.instances * machine.max_running_count)
        self.used, self.uncomputed = kind.used_tokens, kind.uncomputed_tokens
        self.prefills = min(kind.running_count, kind.uncomputed_tokens / prompt_tokens)  # let in and without a token
        self.running = kind.running_count - self.prefills

    def room(self, at_s: float, mean_tokens: float) -> float:
        """Requests that it could let in."""
        if at_s < self.stall_s:
            return 0.0
        left_over = self.group_count * mean_tokens / 2  # no request is divided
        by_memory = (self.admitted - left_over - self.used) / (mean_tokens if mean_tokens > 1.0 else 1.0)
        places = self.places - self.running - self.prefills
        room = by_memory if by_memory < places else places
        return room if room > 0.0 else 0.0

    def let_in(self, count: float, mean_tokens: float) -> None:
        self.prefills += count
        self.uncomputed += count * mean_tokens
        self.used += count * mean_tokens


def look_ahead(machine: Machine, kinds: Sequence[Kind], future: Future, horizon_s: float) -> Prediction:
    dt = horizon_s / STEPS
    flows = [_Flow(kind, machine, future.prompt_tokens) for kind in kinds]
    waiting, waiting_tokens = future.waiting_count, future.waiting_tokens
    away, away_tokens = 0.0, 0.0  # preempted, and wait to go on
    came, first = [waiting + math.fsum(flow.prefills for flow in flows)], [0.0]
    tokens = request_s = 0.0
    for step in range(_TAIL * STEPS):
        at_s = step * dt
        arrived = 0.0
        if step < STEPS:
            arrived = (future.rate_per_s if at_s < future.lasts_s else future.calm_per_s) * dt
        elif first[-1] >= came[-1] - _NEARLY:
            break
        waiting += arrived
        waiting_tokens += arrived * future.prompt_tokens
        if away > 0.0:
            let = _spread(flows, at_s, away, away_tokens / away)
            away_tokens -= let * away_tokens / away
            away -= let
        if waiting > 0.0 and away < 0.5:
            mean = waiting_tokens / waiting
            let = _spread(flows, at_s, waiting, mean)
            waiting_tokens -= let * mean
            waiting -= let
        started = 0.0
        for flow in flows:
            if at_s < flow.stall_s:
                request_s += flow.running * dt
                continue
            begun, made, gone, gone_tokens = _advance(machine, flow, future, dt)
            started += begun
            if step < STEPS:
                tokens += made
                request_s += flow.running * dt
            away += gone
            away_tokens += gone_tokens
        if step < STEPS:
            request_s += away * dt
        came.append(came[-1] + arrived)
        first.append(min(came[-1], first[-1] + started))
    p50, p99 = _waits(came, first, dt)
    return Prediction(p50, p99, request_s / tokens if tokens else 0.0)


def _spread(flows: Sequence[_Flow], at_s: float, count: float, mean_tokens: float) -> float:
    """Lets in as many as there is room for, evenly for each instance as routing does it; gives how many."""
    rooms = [flow.room(at_s, mean_tokens) for flow in flows]
    left = count
    for _ in flows:
        instances = 0
        for flow, room in zip(flows, rooms, strict=True):
            if room > 0.0:
                instances += flow.instances
        if left <= 0.0 or not instances:
            break
        share = left / instances
        for i, flow in enumerate(flows):
            here = min(rooms[i], share * flow.instances)
            if here > 0.0:
                flow.let_in(here, mean_tokens)
                rooms[i] -= here
                left -= here
    return count - left


def _advance(machine: Machine, flow: _Flow, future: Future, dt: float) -> tuple[float, float, float, float]:
    """Gives the requests that had their first token, the tokens made, and the requests preempted with their tokens."""
    cost, batches, running, prefills = flow.cost, flow.instances, flow.running, flow.prefills
    if running + prefills <= 0.0:
        return _NOTHING
    used, uncomputed = flow.used, flow.uncomputed
    held = used - uncomputed if used > uncomputed else 0.0
    decodes = context = 0.0
    if running > 0.0:
        decodes, context = max(running / batches, 1.0), held / batches
    took_s, done = token_s(cost, decodes, context, 0.0, 0.0), 0.0
    chunk = min(machine.pace.max_batch_tokens - decodes, uncomputed / batches) if uncomputed > 0.0 else 0.0
    begun = prefills
    if chunk > 0.0:
        full_s = token_s(cost, decodes, context, chunk, future.prompt_tokens / 2)
        could = chunk * batches * dt / full_s
        done = min(uncomputed, could)
        share = done / could  # with little to compute only some steps have prompts in them
        took_s = share * full_s + (1 - share) * took_s
    if uncomputed > 0.0:
        begun = prefills * done / uncomputed
    made = running * dt / took_s
    ended = min(running, made / max(1.0, future.answer_tokens))
    if running > 0.0:  # those that end are older, and so larger, than the mean
        mean = held / running
        used -= ended * min(mean * 2, max(mean, future.prompt_tokens + future.answer_tokens))
    used = max(0.0, used + made)
    running += begun - ended
    flow.uncomputed = uncomputed - done
    flow.prefills = prefills = prefills - begun
    over = used - flow.capacity
    if over <= 0.0 or running <= 0.0:
        flow.running, flow.used = running, used
        return begun, made, 0.0, 0.0
    mean = used / (running + prefills)
    gone = min(running, over / mean)
    flow.running, flow.used = running - gone, used - gone * mean
    return begun, made, gone, gone * mean


def _waits(came: Sequence[float], first: Sequence[float], dt: float) -> tuple[float, float]:
    """Median and 99th percentile: when the curve of first tokens reaches each of those who have come."""
    waits: list[tuple[float, float]] = []
    j = 0
    for i, until in enumerate(came[: STEPS + 1]):
        count = until - (came[i - 1] if i else 0.0)
        if count <= 0.0:
            continue
        while j < len(first) - 1 and first[j] < until - _NEARLY:
            j += 1
        reached = first[j] >= until - _NEARLY
        waits.append(((j - i) * dt if reached else (len(first) - i) * dt * 1.5, count))
    waits.sort()
    total = math.fsum(count for _, count in waits)
    found, seen = [0.0, 0.0], 0.0
    for wait, count in waits:
        seen += count
        for k, share in enumerate((0.5, 0.99)):
            if seen - count < share * total:
                found[k] = max(0.0, wait)
    return found[0], found[1]

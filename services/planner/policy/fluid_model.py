"""Fluid model: predicts the latencies of a layout over the next minutes (pure, no clock).

Groups of equal depth are one `GroupKind`. Requests arrive at a rate and wait in one queue; a kind admits them while it
has memory and places, computes their prompts alongside the decodes of running requests, and releases those whose
answers end. The cumulative curves of arrivals and of first tokens give the waits, to which a request's own prefill is
added (`prompt_s`). The step duration gives the token time. When running requests outgrow the memory, some are preempted
and wait at the head of the queue to be recomputed.

Costs are those of `ballast.common.cost`, for the mean batch of each kind. Answers end at a constant rate per token,
which differs between running and arriving requests: if lengths differ, long answers hold the memory, and their expected
remainder equals their current length.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ballast.common.cost import CostModel
from ballast.common.traffic import Pace

STEPS = 80  # time steps of the horizon
_TAIL = 3  # maximum number of horizons simulated, until all arrivals of the first have a token
# Fraction of a pipeline's time in which a stage waits for its neighbours, by depth, measured in the simulator and on
# two cores. It is linear between and beyond these depths.
_BUBBLES = ((1, 0.0), (2, 0.05), (4, 0.17), (8, 0.22))
_RESERVE = 0.05  # fraction of the KV memory that admission reserves for growth
_LEAST_STEP_S = 1e-6  # lower bound for any reported costs
# A distribution of prompt lengths is reduced to these parts: fraction of all, and its representative quantile.
PARTS = ((0.5, 0.25), (0.4, 0.7), (0.08, 0.94), (0.02, 0.99))
_MOST_SHARING = 2.0  # the first waiting prompt gets half of every batch, no matter how many wait
_PRECISION_S = 0.005  # precision of a wait
_HALVINGS = 40  # maximum steps of a search; waits beyond 10^12 s, from reported costs, are less precise
_COHORTS = 8  # number of parts of the initially waiting requests, by waiting time
_NEARLY = 0.1  # fraction of a request that may be missing at the end, because flows are continuous


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKind:
    """All groups of equal depth, as one."""

    stages: int
    group_count: int
    capacity_tokens: float  # KV tokens of all groups together
    running_count: float
    used_tokens: float  # used KV tokens
    uncomputed_tokens: float = 0.0  # prompt tokens of admitted requests without a first token
    max_running_count: float = 0.0  # maximum of all groups together; 0: use the machine's
    stall_s: float = 0.0  # time until which a transition stalls all requests
    kept_tokens: float = 0.0  # capacity of draining pipelines, closed to admission until `kept_s`
    kept_s: float = 0.0
    slowness: float = 1.0  # factor on the machine's batch durations


@dataclass(frozen=True, slots=True, kw_only=True)
class Future:
    """Expected demand: one arrival rate for some time, then the calm rate."""

    rate_per_s: float
    lasts_s: float
    calm_per_s: float
    prompt_tokens: float
    answer_tokens: float  # expected answer of an arriving request
    waiting_count: float  # requests without a first token
    waiting_tokens: float
    remaining_tokens: float = 0.0  # mean of running answers, if more than that of a new answer; 0: the same
    waited_s: float = 0.0  # waiting time of the first waiting request; the last has just arrived
    prompts: tuple[float, ...] = ()  # prompt tokens, by `PARTS`; empty: all equal

    @property
    def spread(self) -> float:
        """Mean square of prompt lengths divided by the square of their mean."""
        if not self.prompts:
            return 1.0
        parts = list(zip(PARTS, self.prompts, strict=True))
        mean = math.fsum(share * tokens for (share, _), tokens in parts)
        return math.fsum(share * tokens * tokens for (share, _), tokens in parts) / (mean * mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class FluidMachine:
    """Speed and limits of an instance."""

    pace: Pace
    layer_count: int
    max_running_count: int

    def cost_of(self, stages: int, slowness: float = 1.0) -> CostModel:
        """Return the batch costs of all layers in a pipeline of this depth, with bubbles counted as work."""
        return self.pace.cost.scaled(self.layer_count / self.pace.layer_count / (1 - bubbles(stages)) * slowness)


@dataclass(frozen=True, slots=True)
class Prediction:
    ttft_p99_s: float
    ahead_p99_s: float  # P99 TTFT without the time waited before the prediction
    tpot_s: float  # mean seconds per token, including waits of preempted requests
    lost_share: float = 0.0  # fraction of the requests whose wait is lost
    lost_ahead_share: float = 0.0  # like `lost_share`, without the time waited before the prediction

    def told(self) -> str:
        return f"P99 TTFT {self.ttft_p99_s:.2f} s, TPOT {1e3 * self.tpot_s:.0f} ms"


def bubbles(stages: int) -> float:
    """Return the fraction of a pipeline's time in which a stage waits."""
    for (low, less), (high, more) in pairwise(_BUBBLES):
        if stages <= high:
            return less + (more - less) * max(0, stages - low) / (high - low)
    return _BUBBLES[-1][1]


def token_s(cost: CostModel, decodes: float, context: float, chunk: float, prefix: float) -> float:
    """Return the seconds between two tokens of a sequence: a microbatch's time over all stages.

    Args:
        cost: Costs of all layers, including bubbles (`FluidMachine.cost_of`).
        decodes: Decoding sequences per microbatch.
        context: Tokens whose KV the decodes read.
        chunk: Prompt tokens per microbatch, after `prefix` tokens.
    """
    tokens = sequences = decodes
    pairs = read = context
    if chunk:
        tokens, sequences = decodes + chunk, decodes + 1.0
        pairs, read = context + prefix * chunk + chunk * chunk / 2, context + prefix
    shared_s = cost.shared_s
    seconds = cost.attention_s * pairs + cost.prefix_s * read + cost.token_s * tokens
    seconds += (cost.chunk_s - shared_s) * sequences + shared_s
    if tokens > cost.knee_tokens:
        seconds += cost.beyond_s * (tokens - cost.knee_tokens)
    if tokens > 1:
        seconds += cost.many_s
    return seconds if seconds > _LEAST_STEP_S else _LEAST_STEP_S


def prompt_s(
    cost: CostModel,
    stages: int,
    batch_tokens: int,
    decodes: float,
    context: float,
    length: float,
    sharing: float = 1.0,
) -> float:
    """Return the seconds from a request's admission to its first token. Its chunks follow each other through the
    stages.

    Args:
        cost: As in `token_s`; also `decodes` and `context`, for the rest of its batches.
        batch_tokens: Maximum tokens of a batch.
        sharing: Slowdown by other prompts.
    """
    chunks = math.ceil(length / max(1.0, batch_tokens - decodes))
    chunk = length / chunks
    trip_s = token_s(cost, decodes, context, chunk, (length - chunk) / 2)
    turn_s = token_s(cost, decodes, context, 0.0, 0.0) / stages if decodes else 0.0
    return turn_s / 2 + sharing * trip_s * (1 + (chunks - 1) / stages)


class _Flow:
    """State of one kind over time. It has plain attributes, because a comparison executes thousands of its steps."""

    __slots__ = (
        "admitted",
        "busy",
        "capacity",
        "cost",
        "free",
        "group_count",
        "instances",
        "kept",
        "kept_s",
        "left_over",
        "max_batch_tokens",
        "old",
        "places",
        "prefills",
        "running",
        "seen",
        "seen_busy",
        "seen_context",
        "seen_decodes",
        "stages",
        "stall_s",
        "uncomputed",
        "used",
    )

    def __init__(self, kind: GroupKind, machine: FluidMachine, future: Future) -> None:
        self.cost = machine.cost_of(kind.stages, kind.slowness)
        self.stages, self.group_count, self.stall_s = kind.stages, kind.group_count, kind.stall_s
        self.instances = kind.group_count * kind.stages  # also the number of microbatches in flight
        self.max_batch_tokens = machine.pace.max_batch_tokens
        self.capacity = kind.capacity_tokens
        self.admitted = kind.capacity_tokens * (1 - _RESERVE)
        self.kept, self.kept_s = kind.kept_tokens, kind.kept_s
        self.left_over = kind.group_count * future.spread / 2  # unusable room of all groups, in mean requests
        self.places = kind.max_running_count or float(self.instances * machine.max_running_count)
        self.used: float = kind.used_tokens
        self.uncomputed: float = kind.uncomputed_tokens
        # Admitted requests without a first token.
        self.prefills: float = min(kind.running_count, kind.uncomputed_tokens / future.prompt_tokens)
        self.running: float = kind.running_count - self.prefills
        self.old: float = self.running  # running requests that have been running since the beginning
        self.busy: float = 0.0  # fraction of the last step in which batches had prompts
        self.free: float = 0.0  # requests that could still be admitted in this step
        # Requests with a first token, and sums over them of `busy`, decodes and context at that time.
        self.seen: float = 0.0
        self.seen_busy: float = 0.0
        self.seen_decodes: float = 0.0
        self.seen_context: float = 0.0

    def room(self, until_s: float, mean_tokens: float) -> float:
        """Set `free` to the number of requests that can be admitted in the step that ends at `until_s`. Returns it."""
        self.free = 0.0
        if until_s <= self.stall_s:
            return 0.0
        room = self.admitted - self.left_over * mean_tokens - self.used
        if until_s <= self.kept_s:
            room -= self.kept
        if mean_tokens > 1.0:
            room /= mean_tokens
        places = self.places - self.running - self.prefills
        if room < places:
            places = room
        if places > 0.0:
            self.free = places
        return self.free

    def let_in(self, count: float, mean_tokens: float) -> None:
        tokens = count * mean_tokens
        self.free -= count
        self.prefills += count
        self.uncomputed += tokens
        self.used += tokens

    def advance(
        self, prefix: float, prompt: float, answer: float, remaining: float, dt: float
    ) -> tuple[float, float, float, float]:
        """Advance by `dt` seconds. Returns the numbers of requests with a first token, of generated tokens, and of
        preempted requests and their tokens.
        """
        cost, batches, running, prefills = self.cost, self.instances, self.running, self.prefills
        used, uncomputed = self.used, self.uncomputed
        self.busy = share = 0.0
        if running + prefills <= 0.0:
            return 0.0, 0.0, 0.0, 0.0
        held = used - uncomputed if used > uncomputed else 0.0
        decodes = context = 0.0
        if running > 0.0:
            decodes, context = running / batches, held / batches
            if decodes < 1.0:
                decodes = 1.0
        took_s = token_s(cost, decodes, context, 0.0, 0.0)
        begun = prefills
        if uncomputed > 0.0:
            chunk, each, done = self.max_batch_tokens - decodes, uncomputed / batches, 0.0
            if each < chunk:
                chunk = each
            if chunk > 0.0:
                full_s = token_s(cost, decodes, context, chunk, prefix)
                could = chunk * batches * dt / full_s
                done = uncomputed if uncomputed < could else could
                # With little prefill, only this fraction of the steps have prompts.
                self.busy = share = done / could
                # While more than one prompt waits, a pipeline has one more microbatch in flight than stages.
                trip_s = full_s * (1 + share * share / self.stages) if self.stages > 1 else full_s
                took_s = 1 / (share / trip_s + (1 - share) / took_s)
            begun = prefills * done / uncomputed
            self.uncomputed = uncomputed - done
        made = running * dt / took_s
        ended = made / answer
        if self.old > 0.0 and running > 0.0 and remaining > answer:  # rounding may leave a remainder when none runs
            old_ended = made * self.old / running / remaining
            ended = made * (running - self.old) / running / answer + old_ended
            self.old -= old_ended if old_ended < self.old else self.old
        if running > 0.0:  # ending requests are older than the mean, and therefore larger
            if ended > running:
                ended = running
            mean, size = held / running, prompt + answer
            if not size > mean:
                size = mean
            used -= ended * (size if size < mean * 2 else mean * 2)
        if begun > 0.0:
            self.seen += begun
            self.seen_busy += begun * share
            self.seen_decodes += begun * decodes
            self.seen_context += begun * context
        used += made
        running += begun - ended
        self.prefills = prefills = prefills - begun
        over = used - self.capacity
        if over <= 0.0 or running <= 0.0:
            self.running, self.used = running, (used if used > 0.0 else 0.0)
            return begun, made, 0.0, 0.0
        mean = used / (running + prefills)
        gone = min(running, over / mean)
        self.old *= 1 - gone / running
        self.running, self.used = running - gone, used - gone * mean
        return begun, made, gone, gone * mean


def look_ahead(
    machine: FluidMachine, kinds: Sequence[GroupKind], future: Future, horizon_s: float, lost_after_s: float = math.inf
) -> Prediction:
    """Predict the latencies of a layout. `lost_after_s`: longer waits are partly lost, and entirely from twice this
    time on.
    """
    dt = horizon_s / STEPS
    prompt, answer = future.prompt_tokens, max(1.0, future.answer_tokens)
    remaining = future.remaining_tokens
    prefix = prompt / 2
    flows = [_Flow(kind, machine, future) for kind in kinds]
    waiting, waiting_tokens = future.waiting_count, future.waiting_tokens
    away, away_tokens = 0.0, 0.0  # preempted requests that wait to resume, and their tokens
    came, first, ready_s = [waiting + math.fsum(flow.prefills for flow in flows)], [0.0], [0.0]
    tokens = request_s = until_s = with_token = 0.0
    so_far = came[0]
    for step in range(_TAIL * STEPS):
        at_s, until_s = until_s, (step + 1) * dt
        arrived, is_within = 0.0, step < STEPS
        if is_within:
            arrived = (future.rate_per_s if at_s < future.lasts_s else future.calm_per_s) * dt
        elif with_token >= so_far - _NEARLY:
            break
        waiting += arrived
        waiting_tokens += arrived * prompt
        if away > 0.0:
            let = _spread(flows, until_s, away, away_tokens / away)
            away_tokens -= let * away_tokens / away
            away -= let
        if waiting > 0.0 and away < 0.5:
            mean = waiting_tokens / waiting
            let = _spread(flows, until_s, waiting, mean)
            waiting_tokens -= let * mean
            waiting -= let
        started = last_s = 0.0
        for flow in flows:
            begin_s = flow.stall_s if flow.stall_s > at_s else at_s
            if is_within:
                request_s += flow.running * dt
            if begin_s >= until_s:
                continue
            begun, made, gone, gone_tokens = flow.advance(prefix, prompt, answer, remaining, until_s - begin_s)
            started += begun
            if begun > 0.0:
                ready = begin_s + flow.busy * (until_s - begin_s)
                if ready > last_s:
                    last_s = ready
            if is_within:
                tokens += made
            away += gone
            away_tokens += gone_tokens
        if is_within:
            request_s += away * dt
        so_far += arrived
        with_token = min(so_far, with_token + started)
        came.append(so_far)
        first.append(with_token)
        ready_s.append(last_s)
    own = _own(flows, future)
    usual_s = max((_own_s(flow, prompt) for flow in flows if flow.seen > 0.0), default=0.0)
    waits = ahead = _waits(came, first, ready_s, dt)
    ttft_s = ahead_s = _p99(ahead, own, usual_s)
    if future.waited_s > 0.0:
        waits = _waits(came, first, ready_s, dt, future.waited_s)
        ttft_s = _p99(waits, own, usual_s)
    lost, lost_ahead = _lost(waits, lost_after_s), _lost(ahead, lost_after_s)
    return Prediction(ttft_s, ahead_s, request_s / tokens if tokens else 0.0, lost, lost_ahead)


def _lost(waits: Mapping[float, float], limit_s: float) -> float:
    """Return the fraction of requests whose wait is lost. It rises from the limit to twice the limit."""
    lost = math.fsum(count * min(1.0, wait / limit_s - 1) for wait, count in waits.items() if wait > limit_s)
    return lost / math.fsum(waits.values()) if lost else 0.0


def _spread(flows: Sequence[_Flow], until_s: float, count: float, mean_tokens: float) -> float:
    """Admit as many requests as fit, distributed evenly over instances as routing does. Returns their number."""
    if len(flows) == 1:
        let = min(flows[0].room(until_s, mean_tokens), count)
        flows[0].let_in(let, mean_tokens)
        return let
    left, instances = count, 0
    for flow in flows:
        if flow.room(until_s, mean_tokens) > 0.0:
            instances += flow.instances
    for _ in flows:
        if left <= 0.0 or not instances:
            break
        share, instances = left / instances, 0
        for flow in flows:
            here = share * flow.instances
            if here >= flow.free:
                here = flow.free
            else:
                instances += flow.instances
            if here > 0.0:
                flow.let_in(here, mean_tokens)
                left -= here
    return count - left


def _waits(
    came: Sequence[float], first: Sequence[float], ready_s: Sequence[float], dt: float, waited_s: float = 0.0
) -> dict[float, float]:
    """Return the number of requests by wait in seconds. A request waits until the curve of first tokens reaches its
    position in the curve of arrivals.

    Args:
        ready_s: Time at which the last first token of each step was ready; 0 if it had none.
        waited_s: Waiting time of the first request at the beginning.
    """
    arrivals = [(step * dt, until) for step, until in enumerate(came[: STEPS + 1])]
    if waited_s > 0.0:
        parts = [(part + 1) / _COHORTS for part in range(_COHORTS)]
        arrivals[:1] = [((part - 1 - 0.5 / _COHORTS) * waited_s, came[0] * part) for part in parts]
    waits: dict[float, float] = {}
    j, before, last = 0, 0.0, len(first) - 1
    for at_s, until in arrivals:
        count, before = until - before, until
        if count <= 0.0:
            continue
        nearly = until - _NEARLY
        while j < last and first[j] < nearly:
            j += 1
        wait = max(0.0, -at_s)
        if first[j] < nearly:
            wait = (len(first) * dt - at_s) * 1.5
        elif j * dt > at_s and j:
            part = min(1.0, (until - first[j - 1]) / (first[j] - first[j - 1]))
            wait = max(0.0, (1 - part) * (j - 1) * dt + part * ready_s[j] - at_s)
        waits[wait] = waits.get(wait, 0.0) + count
    return waits


def _own(flows: Sequence[_Flow], future: Future) -> list[tuple[float, float]]:
    """Return the prefill times of requests as (seconds, fraction of the requests)."""
    seen = math.fsum(flow.seen for flow in flows)
    prompts = future.prompts or (future.prompt_tokens,) * len(PARTS)
    return [
        (_own_s(flow, length), flow.seen / seen * share)
        for flow in flows
        if flow.seen > 0.0
        for (share, _), length in zip(PARTS, prompts, strict=True)
    ]


def _own_s(flow: _Flow, length: float) -> float:
    busy = flow.seen_busy / flow.seen * max(0.0, 1 - flow.group_count / flow.seen)  # busy fraction due to other prompts
    sharing = _MOST_SHARING if busy > 1 - 1 / _MOST_SHARING else 1 / (1 - busy)
    decodes, context = flow.seen_decodes / flow.seen, flow.seen_context / flow.seen
    return prompt_s(flow.cost, flow.stages, flow.max_batch_tokens, decodes, context, length, sharing)


def _p99(waits: Mapping[float, float], own: Sequence[tuple[float, float]], usual_s: float) -> float:
    """Return the 99th percentile of waiting plus prefill time, which are assumed to be independent.

    `usual_s`: the prefill time contained in the waits.
    """
    if not waits:
        return 0.0
    inline = sorted(waits)
    seen = list(accumulate(waits[wait] for wait in inline))
    inline = [max(0.0, wait - usual_s) for wait in inline]
    wanted = 0.99 * seen[-1]
    own = own or [(0.0, 1.0)]
    low, high = 0.0, inline[-1] + max(own)[0]
    for _ in range(_HALVINGS):
        if high - low <= _PRECISION_S:
            break
        middle = (low + high) / 2
        within = 0.0
        for own_s, share in own:
            index = bisect_right(inline, middle - own_s)
            if index:
                within += share * seen[index - 1]
        if within >= wanted:
            high = middle
        else:
            low = middle
    return high

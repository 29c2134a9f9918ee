"""Steady state of an instance, in closed form from the roofline, without simulation.

A request runs for the duration of its answer, and holds on average the KV of its prompt and of half its answer. A token
takes one step, which reads the parameters and all KV in the time not used by prefills. Demand therefore grows faster
than the request rate, and diverges at some rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from services.worker.policy.roofline import RooflineCosts
from sim.cost import SimRoofline
from sim.hardware import Cluster, ModelSpec, Timings
from tools.bench.traces import Trace, TraceRequest

_ROUNDS = 4000
_ENDLESS = 50.0  # multiple of the capacity that counts as divergent
PEAK_S = 30.0
_BURST_S = 60.0
_STEP_S = 0.5
_LEAST_SHARE = 0.01  # minimum fraction of the time for decoding


@dataclass(frozen=True, slots=True)
class Load:
    """Steady load of one instance."""

    rate_per_s: float
    input_tokens: float
    output_tokens: float
    product: float  # mean of input times output length
    square: float  # mean of the squared output length

    @staticmethod
    def of(requests: Sequence[TraceRequest], rate_per_s: float) -> "Load":
        return Load(
            rate_per_s,
            fmean(r.input_tokens for r in requests),
            fmean(r.output_tokens for r in requests),
            fmean(r.input_tokens * r.output_tokens for r in requests),
            fmean(r.output_tokens**2 for r in requests),
        )


@dataclass(frozen=True, slots=True)
class Settled:
    prompt_share: float  # fraction of the time spent on prompts
    demand_tokens: float  # KV tokens with unlimited memory; infinity: divergent
    token_s: float
    capacity_tokens: float

    @property
    def demand(self) -> float:
        """KV demand as a fraction of the memory."""
        return self.demand_tokens / self.capacity_tokens


def capacity_tokens(model: ModelSpec, cluster: Cluster, timings: Timings) -> float:
    """KV capacity of one instance in tokens."""
    budget = cluster.gpu.memory_bytes * timings.memory_fraction * model.gpus_per_instance
    return (budget - model.parameter_bytes) / model.kv_bytes_per_token


def settled(model: ModelSpec, cluster: Cluster, timings: Timings, load: Load) -> Settled:
    costs, layers = SimRoofline(model, cluster, timings).costs, model.layer_count
    capacity = capacity_tokens(model, cluster, timings)
    prompts = load.rate_per_s * prompt_s(costs, layers, load.input_tokens)
    if prompts >= 1.0:
        return Settled(prompts, math.inf, math.inf, capacity)
    demand, token_s = 0.0, 0.0
    for _ in range(_ROUNDS):
        running = load.rate_per_s * load.output_tokens * token_s if token_s else 1.0
        layer_s = costs.dense_work_s(running) + demand * costs.context_s
        token_s = (costs.stage_s + running * costs.sequence_s + layers * layer_s + costs.head_s) / (1.0 - prompts)
        wanted = load.rate_per_s * token_s * (load.product + load.square / 2)
        if wanted > _ENDLESS * capacity:
            return Settled(prompts, math.inf, math.inf, capacity)
        demand = (demand + wanted) / 2
    return Settled(prompts, demand, token_s, capacity)


def prompt_s(costs: RooflineCosts, layers: int, tokens: float) -> float:
    """Prefill time of a prompt that runs alone at the full rate; a lower bound."""
    return tokens * (costs.token_s + costs.row_s + tokens / 2 * costs.pair_s) * layers


def peak_demand(model: ModelSpec, cluster: Cluster, timings: Timings, phases: Sequence[tuple[float, Load]]) -> float:
    """Peak KV demand over phases (seconds, load) with unlimited memory, as a fraction of the memory."""
    costs, layers = SimRoofline(model, cluster, timings).costs, model.layer_count
    capacity = capacity_tokens(model, cluster, timings)
    running = held = most = 0.0
    for seconds, load in phases:
        prompts = load.rate_per_s * prompt_s(costs, layers, load.input_tokens)
        kept = (load.product + load.square / 2) / (load.input_tokens + load.output_tokens)  # mean stay of KV, in steps
        for _ in range(int(seconds / _STEP_S)):
            layer_s = costs.dense_work_s(running) + held * costs.context_s
            step_s = costs.stage_s + running * costs.sequence_s + layers * layer_s + costs.head_s
            tokens = _STEP_S * max(_LEAST_SHARE, 1.0 - prompts) / step_s  # tokens per request
            came = _STEP_S * load.rate_per_s
            held += came * load.input_tokens + running * tokens - held * min(1.0, tokens / kept)
            running += came - running * min(1.0, tokens / load.output_tokens)
            most = max(most, held)
    return most / capacity


def carried_by_pairs(parameter_share: float) -> float:
    """Load that a pair carries relative to its two instances alone, if memory bandwidth is the bottleneck. A pair has
    more capacity but longer token times, because each microbatch reads the parameters. `parameter_share`: fraction of
    the memory that the parameters take.
    """
    room = (1 - parameter_share / 2) / (1 - parameter_share)
    return room / (1 + parameter_share / 2)


def prompt_share(model: ModelSpec, cluster: Cluster, timings: Timings, trace: Trace) -> float:
    """Fraction of all engines' time spent on the prompts of the busiest half minute."""
    if not trace.requests:
        return 0.0
    costs, instances = SimRoofline(model, cluster, timings).costs, cluster.instances_of(model)
    at_s = np.array([r.arrival_s for r in trace.requests])
    each_s = [prompt_s(costs, model.layer_count, r.input_tokens) for r in trace.requests]
    total_s = np.concatenate([[0.0], np.cumsum(each_s)])
    until = np.searchsorted(at_s, at_s + PEAK_S, "left")
    return float(np.max(total_s[until] - total_s[:-1])) / (PEAK_S * instances)


def reading_is_short(model: ModelSpec, cluster: Cluster, timings: Timings, trace: Trace) -> bool:
    """True if, in the busiest window of one request's duration, KV demand diverges even with unlimited memory, although
    prefills leave time for decoding.
    """
    instances, whole = cluster.instances_of(model), trace.requests
    if not whole or trace.span_s <= _BURST_S:
        return False
    calm = settled(model, cluster, timings, Load.of(whole, len(whole) / trace.span_s / instances))
    stay_s = calm.token_s * fmean(r.output_tokens for r in whole)
    window_s = min(trace.span_s, max(_BURST_S, stay_s))
    at_s = np.array([r.arrival_s for r in whole])
    counts = np.searchsorted(at_s, at_s + window_s, "left") - np.arange(len(whole))
    first = int(np.argmax(counts))
    dense = whole[first : first + int(counts[first])]
    at_worst = settled(model, cluster, timings, Load.of(dense, len(dense) / window_s / instances))
    return math.isinf(at_worst.demand_tokens) and at_worst.prompt_share < 1.0

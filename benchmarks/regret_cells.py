"""The grid on which policies are compared: workloads with the arrivals of open traces, on machines of the catalogue.

A cell is a window of a trace, thinned to the rate of a small cluster, times a rate factor. Draws of a cell have the
same arrivals and new lengths. Kinds of workload:

- think: long answers of reasoning models. The prompts of conversations, at most 3,000 tokens; answers lognormal with a
  median of 1,700 tokens (sigma 0.9), 50 to 12,000.
- agent: long prompts of agents with many turns, from the Mooncake trace, at most 20,000 tokens. Its timestamps tick
  every 3 s; requests of one tick are spread over it. Nothing is shared between turns.
- code: code completion, long prompts and answers of a dozen tokens.
- chat: conversations; calm: their least bursty window.
"""

import math
import random
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ballast.common.errors import ConfigError, InvariantViolation
from ballast.common.sampling import PriorityClass
from benchmarks.regret_made import MADE, MODEL, Made
from services.planner.core.prediction_log import Predicted
from sim.hardware import find_cluster, find_model
from sim.jobs.settled import prompt_share
from sim.jobs.simulation import SimJob, WorkerSize, specs_of, stranded_fraction, world_of
from sim.results import Outcome, SimRun
from tools.bench.traces import Trace, TraceRequest, read_trace
from tools.bench.upscale import upscaled

CALM = "calm"  # used like a policy: recompute with every eighth request
_THINNED = 8
_TICK_S = 3.0
_NEIGHBOURS = 20


@dataclass(frozen=True, slots=True)
class CellMachine:
    model: str
    cluster: str
    gpus_each: int | None = None  # per instance; None: the catalogue's


MACHINES = {
    "14b-40g": CellMachine("Qwen2.5-14B", "8xA100-40G"),
    "13b-40g": CellMachine("Llama-2-13B", "8xA100-40G"),
    "14b-80g": CellMachine("Qwen2.5-14B", "4xA800-80G"),
    "70b-160g": CellMachine("Llama-3.1-70B", "2x8xH100-80G", 2),
    "32b-80g": CellMachine("Qwen3-32B", "8xH100-80G", 1),
}


@dataclass(frozen=True, slots=True)
class CellKind:
    most_input: int
    thinks: bool = False
    every: int = 1  # keep every n-th request of the trace
    spread_s: float = 0.0


KINDS = {
    "think": CellKind(3000, thinks=True, every=6),
    "agent": CellKind(20_000, every=3, spread_s=_TICK_S),
    "code": CellKind(7500),
    "chat": CellKind(3000),
    "calm": CellKind(3000),
}


@dataclass(frozen=True, slots=True)
class Cell:
    kind: str
    machine: str
    rate: float
    trace: str
    from_s: float
    until_s: float

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.machine}-x{self.rate:g}"


_CONV_A, _CONV_B, _CONV_CALM = "azure_conv_spike640_a", "azure_conv_spike640_b", "azure_conv_calm640"
_CODE_A, _CODE_B, _AGENT = "azure_code_spike640_a", "azure_code_spike640_b", "mooncake_conversation_0_2400"

REPLAYED: Mapping[str, Cell] = {
    cell.name: cell
    for cell in (
        Cell("think", "14b-40g", 0.7, _CONV_A, 0, 500),
        Cell("think", "14b-40g", 1.2, _CONV_B, 0, 500),
        Cell("think", "14b-40g", 1.5, _CONV_B, 0, 500),
        Cell("think", "14b-40g", 3, _CONV_A, 0, 400),
        Cell("think", "14b-80g", 2, _CONV_A, 0, 400),
        Cell("think", "14b-80g", 3, _CONV_B, 0, 400),
        Cell("think", "70b-160g", 0.4, _CONV_A, 0, 400),
        Cell("think", "70b-160g", 0.7, _CONV_A, 0, 400),
        Cell("think", "70b-160g", 1.2, _CONV_B, 0, 400),
        Cell("think", "70b-160g", 2, _CONV_B, 0, 400),
        Cell("think", "32b-80g", 1.5, _CONV_B, 0, 400),
        Cell("chat", "13b-40g", 0.7, _CONV_B, 300, 600),
        Cell("chat", "13b-40g", 1.1, _CONV_A, 0, 300),
        Cell("chat", "13b-40g", 1.4, _CONV_A, 0, 300),
        Cell("chat", "13b-40g", 2, _CONV_B, 300, 600),
        Cell("chat", "14b-40g", 3, _CONV_A, 0, 300),
        Cell("chat", "14b-80g", 2, _CONV_B, 300, 600),
        Cell("chat", "70b-160g", 1, _CONV_A, 0, 300),
        Cell("chat", "70b-160g", 2, _CONV_B, 300, 600),
        Cell("code", "14b-40g", 1, _CODE_A, 100, 320),
        Cell("code", "14b-40g", 3, _CODE_B, 500, 640),
        Cell("code", "14b-80g", 2, _CODE_A, 100, 320),
        Cell("code", "70b-160g", 1, _CODE_B, 500, 640),
        Cell("agent", "14b-40g", 0.7, _AGENT, 1200, 1600),
        Cell("agent", "14b-40g", 1.2, _AGENT, 1200, 1600),
        Cell("agent", "14b-80g", 1, _AGENT, 1200, 1600),
        Cell("agent", "70b-160g", 0.25, _AGENT, 1200, 1600),
        Cell("agent", "70b-160g", 0.4, _AGENT, 1200, 1600),
        Cell("calm", "14b-40g", 1, _CONV_CALM, 0, 300),
        Cell("calm", "14b-80g", 1, _CONV_CALM, 0, 300),
        Cell("calm", "13b-40g", 0.8, _CONV_CALM, 0, 300),
    )
}
CELLS: Mapping[str, Cell | Made] = {**MADE, **REPLAYED}


def long_answer(rng: random.Random) -> int:
    """Answer length of a reasoning model, in tokens."""
    return int(min(12_000, max(50, rng.lognormvariate(math.log(1700), 0.9))))


def trace_of(cell: Cell | Made, traces: Path | None, draw: int) -> Trace:
    """The trace of a cell.

    Raises:
        ConfigError: the folder lacks the trace file.
    """
    if isinstance(cell, Made):
        return cell.trace(draw)
    if traces is None:
        raise ConfigError("--traces", f"is missing: {cell.name} has the arrivals of {cell.trace}")
    kind = KINDS[cell.kind]
    rng = random.Random(zlib.crc32(f"{cell.name}-{draw}".encode()))
    whole = read_trace(traces / f"{cell.trace}.csv")
    cut = [r for r in whole.requests if cell.from_s <= r.arrival_s < cell.until_s][:: kind.every]
    moved = [
        TraceRequest(
            r.arrival_s - cell.from_s + rng.random() * kind.spread_s,
            min(r.input_tokens, kind.most_input),
            r.output_tokens,
        )
        for r in cut
    ]
    thinned = replace(whole, requests=tuple(sorted(moved, key=lambda r: r.arrival_s)))
    trace = upscaled(thinned, cell.rate, draw)
    requests = trace.requests
    last = len(requests) - 1
    if kind.thinks:
        drawn = [replace(r, output_tokens=long_answer(rng)) for r in requests]
    elif draw:
        near = [requests[min(last, max(0, i + rng.randint(-_NEIGHBOURS, _NEIGHBOURS)))] for i in range(last + 1)]
        drawn = [replace(like, arrival_s=r.arrival_s) for r, like in zip(requests, near, strict=True)]
    else:
        drawn = list(requests)
    return replace(trace, requests=tuple(drawn))


def job_of(cell: Cell | Made, traces: Path | None, policy: str, draw: int) -> SimJob:
    """The simulation of a cell.

    Raises:
        ConfigError: the folder lacks the trace file.
    """
    if isinstance(cell, Made):
        model, cluster, classes = find_model(MODEL), cell.cluster(), cell.classes
    else:
        machine, classes = MACHINES[cell.machine], (PriorityClass.DEFAULT,)
        model, cluster = find_model(machine.model), find_cluster(machine.cluster)
        if machine.gpus_each is not None:
            model = model.model_copy(update={"gpus_per_instance": machine.gpus_each})
    trace = trace_of(cell, traces, draw)
    if policy == CALM:
        trace = replace(trace, requests=trace.requests[::_THINNED])
    trace = trace.scaled(max_total_tokens=model.max_model_len)
    return SimJob(
        trace=trace,
        model=model,
        cluster=cluster,
        policies=("recompute" if policy == CALM else policy,),
        seed=draw,
        worker=WorkerSize.of(cluster),
        classes=classes,
    )


def run_cell(name: str, traces: Path | None, policy: str, draw: int) -> Mapping[str, Any]:
    """Figures of one simulation. If an invariant breaks, `failed` has its message, and most figures are missing."""
    cell, began_s = CELLS[name], time.process_time()
    job = job_of(cell, traces, policy, draw)
    found: dict[str, Any] = {"cell": asdict(cell), "policy": policy, "draw": draw, "failed": None}
    try:
        [(_, rules)] = specs_of(job)
        world = world_of(job, rules)
        run = world.run()
        found |= figures_of(run) | {"decisions": [decided(predicted, run.zero_s) for predicted in run.predicted]}
    except InvariantViolation as error:
        found["failed"] = str(error)
    return found | {
        "prompt_share": prompt_share(job.model, job.cluster, job.timings, job.trace),
        "took_s": time.process_time() - began_s,
    }


def decided(predicted: Predicted, zero_s: float) -> Mapping[str, Any]:
    """Return the predictions for one decision of the planner, and its outcome."""
    served, settled_at_s = predicted.served, predicted.settled_at_s
    return {
        "at_s": predicted.at_s - zero_s,
        "chosen": predicted.decision,
        "predicted_s": predicted.predicted.ttft_p99_s,
        "nothing_s": predicted.nothing.ttft_p99_s,
        "predicted_tpot_s": predicted.predicted.tpot_s,
        "was_s": served and served.ttft_p99_s,
        "was_tpot_s": served and served.tpot_s,
        "after_s": settled_at_s and settled_at_s - predicted.at_s,
    }


def figures_of(run: SimRun) -> dict[str, Any]:
    """Figures of a run; demand as a fraction of the KV memory without dropping. A request without a token counts as
    waiting until the end of the run.
    """
    served = [r for r in run.records if r.token_times_s]
    waits_s = [(r.token_times_s[0] if r.token_times_s else run.duration_s) - r.arrival_s for r in run.records]
    tpots_s = [
        (r.token_times_s[-1] - r.token_times_s[0]) / (len(r.token_times_s) - 1)
        for r in served
        if len(r.token_times_s) > 1
    ]
    last_s = max((r.arrival_s for r in run.records), default=0.0)
    loaded = sum(int(np.searchsorted(np.asarray(r.token_times_s), last_s, "right")) for r in served)
    samples = [s for s in run.samples if s.at_s <= last_s]
    capacity = samples[0].kv_capacity_bytes if samples else 1
    demand = [s.kv_demand_bytes / capacity for s in samples]
    done = [t.journal.kind.value for t in run.transitions if t.journal.stage.value == "done"]
    return {
        "requests": len(run.records),
        "unserved": sum(r.outcome is not Outcome.FINISHED for r in run.records),
        "ttft_p50_s": _quantile(waits_s, 0.5),
        "ttft_p99_s": _quantile(waits_s, 0.99),
        "tpot_p50_s": _quantile(tpots_s, 0.5),
        "tpot_p99_s": _quantile(tpots_s, 0.99),
        "tokens_per_s": loaded / last_s if last_s else 0.0,  # as a mean until the last arrival
        "duration_s": run.duration_s,
        "preemptions": run.samples[-1].preemptions_total if run.samples else 0,
        "mean_demand": fmean(demand) if demand else 0.0,
        "peak_demand": max(demand, default=0.0),
        "drops": done.count("drop"),
        "restores": done.count("restore"),
        "merged_share": fmean(any(g > 1 for g in s.group_sizes) for s in samples) if samples else 0.0,
        "stranded": stranded_fraction(run.samples),
        "bubbles": run.bubble_fraction,
    }


def _quantile(values: list[float], q: float) -> float | None:
    return float(np.quantile(values, q)) if values else None

"""Accuracy of simulations: the same workload in `sim`, on emulated workers, and on real workers of this machine.

    python -m benchmarks.fidelity --out out/fidelity

The real run has two workers with a small model. The simulator and the emulated engine use the measurements of `ballast
profile` (`--profile FILE`, or measured first) and the overheads observed on single requests: how much longer a step
takes than the engine alone, and a request than its steps. The four workloads are steady, bursty (limited by compute,
where a drop rarely pays), long answers (limited by memory in a burst, where a drop pays in simulations), and long
prompts. Rates follow from profile and calibration, so that they fit any machine.

Workers, dispatcher and client share this machine's cores. The processor time that the other processes use per step and
per token is measured with a few concurrent requests (benchmarks/fidelity_probes.py), and simulated. The remaining
difference is calibrated on a further workload, with different lengths, rate and seed: steps and prompt tokens are
slowed down by factors that make its mean TPOT and TTFT match. Both measurements are repeated before and after each of
the four workloads, because a machine's speed varies; a workload is simulated with the mean of its neighbours. A
pipeline is measured once, and assumed to slow down like single workers. Nothing is calibrated on the four compared
workloads.

Goals: mean TTFT and TPOT within 15 % of the real run, P99 within 30 %, the same number of drops. Results on a busy
machine are not meaningful.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from ballast.common.cost import Chunk, CostModel
from ballast.common.errors import ConfigError
from benchmarks.fidelity_probes import (
    PROMPT_TOKENS,
    Level,
    Seen,
    at_times,
    contention,
    fitted,
    predicted,
    probe,
    probe_pipeline,
    tokens_of,
)
from services.worker.core.batch import Batch
from services.worker.cost_profile import CostProfile, read_profile
from services.worker.emulation.engine import EmulatedEngine, emulate
from services.worker.emulation.machine import Machine, MeasuredCosts, write_machine
from services.worker.policy.roofline import BatchCost
from sim.clients import Arrival
from sim.hardware import Cluster, Gpu, ModelSpec, timings
from sim.jobs.machines import emulated_model
from sim.jobs.simulation import WorkerSize, production_rules, replay_run
from sim.memory import Geometry
from sim.policies import find_policy
from sim.processors import Contention
from sim.world import World, WorldOptions
from tools.bench.results import PolicyResult, Summary, policy_result
from tools.bench.session import ReplayJob, replay_on
from tools.bench.style import BLUE, GREEN, ORANGE, RC
from tools.bench.traces import Trace, TraceRequest
from tools.cli.profile import measure
from tools.local.cluster import LocalCluster
from tools.model.tiny import make_preset

WORKERS = 2
BLOCK_TOKENS, SEQUENCES, BATCH_TOKENS = 16, 64, 512
_KV_REQUESTS = 8  # a worker's KV in requests of the longest workload: enough that a few random requests do not fill it
_ONE_PIPELINE = ("--overload-policy", "static-pipeline", "--pipeline-degree", str(WORKERS))
_GOALS = {"mean": 0.15, "p99": 0.30}
SYSTEMS = ("real", "emulated", "simulated")


@dataclass(frozen=True, slots=True)
class FidelityWorkload:
    name: str
    prompt_tokens: int  # mean; lengths are uniform between half and one and a half times this
    output_tokens: int
    load: float  # relative to the capacity of two workers at the usual batch size
    burst_load: float = 0.0  # load in the middle fifth of the time; 0: no burst


WORKLOADS = (
    FidelityWorkload("steady", 120, 40, 0.4),
    FidelityWorkload("bursty", 160, 60, 0.25, 3.0),
    FidelityWorkload("long answers", 60, 300, 0.25, 3.0),
    FidelityWorkload("long prompts", 600, 24, 0.4),
)


CALIBRATION = FidelityWorkload("calibration", 320, 48, 0.2)
_CALIBRATION_SEED = 7919  # added to the workloads' seeds
_CALIBRATION_ROUNDS = 16
_DAMPING = 0.6  # exponent of a correction, because each factor affects both TTFT and TPOT
_CALIBRATED_WITHIN = 0.01  # relative tolerance of mean TTFT and TPOT


@dataclass(frozen=True, slots=True)
class Overheads:
    """Overheads of the real path over the engine's own time."""

    step_s: float  # per step; from single requests
    request_s: float  # per request, before the first token; from single requests
    sequence_s: float = 0.0  # per step and sequence except the first
    hop_s: float = 0.0  # per message between stages, beyond the link's latency
    contention: Contention | None = None
    # Slowdown factors due to the other processes:
    step_slowdown: float = 1.0  # of a step's fixed and per-sequence cost
    prompt_slowdown: float = 1.0  # of a step's per-token cost


class StageProfile:
    """An `ExecutionModel` with measured costs."""

    def __init__(self, machine: MeasuredCosts) -> None:
        self._machine = machine

    def work(self, batch: Batch) -> BatchCost:
        chunks = [Chunk(part.first_position, len(part.token_ids)) for part in batch.slices]
        parts = self._machine
        head_s = parts.last.batch_cost_s(chunks)
        return BatchCost(parts.layer.batch_cost_s(chunks), head_s, parts.step.plus(parts.first).batch_cost_s(chunks))


# ------------------------------------------------------------ workloads and runs


def draw(workload: FidelityWorkload, machine: Machine, span_s: float, seed: int) -> Trace:
    """Random requests of a workload over `span_s`. The rate is relative to the profiled time of a request: its prefill,
    plus its share of decode steps in batches that fill half of the KV.
    """
    execution, layers = machine.execution, machine.model.layer_count
    whole = execution.cost_of(layers, is_first=True, is_last=True)
    batch = _KV_REQUESTS // 2
    decode_s = whole.batch_cost_s([Chunk(workload.prompt_tokens, 1)] * batch) / batch
    request_s = whole.chunk_cost_s(Chunk(0, workload.prompt_tokens)) + workload.output_tokens * decode_s
    source, at_s, requests = random.Random(seed), 0.0, list[TraceRequest]()
    while True:
        bursts = workload.burst_load and 0.4 <= at_s / span_s < 0.6
        rate = (workload.burst_load if bursts else workload.load) * min(WORKERS, os.cpu_count() or 1) / request_s
        at_s += source.expovariate(rate)
        if at_s >= span_s:
            break
        prompt, output = (
            source.randint(mean // 2, mean * 3 // 2) for mean in (workload.prompt_tokens, workload.output_tokens)
        )
        requests.append(TraceRequest(at_s, prompt, output))
    return Trace(source=workload.name, format="drawn", requests=tuple(requests))


def cluster_of(
    model: Path, budget: int, worker_flags: Sequence[str], planner_flags: Sequence[str] = ()
) -> LocalCluster:
    flags = ["--block-size", str(BLOCK_TOKENS), "--max-num-seqs", str(SEQUENCES)]
    flags += ["--max-num-batched-tokens", str(BATCH_TOKENS), *worker_flags, "--device-memory-bytes", str(budget)]
    return LocalCluster(model, workers=WORKERS, flags={"worker": flags, "planner": planner_flags})


async def served(cluster: LocalCluster, trace: Trace, console: Console) -> PolicyResult:
    planner = cluster.processes["planner"][0].address
    job = ReplayJob(trace=trace, policy="drop")
    result = (await replay_on(cluster.address, job, console, planner=planner)).policies["drop"]
    await asyncio.sleep(8.0)  # until dropped layers are restored
    return result


def overheads(seen: Seen, machine: Machine, profile: CostProfile, budget: int) -> Overheads:
    """Overheads of the real path: measured times minus those predicted from the profile."""
    whole = machine.execution.cost_of(machine.model.layer_count, is_first=True, is_last=True)
    shared = contention((*seen.levels, *seen.pipelined), seen.background, os.cpu_count() or 1)
    step_s, sequence_s, together = fitted(seen.levels, whole, shared)
    request_s = max(0.0, seen.first_s - step_s - whole.chunk_cost_s(Chunk(0, PROMPT_TOKENS)))
    known = Overheads(step_s, request_s, sequence_s, contention=replace(shared, together=together))
    # The third level is left out, because prompts of other requests are in the pipeline there.
    missing_s = [level.tpot_s - pipelined_s(machine, profile, budget, known, level) for level in seen.pipelined[:2]]
    # Each token takes one message between the stages, and one back to the leader.
    return replace(known, hop_s=max(0.0, statistics.fmean(missing_s)) / WORKERS)


def pipelined_s(machine: Machine, profile: CostProfile, budget: int, known: Overheads, level: Level) -> float:
    """Simulated seconds between the tokens of a probe's requests in one pipeline."""
    probes = (TraceRequest(0.0, PROMPT_TOKENS, tokens_of(level.request_count)),) * level.request_count
    trace = Trace(source="probes", format="drawn", requests=probes)
    return simulated(machine, profile, budget, known, trace, "static-pipeline").tpot_s.mean or level.tpot_s


def told(seen: Seen, known: Overheads, machine: Machine, profile: CostProfile, budget: int) -> str:
    """Text with the results of the probes, their predictions, and the calibration factors."""
    shared = known.contention
    assert shared is not None, "measured"
    whole = machine.execution.cost_of(machine.model.layer_count, is_first=True, is_last=True)
    made = predicted(seen.levels, whole, shared, known.step_s, known.sequence_s)
    alone = replace(known, step_slowdown=1.0, prompt_slowdown=1.0)
    joined = {x.request_count: pipelined_s(machine, profile, budget, alone, x) for x in seen.pipelined}
    levels, pipelined = (
        ", ".join(
            f"{level.request_count}: {1e3 * level.tpot_s:.2f} ms ({1e3 * had[level.request_count]:.2f})" for level in of
        )
        for of, had in ((seen.levels, made), (seen.pipelined, joined))
    )
    return "\n".join(
        (
            f"lone requests, beyond the profile: {1e3 * known.step_s:.2f} ms a step, {1e3 * known.request_s:.2f} ms a"
            f" request; {1e3 * known.sequence_s:.2f} ms for each further sequence of a step",
            f"around the engines: {1e3 * shared.step_s:.2f} ms of a processor for a step, {1e3 * shared.token_s:.3f} ms"
            f" for a token, {shared.background:.2f} always; beside another engine steps take x {shared.together:.2f};"
            f" {1e3 * known.hop_s:.2f} ms for a message between stages; steps x {known.step_slowdown:.2f}, tokens of"
            f" prompts x {known.prompt_slowdown:.2f} besides",
            f"time between tokens of so many requests at once, seen (and as this has it): {levels};"
            f" in one pipeline {pipelined}",
        )
    )


def slowed(machine: Machine, known: Overheads) -> Machine:
    """The machine with the overhead per step and the slowdown factors of `known`."""
    measured = machine.execution
    assert isinstance(measured, MeasuredCosts)

    def of(cost: CostModel) -> CostModel:
        by_token, by_step = known.prompt_slowdown, known.step_slowdown
        return CostModel(
            cost.attention_s * by_token,
            cost.token_s * by_token,
            cost.chunk_s * by_step,
            cost.shared_s * by_step,
            cost.prefix_s * by_step,
            cost.many_s * by_step,
            cost.beyond_s * by_token,
            cost.knee_tokens,
        )

    each_s, more_s = max(known.step_s, known.sequence_s), known.sequence_s
    step = measured.step.plus(CostModel(0.0, 0.0, each_s, each_s - more_s))
    execution = MeasuredCosts(layer=of(measured.layer), step=of(step), first=of(measured.first), last=of(measured.last))
    return machine.model_copy(update={"execution": execution})


def calibrated(
    machine: Machine, profile: CostProfile, budget: int, alone: Overheads, trace: Trace, runs: Sequence[PolicyResult]
) -> Overheads:
    """Fit the overheads so that simulating the calibration run reproduces its measured mean TTFT and TPOT."""
    known = alone
    ttft_s = statistics.fmean(run.ttft_s.mean or 0.0 for run in runs)
    tpot_s = statistics.fmean(run.tpot_s.mean or 0.0 for run in runs)
    if not ttft_s or not tpot_s:
        raise ConfigError("--seconds", "the calibration run has ended no request; make it longer")
    for _ in range(_CALIBRATION_ROUNDS):
        seen = simulated(machine, profile, budget, known, trace)
        first, each = ttft_s / (seen.ttft_s.mean or ttft_s), tpot_s / (seen.tpot_s.mean or tpot_s)
        if max(abs(first - 1), abs(each - 1)) <= _CALIBRATED_WITHIN:
            break
        known = replace(
            known,
            step_slowdown=known.step_slowdown * each**_DAMPING,
            prompt_slowdown=known.prompt_slowdown * first**_DAMPING,
        )
    return known


def simulated(
    machine: Machine, profile: CostProfile, budget: int, known: Overheads, trace: Trace, policy: str = "drop"
) -> PolicyResult:
    machine = slowed(machine, known)
    outline = machine.model
    assert profile.link is not None
    assert isinstance(machine.execution, MeasuredCosts)
    spec = ModelSpec(
        name=outline.name,
        architecture=outline.architecture,
        parameter_count=outline.parameter_count,
        other_parameter_count=outline.other_parameter_bytes // _element_bytes(outline.dtype),
        layer_count=outline.layer_count,
        hidden_size=outline.hidden_size,
        attention_width=outline.hidden_size,
        kv_elements_per_token_layer=outline.kv_elements_per_token_layer * _element_bytes(outline.dtype) // 2,
        vocab_size=outline.vocab_size,
        max_model_len=outline.max_model_len,
        gpus_per_instance=1,
        source="measured here",
    )
    rate = profile.link.bandwidth_bytes_per_s
    gpu = Gpu(
        name=machine.name,
        memory_bytes=budget,
        flops_per_s=1.0,
        memory_bytes_per_s=1.0,
        scale_up_bytes_per_s=rate,
        nic_bytes_per_s=rate,
        host_bytes_per_s=rate,
        gpus_per_host=1,
        layer_floor_s=None,
        collective_latency_s=None,
        collective_fraction=None,
        source="measured here",
    )
    engine = emulate(machine, device_memory_bytes=budget, block_tokens=BLOCK_TOKENS)
    geometry = geometry_of(engine)
    figures = timings().model_copy(
        update={
            "link_latency_s": profile.link.latency_s + known.hop_s,
            "link_fraction": 1.0,
            "chunk_bytes": 512 * 1024.0,
            "remap_s": machine.remap_s_per_byte * budget / 2,
            "rpc_s": known.request_s / 2,  # simulated twice: to the worker and back
            "disk_bytes_per_s": machine.disk_bytes_per_s,
        }
    )
    options = WorldOptions(
        model=spec,
        cluster=Cluster(gpu=gpu, gpu_count=WORKERS, gpus_per_host=1),
        timings=figures,
        rules=find_policy(policy)(
            production_rules(
                WorkerSize(block_tokens=BLOCK_TOKENS, max_running_count=SEQUENCES, max_batch_tokens=BATCH_TOKENS)
            )
        ),
        execution=StageProfile(machine.execution),
        geometries=(geometry,),
        contention=known.contention,
    )
    arrivals = [Arrival(r.arrival_s, r.input_tokens, r.output_tokens) for r in trace.requests]
    return policy_result(replay_run(World(options, arrivals).run()), policy)


def geometry_of(engine: EmulatedEngine) -> Geometry:
    """Geometry of a real worker's memory, taken from the emulated one: the same code lays out both."""
    info, pool = engine.info, engine.memory.pool
    return Geometry(
        pool.extent_bytes,
        pool.extent_count,
        info.layer_count,
        info.layer_parameter_bytes[0] // pool.extent_bytes,
        info.other_parameter_bytes // pool.extent_bytes,
        info.block_bytes,
        pool.budget_bytes - pool.extent_count * pool.extent_bytes,
    )


def _element_bytes(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


# ------------------------------------------------------------ the report

Results = Mapping[str, Mapping[str, PolicyResult]]  # workload -> system -> result


def drops(result: PolicyResult) -> int:
    return sum(one.kind == "drop" and one.phase == "done" for one in result.transitions)


def differences(results: Mapping[str, PolicyResult], system: str) -> dict[str, float]:
    """Relative differences between the results of `system` and the real ones: mean and P99 of TTFT and TPOT."""

    def share(of: Summary, real: Summary, figure: str) -> float:
        here, there = getattr(of, figure), getattr(real, figure)
        return here / there - 1 if here is not None and there else float("nan")

    mine, real = results[system], results["real"]
    return {
        f"{name} {figure}": share(getattr(mine, field), getattr(real, field), figure)
        for name, field in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"))
        for figure in _GOALS
    }


def table(results: Results) -> tuple[Table, bool]:
    """The table, and whether the simulation meets all goals."""
    shown = Table(title="Against the real run", box=None, padding=(0, 2, 0, 0))
    for column in ("workload", "", "TTFT mean", "TTFT p99", "TPOT mean", "TPOT p99", "drops", "requests"):
        shown.add_column(column, justify="left" if column in ("workload", "") else "right")
    reached = True
    for workload, of in results.items():
        for system in SYSTEMS:
            result = of[system]
            off = differences(of, system)
            cells = [
                f"{1e3 * (getattr(summary, figure) or 0.0):,.1f} ms"
                + ("" if system == "real" else f" {off[f'{name} {figure}']:+.0%}")
                for name, summary in (("TTFT", result.ttft_s), ("TPOT", result.tpot_s))
                for figure in _GOALS
            ]
            shown.add_row(workload, system, *cells, str(drops(result)), str(result.request_count))
        off = differences(of, "simulated")
        reached &= all(abs(share) <= _GOALS[name.split()[1]] for name, share in off.items())
        reached &= drops(of["simulated"]) == drops(of["real"])
    return shown, reached


async def measured(args: argparse.Namespace, folder: Path, console: Console) -> Results:
    checkpoint = make_preset("ballast", folder / "ballast")
    profile_file = args.profile or folder / "profile.json"
    if args.profile is None:
        command = [sys.executable, "-m", "services.worker.profiling", "--model", str(checkpoint)]
        command += ["--out", str(profile_file), "--dtype", "auto", "--device", "cpu", "--threads", "1"]
        command += ["--max-num-batched-tokens", str(BATCH_TOKENS), "--max-num-seqs", str(SEQUENCES), "--rounds", "3"]
        measure(console, [*command, "--seconds", str(args.profile_seconds)])
    profile = read_profile(profile_file)
    machine = emulated_model(folder / "emulated", str(profile_file), checkpoint, 1 << 30).machine
    outline = machine.model
    mean = max(w.prompt_tokens + w.output_tokens for w in WORKLOADS)
    token_bytes = outline.kv_elements_per_token_layer * outline.layer_count * _element_bytes(outline.dtype)
    kv_bytes = _KV_REQUESTS * mean * token_bytes
    budget = (
        int(1.02 * (outline.layer_count * outline.layer_parameter_bytes + outline.other_parameter_bytes)) + kv_bytes
    )
    flags = ["--cost-profile", str(profile_file)]
    first = draw(CALIBRATION, machine, args.seconds, args.seed + _CALIBRATION_SEED)

    async def look(cluster: LocalCluster) -> tuple[Seen, PolicyResult]:
        console.print("probing with some requests at a time ...")
        return await probe(cluster), await served(cluster, first, console)

    def known_from(looks: Sequence[tuple[Seen, PolicyResult]]) -> Overheads:
        then = at_times(seen, [at for at, _ in looks])
        alone = overheads(then, machine, profile, budget)
        found = calibrated(machine, profile, budget, alone, first, [run for _, run in looks])
        console.print(told(then, found, machine, profile, budget))
        return found

    async with cluster_of(checkpoint, budget, flags) as cluster:
        lone, before = await look(cluster)
    async with cluster_of(checkpoint, budget, flags, _ONE_PIPELINE) as cluster:
        console.print("probing one pipeline ...")
        seen = replace(lone, pipelined=await probe_pipeline(cluster, lone.background))
    known = known_from([(seen, before)])
    # Rates follow from measurements, so that the load is as intended on a busy machine as well.
    asked = [workload for workload in WORKLOADS if workload.name in args.workloads]
    traces = {w.name: draw(w, slowed(machine, known), args.seconds, args.seed) for w in asked}
    real: dict[str, PolicyResult] = {}
    simulations: dict[str, PolicyResult] = {}
    async with cluster_of(checkpoint, budget, flags) as cluster:
        looks = [await look(cluster)]
        for name, trace in traces.items():
            real[name] = await served(cluster, trace, console)
            looks.append(await look(cluster))
            console.print(f"around {name}:")
            simulations[name] = simulated(machine, profile, budget, known_from(looks[-2:]), trace)
    known = known_from(looks)
    # The emulated worker runs the real code, which already includes the overhead per step. Other processes slow a real
    # engine down but not the emulated one, which only waits.
    file = write_machine(folder / "machine.json", slowed(machine, replace(known, step_s=0.0, sequence_s=0.0)))
    async with cluster_of(checkpoint, budget, ["--engine", "emulated", "--profile", str(file)]) as cluster:
        emulated = {name: await served(cluster, trace, console) for name, trace in traces.items()}
    return {name: {"real": real[name], "emulated": emulated[name], "simulated": simulations[name]} for name in traces}


def save(out: Path, results: Results) -> None:
    """Write a figure with the mean and P99 of each system, and all results as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    kept = {w: {s: r.model_dump(mode="json") for s, r in of.items()} for w, of in results.items()}
    (out / "results.json").write_text(json.dumps(kept), encoding="utf-8")
    matplotlib.rcParams.update(RC)
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes: Any = figure.subplots(2, 2)  # Any: matplotlib's stubs leave the element type open
    for row, (name, field) in zip(axes, (("TTFT", "ttft_s"), ("TPOT", "tpot_s")), strict=True):
        for panel, what in zip(row, _GOALS, strict=True):
            for place, (system, colour) in enumerate(zip(SYSTEMS, (BLUE, ORANGE, GREEN), strict=True)):
                heights = [1e3 * (getattr(getattr(of[system], field), what) or 0.0) for of in results.values()]
                positions = [number + 0.27 * (place - 1) for number in range(len(results))]
                panel.bar(positions, heights, width=0.25, color=colour, label=system)
            panel.set_xticks(range(len(results)), list(results))
            panel.set_ylabel(f"{what} {name} [ms]")
    axes[0][0].legend()
    figure.savefig(out / "figure.png", dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="profile of the preset `ballast` on this machine")
    parser.add_argument("--profile-seconds", type=float, default=30.0, help="time to measure without --profile")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each workload")
    parser.add_argument("--seed", type=int, default=1)
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, help="folder for figure and results")
    args = parser.parse_args()
    console = Console(width=140)
    with tempfile.TemporaryDirectory(prefix="ballast-fidelity-") as folder:
        results = asyncio.run(measured(args, Path(folder), console))
    shown, reached = table(results)
    console.print(shown)
    console.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    console.print("goals reached" if reached else "goals missed: mean within 15 %, p99 within 30 %, as many drops")
    if args.out is not None:
        save(args.out, results)
        console.print(f"written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

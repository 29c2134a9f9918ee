"""`ballast bench overload`: compares overload policies on the same arrivals, each run on a fresh cluster.

1. *Plan.* For each workload, lengths are shortened to a mean that suits the machine, and memory is sized for a number
   of such requests. Workers with that memory report how much of it they can use, and two probes measure the machine's
   speed with few requests and with a full cache. The arrival rate is then scaled (`tools.bench.upscale`) so that the
   forecast KV demand is a given share of the cluster's KV capacity without dropping. In KunServe's setup that share is
   below 60 % on average, so that only bursts overflow.
2. *Runs.* For each repetition and each workload, every policy runs once, in an order that rotates.
   Each run has a fresh cluster, is warmed up with requests that do not count, and writes one result file.

With emulated workers (`tools.bench.emulation`) the plan measures nothing, and scales arrivals and lengths of the trace
only if requested; memory is the GPU's.

The plan is stored in `plan.json`. A second call with the same arguments skips finished runs; policies, workloads and
repetitions may be added.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ballast.client import AsyncClient
from ballast.common.errors import BallastError, ConfigError, Unavailable
from ballast.common.units import duration
from tools.bench.emulation import Emulation, ProcessorUsage, why_void, with_effort, with_settings
from tools.bench.overload_plan import (
    ComparisonArguments,
    WorkloadPlan,
    describe_plan,
    read_plan,
    run_s,
    setting_variable,
    write_plan,
)
from tools.bench.policies import PolicySpec
from tools.bench.probe import PROBE_S, probe, warm_up
from tools.bench.progress import ComparisonDisplay
from tools.bench.records import RequestOutcome
from tools.bench.replay import ReplayOptions, ReplayProgress
from tools.bench.results import BenchResult, ComparisonFacts, read_result, write_result
from tools.bench.session import ClusterSettings, ReplayJob, replay_on
from tools.bench.sizing import (
    SizingForecast,
    SizingMemory,
    SizingPace,
    Speed,
    forecast_shared,
    length_scales_to,
    mean_request,
    rate_for,
    size_memory_for,
)
from tools.bench.traces import Trace
from tools.bench.upscale import upscaled
from tools.bench.workloads import Workload
from tools.local.cluster import LocalCluster
from tools.model.info import read_info

_FEW_PER_WORKER = 2  # requests per worker in the first of the two probes
_WARMUP_ROUNDS = 3
_WARMUP_ANSWER_TOKENS = 16  # a longer answer would not warm up any more code
_LAYOUT_WITHIN_S = 60.0
_SIZING_ATTEMPTS = 4
_ENOUGH = 0.95  # acceptable fraction of the intended memory
_REST_S = 0.5
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    workload: Workload
    spec: PolicySpec
    repetition: int
    position: int

    def path(self, out: Path) -> Path:
        label = "".join(c if c.isalnum() or c in "-=." else "_" for c in self.spec.label)
        return out / "runs" / self.workload.name / f"{label}.{self.repetition}.json"


def order_of(workloads: list[Workload], specs: list[PolicySpec], repetitions: int) -> list[Run]:
    """All runs in order. Policies alternate, and repetitions begin with different ones, so that drift favours none."""
    runs: list[Run] = []
    for repetition in range(repetitions):
        turn = repetition % len(specs)
        for workload in workloads:
            for spec in specs[turn:] + specs[:turn]:
                runs.append(Run(workload, spec, repetition, len(runs)))
    return runs


class OverloadComparison:
    """A comparison: the plan and the runs of one output folder."""

    def __init__(
        self,
        model: Path | Emulation,
        arguments: ComparisonArguments,
        out: Path,
        console: Console,
        probe_s: float = PROBE_S,
    ) -> None:
        """`model`: folder of a checkpoint, or an emulated machine. `probe_s`: duration of a probe."""
        self._emulation = model if isinstance(model, Emulation) else None
        self._info = model.info if isinstance(model, Emulation) else read_info(model)
        self._probe_s = probe_s
        self._arguments = arguments
        self._out = out
        self._console = console
        self._plan = read_plan(out / "plan.json", arguments)
        self._traces: dict[str, Trace] = {}

    async def run(self, workloads: list[Workload], specs: list[PolicySpec], repetitions: int) -> list[str]:
        """Plan, and execute unfinished runs. Returns the errors; the last is "interrupted" after Ctrl-C."""
        for workload in workloads:
            await self._prepare(workload)
        runs = order_of(workloads, specs, repetitions)
        left = [run for run in runs if not self._finished(run)]
        if len(left) < len(runs):
            self._console.print(f"{len(runs) - len(left)} of {len(runs)} runs are finished already")
        problems: list[str] = []
        spans_s = [run_s(self._plan.workloads[run.workload.name].span_s) for run in left]
        with ComparisonDisplay(self._console, spans_s) as display:
            for run in left:
                title = f"{run.workload.name} · {run.spec.label} · repetition {run.repetition + 1}"
                display.begin(title)
                try:
                    result = await self._carry_out(run, display)
                except BallastError as error:
                    problems.append(f"{title}: {error}")
                    display.say(f"FAILED {title}: {error}")
                    continue
                finally:
                    display.end()
                if not result.complete:
                    return [*problems, "interrupted"]
                write_result(run.path(self._out), result)
                display.say(describe_run(title, result))
        return problems

    def _finished(self, run: Run) -> bool:
        try:
            result = read_result(run.path(self._out))
        except ConfigError:
            return False
        facts = result.comparison
        return result.complete and facts is not None and facts.plan_digest == self._digest(run.workload)

    def _digest(self, workload: Workload) -> str:
        text = self._plan.arguments.model_dump_json() + self._plan.workloads[workload.name].model_dump_json()
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # ------------------------------------------------------------ plan

    async def _prepare(self, workload: Workload) -> None:
        """Prepare the trace of a workload. Its sizes and scales are measured unless the plan contains them.

        Raises:
            ConfigError: the plan has another workload of this name, or the trace has changed since.
        """
        plan = self._plan.workloads.get(workload.name)
        if plan is None:
            plan = await self._measure(workload)
            self._plan.workloads[workload.name] = plan
            write_plan(self._out / "plan.json", self._plan)
        elif plan.word != workload.word:
            raise ConfigError(str(self._out), f"{workload.name!r} was {plan.word!r} there; choose another --out")
        lengths = (plan.length_scale, plan.answer_scale)
        trace = self._scaled(workload.trace, self._time_scale(workload), lengths, plan.rate_factor)
        self._traces[workload.name] = trace
        if len(trace.requests) != plan.request_count:
            raise ConfigError(workload.word, f"has changed since it was planned in {self._out}; choose another --out")

    def _time_scale(self, workload: Workload) -> float:
        """Factor on arrival times that makes the workload last `--span-s`. The rate is then scaled to the demand."""
        span_s = self._arguments.span_s
        return 1.0 if span_s is None or not workload.base.span_s else span_s / workload.base.span_s

    def _scaled(
        self, trace: Trace, time_scale: float, lengths: tuple[float, float | None], rate_factor: float
    ) -> Trace:
        """The trace with scaled times, lengths and rate. `lengths`: factors for prompts and for answers."""
        scaled = trace.scaled(
            time_scale=time_scale,
            length_scale=lengths[0],
            answer_scale=lengths[1],
            max_total_tokens=self._info.max_model_len,
        )
        return upscaled(scaled, rate_factor, self._arguments.seed)

    async def _measure(self, workload: Workload) -> WorkloadPlan:
        arguments, info = self._arguments, self._info
        time_scale = self._time_scale(workload)
        lengths = (1.0, None)
        if arguments.mean_tokens is not None:
            lengths = length_scales_to(workload.base, arguments.mean_tokens, arguments.answer_share)
        trace = self._scaled(workload.base, time_scale, lengths, 1.0)
        if self._emulation is not None:
            device_memory_bytes = self._emulation.memory_bytes
            undropped_tokens = arguments.workers * self._emulation.capacity_tokens
            speed = self._emulation.speed(*mean_request(trace.requests), arguments.workers)
        else:
            memory = size_memory_for(
                info, trace.requests, sequences_each=arguments.sequences_each, workers=arguments.workers
            )
            self._console.print(f"{workload.name}: probing the machine ...")
            speed, device_memory_bytes, undropped_tokens = await self._probe(trace, memory)
        rate = 1.0
        if arguments.demand_fraction is not None:
            limit = SizingForecast(
                arguments.demand_fraction * undropped_tokens, arguments.peak_fraction * undropped_tokens
            )
            rate = rate_for(trace, speed, limit, arguments.seed)
        final = self._scaled(workload.trace, time_scale, lengths, rate)
        demand = forecast_shared(final.requests, speed)
        plan = WorkloadPlan(
            word=workload.word,
            length_scale=lengths[0],
            answer_scale=lengths[1],
            rate_factor=rate,
            span_s=final.span_s,
            request_count=len(final.requests),
            device_memory_bytes=device_memory_bytes,
            undropped_tokens=undropped_tokens,
            few_tokens_per_s=speed.few.output_tokens_per_s,
            full_tokens_per_s=speed.full.output_tokens_per_s,
            forecast_demand_fraction=demand.mean_tokens / undropped_tokens,
            forecast_peak_fraction=demand.peak_tokens / undropped_tokens,
        )
        self._console.print(describe_plan(workload.name, plan))
        return plan

    async def _probe(self, trace: Trace, memory: SizingMemory) -> tuple[Speed, int, int]:
        """Measure the speed. Returns (speed, device memory of a worker in bytes, KV tokens of all workers).

        Workers use whole extents, the same number for each layer, and leave the remainder unused, which with little
        memory may be half of it. They are given more until the intended capacity is reached.
        """
        device_memory_bytes, meant_tokens = memory.device_memory_bytes, memory.undropped_tokens
        for attempts_left in reversed(range(_SIZING_ATTEMPTS)):
            capacity_tokens = 0
            try:
                async with self._cluster(PolicySpec("recompute", "recompute"), device_memory_bytes, "probe") as cluster:
                    capacity_tokens = await wait_at_rest(cluster.address, 1)
                    if capacity_tokens >= _ENOUGH * meant_tokens or not attempts_left:
                        speed = await self._pace(cluster.address, trace, capacity_tokens)
                        return speed, device_memory_bytes, capacity_tokens
            except ConfigError as error:  # too little memory for one block of each layer
                if not attempts_left or "device_memory_bytes" not in str(error):
                    raise
            lacking_tokens = meant_tokens - capacity_tokens
            device_memory_bytes += lacking_tokens * self._info.kv_bytes_per_token() // self._arguments.workers
        raise AssertionError("the last attempt returns or raises")

    async def _pace(self, address: str, trace: Trace, undropped_tokens: int) -> Speed:
        input_tokens, output_tokens = mean_request(trace.requests)
        workers = self._arguments.workers
        full = max(workers, undropped_tokens // (input_tokens + output_tokens))
        few = min(_FEW_PER_WORKER * workers, max(1, full - 1))
        paces: list[SizingPace] = []
        for concurrency in (few, full):
            pace = await probe(
                address,
                concurrency=concurrency,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                probe_s=self._probe_s,
            )
            paces.append(pace)
        return Speed(few, paces[0], full, paces[1])

    # ------------------------------------------------------------ runs

    def _cluster(self, spec: PolicySpec, device_memory_bytes: int, name: str) -> LocalCluster:
        flags = spec.flags()
        if self._emulation is not None:
            flags["worker"] = [*self._emulation.worker_flags, *flags["worker"]]
        if "max-num-seqs" not in spec.knobs and self._arguments.max_num_seqs is not None:
            flags["worker"] += ["--max-num-seqs", str(self._arguments.max_num_seqs)]
        environ = {setting_variable(key): value for key, value in self._arguments.settings.items()}
        return LocalCluster(
            self._info.path,
            workers=self._arguments.workers,
            device_memory_bytes=device_memory_bytes,
            flags=flags,
            environ={"OMP_NUM_THREADS": "1", **environ},
            log_dir=self._out / "logs" / name,
        )

    async def _carry_out(self, run: Run, display: ComparisonDisplay) -> BenchResult:
        arguments, plan = self._arguments, self._plan.workloads[run.workload.name]
        last_token = self._emulation.last_token if self._emulation is not None else None
        options = ReplayOptions(seed=arguments.seed, deadline_s=arguments.deadline_s, last_token=last_token)
        job = ReplayJob(trace=self._traces[run.workload.name], options=options, policy=run.spec.label)
        settings = _settings(arguments, plan)
        log_name = f"{run.workload.name}/{run.path(self._out).stem}"
        cluster = self._cluster(run.spec, plan.device_memory_bytes, log_name)
        result = await run_on(cluster, run.spec, job, self._console, settings, display.on_progress)
        if self._emulation is not None:
            result = with_effort(result, cluster.log_dir)
            if why := why_void(result):
                raise Unavailable("this machine", f"could not keep up, so the run is void: {why}")
        facts = ComparisonFacts(
            workload=run.workload.name,
            policy=run.spec.label,
            overload_policy=run.spec.policy,
            knobs=dict(run.spec.knobs),
            repetition=run.repetition,
            position=run.position,
            warmup_request_count=_WARMUP_ROUNDS * arguments.workers,
            undropped_kv_bytes=plan.undropped_tokens * self._info.kv_bytes_per_token(),
            forecast_demand_fraction=plan.forecast_demand_fraction,
            plan_digest=self._digest(run.workload),
        )
        lengths = {"length_scale": plan.length_scale, "answer_scale": plan.answer_scale}
        scales = {**lengths, "time_scale": self._time_scale(run.workload)}
        info = result.trace.model_copy(update=scales)
        return result.model_copy(update={"comparison": facts, "trace": info})


def _settings(arguments: ComparisonArguments, plan: WorkloadPlan) -> dict[str, str | int | float | bool | None]:
    return {
        "workers": arguments.workers,
        "device_memory_bytes": plan.device_memory_bytes,
        "max_num_seqs": arguments.max_num_seqs,
        **({} if arguments.gpu is None else {"gpu": arguments.gpu}),
        **arguments.settings,
    }


def is_formed(sizes: Sequence[int], degree: int) -> bool:
    """True if groups have `degree` members each, except for fewer than `degree` instances that serve alone."""
    return {*sizes} <= {1, degree} and (degree == 1 or sizes.count(1) < degree)


async def wait_at_rest(address: str, degree: int) -> int:
    """Wait until the cluster has been idle for half a second with the policy's initial groups (`is_formed`), so that an
    overload caused by the last request is over. Return the KV capacity in tokens.
    """
    give_up_at_s = time.monotonic() + _LAYOUT_WITHIN_S
    at_rest_since_s: float | None = None
    async with AsyncClient(address) as client:
        while True:
            status, now_s = await client.status(), time.monotonic()
            loads = [group.load for group in status.groups]
            sizes = [len(group.members) for group in status.groups]
            if loads and is_formed(sizes, degree) and not status.running_request_count and None not in loads:
                at_rest_since_s = now_s if at_rest_since_s is None else at_rest_since_s
                if now_s - at_rest_since_s >= _REST_S:
                    return sum(group.capacity_tokens for group in status.groups)
            else:
                at_rest_since_s = None
            if now_s > give_up_at_s:
                raise Unavailable("the cluster", f"is not at rest within {_LAYOUT_WITHIN_S:g} s; group sizes: {sizes}")
            await asyncio.sleep(_POLL_S)


async def run_on(
    cluster: LocalCluster,
    spec: PolicySpec,
    job: ReplayJob,
    console: Console,
    settings: ClusterSettings,
    display: Callable[[ReplayProgress], None],
) -> BenchResult:
    """Start the cluster, warm it up and replay the job's trace on it. The result's settings include the average numbers
    of busy processors.
    """
    assert isinstance(job.trace, Trace), "read and scaled"
    input_tokens, output_tokens = mean_request(job.trace.requests)
    async with cluster:
        await wait_at_rest(cluster.address, spec.pipeline_degree)
        await warm_up(
            cluster.address,
            lanes=len(cluster.processes["worker"]),
            rounds=_WARMUP_ROUNDS,
            input_tokens=input_tokens,
            output_tokens=min(output_tokens, _WARMUP_ANSWER_TOKENS),
        )
        await wait_at_rest(cluster.address, spec.pipeline_degree)
        planner = cluster.processes["planner"][0].address
        usage = ProcessorUsage(cluster)
        result = await replay_on(cluster.address, job, console, settings, planner=planner, display=display)
        return with_settings(result, usage.cores())


def describe_run(title: str, result: BenchResult) -> str:
    (policy,) = result.policies.values()
    unserved = policy.request_count - policy.outcomes.get(RequestOutcome.FINISHED, 0)
    return (
        f"{title}: TTFT {duration(policy.ttft_s.p50)} at the median, {duration(policy.ttft_s.p99)} at P99; TPOT"
        f" {duration(policy.tpot_s.p50)}; {policy.duration_s:.0f} s" + (f"; {unserved} not served" if unserved else "")
    )

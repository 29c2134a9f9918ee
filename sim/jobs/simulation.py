"""Simulates a trace on a model and a cluster, and makes the result file.

Services use their default settings, except for sizes whose defaults suit CPUs (requests and tokens per step).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pydantic import ByteSize, TypeAdapter, ValidationError

from ballast.common.errors import ConfigError
from ballast.common.sampling import PriorityClass
from services.dispatcher.config import DispatcherSettings
from services.dispatcher.core.backlog import Order
from services.dispatcher.core.limits import Limits
from services.dispatcher.core.placement import PlacementRules
from services.dispatcher.policy.freeness import RoutingRules
from services.monitor.config import MonitorSettings
from services.monitor.core.machine import TICK_S, MonitorRules, pressure_rules
from services.planner.config import PlannerSettings
from services.planner.core.conductor import ConductorRules
from services.planner.core.machine import PlannerRules
from services.planner.core.record import TransitionRecord
from services.planner.core.stages import CoordinatorRules
from services.planner.policy.compare import ComparisonTargets
from services.planner.policy.migrate import MigrationRules
from services.worker.config import WorkerSettings
from services.worker.policy.step_limits import step_limits
from sim.clients import Arrival
from sim.dispatcher import DispatcherRules
from sim.faults import Fault
from sim.hardware import Cluster, ModelSpec, Timings, timings
from sim.jobs.settled import prompt_share, reading_is_short
from sim.offline import OfflineLoad
from sim.policies import DEFAULT_SWAP_BYTES, find_policy
from sim.results import Outcome as SimOutcome
from sim.results import SimRun, SimSample
from sim.rules import ClusterRules, WorkerRules
from sim.world import World, WorldOptions, instance_count
from tools.bench.environment import describe_environment
from tools.bench.policies import PolicySpec, parse_policies
from tools.bench.records import BenchRecord, PlannerTransition, ReplayRun, RequestOutcome, StatusSample, TimedTransition
from tools.bench.results import (
    BenchConfig,
    BenchResult,
    ModelFacts,
    PolicyResult,
    TraceInfo,
    policy_result,
)
from tools.bench.traces import Trace

Progress = Callable[[str, int, float], None]  # (policy, requests ended, time in the trace)

_DROP = "drop"  # Ballast's policy; the others are baselines
_OUTCOMES = {
    SimOutcome.FINISHED: RequestOutcome.FINISHED,
    SimOutcome.REFUSED: RequestOutcome.REFUSED,
    SimOutcome.DEADLINE: RequestOutcome.DEADLINE,
    SimOutcome.FAILED: RequestOutcome.FAILED,
    SimOutcome.OPEN: RequestOutcome.CANCELLED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSize:
    """Defaults of the benchmarks: vLLM's on such GPUs, and KunServe's blocks (EuroSys '26, section 5.1)."""

    block_tokens: int = 64
    max_running_count: int = 256
    max_batch_tokens: int = 2048
    lookahead: bool = True
    tpot_target_s: float | None = None  # None: no target

    @staticmethod
    def of(cluster: Cluster, *, sequences: int | None = None, tokens: int | None = None) -> "WorkerSize":
        """The size that workers on the cluster's smallest GPU have. Arguments other than None take precedence."""
        smallest_bytes = min(kind.gpu.memory_bytes for kind in cluster.kinds)
        limits = step_limits(smallest_bytes, sequences=sequences, tokens=tokens)
        return WorkerSize(max_running_count=limits.sequences, max_batch_tokens=limits.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimJob:
    trace: Trace  # scaled, and truncated to the model's context
    model: ModelSpec
    cluster: Cluster
    policies: Sequence[str]
    seed: int = 0
    deadline_s: float = 3600.0
    worker: WorkerSize = field(default_factory=WorkerSize)
    timings: Timings = field(default_factory=timings)
    check_every: int = 0
    faults: Sequence[Fault] = ()
    stop_after_s: float | None = None  # time in the trace; later requests stay open
    time_scale: float = 1.0
    length_scale: float = 1.0
    answer_scale: float | None = None
    limit: int | None = None
    offline: OfflineLoad | None = None  # load in addition to the trace
    classes: Sequence[PriorityClass] = (PriorityClass.DEFAULT,)  # assigned to the trace's requests in turn


def production_rules(worker: WorkerSize) -> ClusterRules:
    """Rules of services with default settings."""
    monitor = MonitorSettings.model_construct()
    planner = PlannerSettings.model_construct()
    defaults = WorkerSettings.model_fields
    dispatcher = {name: info.default for name, info in DispatcherSettings.model_fields.items()}
    return ClusterRules(
        monitor=_monitor_rules(monitor, defaults["report_interval_s"].default),
        planner=PlannerRules(
            transitions=ConductorRules(
                pipeline_degree=planner.pipeline_degree,
                restores=planner.restore,
                coordinator=CoordinatorRules(restore_prepare_timeout_s=planner.restore_timeout_s),
            ),
        ),
        dispatcher=DispatcherRules(
            Limits(
                max_queued_request_count=dispatcher["max_num_queued_reqs"],
                max_queued_token_count=dispatcher["max_num_queued_tokens"],
                max_offline_queued_count=dispatcher["max_offline_queued"],
                replay_limit=dispatcher["replay_limit"],
                no_worker_timeout_s=dispatcher["no_worker_timeout_s"],
            ),
            PlacementRules(
                order=Order(dispatcher["queue_order"]),
            ),
            RoutingRules(
                growth_tokens=dispatcher["growth_tokens"],
            ),
        ),
        worker=WorkerRules(
            block_tokens=worker.block_tokens,
            max_running_count=worker.max_running_count,
            max_batch_tokens=worker.max_batch_tokens,
            max_waiting_count=worker.max_running_count,
            max_waiting_tokens=defaults["max_num_queued_tokens"].default,
            admission_reserve_fraction=defaults["admission_reserve_fraction"].default,
            report_interval_s=defaults["report_interval_s"].default,
            lookahead=worker.lookahead,
            tpot_target_s=worker.tpot_target_s,
        ),
        migrations=MigrationRules(
            balances=False,
            below_tokens=planner.migrate_below_tokens,
            above_tokens=planner.migrate_above_tokens,
        ),
        monitor_tick_s=TICK_S,
    )


def _monitor_rules(settings: MonitorSettings, report_interval_s: float) -> MonitorRules:
    """The monitor's rules, with no more samples per instance than decisions need."""
    pressure = pressure_rules(
        overload_threshold_fraction=settings.overload_threshold_fraction,
        relief_threshold_fraction=settings.relief_threshold_fraction,
        dwell_s=settings.dwell_s,
    )
    return MonitorRules(
        lease_s=settings.lease_s,
        history_length=math.ceil(pressure.trend_window_s / report_interval_s) + 2,
        pressure=pressure,
    )


def simulate(job: SimJob, created_unix_s: float, progress: Progress | None = None) -> BenchResult:
    """Run each policy once.

    Raises:
        ConfigError: a policy is unknown, or the model does not fit.
    """
    ruled = {spec.label: rules for spec, rules in specs_of(job)}  # validates all before the first run
    runs: dict[str, SimRun] = {}
    for name, rules in ruled.items():
        told = None if progress is None else partial(progress, name)
        runs[name] = world_of(job, rules).run(told)
    return _result(job, runs, created_unix_s)


def world_of(job: SimJob, rules: ClusterRules, arrivals: Sequence[Arrival] | None = None) -> World:
    """The world of a job under these rules. `arrivals` replace those of the job's trace."""
    return World(_options(job, rules), arrivals_of(job.trace) if arrivals is None else arrivals)


def arrivals_of(trace: Trace) -> list[Arrival]:
    return [Arrival(r.arrival_s, r.input_tokens, r.output_tokens) for r in trace.requests]


def _options(job: SimJob, rules: ClusterRules) -> WorldOptions:
    return WorldOptions(
        model=job.model,
        cluster=job.cluster,
        timings=job.timings,
        rules=rules,
        seed=job.seed,
        deadline_s=job.deadline_s,
        check_every=job.check_every,
        faults=job.faults,
        stop_after_s=job.stop_after_s,
        offline=job.offline,
        classes=job.classes,
    )


def specs_of(job: SimJob) -> list[tuple[PolicySpec, ClusterRules]]:
    """The job's policies with their rules.

    Raises:
        ConfigError: a policy or knob is unknown, or a value is invalid.
    """
    plain = production_rules(job.worker)
    found: list[tuple[PolicySpec, ClusterRules]] = []
    for word in job.policies:
        find_policy(word.split(":")[0])  # raises an error that lists the known ones
        spec = parse_policies(word)[0]
        found.append((spec, with_knobs(spec, find_policy(spec.policy)(plain))))
    labels = [spec.label for spec, _ in found]
    if len(set(labels)) < len(labels):
        raise ConfigError("policy", f"is named twice: {', '.join(labels)}; a knob label=NAME tells them apart")
    return found


def with_knobs(spec: PolicySpec, rules: ClusterRules) -> ClusterRules:
    """The rules with a policy's knobs applied. By default static pipelines form microbatches by token counts, like the
    systems they represent.
    """
    worker, transitions, knobs = rules.worker, rules.planner.transitions, dict(spec.knobs)
    if spec.policy == "static-pipeline":
        knobs.setdefault("microbatching", "token-count")
    for name, value in knobs.items():
        setting = f"{name}={value}"
        match name:
            case "watermark":
                worker = replace(worker, admission_reserve_fraction=_number(setting))
            case "max-num-seqs":
                worker = replace(worker, max_running_count=_count(setting))
            case "tpot-target-s":
                worker = replace(worker, tpot_target_s=_number(setting))
            case "max-num-batched-tokens":
                worker = replace(worker, max_batch_tokens=_count(setting))
            case "block-size":
                worker = replace(worker, block_tokens=_count(setting))
            case "swap-space":
                worker = replace(worker, swap_space_bytes=_bytes(setting))
            case "swap-blocks-per-step":
                worker = replace(worker, swap_blocks_per_step=_count(setting, 0))
            case "fallback":
                swaps = _switch(setting, "swap", "recompute")
                worker = replace(
                    worker, swap_space_bytes=(worker.swap_space_bytes or DEFAULT_SWAP_BYTES) if swaps else 0
                )
            case "offline-slowdown":
                worker = replace(worker, offline_slowdown=_number(setting))
            case "microbatching":
                worker = replace(worker, lookahead=_switch(setting, "lookahead", "token-count"))
            case "migrate-below":
                rules = replace(rules, migrations=replace(rules.migrations, below_tokens=_number(setting)))
            case "migrate-above":
                rules = replace(rules, migrations=replace(rules.migrations, above_tokens=_number(setting)))
            case "degree":
                transitions = replace(transitions, pipeline_degree=_count(setting))
            case "ttft-target-s":
                planning = replace(transitions.planning, targets=ComparisonTargets(ttft_s=_seconds(setting)))
                transitions = replace(transitions, planning=planning)
            case "park":
                sizing = replace(transitions.sizing, parks=_switch(setting, "on", "off"))
                transitions = replace(transitions, sizing=sizing)
            case "restore":
                transitions = replace(transitions, restores=_switch(setting, "on", "off"))
            case "queue-order":
                found = _choice(setting, [order.value for order in Order])
                placement = replace(rules.dispatcher.placement, order=Order(found))
                rules = replace(rules, dispatcher=replace(rules.dispatcher, placement=placement))
            case "transfers":
                rules = replace(rules, coordinated=_switch(setting, "coordinated", "naive"))
            case _:
                raise ConfigError("policy", f"{setting}: is not simulated")
    return replace(rules, worker=worker, planner=replace(rules.planner, transitions=transitions))


def _switch(setting: str, yes: str, no: str) -> bool:
    return _choice(setting, [yes, no]) == yes


def _seconds(setting: str) -> float:
    if not 0.0 < (seconds := _number(setting)) < math.inf:
        raise ConfigError("policy", f"{setting}: must be a positive number of seconds")
    return seconds


def _choice(setting: str, values: Sequence[str]) -> str:
    name, _, value = setting.partition("=")
    if value not in values:
        raise ConfigError("policy", f"{name} is {' or '.join(values)}, got {value!r}")
    return value


def _number(setting: str) -> float:
    name, _, value = setting.partition("=")
    try:
        return float(value)
    except ValueError as error:
        raise ConfigError("policy", f"{name} must be a number, got {value!r}") from error


def _count(setting: str, least: int = 1) -> int:
    number = _number(setting)
    if not least <= number < math.inf or number != int(number):
        raise ConfigError("policy", f"{setting}: must be a whole number of at least {least}")
    return int(number)


def _bytes(setting: str) -> int:
    name, _, value = setting.partition("=")
    try:
        return int(TypeAdapter(ByteSize).validate_python(value))
    except ValidationError as error:
        raise ConfigError("policy", f"{name} must be a number of bytes such as 64GiB, got {value!r}") from error


def _result(job: SimJob, runs: Mapping[str, SimRun], created_unix_s: float) -> BenchResult:
    model, trace = job.model, job.trace
    return BenchResult(
        kind="sim",
        created_unix_s=created_unix_s,
        complete=True,
        config=BenchConfig(seed=job.seed, deadline_s=job.deadline_s, address="simulated", cluster=_settings(job, runs)),
        environment=describe_environment(),
        model=ModelFacts(
            name=model.name,
            architecture=model.architecture,
            dtype=model.quantization or "bfloat16",
            parameter_count=model.parameter_count,
            kv_bytes_per_token=model.kv_bytes_per_token,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        ),
        trace=TraceInfo.of(
            trace,
            time_scale=job.time_scale,
            length_scale=job.length_scale,
            answer_scale=job.answer_scale,
            limit=job.limit,
        ),
        policies=_policy_results(runs),
    )


def _settings(job: SimJob, runs: Mapping[str, SimRun]) -> dict[str, str | int | float | bool | None]:
    """Settings needed to repeat the run and to compare a repetition."""
    cluster = job.cluster
    settings: dict[str, str | int | float | bool | None] = {
        "gpu": cluster.gpu_name,
        "gpu_count": sum(kind.gpu_count for kind in cluster.kinds),
        "gpus_per_host": cluster.gpus_per_host,
        "instances": instance_count(job.model, cluster),
        "block_size": job.worker.block_tokens,
        "max_num_seqs": job.worker.max_running_count,
        "max_num_batched_tokens": job.worker.max_batch_tokens,
        "microbatching": "lookahead" if job.worker.lookahead else "token-count",
    }
    if job.worker.tpot_target_s is not None:
        settings["tpot_target_s"] = job.worker.tpot_target_s
    settings["prompt_share"] = prompt_share(job.model, cluster, job.timings, job.trace)
    settings["reading_is_short"] = reading_is_short(job.model, cluster, job.timings, job.trace)
    for name, run in runs.items():
        settings[f"{name}.stranded_fraction"] = stranded_fraction(run.samples)
        settings[f"{name}.trace_hash"] = run.trace_hash
        settings[f"{name}.event_count"] = run.event_count
        settings[f"{name}.step_count"] = run.step_count
        settings[f"{name}.busy_fraction"] = run.busy_fraction
    return settings


def stranded_fraction(samples: Sequence[SimSample]) -> float:
    """Fraction of the waiting time that requests spent on a full instance while another one had room."""
    waiting = sum(sample.waiting_count for sample in samples)
    return sum(sample.stranded_count for sample in samples) / waiting if waiting else 0.0


def _policy_results(runs: Mapping[str, SimRun]) -> dict[str, PolicyResult]:
    """Results by policy. SLO scales are multiples of the best baseline's medians; policies that do not drop are the
    baselines, if there are any.
    """
    seen = {name: replay_run(run) for name, run in runs.items()}
    alone = {name: policy_result(run, name) for name, run in seen.items()}
    baselines = [name for name in runs if name.split(":")[0] != _DROP] or list(runs)
    best = min(baselines, key=lambda name: (alone[name].ttft_s.p50 or math.inf, name))
    reference = alone[best].slo_reference
    results = {name: policy_result(run, name, reference) for name, run in seen.items()}
    return {
        name: result.model_copy(update={"bubble_fraction": runs[name].bubble_fraction})
        for name, result in results.items()
    }


def replay_run(run: SimRun) -> ReplayRun:
    """A simulated run in the format of a measurement."""
    records = [
        BenchRecord(
            index=r.index,
            request_id=r.request_id,
            input_tokens=r.input_tokens,
            wanted_tokens=r.wanted_tokens,
            planned_s=r.arrival_s,
            submit_s=r.arrival_s,
            token_times_s=r.token_times_s,
            end_s=r.end_s,
            outcome=_OUTCOMES[r.outcome],
            error=r.error,
        )
        for r in run.records
    ]
    samples = [
        StatusSample(
            at_s=s.at_s,
            kv_demand_bytes=s.kv_demand_bytes,
            kv_capacity_bytes=s.kv_capacity_bytes,
            kv_used_bytes=s.kv_used_bytes,
            running_count=s.running_count,
            waiting_count=s.waiting_count,
            preemptions_total=s.preemptions_total,
            epoch=s.epoch,
            epoch_reason=s.epoch_reason,
            group_sizes=s.group_sizes,
        )
        for s in run.samples
    ]
    timed = [TimedTransition(record.began_at_s - run.zero_s, _told(record)) for record in run.transitions]
    offline = run.offline_token_count or None
    return ReplayRun(records, samples, True, run.duration_s, 0, timed, offline_token_count=offline)


def _told(record: TransitionRecord) -> PlannerTransition:
    ended_s = record.ended_at_s if record.ended_at_s is not None else record.began_at_s
    return PlannerTransition(
        age_s=0.0,
        epoch=record.epoch,
        kind=record.journal.kind.value,
        phase=record.journal.stage.value,
        reason=record.journal.why,
        summary=record.summary,
        duration_s=ended_s - record.began_at_s,
        exchange_s=record.longest_s("exchange_s"),
        freed_parameter_bytes=record.total("freed_parameter_bytes"),
        kv_bytes_exchanged=record.total("kv_bytes_sent"),
        parameter_bytes_pulled=record.total("parameter_bytes_pulled"),
        victim_count=record.victim_count,
        victims_recomputed=record.total("victims_recomputed"),
        max_stall_s=record.longest_s("max_stall_s"),
    )

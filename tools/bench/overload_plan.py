"""The plan of a comparison of overload policies: sizes, scales and duration. Stored in `plan.json`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ballast.common.errors import ConfigError
from tools.bench.progress import minutes
from tools.model.info import CheckpointInfo

RUN_OVERHEAD_S = 8.5  # time for start, warm-up and end of a cluster
_TAIL_SHARE = 0.2  # time from the last arrival to the last answer, as a fraction of the trace's span
_PROBE_SHARE = 2.8  # duration of two probes with ramp-up, in units of `probe_s`
NO_PEAK = 1e9  # a multiple of the capacity that means no limit on the peak
_OVERFLOW = 1.05  # multiple of the capacity; if the peak is lower, policies do not differ
_SHORTEST_SPAN_S = 10.0  # a shorter workload has hardly any burst


def setting_variable(name: str) -> str:
    """Environment variable of a setting: monitor.dwell_s -> BALLAST_MONITOR__DWELL_S."""
    return "BALLAST_" + name.upper().replace(".", "__")


class ComparisonArguments(BaseModel):
    """Arguments that runs must share to be comparable."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    parameter_count: int
    workers: int
    seed: int
    deadline_s: float
    demand_fraction: float | None  # null: arrivals are not scaled
    peak_fraction: float = NO_PEAK
    mean_tokens: float | None  # null: lengths are not scaled
    answer_share: float | None = None  # answer's fraction of the mean request's tokens; null: as in the trace
    sequences_each: int
    span_s: float | None
    max_num_seqs: int | None  # null: the worker's default
    settings: dict[str, str]
    gpu: str | None = None  # GPU that the workers emulate; null: they compute


class WorkloadPlan(BaseModel):
    """How a workload is replayed, which is the same in all runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    word: str
    length_scale: float
    answer_scale: float | None = None  # null: answers are scaled like prompts
    rate_factor: float
    span_s: float
    request_count: int
    device_memory_bytes: int
    undropped_tokens: int  # KV tokens of all workers without dropping
    few_tokens_per_s: float  # output tokens of all workers, with few requests
    full_tokens_per_s: float
    forecast_demand_fraction: float
    forecast_peak_fraction: float


class ComparisonPlan(BaseModel):
    """The contents of plan.json."""

    model_config = ConfigDict(extra="forbid")

    arguments: ComparisonArguments
    workloads: dict[str, WorkloadPlan] = {}


@dataclass(frozen=True, slots=True)
class Timetable:
    """The estimated duration of one comparison."""

    workers: int
    spans_s: Mapping[str, float]  # workload -> span of its arrivals, as replayed
    policies: Sequence[str]
    repetitions: int
    probe_s: float

    @property
    def run_count(self) -> int:
        return len(self.spans_s) * len(self.policies) * self.repetitions

    @property
    def probing_s(self) -> float:
        return len(self.spans_s) * (RUN_OVERHEAD_S + _PROBE_SHARE * self.probe_s)

    @property
    def total_s(self) -> float:
        runs_s = sum(run_s(span_s) for span_s in self.spans_s.values())
        return self.probing_s + runs_s * len(self.policies) * self.repetitions

    def describe(self) -> str:
        return (
            f"{self.workers} workers: {self.run_count} runs ({len(self.spans_s)} workloads of"
            f" {', '.join(f'{span_s:.0f} s' for span_s in self.spans_s.values())}; {len(self.policies)} policies;"
            f" {self.repetitions} repetitions), about {minutes(self.total_s)} min"
        )


def run_s(span_s: float) -> float:
    """Estimated duration of a run: start, warm-up and end of a cluster, the arrivals, and the requests still running
    after the last arrival.
    """
    return RUN_OVERHEAD_S + (1 + _TAIL_SHARE) * span_s


def span_within(tables: Sequence[Timetable], minutes_given: float) -> float:
    """The workloads' span in seconds for which the whole comparison takes `minutes_given`. `tables`: timetables with
    spans of 1 s (more for workloads with repeated bursts).

    Raises:
        ConfigError: the span would be too short for a burst.
    """
    runs = sum(table.run_count for table in tables)
    fixed_s = sum(table.probing_s for table in tables) + runs * RUN_OVERHEAD_S
    per_span = sum((1 + _TAIL_SHARE) * sum(t.spans_s.values()) * len(t.policies) * t.repetitions for t in tables)
    span_s = (60 * minutes_given - fixed_s) / per_span
    if span_s < _SHORTEST_SPAN_S:
        needed = (fixed_s + _SHORTEST_SPAN_S * per_span) / 60
        raise ConfigError("--max-minutes", f"{runs} runs of at least {_SHORTEST_SPAN_S:g} s take {needed:.0f} min")
    return float(int(span_s))


def describe_plan(name: str, plan: WorkloadPlan) -> str:
    calm = plan.forecast_peak_fraction < _OVERFLOW
    hint = "; NOTHING WILL OVERFLOW: give more --demand, or --span-s" if calm else ""
    answers = "" if plan.answer_scale is None else f" and answers x{plan.answer_scale:g}"
    return (
        f"{name}: {plan.request_count} requests over {plan.span_s:.0f} s (rate x{plan.rate_factor:g}, length"
        f" x{plan.length_scale:g}{answers}); {plan.few_tokens_per_s:,.0f} to {plan.full_tokens_per_s:,.0f} output"
        " tokens/s;"
        f" KV demand {plan.forecast_demand_fraction:.0%} of capacity on average,"
        f" {plan.forecast_peak_fraction:.0%} at the peak, if nobody waited{hint}"
    )


def read_plan(path: Path, arguments: ComparisonArguments) -> ComparisonPlan:
    if not path.exists():
        return ComparisonPlan(arguments=arguments)
    try:
        plan = ComparisonPlan.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise ConfigError(str(path), "is not a plan of `bench overload`; choose another --out") from error
    old, new = plan.arguments.model_dump(), arguments.model_dump()
    differing = [f"{key} (was {old[key]!r}, is {new[key]!r})" for key in new if old[key] != new[key]]
    if differing:
        raise ConfigError(str(path), f"was made with other arguments: {', '.join(differing)}; choose another --out")
    return plan


def write_plan(path: Path, plan: ComparisonPlan) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plan.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written: {error.strerror}") from error


def arguments_of(
    info: CheckpointInfo,
    *,
    workers: int,
    seed: int,
    deadline_s: float,
    demand_fraction: float | None,
    peak_fraction: float = NO_PEAK,
    mean_tokens: float | None,
    answer_share: float | None = None,
    sequences_each: int,
    span_s: float | None,
    max_num_seqs: int | None,
    settings: Mapping[str, str],
    gpu: str | None = None,
) -> ComparisonArguments:
    """Validate the arguments of a comparison.

    Raises:
        ConfigError: an argument is invalid; the message names the flag.
    """
    for name, value, least in (
        ("workers", workers, 1),
        ("sequences-each", sequences_each, 1),
        ("mean-tokens", mean_tokens, 4),
        ("max-num-seqs", max_num_seqs, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"--{name}", f"must be at least {least}, got {value}")
    if demand_fraction is not None and not 0 < demand_fraction <= 2:
        raise ConfigError("--demand", f"must be above 0 and at most 2, got {demand_fraction}")
    if peak_fraction <= 1:
        raise ConfigError("--peak", f"must be above 1, got {peak_fraction}")
    if answer_share is not None and not 0 < answer_share < 1:
        raise ConfigError("--answer-share", f"must be between 0 and 1, got {answer_share}")
    if span_s is not None and span_s <= 0:
        raise ConfigError("--span-s", f"must be above 0, got {span_s}")
    return ComparisonArguments(
        model=info.path.name,
        parameter_count=info.parameter_count,
        workers=workers,
        seed=seed,
        deadline_s=deadline_s,
        demand_fraction=demand_fraction,
        peak_fraction=peak_fraction,
        mean_tokens=mean_tokens,
        answer_share=answer_share,
        sequences_each=sequences_each,
        span_s=span_s,
        max_num_seqs=max_num_seqs,
        settings=dict(settings),
        gpu=gpu,
    )

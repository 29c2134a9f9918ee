"""JSON result files of `bench` and `sim`. docs/results-schema.md documents them; a test compares the two.

Missing measurements are null, never zero. Durations are in seconds, sizes in bytes, shares are fractions of one.
"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from ballast.common.errors import ConfigError
from tools.bench.records import BenchRecord, ReplayRun, RequestOutcome, StatusSample, TimedTransition
from tools.bench.traces import Trace

SCHEMA_VERSION = 1
STANDARD_OUTPUT = Path("-")
SLO_SCALES = tuple(range(1, 11))


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Summary(_StrictModel):
    """Statistics of a distribution. All except `count` are null if nothing was measured."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    p999: float | None = None
    max: float | None = None

    @staticmethod
    def of(values: list[float]) -> "Summary":
        if not values:
            return Summary(count=0)
        p50, p90, p99, p999 = (float(q) for q in np.quantile(values, (0.5, 0.9, 0.99, 0.999)))
        mean = sum(values) / len(values)
        return Summary(count=len(values), mean=mean, p50=p50, p90=p90, p99=p99, p999=p999, max=max(values))


class SloReference(_StrictModel):
    """The latencies at SLO scale 1: the median TTFT and TPOT of the policy `policy`."""

    policy: str
    ttft_s: float | None
    tpot_s: float | None
    calm: bool = False  # True: only requests served while memory sufficed count, because most others waited for it


class Series(_StrictModel):
    """Samples of the cluster over time; all columns have the same length."""

    at_s: list[float]
    kv_demand_bytes: list[int]
    kv_capacity_bytes: list[int]
    kv_used_bytes: list[int]
    running_count: list[int]
    waiting_count: list[int]
    preemptions_total: list[int]
    epoch: list[int] = []  # epoch of the layout; empty in files older than this column
    group_sizes: list[list[int]] = []  # number of members of each group


class TransitionResult(_StrictModel):
    """One change of the layout. Fields are null if they were not measured, or if the change was neither a drop nor a
    restore.
    """

    at_s: float
    epoch: int
    reason: str
    kind: str | None = None
    phase: str | None = None
    summary: str | None = None
    duration_s: float | None = None
    exchange_s: float | None = None
    moved_bytes: int | None = None
    freed_parameter_bytes: int | None = None
    victim_count: int | None = None
    victims_recomputed: int | None = None
    max_stall_s: float | None = None


class RequestResult(_StrictModel):
    """One request. Token ids are null unless they were recorded."""

    index: int
    request_id: str
    input_tokens: int
    wanted_tokens: int
    output_tokens: int
    planned_s: float
    submit_s: float
    first_token_s: float | None
    end_s: float | None
    tpot_s: float | None
    outcome: RequestOutcome
    error: str
    prompt_token_ids: list[int] | None = None
    output_token_ids: list[int] | None = None


class PolicyResult(_StrictModel):
    """The results of one overload policy."""

    duration_s: float
    request_count: int  # number of requests sent
    outcomes: dict[RequestOutcome, int]
    input_token_count: int  # tokens of the requests that finished
    output_token_count: int  # tokens of all requests
    ttft_s: Summary
    tpot_s: Summary
    itl_s: Summary  # inter-token latency: times between consecutive tokens at the client
    e2e_s: Summary
    send_lag_s: Summary  # how late the client sent requests; included in ttft_s and e2e_s
    throughput_tokens_per_s: float | None  # output tokens divided by the duration
    slo_reference: SloReference
    slo_violation_fraction: dict[int, float | None]  # SLO scale -> share of requests that were above it or not served
    ttft_slo_violation_fraction: dict[int, float | None]
    tpot_slo_violation_fraction: dict[int, float | None]
    series: Series
    failed_sample_count: int
    transitions: list[TransitionResult]
    bubble_fraction: float | None = None
    offline_token_count: int | None = None  # prompt and answer tokens of offline requests, which are not in the trace
    verified_count: int | None = None  # answers recomputed for comparison
    token_mismatches: int | None = None  # differing tokens of the verified answers; null until verified
    near_ties: int | None = None  # excused differences: rounding decides between the two best tokens
    requests: list[RequestResult]


class TraceInfo(_StrictModel):
    source: str
    format: str
    request_count: int
    span_s: float
    dropped_count: int
    clamped_count: int
    time_scale: float
    length_scale: float
    limit: int | None
    rate_scale: float = 1.0
    lengths: str = "of the trace"
    answer_scale: float | None = None

    def describe_scales(self) -> str:
        answers = "" if self.answer_scale is None else f", answers x{self.answer_scale:g}"
        return f"time x{self.time_scale:g}, length x{self.length_scale:g}{answers}"

    def describe_lengths(self) -> str:
        if self.answer_scale is None:
            return f"{self.lengths}, x{self.length_scale:g}"
        return f"{self.lengths}, prompts x{self.length_scale:g}, answers x{self.answer_scale:g}"

    @staticmethod
    def of(
        trace: Trace, *, time_scale: float, length_scale: float, answer_scale: float | None = None, limit: int | None
    ) -> "TraceInfo":
        """The facts about a trace that was scaled by these factors."""
        return TraceInfo(
            source=trace.source,
            format=trace.format,
            request_count=len(trace.requests),
            span_s=trace.span_s,
            dropped_count=trace.dropped_count,
            clamped_count=trace.clamped_count,
            time_scale=time_scale,
            length_scale=length_scale,
            answer_scale=answer_scale,
            limit=limit,
            rate_scale=trace.rate_scale,
            lengths=trace.lengths,
        )


class ModelFacts(_StrictModel):
    name: str
    architecture: str
    dtype: str
    parameter_count: int
    kv_bytes_per_token: int
    max_model_len: int
    vocab_size: int


class Environment(_StrictModel):
    cpu: str
    core_count: int
    memory_bytes: int
    platform: str
    python: str
    packages: dict[str, str]  # package -> installed version
    git_commit: str | None
    git_dirty: bool | None


class BenchConfig(_StrictModel):
    """Settings of a run. `cluster`: the cluster's known settings, and measurements that do not concern requests."""

    seed: int
    deadline_s: float
    address: str
    cluster: dict[str, str | int | float | bool | None]


class ComparisonFacts(_StrictModel):
    """The place of a run of `bench overload` in its comparison."""

    workload: str
    policy: str  # label of the policy with its knobs
    overload_policy: str
    knobs: dict[str, str]
    repetition: int
    position: int  # index in the order of all runs of the comparison
    warmup_request_count: int
    undropped_kv_bytes: int  # KV capacity of all workers without dropping
    forecast_demand_fraction: float  # forecast mean KV demand, as a fraction of this capacity
    plan_digest: str


class BenchResult(_StrictModel):
    """The contents of a result file."""

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["bench", "sim"] = "bench"
    created_unix_s: float
    complete: bool  # False if interrupted: the figures cover the time until then
    config: BenchConfig
    environment: Environment
    model: ModelFacts
    trace: TraceInfo
    comparison: ComparisonFacts | None = None
    policies: dict[str, PolicyResult]  # name of the overload policy -> its results


def policy_result(run: ReplayRun, policy: str, reference: SloReference | None = None) -> PolicyResult:
    """The results of a run. `reference`: the latencies at SLO scale 1; default: this run's medians."""
    finished = [r for r in run.records if r.outcome is RequestOutcome.FINISHED]
    ttft_s = Summary.of([r.ttft_s for r in finished if r.ttft_s is not None])
    tpot_s = Summary.of([r.tpot_s for r in finished if r.tpot_s is not None])
    if reference is None:
        reference = slo_reference(run, policy)
    output_token_count = sum(r.output_tokens for r in run.records)
    either, ttft_only, tpot_only = _slo_violations(run.records, reference)
    return PolicyResult(
        duration_s=run.duration_s,
        request_count=len(run.records),
        outcomes={outcome: sum(r.outcome is outcome for r in run.records) for outcome in RequestOutcome},
        input_token_count=sum(r.input_tokens for r in finished),
        output_token_count=output_token_count,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        itl_s=Summary.of([float(gap) for r in finished for gap in np.diff(r.token_times_s)]),
        e2e_s=Summary.of([r.e2e_s for r in finished if r.e2e_s is not None]),
        send_lag_s=Summary.of([max(r.submit_s - r.planned_s, 0.0) for r in run.records]),
        throughput_tokens_per_s=output_token_count / run.duration_s if run.duration_s > 0 else None,
        slo_reference=reference,
        slo_violation_fraction=either,
        ttft_slo_violation_fraction=ttft_only,
        tpot_slo_violation_fraction=tpot_only,
        series=_series(run.samples),
        failed_sample_count=run.failed_sample_count,
        transitions=_transitions(run),
        bubble_fraction=run.bubble_fraction,
        offline_token_count=run.offline_token_count,
        requests=[_request(r) for r in run.records],
    )


def slo_reference(run: ReplayRun, policy: str) -> SloReference:
    """A run's medians. If most requests waited for memory, their latencies are not a useful reference, so only the
    other requests count.
    """
    finished = [r for r in run.records if r.outcome is RequestOutcome.FINISHED]
    at_s = [sample.at_s for sample in run.samples]
    short = [sample.kv_demand_bytes > sample.kv_capacity_bytes > 0 for sample in run.samples]
    short_until = [0, *itertools.accumulate(short)]
    calm = [r for r in finished if _is_calm(r, at_s, short_until)]
    overloaded = 2 * len(calm) < len(finished)
    if overloaded and not calm:
        calm = sorted(finished, key=lambda r: r.ttft_s or 0.0)[: -(-len(finished) // 10)]
    counted = calm if overloaded else finished
    ttft_s = Summary.of([r.ttft_s for r in counted if r.ttft_s is not None])
    tpot_s = Summary.of([r.tpot_s for r in counted if r.tpot_s is not None])
    return SloReference(policy=policy, ttft_s=ttft_s.p50, tpot_s=tpot_s.p50, calm=overloaded)


def _is_calm(record: BenchRecord, at_s: Sequence[float], short_until: Sequence[int]) -> bool:
    """Whether memory was never short between the request's arrival and its first token.

    `at_s`: times of samples, each of which holds until the next. `short_until`: for each sample, the number of earlier
    ones that found memory short.
    """
    first_token_s = record.token_times_s[0] if record.token_times_s else record.planned_s
    begin = max(0, bisect_right(at_s, record.planned_s) - 1)
    return short_until[bisect_right(at_s, first_token_s)] == short_until[begin]


Fractions = dict[int, float | None]


def _slo_violations(records: list[BenchRecord], reference: SloReference) -> tuple[Fractions, Fractions, Fractions]:
    """Shares of requests, by scale, that violate the TTFT or the TPOT SLO, the TTFT SLO, and the TPOT SLO.

    A request that was not served violates all. Requests that the client cancelled do not count.
    """
    counted = [r for r in records if r.outcome is not RequestOutcome.CANCELLED]
    either: Fractions = {}
    ttft_only: Fractions = {}
    tpot_only: Fractions = {}
    for scale in SLO_SCALES:
        late_first = [_over(r, r.ttft_s, reference.ttft_s, scale) for r in counted]
        late_rest = [_over(r, r.tpot_s, reference.tpot_s, scale) for r in counted]
        ttft_only[scale] = _share(late_first)
        tpot_only[scale] = _share(late_rest)
        either[scale] = _share([a or b for a, b in zip(late_first, late_rest, strict=True)])
    return either, ttft_only, tpot_only


def _over(record: BenchRecord, value_s: float | None, reference_s: float | None, scale: int) -> bool:
    if record.outcome is not RequestOutcome.FINISHED:
        return True
    return value_s is not None and reference_s is not None and value_s > scale * reference_s


def _share(flags: list[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _series(samples: list[StatusSample]) -> Series:
    return Series(
        at_s=[s.at_s for s in samples],
        kv_demand_bytes=[s.kv_demand_bytes for s in samples],
        kv_capacity_bytes=[s.kv_capacity_bytes for s in samples],
        kv_used_bytes=[s.kv_used_bytes for s in samples],
        running_count=[s.running_count for s in samples],
        waiting_count=[s.waiting_count for s in samples],
        preemptions_total=[s.preemptions_total for s in samples],
        epoch=[s.epoch for s in samples],
        group_sizes=[list(s.group_sizes) for s in samples],
    )


def _transitions(run: ReplayRun) -> list[TransitionResult]:
    """The planner's transitions, and other changes of the epoch between samples."""
    told = {timed.told.epoch for timed in run.transitions}
    changes = [after for before, after in itertools.pairwise(run.samples) if after.epoch != before.epoch]
    seen = [TransitionResult(at_s=s.at_s, epoch=s.epoch, reason=s.epoch_reason) for s in changes if s.epoch not in told]
    return sorted([*seen, *map(_transition_row, run.transitions)], key=lambda transition: transition.at_s)


def _transition_row(timed: TimedTransition) -> TransitionResult:
    told = timed.told
    return TransitionResult(
        at_s=timed.at_s,
        epoch=told.epoch,
        reason=told.reason,
        kind=told.kind,
        phase=told.phase,
        summary=told.summary,
        duration_s=told.duration_s,
        exchange_s=told.exchange_s,
        moved_bytes=told.kv_bytes_exchanged + told.parameter_bytes_pulled,
        freed_parameter_bytes=told.freed_parameter_bytes,
        victim_count=told.victim_count,
        victims_recomputed=told.victims_recomputed,
        max_stall_s=told.max_stall_s,
    )


def _request(record: BenchRecord) -> RequestResult:
    recorded = bool(record.prompt_token_ids)
    return RequestResult(
        index=record.index,
        request_id=record.request_id,
        input_tokens=record.input_tokens,
        wanted_tokens=record.wanted_tokens,
        output_tokens=record.output_tokens,
        planned_s=record.planned_s,
        submit_s=record.submit_s,
        first_token_s=record.token_times_s[0] if record.token_times_s else None,
        end_s=record.end_s,
        tpot_s=record.tpot_s,
        outcome=record.outcome,
        error=record.error,
        prompt_token_ids=record.prompt_token_ids if recorded else None,
        output_token_ids=record.output_token_ids if recorded else None,
    )


def write_result(path: Path, result: BenchResult) -> None:
    """Write a result to a file, or to standard output if the path is "-". Raises ConfigError if that fails."""
    if path == STANDARD_OUTPUT:
        print(result.model_dump_json(indent=1))
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(result.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise ConfigError(str(path), f"cannot be written: {error.strerror}") from error


def read_result(path: Path) -> BenchResult:
    """Read a result file. Raises ConfigError, with the file and the first invalid field."""
    try:
        return BenchResult.model_validate_json(path.read_text())
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ConfigError(
            str(path), f"is no result file of schema {SCHEMA_VERSION}: {where}: {first['msg']}"
        ) from error

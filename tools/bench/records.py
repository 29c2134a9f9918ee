"""Records of a replay. All times are seconds since the replay's time zero."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum


class RequestOutcome(StrEnum):
    FINISHED = "finished"
    REFUSED = "refused"  # RESOURCE_EXHAUSTED: a bound of the cluster was reached
    DEADLINE = "deadline"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by us: the replay was interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerTransition:
    """One drop or restore. Durations are the planner's, bytes summed over all members."""

    age_s: float  # since it began, when it was asked for
    epoch: int
    kind: str  # drop or restore
    phase: str  # done, aborted, or how far it is
    reason: str
    summary: str
    duration_s: float  # sum of all phases so far
    exchange_s: float
    freed_parameter_bytes: int
    kv_bytes_exchanged: int
    parameter_bytes_pulled: int
    victim_count: int
    victims_recomputed: int
    max_stall_s: float


@dataclass(slots=True)
class BenchRecord:
    """One request of the trace. `planned_s` is when the trace wants it, `submit_s` when it was really sent."""

    index: int
    request_id: str
    input_tokens: int
    wanted_tokens: int
    planned_s: float
    submit_s: float
    token_times_s: "array[float]" = field(default_factory=lambda: array("d"))  # one for each token received
    end_s: float | None = None
    outcome: RequestOutcome = RequestOutcome.CANCELLED  # unless and until it ends in another way
    error: str = ""
    prompt_token_ids: list[int] = field(default_factory=list[int])  # only if they are to be recorded
    output_token_ids: list[int] = field(default_factory=list[int])

    @property
    def output_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float | None:
        """Counted from the planned arrival, so that a late sender does not hide waiting time."""
        return self.token_times_s[0] - self.planned_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; a single token has none."""
        times_s = self.token_times_s
        return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None

    @property
    def e2e_s(self) -> float | None:
        return self.end_s - self.planned_s if self.end_s is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSample:
    """The cluster at one instant, summed over its instances. Demand counts what runs, waits and is in the backlog."""

    at_s: float
    kv_demand_bytes: int
    kv_capacity_bytes: int
    kv_used_bytes: int
    running_count: int
    waiting_count: int  # in workers and in the backlog
    preemptions_total: int
    epoch: int
    epoch_reason: str
    group_sizes: tuple[int, ...] = ()  # members of each group of the layout


@dataclass(frozen=True, slots=True)
class TimedTransition:
    """A drop or restore as the planner tells it."""

    at_s: float  # when it began
    told: PlannerTransition


@dataclass(slots=True)
class ReplayRun:
    """Everything recorded by a replay."""

    records: list[BenchRecord]
    samples: list[StatusSample]
    complete: bool  # False: interrupted
    duration_s: float  # from time zero to the end of the last request
    failed_sample_count: int
    transitions: list[TimedTransition] = field(default_factory=list[TimedTransition])
    bubble_fraction: float | None = None  # of all stages: idle though there was work

"""Records of a replay. All times are seconds since the replay's time zero."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum


class RequestOutcome(StrEnum):
    FINISHED = "finished"
    REFUSED = "refused"  # RESOURCE_EXHAUSTED: a limit of the cluster was reached
    DEADLINE = "deadline"
    FAILED = "failed"
    CANCELLED = "cancelled"  # by the client: the replay was interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerTransition:
    """One drop or restore. Durations are the planner's; bytes are summed over all members."""

    age_s: float  # seconds since it began
    epoch: int
    kind: str  # drop or restore
    phase: str  # done, aborted or the current phase
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
    """One request of the trace. `planned_s`: its time in the trace; `submit_s`: when it was sent."""

    index: int
    request_id: str
    input_tokens: int
    wanted_tokens: int
    planned_s: float
    submit_s: float
    token_times_s: "array[float]" = field(default_factory=lambda: array("d"))  # one per received token
    end_s: float | None = None
    outcome: RequestOutcome = RequestOutcome.CANCELLED  # until it ends in another way
    error: str = ""
    prompt_token_ids: list[int] = field(default_factory=list[int])  # only if recording is on
    output_token_ids: list[int] = field(default_factory=list[int])

    @property
    def output_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token since the planned arrival, so that a late sender does not hide waiting time."""
        return self.token_times_s[0] - self.planned_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        times_s = self.token_times_s
        return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None

    @property
    def e2e_s(self) -> float | None:
        return self.end_s - self.planned_s if self.end_s is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSample:
    """The cluster at one instant, summed over its instances. Demand counts running, waiting and backlogged requests."""

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
    """A drop or a restore as reported by the planner."""

    at_s: float  # its start
    told: PlannerTransition


@dataclass(slots=True)
class ReplayRun:
    """Everything recorded by a replay."""

    records: list[BenchRecord]
    samples: list[StatusSample]
    complete: bool  # False if interrupted
    duration_s: float  # from time zero to the end of the last request
    failed_sample_count: int
    transitions: list[TimedTransition] = field(default_factory=list[TimedTransition])
    bubble_fraction: float | None = None  # idle share of all stages while there was work
    offline_token_count: int | None = None  # prompts and answers of offline work beside the trace

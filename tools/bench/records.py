"""Records of a replay. Unless noted, times are seconds since the replay's time zero."""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum


class RequestOutcome(StrEnum):
    FINISHED = "finished"
    REFUSED = "refused"  # RESOURCE_EXHAUSTED: a limit of the cluster was reached
    DEADLINE = "deadline"
    FAILED = "failed"
    CANCELLED = "cancelled"  # the replay was interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerTransition:
    """A drop or restore as the planner reports it. The planner measures durations; bytes are sums over all members."""

    age_s: float  # seconds since the transition began
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
    """One request of a replay. `planned_s`: its arrival in the trace; `submit_s`: when it was sent."""

    index: int
    request_id: str
    input_tokens: int
    wanted_tokens: int
    planned_s: float
    submit_s: float
    token_times_s: "array[float]" = field(default_factory=lambda: array("d"))  # arrival time of each token
    end_s: float | None = None
    outcome: RequestOutcome = RequestOutcome.CANCELLED  # replaced when the request ends
    error: str = ""
    prompt_token_ids: list[int] = field(default_factory=list[int])  # only if recording is on
    output_token_ids: list[int] = field(default_factory=list[int])

    @property
    def output_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def ttft_s(self) -> float | None:
        """Time from the planned arrival to the first token; None without a token. Includes any delay of sending."""
        return self.token_times_s[0] - self.planned_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two tokens."""
        times_s = self.token_times_s
        return (times_s[-1] - times_s[0]) / (len(times_s) - 1) if len(times_s) > 1 else None

    @property
    def e2e_s(self) -> float | None:
        return self.end_s - self.planned_s if self.end_s is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSample:
    """The state of a cluster at one time, summed over its groups. Demand is that of running, waiting and backlogged
    requests.
    """

    at_s: float
    kv_demand_bytes: int
    kv_capacity_bytes: int
    kv_used_bytes: int
    running_count: int
    waiting_count: int  # requests that wait in workers or in a backlog
    preemptions_total: int
    epoch: int
    epoch_reason: str
    group_sizes: tuple[int, ...] = ()  # members of each group of the layout


@dataclass(frozen=True, slots=True)
class TimedTransition:
    """A drop or a restore, with its start time."""

    at_s: float  # start of the transition
    told: PlannerTransition


@dataclass(slots=True)
class ReplayRun:
    """Everything that a replay has recorded."""

    records: list[BenchRecord]
    samples: list[StatusSample]
    complete: bool  # False if interrupted
    duration_s: float  # from time zero to the end of the last request
    failed_sample_count: int
    transitions: list[TimedTransition] = field(default_factory=list[TimedTransition])
    bubble_fraction: float | None = None  # share of time in which stages were idle although there was work
    offline_token_count: int | None = None  # prompt and answer tokens of offline requests, which are not in the trace

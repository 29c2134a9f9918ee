"""Results of a simulation, as plain data. Instants count from the beginning of the trace."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from services.monitor.policy.pressure import Signal
from services.planner.core.prediction_log import Predicted
from services.planner.core.record import TransitionRecord

_SOON_S = 60.0


class Outcome(StrEnum):
    FINISHED = "finished"
    REFUSED = "refused"
    DEADLINE = "deadline"
    FAILED = "failed"
    OPEN = "open"  # stopped before it ended


@dataclass(slots=True)
class RequestRecord:
    index: int
    request_id: str
    input_tokens: int
    wanted_tokens: int
    arrival_s: float
    token_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    end_s: float | None = None
    outcome: Outcome = Outcome.OPEN
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimSample:
    """The cluster at one instant, summed over its groups. KV bytes are over all layers."""

    at_s: float
    kv_demand_bytes: int
    kv_capacity_bytes: int
    kv_used_bytes: int
    running_count: int
    waiting_count: int
    preemptions_total: int
    stranded_count: int  # requests that waited on a full instance, at this sample and the last, while another had room
    epoch: int
    epoch_reason: str
    group_sizes: tuple[int, ...]
    on_count: int  # instances with allocated memory
    away_count: int  # instances that are leaving or parked


def mean_on(samples: Sequence[SimSample], until_s: float) -> float:
    """Mean number of instances with allocated memory, over the samples until `until_s`."""
    counts = [sample.on_count for sample in samples if sample.at_s <= until_s]
    return sum(counts) / len(counts) if counts else 0.0


def leaves(samples: Sequence[SimSample]) -> tuple[int, int]:
    """(number of instances parked, how many of them were needed again within a minute), matched last in, first out."""
    left_at_s, count, soon = list[float](), 0, 0
    for before, sample in pairwise(samples):
        change = sample.away_count - before.away_count
        count += max(0, change)
        left_at_s += [sample.at_s] * change
        for _ in range(min(-change, len(left_at_s))):
            soon += sample.at_s - left_at_s.pop() < _SOON_S
    return count, soon


@dataclass(slots=True, kw_only=True)
class SimRun:
    records: list[RequestRecord]
    samples: list[SimSample]
    transitions: list[TransitionRecord]  # instants are in the world's time: subtract `zero_s`
    predicted: list[Predicted]  # predictions of the planner with outcomes, in the world's time
    signals: list[tuple[float, Signal]]
    zero_s: float  # the world's time at which the trace begins
    duration_s: float  # time until the end of the last request
    event_count: int
    step_count: int
    trace_hash: str
    busy_fraction: float  # fraction of the time for which engines execute batches
    offline_token_count: int  # prompts and answers of offline requests
    offline_lost_token_count: int  # offline tokens recomputed after preemptions
    offline_yield_count: int
    bubble_fraction: float | None  # idle fraction of pipeline stages while their group has work; None: no pipelines

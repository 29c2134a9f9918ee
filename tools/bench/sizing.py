"""Sizes a cluster's memory and a trace's rate so that a burst overflows the KV cache on any machine.

Each worker's memory holds the parameters and the KV of a given number of mean requests. The speed of the machine is
measured by probes (`tools.bench.probe`). The speed gives a forecast of the trace's KV demand without any waiting, and
the forecast gives the factor on the arrival rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench.traces import Trace, TraceRequest
from tools.bench.upscale import upscaled
from tools.model.info import CheckpointInfo

_STEP_S = 0.1  # time step of the forecast
_BISECTIONS = 24
_STEP, _STEPS_DOWN, _STEPS_UP = 1.02, 12, 24  # grid of rates to search: 0.8 to 1.6 times the rate found by bisection
_HOPELESS = 20.0  # multiple of the intended mean demand at which a forecast is abandoned


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingMemory:
    """Memory of a cluster."""

    device_memory_bytes: int  # memory of each worker
    undropped_tokens: int  # KV capacity of all workers in tokens, without dropping
    dropped_tokens: int  # the same if pairs of workers share one copy of the layers


@dataclass(frozen=True, slots=True)
class SizingPace:
    """Speed of a cluster at a given number of running requests."""

    output_tokens_per_s: float  # of all requests together
    seconds_per_token: float  # time per output token of one request, prefill included


@dataclass(frozen=True, slots=True)
class SizingForecast:
    """KV demand, in tokens, of a trace if no request has to wait."""

    mean_tokens: float
    peak_tokens: float


def mean_request(requests: Sequence[TraceRequest]) -> tuple[int, int]:
    """(mean number of prompt tokens, mean number of answer tokens)."""
    count = len(requests)
    return (
        max(1, round(sum(r.input_tokens for r in requests) / count)),
        max(1, round(sum(r.output_tokens for r in requests) / count)),
    )


def length_scale_to(trace: Trace, mean_tokens: float) -> float:
    """The factor (at most 1) on lengths that gives the mean request `mean_tokens` tokens, answer included."""
    return two_digits(min(1.0, mean_tokens / sum(mean_request(trace.requests))))


def length_scales_to(trace: Trace, mean_tokens: float, answer_share: float | None) -> tuple[float, float | None]:
    """Factors (at most 1) on the lengths of prompts and answers that give the mean request `mean_tokens` tokens,
    `answer_share` of them in its answer.

    If `answer_share` is None, both are scaled by the first factor, and the second is None.
    """
    if answer_share is None:
        return length_scale_to(trace, mean_tokens), None
    input_tokens, output_tokens = mean_request(trace.requests)
    return (
        two_digits(min(1.0, (1 - answer_share) * mean_tokens / input_tokens)),
        two_digits(min(1.0, answer_share * mean_tokens / output_tokens)),
    )


def size_memory_for(
    info: CheckpointInfo, requests: Sequence[TraceRequest], *, sequences_each: int, workers: int
) -> SizingMemory:
    """`size_memory` for a checkpoint: embeddings and head stay on every worker, layers can be dropped."""
    ends_bytes = info.parameter_bytes * 2 * info.vocab_size * info.hidden_size // info.parameter_count
    return size_memory(
        requests,
        parameter_bytes=info.parameter_bytes,
        layer_parameter_bytes=info.parameter_bytes - ends_bytes,
        kv_bytes_per_token=info.kv_bytes_per_token(),
        sequences_each=sequences_each,
        workers=workers,
    )


def size_memory(
    requests: Sequence[TraceRequest],
    *,
    parameter_bytes: int,
    layer_parameter_bytes: int,
    kv_bytes_per_token: int,
    sequences_each: int,
    workers: int,
) -> SizingMemory:
    """Memory with room for `sequences_each` mean requests, and for the largest request, on each worker."""
    mean_tokens, largest = sum(mean_request(requests)), max(r.input_tokens + r.output_tokens for r in requests)
    each_tokens = max(sequences_each * mean_tokens, math.ceil(1.25 * largest))
    freed_tokens = workers // 2 * (layer_parameter_bytes // kv_bytes_per_token)
    return SizingMemory(
        device_memory_bytes=parameter_bytes + each_tokens * kv_bytes_per_token,
        undropped_tokens=workers * each_tokens,
        dropped_tokens=workers * each_tokens + freed_tokens,
    )


def peak_output_tokens(requests: Sequence[TraceRequest], window_s: float) -> int:
    """Maximum, over all windows of `window_s`, of the answer tokens of the requests that arrive within it."""
    peak, tokens, first = 0, 0, 0
    for request in requests:
        tokens += request.output_tokens
        while requests[first].arrival_s <= request.arrival_s - window_s:
            tokens -= requests[first].output_tokens
            first += 1
        peak = max(peak, tokens)
    return peak


def two_digits(scale: float) -> float:
    """Round down to two significant digits: 0.1567 -> 0.15."""
    digits = 1 - math.floor(math.log10(scale))
    return math.floor(scale * 10**digits) / 10**digits


def forecast(requests: Sequence[TraceRequest], seconds_per_token: float) -> SizingForecast:
    """The forecast if each request holds its prompt from its arrival, and its answer grows at a constant pace."""
    end_s = requests[-1].arrival_s
    demand = [0.0] * (int(end_s / _STEP_S) + 1)
    for request in requests:
        lifetime_s = request.output_tokens * seconds_per_token
        for index in range(int(request.arrival_s / _STEP_S), len(demand)):
            age_s = index * _STEP_S - request.arrival_s
            if age_s > lifetime_s:
                break
            demand[index] += request.input_tokens + request.output_tokens * max(0.0, age_s) / lifetime_s
    return SizingForecast(sum(demand) / len(demand), max(demand))


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed as a function of the number of running requests, linear through two probes: few requests, full cache."""

    few_count: int
    few: SizingPace
    full_count: int
    full: SizingPace

    def seconds_per_token(self, running_count: int) -> float:
        slope_s = (self.full.seconds_per_token - self.few.seconds_per_token) / max(1, self.full_count - self.few_count)
        return max(1e-6, self.few.seconds_per_token + max(0.0, slope_s) * (max(1, running_count) - self.few_count))


def forecast_shared(
    requests: Sequence[TraceRequest], speed: Speed, hopeless_tokens: float = math.inf
) -> SizingForecast:
    """The forecast if answers grow at a pace that depends on the number of running requests. It ends with the last
    arrival, or when the demand exceeds `hopeless_tokens`.
    """
    demand: list[float] = []
    running: list[tuple[TraceRequest, float]] = []  # (request, its answer tokens so far)
    arrived = 0
    for index in range(int(requests[-1].arrival_s / _STEP_S) + 1):
        now_s = index * _STEP_S
        while arrived < len(requests) and requests[arrived].arrival_s <= now_s:
            running.append((requests[arrived], 0.0))
            arrived += 1
        made = _STEP_S / speed.seconds_per_token(len(running))
        grown = ((request, tokens + made) for request, tokens in running)
        running = [(request, tokens) for request, tokens in grown if tokens < request.output_tokens]
        demand.append(sum(request.input_tokens + tokens for request, tokens in running))
        if demand[-1] > hopeless_tokens:
            break
    return SizingForecast(sum(demand) / len(demand), max(demand))


def rate_for(trace: Trace, speed: Speed, limit: SizingForecast, seed: int) -> float:
    """The factor on the arrival rate at which the mean or the peak of the KV demand reaches its limit."""
    low, high = 1e-3, 1.0
    while high < 1e3 and not _exceeds(trace, high, speed, limit, seed):
        low, high = high, high * 2
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        if _exceeds(trace, middle, speed, limit, seed):
            high = middle
        else:
            low = middle
        if high / low < 1.005:
            break
    return float(f"{_highest(trace, low, speed, limit, seed):.4g}")


def _highest(trace: Trace, factor: float, speed: Speed, limit: SizingForecast, seed: int) -> float:
    """The factor near `factor` with the highest peak within the limits. Different factors draw different lengths, so
    demand is not monotonic, and bisection may have ended at a factor at which the burst hardly overflows.
    """
    best, highest_tokens = factor, 0.0
    for step in range(-_STEPS_DOWN, _STEPS_UP):
        near = factor * _STEP**step
        requests = upscaled(trace, near, seed).requests
        if requests and not _exceeds(trace, near, speed, limit, seed):
            peak_tokens = forecast_shared(requests, speed).peak_tokens
            if peak_tokens > highest_tokens:
                best, highest_tokens = near, peak_tokens
    return best


def _exceeds(trace: Trace, factor: float, speed: Speed, limit: SizingForecast, seed: int) -> bool:
    requests = upscaled(trace, factor, seed).requests
    if not requests:
        return False
    highest_tokens = min(limit.peak_tokens, _HOPELESS * limit.mean_tokens)
    demand = forecast_shared(requests, speed, highest_tokens)
    return demand.mean_tokens >= limit.mean_tokens or demand.peak_tokens > highest_tokens

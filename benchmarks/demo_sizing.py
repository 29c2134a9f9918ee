"""How large the demo's memory and how fast its trace is, so that a burst overflows the KV cache on any machine.

All follows from the trace and from one measurement of the machine:

- `length scale`: lengths are shortened until the mean request is MEAN_TOKENS long. Memory is sized in requests: each
  worker's KV holds SEQUENCES_EACH mean ones beside the parameters, which weigh several times as much.
- A probe keeps that KV full for some seconds and measures the output tokens per second that un-dropped memory allows.
- `time scale`: arrivals are moved together or apart until the densest PEAK_WINDOW_S of the trace ask for BURST_LOAD
  times that rate, and the trace spans at most MAX_SPAN_S. Where the second makes it too fast, lengths are shortened
  further.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from ballast.bench.replay import random_prompt
from ballast.bench.traces import Trace, TraceRequest
from ballast.client import AsyncClient, SamplingParams
from ballast.common.errors import BallastError, Unavailable

MEAN_TOKENS = 240.0
SEQUENCES_EACH = 8
PEAK_WINDOW_S = 10.0
BURST_LOAD = 1.7
MAX_SPAN_S = 90.0
PROBE_WARMUP_S, PROBE_S = 2.0, 5.0
_STEP_S = 0.1  # of the forecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of the cluster, in tokens of KV over all layers."""

    device_memory_bytes: int  # of each worker
    undropped_tokens: int
    dropped_tokens: int  # when pairs of workers hold one copy of the layers


@dataclass(frozen=True, slots=True)
class Pace:
    """What the machine does while un-dropped KV memory is full."""

    output_tokens_per_s: float  # of the cluster
    seconds_per_token: float  # of one request, its prompt's share included


@dataclass(frozen=True, slots=True)
class Forecast:
    """KV demand of a trace if nobody ever waited, in tokens."""

    mean_tokens: float
    peak_tokens: float


def mean_request(requests: Sequence[TraceRequest]) -> tuple[int, int]:
    """Mean tokens of prompts and of answers."""
    count = len(requests)
    return (
        max(1, round(sum(r.input_tokens for r in requests) / count)),
        max(1, round(sum(r.output_tokens for r in requests) / count)),
    )


def first_length_scale(trace: Trace) -> float:
    return two_digits(min(1.0, MEAN_TOKENS / sum(mean_request(trace.requests))))


def size_memory(
    requests: Sequence[TraceRequest],
    *,
    parameter_bytes: int,
    layer_parameter_bytes: int,
    kv_bytes_per_token: int,
    workers: int,
) -> Memory:
    """Room for SEQUENCES_EACH mean requests, but at least for the largest one."""
    mean_tokens, largest = sum(mean_request(requests)), max(r.input_tokens + r.output_tokens for r in requests)
    each_tokens = max(SEQUENCES_EACH * mean_tokens, math.ceil(1.25 * largest))
    freed_tokens = workers // 2 * (layer_parameter_bytes // kv_bytes_per_token)
    return Memory(
        device_memory_bytes=parameter_bytes + each_tokens * kv_bytes_per_token,
        undropped_tokens=workers * each_tokens,
        dropped_tokens=workers * each_tokens + freed_tokens,
    )


def scales(trace: Trace, pace: Pace) -> tuple[float, float]:
    """(time scale, factor for the lengths on top of those of `trace`)."""
    wanted_per_s = BURST_LOAD * pace.output_tokens_per_s
    peak_per_s = peak_output_tokens(trace.requests) / PEAK_WINDOW_S
    longest = MAX_SPAN_S / trace.span_s if trace.span_s > 0 else math.inf
    time_scale = two_digits(min(peak_per_s / wanted_per_s, longest))
    if time_scale < longest * 0.9:
        return time_scale, 1.0
    peak_per_s = peak_output_tokens(trace.scaled(time_scale=time_scale).requests) / PEAK_WINDOW_S
    return time_scale, two_digits(min(1.0, wanted_per_s / peak_per_s))


def peak_output_tokens(requests: Sequence[TraceRequest]) -> int:
    """The most answer tokens of requests that arrive within PEAK_WINDOW_S."""
    peak, tokens, first = 0, 0, 0
    for request in requests:
        tokens += request.output_tokens
        while requests[first].arrival_s <= request.arrival_s - PEAK_WINDOW_S:
            tokens -= requests[first].output_tokens
            first += 1
        peak = max(peak, tokens)
    return peak


def two_digits(scale: float) -> float:
    """0.1567 -> 0.15."""
    digits = 1 - math.floor(math.log10(scale))
    return math.floor(scale * 10**digits) / 10**digits


def forecast(requests: Sequence[TraceRequest], seconds_per_token: float) -> Forecast:
    """A request holds its prompt from its arrival on, and its answer as it grows, at the probe's pace."""
    end_s = requests[-1].arrival_s
    demand = [0.0] * (int(end_s / _STEP_S) + 1)
    for request in requests:
        lifetime_s = request.output_tokens * seconds_per_token
        for index in range(int(request.arrival_s / _STEP_S), len(demand)):
            age_s = index * _STEP_S - request.arrival_s
            if age_s > lifetime_s:
                break
            demand[index] += request.input_tokens + request.output_tokens * max(0.0, age_s) / lifetime_s
    return Forecast(sum(demand) / len(demand), max(demand))


async def probe(address: str, *, concurrency: int, input_tokens: int, output_tokens: int) -> Pace:
    """Keeps `concurrency` requests running and measures.

    Raises:
        Unavailable: nothing was generated.
    """
    times_s: list[float] = []
    async with AsyncClient(address) as client:
        vocab_size = (await client.model_info()).vocab_size
        begin_s = time.monotonic() + PROBE_WARMUP_S
        end_s = begin_s + PROBE_S
        numbers = itertools.count()

        async def keep_running() -> None:
            while time.monotonic() < end_s:
                prompt = random_prompt(0, next(numbers), input_tokens, vocab_size)
                sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
                stream = client.stream(token_ids=prompt, sampling=sampling, deadline_s=60.0, include_text=False)
                async with aclosing(stream):
                    async for chunk in stream:
                        now_s = time.monotonic()
                        if now_s >= end_s:
                            break
                        if now_s >= begin_s:
                            times_s.extend([now_s] * len(chunk.token_ids))

        try:
            async with asyncio.TaskGroup() as running:
                for number in range(concurrency):
                    running.create_task(keep_running(), name=f"probe {number}")
        except ExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first if isinstance(first, BallastError) else errors from errors
    if not times_s:
        raise Unavailable(address, f"no token within {PROBE_WARMUP_S + PROBE_S:g} s")
    rate = len(times_s) / PROBE_S
    return Pace(rate, concurrency / rate)

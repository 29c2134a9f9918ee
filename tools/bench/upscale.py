"""Scales the number of requests of a trace and preserves their pattern over time, as TraceUpscaler (EuroSys '24) does.

Arrivals and lengths are scaled separately. The cumulative arrival count is multiplied, and new arrivals are placed
where it crosses whole numbers, interpolated linearly between the old ones: bursts keep their time, duration and ratio
to the mean. Dividing times instead would shorten bursts; drawing arrivals from a rate would smooth them.
Lengths are drawn from the requests that arrived at about the same time.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ballast.common.errors import ConfigError
from tools.bench.traces import Trace, TraceRequest

_NEIGHBOURS = 20  # number of requests before and after a new one from which its lengths may be taken


def upscaled(trace: Trace, factor: float, seed: int) -> Trace:
    """The trace with `factor` times as many requests over the same span. Raises ConfigError unless `factor` > 0."""
    if factor <= 0:
        raise ConfigError("rate-scale", f"must be above 0, got {factor}")
    if factor == 1.0:
        return trace
    old = trace.requests
    rng = random.Random(seed)
    places = np.arange(round(len(old) * factor)) / factor  # positions in the old order of arrival
    arrivals_s = np.interp(places, np.arange(len(old)), [r.arrival_s for r in old])
    requests: list[TraceRequest] = []
    for place, arrival_s in zip(places.tolist(), arrivals_s.tolist(), strict=True):
        middle = int(place)
        nearby = range(max(0, middle - _NEIGHBOURS), min(len(old), middle + _NEIGHBOURS + 1))
        like = old[rng.choice(nearby)]
        requests.append(TraceRequest(round(arrival_s, 6), like.input_tokens, like.output_tokens))
    return replace(trace, requests=tuple(requests), rate_scale=trace.rate_scale * factor)


def repeated_burst(trace: Trace, window_s: float, times: int) -> Trace:
    """The trace up to the end of its densest window of `window_s`, followed by `times` - 1 repetitions of that window.

    This is the extreme burst of KunServe (EuroSys '26, section 5.6).
    """
    begin_s = densest_window(trace.requests, window_s)
    until = [r for r in trace.requests if r.arrival_s < begin_s + window_s]
    burst = [r for r in until if r.arrival_s >= begin_s]
    again = [replace(r, arrival_s=r.arrival_s + n * window_s) for n in range(1, times) for r in burst]
    return replace(trace, requests=tuple(until + again))


def raised_burst(trace: Trace, window_s: float, factor: float, seed: int) -> Trace:
    """The trace with `factor` times as many requests in its densest window of `window_s`, unchanged elsewhere."""
    if factor == 1.0:
        return trace
    begin_s = densest_window(trace.requests, window_s)
    inside = [r for r in trace.requests if begin_s <= r.arrival_s < begin_s + window_s]
    shifted = tuple(replace(r, arrival_s=r.arrival_s - begin_s) for r in inside)
    raised = upscaled(replace(trace, requests=shifted), factor, seed).requests
    outside = [r for r in trace.requests if not begin_s <= r.arrival_s < begin_s + window_s]
    requests = [*outside, *(replace(r, arrival_s=r.arrival_s + begin_s) for r in raised)]
    return replace(trace, requests=tuple(sorted(requests, key=lambda r: r.arrival_s)))


def densest_window(requests: Sequence[TraceRequest], window_s: float) -> float:
    """Start of the window of `window_s` with the most arrivals. Raises ConfigError if there are none."""
    if not requests:
        raise ConfigError("trace", "has no request, and therefore no burst; raise the rate")
    arrivals_s = [r.arrival_s for r in requests]
    counts = [bisect_left(arrivals_s, at_s + window_s) - index for index, at_s in enumerate(arrivals_s)]
    return arrivals_s[max(range(len(counts)), key=lambda i: (counts[i], -i))]

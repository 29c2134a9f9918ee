"""Sizes the demo's memory and the speed of its trace so that a burst overflows the KV cache on any machine.

Everything is derived from the trace and one measurement of the machine:

- `length scale`: lengths are shortened until the mean request is MEAN_TOKENS long. A worker's memory holds the
  parameters and the KV of SEQUENCES_EACH mean requests, which is several times smaller.
- A probe keeps that KV full for some seconds and measures the output tokens per second that un-dropped memory allows.
- `time scale`: arrivals are compressed or stretched until the densest PEAK_WINDOW_S of the trace need BURST_LOAD times
  that rate, or its mean AVERAGE_LOAD times, whichever is slower: a trace that is dense throughout should not become a
  single burst. It spans at most `max_span_s`: SHIPPED_SPAN_S for the project's own trace, so that the demo takes
  minutes, and OTHER_SPAN_S for others (`--max-span-s`). If this limit makes the trace too fast, lengths are shortened
  further.
"""

import math

from tools.bench.sizing import SizingPace, peak_output_tokens, two_digits
from tools.bench.traces import Trace

MEAN_TOKENS = 240.0
SEQUENCES_EACH = 8
PEAK_WINDOW_S = 10.0
BURST_LOAD = 1.7
AVERAGE_LOAD = 0.6
SHIPPED_SPAN_S = 90.0
OTHER_SPAN_S = 900.0


def scales(trace: Trace, pace: SizingPace, max_span_s: float) -> tuple[float, float]:
    """(time scale, factor on the lengths of `trace`)."""
    longest = max_span_s / trace.span_s if trace.span_s > 0 else math.inf
    time_scale = two_digits(min(_excess(trace, pace), longest))
    if time_scale < longest * 0.9:
        return time_scale, 1.0
    return time_scale, two_digits(min(1.0, 1.0 / _excess(trace.scaled(time_scale=time_scale), pace)))


def _excess(trace: Trace, pace: SizingPace) -> float:
    """Factor by which the trace is too fast: the larger of its burst's factor and its mean's."""
    peak_per_s = peak_output_tokens(trace.requests, PEAK_WINDOW_S) / PEAK_WINDOW_S
    mean_per_s = sum(request.output_tokens for request in trace.requests) / max(trace.span_s, PEAK_WINDOW_S)
    return max(peak_per_s / BURST_LOAD, mean_per_s / AVERAGE_LOAD) / pace.output_tokens_per_s

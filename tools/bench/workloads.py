"""The words of `--workloads`, each of which names arrivals and a source of lengths.

| word           | arrivals                                                                  |
|----------------|---------------------------------------------------------------------------|
| `FILE`         | of a trace file, in any format that `tools.bench.traces` reads            |
| `burst`        | BurstGPT-like: gamma arrivals with a burst (`tools.bench.generate`)      |
| `spike`        | likewise, with a shorter and higher burst                                 |
| `answers`      | likewise, with short prompts and longer answers                           |
| `extreme:WORD` | those of WORD until the end of its burst, then the burst four times more  |
| `twice:WORD`   | those of WORD, and then once more                                         |
| `WORD@SECONDS` | those of WORD in a window of so many seconds around its burst             |
| `WORD+LENGTHS` | those of WORD, with lengths of another source (`tools.bench.lengths`)     |
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from ballast.common.errors import ConfigError
from tools.bench.generate import KINDS, generate
from tools.bench.lengths import lengths_of, with_lengths
from tools.bench.traces import Trace, read_trace
from tools.bench.upscale import densest_window, repeated_burst

_GENERATED = {"burst": "bursty", "spike": "spike", "answers": "answers"}
_BURSTGPT = "BurstGPT, fitted to published quantiles (KunServe, first arXiv version, table 2)"
_GENERATED_LENGTHS = {
    "burst": _BURSTGPT,
    "spike": _BURSTGPT,
    "answers": "made up: short prompts and longer answers",
}
_EXTREME_SHARE = 0.15  # length of the repeated burst, as a fraction of the trace's span
_EXTREME_TIMES = 5
_BURST_SHARE = 0.1  # length of the burst of `WORD@SECONDS`, as a fraction of the window
_CALM_BEFORE = 0.25  # time before this burst, as a fraction of the window


@dataclass(frozen=True, slots=True)
class Workload:
    name: str  # name in file names and figures
    word: str  # word on the command line
    trace: Trace
    base: Trace  # the trace from which the rate is derived; for `extreme` and `twice`, without the repetitions


def parse_workloads(text: str, seed: int) -> list[Workload]:
    """Parse the argument of `--workloads`.

    Raises:
        ConfigError: a file cannot be read, a word is unknown, or two workloads have the same name.
    """
    workloads = [_load(word.strip(), seed) for word in text.split(",") if word.strip()]
    if not workloads:
        raise ConfigError("workloads", "names none")
    names = [workload.name for workload in workloads]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("workloads", f"two are called {name!r}; rename a file")
    return workloads


def _load(word: str, seed: int) -> Workload:
    if word.startswith("extreme:"):
        inner = _load(word.removeprefix("extreme:"), seed)
        trace = repeated_burst(inner.trace, inner.trace.span_s * _EXTREME_SHARE, _EXTREME_TIMES)
        return Workload(f"extreme-{inner.name}", word, replace(trace, source=word), inner.trace)
    if word.startswith("twice:"):
        inner = _load(word.removeprefix("twice:"), seed)
        return Workload(f"twice-{inner.name}", word, replace(_twice(inner.trace), source=word), inner.trace)
    what, plus, other = word.partition("+")
    arrivals, at, seconds = (what, "", "") if Path(what).exists() else what.partition("@")
    if arrivals in _GENERATED:
        requests = generate(KINDS[_GENERATED[arrivals]], seed=seed + 1)
        trace = Trace(
            source=f"generated: {arrivals}", format="ballast", requests=requests, lengths=_GENERATED_LENGTHS[arrivals]
        )
        name = arrivals
    else:
        trace, name = read_trace(Path(arrivals)), Path(arrivals).stem
    if at:
        trace, name = _around_burst(trace, _seconds(word, seconds)), f"{name}@{seconds}"
    if plus:
        lengths = lengths_of(other)
        trace, name = with_lengths(trace, lengths, seed), f"{name}+{lengths.name}"
    trace = replace(trace, source=word)
    return Workload(re.sub(r"[^\w.+@-]", "_", name), word, trace, trace)


def _seconds(word: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError("workloads", f"{word!r}: after @ come seconds, a number above 0")
    return seconds


def _around_burst(trace: Trace, window_s: float) -> Trace:
    """The window of `window_s` of a trace in which the burst begins after a quarter of the window; earlier or later if
    the trace begins or ends too close to the burst.
    """
    burst_s = densest_window(trace.requests, window_s * _BURST_SHARE)
    begin_s = max(0.0, min(burst_s - _CALM_BEFORE * window_s, trace.span_s - window_s))
    kept = (replace(r, arrival_s=r.arrival_s - begin_s) for r in trace.requests if r.arrival_s >= begin_s)
    return replace(trace, requests=tuple(r for r in kept if r.arrival_s < window_s))


def _twice(trace: Trace) -> Trace:
    again = tuple(replace(r, arrival_s=r.arrival_s + trace.span_s) for r in trace.requests)
    return replace(trace, requests=trace.requests + again)

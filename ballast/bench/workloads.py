"""What `--workloads` names: arrivals, and where the lengths are from.

| word           | arrivals                                                                  |
|----------------|---------------------------------------------------------------------------|
| `FILE`         | of a trace, in any format that `ballast.bench.traces` reads                |
| `burst`        | BurstGPT-like: gamma arrivals with a burst (`ballast.bench.generate`)      |
| `answers`      | likewise, with short prompts and longer answers                           |
| `extreme:WORD` | those of WORD, whose burst is repeated again and again                    |
| `WORD+LENGTHS` | those of WORD with lengths of another source: see `ballast.bench.lengths` |
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ballast.bench.generate import KINDS, generate
from ballast.bench.lengths import lengths_of, with_lengths
from ballast.bench.traces import Trace, read_trace
from ballast.bench.upscale import repeated_burst
from ballast.common.errors import ConfigError

_GENERATED = {"burst": "bursty", "answers": "answers"}
_GENERATED_LENGTHS = {
    "burst": "BurstGPT, fitted to published quantiles (KunServe, first arXiv version, table 2)",
    "answers": "made up: short prompts and longer answers",
}
_EXTREME_SHARE = 0.15  # of the span: the burst that is repeated
_EXTREME_TIMES = 5


@dataclass(frozen=True, slots=True)
class Workload:
    name: str  # for files and figures
    word: str  # as it was asked for
    trace: Trace
    base: Trace  # what the rate is chosen by: with `extreme`, the trace before its burst is repeated


def parse_workloads(text: str, seed: int) -> list[Workload]:
    """
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
    arrivals, plus, other = word.partition("+")
    if arrivals in _GENERATED:
        requests = generate(KINDS[_GENERATED[arrivals]], seed=seed + 1)
        trace = Trace(
            source=f"generated: {arrivals}", format="ballast", requests=requests, lengths=_GENERATED_LENGTHS[arrivals]
        )
        name = arrivals
    else:
        trace, name = read_trace(Path(arrivals)), Path(arrivals).stem
    if plus:
        lengths = lengths_of(other)
        trace, name = with_lengths(trace, lengths, seed), f"{name}+{lengths.name}"
    trace = replace(trace, source=word)
    return Workload(re.sub(r"[^\w.+-]", "_", name), word, trace, trace)

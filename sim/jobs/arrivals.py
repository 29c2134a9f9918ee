"""Synthetic arrivals of a scenario: a rate with bursts, and gamma-distributed intervals.

Intervals of mean one are drawn in operational time and mapped through the inverse of the rate's integral, so that
bursts have the given bounds and the variability is the same inside and outside. Lengths are drawn from a data set's
fit.
"""

import itertools
import math
import random
from collections.abc import Iterator

from sim.scenario import Arrivals
from tools.bench.lengths import lengths_of
from tools.bench.traces import Trace, TraceRequest

_LENGTHS = "burstgpt"  # default data set


def generated(spec: Arrivals, lengths: str | None, seed: int) -> Trace:
    """Draw a trace.

    Raises:
        ConfigError: the lengths are unknown.
    """
    rng, kind = random.Random(seed), lengths_of(lengths or _LENGTHS)
    requests = tuple(TraceRequest(round(at_s, 6), *kind.draw(rng)) for at_s in _instants_s(spec, rng))
    phases = "" if spec.on_s is None else f", {spec.on_s:g} s on and {spec.off_s:g} s off"
    bursts = ", ".join(f"{b.factor:g} times from {b.at_s:g} s for {b.for_s:g} s" for b in spec.bursts) or "none"
    source = f"generated: {spec.rate_per_s:g} requests/s, bursts: {bursts}{phases}; cv {spec.cv:g}, seed {seed}"
    return Trace(source=source, format="generated", requests=requests, lengths=kind.source)


def _instants_s(spec: Arrivals, rng: random.Random) -> Iterator[float]:
    shape = 1.0 / spec.cv**2
    operational = 0.0
    pieces = _pieces(spec)
    begin_s, end_s, rate = next(pieces)
    done = 0.0  # operational time at the start of the piece
    while True:
        operational += rng.gammavariate(shape, 1.0 / shape)
        while operational > done + (end_s - begin_s) * rate:
            done += (end_s - begin_s) * rate
            piece = next(pieces, None)
            if piece is None:
                return
            begin_s, end_s, rate = piece
        yield begin_s + (operational - done) / rate


def _pieces(spec: Arrivals) -> Iterator[tuple[float, float, float]]:
    """Yield pieces of constant rate without gaps: (begin, end, requests per second)."""
    edges = {0.0, spec.span_s}
    for burst in spec.bursts:
        edges |= {burst.at_s, burst.at_s + burst.for_s}
    period_s = spec.span_s if spec.on_s is None else spec.on_s + spec.off_s
    for period in range(math.ceil(spec.span_s / period_s)):
        edges |= {period * period_s, period * period_s + (spec.on_s or period_s)}
    for begin_s, end_s in itertools.pairwise(sorted(edge for edge in edges if edge <= spec.span_s)):
        if spec.on_s is not None and (begin_s + end_s) / 2 % period_s >= spec.on_s:
            yield begin_s, end_s, 0.0
            continue
        factor = 1.0
        for burst in spec.bursts:
            if burst.at_s <= begin_s < burst.at_s + burst.for_s:
                factor *= burst.factor
        yield begin_s, end_s, spec.rate_per_s * factor

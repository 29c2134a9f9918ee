"""Engines that compute on processors of one machine, beside all that serves them: how much longer a step takes there.

An engine is one thread. Whoever passes its tokens on (its own service, dispatcher, client) takes processor time for
each step and for each token, and where there is not enough for all, everybody gets an equal share of what there is.
GPUs have nothing of this.
"""

import math
from dataclasses import dataclass

from ballast.common.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Measured on a machine, with its services: see `benchmarks.fidelity`."""

    processors: int
    step_s: float = 0.0  # of a processor, outside of the engine, for a step: somebody has to pass on what it gives
    token_s: float = 0.0  # the same, for each token that it gives
    background: float = 0.0  # processors that are taken whatever happens
    together: float = 1.0  # so many times as long takes a step beside another engine's: caches, memory


class Processors:
    """What goes on there now."""

    def __init__(self, contention: Contention) -> None:
        self._contention = contention
        self._busy: dict[WorkerId, tuple[float, float]] = {}  # engine -> until when, and how many processors it takes

    def slowdown(self, engine: WorkerId, now_s: float, seconds: float, token_count: int) -> float:
        """How many times as long as alone a step takes that begins now and gives so many tokens; `seconds`: alone. What
        goes on beside it when it begins is taken to go on until it ends: all of them last about as long.
        """
        costs = self._contention
        served_s = costs.step_s + costs.token_s * token_count
        load = 1.0 + served_s / seconds if seconds > 0.0 else 1.0
        others = [taken for name, (end_s, taken) in self._busy.items() if name != engine and end_s > now_s]
        wanted = costs.background + load + math.fsum(others)
        factor = max(1.0, wanted / costs.processors)
        if others:
            factor *= costs.together
        self._busy[engine] = (now_s + seconds * factor, load)
        return factor

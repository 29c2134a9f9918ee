"""CPU contention between engines and services on one machine: the slowdown of a step.

An engine is one thread. The processes that relay its tokens (its service, dispatcher, client) use processor time for
each step and token; if processors are scarce, each process gets an equal share. Irrelevant for GPUs.
"""

import math
from dataclasses import dataclass

from ballast.common.ids import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Parameters, measured on a machine with its services: see `benchmarks.fidelity`."""

    processors: int
    step_s: float = 0.0  # processor time per step outside the engine
    token_s: float = 0.0  # processor time per token outside the engine
    background: float = 0.0  # processors in constant use
    together: float = 1.0  # slowdown of a step while another engine's step runs, because they share caches and memory


class Processors:
    """Current use of the processors."""

    def __init__(self, contention: Contention) -> None:
        self._contention = contention
        self._busy: dict[WorkerId, tuple[float, float]] = {}  # engine -> (end of its step, processors used)

    def slowdown(self, engine: WorkerId, now_s: float, seconds: float, token_count: int) -> float:
        """Record a step that begins now, samples `token_count` tokens and takes `seconds` alone, and return its
        slowdown. Other steps in progress are assumed to last at least as long.
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

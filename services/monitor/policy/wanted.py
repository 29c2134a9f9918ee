"""How many instances the demand is worth: a number that an autoscaler may follow.

A burst is what dropping parameters is for, so only demand that lasts counts: its mean over about a minute, held against
the KV memory that an instance has with all of its parameters.
"""

import math
from dataclasses import dataclass

from services.monitor.policy.demand import ClusterDemand

_MEMORY_S = 60.0


@dataclass(slots=True)
class Wanted:
    """`observe` takes one sample after the other, in order of time. `fill_fraction`: of memory that may be wanted."""

    fill_fraction: float
    instance_count: int = 0  # wanted; 0: nothing is known yet
    _demand_bytes: float = 0.0
    _at_s: float | None = None

    def begin(self) -> None:
        """Forgets everything."""
        self.instance_count, self._demand_bytes, self._at_s = 0, 0.0, None

    def observe(self, sample: ClusterDemand) -> None:
        present_count = sum(len(group) for group in sample.groups)
        if not present_count or sample.undropped_bytes <= 0:
            return
        if self._at_s is None:
            self._demand_bytes = float(sample.wanted_bytes)
        else:
            share = 1.0 - math.exp(-max(0.0, sample.at_s - self._at_s) / _MEMORY_S)
            self._demand_bytes += share * (sample.wanted_bytes - self._demand_bytes)
        self._at_s = sample.at_s
        each_bytes = sample.undropped_bytes / present_count * self.fill_fraction
        wanted = max(1, math.ceil(self._demand_bytes / each_bytes - 1e-9))
        # Where part of the demand is unknown, there is at least what is known.
        self.instance_count = wanted if sample.complete else max(wanted, self.instance_count)

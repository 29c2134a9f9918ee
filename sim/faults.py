"""Faults of workers in a simulation. A new kind is added here and to `sim.world.World.strike`."""

from dataclasses import dataclass
from enum import StrEnum

from ballast.common.errors import ConfigError


class FaultKind(StrEnum):
    CRASH = "crash"  # the worker's process ends; after a time it may restart as a new incarnation
    PAUSE = "pause"  # the process is stopped for a time, then continues
    SLOW = "slow"  # all execution takes `factor` times as long


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float  # time in the trace
    kind: FaultKind
    worker: int  # index of the worker, from 0
    duration_s: float | None = None  # duration of PAUSE and SLOW, or time until the restart; None: the rest of the run
    factor: float = 1.0  # slowdown of SLOW

    def check(self, worker_count: int) -> None:
        """Validate the fault.

        Raises:
            ConfigError: a worker does not exist, or times are invalid.
        """
        where = f"faults: {self.kind.value} at {self.at_s} s"
        if not 0 <= self.worker < worker_count:
            raise ConfigError(where, f"worker {self.worker} is not there; there are 0 to {worker_count - 1}")
        if self.at_s < 0.0 or (self.duration_s is not None and self.duration_s <= 0.0):
            raise ConfigError(where, "at_s must not be negative, and duration_s must be above 0")
        if self.kind is FaultKind.PAUSE and self.duration_s is None:
            raise ConfigError(where, "a pause needs duration_s")
        if self.kind is FaultKind.SLOW and self.factor <= 0.0:
            raise ConfigError(where, f"factor must be above 0, got {self.factor}")

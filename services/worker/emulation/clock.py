"""Ideal time of steps and messages of an emulated GPU, without delays of the host.

Several emulated workers share a machine's processors, so under load they wake up some milliseconds late after a step or
on a message. A real GPU's host has its own processors. A step therefore counts as begun when it could have begun: at
the ideal end of the previous step, or at the ideal arrival of the message that it waited for, which the message
contains. Delays above `MOST_S` are not compensated, because the worker may have been idle.

All times are from `time.monotonic`, a clock that the processes of a machine share.
"""

import time
from collections.abc import Callable

from services.worker.core.batch import Preempted

MOST_S = 0.03


class GpuClock:
    """Ideal time of an engine. Used by the engine thread, except for `heard`."""

    def __init__(self) -> None:
        self.ended_s = 0.0  # ideal end of the last step
        self._heard_s = 0.0  # ideal arrival of the last message without activations
        self.due_s = 0.0  # total ideal duration of steps
        self.late_s = 0.0  # total delay of starts, compensated
        self.lost_s = 0.0  # total delay of ends, not compensated

    def heard(self, at_s: float) -> None:
        """Record the ideal arrival of a message without activations. Callable from any thread."""
        self._heard_s = max(self._heard_s, at_s)

    def run(
        self,
        seconds: float,
        began_s: float,
        given_s: float | None,
        slice_count: int = 1,
        preempted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for the end of a step that began at `began_s`. `given_s`: ideal arrival of its activations.

        Raises:
            Preempted: `preempted` returned True between two slices of the step.
        """
        ready_s = max(self.ended_s, self._heard_s if given_s is None else given_s)
        most_s = min(MOST_S, seconds)
        begin_s = ready_s if began_s - most_s <= ready_s <= began_s else began_s
        end_s = begin_s + seconds
        for number in range(1, slice_count):
            time.sleep(max(0.0, begin_s + seconds * number / slice_count - time.monotonic()))
            if preempted():
                self.ended_s = time.monotonic()
                raise Preempted
        time.sleep(max(0.0, end_s - time.monotonic()))
        lost_s = max(0.0, time.monotonic() - end_s - most_s)
        self.ended_s = end_s + lost_s
        self.due_s += seconds
        self.late_s += began_s - begin_s
        self.lost_s += lost_s

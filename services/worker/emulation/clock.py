"""When this worker's GPU would have ended its steps, and heard from others', if no host were ever late.

Several emulated workers share the processors of one machine, and each wakes up some milliseconds late where those are
busy: after a step, when a message comes. A GPU's host has a processor of its own. So a step begins when it could have:
when the step before would have ended, or the message that it waited for would have come, which messages say. What is
late by more than `MOST_S` is not made good; behind a longer gap there may have been nothing to do.

Instants are those of `time.monotonic`, which all processes of a machine share.
"""

import time
from collections.abc import Callable

from services.worker.core.batch import Preempted

MOST_S = 0.03


class GpuClock:
    """Engine thread, but for `heard`."""

    def __init__(self) -> None:
        self.ended_s = 0.0  # of the last step
        self._heard_s = 0.0  # of the last message that brought no activations
        self.due_s = 0.0  # what steps should have taken together
        self.late_s = 0.0  # by how much they began too late, which was made good
        self.lost_s = 0.0  # and ended too late, which was not

    def heard(self, at_s: float) -> None:
        """A message would have come then. Any thread."""
        self._heard_s = max(self._heard_s, at_s)

    def run(
        self,
        seconds: float,
        began_s: float,
        given_s: float | None,
        slice_count: int = 1,
        preempted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Waits until a step is over that has begun at `began_s`. `given_s`: when its activations would have come.

        Raises:
            Preempted: `preempted` said so, which is asked between two slices of the step.
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

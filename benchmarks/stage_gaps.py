"""Why the stages of a pipeline were idle, from the spans of what they executed, all by one clock.

A stage can begin a microbatch when it is through with the one before and the stage before it is through with this one;
the first stage, when so many have come back that one more may be in flight. What it waits until then is for its
neighbours: microbatches are unequal, or there are too few. What passes from then on is latency: sending, receiving,
forming, waking up.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.pipeline.stage_clock import Span


@dataclass(frozen=True)
class Shares:
    """Of the time between two instants, all stages together."""

    busy: float
    waiting: float  # for a neighbour
    latency: float

    @property
    def bubble(self) -> float:
        return self.waiting + self.latency


def shares(stages: Sequence[Sequence[Span]], begin_s: float, end_s: float) -> Shares:
    """
    Raises:
        ValueError: the spans do not reach back to `begin_s`, or there is no time between the two instants.
    """
    if end_s <= begin_s:
        raise ValueError("no request has waited: more of them are needed")
    runs = [{span.step_id: span for span in stage if span.kind == "run"} for stage in stages]
    if not all(runs) or min(s.began_s for s in runs[0].values()) > begin_s + 0.1 * (end_s - begin_s):
        raise ValueError("the spans do not reach back to the beginning: keep more")
    steps = sorted(runs[0])
    back = [runs[-1][step_id].ended_s for step_id in steps if step_id in runs[-1]]  # in this order
    total_s = len(stages) * (end_s - begin_s)
    busy_s = waiting_s = 0.0
    for place, own in enumerate(runs):
        free_s = begin_s
        for number, step_id in enumerate(steps):
            span = own.get(step_id)
            if span is None:  # it had not come so far
                continue
            if place:
                ready_s = runs[place - 1][step_id].ended_s
            else:
                # As many are in flight as it shows; at least one for each stage may be.
                landed = min(bisect_right(back, span.began_s), number + 1 - len(stages))
                ready_s = back[landed - 1] if landed > 0 else begin_s
            waiting_s += _within(free_s, max(free_s, min(ready_s, span.began_s)), begin_s, end_s)
            busy_s += _within(span.began_s, span.ended_s, begin_s, end_s)
            free_s = max(free_s, span.ended_s)
    return Shares(busy_s / total_s, waiting_s / total_s, 1 - (busy_s + waiting_s) / total_s)


def _within(first_s: float, last_s: float, begin_s: float, end_s: float) -> float:
    return max(0.0, min(last_s, end_s) - max(first_s, begin_s))

"""Predictions of decisions and their outcomes, for operators, metrics and figures (pure).

A prediction covers the waiting requests and those that arrive within its horizon. The outcome is read from the
dispatchers' traffic at the end of the horizon, or when the next transition begins, which changes the layout.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from ballast.common.ids import Epoch
from ballast.common.traffic import Served, Traffic, served_between
from services.planner.policy.compare import Comparison, ComparisonTargets
from services.planner.policy.fluid_model import Prediction

_KEPT = 64
_ASK_AGAIN_S = 1.0


@dataclass(slots=True)
class Predicted:
    """A decision by comparison. Other modules may read it; only the core writes."""

    decision: str  # the chosen candidate
    predicted: Prediction
    nothing: Prediction  # prediction for the candidate without a change
    horizon_s: float
    targets: ComparisonTargets
    at_s: float
    epoch: Epoch | None  # epoch of the transition; None: no change
    before: Traffic
    settled_at_s: float | None = None
    served: Served | None = None  # None: unknown, or not yet known

    def told(self, now_s: float) -> str:
        """Return the prediction and its outcome in one line."""
        predicted = f"{self.decision}: predicted {self.predicted.told()}"
        if self.settled_at_s is None:
            return f"{predicted}; in {max(0.0, self.at_s + self.horizon_s - now_s):.0f} s it can be said what came"
        if self.served is None:
            return f"{predicted}; the outcome is unknown, as a dispatcher is gone"
        ttft_s, tpot_s, per_s = self.served.ttft_p99_s, self.served.tpot_s, self.tokens_per_s
        ttft = "no request had its first token" if ttft_s is None else f"P99 TTFT {ttft_s:.2f} s"
        tpot = "" if tpot_s is None else f", TPOT {1e3 * tpot_s:.0f} ms"
        rate = "" if per_s is None else f", {per_s:.0f} tokens/s"
        return f"{predicted}; in the {self.settled_at_s - self.at_s:.0f} s that followed {ttft}{tpot}{rate}"

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens per second until the outcome was read."""
        took_s = 0.0 if self.settled_at_s is None else self.settled_at_s - self.at_s
        return None if self.served is None or took_s <= 0.0 else self.served.token_count / took_s


@dataclass(slots=True)
class PredictionLog:
    open: list[Predicted] = field(default_factory=list[Predicted])
    settled: deque[Predicted] = field(default_factory=lambda: deque[Predicted](maxlen=_KEPT))
    _asked_at_s: float = -math.inf

    def newest_first(self) -> list[Predicted]:
        return sorted([*self.open, *self.settled], key=lambda one: -one.at_s)

    def of(self, epoch: Epoch) -> Predicted | None:
        return next((one for one in self.newest_first() if one.epoch == epoch), None)

    @property
    def due_at_s(self) -> float:
        """Time at which `asks` must be called."""
        ends_s = min((one.at_s + one.horizon_s for one in self.open), default=math.inf)
        return max(ends_s, self._asked_at_s + _ASK_AGAIN_S)

    def note(self, compared: Comparison, traffic: Traffic, at_s: float, epoch: Epoch | None) -> None:
        """Record a decision, unless it changes nothing and the same one was recorded recently."""
        if epoch is None and any(one.epoch is None and one.decision == compared.chosen.name for one in self.open):
            return
        if len(self.open) >= _KEPT:
            return
        nothing, horizon_s, targets = compared.candidates[0].prediction, compared.horizon_s, compared.targets
        chosen = compared.chosen
        predicted = Predicted(chosen.name, chosen.prediction, nothing, horizon_s, targets, at_s, epoch, traffic)
        self.open.append(predicted)

    def asks(self, at_s: float) -> bool:
        """True if the traffic must be read now. After that, False for `_ASK_AGAIN_S`."""
        if at_s < self.due_at_s:
            return False
        self._asked_at_s = at_s
        return True

    def settle(self, traffic: Traffic, at_s: float) -> list[Predicted]:
        """Determine the outcomes of predictions whose horizon has ended, and return them."""
        return self._settle([one for one in self.open if at_s >= one.at_s + one.horizon_s], traffic, at_s)

    def overtake(self, traffic: Traffic, at_s: float) -> list[Predicted]:
        """Determine the outcomes of all predictions, because a transition begins."""
        return self._settle(list(self.open), traffic, at_s)

    def _settle(self, found: list[Predicted], traffic: Traffic, at_s: float) -> list[Predicted]:
        for one in found:
            one.settled_at_s, one.served = at_s, served_between(one.before, traffic)
            self.open.remove(one)
            self.settled.append(one)
        return found

    def forget(self, epoch: Epoch) -> None:
        """Drop the prediction of a transition that was not executed."""
        self.open = [one for one in self.open if one.epoch != epoch]

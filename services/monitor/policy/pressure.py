"""Decides when KV memory is short (overload), and when dropped layers can be restored (relief).

The forecast is the number of KV bytes wanted now, plus their trend over the horizon if it rises. Wanted bytes include
those of all waiting requests, so a burst counts in full when it arrives, before it becomes a trend.

- Overload: the forecast exceeds the threshold, and the workers' own memory is nearly full. Before that a drop gains
  nothing, because requests in a backlog do not wait for memory while workers have free memory, and a pipeline is
  slower. In small clusters random fluctuation raises overloads repeatedly. The planner predicts the gain of a drop, and
  evaluates a second time if the gain is unclear.
- Also an overload: requests wait while instances with much less memory than the others are full. Full instances compute
  no prompts, although the cluster has memory left.
- Relief: parameters are dropped, and for a while wanted bytes (with their trend) and usage have been below a fraction
  of the un-dropped memory. The planner may then restore layers. If a burst arrived soon after the last relief, the next
  relief waits long enough to have avoided that drop. Staying dropped has a small constant cost, but a premature restore
  leaves the next burst without memory.
- Two signals are at least the dwell time apart, and each change of the merged groups restarts it, so that an
  oscillating load causes at most one transition per dwell time. Exception: after a relief that has not changed the
  groups yet, an overload is raised at once, because aborting a restore costs nothing. During a restore there is
  temporarily less memory than before and after it, so demand is compared with the memory after it.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from ballast.common.errors import InvariantViolation
from ballast.common.ids import WorkerId
from services.monitor.policy.demand import ClusterDemand
from services.monitor.policy.trend import slope_per_s

TREND_WINDOW_S = 2.0  # age of the oldest sample in a trend; twenty samples reduce noise
# Quantile of the slopes in the window, so that three out of four confirm the growth.
_SURE_QUANTILE = 0.25
# Maximum interval between bursts for which a relief waits.
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureRules:
    """Thresholds and times of the signals. The first three fields are settings."""

    overload_threshold_fraction: float  # forecast demand above this fraction of the capacity is an overload
    relief_threshold_fraction: float  # usage below this fraction of the un-dropped memory is a relief
    dwell_s: float  # minimum time between any two transitions
    sample_count: int  # maximum number of samples in the history
    horizon_s: float = 1.0  # about the duration of a drop, including the evaluation before it
    trend_window_s: float = TREND_WINDOW_S
    # Subtracted from the threshold, this gives the fraction of the memory that must be used, or awaited on workers,
    # before an overload. An earlier drop gains nothing, and a pipeline is slower.
    arming_below_fraction: float = 0.05
    # Margin added to the forecast demand if the planner cannot compare layouts, so that more groups are merged: if only
    # a few were, all new requests would be routed to them and make them compute-bound.
    overload_margin_fraction: float = 0.25
    relief_after_s: float = 2.0  # minimum duration of low usage, as long as a trend

    @property
    def overload_arming_fraction(self) -> float:
        return self.overload_threshold_fraction - self.arming_below_fraction

    def check(self) -> None:
        if not 0 < self.relief_threshold_fraction < self.overload_arming_fraction <= self.overload_threshold_fraction:
            raise InvariantViolation(f"thresholds are not in order: {self}")


@dataclass(frozen=True, slots=True)
class Overload:
    """Demand exceeds capacity, or will within the horizon."""

    required_bytes: int  # bytes to be freed in the whole cluster
    horizon_s: float


@dataclass(frozen=True, slots=True)
class Relief:
    """Dropped parameters can be restored."""

    used_bytes: int
    undropped_capacity_bytes: int


_NOWHERE = WorkerId("")


@dataclass(frozen=True, slots=True)
class LongRequest:
    """A request waits for a group that can hold it, or is about to outgrow its instance, while other requests have
    enough memory.
    """

    need_tokens: int
    prompt_tokens: int = 0  # part of `need_tokens` that is still to be computed
    leader_id: WorkerId = _NOWHERE  # leader of its current group; empty: none yet


Signal = Overload | Relief | LongRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted demand and capacity at the horizon."""

    demand_bytes: float
    capacity_bytes: float
    growth_bytes_per_s: float

    def missing_bytes(self, fraction: float, margin_fraction: float = 0.0) -> int:
        """Return the additional capacity needed so that demand, with a margin, is `fraction` of the capacity."""
        return max(0, math.ceil(self.demand_bytes * (1 + margin_fraction) / fraction - self.capacity_bytes))


@dataclass(slots=True)
class Pressure:
    """Derives signals from samples of the cluster's demand. Pass the samples to `observe` in order of time."""

    rules: PressureRules
    history: deque[ClusterDemand] = field(init=False)
    forecast: Forecast | None = None  # forecast at the newest sample
    quiet_until_s: float = -math.inf  # no signal is raised before this time
    _changeable_from_s: float = -math.inf  # like `quiet_until_s`, but not extended by a relief
    _relieving: bool = False  # True: a relief was raised, and groups have not changed since
    _low_since_s: float | None = None
    _given_back_s: float | None = None  # start of low demand before the last restore; None if a drop followed
    _relief_after_s: float = 0.0  # learned minimum duration of low demand
    _unchecked_count: int = 0  # samples since the last check
    _level_count: int = 0  # number of newest samples that have the same capacity

    def __post_init__(self) -> None:
        self.rules.check()
        self.history = deque(maxlen=self.rules.sample_count)

    def begin(self, at_s: float) -> None:
        """Reset, and begin a dwell time, because the previous monitor may have just raised a signal."""
        self.history.clear()
        self.forecast = None
        self.quiet_until_s = self._changeable_from_s = at_s + self.rules.dwell_s
        self._relieving = False
        self._given_back_s, self._relief_after_s = None, 0.0
        self._low_since_s = None

    def observe(self, sample: ClusterDemand) -> list[Signal]:
        self._append(sample)
        if sample.capacity_bytes <= 0:  # no group serves, so none can drop or restore
            self.forecast = None
            self._low_since_s = None
            return []
        self.forecast = forecast = self._look_ahead(sample)
        self._note(sample, forecast)
        return self._transition(sample, forecast)

    def _append(self, sample: ClusterDemand) -> None:
        before = self.history[-1] if self.history else None
        if before is not None and sample.at_s < before.at_s:
            raise InvariantViolation(f"sample of {sample.at_s} after {before.at_s}")
        if before is not None and before.groups != sample.groups:
            self.history.clear()  # sums over different groups form no trend
            if before.merged != sample.merged:
                self._learn(before, sample)
                self._relieving = False
                self._changeable_from_s = max(self._changeable_from_s, sample.at_s + self.rules.dwell_s)
                self.quiet_until_s = max(self.quiet_until_s, self._changeable_from_s)
        while self.history and self.history[0].at_s < sample.at_s - self.rules.trend_window_s:
            self.history.popleft()
        self._level_count = self._level_count + 1 if self._is_level(sample) else 1
        self.history.append(sample)
        self._unchecked_count += 1

    def _is_level(self, sample: ClusterDemand) -> bool:
        return bool(self.history) and self.history[-1].capacity_bytes == sample.capacity_bytes

    def _learn(self, before: ClusterDemand, sample: ClusterDemand) -> None:
        """Learn how long to wait for the next burst before a restore."""
        if len(sample.merged) < len(before.merged):
            self._given_back_s = self._low_since_s if self._relieving else None
        elif self._given_back_s is not None:
            kept_s = sample.at_s - self._given_back_s
            self._relief_after_s = kept_s if kept_s <= _LONGEST_WAIT_S else 0.0
            self._given_back_s = None

    def _look_ahead(self, sample: ClusterDemand) -> Forecast:
        rules = self.rules
        wanted = slope_per_s([(s.at_s, s.wanted_bytes) for s in self.history], at_quantile=_SURE_QUANTILE)
        level = self._level_count >= len(self.history)
        capacity = 0.0 if level else slope_per_s([(s.at_s, s.capacity_bytes) for s in self.history])
        # During a restore, KV memory shrinks as planned, down to the amount that full replicas leave.
        now_bytes = self._settled_bytes(sample)
        floor = min(now_bytes, sample.undropped_bytes)
        shrunk = max(floor, now_bytes + min(0.0, capacity) * rules.horizon_s)
        return Forecast(
            demand_bytes=sample.wanted_bytes + max(0.0, wanted * rules.horizon_s),
            capacity_bytes=shrunk,
            growth_bytes_per_s=wanted,
        )

    def _settled_bytes(self, sample: ClusterDemand) -> int:
        """Return the capacity or, during a restore, the capacity after it."""
        comes_back = self._relieving or not sample.merged
        return max(sample.capacity_bytes, sample.undropped_bytes) if comes_back else sample.capacity_bytes

    def _is_alarming(self, sample: ClusterDemand, forecast: Forecast) -> bool:
        if sample.backlog_bytes and sample.small_fill >= self.rules.overload_arming_fraction:
            return True
        if sample.engaged_bytes < self.rules.overload_arming_fraction * self._settled_bytes(sample):
            return False
        return forecast.demand_bytes > self.rules.overload_threshold_fraction * forecast.capacity_bytes

    def _note(self, sample: ClusterDemand, forecast: Forecast) -> None:
        """Record since when demand has been low. Expected growth counts against it only if it is a sustained trend; a
        sudden rise may be a burst, which overload detection handles.
        """
        at_s, rules = sample.at_s, self.rules
        grown_bytes = max(0.0, forecast.growth_bytes_per_s * rules.horizon_s)
        demand_bytes = max(sample.wanted_bytes + grown_bytes, sample.used_bytes)
        low = sample.complete and demand_bytes < rules.relief_threshold_fraction * sample.undropped_bytes
        self._low_since_s = _since(self._low_since_s, at_s, low)

    def _transition(self, sample: ClusterDemand, forecast: Forecast) -> list[Signal]:
        at_s, rules = sample.at_s, self.rules
        if self._is_alarming(sample, forecast) and at_s >= self._changeable_from_s:
            missing = forecast.missing_bytes(rules.overload_threshold_fraction, rules.overload_margin_fraction)
            required = missing or sample.backlog_bytes
            self.quiet_until_s = self._changeable_from_s = at_s + rules.dwell_s
            self._relieving = False
            return [Overload(required, rules.horizon_s)]
        wait_s = max(rules.relief_after_s, self._relief_after_s)
        lasted = self._low_since_s is not None and at_s - self._low_since_s >= wait_s
        if sample.merged and lasted and at_s >= self.quiet_until_s:
            self.quiet_until_s, self._relieving = at_s + rules.dwell_s, True
            return [Relief(sample.used_bytes, sample.undropped_bytes)]
        return []

    def check(self) -> None:
        """Raise InvariantViolation unless the history is ordered and belongs to one set of groups. Samples that have
        been checked are skipped, except the newest.
        """
        newest = list(islice(reversed(self.history), self._unchecked_count + 1))
        self._unchecked_count = 0
        times = [sample.at_s for sample in newest]
        if times != sorted(times, reverse=True):
            raise InvariantViolation(f"samples are out of order, newest first: {times}")
        if any(sample.groups != newest[0].groups for sample in newest):
            raise InvariantViolation("samples of different groups are in one history")


def _since(since_s: float | None, at_s: float, holds: bool) -> float | None:
    if not holds:
        return None
    return at_s if since_s is None else since_s

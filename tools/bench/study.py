"""Combines the result files of a comparison: policies, the reference latencies of SLOs, figures over repetitions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

from ballast.common.errors import ConfigError
from tools.bench.records import RequestOutcome
from tools.bench.results import BenchResult, ComparisonFacts, PolicyResult, RequestResult, read_result

OURS = "drop"  # all other policies are baselines


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure's median, lowest and highest value over the repetitions; None if no repetition has measured it."""

    middle: float | None
    low: float | None
    high: float | None
    count: int

    @staticmethod
    def of(values: Sequence[float | None]) -> "Spread":
        known = [value for value in values if value is not None]
        if not known:
            return Spread(None, None, None, 0)
        return Spread(median(known), min(known), max(known), len(known))


@dataclass(frozen=True, slots=True)
class Reference:
    """The latencies at SLO scale 1: the lowest median TTFT and TPOT of any baseline, and these baselines."""

    ttft_s: float | None
    tpot_s: float | None
    ttft_policy: str
    tpot_policy: str


@dataclass(frozen=True)
class Contestant:
    """The results of a policy with its knobs on one workload, one per repetition."""

    label: str
    policy: str
    runs: tuple[BenchResult, ...]

    @property
    def results(self) -> list[PolicyResult]:
        return [run.policies[self.label] for run in self.runs]

    @property
    def first(self) -> PolicyResult:
        """Result of the first repetition, used for figures over time."""
        return self.results[0]

    def spread(self, figure: Callable[[PolicyResult], float | None]) -> Spread:
        return Spread.of([figure(result) for result in self.results])

    @property
    def is_ours(self) -> bool:
        return self.policy == OURS


@dataclass(frozen=True)
class WorkloadStudy:
    name: str
    contestants: tuple[Contestant, ...]
    undropped_kv_bytes: int

    @property
    def sample(self) -> BenchResult:
        """Any result, for facts that all have in common."""
        return self.contestants[0].runs[0]

    @cached_property
    def reference(self) -> Reference:
        """The reference of this workload, from medians over repetitions; of all policies if there is no baseline."""
        baselines = [c for c in self.contestants if not c.is_ours] or list(self.contestants)
        ttft = _lowest(baselines, lambda r: r.ttft_s.p50)
        tpot = _lowest(baselines, lambda r: r.tpot_s.p50)
        return Reference(ttft[0], tpot[0], ttft[1], tpot[1])

    def violations(self, contestant: Contestant, scale: float) -> Spread:
        """Share of requests above `scale` times the reference, or not served."""
        return Spread.of([violation_share(result, self.reference, scale) for result in contestant.results])

    def demand_fraction(self, contestant: Contestant) -> Spread:
        """Mean KV demand until the last arrival, as a fraction of the KV capacity without dropping."""
        span_s = self.sample.trace.span_s
        return contestant.spread(lambda r: _mean_demand(r, span_s, self.undropped_kv_bytes))


@dataclass(frozen=True)
class Study:
    workloads: tuple[WorkloadStudy, ...]
    files: int
    incomplete: tuple[Path, ...] = field(default=())


def read_study(folder: Path) -> Study:
    """Read all results of `bench overload` in `folder`, which is its `--out` or the `runs` folder in it.

    Raises:
        ConfigError: a file is damaged, no result is complete, or those of one workload had different arguments.
    """
    runs_folder = folder / "runs" if (folder / "runs").is_dir() else folder
    results = [(path, read_result(path)) for path in sorted(runs_folder.rglob("*.json"))]
    incomplete = tuple(path for path, result in results if not result.complete)
    runs = [(result.comparison, result) for _, result in results if result.complete and result.comparison is not None]
    if not runs:
        raise ConfigError(str(folder), "holds no finished result of `ballast bench overload`")
    runs.sort(key=lambda run: run[0].position)
    names = dict.fromkeys(facts.workload for facts, _ in runs)
    workloads = tuple(_workload(name, [run for run in runs if run[0].workload == name]) for name in names)
    return Study(workloads, len(runs), incomplete)


def _workload(name: str, runs: list[tuple[ComparisonFacts, BenchResult]]) -> WorkloadStudy:
    if len({facts.plan_digest for facts, _ in runs}) > 1:
        raise ConfigError(name, "its results were made with different sizes or settings; keep them in separate folders")
    labels = dict.fromkeys((facts.policy, facts.overload_policy) for facts, _ in runs)
    contestants = tuple(
        Contestant(label, policy, tuple(result for facts, result in runs if facts.policy == label))
        for label, policy in labels
    )
    return WorkloadStudy(name, contestants, runs[0][0].undropped_kv_bytes)


def _lowest(
    contestants: Sequence[Contestant], figure: Callable[[PolicyResult], float | None]
) -> tuple[float | None, str]:
    found = [(spread.middle, c.label) for c in contestants if (spread := c.spread(figure)).middle is not None]
    return min(found) if found else (None, "")


def is_violation(request: RequestResult, reference: Reference, scale: float) -> bool:
    if request.outcome is not RequestOutcome.FINISHED or request.first_token_s is None:
        return True
    late = reference.ttft_s is not None and request.first_token_s - request.planned_s > scale * reference.ttft_s
    slow = reference.tpot_s is not None and request.tpot_s is not None and request.tpot_s > scale * reference.tpot_s
    return late or slow


def violation_share(result: PolicyResult, reference: Reference, scale: float) -> float | None:
    counted = [r for r in result.requests if r.outcome is not RequestOutcome.CANCELLED]
    return sum(is_violation(r, reference, scale) for r in counted) / len(counted) if counted else None


def _mean_demand(result: PolicyResult, span_s: float, undropped_kv_bytes: int) -> float | None:
    series = result.series
    demand = [d for at_s, d in zip(series.at_s, series.kv_demand_bytes, strict=True) if at_s <= span_s]
    return sum(demand) / len(demand) / undropped_kv_bytes if demand and undropped_kv_bytes else None

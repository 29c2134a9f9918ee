"""What-if analysis: simulates a trace with one parameter varied."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ballast.common.errors import ConfigError
from sim.hardware import find_cluster
from sim.jobs.scenarios import job_of
from sim.jobs.simulation import Progress, SimJob, simulate
from sim.scenario import Scenario
from tools.bench.results import PolicyResult
from tools.bench.slo import Slo


@dataclass(frozen=True, slots=True)
class Point:
    """One policy under one condition."""

    condition: str
    policy: str
    gpu_count: int
    met_share: float | None  # None: no SLO
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    drop_count: int

    @staticmethod
    def of(condition: str, name: str, gpu_count: int, result: PolicyResult, slo: Slo | None) -> "Point":
        share = slo.met_share(result) if slo is not None and result.requests else None
        drops = sum(t.kind == "drop" and t.phase == "done" for t in result.transitions)
        return Point(condition, name, gpu_count, share, result.ttft_s.p50, result.ttft_s.p99, result.tpot_s.p50, drops)


def _rate(scenario: Scenario, value: float) -> Scenario:
    return scenario.model_copy(update={"rate_scale": scenario.rate_scale * value})


def _burst(scenario: Scenario, value: float) -> Scenario:
    return scenario.model_copy(update={"burst_scale": scenario.burst_scale * value})


def _network(scenario: Scenario, value: float) -> Scenario:
    return scenario.model_copy(update={"network_gbps": value})


def _gpus(scenario: Scenario, value: float) -> Scenario:
    cluster = find_cluster(scenario.cluster)
    cluster.require_one_kind("a sweep over numbers of GPUs")
    if value != int(value):
        raise ConfigError("--sweep", f"gpus must be whole numbers, got {value:g}")
    hosts = f"{-(-int(value) // cluster.gpus_per_host)}x" if cluster.gpus_per_host > 1 else ""
    if hosts and int(value) % cluster.gpus_per_host == 0:
        return scenario.model_copy(update={"cluster": f"{hosts}{cluster.gpus_per_host}x{cluster.gpu.name}"})
    return scenario.model_copy(update={"cluster": f"{int(value)}x{cluster.gpu.name}"})


SWEEPS: Mapping[str, Callable[[Scenario, float], Scenario]] = {
    "rate": _rate,  # factor on the request rate
    "burst": _burst,  # factor on requests in the busiest half minute
    "gpus": _gpus,
    "network": _network,  # Gbit/s of each GPU's network card
}
SLO = "slo"  # seconds of TTFT; needs no further run


def parse_sweep(text: str) -> tuple[str, tuple[float, ...]]:
    """Parse `rate=0.5,1,2`.

    Raises:
        ConfigError: the name is unknown, or a value is not a positive number.
    """
    name, equals, values = text.partition("=")
    if name not in (*SWEEPS, SLO) or not equals:
        raise ConfigError("--sweep", f"is NAME=VALUE,VALUE,... of {', '.join((*SWEEPS, SLO))}; got {text!r}")
    try:
        numbers = tuple(float(value) for value in values.split(","))
    except ValueError as error:
        raise ConfigError("--sweep", f"values must be numbers, got {values!r}") from error
    if not all(0.0 < number < math.inf for number in numbers):
        raise ConfigError("--sweep", f"values must be above 0, got {values!r}")
    return name, numbers


def sweep(
    scenario: Scenario, name: str, values: Sequence[float], slo: Slo | None, progress: Progress | None = None
) -> list[Point]:
    """Run every condition.

    Raises:
        ConfigError: as for `job_of` and `simulate`.
    """
    if name == SLO:
        return _slo_sweep(scenario, values, slo, progress)
    points: list[Point] = []
    for value in values:
        condition = f"{name} {value:g}"
        job = job_of(SWEEPS[name](scenario, value))
        points += _points(job, condition, [slo], progress)
    return points


def _slo_sweep(scenario: Scenario, values: Sequence[float], slo: Slo | None, progress: Progress | None) -> list[Point]:
    plain = slo or Slo(ttft_s=values[0])
    return _points(job_of(scenario), SLO, [replace(plain, ttft_s=value) for value in values], progress)


def _points(job: SimJob, condition: str, slos: Sequence[Slo | None], progress: Progress | None) -> list[Point]:
    result = simulate(job, 0.0, _named(progress, condition))
    several = len(slos) > 1
    return [
        Point.of(
            f"{condition} {slo.ttft_s:g}" if several and slo is not None else condition,
            name,
            sum(kind.gpu_count for kind in job.cluster.kinds),
            policy,
            slo,
        )
        for slo in slos
        for name, policy in result.policies.items()
    ]


def _named(progress: Progress | None, condition: str) -> Progress | None:
    if progress is None:
        return None
    return lambda policy, ended, at_s: progress(f"{policy}, {condition}", ended, at_s)

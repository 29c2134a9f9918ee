"""What would be if: the same trace with one thing changed, and how many GPUs a trace needs.

Whether a cluster is large enough is judged by the share of requests that meet the SLO. The search takes it that more
GPUs never do worse: it doubles their number until that share is reached and then halves the interval.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ballast.common.errors import ConfigError
from ballast.common.units import counted
from sim.hardware import find_cluster
from sim.jobs.scenarios import job_of
from sim.jobs.simulation import Progress, SimJob, simulate
from sim.scenario import Scenario
from tools.bench.results import PolicyResult
from tools.bench.slo import Slo

_OURS = "drop"
_PATIENCE_S = 60.0  # after the last arrival, for those who are still there


@dataclass(frozen=True, slots=True)
class Point:
    """One policy under one condition."""

    condition: str
    policy: str
    gpu_count: int
    met_share: float | None  # None: there is no SLO
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    drop_count: int

    @staticmethod
    def of(condition: str, name: str, gpu_count: int, result: PolicyResult, slo: Slo | None) -> "Point":
        share = slo.met_share(result) if slo is not None and result.requests else None
        drops = sum(t.kind == "drop" and t.phase == "done" for t in result.transitions)
        return Point(condition, name, gpu_count, share, result.ttft_s.p50, result.ttft_s.p99, result.tpot_s.p50, drops)


# ---------------------------------------------------------------- one thing changed


def _rate(scenario: Scenario, value: float) -> Scenario:
    return scenario.model_copy(update={"rate_scale": scenario.rate_scale * value})


def _burst(scenario: Scenario, value: float) -> Scenario:
    return scenario.model_copy(update={"burst_scale": scenario.burst_scale * value})


def _network(scenario: Scenario, value: float) -> Scenario:
    return scenario.model_copy(update={"network_gbps": value})


def _gpus(scenario: Scenario, value: float) -> Scenario:
    cluster = find_cluster(scenario.cluster)
    if value != int(value):
        raise ConfigError("--sweep", f"gpus must be whole numbers, got {value:g}")
    hosts = f"{-(-int(value) // cluster.gpus_per_host)}x" if cluster.gpus_per_host > 1 else ""
    if hosts and int(value) % cluster.gpus_per_host == 0:
        return scenario.model_copy(update={"cluster": f"{hosts}{cluster.gpus_per_host}x{cluster.gpu.name}"})
    return scenario.model_copy(update={"cluster": f"{int(value)}x{cluster.gpu.name}"})


SWEEPS: Mapping[str, Callable[[Scenario, float], Scenario]] = {
    "rate": _rate,  # times as many requests
    "burst": _burst,  # times as many requests in the densest half minute
    "gpus": _gpus,
    "network": _network,  # Gbit/s of each GPU's card
}
SLO = "slo"  # seconds of TTFT: needs no run of its own


def parse_sweep(text: str) -> tuple[str, tuple[float, ...]]:
    """`rate=0.5,1,2`.

    Raises:
        ConfigError: a name that nobody knows, or values that are no numbers above 0.
    """
    name, equals, values = text.partition("=")
    if name not in (*SWEEPS, SLO) or not equals:
        raise ConfigError("--sweep", f"is NAME=VALUE,VALUE,... of {', '.join((*SWEEPS, SLO))}; got {text!r}")
    try:
        numbers = tuple(float(value) for value in values.split(","))
    except ValueError as error:
        raise ConfigError("--sweep", f"values must be numbers, got {values!r}") from error
    if any(number <= 0.0 for number in numbers):
        raise ConfigError("--sweep", f"values must be above 0, got {values!r}")
    return name, numbers


def sweep(
    scenario: Scenario, name: str, values: Sequence[float], slo: Slo | None, progress: Progress | None = None
) -> list[Point]:
    """
    Raises:
        ConfigError: as `job_of` and `simulate`.
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
            job.cluster.gpu_count,
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


# ---------------------------------------------------------------- how many GPUs


@dataclass(frozen=True, slots=True)
class Sizing:
    policy: str
    gpu_count: int | None  # None: not even the most that were allowed
    points: tuple[Point, ...]  # all that were tried, by number of GPUs
    cut_count: int = 0  # requests that were cut to what the model takes


def find_gpus(scenario: Scenario, slo: Slo, most: int, progress: Progress | None = None) -> list[Sizing]:
    """The fewest GPUs that keep the SLO, for each policy of the scenario.

    Raises:
        ConfigError: as `job_of` and `simulate`.
    """
    job = job_of(scenario)
    each = job.model.gpus_per_instance
    if most < each:
        raise ConfigError("--max-gpus", f"one instance of {job.model.name} takes {each} GPUs, got {most}")
    job = replace(job, stop_after_s=job.trace.span_s + _PATIENCE_S + slo.ttft_s)
    return [_fewest(replace(job, policies=(policy,)), policy, slo, most // each, progress) for policy in job.policies]


def _fewest(job: SimJob, policy: str, slo: Slo, most: int, progress: Progress | None) -> Sizing:
    tried: dict[int, Point] = {}  # instances -> what they do

    def suffices(instances: int) -> bool:
        if instances not in tried:
            gpus = instances * job.model.gpus_per_instance
            sized = replace(job, cluster=job.cluster.model_copy(update={"gpu_count": gpus}))
            tried[instances] = _points(sized, counted(gpus, "GPU"), [slo], progress)[0]
        return (tried[instances].met_share or 0.0) >= slo.share

    short, enough = 0, 1
    while not suffices(enough):
        if enough == most:
            return Sizing(policy, None, _by_size(tried), job.trace.clamped_count)
        short, enough = enough, min(2 * enough, most)
    while enough - short > 1:
        middle = (short + enough) // 2
        if suffices(middle):
            enough = middle
        else:
            short = middle
    return Sizing(policy, enough * job.model.gpus_per_instance, _by_size(tried), job.trace.clamped_count)


def _by_size(tried: Mapping[int, Point]) -> tuple[Point, ...]:
    return tuple(point for _, point in sorted(tried.items()))


def in_words(sizings: Sequence[Sizing], slo: Slo, scenario: Scenario, most: int) -> str:
    """No figure that is not in the sizings."""
    gpu = find_cluster(scenario.cluster).gpu.name
    sentences = [f"The goal: {slo}."]
    for sizing in sizings:
        if sizing.gpu_count is None:
            last = sizing.points[-1]
            sentences.append(
                f"With {sizing.policy} {most} {gpu} are not enough: {last.met_share or 0.0:.1%} meet it there."
            )
            continue
        below = [p for p in sizing.points if p.gpu_count < sizing.gpu_count]
        less = f"; with {below[-1].gpu_count} only {below[-1].met_share or 0.0:.1%} do" if below else ""
        keep = "keeps" if sizing.gpu_count == 1 else "keep"
        sentences.append(f"With {sizing.policy} {sizing.gpu_count} {gpu} {keep} it{less}.")
    sentences.append(_saved(sizings))
    if cut := max((sizing.cut_count for sizing in sizings), default=0):
        what = (
            "request is longer than the model takes and was"
            if cut == 1
            else "requests are longer than the model takes and were"
        )
        sentences.append(f"{cut:,} {what} cut: as they are they want more.")
    return " ".join(filter(None, sentences))


def _saved(sizings: Sequence[Sizing]) -> str:
    counts = {sizing.policy: sizing.gpu_count for sizing in sizings}
    ours = counts.get(_OURS)
    others = {name: count for name, count in counts.items() if not name.startswith(_OURS) and count is not None}
    if ours is None or not others:
        return ""
    name, best = min(others.items(), key=lambda item: (item[1], item[0]))
    if ours < best:
        return f"Dropping parameters saves {best - ours} of {best} GPUs ({1 - ours / best:.0%}) against {name}."
    if ours > best:
        return f"Dropping parameters needs {ours - best} GPUs more than {name}: memory is not what is short here."
    return f"Dropping parameters saves no GPU here: {name} needs as many."

"""The fewest GPUs that meet a goal on a trace, for each policy.

The search starts from closed forms: compute time of the prompts, and memory of the running requests' KV. It then
proceeds in growing steps and by bisection. A run ends as soon as too many requests have certainly missed the goal, or
the outcome of every request is certain.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.queues import Queue
from queue import Empty

import numpy as np

from ballast.common.errors import ConfigError
from sim.cost import SimRoofline
from sim.hardware import Cluster, ModelSpec, Timings
from sim.jobs.settled import capacity_tokens, prompt_s
from sim.jobs.simulation import SimJob, specs_of, world_of
from sim.results import Outcome, RequestRecord, leaves, mean_on
from tools.bench.slo import Slo
from tools.bench.traces import Trace, TraceRequest

DROP = "drop"
PARK, BOTH = "recompute:park=on", "drop:park=on"  # idle instances are parked
_PATIENCE_S = 60.0  # simulated time after the last arrival and its TTFT goal, for goals on TPOT
_WINDOWS_S = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_LOOK_S = 0.2  # polling interval for other processes' reports
_USED = 0.8  # usable fraction of the memory in the first guess, because arrivals are uneven

Progress = Callable[[str, int, int, float], None]  # (policy, GPUs, requests ended, time in the trace)


@dataclass(frozen=True, slots=True)
class SizingRun:
    """Result of one tried number of GPUs."""

    gpu_count: int
    keeps: bool
    met_share: float  # fraction of the requests that met the goal; an upper bound if the run ended early
    ended_early_s: float | None  # time in the trace at which a miss was certain
    ttft_p50_s: float | None  # a request without a token counts as waiting until the end of the run
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    drop_count: int  # drops that were completed
    mean_on: float  # mean number of GPUs with allocated memory, until the last arrival or the end
    leave_count: int  # number of times that an instance was parked
    soon_count: int  # of `leave_count`, instances needed again within a minute


@dataclass(frozen=True, slots=True)
class Column:
    """Results of one policy."""

    policy: str
    gpu_count: int | None  # None: not even the maximum suffices
    runs: tuple[SizingRun, ...]  # runs by number of GPUs

    @property
    def answer(self) -> SizingRun | None:
        return next((run for run in self.runs if run.gpu_count == self.gpu_count), None)


@dataclass(frozen=True, slots=True)
class SizingBounds:
    """Bounds on the number of instances, in closed form."""

    prompts: int  # lower bound for any policy, from computing all prompts in time
    memory: float  # estimate from the peak KV demand


@dataclass(frozen=True, slots=True)
class ClusterSize:
    columns: tuple[Column, ...]
    bounds: SizingBounds
    span_s: float
    request_count: int
    cut_count: int  # requests truncated to the model's context


def size(job: SimJob, slo: Slo, most_gpus: int, progress: Progress | None = None, *, processes: int = 1) -> ClusterSize:
    """The fewest GPUs for each policy of the job.

    Args:
        most_gpus: Maximum to try.
        processes: Number of parallel searches, one per policy.

    Raises:
        ConfigError: the maximum allows no instance, the trace is empty, or as for `simulate`.
    """
    each = job.model.gpus_per_instance
    if most_gpus < each:
        raise ConfigError("--max-gpus", f"one instance of {job.model.name} takes {each} GPUs, got {most_gpus}")
    if not job.trace.requests:
        raise ConfigError("--trace", "has no request")
    specs_of(job)  # raises before any run
    job.cluster.require_one_kind("finding how many GPUs it takes")
    bounds = bounds_of(job.trace, job.model, job.cluster, job.timings, slo)
    searches = [partial(_search, replace(job, policies=(p,)), slo, most_gpus // each, bounds) for p in job.policies]
    told = progress or _silent
    if min(processes, len(searches)) < 2:
        columns = [search(told) for search in searches]
    else:
        columns = _beside_each_other(searches, told, processes)
    return ClusterSize(tuple(columns), bounds, job.trace.span_s, len(job.trace.requests), job.trace.clamped_count)


def _silent(policy: str, gpu_count: int, ended_count: int, at_s: float, /) -> None:
    pass


# ---------------------------------------------------------------- closed forms


def bounds_of(trace: Trace, model: ModelSpec, cluster: Cluster, timings: Timings, slo: Slo) -> SizingBounds:
    costs, layers = SimRoofline(model, cluster, timings).costs, model.layer_count
    each_s = np.array([prompt_s(costs, layers, r.input_tokens) for r in trace.requests])
    spared_s = float(np.sort(each_s)[::-1][: _spared(len(each_s), slo)].sum())  # the longest ones may miss the goal
    at_s = np.array([r.arrival_s for r in trace.requests])
    total_s = np.concatenate([[0.0], np.cumsum(each_s)])
    prompts = 1
    for window_s in (*_WINDOWS_S, trace.span_s):
        until = np.searchsorted(at_s, at_s + window_s, "right")
        densest_s = float(np.max(total_s[until] - total_s[:-1])) - spared_s
        prompts = max(prompts, math.ceil(densest_s / (window_s + slo.ttft_s)))
    return SizingBounds(prompts, _memory(trace.requests, model, cluster, timings))


def _spared(count: int, slo: Slo) -> int:
    """Number of requests that may miss the goal."""
    return math.floor(count * (1.0 - slo.share) + 1e-9)


def _memory(requests: Sequence[TraceRequest], model: ModelSpec, cluster: Cluster, timings: Timings) -> float:
    """Peak KV demand as a multiple of one instance's KV capacity, at the step times of a nearly full instance."""
    costs, layers = SimRoofline(model, cluster, timings).costs, model.layer_count
    capacity = capacity_tokens(model, cluster, timings)
    mean = sum(r.input_tokens + r.output_tokens / 2 for r in requests) / len(requests)
    running, held = max(1.0, _USED * capacity / mean), _USED * capacity
    step_s = costs.stage_s + running * costs.sequence_s + costs.head_s
    step_s += layers * (costs.dense_work_s(running) + held * costs.context_s)
    changes: list[tuple[float, float]] = []
    for r in requests:
        tokens = r.input_tokens + r.output_tokens / 2
        changes += [(r.arrival_s, tokens), (r.arrival_s + r.output_tokens * step_s, -tokens)]
    return max(accumulate(tokens for _, tokens in sorted(changes))) / capacity


def first_guess(bounds: SizingBounds, policy: str, model: ModelSpec, cluster: Cluster, timings: Timings) -> int:
    """Number of instances with which the search starts. With dropping, half of the parameters count."""
    wanted = bounds.memory / _USED
    if policy.split(":")[0] == DROP:
        whole = cluster.gpu.memory_bytes * timings.memory_fraction * model.gpus_per_instance
        share = min(0.95, model.parameter_bytes / whole)
        wanted *= (1.0 - share) / (1.0 - share / 2)
    return max(1, bounds.prompts, math.ceil(wanted))


# ---------------------------------------------------------------- the search


def _search(job: SimJob, slo: Slo, most: int, bounds: SizingBounds, progress: Progress) -> Column:
    (policy,), each = job.policies, job.model.gpus_per_instance
    tried: dict[int, SizingRun] = {}

    def keeps(instances: int) -> bool:
        if instances not in tried:
            told = partial(progress, policy, instances * each)
            sized = replace(job, cluster=job.cluster.model_copy(update={"gpu_count": instances * each}))
            tried[instances] = attempt(sized, slo, told)
        return tried[instances].keeps

    guess = first_guess(bounds, policy, job.model, job.cluster, job.timings)
    found = fewest(keeps, min(most, guess), bounds.prompts, most)
    runs = tuple(run for _, run in sorted(tried.items()))
    return Column(policy, None if found is None else found * each, runs)


def fewest(keeps: Callable[[int], bool], guess: int, least: int, most: int) -> int | None:
    """The fewest instances that meet the goal, assuming monotonicity; None: not even `most` do. The search starts at
    `guess`, and tries none below `least`.
    """
    least = min(least, most)
    step = max(1, guess // 8)
    if keeps(guess):
        short, enough = least - 1, guess
        while enough > least:
            below = max(least, enough - step)
            if not keeps(below):
                short = below
                break
            enough, step = below, 2 * step
    else:
        short, enough = guess, guess
        while True:
            if short == most:
                return None
            enough = min(most, short + step)
            if keeps(enough):
                break
            short, step = enough, 2 * step
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if keeps(middle) else (middle, enough)
    return enough


# ---------------------------------------------------------------- one run


class Judge:
    """Counts requests that meet the goal by TTFT and TPOT while a run is in progress."""

    def __init__(self, slo: Slo, records: Iterable[RequestRecord]) -> None:
        self._slo = slo
        self._coming = list(reversed(list(records)))
        self._open: list[RequestRecord] = []
        self._count = len(self._coming)
        self.met_count = self.missed_count = 0

    @property
    def fails(self) -> bool:
        """True if too many requests have missed the goal."""
        return self.missed_count > _spared(self._count, self._slo)

    @property
    def met_share(self) -> float:
        """Share of requests that meet the goal; an upper bound while some are open."""
        return 1.0 - self.missed_count / self._count

    def look(self, now_s: float) -> bool:
        """Update the counts. Returns True if the verdict is final."""
        while self._coming and self._coming[-1].arrival_s <= now_s:
            self._open.append(self._coming.pop())
        still: list[RequestRecord] = []
        for record in self._open:
            kept = self._kept(record, now_s)
            if kept is None:
                still.append(record)
            else:
                self.met_count += kept
                self.missed_count += not kept
        self._open = still
        return self.fails or not (still or self._coming)

    def close(self, now_s: float) -> None:
        """After the end of the simulation, judge the open requests by their tokens so far."""
        for record in self._open:
            token_count = len(record.token_times_s)
            kept = token_count > 0 and now_s - record.token_times_s[0] <= (self._slo.tpot_s or math.inf) * token_count
            self.met_count += kept
            self.missed_count += not kept
        self.missed_count += len(self._coming)
        self._open, self._coming = [], []

    def _kept(self, record: RequestRecord, now_s: float) -> bool | None:
        """True if the request meets the goal; None: not known yet."""
        slo, times_s = self._slo, record.token_times_s
        if record.outcome not in (Outcome.OPEN, Outcome.FINISHED):
            return False
        if not times_s:
            return False if now_s - record.arrival_s > slo.ttft_s else None
        if times_s[0] - record.arrival_s > slo.ttft_s:
            return False
        if slo.tpot_s is None or record.wanted_tokens < 2:
            return True
        if record.outcome is Outcome.FINISHED:
            return (times_s[-1] - times_s[0]) / (len(times_s) - 1) <= slo.tpot_s
        return False if now_s - times_s[0] > slo.tpot_s * (record.wanted_tokens - 1) else None


def attempt(job: SimJob, slo: Slo, progress: Callable[[int, float], None] | None = None) -> SizingRun:
    """Try the job's cluster with the job's only policy. The run ends early once the verdict is final."""
    (_, rules), *_ = specs_of(job)
    patience_s = slo.ttft_s + (_PATIENCE_S if slo.tpot_s is not None else 0.0)
    world = world_of(replace(job, stop_after_s=job.trace.span_s + patience_s), rules)
    judge = Judge(slo, world.clients.records)

    def look(ended_count: int, now_s: float) -> None:
        if judge.look(now_s):
            world.clients.stop()
        if progress is not None:
            progress(ended_count, now_s)

    run = world.run(look)
    now_s = world.clock.now_s - world.zero_s
    judge.look(now_s)
    early_s = now_s if judge.fails and now_s < job.trace.span_s else None
    if early_s is None:
        judge.close(now_s)
    firsts_s = [
        (r.token_times_s[0] if r.token_times_s else now_s) - r.arrival_s for r in run.records if r.arrival_s <= now_s
    ]
    paces_s = [
        (r.token_times_s[-1] - r.token_times_s[0]) / (len(r.token_times_s) - 1)
        for r in run.records
        if len(r.token_times_s) > 1
    ]
    leave_count, soon_count = leaves(run.samples)
    return SizingRun(
        job.cluster.gpu_count,
        keeps=not judge.fails,
        met_share=judge.met_share,
        ended_early_s=early_s,
        ttft_p50_s=_quantile(firsts_s, 0.5),
        ttft_p99_s=_quantile(firsts_s, 0.99),
        tpot_p50_s=_quantile(paces_s, 0.5),
        drop_count=sum(t.journal.kind.value == "drop" and t.journal.stage.value == "done" for t in run.transitions),
        mean_on=mean_on(run.samples, job.trace.span_s) * job.model.gpus_per_instance,
        leave_count=leave_count,
        soon_count=soon_count,
    )


def _quantile(values: Sequence[float], share: float) -> float | None:
    return float(np.quantile(values, share)) if values else None


# ---------------------------------------------------------------- several processes

_Told = tuple[str, int, int, float]
_queue: "Queue[_Told] | None" = None  # in a search process: queue for reports to the parent


def _listen(queue: "Queue[_Told]") -> None:
    global _queue
    _queue = queue
    queue.cancel_join_thread()  # the parent may end the pool without having read all reports


def _tell(*told: *_Told) -> None:
    assert _queue is not None, "set when the process started"
    _queue.put(told)


def _in_process(search: Callable[[Progress], Column]) -> Column:
    return search(_tell)


def _beside_each_other(
    searches: Sequence[Callable[[Progress], Column]], progress: Progress, processes: int
) -> list[Column]:
    context = get_context("fork")
    queue: Queue[_Told] = context.Queue()
    with ProcessPoolExecutor(min(processes, len(searches)), context, _listen, (queue,)) as pool:
        futures = [pool.submit(_in_process, search) for search in searches]
        while not all(future.done() for future in futures):
            try:
                progress(*queue.get(timeout=_LOOK_S))
            except Empty:
                continue
        return [future.result() for future in futures]

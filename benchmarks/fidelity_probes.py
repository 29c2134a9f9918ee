"""Probes of a cluster on this machine for a comparison with its simulation. They measure how much longer a step takes
than the engine alone, and the processor time used by everything but the engines.

Identical requests are sent at several levels of concurrency: one in total, one per worker, and several per worker; then
again with the workers as stages of one pipeline. Processor time is read from /proc for each process, except that of the
busiest thread of a worker, which is its engine's.
"""

import asyncio
import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from ballast.client import AsyncClient, SamplingParams
from ballast.common.cost import Chunk, CostModel
from sim.processors import Contention
from tools.local.cluster import LocalCluster

PROMPT_TOKENS = 64
LONE_TOKENS, TOKENS = 24, 64  # answer tokens of a single request, and of each of several concurrent ones
_ROUNDS, _LONE_ROUNDS = 5, 4  # rounds over all levels; measurements of single requests per round
_EACH = (1, 4, 8)  # concurrent requests per worker
_PIPELINED_EACH = (4, 16)
_LEAST_S = 1e-5  # shorter processor times cannot be measured
_FORMING_S = 4.0  # time for the planner to form one pipeline
_IDLE_S = 2.0
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_AFTER_NAME = 2  # position of the name's field in /proc/PID/stat, counted from 1; names may contain blanks
_USER_FIELD, _SYSTEM_FIELD = 14, 15
_TOGETHER = np.arange(1.0, 1.5, 0.02)
# Candidates of `fitted`.
_STEP_SHARES, _SEQUENCE_SHARES = np.arange(0.0, 0.5, 0.01), np.arange(0.0, 0.1, 0.01)  # of a lone request's step


@dataclass(frozen=True, slots=True)
class Level:
    """Measurements at one level of concurrency."""

    request_count: int
    step_count: int  # steps until each request has one more token
    tpot_s: float
    served_s: float  # processor time outside the engines during that time

    @property
    def each(self) -> float:
        """Sequences per step."""
        return self.request_count / self.step_count


@dataclass(frozen=True, slots=True)
class Seen:
    first_s: float  # TTFT of single requests
    background: float  # processors used by everything while idle
    levels: tuple[Level, ...]  # the first one has a single request
    pipelined: tuple[Level, ...] = ()  # the same levels, with the workers as stages of one pipeline


def at_times(seen: Seen, then: Sequence[Seen]) -> Seen:
    """Return the mean of the probes `then`; the pipeline levels of `seen` are scaled by the change of the machine's
    speed.
    """
    levels = tuple(
        replace(
            level,
            tpot_s=fmean(at.levels[i].tpot_s for at in then),
            served_s=fmean(at.levels[i].served_s for at in then),
        )
        for i, level in enumerate(seen.levels)
    )
    slower = math.exp(
        fmean(math.log(now.tpot_s / level.tpot_s) for now, level in zip(levels, seen.levels, strict=True))
    )
    pipelined = (replace(x, tpot_s=x.tpot_s * slower, served_s=x.served_s * slower) for x in seen.pipelined)
    first_s, background = fmean(at.first_s for at in then), fmean(at.background for at in then)
    return Seen(first_s, background, levels, tuple(pipelined))


async def probe(alone: LocalCluster) -> Seen:
    """Probe a cluster whose workers serve alone, without other load."""
    workers = len(alone.processes["worker"])
    async with AsyncClient(alone.address) as client:
        await _round(client, workers, LONE_TOKENS)  # warm-up
        spent = Spent(alone)
        await asyncio.sleep(_IDLE_S)
        served_s, passed_s = spent.served_s()
        background = served_s / passed_s
        counts = ((1, 1), *((each * workers, workers) for each in _EACH))
        first_s, levels = await _levels(client, alone, counts, background)
    return Seen(first_s, background, levels)


async def probe_pipeline(cluster: LocalCluster, background: float) -> tuple[Level, ...]:
    """Probe one pipeline of all workers, with one microbatch per stage in flight."""
    workers = len(cluster.processes["worker"])
    counts = [(count, min(count, workers) * workers) for count in (1, *(each * workers for each in _PIPELINED_EACH))]
    async with AsyncClient(cluster.address) as client:
        await asyncio.sleep(_FORMING_S)
        await _round(client, workers, LONE_TOKENS)
        return (await _levels(client, cluster, counts, background))[1]


async def _levels(
    client: AsyncClient, cluster: LocalCluster, counts: Sequence[tuple[int, int]], background: float
) -> tuple[float, tuple[Level, ...]]:
    """(TTFT of a single request, all levels). The levels alternate, because the machine's speed varies."""
    made: list[list[tuple[float, float]]] = [[] for _ in counts]
    served_s = [0.0 for _ in counts]
    for _, (level, (count, _)) in itertools.product(range(_ROUNDS), enumerate(counts)):
        spent = Spent(cluster)
        made[level] += [await _round(client, count, tokens_of(count)) for _ in range(_LONE_ROUNDS if count == 1 else 1)]
        more_s, passed_s = spent.served_s()
        served_s[level] += max(0.0, more_s - background * passed_s)
    levels = tuple(
        Level(count, steps, median(tpot_s for _, tpot_s in rounds), total_s / (len(rounds) * tokens_of(count)))
        for (count, steps), rounds, total_s in zip(counts, made, served_s, strict=True)
    )
    return median(first_s for first_s, _ in made[0]), levels


def tokens_of(count: int) -> int:
    """Answer tokens of each of `count` concurrent requests."""
    return LONE_TOKENS if count == 1 else TOKENS


async def _round(client: AsyncClient, count: int, tokens: int) -> tuple[float, float]:
    """Send `count` requests at once. Returns (mean TTFT, mean time between tokens while all of them decode)."""
    began_s = time.perf_counter()
    times = await asyncio.gather(*(_one(client, number, tokens) for number in range(count)))
    since_s, until_s = max(each[0] for each in times), min(each[-1] for each in times)
    gaps = [
        (inside[-1] - inside[0]) / (len(inside) - 1)
        for each in times
        if len(inside := [at_s for at_s in each if since_s <= at_s <= until_s]) > 1
    ]
    return fmean(each[0] for each in times) - began_s, fmean(gaps)


async def _one(client: AsyncClient, number: int, tokens: int) -> list[float]:
    """Send one request. Returns the arrival times of its tokens."""
    prompt = [7 + (number + i) % 400 for i in range(PROMPT_TOKENS)]
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    times: list[float] = []
    async for chunk in client.stream(token_ids=prompt, sampling=sampling, include_text=False):
        times += [time.perf_counter()] * len(chunk.token_ids)
    return times


# ------------------------------------------------------------ processor time


class Spent:
    """Processor time of a cluster and of this process since construction."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._pids = {process.pid: service for service, group in cluster.processes.items() for process in group}
        self._own_s = time.process_time()
        self._before = {pid: _of_threads(pid) for pid in self._pids}
        self._began_s = time.perf_counter()

    def served_s(self) -> tuple[float, float]:
        """(processor seconds of everything but the engines, including this client; seconds passed)."""
        total_s = time.process_time() - self._own_s
        for pid, service in self._pids.items():
            before, now = self._before[pid], _of_threads(pid)
            each_s = [spent_s - before.get(thread, 0.0) for thread, spent_s in now.items()]
            total_s += sum(each_s) - (max(each_s) if service == "worker" else 0.0)
        return total_s, time.perf_counter() - self._began_s


def _of_threads(pid: int) -> dict[str, float]:
    return {path.parent.name: _spent_s(path) for path in Path(f"/proc/{pid}/task").glob("*/stat")}


def _spent_s(path: Path) -> float:
    fields = path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    first = _AFTER_NAME + 1
    return (int(fields[_USER_FIELD - first]) + int(fields[_SYSTEM_FIELD - first])) * _TICK_S


# ------------------------------------------------------------ fits


def contention(levels: Sequence[Level], background: float, processors: int) -> Contention:
    """The services' processor time per step and per token that fits the measurements best."""
    rows = np.array([[level.step_count, level.request_count] for level in levels], dtype=float)
    seen_s = np.array([max(level.served_s, _LEAST_S) for level in levels])
    found = np.linalg.lstsq(rows / seen_s[:, None], np.ones(len(levels)), rcond=None)[0]
    step_s, token_s = (max(0.0, float(x)) for x in found)
    return Contention(processors=processors, step_s=step_s, token_s=token_s, background=background)


def fitted(levels: Sequence[Level], whole: CostModel, known: Contention) -> tuple[float, float, float]:
    """Least-squares fit to all levels: overhead of a step with one request, overhead per further sequence, and slowdown
    while another engine runs. `whole`: the profile's costs of all layers.
    """
    unit_s = levels[0].tpot_s
    best = (math.inf, 0.0, 0.0, 1.0)
    for step_s, sequence_s, together in itertools.product(_STEP_SHARES * unit_s, _SEQUENCE_SHARES * unit_s, _TOGETHER):
        tried = float(step_s), float(sequence_s), float(together)
        off = [math.log(_predicted(level, whole, known, *tried) / level.tpot_s) for level in levels]
        best = min(best, (math.fsum(x * x for x in off), *tried))
    return best[1:]


def predicted(
    levels: Sequence[Level], whole: CostModel, known: Contention, step_s: float, sequence_s: float
) -> Mapping[int, float]:
    """Number of concurrent requests -> predicted seconds between tokens."""
    return {x.request_count: _predicted(x, whole, known, step_s, sequence_s, known.together) for x in levels}


def _predicted(
    level: Level, whole: CostModel, known: Contention, step_s: float, sequence_s: float, together: float
) -> float:
    tokens = tokens_of(level.request_count)
    alone_s = _engine_s(whole, level.each, tokens) + step_s + (level.each - 1) * sequence_s
    load = 1.0 + (known.step_s + known.token_s * level.each) / alone_s
    shared = max(1.0, (known.background + load * level.step_count) / known.processors)
    return alone_s * shared * (together if level.step_count > 1 else 1.0)


def _engine_s(whole: CostModel, each: float, tokens: int) -> float:
    return whole.batch_cost_s([Chunk(PROMPT_TOKENS + tokens // 2, 1)] * round(each))

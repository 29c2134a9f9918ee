"""Savings of parking on real services with emulated GPUs in real time, compared with a constant number of workers.

    python -m benchmarks.parking_real --traces DIR [--workers 8] [--dispatchers 2] [--begin-s 120] [--seconds 200]

Replays the slice code-spike of `benchmarks.parking`, with the same rate per worker, first on a cluster that recomputes
and then on one that drops and parks. Both run on this machine, so that ratios are meaningful even if it is slow. Every
token is checked. `late`: delay of the workers' steps as a fraction of their ideal time.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ballast.client import AsyncClient
from ballast.common.errors import BallastError, Unavailable
from ballast.common.layout import Standing
from benchmarks.parking import SLICES, job
from services.worker.emulation.tokens import answer
from sim.jobs.machines import catalogue_machine, emulation_of
from sim.jobs.sizing import BOTH
from tools.bench.emulation import Emulation, lateness
from tools.bench.records import BenchRecord, ReplayRun, RequestOutcome
from tools.bench.replay import Replay, ReplayOptions
from tools.bench.slo import Slo
from tools.bench.target import ClusterTarget
from tools.bench.traces import Trace
from tools.local.cluster import LocalCluster, Service

_SLICE = SLICES["code-spike"]
_POLICIES: dict[str, list[str]] = {
    "static": ["--overload-policy", "recompute"],
    "drop and park": ["--overload-policy", "drop", "--park", "on"],
}
_LOOK_S = 0.25
_MOST_TTFT = 1.25  # maximum TTFT relative to the static cluster's, unless half of the goal is more
_MOST_ON = 0.6  # maximum instance-seconds relative to the static cluster's


@dataclass(frozen=True, slots=True)
class ParkingRun:
    run: ReplayRun
    mean_on: float  # mean number of workers with allocated memory
    late: float
    wrong_count: int

    @property
    def lost_count(self) -> int:
        return sum(record.outcome is not RequestOutcome.FINISHED for record in self.run.records)

    @property
    def ttft_p99_s(self) -> float:
        return float(np.quantile([r.ttft_s for r in self.run.records if r.ttft_s is not None], 0.99))

    def met_share(self, slo: Slo) -> float:
        return sum(_met(record, slo) for record in self.run.records) / len(self.run.records)


def _met(record: BenchRecord, slo: Slo) -> bool:
    ttft_s, tpot_s = record.ttft_s, record.tpot_s
    in_steps = slo.tpot_s is None or tpot_s is None or tpot_s <= slo.tpot_s
    return record.outcome is RequestOutcome.FINISHED and ttft_s is not None and ttft_s <= slo.ttft_s and in_steps


def part(whole: Trace, begin_s: float, seconds: float) -> Trace:
    """The requests that arrive within `seconds` from `begin_s`, which becomes time zero."""
    ends_s = begin_s + seconds
    requests = [replace(r, arrival_s=r.arrival_s - begin_s) for r in whole.requests if begin_s <= r.arrival_s < ends_s]
    return replace(whole, requests=tuple(requests))


async def _on_counts(client: AsyncClient, counts: list[int]) -> None:
    while True:
        try:
            layout = (await client.status()).layout
        except Unavailable:
            layout = None
        if layout is not None:
            counts.append(sum(m.standing is not Standing.PARKED for g in layout.groups for m in g.members))
        await asyncio.sleep(_LOOK_S)


async def measure(emulation: Emulation, policy: str, trace: Trace, workers: int, dispatchers: int) -> ParkingRun:
    """Replay the trace on a cluster with this policy.

    Raises:
        BallastError: a service did not start, or has crashed.
    """
    flags: dict[Service, Sequence[str]] = {"worker": emulation.worker_flags, "planner": _POLICIES[policy]}
    folder, counts = emulation.info.path, list[int]()
    with tempfile.TemporaryDirectory() as logs:
        cluster = LocalCluster(folder, workers=workers, dispatchers=dispatchers, flags=flags, log_dir=Path(logs))
        async with cluster, AsyncClient(",".join(cluster.addresses)) as client:
            target = ClusterTarget(client)
            vocabulary = (await target.model()).vocab_size
            watch = asyncio.create_task(_on_counts(client, counts))
            run = await Replay(target, trace, ReplayOptions(record_tokens=True), vocabulary).run()
            watch.cancel()
            await asyncio.wait([watch])
        late = lateness(Path(logs))
    wrong = [r for r in run.records if r.output_token_ids != answer(r.prompt_token_ids, r.output_tokens, vocabulary)]
    return ParkingRun(run, sum(counts) / max(1, len(counts)), late.late_share, len(wrong))


async def compare(args: argparse.Namespace, folder: Path) -> bool:
    model, gpu = _SLICE.on
    scaled = replace(_SLICE, rate_scale=_SLICE.rate_scale * args.workers / _SLICE.static)
    trace = part(job(scaled, args.traces, BOTH, args.workers).trace, args.begin_s, args.seconds)
    emulation = emulation_of(folder / "stand-in", catalogue_machine(gpu, model))
    print("| | requests | in time | P99 TTFT (s) | workers on | lost | wrong | late |\n|" + "---|" * 8, flush=True)
    found: list[ParkingRun] = []
    for policy in _POLICIES:
        one = await measure(emulation, policy, trace, args.workers, args.dispatchers)
        found.append(one)
        figures = (
            len(one.run.records),
            f"{one.met_share(_SLICE.slo):.1%}",
            f"{one.ttft_p99_s:.2f}",
            f"{one.mean_on:.2f}",
            one.lost_count,
            one.wrong_count,
            f"{one.late:.1%}",
        )
        print(f"| {policy} | {' | '.join(map(str, figures))} |", flush=True)
    static, parked = found
    slo, on = _SLICE.slo, parked.mean_on / static.mean_on
    print(f"\n{on:.2f} x the worker-seconds, {parked.ttft_p99_s / static.ttft_p99_s:.2f} x the P99 TTFT")
    in_time = parked.ttft_p99_s <= max(_MOST_TTFT * static.ttft_p99_s, slo.ttft_s / 2)
    right = not any(one.lost_count or one.wrong_count for one in found)
    return right and in_time and on <= _MOST_ON and parked.met_share(slo) >= min(slo.share, static.met_share(slo))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--dispatchers", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--begin-s", type=float, default=120.0, metavar="S", help="start in the trace (%(default)s)")
    parser.add_argument("--seconds", type=float, default=200.0, metavar="S", help="part of the trace (%(default)s)")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return 0 if asyncio.run(compare(args, Path(folder))) else 1
    except BallastError as error:
        print(f"parking: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""Measures the GPU-seconds that a bursty day takes with parking, dropping and offline work, compared with `recompute`.

    python -m benchmarks.day --traces DIR [--scale 0.02] [--gpus N] [--write]

The program simulates the first ten hours of BurstGPT, compressed to twelve minutes, on the number of GPUs that
`recompute` needs for the goal (a search finds it for another `--scale`). It runs three times: first all GPUs serve,
then they park and drop, and then they also run endless offline requests, which are paused when online requests need
memory. Offline tokens are valued at the GPU-seconds they would cost on GPUs without online work. DIR is as for
`benchmarks.parking`; `--write` puts the table and the figure into docs/parking.md.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ballast.common.errors import BallastError
from benchmarks.offline import summaries
from benchmarks.parking import SLICES, job, needed
from benchmarks.quoting import quote
from sim.jobs.simulation import SimJob, specs_of, world_of
from sim.jobs.sizing import BOTH
from sim.offline import OfflineLoad
from sim.results import RequestRecord, SimRun, mean_on
from tools.bench.slo import Slo
from tools.bench.style import BLUE, GREY, RC, VERMILION
from tools.bench.traces import Trace

_DAY = SLICES["burstgpt"]
_PAGE = Path("docs/parking.md")
_FIGURE = Path("docs/pictures/day.png")
_ALONE_S = 60.0  # simulated duration of a GPU with offline work only
_FEWER = 0.45  # minimum saving, as a fraction of the GPU-seconds, for exit status 0
_BIN_S = 10.0  # bin width of arrivals in the figure


@dataclass(frozen=True, slots=True)
class Day:
    name: str
    run: SimRun
    gpus_on: float  # mean number of GPUs that are not parked, until the last arrival
    span_s: float

    @property
    def gpu_seconds(self) -> float:
        return self.gpus_on * self.span_s

    @property
    def offline_per_s(self) -> float:
        return self.run.offline_token_count / self.span_s

    def met_share(self, slo: Slo) -> float:
        return sum(_met(record, slo) for record in self.run.records) / len(self.run.records)


def _met(record: RequestRecord, slo: Slo) -> bool:
    times_s = record.token_times_s
    if not times_s or times_s[0] - record.arrival_s > slo.ttft_s:
        return False
    return slo.tpot_s is None or times_s[-1] - times_s[0] <= slo.tpot_s * max(1, len(times_s) - 1)


def simulated(name: str, one: SimJob, policy: str, offline: OfflineLoad | None) -> Day:
    span_s = one.trace.span_s
    told = replace(one, policies=(policy,), offline=offline, stop_after_s=span_s + _DAY.slo.ttft_s)
    run = world_of(told, specs_of(told)[0][1]).run()
    return Day(name, run, mean_on(run.samples, span_s) * one.model.gpus_per_instance, span_s)


def alone_per_s(one: SimJob, offline: OfflineLoad) -> float:
    """Offline tokens per second of one instance without online work."""
    first = replace(one.trace.requests[0], arrival_s=_ALONE_S)
    single = one.cluster.model_copy(update={"gpu_count": one.model.gpus_per_instance})
    idle = replace(one, cluster=single, trace=replace(one.trace, requests=(first,)))
    return simulated("offline alone", idle, "recompute", offline).run.offline_token_count / _ALONE_S


def table(days: Sequence[Day], alone: float) -> str:
    static = days[0]
    lines = ["| | GPUs on | GPU-seconds | in time | offline tokens/s | worth GPU-seconds | drops |", "|" + "---|" * 7]
    for day in days:
        worth = day.run.offline_token_count / alone
        journals = [transition.journal for transition in day.run.transitions]
        drops = sum(journal.kind.value == "drop" and journal.stage.value == "done" for journal in journals)
        change = day.gpu_seconds / static.gpu_seconds - 1
        figures = (f"{day.gpus_on:.2f}", f"{day.gpu_seconds:,.0f} ({change:+.0%})", f"{day.met_share(_DAY.slo):.2%}")
        lines.append(f"| {day.name} | {' | '.join(figures)} | {day.offline_per_s:,.0f} | {worth:,.0f} | {drops} |")
    return "\n".join(lines)


def draw(days: Sequence[Day], trace: Trace, scale: float, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with mpl.rc_context(RC):
        figure, (above, below) = plt.subplots(
            2, 1, figsize=(9, 4.2), sharex=True, height_ratios=(1, 2), layout="constrained"
        )
        hours = [request.arrival_s / scale / 3600 for request in trace.requests]
        bins = [i * _BIN_S / scale / 3600 for i in range(int(trace.span_s / _BIN_S) + 2)]
        above.hist(hours, bins=bins, color=GREY, weights=[1 / _BIN_S] * len(hours))
        above.set_ylabel("requests/s")
        for day, colour, line in zip(days, (VERMILION, BLUE), ("--", "-"), strict=False):
            samples = [sample for sample in day.run.samples if 0.0 <= sample.at_s <= day.span_s]
            at_h = [sample.at_s / scale / 3600 for sample in samples]
            label = f"{day.name}: {day.gpu_seconds:,.0f} GPU-seconds"
            below.step(at_h, [s.on_count for s in samples], line, color=colour, where="post", label=label)
        below.set(xlabel="hours", ylabel="GPUs that have their memory")
        below.set_ylim(0, None)
        below.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=2)
        figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--scale", type=float, default=_DAY.time_scale, help="time scale of the trace (%(default)s)")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs (default: as many as recompute needs)")
    parser.add_argument("--write", action="store_true", help="update docs/parking.md and docs/pictures/day.png")
    args = parser.parse_args(argv)
    try:
        same = args.scale == _DAY.time_scale
        day = replace(_DAY, time_scale=args.scale, rate_scale=_DAY.rate_scale * args.scale / _DAY.time_scale)
        count = args.gpus or (_DAY.static if same else None) or needed(day, args.traces)
        one = job(day, args.traces, BOTH, count)
        offline = OfflineLoad(lengths=summaries(1), until_s=one.trace.span_s)
        alone = alone_per_s(one, offline)
        days = [simulated("recompute, always on", one, "recompute", None)]
        days.append(simulated("drop and park", one, BOTH, None))
        days.append(simulated("drop and park, with offline requests", one, BOTH, offline))
        print(f"{count} GPUs; {alone:,.0f} offline tokens/s of a GPU with nothing else\n\n{table(days, alone)}")
        if args.write:
            quote(_PAGE, "day", table(days, alone))
            draw(days, one.trace, args.scale, _FIGURE)
    except BallastError as error:
        print(f"day: {error}", file=sys.stderr)
        return 2
    fewer = 1.0 - days[1].gpu_seconds / days[0].gpu_seconds
    return 0 if fewer >= _FEWER and all(day.met_share(_DAY.slo) >= _DAY.slo.share for day in days) else 1


if __name__ == "__main__":
    sys.exit(main())

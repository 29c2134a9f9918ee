"""Figures 11 to 15 of MELL: instances, migrations and memory use of placement rules, on the paper's hardware.

    python -m benchmarks.packing [--seconds 700] [--placement lean,mell,...] [--traces DIR] [--write]

The models are Llama-2-7B on RTX 4090 and Llama-2-13B on A100-40G; instances start instantly and stop when empty.
Lengths are log-normal with ten times the means of LMSYS-Chat-1M (695 and 2,145 tokens), as scaled by the paper, which
states no quantiles. Arrivals are Poisson with its rates; with --traces, also those of the Azure conversations at a
fifth of their rate. `--write` inserts the table into docs/packing.md.
"""

import argparse
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ballast.common.errors import BallastError, ConfigError
from benchmarks.quoting import quote
from sim.fleet import PLACEMENTS, FleetOutcome, SimFleet, jobs_of
from sim.hardware import find_cluster, find_model, timings
from tools.bench.traces import read_trace

PAGE = Path(__file__).parent.parent / "docs" / "packing.md"
HARDWARE = (("Llama-2-7B", "RTX-4090"), ("Llama-2-13B", "A100-40G"))
RATES = (0.5, 0.8, 1.1)
_AZURE, _SHARE = "azure_conv_first_half.csv", 0.2
_MEANS, _SIGMAS = (695.0, 2145.0), (1.2, 0.9)


@dataclass(frozen=True, slots=True)
class PackingCell:
    gpu: str
    load: str
    placement: str
    outcome: FleetOutcome


def lengths(rng: random.Random) -> tuple[int, int]:
    draws = [rng.lognormvariate(math.log(mean) - s * s / 2, s) for mean, s in zip(_MEANS, _SIGMAS, strict=True)]
    prompt, answer = (max(16, int(draw)) for draw in draws)
    return prompt, answer


def arrivals(load: float | Path, seconds: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    if isinstance(load, Path):
        requests = read_trace(load).requests
        return [r.arrival_s for r in requests if r.arrival_s < seconds and rng.random() < _SHARE]
    found, at_s = list[float](), 0.0
    while (at_s := at_s + rng.expovariate(load)) < seconds:
        found.append(at_s)
    return found


def cells(placements: Sequence[str], loads: Sequence[float | Path], seconds: float, seed: int = 0) -> list[PackingCell]:
    found: list[PackingCell] = []
    for model_name, gpu in HARDWARE:
        model, cluster = find_model(model_name), find_cluster(f"8x{gpu}")
        for load in loads:
            name = f"Poisson {load}/s" if isinstance(load, float) else "Azure"
            for placement in placements:
                rng = random.Random(seed)
                fleet = SimFleet(model, cluster, timings(), PLACEMENTS[placement])
                jobs = jobs_of(arrivals(load, seconds, seed), lambda rng=rng: lengths(rng), fleet.capacity)
                found.append(PackingCell(gpu, name, placement, fleet.run(jobs)))
                print(_row(found[-1]), file=sys.stderr, flush=True)
    return found


def _row(cell: PackingCell) -> str:
    out = cell.outcome
    figures = (
        f"{out.mean_nodes:.1f}",
        f"{out.most_nodes}",
        f"{out.used:.0%}",
        f"{out.moves_per_s:.2f}",
        f"{out.moved_bytes / 1e9:.0f}",
        f"{out.kv_share:.0%}" if out.moves_per_s else "-",
        f"{out.recomputed_count}",
        f"{out.ttft_p99_s:.1f}",
    )
    return f"| {cell.gpu} | {cell.load} | {cell.placement} | {' | '.join(figures)} |"


def table(found: Sequence[PackingCell]) -> str:
    head = "| GPU | arrivals | placement | GPUs | most | memory used | moves/s | GB moved | with KV | recomputed |"
    head += " P99 TTFT (s) |"
    return "\n".join([head, "|" + "---|" * 11, *map(_row, found)])


def against_the_paper(found: Sequence[PackingCell]) -> str:
    """Markdown table: the paper's claims next to results of MELL as printed, MELL repaired, and lean, as ranges over
    all cells.
    """
    by = {(cell.gpu, cell.load, cell.placement): cell.outcome for cell in found}
    places = sorted({(cell.gpu, cell.load) for cell in found})

    def ratios(ours: str, rivals: Sequence[str], what: str) -> str:
        values = [
            getattr(by[*place, ours], what) / rival
            for place in places
            for name in rivals
            if (*place, ours) in by and (*place, name) in by and (rival := getattr(by[*place, name], what))
        ]
        return f"{min(values):.2f} to {max(values):.2f}" if values else "-"

    def used(ours: str) -> str:
        values = [by[*place, ours].used for place in places if (*place, ours) in by]
        return f"{min(values):.0%} to {max(values):.0%}" if values else "-"

    ways = ("mell", "mell-repaired", "lean")
    fits, whole = ("best-fit", "worst-fit"), ("best-fit-whole", "worst-fit-whole")
    batching = ratios("mell", ["mell-unbatched"], "moves_per_s")
    of_fits, of_whole, of_balance = (
        [ratios(way, rivals, "mean_nodes") for way in ways] for rivals in (fits, whole, ["balance"])
    )
    moves = [ratios(way, ["balance"], "moves_per_s") for way in ways]
    rows = [
        (
            "figure 11",
            "GPUs over those of best and worst fit",
            "0.69 to 0.91",
            *of_fits,
        ),
        (
            "figure 11",
            "the same, if these keep room for whole answers",
            "",
            *of_whole,
        ),
        (
            "figure 11",
            "GPUs over those of balancing",
            "0.85 and more",
            *of_balance,
        ),
        (
            "figure 12",
            "moves over those of balancing",
            "below 1",
            *moves,
        ),
        ("figure 13", "moves with batching over those without", "0.70 and more", batching, "", ""),
        ("figure 14", "used memory", "at least 88 %", *(used(way) for way in ways)),
    ]
    head = "| paper | what | paper says | MELL as printed | repaired | lean |\n|---|---|---|---|---|---|"
    return "\n".join([head, *(f"| {' | '.join(row)} |" for row in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=700.0)
    parser.add_argument("--placement", default=",".join(PLACEMENTS), metavar="NAMES", help="default: %(default)s")
    parser.add_argument("--traces", type=Path, metavar="DIR", help=f"folder that contains {_AZURE}")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/packing.md")
    args = parser.parse_args()
    placements = args.placement.split(",")
    try:
        if unknown := sorted(set(placements) - set(PLACEMENTS)):
            raise ConfigError("--placement", f"{', '.join(unknown)}: not known; there are {', '.join(PLACEMENTS)}")
        loads: list[float | Path] = [*RATES, *([args.traces / _AZURE] if args.traces is not None else [])]
        found = cells(placements, loads, args.seconds)
    except BallastError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    page = f"{against_the_paper(found)}\n\n{table(found)}\n"
    if args.write:
        quote(PAGE, "packing", page)
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

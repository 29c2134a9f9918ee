"""Cells of the regret grid once more, with offline work without end beside the requests: online figures may change by
noise only.

    python -m benchmarks.regret_beside --traces DIR [--cells 'chat*,code*'] [--policies drop] [--draws 1]
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.offline import HOST_BYTES, summaries
from benchmarks.regret_cells import CELLS, figures_of, job_of
from sim.jobs.simulation import specs_of, world_of
from sim.offline import OfflineLoad

QUICK = "chat-13b-40g-x1.1,code-14b-40g-x1,calm-14b-40g-x1"


def run(name: str, traces: Path, policy: str, draw: int, *, beside: bool) -> Mapping[str, Any]:
    job = job_of(CELLS[name], traces, policy, draw)
    [(_, rules)] = specs_of(job)
    if beside:
        last_s = max(request.arrival_s for request in job.trace.requests)
        job = replace(job, offline=OfflineLoad(lengths=summaries(draw), waiting_count=8, until_s=last_s))
        if not rules.worker.swap_space_bytes:
            rules = replace(rules, worker=replace(rules.worker, swap_space_bytes=HOST_BYTES, swaps_online=False))
    found = world_of(job, rules).run()
    return figures_of(found) | {"harvest": found.offline_token_count / found.duration_s}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="as for benchmarks.regret")
    parser.add_argument("--cells", default=QUICK, help=f"names or patterns, separated by commas (default: {QUICK})")
    parser.add_argument("--policies", default="drop", help="separated by commas")
    parser.add_argument("--draws", type=int, default=1)
    args = parser.parse_args()
    cells = [name for name in CELLS if any(fnmatch(name, pattern) for pattern in args.cells.split(","))]
    table = Table(title="without / with offline work beside it", title_justify="left")
    columns = ("cell", "policy", "draw", "P50 TTFT s", "P99 TTFT s", "P99 TPOT s", "drops", "restores", "harvest tok/s")
    for name in columns:
        table.add_column(name, justify="left" if name in ("cell", "policy") else "right")
    for name in cells:
        for policy in args.policies.split(","):
            for draw in range(args.draws):
                alone, both = (run(name, args.traces, policy, draw, beside=beside) for beside in (False, True))
                pairs = [f"{alone[key]:.3f} / {both[key]:.3f}" for key in ("ttft_p50_s", "ttft_p99_s", "tpot_p99_s")]
                counts = [f"{alone[key]} / {both[key]}" for key in ("drops", "restores")]
                table.add_row(name, policy, str(draw), *pairs, *counts, f"{both['harvest']:,.0f}")
                print(f"{name}, {policy}, draw {draw}: P99 TTFT {pairs[1]} s, drops {counts[0]}", file=sys.stderr)
    Console(width=150).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

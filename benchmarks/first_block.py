"""From the plan of a drop to the first block in the new memory, and where that time goes, on a real cluster.

Two workers as processes of their own drop half of their layers each, by hand and under load, again and again. The
times are those that planner and workers write into their logs, all on this machine's clock.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ballast.client import AsyncClient
from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2_grpc
from benchmarks.restore_gap import Load, Planner
from tools.local.cluster import LocalCluster
from tools.model.info import read_info
from tools.model.tiny import make_preset

_JSON = ("--log-format", "json")
_PHASES = ("links_s", "memory_s", "prepare_s", "commit_awaited_s", "boundary_wait_s", "remap_s")


@dataclass(frozen=True, slots=True)
class Drop:
    """Seconds. The slowest member counts."""

    total_s: float  # from the plan to the last member's new layout
    planner_s: float  # of these, nobody's below: journal, calls, taking in what they say
    phases: Mapping[str, float]


async def disturb(args: argparse.Namespace, model: Path, logs: Path) -> None:
    info = read_info(model)
    cluster = LocalCluster(
        model,
        workers=2,
        device_memory_bytes=info.parameter_bytes + args.kv_tokens * info.kv_bytes_per_token("float32"),
        flags={
            "planner": [*_JSON, "--overload-policy", "recompute"],
            "worker": [*_JSON, "--log-level", "debug", "--max-num-seqs", "64"],
        },
        environ={"OMP_NUM_THREADS": "1"},
        log_dir=logs,
    )
    async with (
        cluster,
        AsyncClient(cluster.address) as client,
        open_channel(cluster.processes["planner"][0].address) as channel,
    ):
        planner = Planner(planner_pb2_grpc.PlannerServiceStub(channel))
        load = Load(client, info.vocab_size, 64, 100)
        task = asyncio.create_task(load.run(1000.0, args.requests)) if args.requests else None
        for _ in range(args.drops):
            await asyncio.sleep(1.0)
            await planner.drop(["worker-0", "worker-1"])
            await asyncio.sleep(0.5)
            await planner.restore()
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def read_drops(logs: Path) -> list[Drop]:
    planned_at_s: dict[int, float] = {}
    taken_up: dict[int, list[dict[str, float]]] = defaultdict(list)
    for line in _lines(logs, "planner"):
        if line["event"] == "transition" and line["kind"] == "drop" and line["stage"] == "preparing":
            planned_at_s[line["epoch"]] = _at_s(line)
    for line in _lines(logs, "worker"):
        if line["event"] == "layout taken up" and line["epoch"] in planned_at_s:
            taken_up[line["epoch"]].append({name: line[name] for name in _PHASES} | {"at_s": _at_s(line)})
    return [_drop(planned_at_s[epoch], members) for epoch, members in sorted(taken_up.items())]


def _drop(planned_at_s: float, members: Sequence[Mapping[str, float]]) -> Drop:
    slowest = max(members, key=lambda member: member["at_s"])
    total_s = slowest["at_s"] - planned_at_s
    own_s = sum(slowest[name] for name in ("prepare_s", "boundary_wait_s", "remap_s"))
    return Drop(total_s, total_s - own_s, {name: max(member[name] for member in members) for name in _PHASES})


def _lines(logs: Path, service: str) -> Iterator[dict[str, Any]]:
    for path in sorted(logs.glob(f"{service}-*.log")):
        for line in path.read_text().splitlines():
            if line.startswith("{"):
                yield json.loads(line)


def _at_s(line: Mapping[str, str]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def say(drops: Sequence[Drop]) -> None:
    def row(name: str, found: Sequence[float]) -> None:
        ordered = sorted(found)
        print(f"  {name:<28} {statistics.median(ordered) * 1000:8.1f} ms {ordered[-1] * 1000:8.1f} ms")

    print(f"{len(drops)} drops {'':<20} {'median':>11} {'longest':>11}")
    row("plan to the first block", [drop.total_s for drop in drops])
    row("planner, journal, calls", [drop.planner_s for drop in drops])
    for name in _PHASES:
        row(f"member: {name.removesuffix('_s').replace('_', ' ')}", [drop.phases[name] for drop in drops])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="demo", help="of the checkpoint that is made (default: %(default)s)")
    parser.add_argument("--kv-tokens", type=int, default=12_000, help="of each worker (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="at once; 0: none (default: %(default)s)")
    parser.add_argument("--drops", type=int, default=10)
    parser.add_argument("--logs", type=Path, help="keep the services' logs there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, logs = make_preset(args.preset, Path(folder) / "model"), args.logs or Path(folder) / "logs"
        asyncio.run(disturb(args, model, logs))
        say(read_drops(logs))


if __name__ == "__main__":
    main()

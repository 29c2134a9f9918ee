"""How long requests stand still when they move from worker to worker while they run, with both workers loaded.

Two workers as processes of their own, under steady load; the benchmark is the planner and has requests moved to and
fro. The downtime of each is what its source reports: from its last step there until the word has come that it runs at
the target. It is set beside the time of a decode step in the same run, as the workers' stages tell it, and beside the
gaps between tokens that clients see.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from ballast.client import AsyncClient
from ballast.local.cluster import LocalCluster
from ballast.model.info import read_info
from ballast.model.tiny import make_preset
from ballast.rpc.channel import open_channel
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc
from benchmarks.restore_gap import Load, Stretches

GOAL_STEPS = 2.0
_RPC_TIMEOUT_S = 10.0
_PAUSE_S = 0.4  # between two orders


@dataclass(frozen=True, slots=True)
class Figures:
    migrations: int
    not_migrated: int
    recomputed: int
    rounds: float  # mean
    last_blocks: float  # mean
    step_p50_s: float
    step_p99_s: float
    downtime_p50_s: float
    downtime_p90_s: float
    downtime_p99_s: float
    downtime_max_s: float
    gaps: Stretches  # while requests move
    gaps_at_rest: Stretches

    @property
    def p99_steps(self) -> float:
        return self.downtime_p99_s / self.step_p50_s


class Workers:
    """The planner's side of migrations."""

    def __init__(self, epoch: int, members: Sequence[cluster_pb2.Member], stack: AsyncExitStack) -> None:
        self._epoch = epoch
        self._members = members
        self._stack = stack
        self._stubs: list[worker_pb2_grpc.WorkerServiceAsyncStub] = []
        self._spans: dict[tuple[int, int], float] = {}  # worker and step -> seconds

    async def connect(self) -> None:
        for member in self._members:
            channel = await self._stack.enter_async_context(open_channel(member.address))
            self._stubs.append(worker_pb2_grpc.WorkerServiceStub(channel))

    async def migrate(self, source: int, blocks: int) -> None:
        parties = [
            worker_pb2.MigrationParty(worker_id=m.worker_id, incarnation=m.incarnation, data_address=m.data_address)
            for m in self._members
        ]
        request = worker_pb2.MigrateRequest(
            epoch=self._epoch,
            source=parties[source],
            target=parties[1 - source],
            block_budget=blocks,
            within_s=_PAUSE_S,
            cause_id="benchmark",
        )
        for stub in reversed(self._stubs) if source == 0 else self._stubs:
            await stub.Migrate(request, timeout=_RPC_TIMEOUT_S)

    async def note_steps(self) -> None:
        for index, stub in enumerate(self._stubs):
            trace = await stub.GetTrace(worker_pb2.GetTraceRequest(), timeout=_RPC_TIMEOUT_S)
            self._spans |= {(index, s.step_id): s.duration_s for s in trace.spans if s.kind == "run"}

    @property
    def steps_s(self) -> list[float]:
        return sorted(self._spans.values())


@dataclass(frozen=True, slots=True)
class Told:
    """What a source says of a migration."""

    moved: bool
    with_kv: bool
    rounds: int
    last_blocks: int
    downtime_s: float


def reports(log_dir: Path) -> list[Told]:
    lines = (line for path in log_dir.glob("worker-*.log") for line in path.read_text().splitlines())
    found = (json.loads(line) for line in lines if line.startswith("{"))
    return [
        Told(
            one["event"] == "migrated",
            one.get("with_kv", False),
            one["rounds"],
            one.get("last_blocks", 0),
            one.get("downtime_s", 0.0),
        )
        for one in found
        if one.get("event") in ("migrated", "not migrated")
    ]


def at(ordered: Sequence[float], fraction: float) -> float:
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


async def measure(args: argparse.Namespace, folder: Path) -> Figures:
    model = make_preset(args.preset, folder / "model")
    info = read_info(model)
    log_dir = args.logs or folder / "logs"
    cluster = LocalCluster(
        model,
        workers=2,
        device_memory_bytes=info.parameter_bytes + args.kv_tokens * info.kv_bytes_per_token("float32"),
        flags={
            "planner": ["--overload-policy", "recompute"],
            "worker": ["--max-num-seqs", str(args.concurrency), "--log-format", "json"],
        },
        environ={"OMP_NUM_THREADS": "1"},
        log_dir=log_dir,
    )
    async with cluster, AsyncClient(cluster.address) as client, AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_channel(cluster.processes["planner"][0].address))
        planner = planner_pb2_grpc.PlannerServiceStub(channel)
        layout = (await planner.GetLayout(planner_pb2.GetLayoutRequest(), timeout=_RPC_TIMEOUT_S)).layout
        workers = Workers(layout.epoch, [group.members[0] for group in layout.groups], stack)
        await workers.connect()
        load = Load(client, info.vocab_size, args.prompt_tokens, args.output_tokens)
        task = asyncio.create_task(load.run(args.rate, args.concurrency))
        await asyncio.sleep(args.settle_s)
        rest_s = time.monotonic()
        await asyncio.sleep(args.settle_s)
        begin_s = time.monotonic()
        for source in itertools.cycle((0, 1)):
            await workers.migrate(source, args.blocks)
            await asyncio.sleep(_PAUSE_S)
            await workers.note_steps()
            moved = sum(one.moved for one in reports(log_dir))
            if moved >= args.migrations or time.monotonic() - begin_s > args.limit_s:
                break
        end_s = time.monotonic()
        gaps = [Stretches.of(load.stretches(*window)) for window in ((begin_s, end_s), (rest_s, begin_s))]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return figures(reports(log_dir), workers.steps_s, *gaps)


def figures(told: Sequence[Told], steps_s: Sequence[float], gaps: Stretches, rest: Stretches) -> Figures:
    moved = [one for one in told if one.moved]
    if not moved:
        raise SystemExit("nothing has been migrated")
    downtimes = sorted(one.downtime_s for one in moved)
    return Figures(
        len(moved),
        len(told) - len(moved),
        sum(not one.with_kv for one in moved),
        statistics.fmean(one.rounds for one in moved),
        statistics.fmean(one.last_blocks for one in moved),
        at(steps_s, 0.5),
        at(steps_s, 0.99),
        at(downtimes, 0.5),
        at(downtimes, 0.9),
        at(downtimes, 0.99),
        downtimes[-1],
        gaps,
        rest,
    )


def say(one: Figures) -> None:
    ms = 1000
    print(
        f"{one.migrations} migrations ({one.not_migrated} begun and given up, {one.recomputed} without their KV):"
        f" {one.rounds:.1f} rounds while decoding, {one.last_blocks:.1f} blocks at the end"
    )
    print(f"decode step: p50 {one.step_p50_s * ms:.2f} ms, p99 {one.step_p99_s * ms:.2f} ms")
    for name, value_s in (
        ("p50", one.downtime_p50_s),
        ("p90", one.downtime_p90_s),
        ("p99", one.downtime_p99_s),
        ("max", one.downtime_max_s),
    ):
        print(f"downtime {name}: {value_s * ms:7.2f} ms, {value_s / one.step_p50_s:5.2f} steps")
    print(f"gaps while requests move {one.gaps}")
    print(f"gaps before              {one.gaps_at_rest}")
    verdict = "reached" if one.p99_steps <= GOAL_STEPS else f"missed by {one.p99_steps - GOAL_STEPS:.2f} steps"
    print(f"goal, p99 of at most {GOAL_STEPS:g} decode steps: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="bench", help="of the checkpoint that is made (default: %(default)s)")
    parser.add_argument("--kv-tokens", type=int, default=12_000, help="of each worker (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=24, help="most requests at once (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1000.0, help="requests per second (default: as many as may run)")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--migrations", type=int, default=60, help="at least (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=30, help="moved at once (default: %(default)s)")
    parser.add_argument("--settle-s", type=float, default=4.0)
    parser.add_argument("--limit-s", type=float, default=180.0, help="give up after that (default: %(default)s)")
    parser.add_argument("--logs", type=Path, help="keep the services' logs there")
    parser.add_argument("--out", type=Path, help="write all figures there, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(args, Path(folder)))
    say(found)
    if args.out is not None:
        args.out.write_text(json.dumps(asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main()

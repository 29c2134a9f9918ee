"""Victims of a drop that go on while their KV travels, against victims that wait for it, at several speeds of the link
(KunServe, first arXiv version, figure 14).

    python -m benchmarks.live_exchange [--speeds 8,16,32,64,128,unlimited] [--rounds 1] [--out FOLDER]

A real cluster of two workers, processes of their own. Requests run on both, then a drop by hand makes one pipeline of
the two, and the KV of half of the layers travels, both ways. Judged is what the requests' client sees from the moment
at which the first worker takes the layout up until the last one says that the exchange is done: every gap between two
tokens that reaches into that window, the one in which the commit happens included. Both ways take turns at every
speed, on fresh clusters, with the same requests; their tokens are compared as far as both have said them.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import grpc
from rich.console import Console

from ballast.client import AsyncClient
from ballast.common.errors import Cancelled
from ballast.common.sampling import SamplingParams
from ballast.local.cluster import LocalCluster
from ballast.model.info import CheckpointInfo, read_info
from ballast.model.tiny import make_preset
from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc
from benchmarks.live_exchange_report import WAYS, Run, write_report
from benchmarks.restore_gap import Planner

RESULTS = Path(__file__).parent / "results"
MB = 1e6
WORKERS = ("worker-0", "worker-1")
ROOM = 2.2  # memory for KV over what the requests need: nobody waits for room, see `core.waves`
_RPC_TIMEOUT_S = 10.0
_TOKENS_TIMEOUT_S = 180.0
_LEAST_GAPS = 4  # of a request, for a median


class Requests:
    """Asked all at once; what came when is noted until they are cancelled."""

    def __init__(self, client: AsyncClient, vocab_size: int, options: argparse.Namespace) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._options = options
        self.tokens: list[list[int]] = [[] for _ in range(options.requests)]
        self.at_s: list[list[float]] = [[] for _ in range(options.requests)]  # wall clock, as the workers' traces
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._one(number)) for number in range(self._options.requests)]
        return self

    async def _one(self, number: int) -> None:
        rng = random.Random(number)
        length = round(self._options.context * rng.uniform(0.7, 1.3))
        prompt = [rng.randrange(5, self._vocab_size) for _ in range(length)]
        sampling = SamplingParams(temperature=0.0, max_tokens=self._options.tokens, ignore_eos=True)
        async with aclosing(self._client.stream(token_ids=prompt, sampling=sampling, include_text=False)) as stream:
            async for chunk in stream:
                now_s = time.time()
                self.tokens[number].extend(chunk.token_ids)
                self.at_s[number].extend([now_s] * len(chunk.token_ids))

    async def have_said(self, count: int) -> None:
        """So many tokens more, each of them."""
        wanted = [len(said) + count for said in self.tokens]
        give_up_s = time.monotonic() + _TOKENS_TIMEOUT_S
        while any(len(said) < least for said, least in zip(self.tokens, wanted, strict=True)):
            if time.monotonic() > give_up_s or any(task.done() for task in self._tasks):
                raise SystemExit("requests ended, or stopped, before they had said enough: see --tokens")
            await asyncio.sleep(0.01)

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for said in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(said, Exception) and not isinstance(said, Cancelled):
                raise said

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """All that reach into the window."""
        return [b - a for came in self.at_s for a, b in pairwise(came) if b > begin_s and a < end_s]

    def between(self, begin_s: float, end_s: float) -> int:
        return sum(begin_s <= at_s < end_s for came in self.at_s for at_s in came)


@dataclass(frozen=True, slots=True)
class Window:
    """When the exchange was under way, wall clock, by the workers' traces."""

    commit_s: float
    begin_s: float
    end_s: float


async def exchange_window(addresses: Sequence[str], epoch: int) -> Window:
    at_s: dict[str, list[float]] = {}
    for address in addresses:
        async with open_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            trace = await stub.GetTrace(worker_pb2.GetTraceRequest(), timeout=_RPC_TIMEOUT_S)
        for span in trace.spans:
            if span.kind == "transition" and span.epoch == epoch:
                at_s.setdefault(span.what, []).append(span.began_unix_s)
    return Window(min(at_s["committing"]), min(at_s["exchanging"]), max(at_s["done"]))


async def drop(stub: "planner_pb2_grpc.PlannerServiceAsyncStub") -> pb.Transition:
    planner = Planner(stub)
    while True:
        try:
            return await planner.drop(WORKERS)
        except grpc.aio.AioRpcError as error:  # it has not heard yet that the workers are at rest
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            await asyncio.sleep(0.1)


async def measure(
    model: Path, info: CheckpointInfo, speed: str, way: str, options: argparse.Namespace
) -> tuple[Run, list[list[int]]]:
    kv_tokens = ROOM * options.requests / len(WORKERS) * (1.3 * options.context + options.tokens)
    kv_bytes = int(kv_tokens) * info.kv_bytes_per_token(options.dtype)
    parameter_bytes = info.parameter_bytes * (2 if options.dtype == "float64" else 1)
    link = [] if speed == "unlimited" else ["--link-bytes-per-s", str(float(speed) * MB)]
    worker = ["--dtype", options.dtype, "--max-num-seqs", str(options.requests), "--exchange", way, *link]
    cluster = LocalCluster(
        model,
        workers=len(WORKERS),
        device_memory_bytes=parameter_bytes + kv_bytes,
        flags={"planner": ["--overload-policy", "recompute"], "worker": worker},
        environ={"OMP_NUM_THREADS": "1"},
        log_dir=None if options.logs is None else options.logs / f"{speed}-{way}",
    )
    async with cluster, AsyncClient(cluster.address) as client, contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_channel(cluster.processes["planner"][0].address))
        requests = Requests(client, info.vocab_size, options)
        async with requests:
            await requests.have_said(options.before)
            told = await drop(planner_pb2_grpc.PlannerServiceStub(channel))
            await requests.have_said(options.after)
        window = await exchange_window([p.address for p in cluster.processes["worker"]], told.epoch)
    return run_of(speed, way, requests, window, told), requests.tokens


def run_of(speed: str, way: str, requests: Requests, window: Window, told: pb.Transition) -> Run:
    """Gaps count from the commit on: what it adds to them belongs to the exchange."""
    during = requests.gaps_s(window.commit_s, window.end_s)
    before = requests.gaps_s(window.commit_s - 1.0, window.commit_s)
    after = requests.gaps_s(window.end_s, float("inf"))
    if min(len(during), len(before), len(after)) < _LEAST_GAPS:
        raise SystemExit(f"{speed}, {way}: too few tokens around the exchange")
    return Run(
        speed=speed,
        way=way,
        exchange_s=window.end_s - window.begin_s,
        commit_s=window.begin_s - window.commit_s,
        kv_bytes=told.kv_bytes_exchanged,
        victims=told.victim_count,
        recomputed=told.victims_recomputed,
        usual_gap_s=statistics.median(before),
        pipeline_gap_s=statistics.median(after),
        median_gap_s=statistics.median(during),
        mean_gap_s=statistics.fmean(during),
        longest_gap_s=max(during),
        gap_count=len(during),
        token_at_s=[[at_s - window.commit_s for at_s in came] for came in requests.at_s],
        end_s=window.end_s - window.commit_s,
    )


def differing(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """Tokens that are not the same, of those that both have."""
    return sum(a != b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=False))


def kept_with(path: Path, runs: list[Run], compared: int, differ: int) -> tuple[list[Run], int, int]:
    """With what `path` has from earlier calls. It has all of them afterwards."""
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        runs = [*(Run(**run) for run in earlier["runs"]), *runs]
        compared, differ = compared + earlier["compared"], differ + earlier["differ"]
    document = {"runs": [asdict(run) for run in runs], "compared": compared, "differ": differ}
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    return runs, compared, differ


async def measure_all(options: argparse.Namespace, folder: Path) -> tuple[list[Run], int, int]:
    model = make_preset(options.preset, folder / "model")
    info = read_info(model)
    runs: list[Run] = []
    reference: list[list[int]] = [[] for _ in range(options.requests)]
    compared = differ = 0
    for number in range(options.rounds):
        for speed in options.speeds.split(","):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                one, tokens = await measure(model, info, speed, way, options)
                runs.append(one)
                print(one.line(), flush=True)
                compared += sum(min(len(a), len(b)) for a, b in zip(tokens, reference, strict=True))
                differ += differing(tokens, reference)
                reference = [max(pair, key=len) for pair in zip(reference, tokens, strict=True)]
    return runs, compared, differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", default="8,16,32,64,128,unlimited", help="MB/s, with commas between them")
    parser.add_argument("--rounds", type=int, default=1, help="medians over them are reported")
    parser.add_argument("--preset", default="bench", help="of the checkpoint that is made (default: %(default)s)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=12, help="at once, on both workers together")
    parser.add_argument("--context", type=int, default=600, help="tokens of a prompt, more or less")
    parser.add_argument("--tokens", type=int, default=1200, help="of an answer: it must outlast the exchange")
    parser.add_argument("--before", type=int, default=30, help="tokens of each request before the drop")
    parser.add_argument("--after", type=int, default=60, help="tokens of each request after the exchange")
    parser.add_argument("--logs", type=Path, help="keep the services' logs there")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="runs are kept there, and reported with earlier ones")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    began_load = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        runs, compared, differ = asyncio.run(measure_all(options, Path(folder)))
    if options.keep is not None:
        runs, compared, differ = kept_with(options.keep, runs, compared, differ)
    facts: dict[str, object] = {
        "load_average": [began_load, os.getloadavg()],
        "tokens_compared": compared,
        "tokens_differing": differ,
        **{k: getattr(options, k) for k in ("preset", "dtype", "requests", "context")},
        "rounds": dict(Counter(run.speed for run in runs if run.way == "live")),
    }
    write_report(runs, facts, options.out, Console(width=140))


if __name__ == "__main__":
    main()

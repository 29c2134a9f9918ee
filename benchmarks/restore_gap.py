"""What a restore does to requests that are being answered: gaps between tokens, at the client, on a real cluster.

Two workers as processes of their own. In each cycle, under steady load: both alone, then one pipeline (dropped by
hand), then a restore by hand, then both alone again. Judged are the gaps of every request that end while the restore
is under way, as multiples of the same request's median gap outside of it, and by what was going on. So that a busy
machine is not taken for a fault, the same is told of windows of the same length in which nothing happens: of the
pipeline before the restore, and of both alone after it. Time per token is compared before the drop and after the
restore: at once, and when the requests of the pipeline's time have ended. A pipeline takes longer for each request, so
more of them are there when it is dissolved than there were before, and batches are larger.
"""

import argparse
import asyncio
import bisect
import contextlib
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import count, pairwise
from pathlib import Path

from ballast.client import AsyncClient
from ballast.common.sampling import SamplingParams
from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from tools.local.cluster import LocalCluster
from tools.model.info import read_info
from tools.model.tiny import make_preset

MIN_GAPS = 8  # outside of the window, for a median
LONG = 3.0  # times the usual gap
_RPC_TIMEOUT_S = 10.0
_TRANSITION_TIMEOUT_S = 120.0
_GAPS_TOLD = 5
_LONGEST_REQUEST_S = 60.0
_TOKENS_COME_S = 2.0  # of a request that has not ended
_AFTERWARDS_S = 0.5  # dispatchers follow the requests, and clients hear of them


class During(StrEnum):
    """What of a restore a gap has met."""

    LAYERS_COME = "layers come"
    CHANGE = "change"  # from the decision until all KV has been exchanged
    AFTERWARDS = "afterwards"


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two messages with tokens of one request."""

    from_s: float
    to_s: float
    times: float  # the request's median gap outside of the window


@dataclass(slots=True)
class Load:
    """Requests at a steady rate, until it is cancelled; when each token came."""

    client: AsyncClient
    vocab_size: int
    prompt_tokens: int
    output_tokens: int
    token_at_s: list[list[tuple[float, int]]] = field(default_factory=list[list[tuple[float, int]]])  # and how many

    async def run(self, rate_per_s: float, limit: int) -> None:
        """No more than `limit` at once: a cluster that cannot keep up is not buried."""
        rng, numbers, live = random.Random(1), count(), set[asyncio.Task[None]]()
        try:
            while True:
                if len(live) < limit:
                    task = asyncio.create_task(self._one(next(numbers)))
                    live.add(task)
                    task.add_done_callback(live.discard)
                await asyncio.sleep(rng.uniform(0.5, 1.5) / rate_per_s)
        finally:
            for task in live:
                task.cancel()
            await asyncio.gather(*live, return_exceptions=True)

    async def _one(self, number: int) -> None:
        rng = random.Random(number)
        prompt = [rng.randrange(5, self.vocab_size) for _ in range(self.prompt_tokens)]
        length = round(self.output_tokens * rng.uniform(0.7, 1.3))
        sampling = SamplingParams(temperature=1.0, seed=number, max_tokens=length, ignore_eos=True)
        came: list[tuple[float, int]] = []
        self.token_at_s.append(came)
        async with aclosing(self.client.stream(token_ids=prompt, sampling=sampling)) as stream:
            async for chunk in stream:
                now_s = time.monotonic()
                if chunk.token_ids:
                    came.append((now_s, len(chunk.token_ids)))

    def tokens_between(self, begin_s: float, end_s: float) -> int:
        return sum(n for came in self.token_at_s for at_s, n in came if begin_s <= at_s < end_s)

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Time per token, of what came between these."""
        return [
            (b - a) / n for came in self.token_at_s for (a, _), (b, n) in pairwise(came) if begin_s <= a and b < end_s
        ]

    def mean_running(self, begin_s: float, end_s: float) -> float:
        """Requests between their first and their last token, on average."""
        spans = [(came[0][0], came[-1][0]) for came in self.token_at_s if came]
        return sum(max(0.0, min(b, end_s) - max(a, begin_s)) for a, b in spans) / (end_s - begin_s)

    async def outlive(self, at_s: float) -> None:
        """Waits until the requests that ran at that time have ended, or for a while."""
        ran = [came for came in self.token_at_s if came and came[0][0] < at_s <= came[-1][0]]
        give_up_s = time.monotonic() + _LONGEST_REQUEST_S
        counts: list[int] = []
        while (now := [len(came) for came in ran]) != counts and time.monotonic() < give_up_s:
            counts = now
            await asyncio.sleep(_TOKENS_COME_S)

    def gaps(self, begin_s: float, end_s: float) -> list[Gap]:
        """Those that end in the window, of requests that have a usual gap."""
        found: list[Gap] = []
        for came in self.token_at_s:
            ends = [(a, b) for (a, _), (b, _) in pairwise(came)]
            outside = [b - a for a, b in ends if not begin_s <= b < end_s]
            if len(outside) >= MIN_GAPS:
                usual_s = statistics.median(outside)
                found += [Gap(a, b, (b - a) / usual_s) for a, b in ends if begin_s <= b < end_s]
        return found

    def stretches(self, begin_s: float, end_s: float) -> list[float]:
        """Each gap that ends in the window, as a multiple of the request's median gap outside of it."""
        return [gap.times for gap in self.gaps(begin_s, end_s)]

    def at_rest(self, begin_s: float, end_s: float, window_s: float) -> "list[Stretches]":
        """Stretches of each window of that length that finds room between these, the last ones first."""
        count = int((end_s - begin_s) / window_s)
        starts = [end_s - (i + 1) * window_s for i in range(count)]
        return [Stretches.of(self.stretches(at_s, at_s + window_s)) for at_s in starts]


@dataclass(frozen=True, slots=True)
class Stretches:
    """Gaps of one window as multiples of the usual gap."""

    gaps: int
    p50: float
    p99: float
    longest: float
    long: int  # beyond LONG

    @classmethod
    def of(cls, found: Sequence[float]) -> "Stretches":
        ordered = sorted(found) or [0.0]
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return cls(
            len(found), statistics.median(ordered), p99, ordered[-1], len(ordered) - bisect.bisect_right(ordered, LONG)
        )

    def __str__(self) -> str:
        long = f"{self.long:3d} of {self.gaps} beyond {LONG:g} x"
        return f"p50 {self.p50:4.2f} x  p99 {self.p99:4.1f} x  max {self.longest:5.1f} x  {long}"


@dataclass(frozen=True, slots=True)
class Cycle:
    restore_s: float
    during: Stretches
    by_phase: dict[During, Stretches]
    pipeline_at_rest: list[Stretches]  # equally long windows in which nothing happens
    alone_at_rest: list[Stretches]
    tpot_before_s: float
    tpot_pipeline_s: float
    tpot_after_s: float
    tpot_settled_s: float  # as before the drop, once the requests of the pipeline's time have ended
    running_before: float  # requests at once
    running_after: float
    running_settled: float
    max_stall_s: float
    p99_stall_s: float
    prepare_s: float
    commit_s: float
    exchange_s: float
    remap_s: float
    victims: int
    delta_bytes: int
    pulled_bytes: int
    began_s: float  # of the machine's monotonic clock, as are these
    longest_gaps: list[Gap]


class Planner:
    def __init__(self, stub: "planner_pb2_grpc.PlannerServiceAsyncStub") -> None:
        self._stub = stub
        self._serial = count()

    async def drop(self, workers: Sequence[str]) -> pb.Transition:
        request = pb.DropRequest(worker_ids=workers, request_id=f"gap-drop-{next(self._serial)}")
        return await self._end((await self._stub.Drop(request, timeout=_RPC_TIMEOUT_S)).epoch)

    async def restore(self) -> pb.Transition:
        request = pb.RestoreRequest(request_id=f"gap-restore-{next(self._serial)}")
        return await self._end((await self._stub.Restore(request, timeout=_RPC_TIMEOUT_S)).epoch)

    async def _end(self, epoch: int) -> pb.Transition:
        async with asyncio.timeout(_TRANSITION_TIMEOUT_S):
            while True:
                listed = await self._stub.ListTransitions(pb.ListTransitionsRequest(), timeout=_RPC_TIMEOUT_S)
                found = next(one for one in listed.transitions if one.epoch == epoch)
                if found.phase in ("done", "aborted"):
                    if found.phase == "aborted":
                        raise RuntimeError(found.summary)
                    return found
                await asyncio.sleep(0.05)


async def capacity(load: Load, concurrency: int, seconds: float) -> float:
    """Tokens per second with that many requests at once."""
    task = asyncio.create_task(load.run(1000.0, concurrency))
    await asyncio.sleep(seconds / 2)
    begin_s = time.monotonic()
    await asyncio.sleep(seconds)
    rate = load.tokens_between(begin_s, time.monotonic()) / (time.monotonic() - begin_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return rate


def by_phase(gaps: Sequence[Gap], decided_s: float, over_s: float) -> dict[During, Stretches]:
    found: dict[During, list[float]] = {phase: [] for phase in During}
    for gap in gaps:
        after = During.AFTERWARDS if gap.from_s >= over_s else During.CHANGE
        found[During.LAYERS_COME if gap.to_s <= decided_s else after].append(gap.times)
    return {phase: Stretches.of(times) for phase, times in found.items()}


async def cycle(load: Load, planner: Planner, settle_s: float) -> Cycle:
    marks = [time.monotonic()]
    await asyncio.sleep(settle_s)
    marks.append(time.monotonic())
    await planner.drop(["worker-0", "worker-1"])
    await asyncio.sleep(1.0)
    marks.append(time.monotonic())
    await asyncio.sleep(settle_s)
    begin_s = time.monotonic()
    told = await planner.restore()
    await asyncio.sleep(_AFTERWARDS_S)
    end_s = time.monotonic()
    await asyncio.sleep(settle_s)
    last_s = time.monotonic()
    await load.outlive(end_s)
    settled_s = time.monotonic()
    await asyncio.sleep(settle_s)
    over_s = time.monotonic()
    window_s, decided_s = end_s - begin_s, begin_s + told.prepare_s
    gaps = load.gaps(begin_s, end_s)
    return Cycle(
        restore_s=end_s - begin_s - _AFTERWARDS_S,
        during=Stretches.of([gap.times for gap in gaps]),
        by_phase=by_phase(gaps, decided_s, decided_s + told.commit_s + told.exchange_s),
        pipeline_at_rest=load.at_rest(marks[2], begin_s, window_s),
        alone_at_rest=load.at_rest(settled_s, over_s, window_s),
        tpot_before_s=statistics.median(load.gaps_s(marks[0], marks[1])),
        tpot_pipeline_s=statistics.median(load.gaps_s(marks[2], begin_s)),
        tpot_after_s=statistics.median(load.gaps_s(end_s, last_s)),
        tpot_settled_s=statistics.median(load.gaps_s(settled_s, over_s)),
        running_before=load.mean_running(marks[0], marks[1]),
        running_after=load.mean_running(end_s, last_s),
        running_settled=load.mean_running(settled_s, over_s),
        max_stall_s=told.max_stall_s,
        p99_stall_s=told.p99_stall_s,
        prepare_s=told.prepare_s,
        commit_s=told.commit_s,
        exchange_s=told.exchange_s,
        remap_s=told.remap_s,
        victims=told.victim_count,
        delta_bytes=told.kv_bytes_exchanged,
        pulled_bytes=told.parameter_bytes_pulled,
        began_s=begin_s,
        longest_gaps=sorted(gaps, key=lambda gap: -gap.times)[:_GAPS_TOLD],
    )


def say(number: int, one: Cycle) -> None:
    ms = 1000
    print(
        f"cycle {number}: restore {one.restore_s:.2f} s (prepare {one.prepare_s:.2f} s,"
        f" commit {one.commit_s * ms:.0f} ms, exchange {one.exchange_s * ms:.0f} ms, remap {one.remap_s * ms:.1f} ms)"
    )
    print(f"  gaps during the restore    {one.during}")
    for phase, stretches in one.by_phase.items():
        print(f"    {phase:<24} {stretches}")
    for name, windows in (("pipeline", one.pipeline_at_rest), ("alone", one.alone_at_rest)):
        for stretches in windows:
            print(f"  as long, {name:<8} at rest  {stretches}")
    print(
        f"  {one.victims} victims; KV sent {one.delta_bytes / 1e6:.2f} MB; downtime max"
        f" {one.max_stall_s * ms:.0f} ms, p99 {one.p99_stall_s * ms:.0f} ms; pulled {one.pulled_bytes / 1e6:.1f} MB"
    )
    gaps = ", ".join(
        f"{gap.times:.1f} x ({(gap.to_s - gap.from_s) * ms:.0f} ms) until {gap.to_s - one.began_s:.2f} s"
        for gap in one.longest_gaps
    )
    print(f"  longest gaps: {gaps}")
    after, settled = one.tpot_after_s / one.tpot_before_s - 1, one.tpot_settled_s / one.tpot_before_s - 1
    print(
        f"  p50 time per token: before {one.tpot_before_s * ms:.1f} ms, pipeline {one.tpot_pipeline_s * ms:.1f} ms,"
        f" after {one.tpot_after_s * ms:.1f} ms ({after:+.1%}),"
        f" settled {one.tpot_settled_s * ms:.1f} ms ({settled:+.1%})"
    )
    print(
        f"  requests at once: before {one.running_before:.1f}, after {one.running_after:.1f},"
        f" settled {one.running_settled:.1f}",
        flush=True,
    )


async def measure(args: argparse.Namespace, folder: Path) -> list[Cycle]:
    model = make_preset(args.preset, folder / "model")
    info = read_info(model)
    kv_bytes = args.kv_tokens * info.kv_bytes_per_token("float32")
    cluster = LocalCluster(
        model,
        workers=2,
        device_memory_bytes=info.parameter_bytes + kv_bytes,
        flags={
            "planner": ["--overload-policy", "recompute"],
            "worker": ["--max-num-seqs", str(args.concurrency)],
        },
        environ={"OMP_NUM_THREADS": "1"},
        log_dir=args.logs,
    )
    cycles: list[Cycle] = []
    async with (
        cluster,
        AsyncClient(cluster.address) as client,
        contextlib.AsyncExitStack() as stack,
    ):
        channel = await stack.enter_async_context(open_channel(cluster.processes["planner"][0].address))
        planner = Planner(planner_pb2_grpc.PlannerServiceStub(channel))
        load = Load(client, info.vocab_size, args.prompt_tokens, args.output_tokens)
        rate = args.rate
        if rate is None:
            await planner.drop(["worker-0", "worker-1"])
            peak = await capacity(load, args.concurrency, args.settle_s)
            await planner.restore()
            rate = args.load * peak / args.output_tokens
            print(f"one pipeline: {peak:.0f} tokens/s with {args.concurrency} requests; load: {rate:.2f} requests/s")
        gc.freeze()  # this process's own full collections would be gaps of all requests
        task = asyncio.create_task(load.run(rate, args.concurrency))
        await asyncio.sleep(args.settle_s)
        await load.outlive(time.monotonic())  # until then there are more and more of them
        for number in range(args.cycles):
            one = await cycle(load, planner, args.settle_s)
            cycles.append(one)
            say(number, one)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return cycles


def windows_of(cycles: Sequence[Cycle]) -> dict[str, list[Stretches]]:
    found = {"gaps during restores": [c.during for c in cycles]}
    found |= {f"  {phase}": [c.by_phase[phase] for c in cycles] for phase in During}
    found["as long, pipeline at rest"] = [window for c in cycles for window in c.pipeline_at_rest]
    found["as long, alone at rest"] = [window for c in cycles for window in c.alone_at_rest]
    return {name: windows for name, windows in found.items() if windows}


def summarise(cycles: Sequence[Cycle]) -> None:
    at_once = [one.tpot_after_s / one.tpot_before_s - 1 for one in cycles]
    settled = [one.tpot_settled_s / one.tpot_before_s - 1 for one in cycles]
    print(f"\n{len(cycles)} restores, {sum(c.victims for c in cycles)} victims:")
    for name, found in windows_of(cycles).items():
        longest = [window.longest for window in found]
        p99 = statistics.median(window.p99 for window in found)
        print(
            f"  {name:<26} longest {max(longest):.1f} x"
            f" (median of {len(longest)} windows {statistics.median(longest):.1f} x), p99 {p99:.1f} x,"
            f" {sum(window.long for window in found)} of {sum(window.gaps for window in found)} beyond {LONG:g} x"
        )
    print(f"  downtime: longest {max(c.max_stall_s for c in cycles) * 1000:.0f} ms")
    print(
        f"  p50 time per token after against before: median {statistics.median(at_once):+.1%},"
        f" once the requests of the pipeline have ended {statistics.median(settled):+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="bench", help="of the checkpoint that is made (default: %(default)s)")
    parser.add_argument("--kv-tokens", type=int, default=12_000, help="of each worker (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=24, help="most requests at once (default: %(default)s)")
    parser.add_argument("--load", type=float, default=0.55, help="of what a pipeline can do (default: %(default)s)")
    parser.add_argument("--rate", type=float, help="requests per second, whatever a pipeline can do")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--settle-s", type=float, default=6.0, help="each phase (default: %(default)s)")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--logs", type=Path, help="keep the services' logs there")
    parser.add_argument("--out", type=Path, help="write all figures there, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cycles = asyncio.run(measure(args, Path(folder)))
    summarise(cycles)
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(one) for one in cycles], indent=1) + "\n")


if __name__ == "__main__":
    main()

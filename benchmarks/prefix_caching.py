"""Measures prefix caching in virtual time and here: `python -m benchmarks.prefix_caching [--out DIR | --costs]`.

The simulator runs the services' own cores. Requests arrive at random at four instances, at about 0.7 of the rate that
they can compute without caching. A share of every prompt is one of twenty prefixes (Zipf), the rest is unique. `off`:
without caching. `cached`: with caching, but placement ignores it. `routed`: with caching and placement by prefix, as in
the services. With `--trace` the requests are those of a Mooncake file, whose `hash_ids` identify equal pieces of 512
tokens; KV blocks then have 256 tokens. `host`: like `routed`, with evicted KV kept in host memory, `--host-bytes` over
all instances.

The second part measures processor time: a step of 256 decodes in a worker's core, and the eviction of 1,000 blocks of
100,000.
"""

import argparse
import json
import os
import random
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import quantiles

from ballast.common.ids import Incarnation, RequestId, WorkerId
from ballast.common.load import MemoryReport
from ballast.common.marks import MARK_TOKENS
from ballast.common.sampling import SamplingParams
from ballast.common.units import parse_bytes
from ballast.rpc.codec import LOAD
from ballastpb.worker.v1 import worker_pb2 as pb_worker
from benchmarks.offline import code_commit
from benchmarks.quoting import quote
from services.dispatcher.core.placement import PlacementRules
from services.dispatcher.core.prefix_map import PrefixMap
from services.dispatcher.policy.freeness import WorkerKey
from services.worker.core.batch import StepResult
from services.worker.core.blocks import BlockBook
from services.worker.core.events import BatchWanted, Execute, RoomWanted, SequenceKey, StepDone, StreamOpened, Submitted
from services.worker.core.limits import WorkerLimits
from services.worker.core.worker import WorkerCore
from sim.clients import Arrival
from sim.hardware import find_cluster, find_model, timings
from sim.jobs.simulation import WorkerSize, production_rules
from sim.policies import find_policy
from sim.world import World, WorldOptions

PAGE = Path("benchmarks/results/2026-11-27-prefixes.md")
WAYS = ("off", "cached", "routed")
_TRACE_BLOCK_TOKENS = 256  # smaller blocks would only slow down the simulation
SHARES = (0.0, 0.3, 0.7, 0.9)
_PIECE_TOKENS = 256
_PIECES = 10
_ANSWER_TOKENS = 64
_BEGINNINGS = 20
_RATE_PER_S = 4.0  # per instance: about 0.7 of its capacity
_SPAN_S = 30.0


@dataclass(frozen=True, slots=True)
class PrefixCell:
    share: float  # fraction of prompt tokens
    way: str
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    hit_fraction: float
    host_hit_fraction: float  # part of `hit_fraction` that comes from host memory
    request_count: int


@dataclass(frozen=True, slots=True)
class Size:
    cluster: str
    model: str
    block_tokens: int
    host_bytes: int  # per instance


def arrivals_of(share: float, rate_per_s: float, seed: int) -> list[Arrival]:
    rng, arrivals, at_s = random.Random(seed), list[Arrival](), 0.0
    weights = [1 / rank for rank in range(1, _BEGINNINGS + 1)]
    common = round(share * _PIECES)
    while at_s < _SPAN_S:
        (beginning,) = rng.choices(range(_BEGINNINGS), weights)
        own = 10_000 + len(arrivals) * _PIECES
        hash_ids = (*(beginning * 100 + n for n in range(common)), *(own + n for n in range(_PIECES - common)))
        tokens = _PIECES * _PIECE_TOKENS
        arrivals.append(Arrival(at_s, tokens, _ANSWER_TOKENS, hash_ids=hash_ids, hash_tokens=_PIECE_TOKENS))
        at_s += rng.expovariate(rate_per_s)
    return arrivals


def arrivals_from(trace: Path, until_s: float) -> list[Arrival]:
    """Requests of a Mooncake trace (JSON lines)."""
    arrivals: list[Arrival] = []
    for line in trace.read_text().splitlines():
        record = json.loads(line)
        if (at_s := record["timestamp"] / 1000) >= until_s:
            break
        hash_ids = tuple(record["hash_ids"])
        arrivals.append(Arrival(at_s, record["input_length"], record["output_length"], hash_ids=hash_ids))
    return arrivals


def run(share: float, way: str, arrivals: Sequence[Arrival], size: Size) -> PrefixCell:
    rules = find_policy("drop")(production_rules(WorkerSize()))
    dispatcher = rules.dispatcher
    if way not in ("routed", "host"):
        dispatcher = replace(dispatcher, placement=replace(dispatcher.placement, prefix_marks=0))
    worker = replace(rules.worker, prefix_caching=way != "off", block_tokens=size.block_tokens)
    if way == "host":
        worker = replace(worker, swap_space_bytes=size.host_bytes, swaps_online=False)
    rules = replace(rules, dispatcher=dispatcher, worker=worker)
    options = WorldOptions(
        model=find_model(size.model),
        cluster=find_cluster(size.cluster),
        timings=timings(),
        rules=rules,
        fast_forwards=True,
    )
    world = World(options, arrivals)
    records = world.run().records
    loads = [instance.load() for instance in world.instances.values()]
    queried = sum(load.prefix_queries_total for load in loads)
    ttft = quantiles([r.token_times_s[0] - r.arrival_s for r in records], n=100)
    answers = [r.token_times_s for r in records if len(r.token_times_s) > 1]
    tpot = [(times_s[-1] - times_s[0]) / (len(times_s) - 1) for times_s in answers]
    hits = sum(load.prefix_hits_total for load in loads) / queried if queried else 0.0
    from_host = sum(load.prefix_host_hits_total for load in loads) / queried if queried else 0.0
    return PrefixCell(share, way, ttft[49], ttft[98], quantiles(tpot, n=2)[0], hits, from_host, len(records))


def core_of(*, caching: bool, running: int) -> WorkerCore:
    """A worker's core with `running` requests, all of which are decoding."""
    limits = WorkerLimits(
        block_tokens=16,
        max_model_len=8192,
        vocab_size=1 << 20,
        max_running_count=running,
        max_batch_tokens=8192,
        max_waiting_count=1000,
        max_waiting_tokens=1 << 30,
        prefix_caching=caching,
    )
    core = WorkerCore(limits, 60_000)
    core.handle(StreamOpened(0.0, 1))
    for handle in range(1, running + 1):
        core.handle(
            Submitted(
                at_s=0.0,
                key=SequenceKey(1, handle),
                request_id=RequestId("r"),
                attempt=1,
                prompt_token_ids=tuple(range(handle * 1000, handle * 1000 + 500)),
                sampling=SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True),
                wants_text=False,
            )
        )
    while _step(core) < running:
        pass
    for _ in range(50):
        _step(core)
    return core


def _step(core: WorkerCore) -> int:
    """Execute a step. Returns the number of sampled tokens."""
    for command in core.handle(BatchWanted(0.0)):
        if isinstance(command, Execute):
            count = sum(part.samples for part in command.batch.slices)
            result = StepResult(command.batch.step_id, (7,) * count, (None,) * count, 0.01)
            core.handle(StepDone(0.0, result, ("",) * count))
            return count
    return 0


def step_costs() -> dict[str, float]:
    """Microseconds of a core's step with 256 decodes, without and with caching: the minimum of alternating runs."""
    cores = {"off": core_of(caching=False, running=256), "on": core_of(caching=True, running=256)}
    best = dict.fromkeys(cores, float("inf"))
    for _ in range(200):
        for name, core in cores.items():
            began_s = time.thread_time()
            for _ in range(8):
                _step(core)
            best[name] = min(best[name], (time.thread_time() - began_s) / 8)
    return {f"step of 256 decodes, {name}, us": round(best_s * 1e6, 1) for name, best_s in best.items()}


def giving_up_costs() -> dict[str, float]:
    """Milliseconds to evict 1,000 of 100,000 retained blocks in a worker's core and its block book."""
    limits = WorkerLimits(
        block_tokens=16,
        max_model_len=16_384,
        vocab_size=1 << 30,
        max_running_count=1,
        max_batch_tokens=16_384,
        max_waiting_count=1000,
        max_waiting_tokens=1 << 30,
        prefix_caching=True,
    )
    book = BlockBook(102_000, 16)
    core = WorkerCore(limits, 102_000, book=book)
    core.handle(StreamOpened(0.0, 1))
    for handle in range(1, 201):
        prompt = tuple(range(handle * 10_000, handle * 10_000 + 8_001))
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        key = SequenceKey(1, handle)
        core.handle(
            Submitted(
                at_s=0.0,
                key=key,
                request_id=RequestId("r"),
                attempt=1,
                prompt_token_ids=prompt,
                sampling=sampling,
                wants_text=False,
            )
        )
        while _step(core):
            pass
    retained = core.group_scheduler.scheduler.prefixes.retained_count
    took_s = float("inf")
    for count in range(1, 11):
        wanted = 102_000 - retained + 1000 * count
        began_s = time.thread_time()
        core.handle(RoomWanted(0.0, wanted))
        took_s = min(took_s, time.thread_time() - began_s)
    assert core.group_scheduler.scheduler.prefixes.retained_count == retained - 10_000
    return {f"giving up 1,000 of {retained:,} retained blocks, ms": round(took_s * 1000, 2)}


def dispatcher_costs(worker_count: int = 1000, seconds: int = 20) -> dict[str, float]:
    """Costs of prefix marks in a dispatcher, if each worker computes 12,800 tokens/s and reports once a second."""
    workers = [WorkerKey(WorkerId(f"worker-{number:04}"), Incarnation(1)) for number in range(worker_count)]
    per_report, rng = 12_800 // MARK_TOKENS, random.Random(1)
    reports = [[rng.getrandbits(63) for _ in range(per_report)] for _ in range(worker_count * seconds)]
    tracemalloc.start()
    known = PrefixMap(PlacementRules().prefix_marks)
    for number, marks in enumerate(reports[-PlacementRules().prefix_marks // per_report :]):
        known.note(workers[number % worker_count], marks, 0.0)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    began_s = time.process_time()
    for number, marks in enumerate(reports):
        known.report(workers[number % worker_count], 0.0)
        known.note(workers[number % worker_count], marks, 1.0)
    noting_s = (time.process_time() - began_s) / seconds
    began_s = time.process_time()
    for marks in reports[-worker_count:]:
        known.hits(marks)
    finding_s = (time.process_time() - began_s) / worker_count
    memory = MemoryReport(budget_bytes=80 << 30, parameter_bytes=26 << 30, kv_bytes=54 << 30, free_bytes=0)
    load = core_of(caching=True, running=1).load(0.0, memory)
    bare_bytes = pb_worker.StepOutput(load=LOAD.message(load)).ByteSize()
    told_bytes = pb_worker.StepOutput(load=LOAD.message(load), marks=reports[0]).ByteSize()
    return {
        "bytes of a load report": bare_bytes,
        f"bytes of its {per_report} marks": told_bytes - bare_bytes,
        f"MB/s of marks from {worker_count:,} workers": round(worker_count * (told_bytes - bare_bytes) / 1e6, 2),
        f"processor seconds a second for marks of {worker_count:,} workers": round(noting_s, 3),
        f"us to find a prompt of {12_800:,} tokens": round(finding_s * 1e6, 1),
        f"MB held of {len(known):,} marks": round(held_bytes / 1e6, 1),
    }


def draw(cells: Sequence[PrefixCell], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for axis, name, title in ((axes[0], "ttft_p50_s", "P50"), (axes[1], "ttft_p99_s", "P99")):
        for way, style in zip(WAYS, ("o-", "s--", "^-"), strict=True):
            mine = [cell for cell in cells if cell.way == way]
            axis.plot([100 * c.share for c in mine], [1000 * getattr(c, name) for c in mine], style, label=way)
        axis.set(xlabel="tokens of a prompt that others have, %", ylabel=f"time to first token, {title}, ms")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def table(cells: Sequence[PrefixCell], costs: Mapping[str, float], cluster: str, model: str) -> str:
    lines = [
        f"{model} on {cluster}, simulated; {cells[0].request_count} requests a cell or about as many.",
        "",
        "| shared | | P50 TTFT | P99 TTFT | P50 TPOT | hits | from the host |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.share:.0%} | {c.way} | {c.ttft_p50_s * 1000:.1f} ms | {c.ttft_p99_s * 1000:.1f} ms"
        f" | {c.tpot_p50_s * 1000:.2f} ms | {c.hit_fraction:.1%} | {c.host_hit_fraction:.1%} |"
        for c in cells
    ]
    return "\n".join([*lines, "", *(f"- {name}: {value}" for name, value in costs.items())]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", action="store_true", help=f"the second part only, into {PAGE}")
    parser.add_argument(
        "--out", type=Path, default=Path("out/prefix-caching"), help="folder for prefix-caching.md, .json and .png"
    )
    parser.add_argument("--cluster", default="4xH100-80G")
    parser.add_argument("--model", default="Llama-2-13B")
    parser.add_argument("--trace", type=Path, help="lines of JSON with hash_ids, instead of drawn requests")
    parser.add_argument("--until-s", type=float, default=120.0, help="of the trace (default: 120)")
    parser.add_argument("--rate-per-s", type=float, default=_RATE_PER_S, help="of each instance (default: %(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--host-bytes", default="512GB", help="with --trace, of all instances (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, "host"))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.costs:
        lines = [
            f"- {name}: {value}" for name, value in (step_costs() | giving_up_costs() | dispatcher_costs()).items()
        ]
        load = f"load average {os.getloadavg()[0]:.1f}"
        command = "`python -m benchmarks.prefix_caching --costs`"
        quote(PAGE, "prefix-costs", f"{command}, commit {code_commit()}, {load}:\n\n" + "\n".join(lines))
        print(*lines, sep="\n")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    instance_count = int(args.cluster.partition("x")[0])
    host_bytes = parse_bytes(args.host_bytes) // instance_count
    block_tokens = production_rules(WorkerSize()).worker.block_tokens if args.trace is None else _TRACE_BLOCK_TOKENS
    size = Size(args.cluster, args.model, block_tokens, host_bytes)
    cells: list[PrefixCell] = []
    for share in args.shares if args.trace is None else (0.0,):
        if args.trace is None:
            arrivals = arrivals_of(share, args.rate_per_s * instance_count, args.seed)
        else:
            arrivals = arrivals_from(args.trace, args.until_s)
        for way in args.ways or (WAYS if args.trace is None else (*WAYS, "host")):
            cells.append(run(share, way, arrivals, size))
            print(cells[-1], flush=True)
    costs = step_costs() | giving_up_costs() | dispatcher_costs()
    print(costs)
    said = {"cells": [{name: getattr(cell, name) for name in PrefixCell.__slots__} for cell in cells], "costs": costs}
    (args.out / "prefix-caching.json").write_text(json.dumps(said, indent=1) + "\n")
    (args.out / "prefix-caching.md").write_text(table(cells, costs, args.cluster, args.model))
    if args.trace is None:
        draw(cells, args.out / "prefix-caching.png")


if __name__ == "__main__":
    main()

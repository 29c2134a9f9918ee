"""Simulates prefix caching and routing by prefix, on clusters of several sizes and in cells of the regret grid:

    python -m benchmarks.prefix_routing table [--instances 1 4 8] [--trace FILE [--host-bytes 2048GB]] [--write]
    python -m benchmarks.prefix_routing shares [--shares 0.3 0.7] [--rate-per-s 4] [--write]
    python -m benchmarks.prefix_routing regret --traces DIR [--cells 'chat*'] [--write]

`--write` keeps the rows of other cells in the page, so that a table can be filled by several runs.

table: sessions on H100s with Llama-3.1-8B, at half of the rate that they can compute without a cache, or at `--load`.
Chats have four turns that begin with one of twenty prompts of 1,000 tokens (Zipf), agents ten turns that begin with one
of eight prompts of 2,000; a turn's prompt contains the previous one. With `--trace`, also the requests of a Mooncake
file (JSON lines with `hash_ids`) on four times the number of `--instances`, whose KV blocks have 512 tokens. `off`:
without caching; `cached`: placement ignores caches; `routed`: the services' default; `host`: like `routed`, with
evicted KV kept in host memory, `--host-bytes` over all instances.

shares: Llama-2-13B on four H100s at about 0.7 of the rate that they can compute without caching. Prompts have 2,560
tokens; a share of each is one of twenty prefixes (Zipf), the rest is unique.

regret: cells whose requests become turns of chats, as far as their lengths allow, without and with prefix caching.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from statistics import quantiles

from ballast.common.units import parse_bytes
from benchmarks.quoting import code_commit, quote, quoted
from benchmarks.regret_cells import CELLS, figures_of, job_of
from sim.clients import Arrival
from sim.hardware import find_cluster, find_model, timings
from sim.jobs.settled import prompt_share
from sim.jobs.simulation import WorkerSize, arrivals_of, production_rules, specs_of, world_of
from sim.policies import find_policy
from sim.world import World, WorldOptions
from tools.bench.traces import Trace, TraceRequest

PAGE = Path("benchmarks/results/2026-11-27-prefixes.md")
MODEL, PIECE_TOKENS = "Llama-3.1-8B", 64
WAYS = ("off", "cached", "routed")
_TRACE_BLOCK_TOKENS = 512
_SHARED_PIECES, _SHARED_PIECE_TOKENS, _SHARED_COUNT = 10, 256, 20  # pieces per prompt, tokens per piece, prefixes
_CHAT_CELLS = "chat-13b-40g-x1.1,chat-14b-80g-x2,chat-70b-160g-x1"
_HEAD = ("| | | requests | hits | P50 / P99 TTFT ms | P99, x cached | P50 TPOT ms |", f"|{'---|' * 7}")
Told = Callable[[Sequence[str]], None]  # called with the rows so far, so that an interrupted run preserves them
_AGAIN, _LEAST_GAP_S = 0.7, 8.0  # share of requests that continue a chat, where possible; minimum time between turns


@dataclass(frozen=True, slots=True)
class PrefixCell:
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
    host_bytes: int = 0  # per instance


def run(way: str, arrivals: Sequence[Arrival], size: Size) -> PrefixCell:
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
    return PrefixCell(ttft[49], ttft[98], quantiles(tpot, n=2)[0], hits, from_host, len(records))


def with_shared_prefixes(share: float, rate_per_s: float, span_s: float, seed: int) -> list[Arrival]:
    rng, arrivals, at_s = random.Random(seed), list[Arrival](), 0.0
    weights = [1 / rank for rank in range(1, _SHARED_COUNT + 1)]
    pieces, common = _SHARED_PIECES, round(share * _SHARED_PIECES)
    while at_s < span_s:
        (beginning,) = rng.choices(range(_SHARED_COUNT), weights)
        own = 10_000 + len(arrivals) * pieces
        hash_ids = (*(beginning * 100 + n for n in range(common)), *(own + n for n in range(pieces - common)))
        tokens = pieces * _SHARED_PIECE_TOKENS
        arrivals.append(Arrival(at_s, tokens, 64, hash_ids=hash_ids, hash_tokens=_SHARED_PIECE_TOKENS))
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


def sessions(kind: str, per_s: float, span_s: float, seed: int) -> list[Arrival]:
    """Requests of random sessions (chats or agents) that begin at `per_s`, by arrival."""
    rng, at_s, next_id, made = random.Random(seed), 0.0, 10_000, list[Arrival]()
    turns, begin_tokens, begin_count, gap_s = (4, 1000, 20, 10.0) if kind == "chats" else (10, 2000, 8, 3.0)
    weights = [1 / rank for rank in range(1, begin_count + 1)]
    while at_s < span_s:
        (begin,) = rng.choices(range(begin_count), weights if kind == "chats" else None)
        hash_ids = [begin * 100 + piece for piece in range(begin_tokens // PIECE_TOKENS)]
        turn_s = at_s
        for _ in range(turns):
            new = rng.randrange(1, 6)
            hash_ids += range(next_id, next_id + new)
            next_id += new
            tokens, answer = len(hash_ids) * PIECE_TOKENS, rng.randrange(50, 150)
            made.append(Arrival(turn_s, tokens, answer, hash_ids=tuple(hash_ids), hash_tokens=PIECE_TOKENS))
            turn_s += gap_s * rng.uniform(0.5, 1.5)
        at_s += rng.expovariate(per_s)
    return sorted((arrival for arrival in made if arrival.at_s < span_s), key=lambda arrival: arrival.at_s)


def rate_of(kind: str, cluster: str, load: float, span_s: float) -> float:
    """Sessions per second with which prompts take the fraction `load` of the cluster's compute, without a cache."""
    drawn = sessions(kind, 5.0, span_s, 0)
    requests = tuple(TraceRequest(one.at_s, one.input_tokens, one.output_tokens) for one in drawn)
    trace = Trace(source="sessions", format="ballast", requests=requests)
    share = prompt_share(find_model(MODEL), find_cluster(cluster), timings(), trace)
    return 5.0 * load / share


def table(args: argparse.Namespace, told: Told) -> None:
    rows = [*_HEAD]
    for kind in args.kinds:
        for count in args.instances:
            cluster = f"{count}xH100-80G"
            size = Size(cluster, MODEL, PIECE_TOKENS)
            found = sessions(kind, rate_of(kind, cluster, args.load, args.span_s), args.span_s, args.seed)
            rows += _compare(f"{kind}, {count}", found, size)
            told(rows)
    if args.trace is not None:
        for count in args.instances:
            host_bytes = args.host_bytes // (4 * count)
            size = Size(f"{4 * count}xH100-80G", MODEL, _TRACE_BLOCK_TOKENS, host_bytes)
            rows += _compare(f"Mooncake, {4 * count}", arrivals_from(args.trace, args.until_s), size)
            told(rows)


def shares(args: argparse.Namespace, told: Told) -> None:
    rows, size = [*_HEAD], Size("4xH100-80G", "Llama-2-13B", production_rules(WorkerSize()).worker.block_tokens)
    for share in args.shares:
        arrivals = with_shared_prefixes(share, 4 * args.rate_per_s, args.span_s, args.seed)
        rows += _compare(f"{share:.0%} shared", arrivals, size)
        told(rows)


def _compare(name: str, arrivals: Sequence[Arrival], size: Size) -> list[str]:
    ways = (*WAYS, "host") if size.host_bytes else WAYS
    cells = {way: run(way, arrivals, size) for way in ways}
    rows: list[str] = []
    for way, cell in cells.items():
        p50, p99 = f"{cell.ttft_p50_s * 1e3:,.0f}", f"{cell.ttft_p99_s * 1e3:,.0f}"
        ratio = f"{cell.ttft_p99_s / cells['cached'].ttft_p99_s:.2f}"
        hits = f"{cell.hit_fraction:.1%}" + (f" ({cell.host_hit_fraction:.1%} from the host)" if way == "host" else "")
        numbers = f"{cell.request_count:,} | {hits} | {p50} / {p99} | {ratio}"
        rows.append(f"| {name if way == WAYS[0] else ''} | {way} | {numbers} | {cell.tpot_p50_s * 1e3:.1f} |")
        print(rows[-1], flush=True)
    return rows


def merged(before: str, command: str, rows: Sequence[str]) -> str:
    """Add a run to a text that consists of a list of commands and one table: append `command` to the list, and replace
    the table's rows of the same cells by `rows`. A row whose first column is empty belongs to the cell above it.
    """
    lines = before.splitlines()
    commands = [line for line in lines if line.startswith("- ")]
    cells: dict[str, list[str]] = {}
    for table in ([line for line in lines if line.startswith("|")], rows):
        name, new = "", set[str]()
        for row in table[2:]:
            name = row.split("|")[1].strip() or name
            if name not in new:
                new.add(name)
                cells[name] = []
            cells[name].append(row)
    ordered = [row for name in sorted(cells) for row in cells[name]]
    return "\n".join([*commands, *([] if command in commands else [command]), "", *rows[:2], *ordered])


def as_chats(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
    """The arrivals as turns of chats, with unchanged times and lengths. A random prompt begins with the conversation of
    an earlier turn if one is short enough; all others begin with one of twenty common prefixes of 512 tokens.
    """
    rng, last, next_id, made = random.Random(seed), list[Arrival](), 10_000, list[Arrival]()
    for arrival in arrivals:
        pieces = arrival.input_tokens // PIECE_TOKENS + 1
        open_ = [at for at, one in enumerate(last) if one.at_s < arrival.at_s - _LEAST_GAP_S]
        fitting = [at for at in open_ if len(last[at].hash_ids) < pieces]
        begin = rng.randrange(20)
        before = tuple(begin * 100 + piece for piece in range(min(8, pieces - 1)))
        if fitting and rng.random() < _AGAIN:
            before = last.pop(rng.choice(fitting)).hash_ids
        new = pieces - len(before)
        turn = arrival._replace(hash_ids=(*before, *range(next_id, next_id + new)), hash_tokens=PIECE_TOKENS)
        next_id += new
        made.append(turn)
        last = [*last[-200:], turn]
    return made


def regret(traces: Path | None, cells: str, told: Told) -> None:
    head = "| cell, off / on | hits | P50 TTFT s | P99 TTFT s | x | P50 TPOT s | x | tokens/s | x | drops |"
    rows = [head, f"|{'---|' * 10}"]
    for name in [name for name in CELLS if any(fnmatch(name, pattern) for pattern in cells.split(","))]:
        job = job_of(CELLS[name], traces, "drop", 0)
        [(_, rules)] = specs_of(job)
        turns = as_chats(arrivals_of(job.trace), 0)
        caching = replace(rules, worker=replace(rules.worker, prefix_caching=True))
        worlds = [world_of(job, each, turns) for each in (rules, caching)]
        off, on = (figures_of(world.run()) for world in worlds)
        loads = [instance.load() for instance in worlds[1].instances.values()]
        hits = sum(load.prefix_hits_total for load in loads) / max(1, sum(load.prefix_queries_total for load in loads))
        parts = [name, f"{hits:.0%}", f"{off['ttft_p50_s']:.3f} / {on['ttft_p50_s']:.3f}"]
        for key, digits in (("ttft_p99_s", 3), ("tpot_p50_s", 4), ("tokens_per_s", 0)):
            parts += [f"{off[key]:,.{digits}f} / {on[key]:,.{digits}f}", f"{on[key] / off[key]:.2f}"]
        parts.append(f"{off['drops']} / {on['drops']}")
        rows.append(f"| {' | '.join(parts)} |")
        print(rows[-1], flush=True)
        told(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["table", "shares", "regret"])
    parser.add_argument("--instances", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--kinds", nargs="+", choices=["chats", "agents"], default=["chats", "agents"])
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--span-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", type=Path, help="trace file: JSON lines with hash_ids")
    parser.add_argument("--until-s", type=float, default=120.0, help="part of the trace to use (default: 120)")
    parser.add_argument("--host-bytes", type=parse_bytes, default=0, help="for --trace: in all instances together")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.3, 0.7, 0.9], help="for shares")
    parser.add_argument("--rate-per-s", type=float, default=4.0, help="for shares, per instance (%(default)s)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="for regret: folder of the traces")
    parser.add_argument("--cells", default=_CHAT_CELLS, help="for regret: names or patterns (%(default)s)")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE}")
    args = parser.parse_args()
    before = quoted(PAGE, f"prefix-{args.what}")

    def told(rows: Sequence[str]) -> None:
        if not args.write:
            return
        words = [word if word not in (str(args.traces), str(args.trace)) else "PATH" for word in sys.argv[1:]]
        command = f"- `python -m benchmarks.prefix_routing {' '.join(words)}`, commit {code_commit()}"
        quote(PAGE, f"prefix-{args.what}", merged(before, command, rows))

    if args.what == "table":
        table(args, told)
    elif args.what == "shares":
        shares(args, told)
    else:
        regret(args.traces, args.cells, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())

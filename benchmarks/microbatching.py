"""Ways to cut a backlog into microbatches: what the cost model says a pipeline takes for each.

    python -m benchmarks.microbatching [--lengths FILE ...] [--cost FILE] [--write]

200 random sets of 4 to 32 requests, cut into as many microbatches as figure 11's halving makes of them. The gap is
that of the predicted makespan to a bound that no cutting can go below ((m + 1) / m of the total cost for two stages),
so it is at most what is shown. Small sets are also solved exactly, by trying everything. Last, how long it takes to
form microbatches of 1,000 queued requests.
"""

import argparse
import csv
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.engine_throughput import RESULTS, environment
from services.worker.policy.cost import CostModel
from services.worker.policy.lookahead import lookahead
from services.worker.policy.microbatching import Candidate, PipelineView
from services.worker.policy.splitting import (
    Microbatch,
    Work,
    batch_costs_s,
    by_filling,
    by_halving,
    by_tokens,
    makespan_bound_s,
    makespan_s,
)

SETS, STAGES, BATCH_TOKENS, MIN_TOKENS = 200, (2, 4), 2048, 32
# Of one stage of a model for one device; attention to 4,000 tokens costs as much again as all else. Another set of
# coefficients: --cost, a JSON object with the fields of `policy.cost.CostModel`.
COST = CostModel(attention_s=2.5e-9, token_s=1e-5, chunk_s=1.5e-3, shared_s=1.2e-3)

Method = Callable[[Sequence[Work], CostModel, int], list[Microbatch]]  # for so many microbatches
METHODS: dict[str, Method] = {
    "token count": lambda work, _, count: by_tokens(work, count),
    "halving (figure 11)": lambda work, cost, count: by_halving(work, cost, count, MIN_TOKENS),
    "filling by cost": lambda work, cost, count: by_filling(work, cost, count, MIN_TOKENS),
}


def read_lengths(paths: Sequence[Path]) -> list[tuple[int, int]]:
    """(input, output) tokens of every row of CSV files with those columns."""
    found: list[tuple[int, int]] = []
    for path in paths:
        with path.open(newline="") as file:
            found += [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return found


def random_sets(rng: random.Random, lengths: Sequence[tuple[int, int]]) -> Iterator[list[Work]]:
    """Prompts, a few of them begun, and in half of the sets requests that decode."""
    for _ in range(SETS):
        count = rng.randint(4, 32)
        decodes = rng.randint(0, count // 2) if rng.random() < 0.5 else 0
        works: list[Work] = []
        for index in range(count):
            tokens = rng.choice(lengths)[0] if lengths else int(min(8192, 16 + rng.expovariate(1 / 2000)))
            if index < decodes:
                works.append(Work(tokens, 1))
            else:
                prefix = rng.randrange(tokens) if rng.random() < 0.2 else 0
                works.append(Work(prefix, max(2, tokens - prefix)))
        rng.shuffle(works)
        yield works


def gaps(sets: Sequence[Sequence[Work]], cost: CostModel, stages: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    for work in sets:
        total = sum(w.token_count for w in work)
        wanted = 1 << max(1, round(math.log2(total / BATCH_TOKENS)))
        for name, method in METHODS.items():
            batches = method(work, cost, wanted)
            took_s = makespan_s(batch_costs_s(work, batches, cost), stages)
            found[name].append(took_s / makespan_bound_s(work, len(batches), stages, cost) - 1)
    return found


def best_s(work: Sequence[Work], batch_count: int, stages: int, cost: CostModel) -> float:
    """Every way to spread each sequence's tokens over the microbatches, in order."""
    ways = [
        [
            tuple(b - a for a, b in itertools.pairwise((0, *ends, w.token_count)))
            for ends in itertools.combinations_with_replacement(range(w.token_count + 1), batch_count - 1)
        ]
        for w in work
    ]
    best = math.inf
    for chosen in itertools.product(*ways):
        batches = [[(i, c[k]) for i, c in enumerate(chosen) if c[k]] for k in range(batch_count)]
        if all(batches):
            best = min(best, makespan_s(batch_costs_s(work, batches, cost), stages))
    return best


def exact_gaps(rng: random.Random, stages: int) -> dict[str, list[float]]:
    """Sets so small that the best solution is found by trying. Their tokens are heavy, as if each stood for many."""
    cost = CostModel(attention_s=COST.attention_s * 2e5, token_s=COST.token_s * 300, chunk_s=4e-4, shared_s=3e-4)
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(40):
        work = [Work(rng.choice((0, 0, rng.randint(1, 20))), rng.randint(2, 14)) for _ in range(rng.randint(2, 3))]
        count = rng.randint(2, 3)
        best = best_s(work, count, stages, cost)
        for name, batches in (
            ("token count", by_tokens(work, count)),
            ("halving (figure 11)", by_halving(work, cost, count)),
            ("filling by cost", by_filling(work, cost, count)),
        ):
            if len(batches) == count:
                found[name].append(makespan_s(batch_costs_s(work, batches, cost), stages) / best - 1)
    return found


def table(found: dict[str, list[float]]) -> list[str]:
    lines = ["| | gap mean | median | p95 | max |", "|---|---|---|---|---|"]
    for name, each in found.items():
        p95 = sorted(each)[math.ceil(0.95 * len(each)) - 1]
        lines.append(
            f"| {name} | {statistics.mean(each):.2%} | {statistics.median(each):.2%} | {p95:.2%} | {max(each):.2%} |"
        )
    return lines


def forming_s(cost: CostModel, lengths: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Processor time for 1,000 queued requests, medians; `next one`: only the next microbatch, as a worker does it."""
    rng = random.Random(1)
    work = [Work(0, rng.choice(lengths)[0] if lengths else rng.randint(2, 4000)) for _ in range(1000)]
    count = math.ceil(sum(w.token_count for w in work) / BATCH_TOKENS)
    found: dict[str, float] = {}
    for name, method in METHODS.items():
        times: list[float] = []
        for _ in range(11):
            started_s = time.process_time()
            method(work, cost, count)
            times.append(time.process_time() - started_s)
        found[name] = statistics.median(times)
    view = PipelineView(2, 0, 512, 1, [Candidate(0, 0, 0, w.token_count, 0, True) for w in work])
    form = lookahead(lambda: cost)
    times = []
    for _ in range(11):
        started_s = time.process_time()
        form(view)
        times.append(time.process_time() - started_s)
    found["lookahead, the next one"] = statistics.median(times)
    return found


def report(cost: CostModel, lengths: Sequence[tuple[int, int]]) -> str:
    sets = list(random_sets(random.Random(0), lengths))
    lines = [
        f"{SETS} sets of 4 to 32 requests; cost of a stage: {cost.attention_s:.3g} s a pair, {cost.token_s:.3g} s a"
        f" token, {cost.chunk_s:.3g} s a sequence of which {cost.shared_s:.3g} s are shared.",
        "",
    ]
    for stages in STAGES:
        lines += [f"{stages} stages, gap to the bound:", "", *table(gaps(sets, cost, stages)), ""]
    lines += [
        "2 stages, sets small enough to be solved exactly, gap to the best solution:",
        "",
        *table(exact_gaps(random.Random(0), 2)),
        "",
    ]
    took = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in forming_s(cost, lengths).items())
    lines.append(f"Microbatches of 1,000 queued requests, processor time: {took}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, nargs="+", default=[], metavar="FILE", help="CSV with input_tokens")
    parser.add_argument("--cost", type=Path, metavar="FILE", help="coefficients as JSON")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    given = parser.parse_args()
    cost = COST if given.cost is None else CostModel(**json.loads(given.cost.read_text()))
    text = report(cost, read_lengths(given.lengths))
    print(text)
    if given.write:
        names = ", ".join(p.name for p in given.lengths) or "drawn"
        head = f"# Microbatches of a backlog, lengths: {names}\n\n{environment()}\n\n"
        (RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-microbatching.md").write_text(head + text + "\n")


if __name__ == "__main__":
    main()

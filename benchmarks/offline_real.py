"""Offline work beside online requests on real services with an emulated GPU, at its pace:

    python -m benchmarks.offline_real [--seconds 40] [--rounds 3] [--write]

One cluster of one A100-40G with Llama-2-7B; in each round online work alone, priorities (offline requests are of class
default, online ones interactive) and ours, one after the other, with the same arrivals. The table gives ratios within a
round, since a busy machine slows all three down; every token is checked.
"""

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ballast.client import AsyncClient, SamplingParams
from ballast.common.sampling import PriorityClass
from benchmarks.offline import CLUSTER, MODEL, PAGE, code_commit, gamma, quantile, summaries
from benchmarks.quoting import quote
from services.worker.emulation.tokens import answer
from sim.jobs.machines import catalogue_machine, stand_in
from tools.local.cluster import LocalCluster, Service

VOCABULARY = 4096
OFFLINE_COUNT = 48  # offline requests that are open at a time
WARM_S = 5.0
DRAIN_S = 3.0  # for what has been cancelled to leave
MODES: tuple[tuple[str, PriorityClass | None], ...] = (
    ("online alone", None),
    ("priorities", PriorityClass.DEFAULT),
    ("ours", PriorityClass.BATCH),
)


@dataclass
class ServedFigures:
    ttfts: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])
    harvest: int = 0  # tokens, of prompts and answers


class OnlineStream:
    """Online requests as they arrive, and as many offline ones as always are open."""

    def __init__(self, client: AsyncClient, found: ServedFigures, seed: int) -> None:
        self._client = client
        self._found = found
        self._random = random.Random(seed)

    def _prompt(self, count: int) -> list[int]:
        return [self._random.randrange(VOCABULARY) for _ in range(count)]

    async def online(self, at_s: float, prompt_tokens: int, answer_tokens: int, begin_s: float) -> None:
        loop, prompt = asyncio.get_running_loop(), self._prompt(prompt_tokens)
        await asyncio.sleep(max(0.0, begin_s + at_s - loop.time()))
        asked_s = last_s = loop.time()
        tokens = list[int]()
        sampling = SamplingParams(max_tokens=answer_tokens, ignore_eos=True)
        stream = self._client.stream(
            token_ids=prompt, sampling=sampling, include_text=False, priority=PriorityClass.INTERACTIVE
        )
        async for chunk in stream:
            now_s = loop.time()
            if chunk.token_ids and at_s >= WARM_S:
                self._found.gaps += [(now_s - last_s) / len(chunk.token_ids)] if tokens else []
                self._found.ttfts += [] if tokens else [now_s - asked_s]
            last_s = now_s if chunk.token_ids else last_s
            tokens += chunk.token_ids
        assert tokens == answer(prompt, answer_tokens, VOCABULARY), "a token is wrong"

    async def offline(self, lengths: Iterator[tuple[int, int]], priority: PriorityClass) -> None:
        while True:
            prompt_tokens, answer_tokens = next(lengths)
            prompt, tokens = self._prompt(prompt_tokens), list[int]()
            sampling = SamplingParams(max_tokens=answer_tokens, ignore_eos=True)
            async for chunk in self._client.stream(
                token_ids=prompt, sampling=sampling, include_text=False, priority=priority
            ):
                self._found.harvest += len(chunk.token_ids) + (0 if tokens or not chunk.token_ids else prompt_tokens)
                tokens += chunk.token_ids
            assert tokens == answer(prompt, len(tokens), VOCABULARY), "a token is wrong"


async def measure(client: AsyncClient, priority: PriorityClass | None, seconds: float, seed: int) -> ServedFigures:
    found = ServedFigures()
    load, begin_s = OnlineStream(client, found, seed), asyncio.get_running_loop().time()
    lengths = itertools.cycle(summaries(seed))
    async with asyncio.TaskGroup() as offline:
        tasks = [] if priority is None else [load.offline(lengths, priority) for _ in range(OFFLINE_COUNT)]
        running = [offline.create_task(task) for task in tasks]
        async with asyncio.TaskGroup() as online:
            for one in gamma(2.0, 1.0, seconds, seed):
                online.create_task(load.online(one.at_s, one.input_tokens, one.output_tokens, begin_s))
        for task in running:
            task.cancel()
    await asyncio.sleep(DRAIN_S)
    return found


async def run(args: argparse.Namespace, folder: Path) -> str:
    """The table: of each mode the rounds."""
    gpu = CLUSTER.removeprefix("1x")
    made = stand_in(folder / "stand-in", catalogue_machine(gpu, MODEL, VOCABULARY))
    flags: dict[Service, list[str]] = {"worker": [*made.worker_flags, "--max-num-batched-tokens", "512"]}
    flags["planner"] = ["--overload-policy", "recompute"]
    rounds: dict[str, list[tuple[ServedFigures, float]]] = {name: [] for name, _ in MODES}
    async with LocalCluster(made.model, workers=1, flags=flags) as cluster, AsyncClient(cluster.address) as client:
        for number in range(args.rounds):
            alone = 0.0
            for name, priority in MODES:
                found = await measure(client, priority, args.seconds, args.seed + number)
                ttft_s, gap_s = quantile(found.ttfts, 0.99), quantile(found.gaps, 0.99)
                alone = alone or ttft_s
                rounds[name].append((found, ttft_s / alone))
                print(
                    f"round {number + 1}, {name}: {len(found.ttfts)} requests, P50 / P99 TTFT"
                    f" {quantile(found.ttfts, 0.5) * 1e3:,.0f} / {ttft_s * 1e3:,.0f} ms ({ttft_s / alone:.2f} x alone),"
                    f" P99 TPOT {gap_s * 1e3:.0f} ms, harvest {found.harvest / args.seconds:,.0f} tok/s",
                    flush=True,
                )
            load = (await client.status()).groups[0].load
            if load is not None and load.offline_tokens_total:
                share = load.offline_lost_tokens_total / load.offline_tokens_total
                print(f"so far {load.offline_yields_total} yields, {share:.2%} computed twice", flush=True)
    rows = ["| | requests | P99 TTFT ms | x alone | median | P99 TPOT ms | harvest tok/s |", f"|{'---|' * 7}"]
    for name, each in rounds.items():
        cells = [
            ", ".join(f"{len(one.ttfts)}" for one, _ in each),
            ", ".join(f"{quantile(one.ttfts, 0.99) * 1e3:,.0f}" for one, _ in each),
            ", ".join(f"{ratio:.2f}" for _, ratio in each),
            f"{statistics.median([ratio for _, ratio in each]):.2f}",
            ", ".join(f"{quantile(one.gaps, 0.99) * 1e3:.0f}" for one, _ in each),
            ", ".join(f"{one.harvest / args.seconds:,.0f}" for one, _ in each),
        ]
        rows.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals in each measurement (default: 40)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"into {PAGE}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = os.getloadavg()[0]
        table = asyncio.run(run(args, Path(folder)))
    print(table)
    if args.write:
        command = f"python -m benchmarks.offline_real {' '.join(sys.argv[1:])}"
        load = f"load average {before:.1f} at its begin, {os.getloadavg()[0]:.1f} at its end"
        quote(PAGE, "offline-real", f"`{command}`, commit {code_commit()}, {load}:\n\n{table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

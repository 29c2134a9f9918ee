"""Offline work alongside online requests on real services, with an emulated GPU or a small model on a CPU.

    python -m benchmarks.offline_real [--cpu] [--seconds 40] [--rounds 3] [--write]

The cluster has one emulated A100-40G with Llama-2-7B or, with `--cpu`, one worker that computes a random model with 8
layers of width 512 (online requests of 64 + 24 tokens, offline ones of 256 + 24). Each round runs three modes one after
the other, with the same arrivals: online work alone, priorities (offline requests have class default, online ones
interactive) and Ballast's offline class. The table gives ratios within a round, since a busy machine slows all three
down. Every token is checked: those of the emulated GPU against the tokens that it must generate, those of the small
model's online requests against the same requests without offline work.
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
from benchmarks.offline import CLUSTER, MODEL, PAGE, gamma, quantile, summaries
from benchmarks.quoting import quote_run
from services.worker.emulation.tokens import answer
from sim.jobs.machines import catalogue_machine, stand_in
from tools.local.cluster import LocalCluster, Service
from tools.model.tiny import make_tiny

VOCABULARY = 4096
OFFLINE_COUNT = 48  # offline requests that are open at a time
WARM_S = 5.0
DRAIN_S = 3.0  # time for cancelled requests to leave the worker
MODES: tuple[tuple[str, PriorityClass | None], ...] = (
    ("online alone", None),
    ("priorities", PriorityClass.DEFAULT),
    ("ours", PriorityClass.BATCH),
)


@dataclass
class ServedFigures:
    ttfts: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])
    harvest: int = 0  # prompt and answer tokens of offline requests
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict[tuple[int, ...], list[int]])  # online only


@dataclass(frozen=True, slots=True)
class RealLoad:
    """Requests of a measurement. Lengths: (prompt, answer) tokens of each; None: as in `benchmarks.offline`."""

    lengths: tuple[int, int] | None = None
    offline_lengths: tuple[int, int] | None = None
    per_s: float = 2.0
    vocabulary: int = VOCABULARY


EMULATED = RealLoad()
ON_CPU = RealLoad((64, 24), (256, 24), 1.5, 512)


class OnlineStream:
    """Sends online and offline requests, and checks and times their tokens."""

    def __init__(self, client: AsyncClient, found: ServedFigures, load: RealLoad, seed: int) -> None:
        self._client = client
        self._found = found
        self._load = load
        self._online, self._offline = random.Random(seed), random.Random(f"offline {seed}")

    def _prompt(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(5, self._load.vocabulary) for _ in range(count)]

    def _check(self, prompt: list[int], tokens: list[int], count: int) -> None:
        if self._load is EMULATED:
            assert tokens == answer(prompt, count, VOCABULARY), "a token is wrong"

    async def online(self, at_s: float, prompt_tokens: int, answer_tokens: int, begin_s: float) -> None:
        loop, prompt = asyncio.get_running_loop(), self._prompt(self._online, prompt_tokens)
        await asyncio.sleep(max(0.0, begin_s + at_s - loop.time()))
        asked_s = last_s = loop.time()
        tokens = list[int]()
        sampling = SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True)
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
        self._check(prompt, tokens, answer_tokens)
        self._found.answers[tuple(prompt)] = tokens

    async def offline(self, lengths: Iterator[tuple[int, int]], priority: PriorityClass) -> None:
        while True:
            prompt_tokens, answer_tokens = next(lengths)
            prompt, tokens = self._prompt(self._offline, prompt_tokens), list[int]()
            sampling = SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True)
            async for chunk in self._client.stream(
                token_ids=prompt, sampling=sampling, include_text=False, priority=priority
            ):
                self._found.harvest += len(chunk.token_ids) + (0 if tokens or not chunk.token_ids else prompt_tokens)
                tokens += chunk.token_ids
            self._check(prompt, tokens, len(tokens))


async def measure(
    client: AsyncClient, priority: PriorityClass | None, load: RealLoad, seconds: float, seed: int
) -> ServedFigures:
    found = ServedFigures()
    stream, begin_s = OnlineStream(client, found, load, seed), asyncio.get_running_loop().time()
    lengths = itertools.cycle(summaries(seed) if load.offline_lengths is None else [load.offline_lengths])
    async with asyncio.TaskGroup() as offline:
        tasks = [] if priority is None else [stream.offline(lengths, priority) for _ in range(OFFLINE_COUNT)]
        running = [offline.create_task(task) for task in tasks]
        async with asyncio.TaskGroup() as online:
            for one in gamma(load.per_s, 1.0, seconds, seed):
                prompt_tokens, answer_tokens = load.lengths or (one.input_tokens, one.output_tokens)
                online.create_task(stream.online(one.at_s, prompt_tokens, answer_tokens, begin_s))
        for task in running:
            task.cancel()
    await asyncio.sleep(DRAIN_S)
    return found


async def run(args: argparse.Namespace, folder: Path) -> str:
    """Run all rounds. Returns a Markdown table with a row for each mode."""
    load = ON_CPU if args.cpu else EMULATED
    if args.cpu:
        model = make_tiny("llama", folder / "model", layers=8, hidden=512, heads=8, kv_heads=4, max_len=1024)
        worker_flags = ["--device-memory-bytes", "512MiB", "--dtype", "float32"]
    else:
        made = stand_in(folder / "stand-in", catalogue_machine(CLUSTER.removeprefix("1x"), MODEL, VOCABULARY))
        model, worker_flags = made.model, made.worker_flags
    flags: dict[Service, list[str]] = {"worker": [*worker_flags, "--max-num-batched-tokens", "512"]}
    flags["planner"] = ["--overload-policy", "recompute"]
    rounds: dict[str, list[tuple[ServedFigures, float]]] = {name: [] for name, _ in MODES}
    async with LocalCluster(model, workers=1, flags=flags) as cluster, AsyncClient(cluster.address) as client:
        for number in range(args.rounds):
            alone, said = 0.0, dict[tuple[int, ...], list[int]]()
            for name, priority in MODES:
                found = await measure(client, priority, load, args.seconds, args.seed + number)
                ttft_s, gap_s = quantile(found.ttfts, 0.99), quantile(found.gaps, 0.99)
                alone, said = alone or ttft_s, said or found.answers
                assert all(said[prompt] == tokens for prompt, tokens in found.answers.items()), "a token differs"
                rounds[name].append((found, ttft_s / alone))
                print(
                    f"round {number + 1}, {name}: {len(found.ttfts)} requests, P50 / P99 TTFT"
                    f" {quantile(found.ttfts, 0.5) * 1e3:,.0f} / {ttft_s * 1e3:,.0f} ms ({ttft_s / alone:.2f} x alone),"
                    f" P99 TPOT {gap_s * 1e3:.0f} ms, harvest {found.harvest / args.seconds:,.0f} tok/s",
                    flush=True,
                )
            told = (await client.status()).groups[0].load
            if told is not None and told.offline_tokens_total:
                share = told.offline_lost_tokens_total / told.offline_tokens_total
                print(f"so far {told.offline_yields_total} yields, {share:.2%} computed twice", flush=True)
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
    parser.add_argument("--cpu", action="store_true", help="use a small model on this machine's CPU")
    parser.add_argument("--seconds", type=float, default=40.0, help="of arrivals per measurement (default: 40)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = os.getloadavg()[0]
        table = asyncio.run(run(args, Path(folder)))
    print(table)
    if args.write:
        load = f"load average {before:.1f} at its begin, {os.getloadavg()[0]:.1f} at its end"
        quote_run(PAGE, "offline-cpu" if args.cpu else "offline-real", table, note=load)
    return 0


if __name__ == "__main__":
    sys.exit(main())

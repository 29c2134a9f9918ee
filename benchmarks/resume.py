"""Kills dispatchers under the hands of their clients, and looks whether every answer goes on as if nothing had been.

    python -m benchmarks.resume --kills 200

A cluster of this machine, with a small model in float64, serves requests of many kinds: greedy and seeded, with
logprobs, stop strings and JSON schemas, streamed and in one piece. Again and again one of its dispatchers is killed
(SIGKILL) and started anew. Every answer is compared, token by token and character by character, with that of the
undisturbed cluster.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ballast.client import AsyncClient, Generation, GenerationChunk
from ballast.common.errors import BallastError
from ballast.common.sampling import Grammar, GrammarKind, SamplingParams
from tools.local.cluster import LocalCluster, ServiceProcess
from tools.model.tiny import make_tiny

_SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
_KINDS = ("greedy", "seeded", "logprobs", "stop strings", "JSON schema", "in one piece")
_EACH = 3  # different requests of a kind
_START_S = 60.0  # of a dispatcher
_DEADLINE_S = 120.0  # of a request
_POLL_S = 0.02
_TOLD = 5  # kinds of failures
_LOGPROB_ERROR = 1e-6  # a token is scored in a step of its own, or together with the prompt and the answer so far


@dataclass(frozen=True, slots=True)
class Ask:
    kind: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(slots=True)
class Found:
    """Counts of streams, and times without a token in seconds."""

    kill_count: int = 0
    request_count: int = 0
    token_count: int = 0
    resumed_count: int = 0  # of streams, each time that it happened
    gaps_s: list[float] = field(default_factory=list[float])  # of streams that had a token
    waits_s: list[float] = field(default_factory=list[float])  # of streams that had none: since they were sent
    kinds: Counter[str] = field(default_factory=Counter[str])  # of what was resumed
    lost: Counter[str] = field(default_factory=Counter[str])
    differing: Counter[str] = field(default_factory=Counter[str])

    def why_not(self) -> str:
        """Empty: all is as it has to be."""
        lost, differing = sum(self.lost.values()), sum(self.differing.values())
        return "; ".join(
            text
            for text in (
                f"{lost} lost: {dict(self.lost)}" if lost else "",
                f"{differing} differ: {dict(self.differing)}" if differing else "",
                "no stream was cut" if not self.resumed_count else "",
            )
            if text
        )


def asks(max_tokens: int) -> list[Ask]:
    rng = random.Random(0)
    found: list[Ask] = []
    for kind, index in itertools.product(_KINDS, range(_EACH)):
        prompt = tuple(3 + rng.randrange(200) for _ in range(8 + 9 * index))
        seeded = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=11 + index, ignore_eos=True)
        sampling = {
            "greedy": SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            "logprobs": SamplingParams(
                max_tokens=max_tokens, temperature=0.8, seed=index, ignore_eos=True, logprobs=2, presence_penalty=0.5
            ),
            # The first never comes and holds text back again and again; the second may end it.
            "stop strings": SamplingParams(
                max_tokens=max_tokens, temperature=0.8, seed=index, ignore_eos=True, stop=("e\0", "zzz")
            ),
            "JSON schema": SamplingParams(
                max_tokens=max_tokens,
                temperature=1.0,
                seed=index,
                grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA)),
            ),
        }.get(kind, seeded)
        found.append(Ask(kind, prompt, sampling))
    return found


class Scene:
    def __init__(self, cluster: LocalCluster, *, clients: int, kills: int, max_tokens: int, seed: int) -> None:
        self._cluster = cluster
        self._clients = clients
        self._kills = kills
        self._asks = asks(max_tokens)
        self._rng = random.Random(seed)
        self._expected: list[Generation] = []
        self._over = False
        self.found = Found()

    async def run(self) -> Found:
        addresses = self._cluster.addresses
        async with AsyncClient(addresses) as client:
            self._expected = [await self._answer(client, ask) for ask in self._asks]
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._clients):
                tasks.create_task(self._use(addresses, number), name=f"client {number}")
            try:
                for _ in range(self._kills):
                    await self._kill_one()
            finally:
                self._over = True
        return self.found

    # ------------------------------------------------------------ dispatchers

    async def _kill_one(self) -> None:
        """One of them, at an arbitrary moment while another one serves. It is started again at once."""
        dispatchers = self._cluster.processes["dispatcher"]
        async with asyncio.timeout(_START_S):
            while not (len(up := [i for i, p in enumerate(dispatchers) if is_up(p)]) > 1 and await self._serve()):  # noqa: ASYNC110 - processes set no asyncio.Event
                await asyncio.sleep(_POLL_S)
        await asyncio.sleep(self._rng.uniform(0.0, 0.5))
        process = self._cluster.kill("dispatcher", self._rng.choice(up))
        self.found.kill_count += 1
        async with asyncio.timeout(_START_S):
            while process.child.returncode is None:  # noqa: ASYNC110 - a process sets no asyncio.Event
                await asyncio.sleep(_POLL_S)
        self._cluster.respawn(process.child.name)
        self._tell()

    async def _serve(self) -> bool:
        """Whether those that listen have their workers."""
        return await self._cluster.is_routable({process.id for process in self._cluster.processes["worker"]})

    def _tell(self) -> None:
        if self.found.kill_count % 10 == 0:
            found = self.found
            told = f"{found.kill_count} kills, {found.request_count} requests, {found.resumed_count} streams resumed"
            print(f"  {told}; {found.why_not() or 'all as it has to be'}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------ clients

    async def _use(self, addresses: Sequence[str], number: int) -> None:
        async with AsyncClient(addresses, overload_retries=10) as client:
            for index in itertools.count(number):
                if self._over:
                    return
                which = index % len(self._asks)
                self.found.request_count += 1
                try:
                    answer = await self._answer(client, self._asks[which])
                except BallastError as error:
                    self.found.lost[f"{self._asks[which].kind}: {type(error).__name__}"] += 1
                    if len(self.found.lost) < _TOLD:
                        print(f"  lost: {error}", file=sys.stderr, flush=True)
                    continue
                self.found.token_count += len(answer.token_ids)
                if why := difference(answer, self._expected[which]):
                    self.found.differing[f"{self._asks[which].kind}: {why}"] += 1

    async def _answer(self, client: AsyncClient, ask: Ask) -> Generation:
        if ask.kind == "in one piece":
            return await client.generate(token_ids=ask.token_ids, sampling=ask.sampling, deadline_s=_DEADLINE_S)
        stream = client.stream(token_ids=ask.token_ids, sampling=ask.sampling, deadline_s=_DEADLINE_S)
        chunks: list[GenerationChunk] = []
        last_s, seen = time.monotonic(), 0
        async for chunk in stream:
            now_s = time.monotonic()
            if stream.resume_count > seen:
                self.found.resumed_count += stream.resume_count - seen
                self.found.kinds[ask.kind] += 1
                (self.found.gaps_s if chunks else self.found.waits_s).append(now_s - last_s)
                seen = stream.resume_count
            if chunk.token_ids:
                last_s = now_s
            chunks.append(chunk)
        return joined(chunks)


def is_up(process: ServiceProcess) -> bool:
    return process.child.returncode is None and process.read_ready()


def joined(chunks: Sequence[GenerationChunk]) -> Generation:
    last = chunks[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    return Generation(
        request_id=last.request_id,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        logprobs=tuple(logprobs for chunk in chunks for logprobs in chunk.logprobs),
        finish_reason=last.finish_reason,
        matched_stop=last.matched_stop,
        usage=last.usage,
    )


def difference(answer: Generation, expected: Generation) -> str:
    """The first thing in which they differ; empty: none."""
    if answer.token_ids != expected.token_ids:
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(answer.token_ids, expected.token_ids, strict=False)
        )
        return f"tokens, from {len(list(same))} on"
    if answer.text != expected.text:
        return "text"
    if (answer.finish_reason, answer.matched_stop) != (expected.finish_reason, expected.matched_stop):
        return "the reason of its end"
    if answer.usage.completion_token_count != expected.usage.completion_token_count:
        return "usage"
    if len(answer.logprobs) != len(expected.logprobs):
        return "the number of logprobs"
    for one, other in zip(answer.logprobs, expected.logprobs, strict=True):
        pairs = zip((one.chosen, *one.top), (other.chosen, *other.top), strict=True)
        if any(a.token_id != b.token_id or abs(a.logprob - b.logprob) > _LOGPROB_ERROR for a, b in pairs):
            return "logprobs"
    return ""


def percentile(values: Sequence[float], share: float) -> float:
    """NaN of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def report(found: Found) -> str:
    lost, differing = sum(found.lost.values()), sum(found.differing.values())
    cut_count = found.resumed_count + lost
    lines = [
        f"{found.kill_count} kills of dispatchers, {found.request_count} requests, {found.token_count:,} tokens",
        f"{cut_count} streams cut, {found.resumed_count} resumed, {lost} lost, {differing} differing",
        f"resumed, by kind: {', '.join(f'{count} {kind}' for kind, count in found.kinds.most_common())}",
    ]
    for what, times_s in (
        ("time without a token", found.gaps_s),
        ("cut before the first token, which came", found.waits_s),
    ):
        if times_s:
            p50, p99 = percentile(times_s, 0.5), percentile(times_s, 0.99)
            lines.append(
                f"{what}: p50 {p50:.3f} s, p99 {p99:.3f} s, longest {max(times_s):.3f} s ({len(times_s)} times)"
            )
    return "\n".join(lines)


async def run(args: argparse.Namespace, model: Path) -> Found:
    cluster = LocalCluster(
        model,
        workers=args.workers,
        dispatchers=args.dispatchers,
        flags={"worker": ["--dtype", "float64"], "planner": ["--overload-policy", "recompute"]},
        log_dir=args.log_dir,
        stop_timeout_s=5.0,
    )
    async with cluster:
        scene = Scene(cluster, clients=args.clients, kills=args.kills, max_tokens=args.max_tokens, seed=args.seed)
        found = await scene.run()
        cluster.keep_logs = bool(found.why_not())
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--dispatchers", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-dir", type=Path, default=None)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny("llama", Path(folder) / "tiny", max_len=512)
        began_s = time.monotonic()
        found = asyncio.run(run(args, model))
    print(report(found))
    why = found.why_not()
    print(f"FAILED: {why}" if why else f"all as it has to be, in {time.monotonic() - began_s:.0f} s")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())

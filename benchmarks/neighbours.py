"""Measures how one caller delays another: by a flood of requests, and by a schema of 256 KiB.

python -m benchmarks.neighbours
python -m benchmarks.neighbours --flood 2000 --rounds 5

Two workers on this machine compute a small model. The callers, Alice and Bob, have separate tokens and processes. Bob
is measured in three ways, each alone and then alongside Alice: one request every quarter of a second while thousands of
her requests arrive, eight requests at once (repeated) while hers wait, and four streams while her schema is compiled.
The program prints the P99 with and without Alice, and the outcome of her request.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np

from ballast.client import AsyncClient
from ballast.common.errors import BallastError
from ballast.common.sampling import Grammar, GrammarKind, SamplingParams
from ballast.service.tokens import TokenRole
from tools.cli.tokens import add_token
from tools.cli.up import secured
from tools.local.cluster import LocalCluster
from tools.model.tiny import make_tiny

_PROBES, _STREAMS = 8, 4
_DEADLINE_S = 120.0
_EACH_S = 0.25
_FLOOD_GROWS_S = 15.0  # until all of its requests have been sent
_SCHEMA_BYTES = 256_000  # just below the limit of 256 Ki characters


class Bob:
    """The caller whose waits are measured."""

    def __init__(self, client: AsyncClient, rounds: int) -> None:
        self._client = client
        self._rounds = rounds
        self.refused = 0

    async def first_tokens(self) -> list[float]:
        """Seconds to the first token of eight requests at once, several times."""
        waits = list[float]()
        for _ in range(self._rounds):
            waits += await asyncio.gather(*(self._first_token(i) for i in range(_PROBES)))
        return waits

    async def one_by_one(self, seconds: float) -> list[float]:
        """Seconds to the first token of a request every quarter of a second."""
        requests = list[asyncio.Task[float]]()
        for i in range(int(seconds / _EACH_S)):
            requests.append(asyncio.create_task(self._first_token(i % _PROBES)))
            await asyncio.sleep(_EACH_S)
        return await asyncio.gather(*requests)

    async def _first_token(self, i: int) -> float:
        began_s = time.perf_counter()
        sampling = SamplingParams(max_tokens=16, seed=i, ignore_eos=True)
        first_s = _DEADLINE_S
        try:
            async for chunk in self._client.stream(token_ids=[5, 6, 7 + i], sampling=sampling, deadline_s=_DEADLINE_S):
                if chunk.token_ids:
                    first_s = min(first_s, time.perf_counter() - began_s)
        except BallastError:
            self.refused += 1
        return first_s

    async def gaps(self, while_runs: Callable[[], Awaitable[object]]) -> list[float]:
        """Seconds between two chunks of four streams, repeated until `while_runs` has ended."""
        job, gaps = asyncio.ensure_future(while_runs()), list[float]()

        async def read(i: int) -> None:
            while not job.done():
                before_s = time.perf_counter()
                sampling = SamplingParams(max_tokens=400, seed=i, ignore_eos=True)
                first = True
                async for _ in self._client.stream(token_ids=[5, 6, 7 + i], sampling=sampling, deadline_s=_DEADLINE_S):
                    now_s = time.perf_counter()
                    if not first:
                        gaps.append(now_s - before_s)
                    before_s, first = now_s, False

        await asyncio.gather(*(read(i) for i in range(_STREAMS)))
        await job
        return gaps


def _flood(
    addresses: list[str], token: str, ca_file: Path, count: int, begin: Event, leave: Event, refused: "Queue[int]"
) -> None:
    """Set `begin` and send `count` requests at once; when `leave` is set, cancel them and put into `refused` how
    many were refused.
    """
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)

    async def send() -> int:
        async with AsyncClient(addresses, token=token, ca_file=ca_file) as alice:

            async def one(i: int) -> None:
                await alice.generate(token_ids=[5 + i % 50] * 200, sampling=sampling, deadline_s=3600.0)

            begin.set()
            requests = [asyncio.ensure_future(one(i)) for i in range(count)]
            await asyncio.to_thread(leave.wait)
            turned_away = sum(one.done() and one.exception() is not None for one in requests)
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            return turned_away

    refused.put(asyncio.run(send()))


def _large_schema() -> str:
    each = '"property_%05d": {"type": "string"}'
    count = _SCHEMA_BYTES // len(each % 0 + ", ")
    return '{"type": "object", "properties": {' + ", ".join(each % i for i in range(count)) + "}}"


def _with_schema(
    addresses: list[str], token: str, ca_file: Path, begin: Event, send: Event, fate: "Queue[str]"
) -> None:
    """Set `begin` once connected; when `send` is set, send a request with a large schema and put its outcome into
    `fate`.
    """
    sampling = SamplingParams(max_tokens=8, grammar=Grammar(GrammarKind.JSON_SCHEMA, _large_schema()))

    async def ask() -> str:
        async with AsyncClient(addresses, token=token, ca_file=ca_file) as alice:
            await alice.generate(token_ids=[5, 6, 7], max_tokens=1)
            begin.set()
            await asyncio.to_thread(send.wait)
            began_s = time.perf_counter()
            try:
                await alice.generate(token_ids=[5, 6, 7], sampling=sampling, deadline_s=_DEADLINE_S)
            except BallastError as error:
                return f"after {time.perf_counter() - began_s:.1f} s: {str(error)[:160]}"
            return f"answered after {time.perf_counter() - began_s:.1f} s"

    fate.put(asyncio.run(ask()))


def _compared(alone: list[float], beside: list[float]) -> dict[str, float]:
    p99 = [float(np.percentile(waits, 99)) for waits in (alone, beside)]
    return {
        "alone_p99_s": round(p99[0], 4),
        "beside_p99_s": round(p99[1], 4),
        "ratio": round(p99[1] / p99[0], 2),
        "alone_p50_s": round(float(np.median(alone)), 4),
        "beside_p50_s": round(float(np.median(beside)), 4),
    }


def _say(what: str) -> None:
    print(f"measuring {what} ...", file=sys.stderr, flush=True)


def _starts(waits: list[float]) -> range:
    return range(0, len(waits), _PROBES)


async def _measure(folder: Path, flood_count: int, rounds: int) -> dict[str, object]:
    model = make_tiny("llama", folder / "model", max_len=2048)
    keys = folder / "keys"
    tokens_file = secured(keys, "127.0.0.1")
    names = [add_token(tokens_file, name, TokenRole.INFER) for name in ("alice", "bob")]
    cluster = LocalCluster(
        model,
        workers=2,
        secure=keys,
        tokens_file=tokens_file,
        device_memory_bytes=16 << 20,
        flags={"worker": ["--threads", "1"]},
    )
    async with cluster:
        ca_file = keys / "ca.crt"
        context = multiprocessing.get_context("spawn")
        alice = (cluster.addresses, names[0], ca_file)
        async with AsyncClient(cluster.addresses, token=names[1], ca_file=ca_file) as client:
            bob = Bob(client, rounds)
            _say("first tokens, alone")
            await bob.first_tokens()
            alone = await bob.first_tokens()
            alone_one_by_one = await bob.one_by_one(_FLOOD_GROWS_S)
            _say(f"first tokens beside a flood of {flood_count} requests")
            begin, leave, refused = context.Event(), context.Event(), context.Queue()
            flood = context.Process(target=_flood, args=(*alice, flood_count, begin, leave, refused), daemon=True)
            flood.start()
            await asyncio.to_thread(begin.wait, _DEADLINE_S)
            arriving = await bob.one_by_one(_FLOOD_GROWS_S)
            beside = await bob.first_tokens()
            leave.set()
            turned_away = await asyncio.to_thread(refused.get, timeout=_DEADLINE_S)
            await asyncio.to_thread(flood.join)
            await bob.first_tokens()
            _say("gaps between tokens, alone and beside a large schema")
            begin, send, fate = context.Event(), context.Event(), context.Queue()
            schema = context.Process(target=_with_schema, args=(*alice, begin, send, fate), daemon=True)
            schema.start()
            await asyncio.to_thread(begin.wait, _DEADLINE_S)
            quiet = await bob.gaps(lambda: asyncio.sleep(10))
            send.set()
            told: asyncio.Future[str] = asyncio.ensure_future(asyncio.to_thread(fate.get, timeout=_DEADLINE_S))
            meanwhile = await bob.gaps(lambda: told)
    return {
        "flood": {
            **_compared(alone, beside),
            "beside_slowest_of_each_round_s": [round(max(beside[i : i + _PROBES]), 3) for i in _starts(beside)],
            "while_it_arrives": _compared(alone_one_by_one, arriving),
            "refused": bob.refused,
            "of_the_flood_refused": turned_away,
        },
        "schema": {**_compared(quiet, meanwhile), "its_request": told.result(), "gaps": len(meanwhile)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flood", type=int, default=6000, help="number of requests in Alice's flood (default: 6000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of eight requests each (default: 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(_measure(Path(folder), options.flood, options.rounds)), indent=2))


if __name__ == "__main__":
    main()

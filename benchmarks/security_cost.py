"""What TLS and tokens cost: two clusters of the same services, one with both and one with neither, asked in turn.

    python -m benchmarks.security_cost --requests 400 --rounds 6

TTFT is a client's, of requests for one token, one after the other, the two clusters alternating request by request.
Relaying is measured in processor time that a dispatcher spends for a token, over rounds of streams that alternate too:
on a busy machine that says more than tokens per second.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from ballast.cli.up import secured
from ballast.client import AsyncClient, SamplingParams
from ballast.local.cluster import LocalCluster
from ballast.model.tiny import make_preset

_ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_WARMUP_REQUESTS = 20


class Side:
    """One of the two clusters, with a client that stays connected."""

    def __init__(self, name: str, cluster: LocalCluster, client: AsyncClient) -> None:
        self.name = name
        self.ttft_s: list[float] = []
        self.cpu_s_per_token: list[float] = []
        self.tokens_per_s: list[float] = []
        self._client = client
        self._dispatcher = psutil.Process(cluster.processes["dispatcher"][0].pid)

    async def ask_once(self) -> float:
        began_s = time.perf_counter()
        async with self._client.stream("A ship", _ONE) as stream:
            await anext(stream)
            return time.perf_counter() - began_s

    async def stream_round(self, streams: int, tokens: int) -> None:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)

        async def one() -> int:
            return sum([len(chunk.token_ids) async for chunk in self._client.stream("A ship", sampling)])

        cpu_before_s, began_s = self._cpu_s(), time.perf_counter()
        count = sum(await asyncio.gather(*(one() for _ in range(streams))))
        self.tokens_per_s.append(count / (time.perf_counter() - began_s))
        self.cpu_s_per_token.append((self._cpu_s() - cpu_before_s) / count)

    def _cpu_s(self) -> float:
        times = self._dispatcher.cpu_times()
        return times.user + times.system


async def measure(folder: Path, requests: int, rounds: int, streams: int, tokens: int) -> tuple[Side, Side]:
    model = make_preset("tiny", folder / "model")
    tokens_file = secured(folder / "keys", "127.0.0.1")
    bare = LocalCluster(model, workers=1, device_memory_bytes=64 << 20)
    safe = LocalCluster(model, workers=1, device_memory_bytes=64 << 20, secure=folder / "keys", tokens_file=tokens_file)
    async with bare, safe, AsyncClient(bare.address) as plain, AsyncClient(safe.address, **safe.credentials) as known:
        off, on = Side("off", bare, plain), Side("on", safe, known)
        for index in range(_WARMUP_REQUESTS + requests):
            for side in (off, on) if index % 2 else (on, off):
                took_s = await side.ask_once()
                if index >= _WARMUP_REQUESTS:
                    side.ttft_s.append(took_s)
        for index in range(rounds):
            for side in (off, on) if index % 2 else (on, off):
                await side.stream_round(streams, tokens)
        return off, on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="of each cluster, for TTFT")
    parser.add_argument("--rounds", type=int, default=6, help="of streams, for relaying")
    parser.add_argument("--streams", type=int, default=32, help="at once in a round")
    parser.add_argument("--tokens", type=int, default=200, help="of a stream")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        off, on = asyncio.run(measure(Path(folder), args.requests, args.rounds, args.streams, args.tokens))
    print(f"{'TLS and tokens':<16}{'TTFT p50':>12}{'p90':>12}{'dispatcher CPU':>20}{'tokens':>14}")
    for side in (off, on):
        p50, p90 = statistics.median(side.ttft_s), statistics.quantiles(side.ttft_s, n=10)[-1]
        cpu_us, rate = statistics.median(side.cpu_s_per_token) * 1e6, statistics.median(side.tokens_per_s)
        print(f"{side.name:<16}{p50 * 1e3:>9.2f} ms{p90 * 1e3:>9.2f} ms{cpu_us:>11.1f} us/token{rate:>12.0f}/s")
    added_s = statistics.median(a - b for a, b in zip(on.ttft_s, off.ttft_s, strict=True))
    more = statistics.median(on.cpu_s_per_token) / statistics.median(off.cpu_s_per_token) - 1
    print(f"added to TTFT: {added_s * 1e3:.2f} ms (median over pairs); dispatcher CPU for a token: {more:+.1%}")


if __name__ == "__main__":
    main()

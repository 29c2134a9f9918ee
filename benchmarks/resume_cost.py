"""What it costs the state server that requests can be resumed: its commands and its time for each request.

    python -m benchmarks.resume_cost --requests 2000

Runs the same requests with and without (`--resume false`), and asks the state server what it has executed meanwhile.
What runs without any request (registrations, leases, layouts) is measured before and taken off.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import redis

from ballast.client import AsyncClient, SamplingParams
from tools.local.cluster import LocalCluster
from tools.model.tiny import make_tiny

_IDLE_S = 5.0
_AT_ONCE = 32
_TOKENS = 4
_SCRIPTS = ("cmdstat_evalsha", "cmdstat_eval")


class Meter:
    """Time and commands of the state server, since this was made or last read."""

    def __init__(self, url: str) -> None:
        self._store = redis.Redis.from_url(url)
        self._began_s = time.monotonic()
        self._before = self._stats()

    def read(self) -> tuple[float, dict[str, tuple[float, float]]]:
        """Seconds, and for scripts and all commands how many and how many microseconds."""
        began_s, before = self._began_s, self._before
        self._began_s, self._before = time.monotonic(), self._stats()
        delta = {k: (n - before[k][0], us - before[k][1]) for k, (n, us) in self._before.items()}
        return self._began_s - began_s, delta

    def _stats(self) -> dict[str, tuple[float, float]]:
        # Any: what the server says.
        said = cast(dict[str, dict[str, Any]], self._store.info("commandstats"))  # pyright: ignore[reportUnknownMemberType]
        rows = {name: (float(row["calls"]), float(row["usec"])) for name, row in said.items()}
        scripts = [rows.get(name, (0.0, 0.0)) for name in _SCRIPTS]
        # What scripts call is counted by itself as well: of the time it is a part.
        others = [row for name, row in rows.items() if name not in ("cmdstat_info", *_SCRIPTS)]
        return {"scripts": _sum(scripts), "commands in and outside of scripts": _sum(others)}


def _sum(rows: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(n for n, _ in rows), sum(us for _, us in rows)


async def measure(model: Path, requests: int, *, resume: bool) -> list[str]:
    flags = ["--resume", str(resume).lower(), "--access-log", "false"]
    async with (
        LocalCluster(model, workers=1, flags={"dispatcher": flags}) as cluster,
        AsyncClient(cluster.addresses, resume_s=30.0 if resume else 0.0) as client,
    ):
        slots, sampling = asyncio.Semaphore(_AT_ONCE), SamplingParams(max_tokens=_TOKENS, seed=1, ignore_eos=True)

        async def ask(number: int) -> None:
            async with slots:
                await client.generate(token_ids=[3 + number % 100, 5], sampling=sampling)

        await asyncio.gather(*map(ask, range(_AT_ONCE)))
        await asyncio.sleep(1.0)
        meter = Meter(cluster.redis_url)
        await asyncio.sleep(_IDLE_S)
        idle_s, idle = meter.read()
        await asyncio.gather(*map(ask, range(requests)))
        busy_s, busy = meter.read()
    lines: list[str] = []
    for what, (count, us) in busy.items():
        idle_count, idle_us = idle[what]
        per, per_us = count - idle_count * busy_s / idle_s, us - idle_us * busy_s / idle_s
        told = f"{per / requests:.2f} for each request, {per_us / requests:.1f} us of the server's time"
        lines.append(f"  {what}: {told}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=2000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny("llama", Path(folder) / "tiny", max_len=256)
        for resume in (False, True):
            lines = asyncio.run(measure(model, args.requests, resume=resume))
            print("\n".join([f"requests that {'can' if resume else 'cannot'} be resumed", *lines]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

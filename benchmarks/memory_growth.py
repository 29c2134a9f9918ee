"""Whether a worker's memory stops growing: rounds of requests of many lengths through a real cluster.

    python -m benchmarks.memory_growth [--rounds N] [--requests N] [--write]

Every service is a process of its own. After each round, when nothing runs or waits any more, the resident memory of
each is read. What grows once, such as compiled kernels and allocators' arenas, has grown after a few rounds; a leak
goes on. The growth per request that counts is that of the second half of the rounds.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from ballast.client import AsyncClient
from ballast.client.types import ClusterStatus
from ballast.common.sampling import SamplingParams
from tools.local.cluster import LocalCluster
from tools.model.tiny import make_tiny

RESULTS = Path(__file__).parent / "results"
_MAX_LEN = 256
_DEVICE_MEMORY_BYTES = 2 << 20  # of which 0.8 MiB are KV: 56 blocks, so that requests wait and are preempted
_IDLE_WAIT_S = 30.0


@dataclass(frozen=True)
class Growth:
    """RSS of each service before the first round and after every one."""

    requests: int  # of a round
    resident_bytes: dict[str, list[int]]

    def per_request_bytes(self, service: str) -> float:
        """Bytes by which the service grows for each request, in the second half of the rounds."""
        sizes = self.resident_bytes[service]
        middle = len(sizes) // 2
        return (sizes[-1] - sizes[middle]) / (self.requests * (len(sizes) - 1 - middle))

    def table(self) -> str:
        names = list(self.resident_bytes)
        rounds = range(len(self.resident_bytes[names[0]]))
        rows = [
            f"| {i} | {i * self.requests} | "
            + " | ".join(f"{self.resident_bytes[name][i] / 2**20:.1f}" for name in names)
            + " |"
            for i in rounds
        ]
        last = "| second half, bytes per request | | " + " | ".join(
            f"{self.per_request_bytes(name):.0f}" for name in names
        )
        head = "| round | requests so far | " + " | ".join(f"{name}, MiB" for name in names) + " |"
        return "\n".join([head, "|" + "---|" * (2 + len(names)), *rows, f"{last} |"])


async def measure(model: Path, rounds: int, requests: int) -> Growth:
    rng = random.Random(0)
    async with LocalCluster(model, workers=1, device_memory_bytes=_DEVICE_MEMORY_BYTES) as cluster:
        processes = {p.id: psutil.Process(p.pid) for all_ in cluster.processes.values() for p in all_}
        sizes = {name: [process.memory_info().rss] for name, process in processes.items()}
        async with AsyncClient(cluster.address) as client:
            for _ in range(rounds):
                await _round(client, rng, requests)
                await _until_idle(client)
                for name, process in processes.items():
                    sizes[name].append(process.memory_info().rss)
    return Growth(requests, sizes)


async def _round(client: AsyncClient, rng: random.Random, requests: int) -> None:
    """All at once, of which the dispatcher refuses none."""

    async def one(prompt: Sequence[int], sampling: SamplingParams) -> None:
        await client.generate(token_ids=prompt, sampling=sampling)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(requests):
            prompt = [rng.randrange(16, 500) for _ in range(rng.randint(1, 60))]
            sampling = SamplingParams(
                temperature=rng.choice([0.0, 0.8]), max_tokens=rng.randint(1, 24), ignore_eos=True
            )
            tasks.create_task(one(prompt, sampling))


async def _until_idle(client: AsyncClient) -> None:
    async with asyncio.timeout(_IDLE_WAIT_S):
        while _busy(await client.status()):  # noqa: ASYNC110 - another process tells when asked, and not by itself
            await asyncio.sleep(0.02)


def _busy(status: ClusterStatus) -> bool:
    loads = [group.load for group in status.groups]
    return bool(status.backlog_request_count or status.running_request_count) or any(
        load is None or load.running_count or load.waiting_count for load in loads
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--requests", type=int, default=700, help="of a round; the dispatcher queues 2048 at most")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-memory-growth.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ballast-bench-") as folder:
        model = make_tiny("llama", Path(folder) / "model", max_len=_MAX_LEN)
        table = asyncio.run(measure(model, arguments.rounds, arguments.requests)).table()
    print(table)
    if arguments.write:
        path = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-memory-growth.md"
        path.parent.mkdir(exist_ok=True)
        command = f"python -m benchmarks.memory_growth --rounds {arguments.rounds} --requests {arguments.requests}"
        path.write_text(
            f"# Resident memory of the services over rounds of requests\n\n{table}\n\nMade by `{command}`.\n"
        )
        print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()

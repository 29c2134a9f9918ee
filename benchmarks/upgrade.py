"""Services of an older commit in a current cluster, under load and with drops: checks that nothing is lost and no token
differs.

    python -m benchmarks.upgrade REF
    python -m benchmarks.upgrade REF --old dispatcher gateway
    python -m benchmarks.upgrade REF --old dispatcher --backward

A cluster of two current workers gets a third one from REF's tree. While requests run, two workers are merged and
restored twice. If the old worker has the same protocol, it is one of them; otherwise both are current ones, and the
planner must refuse the old one. With `--old` the named services run from REF instead of a third worker; with
`--backward` all services except those do. Half of the requests go through a gateway. Exit status 1 if a request failed,
or if an answer differs from that of an idle cluster.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

import grpc.aio

from ballast.client import AsyncClient
from ballast.common.errors import BallastError
from ballast.common.sampling import SamplingParams
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from tools.local.cluster import LocalCluster, Service
from tools.model.tiny import make_tiny

_ROOT = Path(__file__).resolve().parents[1]
_MEMORY_BYTES = 16 << 20
_WORKER = ("--threads", "1", "--kernels", "torch", "--dtype", "float64")
_JOIN_TIMEOUT_S = 120.0
_GAP_S = 0.12  # time between two requests
_PROMPTS = [[3 + (5 * i + 7 * j) % 200 for j in range(6 + 9 * i)] for i in range(6)]
_OLD = "old"
_SERVICES: tuple[Service, ...] = ("monitor", "planner", "dispatcher", "gateway", "worker")


def _sampling(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=60, temperature=0.8 if i % 2 else 0.0, seed=11 + i, ignore_eos=True)


class UpgradeLoad:
    """Requests sent at a fixed interval, and counts of their outcomes."""

    def __init__(self, client: AsyncClient, gateway_url: str) -> None:
        self._client = client
        self._gateway_url = gateway_url
        self._expected: list[tuple[int, ...]] = []
        self._texts: list[str] = []
        self.endings: Counter[str] = Counter()

    async def run(self, stopping: asyncio.Event) -> None:
        """Send requests until `stopping` is set, then wait for the running ones."""
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count():
                if stopping.is_set():
                    return
                ask = self._ask if number % 2 else self._ask_gateway
                tasks.create_task(ask(number // 2 % len(_PROMPTS)))
                await asyncio.sleep(_GAP_S)

    async def expect(self) -> None:
        for i, prompt in enumerate(_PROMPTS):
            self._expected.append((await self._client.generate(token_ids=prompt, sampling=_sampling(i))).token_ids)
            self._texts.append(await asyncio.to_thread(self._text, i))

    async def _ask_gateway(self, i: int) -> None:
        try:
            text = await asyncio.to_thread(self._text, i)
        except (OSError, KeyError, ValueError) as error:
            self.endings[f"lost: at a gateway: {type(error).__name__} {str(error)[:100]}"] += 1
        else:
            self.endings["right" if text == self._texts[i] else "differs"] += 1

    def _text(self, i: int) -> str:
        sampling = _sampling(i)
        body = {"model": "tiny", "prompt": _PROMPTS[i], "max_tokens": sampling.max_tokens, "seed": sampling.seed}
        body |= {"temperature": sampling.temperature, "ignore_eos": True}
        url, head = f"{self._gateway_url}/completions", {"content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["text"]

    async def _ask(self, i: int) -> None:
        try:
            answer = await self._client.generate(token_ids=_PROMPTS[i], sampling=_sampling(i), deadline_s=60)
        except BallastError as error:
            self.endings[f"lost: {type(error).__name__} {str(error)[:100]}"] += 1
        else:
            self.endings["right" if answer.token_ids == self._expected[i] else "differs"] += 1


class Scene:
    """Changes a cluster's layout through its planner, and records which workers are kept out."""

    def __init__(
        self, planner: "planner_pb2_grpc.PlannerServiceAsyncStub", old: subprocess.Popen[bytes] | None
    ) -> None:
        self._planner = planner
        self._old = old
        self.kept_out: dict[str, str] = {}

    async def join(self) -> None:
        async with asyncio.timeout(_JOIN_TIMEOUT_S):
            while _OLD not in await self._layout():
                if self._old is not None and self._old.poll() is not None:
                    raise SystemExit(f"the old worker has ended with status {self._old.returncode}")
                await asyncio.sleep(0.2)

    async def _layout(self) -> list[str]:
        answer = await self._planner.GetLayout(pb.GetLayoutRequest(), timeout=10)
        self.kept_out = dict(answer.kept_out)
        return [member.worker_id for group in answer.layout.groups for member in group.members]

    async def drop(self, names: list[str]) -> str:
        """Merge these workers by a drop. Returns the final phase, or the reason if the planner refused."""
        request = pb.DropRequest(worker_ids=names, request_id=uuid.uuid4().hex)
        try:
            return await self._ended((await self._planner.Drop(request, timeout=30)).epoch)
        except grpc.aio.AioRpcError as error:
            return f"refused: {error.details()}"

    async def restore(self) -> str:
        """Restore. Returns the final phase, or why the planner refused: it may already be restoring on its own."""
        request = pb.RestoreRequest(request_id=uuid.uuid4().hex)
        try:
            return await self._ended((await self._planner.Restore(request, timeout=30)).epoch)
        except grpc.aio.AioRpcError as error:
            return f"refused: {error.details()}"

    async def _ended(self, epoch: int) -> str:
        async with asyncio.timeout(60):
            while True:
                listed = (await self._planner.ListTransitions(pb.ListTransitionsRequest(), timeout=10)).transitions
                for one in listed:
                    if one.epoch == epoch and one.phase in ("done", "aborted"):
                        return one.phase
                await asyncio.sleep(0.1)


@contextlib.contextmanager
def tree_of(ref: str) -> Generator[Path]:
    """Context manager that yields a folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", ref], cwd=_ROOT, check=True, stdout=subprocess.PIPE)
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


@contextlib.contextmanager
def old_worker(tree: Path, cluster: LocalCluster, log: Path) -> Generator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "services.worker", "--worker-id", _OLD, "--host", "127.0.0.1", "--port", "0"]
    command += ["--model", str(cluster.model), "--redis-url", cluster.redis_url, *_WORKER]
    command += ["--cluster-secret-file", str(cluster.secret_file), "--device-memory-bytes", str(_MEMORY_BYTES)]
    with log.open("wb") as out:
        environ = {**os.environ, "PYTHONPATH": str(tree)}
        process = subprocess.Popen(command, cwd=tree, env=environ, stdout=out, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


async def check(tree: Path, logs: Path, old_services: Sequence[Service]) -> Counter[str]:
    """Counts of the outcomes of requests, drops and restores in a cluster whose `old_services` run from `tree`. Without
    such services there is an additional old worker.
    """
    model = Path(make_tiny("llama", logs / "tiny", max_len=512))
    trees = dict.fromkeys(old_services, tree)
    flags: dict[Service, Sequence[str]] = {"worker": _WORKER}
    async with contextlib.AsyncExitStack() as stack:
        started = LocalCluster(
            model,
            workers=2,
            gateways=1,
            device_memory_bytes=_MEMORY_BYTES,
            log_dir=logs,
            flags=flags,
            trees=trees,
        )
        cluster = await stack.enter_async_context(started)
        client = await stack.enter_async_context(AsyncClient(cluster.address, **cluster.credentials))
        load, stopping = UpgradeLoad(client, cluster.http_urls[0]), asyncio.Event()
        await load.expect()
        old = None if trees else stack.enter_context(old_worker(tree, cluster, logs / "old.log"))
        channel = await stack.enter_async_context(cluster.access.open(cluster.address))
        scene = Scene(planner_pb2_grpc.PlannerServiceStub(cluster.access.bearing(channel)), old)
        if old is not None:
            await scene.join()
        said: Counter[str] = Counter()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(stopping))
            for _ in range(2):
                await asyncio.sleep(3)
                ended = "refused"
                if old is not None:
                    ended = await scene.drop([_OLD, "worker-1"])
                    said[f"drop with the old worker: {ended}"] += 1
                if ended.startswith("refused"):
                    said[f"drop without it: {await scene.drop(['worker-0', 'worker-1'])}"] += 1
                await asyncio.sleep(3)
                said[f"restore: {await scene.restore()}"] += 1
            stopping.set()
        for worker_id, why in scene.kept_out.items():
            said[f"kept out: {worker_id}: {why}"] += 1
        return load.endings + said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref", help="older commit, branch or tag")
    parser.add_argument("--old", nargs="+", choices=_SERVICES, default=[], help="services of the older commit")
    parser.add_argument("--backward", action="store_true", help="run all other services from that commit")
    parser.add_argument("--logs", type=Path, help="folder for logs (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tree_of(args.ref) as tree:
        logs: Path = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        others: list[Service] = [service for service in _SERVICES if service not in args.old]
        found = asyncio.run(check(tree, logs, others if args.backward else args.old))
    for what, count in sorted(found.items()):
        print(f"{count:5} {what}")
    wrong = [what for what in found if what.startswith(("lost", "differs")) or what.endswith("aborted")]
    print("failed" if wrong else f"nothing is lost and no token differs with {args.ref}")
    return 1 if wrong or not found["right"] else 0


if __name__ == "__main__":
    sys.exit(main())

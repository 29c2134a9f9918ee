"""One batch of many lines through everything that can happen to a cluster, with real processes:

    python -m benchmarks.jobs --lines 10000

Faults come one by one as the batch goes on: the active jobs replica, the gateway, a dispatcher and a worker are killed
(-9), the jobs' disk has no room, the active replica stops and goes on when another has taken over, a client leaves in
the middle of its upload, a second batch is cancelled, the whole cluster is started again, and its clock is an hour back
then. At the end each line must have exactly one result. `--folder` on a small file system of its own (below 1 GiB) is
filled for real; elsewhere the processes' limit on the size of files stands for it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from ballast.service.state import StateServer
from services.jobs.store import Store
from tools.cli.batch import Gateway, Json
from tools.local.cluster import LocalCluster, Service, ServiceProcess
from tools.local.keeper import Keeper
from tools.model.tiny import make_tiny

URL = "/v1/completions"
HOUR_S = 3600.0
FULL_S = 5.0
STOPS, TAKEN_OVER_S = 5, 12.0
SMALL_BYTES = 1 << 30
FLAGS: dict[Service, list[str]] = {"jobs": ["--leadership-ttl-s", "1"]}

Fault = Callable[[], Awaitable[str]]


class Campaign:
    """The faults, and what is counted. `shares`: of lines done when each comes."""

    def __init__(self, cluster: LocalCluster, folder: Path, work: Path, batch_id: str) -> None:
        self._cluster = cluster
        self._folder, self._work = folder, work
        self._batch_id = batch_id
        self.keeper = Keeper(cluster, lambda text: print(f"      {text}", flush=True))

    def gateway(self) -> Gateway:
        return Gateway(self._cluster.http_urls[0])

    async def kill(self, service: Service) -> str:
        process = await self._active() if service == "jobs" else self._cluster.processes[service][0]
        process.child.send_signal(signal.SIGKILL)
        return f"kill -9 {process.id}"

    async def _active(self) -> ServiceProcess:
        """The jobs replica that has the lease."""
        state = StateServer(self._cluster.redis_url)
        try:
            address = await state.leader_address("jobs")
        finally:
            await state.close()
        return next(one for one in self._cluster.processes["jobs"] if one.address == address)

    async def fill_disk(self) -> str:
        stat = os.statvfs(self._folder)
        before = done_of(self._folder, self._batch_id)
        if stat.f_blocks * stat.f_frsize < SMALL_BYTES:
            filler = self._folder / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            refused = await asyncio.to_thread(self._upload_status)
            await asyncio.sleep(FULL_S)
            filler.unlink()
            how = f"a file system of {stat.f_blocks * stat.f_frsize >> 20} MiB filled"
        else:
            limited = [
                psutil.Process(one.pid) for one in self._cluster.processes["jobs"] if one.child.returncode is None
            ]
            for one in limited:
                one.rlimit(psutil.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            refused = await asyncio.to_thread(self._upload_status)
            await asyncio.sleep(FULL_S)
            for one in limited:
                one.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            how = "no file may grow"
        stored = done_of(self._folder, self._batch_id) - before
        return f"disk full for {FULL_S:g} s ({how}): uploads got {refused}, {stored} results were stored meanwhile"

    def _upload_status(self) -> str:
        file = self._work / "upload.jsonl"
        file.write_text(f"{line(0)}\n" * 100)
        try:
            with file.open("rb") as content:
                self.gateway().upload(content, "more.jsonl")
        except Exception as error:  # noqa: BLE001 - what it is is what is asked
            return f"{type(error).__name__}: {error}"
        return "200"

    async def sleep_and_wake(self) -> str:
        process = await self._active()
        for _ in range(STOPS):
            process = await self._active()
            process.child.send_signal(signal.SIGSTOP)
            try:
                async with asyncio.timeout(TAKEN_OVER_S):
                    await until_done(self._folder, self._batch_id, done_of(self._folder, self._batch_id) + 50)
                break  # by the other one
            except TimeoutError:  # it was stopped in the middle of a write, and has the lock
                print("      stopped in the middle of a write: it goes on, and once more", flush=True)
            finally:
                process.child.send_signal(signal.SIGCONT)
            await asyncio.sleep(TAKEN_OVER_S / 2)
        return f"kill -STOP {process.id}, the other replica stores results, kill -CONT: two runners"

    async def cancel_another(self) -> str:
        def submitted() -> str:
            batch_id = submit(self.gateway(), self._work / "other.jsonl", 500)
            gateway = self.gateway()
            while not done_of(self._folder, batch_id):
                time.sleep(0.1)
            gateway.ask("POST", f"/batches/{batch_id}/cancel", {})
            while (batch := gateway.patiently("GET", f"/batches/{batch_id}"))["status"] != "cancelled":
                time.sleep(0.2)
            found = Counter(kind for kinds in results(gateway, batch).values() for kind in kinds)
            assert sum(found.values()) == 500, found
            return f"another batch of 500 lines cancelled: {dict(found)}"

        return await asyncio.to_thread(submitted)

    async def leave_upload(self) -> str:
        host, port = self._cluster.processes["gateway"][0].address.rsplit(":", 1)
        _, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999\r\n"
        kind = "Content-Type: multipart/form-data; boundary=x\r\n\r\n"
        part = '--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        writer.write(f"{head}{kind}{part}".encode() + b"y" * 300_000)
        await writer.drain()
        await asyncio.sleep(0.5)
        began = [path for path in (self._folder / "files").iterdir() if path.suffix == ".part"]
        writer.transport.abort()
        for _ in range(100):
            if not any(path.exists() for path in began):
                break
            await asyncio.sleep(0.1)
        return f"a client leaves its upload: {len(began)} parts, {sum(path.exists() for path in began)} left behind"


def line(number: int) -> str:
    body = {"prompt": f"The line of number {number}", "max_tokens": 2, "temperature": 0}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": URL, "body": body})


def submit(gateway: Gateway, file: Path, count: int) -> str:
    file.write_text("".join(f"{line(number)}\n" for number in range(count)))
    with file.open("rb") as content:
        uploaded = gateway.upload(content, file.name)
    wanted = {"input_file_id": uploaded["id"], "endpoint": URL, "completion_window": "24h"}
    return str(gateway.ask("POST", "/batches", wanted)["id"])


def done_of(folder: Path, batch_id: str) -> int:
    """Lines with a result, by what is on the disk."""
    with contextlib.closing(sqlite3.connect(f"file:{folder / 'jobs.sqlite'}?mode=ro", uri=True)) as db:
        row = db.execute("SELECT completed + failed FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return int(row[0])


async def until_done(folder: Path, batch_id: str, count: float) -> None:
    while done_of(folder, batch_id) < count:  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(0.1)


def completed(gateway: Gateway, batch_id: str) -> Json:
    while (batch := gateway.patiently("GET", f"/batches/{batch_id}"))["status"] != "completed":
        time.sleep(0.2)
    return batch


def results(gateway: Gateway, batch: Json) -> dict[str, list[str]]:
    """By custom id: the kinds of all of its results."""
    found: dict[str, list[str]] = {}
    for name in ("output_file_id", "error_file_id"):
        if batch.get(name):
            for text in b"".join(gateway.download(str(batch[name]))).decode().splitlines():
                said = json.loads(text)
                kind = said["error"]["code"] if said["response"] is None else str(said["response"]["status_code"])
                found.setdefault(said["custom_id"], []).append(kind)
    return found


async def measure(folder: Path, work: Path, count: int) -> int:
    model = Path(make_tiny("qwen2", work / "tiny", max_len=256, vocab=700))

    def cluster() -> LocalCluster:
        return LocalCluster(model, workers=2, dispatchers=2, gateways=1, jobs=2, jobs_folder=folder, flags=FLAGS)

    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:6.0f} s  {done_of(folder, batch_id):6} done  {text}", flush=True)

    async with cluster() as first:
        batch_id = await asyncio.to_thread(submit, Gateway(first.http_urls[0]), work / "batch.jsonl", count)
        campaign = Campaign(first, folder, work, batch_id)
        faults: list[Fault] = [
            lambda: campaign.kill("jobs"),
            lambda: campaign.kill("gateway"),
            lambda: campaign.kill("dispatcher"),
            lambda: campaign.kill("worker"),
            campaign.fill_disk,
            campaign.sleep_and_wake,
            campaign.leave_upload,
            campaign.cancel_another,
        ]
        keeping = asyncio.create_task(campaign.keeper.run())
        for number, fault in enumerate(faults, start=1):
            await until_done(folder, batch_id, count * number / (len(faults) + 3))
            say(await fault())
        await until_done(folder, batch_id, count * (len(faults) + 1) / (len(faults) + 3))
        keeping.cancel()
        await asyncio.wait([keeping])
        first.keep_logs = False
    say("the whole cluster is stopped")
    store = Store(folder, Store.last_epoch(folder))
    store.save_results([], time.time() + HOUR_S)  # as if it had run with a clock that is an hour ahead of this one
    store.close()
    async with cluster() as second:
        say("the cluster runs again, its clock an hour back")
        gateway = Gateway(second.http_urls[0])
        await until_done(folder, batch_id, count)
        batch = await asyncio.to_thread(completed, gateway, batch_id)
        took_s = time.monotonic() - began_s
        found = await asyncio.to_thread(results, gateway, batch)
    several = sum(len(kinds) != 1 for kinds in found.values())
    kinds = Counter(kind for one in found.values() for kind in one)
    missing = count - len(found)
    print(f"{count} lines in {took_s:.0f} s: {dict(kinds)}; {missing} without a result, {several} with several")
    times = [batch[name] for name in ("created_at", "in_progress_at", "finalizing_at", "completed_at")]
    print(f"times in order: {times == sorted(times)}")
    return int(bool(missing or several) or times != sorted(times))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs", description=__doc__)
    parser.add_argument("--lines", type=int, default=10_000, metavar="N")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="of the jobs; default: a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ballast-jobs-") as name:
        folder = Path(name) / "jobs" if args.folder is None else args.folder
        folder.mkdir(parents=True, exist_ok=True)
        return asyncio.run(measure(folder, Path(name), args.lines))


if __name__ == "__main__":
    sys.exit(main())

"""Batches on a real cluster with OpenAI's client and file format: exactly one result per line despite kills and
restarts.
"""

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, InternalServerError, NotFoundError, OpenAI
from openai.types import Batch

from services.jobs.store import Store
from tests.support.cluster import RunningCluster, running_cluster
from tests.support.waiting import soon
from tools.local.cluster import Service
from tools.local.keeper import Keeper
from tools.model.tiny import make_tiny

URL = "/v1/chat/completions"
ROOT = Path(__file__).resolve().parents[2]
LINES = int(os.environ.get("BALLAST_JOB_LINES", "400"))

# The model and the token limit's field name in the example files of OpenAI's guide and vLLM's repository.
EXAMPLES = {
    "openai": ("gpt-3.5-turbo-0125", "max_tokens"),
    "vllm": ("meta-llama/Meta-Llama-3-8B-Instruct", "max_completion_tokens"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_tiny("qwen2", tmp_path_factory.mktemp("jobs") / "tiny", max_len=1024, vocab=700))


@pytest.fixture(scope="module")
def kept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningCluster]:
    """A worker behind a dispatcher and a gateway, and two replicas of the jobs service."""
    folder = tmp_path_factory.mktemp("jobs") / "folder"
    with running_cluster(model, workers=1, gateways=1, jobs=2, jobs_folder=folder, flags=FLAGS) as running:
        yield running


FLAGS: dict[Service, list[str]] = {
    "gateway": ["--served-model-name", "tiny,gpt-3.5-turbo-0125,meta-llama/Meta-Llama-3-8B-Instruct"],
    "jobs": ["--in-flight", "32", "--dev", "leadership_ttl_s=1"],
}


def client_of(running: RunningCluster) -> OpenAI:
    return OpenAI(base_url=running.cluster.http_urls[0], api_key="none", max_retries=10)


def line(number: int, **body: Any) -> str:
    wanted = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Say {number}"}],
        "max_tokens": 3,
        "seed": number,
    }
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": URL, "body": {**wanted, **body}})


def submit(ai: OpenAI, content: str, **changes: Any) -> Batch:
    file = ai.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    given: dict[str, Any] = {"endpoint": URL, "completion_window": "24h", **changes}
    return ai.batches.create(input_file_id=file.id, **given)


def awaited(ai: OpenAI, batch: Batch, within_s: float = 60.0) -> Batch:
    give_up_at_s = time.monotonic() + within_s
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < give_up_at_s, batch
        time.sleep(0.05)
        batch = ai.batches.retrieve(batch.id)
    return batch


def results(ai: OpenAI, batch: Batch) -> dict[str, Any]:
    """The results by custom id. Checks that no line has two results."""
    found: dict[str, Any] = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        for text in ai.files.content(file_id).text.splitlines() if file_id else ():
            said = json.loads(text)
            assert said["custom_id"] not in found
            found[said["custom_id"]] = said
    return found


def texts(found: dict[str, Any]) -> dict[str, str]:
    return {name: said["response"]["body"]["choices"][0]["message"]["content"] for name, said in found.items()}


def test_openais_client_reads_the_results_of_a_batch(kept: RunningCluster) -> None:
    ai = client_of(kept)
    content = [line(i) for i in range(20)]
    content[7] = line(7, max_tokens=-1)
    content[8] = line(8, logprobs=True, n=2, stop=["x"])
    batch = awaited(ai, submit(ai, "\n\n".join(content), metadata={"a": "b"}))
    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (20, 19, 1)
    assert batch.metadata == {"a": "b"}
    found = results(ai, batch)
    assert list(found) == [f"c{i}" for i in range(20) if i != 7] + ["c7"]
    assert found["c7"]["response"]["status_code"] == 400
    assert found["c7"]["response"]["body"]["error"]["param"] == "max_tokens"
    assert len(found["c8"]["response"]["body"]["choices"]) == 2
    direct = json.loads(content[3])["body"]
    assert ai.chat.completions.create(**direct).choices[0].message.content == texts({"c3": found["c3"]})["c3"]
    assert batch.id in [one.id for one in ai.batches.list()]
    assert batch.input_file_id in [one.id for one in ai.files.list(purpose="batch")]
    ai.close()


@pytest.mark.parametrize("whose", EXAMPLES)
def test_files_with_fields_of_other_servers_run_unchanged(kept: RunningCluster, whose: str) -> None:
    ai = client_of(kept)
    model, bound = EXAMPLES[whose]
    lines: list[str] = []
    for number, character in enumerate(("a patient teacher", "a tired sailor"), start=1):
        messages = [
            {"role": "system", "content": f"You are {character}."},
            {"role": "user", "content": "Good morning!"},
        ]
        body = {"model": model, "messages": messages, bound: 20}
        lines.append(json.dumps({"custom_id": f"request-{number}", "method": "POST", "url": URL, "body": body}))
    found = results(ai, awaited(ai, submit(ai, "\n".join(lines))))
    assert [said["response"]["status_code"] for said in found.values()] == [200, 200]
    ai.close()


def test_refusals_reach_the_client(kept: RunningCluster) -> None:
    ai = client_of(kept)
    with pytest.raises(BadRequestError, match="completion_window"):
        submit(ai, line(0), completion_window="whenever")
    with pytest.raises(NotFoundError, match="there is no batch"):
        ai.batches.retrieve("batch_x")
    failed = awaited(ai, submit(ai, f"{line(0)}\n{line(0)}\n{{"))
    assert failed.status == "failed"
    assert failed.errors is not None
    assert [(one.code, one.line) for one in failed.errors.data or ()] == [
        ("duplicate_custom_id", 2),
        ("invalid_json_line", 3),
    ]
    ai.close()


def test_a_cancelled_batch_keeps_its_answers_and_frees_its_workers(kept: RunningCluster) -> None:
    ai = client_of(kept)
    batch = submit(ai, "\n".join(line(i, max_tokens=3 if i < 5 else 900) for i in range(60)))
    while not (ai.batches.retrieve(batch.id).request_counts or batch).completed:  # type: ignore[union-attr]
        time.sleep(0.02)
    ai.batches.cancel(batch.id)
    ended = awaited(ai, batch)
    assert ended.status == "cancelled"
    found = results(ai, ended)
    assert found.keys() == {f"c{i}" for i in range(60)}
    codes = {(said["error"] or {}).get("code") for said in found.values()}
    assert codes == {None, "batch_cancelled"}
    ai.close()


def test_batch_commands(kept: RunningCluster, tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(line(i) for i in range(12)))

    def ballast(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tools.cli.main", "batch", *words, "--url", kept.cluster.http_urls[0]]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = ballast("submit", str(file), "--wait", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "12 of 12" in done.stderr
    batch_id = done.stdout.split()[0]
    assert [json.loads(text)["custom_id"] for text in out.read_text().splitlines()] == [f"c{i}" for i in range(12)]
    assert f"{batch_id}  completed  12 of 12" in ballast("list").stdout
    assert json.loads(ballast("status", batch_id, "--json").stdout)["status"] == "completed"
    assert ballast("results", batch_id).stdout == out.read_text()
    again = ballast("cancel", batch_id)
    assert (again.returncode, "completed and cannot be cancelled" in again.stderr) == (1, True)
    file.write_text(f"{line(0)}\nnonsense")
    wrong = ballast("submit", str(file), "--wait")
    assert (wrong.returncode, "line 2: is not valid JSON" in wrong.stderr) == (1, True)


def test_the_example_resumes_its_batch(kept: RunningCluster, tmp_path: Path) -> None:
    out = tmp_path / "summaries.jsonl"
    command = [sys.executable, "examples/summaries.py", "examples/prompts.jsonl", str(out)]
    environ = {**os.environ, "OPENAI_BASE_URL": kept.cluster.http_urls[0], "OPENAI_API_KEY": "none"}
    prompts = [json.loads(text) for text in (ROOT / "examples/prompts.jsonl").read_text().splitlines()]
    said: list[str] = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{len(prompts)} summaries" in done.stdout
        said.append(done.stderr)
    assert f"{len(prompts)} of {len(prompts)}" in said[0]
    assert "going on with batch_" in said[1]
    assert [json.loads(text)["id"] for text in out.read_text().splitlines()] == [str(one["id"]) for one in prompts]


@pytest.mark.rotating
def test_every_line_has_one_result_whatever_happens(model: Path, tmp_path: Path) -> None:
    """BALLAST_JOB_LINES sets the number of lines; the full size is 10000."""
    folder, file, began_s = tmp_path / "jobs", tmp_path / "in.jsonl", time.monotonic()
    folder.mkdir()
    tokens = max(3, 50_000 // LINES)  # so that the batch outlasts all disturbances
    file.write_text("\n".join(line(i, temperature=0.0, max_tokens=tokens) for i in range(LINES)))
    sizes = {"workers": 2, "dispatchers": 2, "gateways": 1, "jobs": 2, "jobs_folder": folder, "flags": FLAGS}
    limit_s = 200.0 + LINES / 5
    with _small_disk(folder) as disk:
        with running_cluster(model, **sizes) as running:
            story = _Disturbed(running, folder, disk=disk)
            with _submitter(file, running.cluster.http_urls[0]) as submitter:
                assert submitter.stdout is not None
                batch_id = submitter.stdout.readline().split()[0]
                running.run(story.run(batch_id, submitter), limit_s)
        assert 0.8 * LINES <= _done(folder, batch_id) < LINES, "the cluster must end in the middle of the batch"
        later_s = time.time() + 5000.0  # as if the clock had been set back by that much in the meantime
        store = Store(folder, Store.last_epoch(folder))
        store.save_results([], later_s)
        store.close()
        with running_cluster(model, **sizes) as running:
            ai = client_of(running)
            ended = awaited(ai, ai.batches.retrieve(batch_id), limit_s)
            found = results(ai, ended)
            assert (ended.status, ended.error_file_id, len(found)) == ("completed", None, LINES)
            assert ended.completed_at is not None
            assert int(later_s) <= ended.completed_at < later_s + limit_s
            given = {one["custom_id"]: one["body"] for one in map(json.loads, file.read_text().splitlines())}
            assert found.keys() == given.keys()
            said = texts(found)
            for name in list(given)[:: -(-LINES // 20)]:
                assert ai.chat.completions.create(**given[name]).choices[0].message.content == said[name]
            ai.close()
    print(f"\n{LINES} lines, {time.monotonic() - began_s:.0f} s: {'; '.join(story.told)}")


class _Disturbed:
    """Disturbs a cluster while it answers a batch."""

    def __init__(self, running: RunningCluster, folder: Path, *, disk: bool) -> None:
        self.told: list[str] = []
        self._running = running
        self._cluster = running.cluster
        self._folder = folder
        self._disk = disk

    async def run(self, batch_id: str, submitter: subprocess.Popen[str]) -> None:
        """Disturbs the cluster until four fifths of the batch's lines have a result."""
        keeper = asyncio.create_task(Keeper(self._cluster, self.told.append).run())
        services: tuple[Service, ...] = ("gateway", "dispatcher", "worker", "planner", "monitor")
        acts: list[Callable[[], Coroutine[Any, Any, None]]] = [
            partial(self._kill_client, submitter),
            partial(self._pause_jobs, 0),
            partial(self._pause_jobs, 1),
            *(partial(self._kill, service) for service in services),
            partial(self._kill, "jobs"),
            self._kill_state_server,
            self._cancel_another,
            *([self._fill_disk] if self._disk else []),
        ]
        for number, act in enumerate(acts, 1):
            await self._until_done(batch_id, 0.8 * number / (len(acts) + 1))
            await act()
        await self._until_done(batch_id, 0.8)
        assert Store.last_epoch(self._folder) > 2, "no replica has taken over from the stopped one"
        keeper.cancel()
        await asyncio.wait([keeper])
        for process in [one for each in self._cluster.processes.values() for one in each]:
            process.may_end = True  # processes that are about to be restarted may end
        await self._kill("jobs")
        self._cluster.keep_logs = False

    async def _until_done(self, batch_id: str, share: float) -> None:
        await soon(lambda: _done(self._folder, batch_id) >= share * LINES, within_s=60.0 + LINES / 20)

    async def _kill_client(self, submitter: subprocess.Popen[str]) -> None:
        submitter.kill()
        self.told.append("the client that waits was killed")

    async def _pause_jobs(self, index: int) -> None:
        """Stops a replica for so long that the other one takes over if the stopped replica held the lease. When
        resumed, both believe that they lead.
        """
        self._cluster.kill("jobs", index, signal.SIGSTOP)
        await asyncio.sleep(2.5)
        self._cluster.kill("jobs", index, signal.SIGCONT)
        self.told.append(f"jobs-{index} was stopped for 2.5 s")

    async def _kill(self, service: Service) -> None:
        processes = list(self._cluster.processes[service])
        for process in processes if service == "jobs" else processes[:1]:
            process.child.send_signal(signal.SIGKILL)

    async def _kill_state_server(self) -> None:
        assert self._cluster.state_server is not None
        self._cluster.state_server.send_signal(signal.SIGKILL)

    async def _cancel_another(self) -> None:
        ai = client_of(self._running)
        content = "\n".join(line(i, max_tokens=900) for i in range(40))
        batch = await asyncio.to_thread(submit, ai, content)
        await asyncio.sleep(1.0)
        await asyncio.to_thread(ai.batches.cancel, batch.id)
        ended = await asyncio.to_thread(awaited, ai, batch)
        assert (ended.status, len(results(ai, ended))) == ("cancelled", 40)
        self.told.append("another batch was cancelled")
        ai.close()

    async def _fill_disk(self) -> None:
        """Fills the disk. For a while, results still fit into the existing file of the store's log, but uploaded files
        do not fit.
        """
        filler, epoch = self._folder / "filler", Store.last_epoch(self._folder)
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        ai = client_of(self._running).with_options(max_retries=0)
        with pytest.raises(InternalServerError) as refused:
            await asyncio.to_thread(ai.files.create, file=("more.jsonl", b"x" * (1 << 20)), purpose="batch")
        ai.close()
        await asyncio.sleep(3.0)
        filler.unlink()
        assert refused.value.status_code == 507
        assert Store.last_epoch(self._folder) == epoch, "a jobs replica ended on the full disk"
        self.told.append("the disk was full for 3 s")


@contextlib.contextmanager
def _small_disk(folder: Path) -> Generator[bool]:
    """Mounts a small tmpfs at `folder`, which the test fills. Yields False if this process may not mount one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)]
    may = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield may
    finally:
        if may:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def _submitter(file: Path, url: str) -> Generator[subprocess.Popen[str]]:
    """`ballast batch submit --wait`: the first output line is the batch id."""
    command = [sys.executable, "-m", "tools.cli.main", "batch", "submit", str(file), "--wait", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _done(folder: Path, batch_id: str) -> int:
    """The number of lines with a result, as stored on disk."""
    with contextlib.closing(sqlite3.connect(folder / "jobs.sqlite")) as db:
        row = db.execute("SELECT completed + failed FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return int(row[0])

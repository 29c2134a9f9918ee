"""Batches on a real cluster: OpenAI's client and files, and every line one result through deaths and restarts."""

import asyncio
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types import Batch

from services.jobs.store import Store
from tests.support.cluster import RunningCluster, running_cluster
from tests.support.waiting import soon
from tools.local.cluster import Service
from tools.local.keeper import Keeper
from tools.model.tiny import make_tiny

URL = "/v1/chat/completions"
ROOT = Path(__file__).resolve().parents[2]

# The fields of the example files in OpenAI's guide and in vLLM's repository: the model, and the name of the bound.
EXAMPLES = {
    "openai": ("gpt-3.5-turbo-0125", "max_tokens"),
    "vllm": ("meta-llama/Meta-Llama-3-8B-Instruct", "max_completion_tokens"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_tiny("qwen2", tmp_path_factory.mktemp("jobs") / "tiny", max_len=1024, vocab=700))


@pytest.fixture(scope="module")
def kept(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningCluster]:
    """A worker behind a dispatcher and a gateway, and two replicas that keep jobs."""
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
    """By custom id; every line has exactly one."""
    found: dict[str, Any] = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        for text in ai.files.content(file_id).text.splitlines() if file_id else ():
            said = json.loads(text)
            assert said["custom_id"] not in found
            found[said["custom_id"]] = said
    return found


def texts(found: dict[str, Any]) -> dict[str, str]:
    return {name: said["response"]["body"]["choices"][0]["message"]["content"] for name, said in found.items()}


def test_openais_client_reads_what_a_batch_answered(kept: RunningCluster) -> None:
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
def test_files_with_the_fields_of_others_run_as_they_are(kept: RunningCluster, whose: str) -> None:
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


def test_the_command(kept: RunningCluster, tmp_path: Path) -> None:
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


def test_the_example_finds_its_batch_again(kept: RunningCluster, tmp_path: Path) -> None:
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


def test_every_line_has_one_result_though_every_service_is_killed(model: Path, tmp_path: Path) -> None:
    count = 400
    with running_cluster(
        model, workers=2, dispatchers=2, gateways=1, jobs=2, jobs_folder=tmp_path / "jobs", flags=FLAGS
    ) as running:

        async def disturbed() -> None:
            ai = client_of(running)
            batch = await asyncio.to_thread(submit, ai, "\n".join(line(i, temperature=0.0) for i in range(count)))
            cluster = running.cluster
            keeper = asyncio.create_task(Keeper(cluster, print).run())
            store = tmp_path / "jobs"
            kills: list[tuple[float, Service]] = [(0.1, "jobs"), (0.3, "gateway"), (0.5, "dispatcher"), (0.7, "worker")]
            for share, service in kills:
                await soon(lambda share=share: _done(store, batch.id) >= share * count)
                for process in (
                    list(cluster.processes[service]) if service == "jobs" else cluster.processes[service][:1]
                ):
                    process.child.send_signal(signal.SIGKILL)
            ended = await asyncio.to_thread(awaited, ai, batch)
            assert (ended.status, results(ai, ended).keys()) == ("completed", {f"c{i}" for i in range(count)})
            assert ended.error_file_id is None
            keeper.cancel()
            await asyncio.wait([keeper])
            ai.close()

        running.run(disturbed())
        running.cluster.keep_logs = False


def _done(folder: Path, batch_id: str) -> int:
    """Lines with a result, by what is on the disk."""
    with contextlib.closing(sqlite3.connect(folder / "jobs.sqlite")) as db:
        row = db.execute("SELECT completed + failed FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return int(row[0])


def test_a_cluster_that_starts_again_goes_on_and_its_clock_does_not_go_back(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    with running_cluster(model, workers=1, gateways=1, jobs=1, jobs_folder=folder, flags=FLAGS) as running:
        ai = client_of(running)
        batch = submit(ai, "\n".join(line(i, max_tokens=40) for i in range(150)))
        while not _done(folder, batch.id):
            time.sleep(0.02)
        ai.close()
    assert _done(folder, batch.id) < 150
    later_s = time.time() + 5000.0  # as if the clock had been set back by that much meanwhile
    store = Store(folder, Store.last_epoch(folder))
    store.save_results([], later_s)
    store.close()
    with running_cluster(model, workers=1, gateways=1, jobs=1, jobs_folder=folder, flags=FLAGS) as running:
        ai = client_of(running)
        ended = awaited(ai, ai.batches.retrieve(batch.id))
        assert (ended.status, results(ai, ended).keys()) == ("completed", {f"c{i}" for i in range(150)})
        assert ended.completed_at is not None
        assert int(later_s) <= ended.completed_at < later_s + 100
        ai.close()

"""A local cluster follows its planner's scale webhook: a burst starts a worker, idleness stops it, and every request is
answered.
"""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.client import AsyncClient
from ballast.common.wanted import Wanted, sign
from ballast.service.security import read_secret
from services.planner.shell.webhook import post
from tests.integration.test_parking import GREEDY, PROMPTS
from tests.integration.test_sizing import SHORT
from tests.support.cluster import until
from tests.support.reference import reference_greedy_batch
from tools.local.cluster import LocalCluster
from tools.local.keeper import Keeper
from tools.local.ports import free_port
from tools.local.scaling import Scaler, hearing
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.rotating

LONG = replace(GREEDY, max_tokens=1000)


def test_a_burst_starts_a_worker_and_idleness_stops_it(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "tiny", max_len=8192)
    secret = tmp_path / "scale.secret"
    secret.write_text("0123456789abcdef" * 2)
    said: list[str] = []

    async def story() -> list[list[list[int]]]:
        scaler = Scaler(1, 2, said.append)
        async with hearing(read_secret(secret), scaler.take) as url:
            hook = ["--scale-webhook", url, "--scale-webhook-secret-file", str(secret)]
            cluster = LocalCluster(
                model,
                workers=1,
                device_memory_bytes=16 << 20,
                flags={
                    "worker": ["--dtype", "float64", "--dev", "self_profile_s=1"],
                    "planner": [*hook, "--park-dwell-s", "0.5"],
                },
            )
            async with cluster, AsyncClient(cluster.address) as client:
                works = [
                    asyncio.create_task(work) for work in (scaler.run(cluster), Keeper(cluster, said.append).run())
                ]
                answers: list[list[list[int]]] = [[] for _ in PROMPTS]
                enough = asyncio.Event()

                async def ask(number: int) -> None:
                    while not enough.is_set():
                        answer = await client.generate(token_ids=PROMPTS[number], sampling=LONG, deadline_s=180)
                        answers[number].append(list(answer.token_ids))

                async with asyncio.TaskGroup() as tasks:
                    for number in range(len(PROMPTS)):
                        tasks.create_task(ask(number))
                    await until(client, lambda now: len(now.workers) == 2, within_s=150)
                    enough.set()
                while len(cluster.processes["worker"]) > 1:
                    await client.generate(token_ids=PROMPTS[0], sampling=SHORT, deadline_s=60)
                    await asyncio.sleep(0.3)
                for work in works:
                    work.cancel()
                await asyncio.wait(works)
            return answers

    answers = asyncio.run(asyncio.wait_for(story(), 240))
    assert any("serves, as one more is wanted" in line for line in said), said
    assert any("has ended, as one less is enough" in line for line in said), said
    assert not any("was killed" in line or "is back" in line for line in said), said
    reference = reference_greedy_batch(model, PROMPTS, [LONG.max_tokens] * len(PROMPTS), "float64")
    for given, right in zip(answers, reference, strict=True):
        assert given
        assert all(answer == list(right.token_ids) for answer in given)


def test_the_scale_command_receives_the_number_of_workers(tmp_path: Path) -> None:
    """Runs `ballast scale` as a process, and sends it two webhook calls."""
    secret, port, out = tmp_path / "secret", free_port(), tmp_path / "out"
    secret.write_text("0123456789abcdef")

    async def story() -> None:
        script = "import sys; print(sys.argv[2], file=open(sys.argv[1], 'a'))"
        command = [sys.executable, "-c", script, str(out), "{wanted}"]
        flags = ["--listen", f"127.0.0.1:{port}", "--secret-file", str(secret), "--most", "8", "--"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tools.cli.main", "scale", *flags, *command, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert b"listening" in await asyncio.wait_for(process.stdout.readline(), 30)
        for count in (3, 99):
            body = Wanted(count, (), (), "test").body()
            await post(f"http://127.0.0.1:{port}/", body, sign(b"0123456789abcdef", body, time.time()))
            assert b"wanted (test)" in await asyncio.wait_for(process.stdout.readline(), 30)
        process.terminate()
        await process.wait()

    asyncio.run(story())
    assert out.read_text().split() == ["3", "8"]

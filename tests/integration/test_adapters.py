"""LoRA adapters over HTTP on a real cluster: selected by model name, with equal prompts, and across a drop and a
worker's death.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ballast.client import AsyncClient, SamplingParams
from ballast.common.errors import InvalidRequest
from services.worker.engine.load import load_engine
from tests.support.adapters import merged, write_adapter
from tests.support.cluster import RunningCluster, running_cluster
from tests.support.engine import Job, generate
from tools.cli.main import main as ballast
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.rotating

PROMPTS = [[3 + i, 9, 4 + 2 * i, 7] * (3 + i % 4) for i in range(9)]
NAMES = ("", "poet", "clerk")
TOKENS = 120
BALLAST = [sys.executable, "-m", "tools.cli.main"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", max_len=512)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "poet": write_adapter(folder / "poet", model, rank=4, seed=1),
        "clerk": write_adapter(folder / "clerk", model, rank=2, seed=2, targets=("q_proj", "o_proj", "up_proj")),
    }


@pytest.fixture(scope="module")
def running(model: Path, adapters: dict[str, Path]) -> Iterator[RunningCluster]:
    modules = [part for name, folder in adapters.items() for part in ("--lora-modules", f"{name}={folder}")]
    flags = {"worker": ["--dtype", "float64", *modules]}
    with running_cluster(model, workers=2, gateways=1, device_memory_bytes=8 << 20, flags=flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tokens of the merged dense models, by adapter."""
    found: dict[str, Any] = {}
    for name in NAMES:
        dense = merged(tmp_path_factory.mktemp("dense") / "d", model, adapters[name]) if name else model
        jobs = [Job(i, tuple(prompt), TOKENS) for i, prompt in enumerate(PROMPTS)]
        with load_engine(dense, dtype="float64", device_memory_bytes=8 << 20) as engine:
            generate(engine, jobs)
        found[name] = [tuple(job.chosen) for job in jobs]
    return found


def client(running: RunningCluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.cluster.http_urls[0], api_key="none")


def test_models_are_listed_with_their_parent(running: RunningCluster) -> None:
    listed = {one.id: one.model_dump() for one in client(running).models.list()}
    assert list(listed) == ["tiny", "clerk", "poet"]
    assert [one["parent"] for one in listed.values()] == [None, "tiny", "tiny"]
    assert [one["root"] for one in listed.values()] == ["tiny", "clerk", "poet"]
    assert client(running).models.retrieve("poet").id == "poet"
    with pytest.raises(openai.NotFoundError, match="'pirate' is not served here; served: tiny, clerk, poet"):
        client(running).completions.create(model="pirate", prompt="a")


def test_the_model_of_a_request_names_its_adapter(running: RunningCluster, expected: dict[str, Any]) -> None:
    said = {}
    for name in ("tiny", "poet", "clerk"):
        answer: Any = client(running).completions.create(
            model=name,
            prompt=PROMPTS[0],
            max_tokens=20,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        assert answer.model == name
        said[name] = tuple(answer.choices[0].token_ids)
    assert said == {name or "tiny": expected[name][0][:20] for name in NAMES}
    chat = client(running).chat.completions.create(
        model="poet", messages=[{"role": "user", "content": "Hi"}], max_tokens=4
    )
    assert chat.model == "poet"


async def ask(sdk: AsyncClient, name: str, i: int) -> tuple[int, ...]:
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, adapter=name)
    return (await sdk.generate(token_ids=PROMPTS[i], sampling=sampling)).token_ids


async def ask_all(sdk: AsyncClient) -> dict[str, list[tuple[int, ...]]]:
    """Sends all requests at once, so that one batch has three models."""
    tasks = {name: [asyncio.create_task(ask(sdk, name, i)) for i in range(len(PROMPTS))] for name in NAMES}
    return {name: [await task for task in each] for name, each in tasks.items()}


def test_tokens_are_the_merged_models_through_drop_restore_and_a_death(
    running: RunningCluster, expected: dict[str, Any]
) -> None:
    async def story() -> None:
        async with AsyncClient(running.cluster.address) as sdk:
            for what in ("drop", "restore", "nothing", "death"):
                asked = asyncio.create_task(ask_all(sdk))
                await asyncio.sleep(0.3)
                if what in ("drop", "restore"):
                    arguments = ["--workers", "worker-0,worker-1", "--hold", "10m"] if what == "drop" else []
                    command = [what, "--address", running.cluster.address, *arguments]
                    assert await asyncio.to_thread(ballast, command) == 0
                elif what == "death":
                    running.cluster.kill("worker", 1)
                assert await asked == expected, what

    running.run(story())


def test_an_unknown_adapter_is_refused(running: RunningCluster) -> None:
    async def story() -> None:
        async with AsyncClient(running.cluster.address) as sdk:
            await ask(sdk, "pirate", 0)

    with pytest.raises(InvalidRequest, match="'pirate' is not served; served: clerk, poet"):
        running.run(story())


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["one"], "must be NAME=FOLDER, got 'one'"),
        (["a={poet}", "a={poet}"], "names 'a' twice"),
        (["a=/nowhere"], "a LoRA adapter is a folder with adapter_config.json"),
        (["a={dora}"], "use_dora: True is not supported"),
    ],
)
def test_up_refuses_invalid_adapters_before_it_starts_a_process(
    flags: list[str], why: str, model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    dora = write_adapter(tmp_path / "dora", model, use_dora=True)
    given = [flag.format(poet=adapters["poet"], dora=dora) for flag in flags]
    command = [*BALLAST, "up", "--model", str(model), "--port", "0", "--lora-modules", *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert why in ended.stderr
    assert "starting" not in ended.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_up_passes_adapters_to_workers(
    ranks: int, model: Path, adapters: dict[str, Path], expected: dict[str, list[tuple[int, ...]]]
) -> None:
    modules = [f"{name}={folder}" for name, folder in adapters.items()]
    command = [*BALLAST, "up", "--model", str(model), "--port", "0", "--workers", "1", "--dtype", "float64"]
    command += ["--tensor-parallel-size", str(ranks)]
    with subprocess.Popen([*command, "--lora-modules", *modules], stdout=subprocess.PIPE, text=True) as up:
        try:
            assert up.stdout is not None
            line = up.stdout.readline()
            url = line.partition(" at ")[2].partition(",")[0]
            served = openai.OpenAI(base_url=url, api_key="none")
            assert [one.id for one in served.models.list()] == ["tiny", "clerk", "poet"], json.dumps(line)
            told = {"ignore_eos": True, "return_token_ids": True}
            answer: Any = served.completions.create(
                model="poet", prompt=PROMPTS[1], max_tokens=20, temperature=0, extra_body=told
            )
            assert tuple(answer.choices[0].token_ids) == expected["poet"][1][:20]
        finally:
            up.terminate()
            up.wait(30)

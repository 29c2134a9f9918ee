"""Instances of several ranks, with a process per rank: no token changes, and no rank outlives its instance.

BALLAST_RANKS_REQUESTS sets the total number of requests. The default is small, since all ranks share the CPU's cores.
"""

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from ballast.client import AsyncClient, ClusterStatus, SamplingParams
from ballast.common.errors import Unavailable
from services.worker.core.batch import Batch, NewSequence, Slice, StepResult
from services.worker.engine.load import Engine, load_engine
from services.worker.engine.rehearsal import Largest
from services.worker.ranks.channel import RankLog
from services.worker.ranks.load import load_ranked
from tests.support.cluster import until
from tests.support.engine import Job, generate
from tests.support.exactness import History, Tally, undisturbed
from tests.support.fake_driver import load, load_share
from tests.support.families import write_family
from tests.support.group import ONE_GPU, Place
from tests.support.wishes import make_wishes
from tools.local.cluster import LocalCluster
from tools.model.tiny import make_tiny

REQUESTS = os.environ.get("BALLAST_RANKS_REQUESTS")
SAMPLING = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
ENDS_WITHIN_S = 20.0
OF_TWO_INSTANCES = (8, 2, 14, 18, 22, 26)  # seeds of histories with two instances of several ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny("llama", out, layers=4, kv_heads=4, intermediate=176, max_len=256)


@pytest.mark.rotating
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("place", "requests"),
    [
        # Each rank on its own fake device, through the CUDA driver's calls.
        pytest.param(Place(ranks=2, share=partial(load_share, extent_bytes=16 << 10)), 30, id="2 devices"),
        pytest.param(Place(ranks=4, memory_factor=2), 10, id="4 on the CPU"),  # every rank holds the whole embedding
        pytest.param(Place(ranks=4, hosts=2, memory_factor=2), 10, id="2 on each of 2 hosts"),
        pytest.param(replace(ONE_GPU, ranks=2), 30, id="2 on a GPU", marks=pytest.mark.gpu),
    ],
)
def test_no_token_changes_through_drops_and_restores(place: Place, requests: int, model: Path) -> None:
    """Compares two instances of several ranks with one worker of one rank, on CPUs in float64. The events in a history
    depend on the machine's speed, so histories run until every kind has occurred.
    """
    count = int(REQUESTS or requests)
    each = max(requests, -(-count // len(OF_TWO_INSTANCES)))
    wishes = make_wishes(60, 8)
    expected = asyncio.run(undisturbed(model, wishes, replace(place, ranks=1, hosts=1, share=load_engine)))
    tally = Tally()

    def seen() -> bool:
        steps_ahead = tally.steps_ahead or place.ranks > 2  # instances of four ranks hardly ever serve alone
        return bool(tally.drops and tally.restores and tally.exchanged_bytes and steps_ahead)

    for seed in OF_TWO_INSTANCES:
        tally.add(asyncio.run(History(seed, model, wishes, expected, each, place=place).run()))
        if tally.requests >= count and seen():
            break
    print(f"\n{tally}")
    assert tally.requests >= count
    assert seen()
    if place.share is not load_engine:
        assert (load().violation, load().counts) == ("", (0, 0, 0, 0))


def test_two_ranks_of_a_mixture_of_experts_generate_the_tokens_of_one(tmp_path: Path) -> None:
    """Uses the model code and the tensor-parallel plan of `transformers`."""
    folder = write_family("qwen3_moe", tmp_path)
    load_one = partial(load_engine, folder, device_memory_bytes=8 << 20, dtype="float64")

    def answers(engine: Engine) -> list[list[int]]:
        jobs = [Job(i, tuple(range(5 + i, 9 + 9 * i)), 10) for i in range(4)]
        with engine:
            generate(engine, jobs, chunk_tokens=16)
        return [job.chosen for job in jobs]

    alone = answers(load_one())
    ranked = load_ranked(load_one, ["cpu", "cpu"], RankLog())
    try:
        assert ranked.engine.info.tensor_parallel_size == 2
        assert answers(ranked.engine) == alone
    finally:
        ranked.crew.close()


def test_stages_of_two_ranks_with_kv_in_float8_generate_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """Hidden states have the model's dtype, whatever the KV cache's dtype is."""
    folder = make_tiny("llama", tmp_path / "model", layers=2, kv_heads=2, max_len=64)
    load_one = partial(load_engine, folder, device_memory_bytes=8 << 20, dtype="float32", kv_cache_dtype="fp8_e4m3")
    batch = Batch(1, (), (NewSequence(1, (5, 6, 7), (), SAMPLING),), (Slice(1, 0, (5, 6, 7), True),))
    said: list[object] = []
    for ranks in (1, 2):
        loaded = load_one() if ranks == 1 else load_ranked(load_one, ["cpu"] * ranks, RankLog()).engine
        with loaded as engine:
            hidden_TD = engine.runner.run_stage(batch, [(0,)], None, first_layer=0, last_layer=1)
            assert isinstance(hidden_TD, torch.Tensor)
            result = engine.runner.run_stage(batch, [(0,)], hidden_TD.clone(), first_layer=1, last_layer=2)
            assert isinstance(result, StepResult)
            said.append(result.token_ids)
    assert said[1] == said[0]


@pytest.mark.gpu
def test_two_ranks_on_a_gpu_generate_the_tokens_of_one(model: Path) -> None:
    """NCCL refuses two ranks on one device, so the all-reduces go through host memory."""
    load_one = partial(load_engine, model, device_memory_bytes=96 << 20, dtype="float32")

    def answers(engine: Engine) -> list[list[int]]:
        jobs = [Job(i, tuple(range(5 + i, 9 + 20 * i)), 20) for i in range(4)]
        with engine:
            generate(engine, jobs)
        return [job.chosen for job in jobs]

    alone = answers(load_one(device="cuda"))
    assert answers(load_ranked(load_one, ["cuda", "cuda"], RankLog()).engine) == alone


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_generate_the_same_tokens_with_recorded_sums(model: Path) -> None:
    share = partial(load_engine, model, device_memory_bytes=96 << 20, dtype="float32")

    def answers(engine: Engine) -> list[list[int]]:
        jobs = [Job(i, tuple(range(5 + i, 9 + 20 * i)), 20) for i in range(4)]
        generate(engine, jobs)
        return [job.chosen for job in jobs]

    said: list[list[list[int]]] = []
    for eager in (True, False):
        load_one = partial(share, largest=Largest(tokens=128, sequences=4), enforce_eager=eager)
        with load_ranked(load_one, ["cuda:0", "cuda:1"], RankLog()).engine as engine:
            blocks = engine.block_count
            said.append(answers(engine))
            engine.memory.drop_layers((2, 3))
            engine.memory.make_room_for_layers((2, 3), block_count=blocks)
            for layer in (2, 3):
                engine.read_layer(layer)
            said.append(answers(engine))
    assert said == [said[0]] * 4


async def test_a_dying_rank_ends_its_instance_and_a_dying_worker_ends_its_ranks(model: Path) -> None:
    alone = ["--overload-policy", "recompute"]  # workers must not merge
    ranked = ["--tensor-parallel-size", "2", "--dtype", "float64", *alone]

    async def story() -> None:
        async with (
            LocalCluster(
                model, workers=2, device_memory_bytes=2 << 20, flags={"worker": ranked, "planner": alone}
            ) as cluster,
            AsyncClient(cluster.address) as client,
        ):
            expected = (await client.generate("A ship", SAMPLING)).token_ids
            first, second = (process.pid for process in cluster.processes["worker"])
            (rank,), (other,) = ranks_of(first), ranks_of(second)
            killed = asyncio.Event()

            async def ask() -> None:
                """Sends one request after another, so that some always run. Requests of the lost rank are replayed."""
                while not killed.is_set():
                    assert (await client.generate("A ship", SAMPLING, deadline_s=60)).token_ids == expected

            asking = [asyncio.create_task(ask()) for _ in range(4)]
            await until(client, lambda status: all(w.load and w.load.running_count for w in status.workers))
            rank.kill()
            killed.set()
            await asyncio.gather(*asking)
            await until(client, lambda status: worker_ids(status) == {"worker-1"})
            assert other.is_running()

            cluster.kill("worker", 1)
            await asyncio.to_thread(other.wait, ENDS_WITHIN_S)

    with pytest.raises(Unavailable, match=r"(?s)worker-0: ended.*a rank is lost, and this instance ends"):
        await story()


def ranks_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "services.worker.ranks" in child.cmdline()]


def worker_ids(status: ClusterStatus) -> set[str]:
    return {worker.worker_id for worker in status.workers}

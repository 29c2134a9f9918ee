"""A stage of a pipeline is lost, and an instance that served alone takes its place."""

import asyncio
from pathlib import Path

import pytest

from ballast.common.layout import Layout
from ballast.common.transition import Phase, TransitionKind
from tests.integration.test_group_failures import LAYERS, ROOMY, ask, kill, tokens_flow, whole
from tests.support.group import Cluster, layout, running_group
from tests.support.shells import until
from tools.model.tiny import make_tiny

NAMES = ["w0", "w1", "w2", "w3", "w4"]
GROUP = [("w0", 0, 2), ("w1", 2, 3), ("w2", 3, 5), ("w3", 5, 6)]
OUTSIDE = [("w4", 0, 6)]
Tokens = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS, max_len=256)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Tokens:
    async def run() -> Tokens:
        async with running_group(model_dir, ["w0"], ROOMY) as cluster:
            return await whole(cluster, await ask(cluster, ["w0"], 100))

    return asyncio.run(run())


def replaced(lost: str, epoch: int = 3) -> Layout:
    return layout(epoch, [[("w4" if w == lost else w, first, last) for w, first, last in GROUP]], LAYERS)


async def a_group_and_one_outside(cluster: Cluster) -> None:
    await cluster.change(TransitionKind.DROP, layout(2, [GROUP, OUTSIDE], LAYERS))


@pytest.mark.parametrize("lost", ["w1", "w2", "w3"])
def test_an_instance_outside_takes_the_place_of_a_lost_follower(lost: str, model_dir: Path, expected: Tokens) -> None:
    async def run() -> Tokens:
        async with running_group(model_dir, NAMES, ROOMY) as cluster:
            answers = await ask(cluster, ["w0", "w0", "w4"])
            await tokens_flow(answers, 3)
            await a_group_and_one_outside(cluster)
            await cluster.goes_on(answers)
            kill(cluster, lost, NAMES)
            said = await cluster.change(TransitionKind.DROP, replaced(lost))
            survivors = [w for w, _, _ in GROUP if w != lost]
            assert [said[w].kv_bytes_sent for w in survivors] == [0, 0, 0]
            assert said["w4"].kv_bytes_sent > 0
            assert said["w0"].victims_recomputed > 0
            tokens = await whole(cluster, answers)
            assert max(answer.attempts for answer in answers) <= 2  # those of the stand-in have moved
            assert [answer.attempts for answer in answers[::3]] == [1, 1]
            return tokens

    assert asyncio.run(run()) == expected


def test_a_group_without_stand_in_ends_after_a_while(model_dir: Path, expected: Tokens) -> None:
    async def run() -> Tokens:
        async with running_group(model_dir, NAMES, ROOMY) as cluster:
            answers = await ask(cluster, ["w0"])
            await tokens_flow(answers, 3)
            await a_group_and_one_outside(cluster)
            await cluster.goes_on(answers)
            kill(cluster, "w2", NAMES)
            for name in ("w0", "w1", "w2", "w3"):
                worker = cluster.workers[name]
                await until(lambda w=worker: (p := w.progress(2)) is not None and p.phase is Phase.DONE and bool(p.why))
            return await whole(cluster, answers)

    assert asyncio.run(run()) == expected

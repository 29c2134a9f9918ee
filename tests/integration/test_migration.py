"""Requests that move from one real worker to another while they run."""

import asyncio
import os
from pathlib import Path

import pytest

from ballast.common.sampling import SamplingParams
from ballast.model.tiny import make_tiny
from tests.support.exactness import History, Tally, make_wishes, undisturbed
from tests.support.group import Cluster, Sizes, running_group
from tests.support.shells import until

HISTORIES = int(os.environ.get("BALLAST_MIGRATION_HISTORIES", "6"))
FIRST_SEED = int(os.environ.get("BALLAST_MIGRATION_FIRST_SEED", "0"))
LAYERS, NAMES = 4, ["w0", "w1"]
PROMPTS = [[3 + i, 9, 4 + 2 * i, 7] * 20 for i in range(6)]  # five whole blocks each
LONG = SamplingParams(temperature=0.0, max_tokens=800, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS, max_len=1024)


@pytest.mark.timeout(300)
def test_no_token_changes_however_often_requests_move(tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path / "tiny", layers=LAYERS, max_len=256)
    wishes = make_wishes(100, 3)
    expected = asyncio.run(undisturbed(model_dir, wishes))
    tally = Tally()
    for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
        try:
            history = History(seed, model_dir, wishes, expected, 50, layouts_change=False)
            tally.add(asyncio.run(history.run()))
        except BaseException as error:
            error.add_note(f"seed {seed}: BALLAST_MIGRATION_FIRST_SEED={seed} BALLAST_MIGRATION_HISTORIES=1")
            raise
    print(f"\n{tally}")
    if HISTORIES >= 6:
        assert tally.whole > tally.requests * 0.5
        assert tally.migrated > 20
        assert tally.not_migrated > 0
        assert tally.migrated_anew * 4 < tally.migrated


def _moved(cluster: Cluster, name: str = "w0") -> int:
    return cluster.workers[name].member.published.migrations.moved


def test_requests_go_on_at_the_target_without_computing_anything_anew(model_dir: Path) -> None:
    async def story() -> None:
        async with running_group(model_dir, NAMES, Sizes(memory_bytes=12 << 20)) as cluster:
            answers = [await cluster.dispatcher.submit("w0", prompt, LONG) for prompt in PROMPTS]
            await until(lambda: all(len(answer.token_ids) >= 20 for answer in answers))
            cluster.migrate("w0", "w1", within_s=20.0)
            await until(lambda: _moved(cluster) == len(PROMPTS), 20.0)
            totals = cluster.workers["w0"].member.published.migrations
            print(totals)
            assert (totals.recomputed, totals.not_moved) == (0, 0)
            assert totals.blocks >= 5 * len(PROMPTS)
            await until(lambda: all(answer.place and answer.place[0] == "w1" for answer in answers))
            counts = [len(answer.token_ids) for answer in answers]
            await until(lambda: all(len(a.token_ids) > n for a, n in zip(answers, counts, strict=True)))
            assert not cluster.workers["w0"].book.used_count
            assert not cluster.workers["w0"].engine.runner.sequence_ids
            for answer in answers:
                await cluster.dispatcher.cancel(answer)
                await cluster.dispatcher.end(answer)
            await cluster.quiet()

    asyncio.run(story())

"""Victims that go on while their KV travels, and what becomes of them when who holds it cannot be asked any more."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest
import torch

from ballast.common.sampling import SamplingParams
from ballast.common.transition import Phase, TransitionKind
from ballast.model.tiny import make_tiny
from services.worker.links.config import TransportConfig
from services.worker.links.receiving import Message
from services.worker.pipeline import remote_attention
from tests.support.group import Answer, Cluster, Sizes, layout, running_group
from tests.support.shells import until

LAYERS, TOKENS = 6, 100
PROMPTS = [tuple((7 * i + j) % 490 + 5 for j in range(10 + 9 * i)) for i in range(6)]
PAIR = [[("w0", 0, 2), ("w1", 2, 6)]]
ROOMY = Sizes(memory_bytes=12 << 19)
LIVE = Sizes(
    memory_bytes=12 << 19, live_exchange=True, transport=TransportConfig(rate_bytes_per_s=1e6, chunk_bytes=4096)
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS, max_len=256)


async def ask(cluster: Cluster, leaders: list[str]) -> list[Answer]:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=TOKENS, ignore_eos=True)
    submit = cluster.dispatcher.submit
    return [await submit(leaders[i % len(leaders)], prompt, sampling) for i, prompt in enumerate(PROMPTS)]


async def whole(cluster: Cluster, answers: list[Answer]) -> list[tuple[int, ...]]:
    for answer in answers:
        await cluster.dispatcher.end(answer)
    assert not [a.error for a in answers if a.error]
    return [tuple(a.token_ids) for a in answers]


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[tuple[int, ...]]:
    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0"], ROOMY) as cluster:
            return await whole(cluster, await ask(cluster, ["w0"]))

    return asyncio.run(run())


async def exchanging(cluster: Cluster) -> list[Answer]:
    """Requests on two workers, which have just become one pipeline."""
    answers = await ask(cluster, ["w0", "w1"])
    await until(lambda: all(len(a.token_ids) >= 3 for a in answers))
    target = layout(2, PAIR, LAYERS)
    members = await cluster.prepare(TransitionKind.DROP, target)
    cluster.commit(members, target)
    await cluster.until(members, target.epoch, Phase.EXCHANGING)
    return answers


def test_victims_go_on_while_their_kv_travels(model_dir: Path, expected: list[tuple[int, ...]]) -> None:
    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0", "w1"], LIVE) as cluster:
            answers = await exchanging(cluster)
            counts = [len(a.token_ids) for a in answers]
            await until(lambda: all(len(a.token_ids) > n for a, n in zip(answers, counts, strict=True)))
            assert all(worker.membership.questions_total for worker in cluster.workers.values())
            progress = cluster.workers["w0"].progress(2)
            assert progress is not None
            assert progress.victims_waiting == 0
            tokens = await whole(cluster, answers)
            await cluster.quiet()
            return tokens

    assert asyncio.run(run()) == expected


class Silence:
    """Who holds KV hears the questions of one worker and does not answer, until the test is over."""

    def __init__(self, cluster: Cluster, holder: str) -> None:
        attention = cluster.workers[holder].membership.attention
        assert attention is not None
        self.heard, self._over = Event(), Event()
        answer = attention._answer

        def silent(message: Message) -> torch.Tensor | None:
            self.heard.set()
            self._over.wait(60.0)
            return answer(message)

        attention._answer = silent

    def end(self) -> None:
        self._over.set()


def break_links(cluster: Cluster, name: str) -> None:
    """As when the process dies: its peers see their links end."""
    for link in list(cluster.workers[name].membership.plane._links.values()):
        link._break("the test has cut it")


async def lose_the_holder(
    model_dir: Path, holder: str, lose: Callable[[Cluster], None]
) -> tuple[list[tuple[int, ...]], list[Answer]]:
    """A question is waiting for its answer when the holder is lost. Then everything is replayed."""
    async with running_group(model_dir, ["w0", "w1"], LIVE) as cluster:
        silence = Silence(cluster, holder)
        try:
            answers = await exchanging(cluster)
            await until(silence.heard.is_set)
            lose(cluster)
            for worker in cluster.workers.values():
                await until(lambda w=worker: (p := w.progress(2)) is not None and bool(p.why))
        finally:
            silence.end()
        for worker in cluster.workers.values():
            await until(lambda w=worker: (p := w.progress(2)) is not None and p.phase is Phase.DONE and bool(p.why))
            assert worker.engine.memory.parameters.held_layers == tuple(range(LAYERS))
        tokens = await whole(cluster, answers)
        await cluster.quiet()
        for worker in cluster.workers.values():
            worker.engine.check()
            assert worker.book.block_count == worker.engine.memory.kv.block_count
            attention = worker.membership.attention
            assert attention is not None
            assert not attention._asked
            assert not attention._lent
        return tokens, answers


@pytest.mark.parametrize("holder", ["w0", "w1"])
def test_a_holder_whose_links_break_while_it_is_asked(
    holder: str, model_dir: Path, expected: list[tuple[int, ...]]
) -> None:
    tokens, answers = asyncio.run(lose_the_holder(model_dir, holder, lambda c: break_links(c, holder)))
    assert tokens == expected
    assert all(a.attempts > 1 for a in answers), "the group is lost, and all of its requests are replayed"


def test_a_holder_that_does_not_answer(
    model_dir: Path, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its links stay up. Who asks gives it up after a while, and with it the group."""
    monkeypatch.setattr(remote_attention, "_ANSWER_TIMEOUT_S", 0.5)
    tokens, _ = asyncio.run(lose_the_holder(model_dir, "w1", lambda _: None))
    assert tokens == expected

"""Failures around a transition change no token."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ballast.common.ids import Epoch
from ballast.common.layout import Layout
from ballast.common.sampling import SamplingParams
from ballast.common.transition import Phase, TransitionKind
from services.worker.core.batch import Batch
from services.worker.core.transition_messages import TakenUp
from services.worker.core.turns import MemberEvent
from services.worker.links.config import TransportConfig
from services.worker.pipeline.events import KvAsked
from services.worker.pipeline.mover import kv_bytes
from tests.support.group import Answer, Cluster, GroupWorker, Sizes, alone, layout, running_group
from tests.support.shells import until
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.any_device

LAYERS = 6
PROMPTS = [tuple((7 * i + j) % 490 + 5 for j in range(10 + 9 * i)) for i in range(6)]
SLOW = Sizes(memory_bytes=10 << 19, transport=TransportConfig(rate_bytes_per_s=1e6), step_s=0.005)
CRAWLING = replace(SLOW, transport=TransportConfig(rate_bytes_per_s=2e5))
ROOMY = Sizes(memory_bytes=12 << 19, step_s=0.005)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS, max_len=256)


def sampling(tokens: int, seed: int = 3) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=tokens, ignore_eos=True)


async def ask(cluster: Cluster, leaders: list[str], tokens: int = 100) -> list[Answer]:
    submit = cluster.dispatcher.submit
    return [await submit(leaders[i % len(leaders)], p, sampling(tokens)) for i, p in enumerate(PROMPTS)]


async def whole(cluster: Cluster, answers: list[Answer]) -> list[tuple[int, ...]]:
    for answer in answers:
        await cluster.dispatcher.end(answer)
    assert not [a.error for a in answers if a.error]
    return [tuple(a.token_ids) for a in answers]


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Callable[[int], list[tuple[int, ...]]]:
    async def run(tokens: int) -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0"], ROOMY) as cluster:
            return await whole(cluster, await ask(cluster, ["w0"], tokens))

    known: dict[int, list[tuple[int, ...]]] = {}

    def get(tokens: int) -> list[tuple[int, ...]]:
        if tokens not in known:
            known[tokens] = asyncio.run(run(tokens))
        return known[tokens]

    return get


async def tokens_flow(answers: list[Answer], count: int) -> None:
    await until(lambda: all(len(a.token_ids) >= count for a in answers))


PAIR = [[("w0", 0, 2), ("w1", 2, 6)]]


def hold_exchange(cluster: Cluster) -> Callable[[], None]:
    """Holds back the KV that is requested after a commit, until the returned function is called."""
    held, lock, over = list[tuple[str, KvAsked]](), threading.Lock(), threading.Event()

    def hold(name: str, worker: GroupWorker) -> None:
        handle = worker.member.handle

        def listening(event: MemberEvent) -> Any:
            with lock:
                if isinstance(event, KvAsked) and not over.is_set():
                    held.append((name, event))
                    return []
            return handle(event)

        worker.member.handle = listening

    def let_go() -> None:
        with lock:
            over.set()
        for name, event in held:
            cluster.post(name, event)

    for name, worker in cluster.workers.items():
        hold(name, worker)
    return let_go


def kill(cluster: Cluster, name: str, peers: list[str]) -> None:
    """Breaks the member's links to `peers`; other links, and the process itself, remain."""
    plane = cluster.workers[name].membership.plane
    for peer, connection in list(plane._connections.items()):
        if peer in peers:
            connection.give_up("the test has cut it")


def test_exactly_the_kv_of_dropped_layers_is_sent(
    model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]]
) -> None:
    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0", "w1"], ROOMY) as cluster:
            answers = await ask(cluster, ["w0", "w1"])
            await tokens_flow(answers, 3)
            target = layout(2, PAIR, LAYERS)
            members = await cluster.prepare(TransitionKind.DROP, target)
            commits: dict[str, list[tuple[int, int]]] = {}
            for name in members:
                _spy_on_commit(cluster, name, commits)
            cluster.commit(members, target)
            said = await cluster.done(members, target.epoch)
            kv = cluster.workers["w0"].engine.memory.kv
            wanted = {
                "w0": sum(kv_bytes(kv, tokens, 4) for _, tokens in commits["w0"]),  # its layers 2 to 5 move to w1
                "w1": sum(kv_bytes(kv, tokens, 2) for _, tokens in commits["w1"]),
            }
            assert {n: p.kv_bytes_sent for n, p in said.items()} == wanted
            assert said["w0"].kv_bytes_received == wanted["w1"]
            assert said["w1"].kv_bytes_received == wanted["w0"]
            assert said["w0"].victim_count == len(commits["w0"]) + len(commits["w1"]) == len(PROMPTS)
            return await whole(cluster, answers)

    assert asyncio.run(run()) == expected(100)


def _spy_on_commit(cluster: Cluster, name: str, found: dict[str, list[tuple[int, int]]]) -> None:
    """Records (sequence, KV tokens) from the core's own table when the member starts its new role."""
    driver, core = cluster.workers[name].member._driver, cluster.workers[name].core
    take_up = driver._take_up

    def spied() -> TakenUp:
        found[name] = sorted(core.group_scheduler.kv_tokens.items())
        return take_up()

    driver._take_up = spied


def test_first_tokens_arrive_while_kv_is_exchanged(
    model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]]
) -> None:
    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0", "w1"], ROOMY) as cluster:
            answers = await ask(cluster, ["w0", "w1"])
            await tokens_flow(answers, 3)
            target = layout(2, PAIR, LAYERS)
            members = await cluster.prepare(TransitionKind.DROP, target)
            let_go = hold_exchange(cluster)
            cluster.commit(members, target)
            await cluster.until(members, target.epoch, Phase.EXCHANGING)
            new = await cluster.dispatcher.submit("w0", (9, 8, 7), sampling(20))
            await tokens_flow([new], 1)
            progress = cluster.workers["w0"].progress(target.epoch)
            assert progress is not None
            assert progress.phase is Phase.EXCHANGING
            let_go()
            await cluster.dispatcher.end(new)
            await cluster.done(members, target.epoch)
            return await whole(cluster, answers)

    assert asyncio.run(run()) == expected(100)


@pytest.mark.host_extents
def test_victims_without_room_are_recomputed(model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]]) -> None:
    """A small worker takes most of the layers of a large one, so the group has less room than the large one alone."""
    small, large = Sizes(memory_bytes=13 << 18), Sizes(memory_bytes=5 << 20)

    async def run() -> tuple[int, list[tuple[int, ...]]]:
        async with running_group(model_dir, ["w0", "w1"], small, w1=large) as cluster:
            answers = await ask(cluster, ["w1"])
            await tokens_flow(answers, 40)
            said = await cluster.change(TransitionKind.DROP, layout(2, [[("w1", 0, 1), ("w0", 1, 6)]], LAYERS))
            tokens = await whole(cluster, answers)
            await cluster.quiet()
            return said["w1"].victims_recomputed, tokens

    recomputed, tokens = asyncio.run(run())
    assert tokens == expected(100)
    assert recomputed > 0


@pytest.mark.rotating(2)
@pytest.mark.parametrize("survivor", ["w0", "w1"])
def test_a_survivor_becomes_whole_again(
    survivor: str, model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]]
) -> None:
    """After the drop, one member's links break. The other one must reload the missing layers from its checkpoint."""

    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0", "w1"], ROOMY) as cluster:
            answers = await ask(cluster, ["w0", "w1"])
            await tokens_flow(answers, 3)
            await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
            await tokens_flow(answers, 12)
            kill(cluster, "w0", ["w1"])
            worker = cluster.workers[survivor]
            await until(lambda: (p := worker.progress(2)) is not None and p.phase is Phase.DONE and bool(p.why))
            tokens = await whole(cluster, answers)
            await cluster.quiet()
            worker.engine.check()
            parameters = worker.engine.memory.parameters
            assert parameters.held_layers == tuple(range(LAYERS))
            assert worker.book.block_count == worker.engine.memory.kv.block_count
            cluster.in_force = alone(3, ["w0", "w1"], LAYERS)
            answers = await ask(cluster, ["w0", "w1"])
            await tokens_flow(answers, 3)
            await cluster.change(TransitionKind.DROP, layout(4, PAIR, LAYERS))
            assert await whole(cluster, answers) == tokens
            return tokens

    assert asyncio.run(run()) == expected(100)


@pytest.mark.parametrize("committed", [True, False])
def test_a_member_leaves_its_group_if_the_layout_omits_it(
    committed: bool, model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]]
) -> None:
    """The planner has lost w1, although its links work. w0 leaves the pair or the exchange, becomes whole and takes
    part in later plans; w1 learns of this through its links. Neither worker still reports the abandoned transition as
    running.
    """

    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0", "w1"], ROOMY) as cluster:
            answers = await ask(cluster, ["w0", "w1"])
            await tokens_flow(answers, 3)
            target = layout(2, PAIR, LAYERS)
            members = await cluster.prepare(TransitionKind.DROP, target)
            let_go = hold_exchange(cluster) if committed else None
            cluster.commit(members, target)
            if committed:
                await cluster.until(members, target.epoch, Phase.EXCHANGING)
            else:
                await cluster.done(members, target.epoch)
            cluster.in_force = Layout(Epoch(3), LAYERS, (), "without those who are lost")
            await until(lambda: _are_whole(cluster, alone(4, ["w0", "w1"], LAYERS)))
            if let_go is not None:
                let_go()  # requests of an abandoned epoch are ignored
            cluster.in_force = alone(4, ["w0", "w1"], LAYERS)
            tokens = await whole(cluster, answers)
            for worker in cluster.workers.values():
                assert all(p.phase in (Phase.DONE, Phase.FAILED) for p in worker.member.progress.values())
                assert worker.engine.memory.parameters.held_layers == tuple(range(LAYERS))
            await cluster.change(TransitionKind.DROP, layout(5, PAIR, LAYERS))
            return tokens

    assert asyncio.run(run()) == expected(100)


def _are_whole(cluster: Cluster, target: Layout) -> bool:
    """Whether all workers are whole. Repeats the prepare request, as a planner does."""
    cluster.ask_to_prepare(TransitionKind.RESTORE, target)
    said = [worker.progress(target.epoch) for worker in cluster.workers.values()]
    return all(progress is not None and progress.phase is Phase.DONE for progress in said)


def test_kv_waits_for_room_among_the_transfers_of_a_link(
    model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]]
) -> None:
    """No sequence may be forgotten if more sequences are exchanged than a link transfers at once."""
    narrow = replace(SLOW, transport=replace(SLOW.transport, max_transfers=1, rate_bytes_per_s=3e6))

    async def run() -> list[tuple[int, ...]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("services.worker.core.mover._TOGETHER", 1)
            async with running_group(model_dir, ["w0", "w1"], narrow) as cluster:
                answers = await ask(cluster, ["w0", "w1"])
                await tokens_flow(answers, 3)
                await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
                return await whole(cluster, answers)

    assert asyncio.run(run()) == expected(100)


def test_a_member_lost_during_the_exchange(model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]]) -> None:
    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0", "w1"], ROOMY) as cluster:
            answers = await ask(cluster, ["w0", "w1"])
            await tokens_flow(answers, 3)
            target = layout(2, PAIR, LAYERS)
            members = await cluster.prepare(TransitionKind.DROP, target)
            hold_exchange(cluster)
            cluster.commit(members, target)
            await cluster.until(members, target.epoch, Phase.EXCHANGING)
            kill(cluster, "w1", ["w0"])
            for worker in cluster.workers.values():
                await until(lambda w=worker: (p := w.progress(2)) is not None and p.phase is Phase.DONE)
                assert worker.engine.memory.parameters.held_layers == tuple(range(LAYERS))
            return await whole(cluster, answers)

    assert asyncio.run(run()) == expected(100)


def test_a_member_lost_before_the_commit(model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]]) -> None:
    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0", "w1"], ROOMY) as cluster:
            answers = await ask(cluster, ["w0", "w1"])
            await tokens_flow(answers, 3)
            members = await cluster.prepare(TransitionKind.DROP, layout(2, PAIR, LAYERS))
            kill(cluster, "w1", ["w0"])
            for worker in cluster.workers.values():
                await until(lambda w=worker: (p := w.progress(2)) is not None and p.phase is Phase.FAILED)
            await cluster.abort(members, layout(2, PAIR, LAYERS).epoch)
            assert all(a.attempts == 1 for a in answers)
            return await whole(cluster, answers)

    assert asyncio.run(run()) == expected(100)


def test_a_corrupted_layer_is_detected_and_loaded_from_elsewhere(
    model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]]
) -> None:
    """A parameter in w1's memory is corrupted; w0 still has the checksum of that layer, which it dropped."""

    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0", "w1"], ROOMY) as cluster:
            pristine = [cluster.workers["w0"].engine.memory.parameters.layer_checksum(i) for i in range(LAYERS)]
            await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
            bad = next(iter(cluster.workers["w1"].engine.memory.parameters.layer(3).values()))
            bad.view(torch.uint8).view(-1)[17] ^= 1
            said = await cluster.change(TransitionKind.RESTORE, alone(3, ["w0", "w1"], LAYERS))
            assert said["w0"].repulled_layers == 1
            parameters = cluster.workers["w0"].engine.memory.parameters
            assert [parameters.layer_checksum(i) for i in range(LAYERS)] == pristine
            return await whole(cluster, await ask(cluster, ["w0"]))

    assert asyncio.run(run()) == expected(100)


def test_a_restore_is_aborted_while_layers_arrive(
    model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]]
) -> None:
    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0", "w1"], CRAWLING) as cluster:
            await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
            blocks = {n: w.book.block_count for n, w in cluster.workers.items()}
            reports = {n: w.engine.memory_report() for n, w in cluster.workers.items()}
            answers = await ask(cluster, ["w0"])
            await tokens_flow(answers, 3)
            target = alone(3, ["w0", "w1"], LAYERS)
            members = cluster.ask_to_prepare(TransitionKind.RESTORE, target)
            await until(lambda: all(w.member._layer_loading._pull is not None for w in cluster.workers.values()))
            await cluster.abort(members, target.epoch)
            await until(lambda: blocks == {n: w.book.block_count for n, w in cluster.workers.items()})
            assert reports == {n: w.engine.memory_report() for n, w in cluster.workers.items()}
            tokens = await whole(cluster, answers)
            assert all(a.attempts == 1 for a in answers)
            await until(lambda: cluster.workers["w0"].core.load(0.0, reports["w0"]).block_count == min(blocks.values()))
            return tokens

    assert asyncio.run(run()) == expected(100)


def test_layers_are_read_from_the_checkpoint_when_no_peer_has_them(
    model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]]
) -> None:
    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0", "w1"], ROOMY) as cluster:
            await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
            answers = await ask(cluster, ["w0"])
            for worker in cluster.workers.values():
                worker.member._layer_loading.server.serve = lambda event, executed, w=worker: (
                    w.member._layer_loading.server.refuse(event.link, event.layer)
                )
            said = await cluster.change(TransitionKind.RESTORE, alone(3, ["w0", "w1"], LAYERS))
            assert all(p.parameter_bytes_pulled == p.parameter_bytes_to_pull for p in said.values())
            return await whole(cluster, answers)

    assert asyncio.run(run()) == expected(100)


@pytest.mark.rotating
@pytest.mark.parametrize("stage", ["w0", "w1", "w2"])
def test_a_batch_that_fails_on_a_stage_ends_only_its_requests(
    model_dir: Path, expected: Callable[[int], list[tuple[int, ...]]], stage: str
) -> None:
    """Earlier batches complete before the failed one, and later batches still apply the additions and removals of the
    failed one.
    """
    failed: list[Batch] = []

    async def run() -> list[tuple[int, ...]]:
        async with running_group(model_dir, ["w0", "w1", "w2"], replace(ROOMY, step_s=0.0)) as cluster:
            await cluster.change(TransitionKind.DROP, layout(2, [[("w0", 0, 2), ("w1", 2, 4), ("w2", 4, 6)]], LAYERS))
            middle = cluster.workers[stage].member._stage._engine
            inner = middle.run_stage

            def failing(batch: Batch, *tables: Any, **layers: Any) -> Any:
                if batch.removed and batch.slices and not failed:
                    failed.append(batch)
                    raise RuntimeError("for once")
                return inner(batch, *tables, **layers)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(middle, "run_stage", failing)
                short = await cluster.dispatcher.submit("w0", PROMPTS[0], sampling(5))
                unlucky = [await cluster.dispatcher.submit("w0", prompt, sampling(150)) for prompt in PROMPTS]
                for answer in (short, *unlucky):
                    await cluster.dispatcher.end(answer)
            assert failed
            assert any("for once" in answer.error for answer in unlucky)
            answers = await whole(cluster, await ask(cluster, ["w0"]))
            await cluster.quiet()
            for worker in cluster.workers.values():
                assert not set(failed[0].removed) & set(worker.book.sequence_ids), worker.name
            return answers

    assert asyncio.run(run()) == expected(100)

"""A restore of real workers under load: from the commit on, each worker serves alone while their pipeline finishes its
requests.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.common.sampling import FinishReason, Grammar, GrammarKind, SamplingParams
from ballast.common.transition import Phase, TransitionKind
from services.worker.core.transition_messages import AbortRequested
from services.worker.pipeline.events import Told
from tests.support.exactness import Expected, compare, undisturbed
from tests.support.group import Answer, Cluster, Sizes, alone, layout, running_group
from tests.support.shells import until
from tests.support.wishes import Wish
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.any_device

LAYERS, NAMES = 4, ["w0", "w1"]
PAIR = [[("w0", 0, 2), ("w1", 2, 4)]]
TRIPLE = [[("w0", 0, 1), ("w1", 1, 2), ("w2", 2, 4)]]
ROOMY = Sizes(memory_bytes=12 << 20, step_s=0.002)
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
SHORT = replace(LONG, max_tokens=5)
PROMPTS = [(3 + i, 9, 4 + 2 * i, 7) * 20 for i in range(6)]  # five full blocks each
WISHES = [Wish(prompt, LONG) for prompt in PROMPTS]
PATIENCE = "services.worker.policy.leaving.LEAVES_WITHIN_S"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS, max_len=1024)


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[Expected]:
    return asyncio.run(undisturbed(model_dir, WISHES))


async def ask(cluster: Cluster, wishes: Sequence[Wish] = WISHES, name: str = "w0") -> list[Answer]:
    return [await cluster.dispatcher.submit(name, wish.prompt, wish.sampling) for wish in wishes]


async def tokens_flow(answers: Sequence[Answer], count: int = 5) -> None:
    await until(lambda: all(len(answer.token_ids) >= count for answer in answers))


async def are_exact(cluster: Cluster, answers: Sequence[Answer], expected: Sequence[Expected]) -> None:
    for answer, one in zip(answers, expected, strict=True):
        await cluster.dispatcher.end(answer)
        assert compare(one, answer)


async def withdraw(cluster: Cluster, answers: Sequence[Answer]) -> None:
    for answer in answers:
        await cluster.dispatcher.cancel(answer)
    for answer in answers:
        await cluster.dispatcher.end(answer)


async def serves(cluster: Cluster, name: str, expected: Expected) -> None:
    answer = await cluster.dispatcher.submit(name, PROMPTS[0], SHORT)
    await cluster.dispatcher.end(answer)
    assert tuple(answer.token_ids) == expected.token_ids[: SHORT.max_tokens]
    assert answer.attempts == 1


def dissolves(cluster: Cluster, name: str) -> bool:
    return cluster.workers[name].member._driver.leaving is not None


def cut(cluster: Cluster, name: str) -> None:
    """Breaks the worker's links, one after another."""
    for peer, connection in list(cluster.workers[name].membership.plane._connections.items()):
        connection.give_up(f"the test has cut it from {peer}")


def is_whole(cluster: Cluster, name: str) -> bool:
    """Whether the worker's transition is done, its blocks are those of a lone worker, and none of its groups is
    dissolving.
    """
    progress, worker = cluster.workers[name].progress(cluster.in_force.epoch), cluster.workers[name]
    at_home = worker.book.block_count == worker.engine.memory.home_block_count
    return progress is not None and progress.phase is Phase.DONE and at_home and not dissolves(cluster, name)


def block_counts(cluster: Cluster) -> dict[str, int]:
    return {name: worker.book.block_count for name, worker in cluster.workers.items()}


def are_at_home(cluster: Cluster) -> bool:
    memories = {name: worker.engine.memory for name, worker in cluster.workers.items()}
    return block_counts(cluster) == {name: memory.home_block_count for name, memory in memories.items()}


async def test_a_pipeline_runs_alongside_its_members_until_its_last_answer_ends(
    model_dir: Path, expected: list[Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PATIENCE, 600.0)
    monkeypatch.setattr("services.worker.policy.leaving._AHEAD_TOKENS", 640)  # none outgrows the pipeline's memory
    async with running_group(model_dir, NAMES, ROOMY) as cluster:
        home = block_counts(cluster)
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        answers = await ask(cluster)
        await tokens_flow(answers)
        target = alone(3, NAMES, LAYERS)
        members = await cluster.prepare(TransitionKind.RESTORE, target)
        cluster.commit(members, target)
        await cluster.until(members, target.epoch, Phase.EXCHANGING)
        for name in NAMES:
            await serves(cluster, name, expected[0])
        assert all(dissolves(cluster, name) for name in NAMES)
        assert all(answer.finish_reason is None for answer in answers)
        await are_exact(cluster, answers, expected)
        assert all(answer.attempts == 1 for answer in answers)
        done = await cluster.done(members, target.epoch)
        assert sum(progress.victims_recomputed + progress.kv_bytes_sent for progress in done.values()) == 0
        assert done["w0"].victim_count == len(PROMPTS)
        assert not any(dissolves(cluster, name) for name in NAMES)
        assert block_counts(cluster) == home == {name: done[name].block_count_after for name in NAMES}
        assert are_at_home(cluster)
        await cluster.quiet()


async def test_a_pipeline_gives_its_memory_back_while_its_answers_end(
    model_dir: Path, expected: list[Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that blocks beyond the shrunken range are moved on every stage, and that no token changes."""
    monkeypatch.setattr(PATIENCE, 600.0)
    monkeypatch.setattr("services.worker.policy.leaving.STEPS", 500)
    monkeypatch.setattr("services.worker.policy.leaving._AHEAD_TOKENS", 320)
    async with running_group(model_dir, NAMES, ROOMY) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        answers = await ask(cluster)
        await tokens_flow(answers, 40)
        moves = {name: watch_moves(cluster, name) for name in NAMES}
        target = alone(3, NAMES, LAYERS)
        members = await cluster.prepare(TransitionKind.RESTORE, target)
        cluster.commit(members, target)
        await cluster.until(members, target.epoch, Phase.EXCHANGING)
        before = block_counts(cluster)
        await withdraw(cluster, answers[:-1])
        await until(lambda: all(block_counts(cluster)[name] > before[name] for name in NAMES))
        await until(lambda: all(moves[name] for name in NAMES))
        assert all(dissolves(cluster, name) for name in NAMES)
        assert answers[-1].attempts == 1
        await are_exact(cluster, answers[-1:], expected[-1:])
        await cluster.done(members, target.epoch)
        assert are_at_home(cluster)
        await cluster.quiet()


def watch_moves(cluster: Cluster, name: str) -> list[tuple[int, int]]:
    """Records the block moves in the KV of the dissolving group, as (from, to) pairs."""
    memory, found = cluster.workers[name].engine.memory, list[tuple[int, int]]()
    move = memory.move_leaving

    def watched(moves: Sequence[tuple[int, int]]) -> None:
        found.extend(moves)
        move(moves)

    memory.move_leaving = watched
    return found


@pytest.mark.host_extents
async def test_a_sequence_that_outgrows_the_pipeline_continues_on_a_member(
    model_dir: Path, expected: list[Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline releases memory while it runs. A sequence that needs more than the remaining memory moves to a
    member.
    """
    monkeypatch.setattr(PATIENCE, 600.0)
    monkeypatch.setattr("services.worker.policy.leaving._AHEAD_TOKENS", 16)
    async with running_group(model_dir, NAMES, ROOMY) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        answers = await ask(cluster)
        await tokens_flow(answers)
        done = await cluster.change(TransitionKind.RESTORE, alone(3, NAMES, LAYERS))
        assert 0 < done["w0"].victims_recomputed < len(PROMPTS)
        await are_exact(cluster, answers, expected)
        await cluster.quiet()


async def test_requests_waiting_for_the_pipeline_run_on_its_members_at_once(
    model_dir: Path, expected: list[Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PATIENCE, 600.0)
    async with running_group(model_dir, NAMES, replace(ROOMY, max_running_count=2)) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        answers = await ask(cluster)
        in_both_stages, waiting = answers[:4], answers[4:]
        await tokens_flow(in_both_stages)
        target = alone(3, NAMES, LAYERS)
        members = await cluster.prepare(TransitionKind.RESTORE, target)
        assert not any(answer.token_ids for answer in waiting)
        cluster.commit(members, target)
        await tokens_flow(waiting)
        assert all(answer.finish_reason is None for answer in in_both_stages)
        assert all(dissolves(cluster, name) for name in NAMES)
        assert {answer.place[0] for answer in waiting if answer.place} == set(NAMES)
        await are_exact(cluster, answers, expected)
        await cluster.done(members, target.epoch)
        await cluster.quiet()


async def test_long_running_requests_move_to_the_members_with_their_kv(
    model_dir: Path, expected: list[Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PATIENCE, 0.05)
    async with running_group(model_dir, NAMES, ROOMY) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        answers = await ask(cluster)
        await tokens_flow(answers)
        done = await cluster.change(TransitionKind.RESTORE, alone(3, NAMES, LAYERS))
        assert sum(progress.victims_recomputed for progress in done.values()) == 0
        sent, received = zip(*[(p.kv_bytes_sent, p.kv_bytes_received) for p in done.values()], strict=True)
        assert sum(sent) == sum(received)
        assert min(sent) > 0, "each stage has layers that the others lack"
        assert are_at_home(cluster)
        await are_exact(cluster, answers, expected)
        assert {answer.attempts for answer in answers} == {1, 2}
        assert any("moved to w1" in answer.story for answer in answers)
        await cluster.quiet()


@pytest.mark.rotating(2)
@pytest.mark.parametrize("by_tokens", [False, True])
async def test_a_move_changes_no_sampled_token_and_no_text(
    by_tokens: bool, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds, penalties, logprobs, stop strings and grammars continue after a move of the KV, or after a replay of the
    tokens if a member is lost.
    """
    monkeypatch.setattr(PATIENCE, 600.0 if by_tokens else 0.0)
    names = ["w0", "w1", "w2"]
    drawn = SamplingParams(temperature=0.9, max_tokens=300, ignore_eos=True)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": [letter * 400 for letter in "ab"]}))
    wishes = [
        Wish(prompt, sampling)
        for prompt, sampling in zip(
            PROMPTS,
            [
                replace(drawn, seed=1),
                replace(drawn, seed=2, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
                replace(drawn, seed=3, logprobs=3, top_k=20),
                replace(drawn, seed=4, stop=("no model of this size says that",)),
                replace(drawn, seed=5, grammar=grammar, ignore_eos=False),
                replace(drawn, seed=6, grammar=grammar, ignore_eos=False, logprobs=1),
            ],
            strict=True,
        )
    ]
    expected = await undisturbed(model_dir, wishes)
    assert min(len(one.token_ids) for one in expected) >= 100
    async with running_group(model_dir, names, ROOMY) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, TRIPLE, LAYERS))
        target = alone(3, names, LAYERS)
        members = await cluster.prepare(TransitionKind.RESTORE, target)
        answers = await ask(cluster, wishes)
        await tokens_flow(answers)
        cluster.commit(members, target)
        if by_tokens:
            await cluster.until(members, target.epoch, Phase.EXCHANGING)
            cut(cluster, "w2")
        done = await cluster.done(members[:2], target.epoch)
        assert done["w0"].victims_recomputed == (len(wishes) if by_tokens else 0)
        await are_exact(cluster, answers, expected)
        assert any("moved to w1" in answer.story for answer in answers)
        await cluster.quiet()


@pytest.mark.rotating
@pytest.mark.parametrize("lost", ["w0", "w1", "w2"])
async def test_losing_a_member_while_the_pipeline_dissolves_loses_no_request(
    lost: str, model_dir: Path, expected: list[Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loses the leader, the middle or the last member: when its links break, the leader moves every request by
    replaying its tokens.
    """
    monkeypatch.setattr(PATIENCE, 600.0)
    names = ["w0", "w1", "w2"]
    async with running_group(model_dir, names, ROOMY) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, TRIPLE, LAYERS))
        answers = await ask(cluster)
        await tokens_flow(answers)
        target = alone(3, names, LAYERS)
        members = await cluster.prepare(TransitionKind.RESTORE, target)
        cluster.commit(members, target)
        await cluster.until(members, target.epoch, Phase.EXCHANGING)
        await cluster.goes_on(answers)
        cut(cluster, lost)
        survivors = [name for name in members if name != lost]
        done = await cluster.done(survivors, target.epoch)
        if lost != "w0":
            assert done["w0"].victims_recomputed == len(PROMPTS)
        await are_exact(cluster, answers, expected)
        await until(lambda: all(is_whole(cluster, name) for name in names))
        for name in names:
            await serves(cluster, name, expected[0])
        await cluster.quiet()
        for worker in cluster.workers.values():
            assert not worker.engine.runner.sequence_ids
            worker.member.check()
            worker.engine.check()


async def test_an_aborted_restore_returns_the_pipelines_blocks(model_dir: Path, expected: list[Expected]) -> None:
    async with running_group(model_dir, NAMES, ROOMY) as cluster:
        home = block_counts(cluster)
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        dropped = block_counts(cluster)
        answers = await ask(cluster)
        await tokens_flow(answers)
        members = await cluster.prepare(TransitionKind.RESTORE, alone(3, NAMES, LAYERS))
        assert all(count < dropped[name] for name, count in block_counts(cluster).items())
        await cluster.abort(members, alone(3, NAMES, LAYERS).epoch)
        await until(lambda: block_counts(cluster) == dropped)
        await until(lambda: cluster.workers["w0"].shell.load().block_count == min(dropped.values()))
        await cluster.goes_on(answers)
        await cluster.change(TransitionKind.RESTORE, alone(4, NAMES, LAYERS))
        assert block_counts(cluster) == home
        await are_exact(cluster, answers, expected)
        await cluster.quiet()


async def test_all_members_know_whether_requests_wait(model_dir: Path) -> None:
    """Members must know, since they send the parameters of a restore faster while requests wait."""

    async with running_group(model_dir, NAMES, replace(ROOMY, max_running_count=2)) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        paces = [worker.membership.plane.pace for worker in cluster.workers.values()]
        assert not any(pace.memory_is_awaited for pace in paces)
        answers = await ask(cluster)
        await until(lambda: all(pace.memory_is_awaited for pace in paces))
        await withdraw(cluster, answers[1:])
        await until(lambda: not any(pace.memory_is_awaited for pace in paces))
        await withdraw(cluster, answers[:1])
        await cluster.quiet()


@pytest.mark.rotating
async def test_a_drop_right_after_a_restore_loses_no_request(model_dir: Path, expected: list[Expected]) -> None:
    """Requests that begin in the pipeline, alongside it or after it end as they would on an undisturbed worker."""
    async with running_group(model_dir, NAMES, ROOMY) as cluster:
        answers = list[Answer]()
        for epoch in (2, 4):
            answers += await ask(cluster, WISHES[:3])
            await cluster.change(TransitionKind.DROP, layout(epoch, PAIR, LAYERS))
            answers += await ask(cluster, WISHES[3:])
            target = alone(epoch + 1, NAMES, LAYERS)
            members = await cluster.prepare(TransitionKind.RESTORE, target)
            cluster.commit(members, target)
            answers += await ask(cluster, WISHES[:2], "w1")
            await cluster.done(members, target.epoch)
        for answer in answers:
            await cluster.dispatcher.end(answer)
            assert answer.finish_reason is FinishReason.LENGTH
            assert compare(expected[PROMPTS.index(answer.prompt)], answer)
        await cluster.quiet()


async def test_an_abort_after_the_commit_ends_the_pipeline_at_once(
    model_dir: Path, expected: list[Expected], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PATIENCE, 60.0)
    async with running_group(model_dir, NAMES, replace(ROOMY, step_s=0.01)) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        answers = await ask(cluster)
        await tokens_flow(answers)
        target = alone(3, NAMES, LAYERS)
        members = await cluster.prepare(TransitionKind.RESTORE, target)
        cluster.commit(members, target)
        await cluster.until(members, target.epoch, Phase.EXCHANGING)
        for name in members:
            cluster.post(name, Told(target.epoch, AbortRequested(time.monotonic(), target.epoch, "demand is back")))
        await cluster.done(members, target.epoch)
        assert any("moved to" in answer.story for answer in answers), "all ended before they could move"
        await are_exact(cluster, answers, expected)
        await cluster.change(TransitionKind.DROP, layout(4, PAIR, LAYERS))
        await cluster.quiet()


@pytest.mark.host_extents
async def test_a_member_with_room_for_a_single_extent_is_restored(model_dir: Path) -> None:
    """Without room for two groups, the pipeline releases all of its memory, and its running requests are recomputed."""
    wishes = [Wish((3 + i, 9, 4, 7), replace(LONG, max_tokens=20)) for i in range(3)]
    expected = await undisturbed(model_dir, wishes)
    async with running_group(model_dir, NAMES, Sizes(memory_bytes=2_115_000, step_s=0.04)) as cluster:
        memory = cluster.workers["w0"].engine.memory
        assert memory.kv.extents_per_layer == 1
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        assert memory.leaving_block_count == 0
        answers = await ask(cluster, wishes)
        await tokens_flow(answers, 2)
        done = await cluster.change(TransitionKind.RESTORE, alone(3, NAMES, LAYERS))
        assert done["w0"].victims_recomputed > 0
        assert are_at_home(cluster)
        await are_exact(cluster, answers, expected)
        await cluster.quiet()

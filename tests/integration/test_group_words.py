"""Messages between members of a group may arrive late, out of order, at any length, or never."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.sampling import Grammar, GrammarKind, SamplingParams
from ballast.common.transition import Phase, TransitionKind
from ballast.service.grammar import Grammars
from ballastpb.worker.v1 import worker_pb2 as pb
from services.worker.core.room import RoomSizes
from services.worker.core.transition_messages import AbortRequested
from services.worker.links.connection import Link
from services.worker.links.ports import Message
from services.worker.pipeline.events import CapacityTold, GrammarAnnounced, Told
from services.worker.pipeline.planner_side import Transitions
from services.worker.pipeline.wire import Topic
from tests.support.group import Answer, Cluster, GroupWorker, Sizes, alone, layout, running_group
from tests.support.shells import until
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.any_device

LAYERS = 6
PAIR = [[("w0", 0, 3), ("w1", 3, 6)]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS, max_len=2048)


def greedy(tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs)


async def ask(cluster: Cluster, leader: str, lengths: list[int], sampling: SamplingParams) -> list[Answer]:
    prompts = [tuple((7 * i + 3 * j) % 490 + 5 for j in range(length)) for i, length in enumerate(lengths)]
    return [await cluster.dispatcher.submit(leader, prompt, sampling) for prompt in prompts]


async def whole(cluster: Cluster, answers: list[Answer]) -> list[tuple[int, ...]]:
    for answer in answers:
        await cluster.dispatcher.end(answer)
    assert not [a.error for a in answers if a.error]
    return [tuple(a.token_ids) for a in answers]


async def alone_says(
    model_dir: Path, sizes: Sizes, lengths: list[int], sampling: SamplingParams
) -> list[tuple[tuple[int, ...], int]]:
    async with running_group(model_dir, ["w0"], sizes) as cluster:
        answers = await ask(cluster, "w0", lengths, sampling)
        return list(zip(await whole(cluster, answers), [len(a.logprobs) for a in answers], strict=True))


def blocks_of(worker: GroupWorker) -> int:
    """The number of KV blocks that this leader reports."""
    return worker.shell.load().block_count


async def test_a_stale_capacity_is_ignored_after_an_aborted_restore(model_dir: Path) -> None:
    """A stage's old capacity reaches the leader late, and the leader aborts the restore before the stage learns of
    it.
    """

    sizes = Sizes(memory_bytes=10 << 19)
    async with running_group(model_dir, ["w0", "w1"], sizes, w1=Sizes(memory_bytes=9 << 19)) as cluster:
        w0, w1 = cluster.workers["w0"], cluster.workers["w1"]
        _hold_back(w1, Topic.ROOM_WITHDRAWN, lambda: False, 0.5)
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        before = w1.book.block_count
        assert before < w0.book.block_count
        await cluster.prepare(TransitionKind.RESTORE, alone(3, ["w0", "w1"], LAYERS))
        home = w1.book.block_count
        assert blocks_of(w0) == home < before
        cluster.post("w0", CapacityTold(Epoch(2), WorkerId("w1"), before, RoomSizes(home, home), Epoch(0)))
        cluster.post("w0", Told(Epoch(3), AbortRequested(time.monotonic(), Epoch(3), "test")))
        most = home
        while w1.book.block_count == home or blocks_of(w0) != before:
            counted_on = blocks_of(w0)
            most = max(most, counted_on if w1.book.block_count == home else 0)  # if w1 has not changed since
            await asyncio.sleep(0.001)
        assert most == home
        assert (p := w1.progress(3)) is not None
        assert (p.phase, p.why) == (Phase.FAILED, "the leader has withdrawn it")
        assert w1.engine.memory.parameters.held_layers == (3, 4, 5)


async def test_a_batch_that_overtakes_the_roster_waits_for_it(model_dir: Path) -> None:
    """The roster comes from the leader and batches come from the previous stage, so a batch may overtake the roster. It
    may contain sequences that the roster resets.
    """
    lengths = [150, 130, 110, 90, 70, 50, 30, 10]
    sizes = Sizes(memory_bytes=9 << 19, max_batch_tokens=256)
    expected = await alone_says(model_dir, Sizes(memory_bytes=16 << 20, max_batch_tokens=256), lengths, greedy(60))

    async with running_group(model_dir, ["w0", "w1", "w2"], sizes) as cluster:
        w2 = cluster.workers["w2"]
        overtaken = _hold_back(w2, Topic.ROSTER, lambda: bool(w2.member._stage._early), 60.0)
        groups = [await ask(cluster, name, lengths, greedy(60)) for name in ("w0", "w1", "w2")]
        await until(lambda: all(len(a.token_ids) > 3 for a in groups[0]))
        target = layout(2, [[("w0", 0, 2), ("w1", 2, 4), ("w2", 4, 6)]], LAYERS)
        members = await cluster.prepare(TransitionKind.DROP, target)
        cluster.commit(members, target)
        await cluster.until(members, target.epoch, Phase.EXCHANGING)
        groups.append(await ask(cluster, "w0", lengths, greedy(60)))  # these run while KV is transferred
        said = await cluster.done(members, target.epoch)
        assert said["w0"].victim_count
        assert overtaken == [True]
        for answers in groups:
            assert await whole(cluster, answers) == [e[0] for e in expected]


def _hold_back(worker: GroupWorker, topic: Topic, until_: Callable[[], bool], within_s: float) -> list[bool]:
    """Delays messages of `topic`, on links opened from now on, until `until_()` is true or for `within_s` seconds.
    Returns a list with the value of `until_()` at each delivery.
    """
    hub, came = worker.member._hub, list[bool]()
    deliver: Callable[[Link, Message], None] = hub.on_message

    def late(link: Link, message: Message) -> None:
        if message.topic == topic:
            give_up_at_s = time.monotonic() + within_s
            while not until_() and time.monotonic() < give_up_at_s:
                time.sleep(0.01)
            came.append(until_())
        deliver(link, message)

    hub.on_message = late
    return came


async def test_long_prompts_and_many_logprobs_reach_every_stage(model_dir: Path) -> None:
    """The header of a batch, and also a result, are too large to be inlined in one message."""
    sizes = Sizes(memory_bytes=24 << 20, max_batch_tokens=1 << 14)
    lengths, sampling = [1900 + i for i in range(12)], greedy(4, logprobs=20)
    expected = await alone_says(model_dir, sizes, lengths, sampling)

    async with running_group(model_dir, ["w0", "w1"], sizes) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        answers = await ask(cluster, "w0", lengths, sampling)
        tokens = await whole(cluster, answers)
        assert list(zip(tokens, [len(a.logprobs) for a in answers], strict=True)) == expected


async def test_a_grammar_is_compiled_before_its_request_is_admitted(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader announces a grammar when its request arrives, before admitting it, since compiling may take long."""
    values = [f"{i:04} " + "x" * 30 for i in range(2000)]
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"enum": values}))
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=60, grammar=grammar)
    compiled: list[tuple[Grammars, str]] = []
    compile_it = Grammars._compiled

    def seen(grammars: Grammars, grammar: Grammar) -> object:
        compiled.append((grammars, threading.current_thread().name))
        return compile_it(grammars, grammar)

    expected = await alone_says(model_dir, Sizes(), [20], sampling)
    monkeypatch.setattr(Grammars, "_compiled", seen)
    async with running_group(model_dir, ["w0", "w1", "w2"], Sizes()) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, [[("w0", 0, 2), ("w1", 2, 4), ("w2", 4, 6)]], LAYERS))
        for _ in range(3):
            cluster.workers["w0"].shell.post_member(GrammarAnnounced(grammar))
        await until(lambda: bool(compiled))
        answers = await ask(cluster, "w0", [20], sampling)
        tokens = await whole(cluster, answers)
        assert list(zip(tokens, [len(a.logprobs) for a in answers], strict=True)) == expected
        last = cluster.workers["w2"].engine.grammars
    [(where, thread)] = compiled
    assert where is last
    assert thread.startswith("grammars")


async def test_a_member_that_closes_its_links_cleanly_is_lost_to_the_group(model_dir: Path) -> None:
    """A member closes its links if its engine fails or if it has to stop. The others must not wait for it forever."""

    async with running_group(model_dir, ["w0", "w1", "w2"], Sizes(memory_bytes=10 << 19)) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, [[("w0", 0, 2), ("w1", 2, 4), ("w2", 4, 6)]], LAYERS))
        answers = await ask(cluster, "w0", [30] * 4, greedy(100))
        await until(lambda: all(len(a.token_ids) > 3 for a in answers))
        cluster.workers["w1"].membership.plane.retire(3)
        for name in ("w0", "w2"):
            worker = cluster.workers[name]
            await until(lambda w=worker: (p := w.progress(2)) is not None and p.phase is Phase.DONE and bool(p.why))
            assert worker.engine.memory.parameters.held_layers == tuple(range(LAYERS))
        await whole(cluster, answers)


@pytest.mark.parametrize("forgotten", [TransitionKind.DROP, TransitionKind.RESTORE])
async def test_a_newer_plan_rolls_back_an_undecided_one(model_dir: Path, forgotten: TransitionKind) -> None:
    """A planner that has lost its journal plans again without aborting the transition that members have prepared."""
    expected = await alone_says(model_dir, Sizes(memory_bytes=16 << 20), [30] * 4, greedy(120))

    async with running_group(model_dir, ["w0", "w1"], Sizes(memory_bytes=10 << 19)) as cluster:
        answers = await ask(cluster, "w0", [30] * 4, greedy(120))
        if forgotten is TransitionKind.RESTORE:
            await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
            targets = [alone(3, ["w0", "w1"], LAYERS), alone(4, ["w0", "w1"], LAYERS)]
        else:
            targets = [layout(3, PAIR, LAYERS), layout(4, [[("w1", 0, 2), ("w0", 2, 6)]], LAYERS)]
        blocks = {name: worker.book.block_count for name, worker in cluster.workers.items()}
        members = await cluster.prepare(forgotten, targets[0])
        cluster.ask_to_prepare(forgotten, targets[1])
        await cluster.until(members, targets[0].epoch, Phase.ABORTED)
        await cluster.change(forgotten, targets[1])
        assert blocks != {name: worker.book.block_count for name, worker in cluster.workers.items()}
        assert await whole(cluster, answers) == [e[0] for e in expected]


async def test_a_plan_with_wrong_members_is_refused(model_dir: Path) -> None:
    """A planner that has lost the layout believes that every worker serves alone."""

    async with running_group(model_dir, ["w0", "w1"], Sizes(memory_bytes=10 << 19)) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        cluster.in_force = alone(1, ["w0", "w1"], LAYERS)
        cluster.ask_to_prepare(TransitionKind.DROP, layout(3, [[("w1", 0, 3), ("w0", 3, 6)]], LAYERS))
        for worker in cluster.workers.values():
            await until(lambda w=worker: (p := w.progress(3)) is not None and p.phase is Phase.FAILED)
            assert (p := worker.progress(3)) is not None
            assert "but the plan assumes" in p.why


@pytest.mark.host_extents
async def test_a_request_that_outgrows_a_member_keeps_its_group(model_dir: Path) -> None:
    """The request fits a member when the restore begins, but no longer at the commit: it must not end with an error."""
    sizes, sampling = Sizes(memory_bytes=9 << 19, step_s=0.006), greedy(150)

    async with running_group(model_dir, ["w0", "w1"], sizes) as cluster:
        home_tokens = cluster.workers["w0"].engine.block_tokens * cluster.workers["w0"].book.block_count
        lengths = [home_tokens - 60, 30]
        expected = await alone_says(model_dir, Sizes(memory_bytes=16 << 20), lengths, sampling)
        await cluster.change(TransitionKind.DROP, layout(2, PAIR, LAYERS))
        answers = await ask(cluster, "w0", lengths, sampling)
        await until(lambda: len(answers[0].token_ids) > 3)
        members = await cluster.prepare(TransitionKind.RESTORE, alone(3, ["w0", "w1"], LAYERS))
        w0 = cluster.workers["w0"]
        await until(lambda: (p := w0.progress(3)) is not None and p.phase is Phase.FAILED)
        assert (p := w0.progress(3)) is not None
        assert "without its group" in p.why
        await cluster.abort(members, Epoch(3))
        assert await whole(cluster, answers) == [e[0] for e in expected]


async def test_a_forgotten_plan_is_rolled_back(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All planners and the state server lose their data, and the new planner starts no transition."""
    expected = await alone_says(model_dir, Sizes(memory_bytes=16 << 20), [30] * 4, greedy(60))

    async with running_group(model_dir, ["w0", "w1"], Sizes(memory_bytes=10 << 19)) as cluster:
        await cluster.prepare(TransitionKind.DROP, layout(5, PAIR, LAYERS))
        told = [Transitions(w.member, Incarnation(1), w.shell.post_member) for w in cluster.workers.values()]

        async def phases_after(settled_epoch: int) -> set[int]:
            for one in told:
                one.name_partners(pb.NamePartnersRequest(settled_epoch=settled_epoch))
            await asyncio.sleep(0.2)
            return {one.status(5).phase for one in told}

        monkeypatch.setattr("services.worker.pipeline.planner_side._SILENCE_S", 0.0)
        assert await phases_after(4) == {pb.TRANSITION_PHASE_PREPARED}, "the epoch may still be decided"
        monkeypatch.setattr("services.worker.pipeline.planner_side._SILENCE_S", 60.0)
        assert await phases_after(9) == {pb.TRANSITION_PHASE_PREPARED}, "its planner has called recently"
        monkeypatch.setattr("services.worker.pipeline.planner_side._SILENCE_S", 0.0)
        for one in told:
            one.name_partners(pb.NamePartnersRequest(settled_epoch=5))
        await until(lambda: {one.status(5).phase for one in told} == {pb.TRANSITION_PHASE_ABORTED})
        await cluster.change(TransitionKind.DROP, layout(6, PAIR, LAYERS))
        answers = await ask(cluster, "w0", [30] * 4, greedy(60))
        tokens = await whole(cluster, answers)
        assert list(zip(tokens, [len(a.logprobs) for a in answers], strict=True)) == expected

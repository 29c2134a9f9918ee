"""A restore of real workers under load: what is copied ahead does not travel again, and only a rest is left to do."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.common.sampling import FinishReason, SamplingParams
from ballast.common.transition import TransitionKind
from ballast.model.tiny import make_tiny
from services.worker.core.precopy import WORTH_BLOCKS
from services.worker.core.room import Room
from services.worker.pipeline.answers import Answer
from services.worker.pipeline.events import KvAheadAsked, RoomGranted
from services.worker.shell import MemberEvent
from tests.support.group import Sizes, alone, layout, running_group
from tests.support.shells import until

LAYERS, NAMES = 4, ["w0", "w1"]
ROOMY = Sizes(memory_bytes=12 << 20, step_s=0.002)
PROMPTS = [[3 + i, 9, 4 + 2 * i, 7] * 20 for i in range(6)]  # five whole blocks each


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS, max_len=1024)


async def test_only_the_rest_of_the_last_blocks_travels_at_the_commit(model_dir: Path) -> None:
    async with running_group(model_dir, NAMES, ROOMY) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, [[("w0", 0, 2), ("w1", 2, 4)]], LAYERS))
        sampling = SamplingParams(temperature=0.0, max_tokens=800, ignore_eos=True)
        answers = [await cluster.dispatcher.submit("w0", prompt, sampling) for prompt in PROMPTS]
        await until(lambda: all(len(answer.token_ids) >= 20 for answer in answers))
        done = await cluster.change(TransitionKind.RESTORE, alone(3, NAMES, LAYERS))
        kv = cluster.workers["w0"].engine.memory.kv
        rest_bytes = len(PROMPTS) * (LAYERS // 2) * kv.shape.block_bytes * (WORTH_BLOCKS + 1)  # it grew meanwhile
        sent = sum(progress.kv_bytes_sent for progress in done.values())
        assert sent == sum(progress.kv_bytes_received for progress in done.values())
        assert 0 < sent <= rest_bytes
        assert sent == sum(progress.kv_bytes_to_send for progress in done.values())
        ahead = sum(progress.kv_bytes_copied_ahead for progress in done.values())
        assert ahead >= len(PROMPTS) * (LAYERS // 2) * kv.shape.block_bytes * 5
        assert sum(progress.victims_copied_ahead for progress in done.values()) == len(PROMPTS)
        for progress in done.values():
            assert len(progress.stalls_s) == progress.victim_count
            assert 0.0 < progress.p99_stall_s <= progress.max_stall_s
        spans = cluster.workers["w0"].member.published.clock.spans()
        steps = [span for span in spans if span.kind == "run" and span.epoch == 2 and span.token_count]
        assert steps[-1].token_count == len(PROMPTS)  # no sequence waits for a batch that it is not in
        assert sorted(w.book.used_count > 0 for w in cluster.workers.values()) == [True, True]
        for answer in answers:
            await cluster.dispatcher.cancel(answer)
        for answer in answers:
            await cluster.dispatcher.end(answer)
        await cluster.quiet()


async def test_a_restore_that_is_given_up_forgets_what_was_copied(model_dir: Path) -> None:
    async with running_group(model_dir, NAMES, ROOMY) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, [[("w0", 0, 2), ("w1", 2, 4)]], LAYERS))
        sampling = SamplingParams(temperature=0.0, max_tokens=800, ignore_eos=True)
        answers = [await cluster.dispatcher.submit("w0", prompt, sampling) for prompt in PROMPTS]
        await until(lambda: all(len(answer.token_ids) >= 20 for answer in answers))
        members = await cluster.prepare(TransitionKind.RESTORE, alone(3, NAMES, LAYERS))
        told = [cluster.workers[name].progress(3) for name in members]
        assert sum(progress.kv_bytes_copied_ahead for progress in told if progress) > 0
        await cluster.abort(members, alone(3, NAMES, LAYERS).epoch)
        await cluster.goes_on(answers)
        await until(lambda: all(w.engine.memory.kv.held_layers != (0, 1, 2, 3) for w in cluster.workers.values()))
        done = await cluster.change(TransitionKind.RESTORE, alone(4, NAMES, LAYERS))
        assert sum(progress.victims_copied_ahead for progress in done.values()) == len(PROMPTS)
        for answer in answers:
            await cluster.dispatcher.cancel(answer)
        for answer in answers:
            await cluster.dispatcher.end(answer)
        await cluster.quiet()


async def test_nothing_is_copied_from_a_member_whose_blocks_are_still_to_move(model_dir: Path) -> None:
    """One that has not heard yet that it may make room, while the leader has made its own and asks for KV. Its blocks
    move and the last of them are unmapped then: reading them in the meantime would end the process.
    """
    names = ["w0", "w1", "w2"]
    pipeline = [[("w0", 0, 1), ("w1", 1, 2), ("w2", 2, 4)]]

    async with running_group(model_dir, names, ROOMY) as cluster:
        sampling = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        undisturbed = [await cluster.dispatcher.submit("w0", prompt, sampling) for prompt in PROMPTS]
        for answer in undisturbed:
            await cluster.dispatcher.end(answer)
        await cluster.change(TransitionKind.DROP, layout(2, pipeline, LAYERS))
        answers = [await cluster.dispatcher.submit("w0", prompt, sampling) for prompt in PROMPTS]
        await until(lambda: all(len(answer.token_ids) >= 20 for answer in answers))
        late = cluster.workers["w1"]
        handle = late.member.handle
        granted: list[RoomGranted] = []
        asked: list[KvAheadAsked] = []

        def listening(event: MemberEvent) -> list[Answer]:
            if isinstance(event, RoomGranted) and event.room is Room.KV and not granted:
                granted.append(event)
                return []
            if isinstance(event, KvAheadAsked):
                asked.append(event)
            return handle(event)

        late.member.handle = listening
        target = alone(3, names, LAYERS)
        members = cluster.ask_to_prepare(TransitionKind.RESTORE, target)
        await until(lambda: bool(granted and asked))
        await asyncio.sleep(0.2)
        precopy = late.member._restoring.precopy
        assert precopy is not None
        assert not late.member._homecoming.maps_kv
        assert not precopy._transfers
        cluster.post("w1", granted[0])
        await cluster.prepare(TransitionKind.RESTORE, target)
        assert precopy._transfers
        cluster.commit(members, target)
        await cluster.done(members, target.epoch)
        for answer, other in zip(answers, undisturbed, strict=True):
            await cluster.dispatcher.end(answer)
            assert answer.finish_reason is FinishReason.LENGTH
            assert answer.token_ids == other.token_ids
        await cluster.quiet()


async def test_all_members_know_whether_requests_wait(model_dir: Path) -> None:
    """The layers of a restore hurry while they do."""

    async with running_group(model_dir, NAMES, replace(ROOMY, max_running_count=2)) as cluster:
        await cluster.change(TransitionKind.DROP, layout(2, [[("w0", 0, 2), ("w1", 2, 4)]], LAYERS))
        paces = [worker.membership.plane.pace for worker in cluster.workers.values()]
        assert not any(pace.memory_is_awaited for pace in paces)
        sampling = SamplingParams(temperature=0.0, max_tokens=800, ignore_eos=True)
        answers = [await cluster.dispatcher.submit("w0", prompt, sampling) for prompt in PROMPTS]
        await until(lambda: all(pace.memory_is_awaited for pace in paces))
        for answer in answers[1:]:
            await cluster.dispatcher.cancel(answer)
        await until(lambda: not any(pace.memory_is_awaited for pace in paces))
        await cluster.dispatcher.cancel(answers[0])
        for answer in answers:
            await cluster.dispatcher.end(answer)
        await cluster.quiet()


async def test_a_patient_restore_has_its_layers_early_and_makes_room_for_kv_when_there_is_some(model_dir: Path) -> None:
    """The group has until then all that its members had before the drop, and no token is another one."""

    async with running_group(model_dir, NAMES, Sizes(memory_bytes=4 << 20, step_s=0.002)) as cluster:
        w0, w1 = (cluster.workers[name] for name in NAMES)
        home, everything = w0.book.block_count, tuple(range(LAYERS))
        sampling = SamplingParams(temperature=0.0, max_tokens=700, ignore_eos=True)
        alone_says = await cluster.dispatcher.submit("w0", PROMPTS[0], sampling)
        await cluster.dispatcher.end(alone_says)
        await cluster.change(TransitionKind.DROP, layout(2, [[("w0", 0, 2), ("w1", 2, 4)]], LAYERS))
        dropped = w0.book.block_count
        answer, *others = [await cluster.dispatcher.submit("w0", prompt, sampling) for prompt in PROMPTS]
        await until(lambda: w0.core.lane.wanted_block_count > 1.4 * home)
        cluster.patient = True
        target = alone(3, NAMES, LAYERS)
        members = cluster.ask_to_prepare(TransitionKind.RESTORE, target)
        await until(lambda: all(w.engine.memory.parameters.held_layers == everything for w in (w0, w1)))
        await asyncio.sleep(0.2)
        await cluster.goes_on([answer])
        for worker in (w0, w1):
            assert worker.engine.memory.kv.held_layers != everything
            assert 1.9 * home < worker.book.block_count < dropped
        for other in others:
            await cluster.dispatcher.cancel(other)
        await cluster.prepare(TransitionKind.RESTORE, target)
        cluster.commit(members, target)
        done = await cluster.done(members, target.epoch)
        assert sum(progress.victims_recomputed for progress in done.values()) == 0
        assert (w0.book.block_count, w1.book.block_count) == (home, home)
        for one in (answer, *others):
            await cluster.dispatcher.end(one)
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.token_ids == alone_says.token_ids
        await cluster.quiet()

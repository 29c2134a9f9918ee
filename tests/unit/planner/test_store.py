"""The layout in a real state server: compare-and-set, fencing, and what cannot be read."""

import asyncio
import base64
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from ballast.common.errors import Unavailable
from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout
from ballast.common.transition import TransitionKind
from ballast.rpc import codec
from ballast.service.state import StateServer
from ballastpb.cluster.v1 import cluster_pb2
from services.planner.core.messages import StoredLayout, WriteJournal, WriteLayout, WriteOutcome
from services.planner.core.stages import Stage
from services.planner.core.transition import Journal
from services.planner.policy.replicate import Placeable, one_group_each
from services.planner.policy.reserve import Learnt
from services.planner.store import JOURNAL_KEY, LAYOUT_CHANNEL, LAYOUT_KEY, LEARNT_KEY, META_KEY, RedisLayoutStore
from tests.support.reporting_worker import model_info
from tools.local.state_server import PrivateStateServer

MODEL = model_info(4)


def layout(epoch: int, *workers: str) -> Layout:
    placeable = [Placeable(WorkerId(w), Incarnation(1), f"{w}:1", draining=False) for w in workers]
    return Layout(Epoch(epoch), 4, one_group_each(placeable, 4), "test")


def write(epoch: int, expected: int | None, token: int) -> WriteLayout:
    return WriteLayout(layout(epoch, "w1"), MODEL, None if expected is None else Epoch(expected), token, "c")


def tell(story: Callable[[PrivateStateServer, StateServer, RedisLayoutStore], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with PrivateStateServer() as server, asyncio.timeout(60):
            state = StateServer(server.url)
            try:
                await story(server, state, RedisLayoutStore(state))
            finally:
                await state.close()

    asyncio.run(run())


def test_a_layout_is_written_once_per_epoch_and_read_back() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        token = await state.acquire_lease("planner", "p1", 10.0, "host:1")
        assert token is not None
        assert await store.load() is None
        assert await store.write(write(1, None, token)) is WriteOutcome.WRITTEN
        assert await store.load() == StoredLayout(layout(1, "w1"), MODEL)
        assert await store.write(write(1, None, token)) is WriteOutcome.CONFLICT
        assert await store.write(write(3, 2, token)) is WriteOutcome.CONFLICT
        assert await store.write(write(2, 1, token)) is WriteOutcome.WRITTEN
        body = await state.run(state.redis.get(LAYOUT_KEY))
        assert isinstance(body, str)
        read = codec.LAYOUT.record(cluster_pb2.Layout.FromString(base64.b64decode(body)))
        assert read == layout(2, "w1"), "as dispatchers read it"

    tell(story)


def test_a_deposed_planner_is_refused() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        old = await state.acquire_lease("planner", "p1", 0.05, "host:1")
        assert old is not None
        await asyncio.sleep(0.1)
        assert await store.write(write(1, None, old)) is WriteOutcome.FENCED, "its lease has expired"
        new = await state.acquire_lease("planner", "p2", 10.0, "host:2")
        assert new is not None
        assert await store.write(write(1, None, old)) is WriteOutcome.FENCED
        assert await store.write(write(1, None, new)) is WriteOutcome.WRITTEN

    tell(story)


def test_one_of_many_writers_of_an_epoch_succeeds() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        token = await state.acquire_lease("planner", "p1", 10.0, "host:1")
        assert token is not None
        outcomes = await asyncio.gather(*(store.write(write(1, None, token)) for _ in range(20)))
        assert outcomes.count(WriteOutcome.WRITTEN) == 1
        assert outcomes.count(WriteOutcome.CONFLICT) == 19

    tell(story)


def test_writing_is_announced() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        token = await state.acquire_lease("planner", "p1", 10.0, "host:1")
        assert token is not None
        async with state.redis.pubsub() as pubsub:
            await pubsub.subscribe(LAYOUT_CHANNEL)
            await pubsub.get_message(timeout=60)
            await store.write(write(1, None, token))
            message = await pubsub.get_message(timeout=60)
        assert message is not None
        assert message["data"] == "1"

    tell(story)


def test_learnt_values_are_stored_for_the_next_planner() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        async def read() -> Learnt | None:
            stored = await store.load()
            return stored and stored.learnt

        token = await state.acquire_lease("planner", "p1", 10.0, "host:1")
        assert token is not None
        await store.write_learnt(learnt := Learnt((0.5, 2.25), 40.0), token)
        await store.write(write(1, None, token))
        assert await read() == learnt
        await store.write_learnt(Learnt(), token - 1)
        assert await read() == learnt, "a former leader cannot write"
        for garbage in ("{", '{"jumps": [-1.0]}', '{"dwell_s": NaN}', '{"jumps": [1e300]}'):
            await state.run(state.redis.set(LEARNT_KEY, garbage))
            assert await read() == Learnt()

    tell(story)


@pytest.mark.parametrize("body", ["", "not base64!", base64.b64encode(b"\xff\xff\xff").decode()])
def test_an_unreadable_layout_keeps_its_epoch_and_is_overwritten(body: str) -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        token = await state.acquire_lease("planner", "p1", 10.0, "host:1")
        assert token is not None
        await store.write(write(4, None, token))
        await state.run(state.redis.set(LAYOUT_KEY, body))
        found = await store.load()
        assert found is not None
        assert (found.layout.epoch, found.layout.groups) == (4, ())
        assert await store.write(write(5, 4, token)) is WriteOutcome.WRITTEN
        assert await store.load() == StoredLayout(layout(5, "w1"), MODEL)

    tell(story)


def test_without_a_state_server_nothing_hangs() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        server.stop()
        with pytest.raises(Unavailable):
            await store.load()
        assert await store.write(write(1, None, 5)) is WriteOutcome.UNAVAILABLE

    tell(story)


def change(stage: Stage, epoch: int = 2) -> Journal:
    base = layout(epoch - 1, "w1", "w2")
    stages = tuple(
        replace(g.leader, first_layer=2 * i, last_layer=2 * i + 2, data_address=f"w{i}:2")
        for i, g in enumerate(base.groups)
    )
    target = Layout(Epoch(epoch), 4, (Group(GroupId("w1"), stages),), "drop")
    return Journal(TransitionKind.DROP, base, target, stage, "overload", "taken back" if stage is Stage.ABORTED else "")


def note(stage: Stage, token: int, expected: int = 1, epoch: int = 2) -> WriteJournal:
    return WriteJournal(change(stage, epoch), Epoch(expected), MODEL, ((WorkerId("w9"), Incarnation(3)),), token, "c")


async def base_written(state: StateServer, store: RedisLayoutStore) -> int:
    token = await state.acquire_lease("planner", "p1", 10.0, "host:1")
    assert token is not None
    command = WriteLayout(layout(1, "w1", "w2"), MODEL, None, token, "c")
    assert await store.write(command) is WriteOutcome.WRITTEN
    return token


def test_the_layout_changes_with_the_decision_and_not_earlier() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        token = await base_written(state, store)
        pubsub = state.redis.pubsub()
        await pubsub.subscribe(LAYOUT_CHANNEL)
        before, after = layout(1, "w1", "w2"), change(Stage.COMMITTING).target
        for stage, in_force in (
            (Stage.PREPARING, before),
            (Stage.COMMITTING, after),
            (Stage.EXCHANGING, after),
            (Stage.DONE, after),
        ):
            assert await store.write_journal(note(stage, token)) is WriteOutcome.WRITTEN
            stored = await store.load()
            assert stored is not None
            assert (stored.layout, stored.journal) == (in_force, change(stage))
        assert stored.partial == ((WorkerId("w9"), Incarnation(3)),)
        told: list[str] = []
        while message := await pubsub.get_message(timeout=0.2 if told else 60):
            if message["type"] == "message":
                told.append(str(message["data"]))
        assert told == ["2"], "dispatchers are notified of the decision once"
        await pubsub.aclose()
        assert await store.write(write(3, 2, token)) is WriteOutcome.WRITTEN, "later layouts follow the transition's"

    tell(story)


def test_a_deposed_planner_cannot_journal() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        old = await base_written(state, store)
        assert await store.write_journal(note(Stage.PREPARING, old)) is WriteOutcome.WRITTEN
        await state.release_lease("planner", "p1")
        assert await store.write_journal(note(Stage.COMMITTING, old)) is WriteOutcome.FENCED, "no planner leads"
        new = await state.acquire_lease("planner", "p2", 10.0, "host:2")
        assert new is not None
        for stage in Stage:
            assert await store.write_journal(note(stage, old)) is WriteOutcome.FENCED
        stored = await store.load()
        assert stored is not None
        assert (stored.layout.epoch, stored.journal) == (1, change(Stage.PREPARING))
        assert await store.write_journal(note(Stage.ABORTED, new)) is WriteOutcome.WRITTEN
        stored = await store.load()
        assert stored is not None
        assert stored.journal == change(Stage.ABORTED)

    tell(story)


def test_a_decision_based_on_an_outdated_layout_is_refused_as_a_whole() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        token = await base_written(state, store)
        assert await store.write(WriteLayout(layout(4, "w1"), MODEL, Epoch(1), token, "c")) is WriteOutcome.WRITTEN
        assert await store.write_journal(note(Stage.PREPARING, token)) is WriteOutcome.CONFLICT
        assert await store.write_journal(note(Stage.COMMITTING, token)) is WriteOutcome.CONFLICT
        stored = await store.load()
        assert stored is not None
        assert (stored.layout.epoch, stored.journal) == (4, None)

    tell(story)


def test_the_same_decision_written_again_is_written_and_an_older_one_refused() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        token = await base_written(state, store)
        for _ in range(2):
            assert await store.write_journal(note(Stage.COMMITTING, token)) is WriteOutcome.WRITTEN
        assert await store.write(write(3, 2, token)) is WriteOutcome.WRITTEN
        assert await store.write_journal(note(Stage.COMMITTING, token)) is WriteOutcome.WRITTEN
        stored = await store.load()
        assert stored is not None
        assert stored.layout.epoch == 3, "a repetition does not bring the old layout back"
        assert await store.write_journal(note(Stage.PREPARING, token, 3, 4)) is WriteOutcome.WRITTEN
        assert await store.write_journal(note(Stage.DONE, token)) is WriteOutcome.CONFLICT

    tell(story)


def test_a_journal_of_another_version_is_not_changed() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        token = await base_written(state, store)
        assert await store.write_journal(note(Stage.PREPARING, token)) is WriteOutcome.WRITTEN
        await state.run(state.redis.hset(JOURNAL_KEY, "body", "{}"))  # pyright: ignore[reportArgumentType]
        stored = await store.load()
        assert stored is not None
        assert stored.journal is None
        assert stored.layout.epoch == 1

    tell(story)


def test_keys_of_another_type_are_recreated() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        token = await state.acquire_lease("planner", "p1", 10.0, "host:1")
        assert token is not None
        for key in (LAYOUT_KEY, META_KEY, JOURNAL_KEY):
            await state.run(state.redis.rpush(key, "garbage"))  # pyright: ignore[reportArgumentType]
        assert await store.load() is None
        assert await store.write(write(1, None, token)) is WriteOutcome.WRITTEN
        journal = Journal(TransitionKind.DROP, layout(1, "w1"), layout(2, "w1"), Stage.PREPARING, "test")
        command = WriteJournal(journal, Epoch(1), MODEL, (), token, "c")
        assert await store.write_journal(command) is WriteOutcome.WRITTEN
        assert await store.load() == StoredLayout(layout(1, "w1"), MODEL, (), journal)

    tell(story)

"""The layout in a real state server: compare-and-set, fencing, and what cannot be read."""

import asyncio
import base64
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ballast.common.errors import Unavailable
from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout
from ballast.local.state_server import PrivateStateServer
from ballast.rpc import codec
from ballast.service.state import StateServer
from ballastpb.cluster.v1 import cluster_pb2
from services.planner.core.messages import StoredLayout, WriteLayout, WriteOutcome
from services.planner.policy.replicate import Placeable, one_group_each
from services.planner.store import LAYOUT_CHANNEL, LAYOUT_KEY, RedisLayoutStore
from tests.support.reporting_worker import model_info

MODEL = model_info(4)


def layout(epoch: int, *workers: str) -> Layout:
    placeable = [Placeable(WorkerId(w), Incarnation(1), f"{w}:1", draining=False) for w in workers]
    return Layout(Epoch(epoch), 4, one_group_each(placeable, 4), "test")


def write(epoch: int, expected: int | None, token: int) -> WriteLayout:
    return WriteLayout(layout(epoch, "w1"), MODEL, None if expected is None else Epoch(expected), token, "c")


def tell(story: Callable[[PrivateStateServer, StateServer, RedisLayoutStore], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with PrivateStateServer() as server, asyncio.timeout(30):
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
        read = codec.layout_from_proto(cluster_pb2.Layout.FromString(base64.b64decode(body)))
        assert read == layout(2, "w1"), "as dispatchers read it"

    tell(story)


def test_a_deposed_planner_is_refused() -> None:
    async def story(server: PrivateStateServer, state: StateServer, store: RedisLayoutStore) -> None:
        old = await state.acquire_lease("planner", "p1", 0.05, "host:1")
        assert old is not None
        await asyncio.sleep(0.1)
        assert await store.write(write(1, None, old)) is WriteOutcome.FENCED, "its lease has run out"
        new = await state.acquire_lease("planner", "p2", 10.0, "host:2")
        assert new is not None
        assert await store.write(write(1, None, old)) is WriteOutcome.FENCED
        assert await store.write(write(1, None, new)) is WriteOutcome.WRITTEN

    tell(story)


def test_of_many_writers_of_one_epoch_one_succeeds() -> None:
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
            await pubsub.get_message(timeout=5)
            await store.write(write(1, None, token))
            message = await pubsub.get_message(timeout=5)
        assert message is not None
        assert message["data"] == "1"

    tell(story)


@pytest.mark.parametrize("body", ["", "not base64!", base64.b64encode(b"\xff\xff\xff").decode()])
def test_what_cannot_be_read_keeps_its_epoch_and_is_written_over(body: str) -> None:
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

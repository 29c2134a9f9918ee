"""Claims and notifications of dispatchers over the state server, including malformed ones."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import redis.asyncio

from ballast.common.errors import AlreadyExists, Cancelled
from ballast.common.ids import DispatcherId, Incarnation, RequestId
from ballast.common.layout import Layout
from ballast.common.reach import Reach, write_reach
from ballast.service.state import StateServer
from services.dispatcher.shell.links import Identity
from services.dispatcher.shell.ports import Claim
from services.dispatcher.store import DispatcherStore
from tests.support.waiting import soon
from tools.local.state_server import PrivateStateServer


def test_malformed_messages_are_ignored() -> None:
    heard: list[tuple[RequestId, int]] = []

    async def story() -> None:
        async with PrivateStateServer() as server, asyncio.timeout(60):
            state = StateServer(server.url)
            store = DispatcherStore(state, Identity(DispatcherId("d"), Incarnation(3)))
            listening = asyncio.create_task(store.listen(lambda request_id, serial: heard.append((request_id, serial))))
            stranger = redis.asyncio.from_url(server.url)  # pyright: ignore[reportUnknownMemberType]
            channel = "ballast:dispatchers:taken:d/3"
            try:
                while not heard:  # until the subscription has begun
                    for word in (f"{'9' * 5000} r", " r", "7", "\u0667 r", "7 r", b"\xff\xfe r"):
                        await stranger.publish(channel, word)
                    await asyncio.sleep(0.05)
                assert not listening.done()
            finally:
                listening.cancel()
                await asyncio.wait([listening])
                await stranger.aclose()
                await state.close()

    asyncio.run(story())
    assert set(heard) == {(RequestId("r"), 7)}


async def test_a_claim_whose_answer_was_lost_may_be_repeated() -> None:
    """redis-py runs the script once more if the connection breaks after it has run."""
    async with _stores("d", "e") as (_, mine, other):
        claim = Claim(RequestId("r"), serial=5, secret_hash="hash")
        assert not await mine.claim(claim, 30.0)
        assert not await mine.claim(claim, 30.0)
        with pytest.raises(AlreadyExists):
            await other.claim(claim, 30.0)
        with pytest.raises(AlreadyExists):
            await mine.claim(replace(claim, serial=6), 30.0)


async def test_claims_that_arrive_one_after_another_share_round_trips() -> None:
    async with _stores("d") as (state, store):
        claims = [Claim(RequestId(f"r{i}"), serial=i, secret_hash="hash") for i in range(400)]
        began_s, given = time.monotonic(), list[asyncio.Task[bool]]()
        for claim in claims:
            given.append(asyncio.create_task(store.claim(claim, 30.0)))
            await asyncio.sleep(0.0001)
        assert not any(await asyncio.gather(*given))
        took_s = time.monotonic() - began_s
        calls = (await state.run(cast(Awaitable[Any], state.redis.info("commandstats"))))["cmdstat_evalsha"]["calls"]
        assert calls <= 3 + took_s / 0.01
        held = [await state.run(cast(Awaitable[Any], state.redis.get(f"ballast:request:r{i}"))) for i in (0, 399)]
        assert held == ["1 hash d/3/0", "1 hash d/3/399"]


async def test_each_claim_of_a_burst_has_its_own_answer() -> None:
    async with _stores("d", "e") as (state, mine, other):
        theirs = Claim(RequestId("theirs"), serial=1, secret_hash="hash")
        resumed = Claim(RequestId("resumed"), serial=2, secret_hash="hash")
        for claim in (theirs, resumed):
            assert not await other.claim(claim, 30.0)
        await state.run(cast(Awaitable[Any], state.redis.hset("ballast:request:garbage", "a", "b")))
        await state.run(cast(Awaitable[Any], state.redis.set("ballast:request:gone", "cancelled hash", ex=30)))
        claims = [
            replace(theirs, secret_hash="another"),
            replace(resumed, attempt=2),
            Claim(RequestId("garbage"), serial=3, secret_hash="hash"),
            Claim(RequestId("gone"), serial=4, secret_hash="hash"),
        ]
        given = await asyncio.gather(*(mine.claim(claim, 30.0) for claim in claims), return_exceptions=True)
        assert [type(one) for one in given] == [AlreadyExists, bool, bool, Cancelled]
        assert given[1:3] == [True, False]
        healed = await state.run(cast(Awaitable[Any], state.redis.get("ballast:request:garbage")))
        assert healed == "1 hash d/3/3"


async def test_a_key_of_a_wrong_type_is_cancelled_and_keeps_no_claim_from_its_release() -> None:
    async with _stores("d") as (state, store):
        good, garbage = (Claim(RequestId(name), serial=1, secret_hash="hash") for name in ("good", "garbage"))
        assert not await store.claim(good, 30.0)
        await state.run(cast(Awaitable[Any], state.redis.hset("ballast:request:garbage", "a", "b")))
        releasing = asyncio.create_task(store.run_releases())
        store.release(garbage)
        store.release(good)
        async with asyncio.timeout(5.0):
            while await state.run(cast(Awaitable[Any], state.redis.exists("ballast:request:good"))):  # noqa: ASYNC110 no event tells of it
                await asyncio.sleep(0.01)
        releasing.cancel()
        await asyncio.wait([releasing])
        await store.cancel(garbage)
        with pytest.raises(Cancelled):
            await store.claim(garbage, 30.0)


async def test_a_reach_that_the_state_server_has_lost_remains_current() -> None:
    layouts: list[Layout] = []
    reaches: list[Reach] = []
    async with _stores("d") as (state, store):
        watching = asyncio.create_task(store.watch_layout(0.01, layouts.append, reaches.append))
        known = [Reach(tokens, 2 * tokens, 2, 2) for tokens in (1000, 2000)]
        for body in (write_reach(known[0]), "", "nonsense", write_reach(known[1])):
            key = state.redis.set("ballast:reach", body) if body else state.redis.delete("ballast:reach")
            await state.run(cast(Awaitable[Any], key))
            await asyncio.sleep(0.2)
        await soon(lambda: known[1] in reaches)
        watching.cancel()
    assert reaches == known


@contextlib.asynccontextmanager
async def _stores(*names: str) -> AsyncGenerator[Sequence[Any]]:
    """Yield a state client and one store for each dispatcher name. Any: a client, then stores."""
    async with PrivateStateServer() as server, asyncio.timeout(60):
        state = StateServer(server.url)
        stores = [DispatcherStore(state, Identity(DispatcherId(name), Incarnation(3))) for name in names]
        # Claims are not sent before the state server has answered once.
        await state.run(cast(Awaitable[Any], state.redis.ping()))
        loops = [asyncio.create_task(store.run_claims()) for store in stores]
        try:
            for name in names:
                await state.run(cast(Awaitable[Any], state.redis.set(f"ballast:dispatchers:lately:{name}/3", 1)))
            yield (state, *stores)
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)
            await state.close()

"""What dispatchers hear over the state server, whoever says it."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, cast

import pytest
import redis.asyncio

from ballast.common.errors import AlreadyExists
from ballast.common.ids import DispatcherId, Incarnation, RequestId
from ballast.service.state import StateServer
from services.dispatcher.shell.links import Identity
from services.dispatcher.shell.ports import Claim
from services.dispatcher.store import DispatcherStore
from tools.local.state_server import PrivateStateServer


def test_words_that_make_no_sense_are_passed_over() -> None:
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


async def test_a_claim_whose_answer_was_lost_may_be_asked_for_again() -> None:
    """A connection that is cut after the script has run makes redis-py run it once more."""
    async with PrivateStateServer() as server, asyncio.timeout(60):
        state = StateServer(server.url)
        mine, other = (DispatcherStore(state, Identity(DispatcherId(name), Incarnation(3))) for name in ("d", "e"))
        try:
            await state.run(
                cast(Awaitable[Any], state.redis.ping())
            )  # before it has answered once nobody asks it for claims
            claim = Claim(RequestId("r"), serial=5, secret_hash="hash")
            assert not await mine.claim(claim, 30.0)
            assert not await mine.claim(claim, 30.0)
            with pytest.raises(AlreadyExists):
                await other.claim(claim, 30.0)
            with pytest.raises(AlreadyExists):
                await mine.claim(replace(claim, serial=6), 30.0)
        finally:
            await state.close()

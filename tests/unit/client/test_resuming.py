"""A stream whose dispatcher dies continues on another one, unnoticed by its reader."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from ballast.client import AsyncClient, Client, SamplingParams
from ballast.common.errors import AlreadyExists, DeadlineExceeded, NotPossible, Overloaded, Unavailable
from tests.support.scripted_dispatcher import ScriptedDispatcher, serving, serving_in_thread

Story = Callable[[ScriptedDispatcher, ScriptedDispatcher, AsyncClient], Awaitable[None]]


def tell(story: Story, *, resume_s: float = 30.0) -> None:
    """Run `story` with two dispatchers. The client asks the first one first, which dies after two of five tokens."""

    async def run() -> None:
        dying, other = ScriptedDispatcher("a"), ScriptedDispatcher("b")
        dying.tokens = other.tokens = 5
        dying.die_after = 2
        async with (
            serving(dying) as first,
            serving(other) as second,
            AsyncClient([first, second], resume_s=resume_s) as client,
            asyncio.timeout(60),
        ):
            await story(dying, other, client)

    asyncio.run(run())


def test_the_stream_continues_after_the_received_tokens() -> None:
    async def story(dying: ScriptedDispatcher, other: ScriptedDispatcher, client: AsyncClient) -> None:
        stream = client.stream("x", request_id="r")
        chunks = [chunk async for chunk in stream]
        assert [token for chunk in chunks for token in chunk.token_ids] == [0, 1, 2, 3, 4]
        assert "".join(chunk.text for chunk in chunks) == "t0 t1 t2 t3 t4 "
        assert stream.resume_count == 1
        usage = chunks[-1].usage
        assert usage is not None
        assert 0.0 < usage.ttft_s < usage.e2e_s
        [first], [second] = dying.requests, other.requests
        told = second.resumption
        assert (told.attempt, list(told.token_ids), told.text_char_count) == (2, [0, 1], 6)
        assert (first.resumption.attempt, first.resumption.secret) == (1, told.secret)
        assert len(told.secret) == 16
        assert first.sampling.seed == second.sampling.seed
        assert first.sampling.HasField("seed")  # drawn by the client, so that both attempts sample the same tokens
        second.ClearField("resumption")
        first.ClearField("resumption")
        assert first == second

    tell(story)


def test_an_answer_without_streaming_is_requested_again() -> None:
    async def story(dying: ScriptedDispatcher, other: ScriptedDispatcher, client: AsyncClient) -> None:
        answer = await client.generate("x", SamplingParams(seed=3))
        assert answer.token_ids == (0, 1, 2, 3, 4)
        assert [(r.resumption.attempt, r.sampling.seed) for r in other.requests] == [(2, 3)]
        assert not other.requests[0].resumption.token_ids

    tell(story)


async def test_the_stream_continues_at_the_same_dispatcher_if_it_is_back() -> None:
    dispatcher = ScriptedDispatcher()
    dispatcher.tokens, dispatcher.die_after = 5, 2
    async with serving(dispatcher) as address, AsyncClient(address) as client:
        stream = client.stream("x")
        got = [(await anext(stream)).text, (await anext(stream)).text]
        dispatcher.refuse = [Unavailable("d0", "is draining; use another dispatcher")] * 3
        rest = asyncio.create_task(stream.collect())
        while len(dispatcher.requests) < 2:  # noqa: ASYNC110 - the dispatcher sets no event
            await asyncio.sleep(0.01)
        dispatcher.die_after = None
        assert "".join([*got, (await rest).text]) == "t0 t1 t2 t3 t4 "
        assert [request.resumption.attempt for request in dispatcher.requests] == [1, 2, 3, 4, 5]


def test_a_full_dispatcher_is_retried_after_its_delay() -> None:
    async def story(dying: ScriptedDispatcher, other: ScriptedDispatcher, client: AsyncClient) -> None:
        other.refuse = [Overloaded("full", 0.3), AlreadyExists("an earlier attempt ends just now")]
        dying.refuse = []
        stream = client.stream("x")
        begun = [await anext(stream), await anext(stream)]
        dying.refuse = [Unavailable("a", "draining")] * 99
        began_s = time.monotonic()
        texts = [chunk.text for chunk in begun] + [chunk.text async for chunk in stream]
        assert "".join(texts) == "t0 t1 t2 t3 t4 "
        assert time.monotonic() - began_s > 0.2

    tell(story)


def test_without_another_dispatcher_the_error_names_time_and_reason() -> None:
    async def story(dying: ScriptedDispatcher, other: ScriptedDispatcher, client: AsyncClient) -> None:
        stream = client.stream("x")
        await anext(stream)
        dying.refuse = other.refuse = [Unavailable("b", "draining")] * 99
        await anext(stream)
        with pytest.raises(Unavailable, match=r"Socket closed, and no dispatcher .* within 0\.5 s: b: draining"):
            await anext(stream)

    tell(story, resume_s=0.5)


def test_the_error_says_if_resuming_is_not_possible() -> None:
    async def story(dying: ScriptedDispatcher, other: ScriptedDispatcher, client: AsyncClient) -> None:
        other.refuse = [NotPossible("resuming is switched off here; send the request anew")]
        with pytest.raises(Unavailable, match=r"after 2 tokens, and no dispatcher could resume it: .* anew"):
            await client.stream("x").collect()

    tell(story)


def test_a_request_that_kills_dispatchers_is_abandoned() -> None:
    async def story(dying: ScriptedDispatcher, other: ScriptedDispatcher, client: AsyncClient) -> None:
        other.die_after = 2
        with pytest.raises(Unavailable, match="is given up: 7 dispatchers in a row were lost"):
            await client.stream("x").collect()
        assert len(dying.requests) + len(other.requests) == 7

    tell(story)


def test_the_deadline_holds_for_all_attempts_together() -> None:
    async def story(dying: ScriptedDispatcher, other: ScriptedDispatcher, client: AsyncClient) -> None:
        other.pause_s = 10.0
        began_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.stream("x", deadline_s=1.0).collect()
        assert 0.8 < time.monotonic() - began_s < 5.0

    tell(story)


def test_leaving_the_stream_cancels_the_later_attempt() -> None:
    async def story(dying: ScriptedDispatcher, other: ScriptedDispatcher, client: AsyncClient) -> None:
        other.tokens, other.pause_s = 1000, 0.05
        async with client.stream("x") as stream:
            for _ in range(4):
                await anext(stream)
        await asyncio.wait_for(other.abandoned.wait(), 10)

    tell(story)


async def test_a_restarted_dispatcher_is_tried_although_it_has_just_failed() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        give_up_s = time.monotonic() + 3.0
        while time.monotonic() < give_up_s:  # until gRPC's reconnect backoff is long
            with pytest.raises(Unavailable, match="cannot connect"):
                await client.generate("x")
        async with serving(ScriptedDispatcher(), port):
            assert (await client.generate("x")).text == "t0 t1 t2 "


def test_resuming_can_be_switched_off() -> None:
    async def story(dying: ScriptedDispatcher, other: ScriptedDispatcher, client: AsyncClient) -> None:
        with pytest.raises(Unavailable, match="Socket closed"):
            await client.stream("x").collect()
        assert not dying.requests[0].HasField("resumption")
        assert not other.requests

    tell(story, resume_s=0.0)


def test_the_synchronous_client_does_it_too() -> None:
    with serving_in_thread("a") as (dying, first), serving_in_thread("b") as (_, second):
        dying.die_after = 1
        with Client([first, second]) as client:
            assert [chunk.text for chunk in client.stream("x")] == ["t0 ", "t1 ", "t2 "]

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from ballast.client import AsyncClient, ChatMessage, FinishReason, Generation, SamplingParams
from ballast.common.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PeerViolation,
    Unavailable,
)
from tests.support.scripted_dispatcher import ScriptedDispatcher, serving, worker_status

Story = Callable[[ScriptedDispatcher, AsyncClient], Awaitable[None]]


def tell(story: Story, **options: float) -> None:
    async def run() -> None:
        dispatcher = ScriptedDispatcher()
        async with serving(dispatcher) as address, AsyncClient(address, **options) as client:  # pyright: ignore[reportArgumentType]
            async with asyncio.timeout(60):
                await story(dispatcher, client)

    asyncio.run(run())


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_a_generation_arrives_whole() -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        answer = await client.generate("hello", SamplingParams(max_tokens=3, seed=7), request_id="r1")
        assert isinstance(answer, Generation)
        assert (answer.text, answer.token_ids) == ("t0 t1 t2 ", (0, 1, 2))
        assert answer.finish_reason is FinishReason.LENGTH
        assert (answer.usage.prompt_token_count, answer.usage.completion_token_count, answer.usage.seed) == (5, 3, 7)
        (request,) = dispatcher.requests
        assert (request.request_id, request.text, request.collect) == ("r1", "hello", True)
        assert (request.sampling.max_tokens, request.sampling.seed) == (3, 7)

    tell(story)


def test_a_stream_brings_one_chunk_per_step_and_the_same_answer() -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        chunks = [chunk async for chunk in client.generate("hello", stream=True)]
        assert [c.text for c in chunks] == ["t0 ", "t1 ", "t2 "]
        assert [c.finish_reason for c in chunks] == [None, None, FinishReason.LENGTH]
        assert [c.usage is None for c in chunks] == [True, True, False]
        assert (await client.stream("hello").collect()).text == "t0 t1 t2 "
        assert not dispatcher.requests[0].collect
        assert not dispatcher.abandoned.is_set()

    tell(story)


def test_token_ids_and_messages_are_prompts_too() -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        await client.generate(token_ids=[1, 2, 3], priority="interactive", include_text=False)
        await client.generate(messages=[{"role": "user", "content": "hi"}, ChatMessage("assistant", "ho")])
        by_ids, by_messages = dispatcher.requests
        assert list(by_ids.token_ids.ids) == [1, 2, 3]
        assert by_ids.omit_text
        assert by_ids.priority == 1
        assert [(m.role, m.content) for m in by_messages.conversation.messages] == [("user", "hi"), ("assistant", "ho")]
        assert by_ids.request_id != by_messages.request_id

    tell(story)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({"token_ids": [2**40]}, "token_ids"),
        ({"token_ids": ["x"]}, "token_ids"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"prompt": "a", "priority": "urgent"}, "priority"),
        ({"prompt": "a", "request_id": "\ud800"}, "request_id"),
        ({"prompt": "a", "deadline_s": 0}, "deadline_s"),
        ({"prompt": "a", "deadline_s": float("nan")}, "deadline_s"),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, object], field: str) -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate(**arguments)  # pyright: ignore
        assert caught.value.field == field
        assert dispatcher.requests == []

    tell(story)


def test_errors_of_the_dispatcher_are_raised_as_they_are() -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        dispatcher.refuse = [InvalidRequest("sampling.top_p", "too large"), AlreadyExists("r1 is being served")]
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("a")
        assert (caught.value.field, caught.value.why) == ("sampling.top_p", "too large")
        with pytest.raises(AlreadyExists):
            await client.generate("a")

    tell(story)


@pytest.mark.parametrize("way", ["break", "aclose", "async with", "cancel the task"])
def test_leaving_a_stream_cancels_the_request_at_once(way: str) -> None:
    async def leave(client: AsyncClient) -> None:
        match way:
            case "break":
                async for _ in client.stream("a"):
                    break
            case "aclose":
                stream = client.stream("a")
                await anext(stream)
                await stream.aclose()
                assert [chunk async for chunk in stream] == []
            case "async with":
                async with client.stream("a") as stream:
                    await anext(stream)
            case _:
                stream = client.stream("a")
                await anext(stream)
                task = asyncio.create_task(stream.collect())
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        dispatcher.tokens, dispatcher.pause_s = 1000, 0.02
        await leave(client)
        async with asyncio.timeout(10):
            await dispatcher.abandoned.wait()
        assert dispatcher.running == {}

    tell(story)


def test_a_request_cancelled_by_id_ends_with_cancelled_and_its_reader_continues() -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        dispatcher.tokens, dispatcher.pause_s = 1000, 5.0
        task = asyncio.create_task(client.generate("a", request_id="r9"))
        await dispatcher.started.wait()
        assert await client.cancel("r9")
        with pytest.raises(Cancelled):
            await task
        assert not await client.cancel("r9")

    tell(story)


def test_an_endless_deadline_is_none() -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        assert (await client.generate("a", deadline_s=float("inf"))).text

    tell(story)


def test_the_deadline_is_sent_along_and_ends_the_request() -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        dispatcher.pause_s = 5.0
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.generate("a", deadline_s=0.1)
        assert time.monotonic() - started_s < 2.0

    tell(story)


def test_an_overloaded_dispatcher_is_not_retried_by_default() -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        dispatcher.refuse = [Overloaded("backlog full", 0.25)]
        with pytest.raises(Overloaded) as caught:
            await client.generate("a")
        assert caught.value.retry_after_s == pytest.approx(0.25)
        assert len(dispatcher.requests) == 1

    tell(story)


def test_retries_wait_for_the_given_delay_and_keep_the_request_id() -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        dispatcher.refuse = [Overloaded("full", 0.05), Overloaded("full", 0.05)]
        started_s = time.monotonic()
        assert (await client.generate("a")).text == "t0 t1 t2 "
        assert time.monotonic() - started_s >= 0.1
        assert len({request.request_id for request in dispatcher.requests}) == 1
        dispatcher.refuse = [Overloaded("full", 0.01)] * 3
        with pytest.raises(Overloaded):
            await client.generate("a")
        dispatcher.refuse = [Overloaded("full", 60.0)]
        with pytest.raises(Overloaded):  # longer than max_retry_wait_s
            await client.generate("a")
        dispatcher.refuse = [Overloaded("full", 0.9)]
        with pytest.raises(Overloaded):  # the deadline expires first
            await client.generate("a", deadline_s=0.5)

    tell(story, overload_retries=2, max_retry_wait_s=1.0)


def test_an_end_without_finish_reason_is_not_an_answer() -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        dispatcher.end_early = True
        with pytest.raises(PeerViolation, match="finish reason"):
            await client.stream("a").collect()

    tell(story)


async def test_before_the_first_token_another_dispatcher_takes_over() -> None:
    draining, healthy = ScriptedDispatcher("a"), ScriptedDispatcher("b")
    async with (
        serving(draining) as first,
        serving(healthy) as second,
        AsyncClient([free_address(), first, second]) as client,
    ):
        draining.refuse = [Unavailable("a", "draining")] * 10
        for _ in range(6):
            assert (await client.generate("x", request_id="same")).text == "t0 t1 t2 "
        assert len(healthy.requests) == 6
        assert {request.request_id for request in (*draining.requests, *healthy.requests)} == {"same"}
        # A target that failed recently is tried last, so it was not asked each time.
        assert len(draining.requests) < 3


async def test_after_the_first_token_nothing_is_repeated() -> None:
    failing, healthy = ScriptedDispatcher("a"), ScriptedDispatcher("b")
    failing.fail_after = (1, Unavailable("a", "lost"))
    async with serving(failing) as first, serving(healthy) as second, AsyncClient(f"{first},{second}") as client:
        stream = client.stream("x")
        assert (await anext(stream)).text == "t0 "
        with pytest.raises(Unavailable):
            await anext(stream)
        assert healthy.requests == []


async def test_a_claim_left_by_a_dead_dispatcher_does_not_hide_the_reason() -> None:
    dead, other = ScriptedDispatcher("a"), ScriptedDispatcher("b")
    dead.refuse, other.refuse = [Unavailable("a", "lost")], [AlreadyExists("r is being served")]
    async with serving(dead) as first, serving(other) as second, AsyncClient([first, second]) as client:
        with pytest.raises(Unavailable, match="lost"):
            await client.generate("x")


async def test_requests_alternate_between_dispatchers() -> None:
    a, b = ScriptedDispatcher("a"), ScriptedDispatcher("b")
    async with serving(a) as first, serving(b) as second, AsyncClient([first, second]) as client:
        for _ in range(4):
            await client.generate("x")
        assert (len(a.requests), len(b.requests)) == (2, 2)
        assert await client.drain(second) == 0
        assert (a.drained, b.drained) == (False, True)
        assert (await client.status(second)).dispatcher_id == "b"
        with pytest.raises(InvalidRequest):
            await client.status("elsewhere:1")


async def test_an_unreachable_cluster_is_reported() -> None:
    address = free_address()
    async with AsyncClient(address) as client:
        with pytest.raises(Unavailable) as caught:
            await client.generate("x")
        assert caught.value.target == address
        with pytest.raises(Unavailable):
            await client.cancel("r")


async def test_an_address_that_never_answers_does_not_delay_the_call() -> None:
    with socket.socket() as silent:  # accepts connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with AsyncClient(address, connect_timeout_s=0.3) as client:
            with pytest.raises(Unavailable, match="within"):
                await client.generate("x")


def test_status_model_and_tokens() -> None:
    async def story(dispatcher: ScriptedDispatcher, client: AsyncClient) -> None:
        with pytest.raises(NotFound):
            await client.model_info()
        dispatcher.status.model.name = "tiny"
        dispatcher.status.model.eos_token_ids.append(2)
        dispatcher.status.workers.append(worker_status())
        dispatcher.status.requests_total["stop"] = 4
        assert (await client.model_info()).eos_token_ids == (2,)
        status = await client.status()
        assert status.layout is None
        assert status.address == client.addresses[0]
        assert status.requests_total == {"stop": 4}
        (worker,) = status.workers
        assert worker.load is not None
        worker.load.memory.check()
        assert await client.tokenize("ab") == (97, 98)
        assert bytes(await client.tokenize(messages=[ChatMessage("user", "x")])) == b"user: x"

    tell(story)


@pytest.mark.parametrize("address", ["localhost", ":50051", "host:0", "host:99999", "host:http", "", []])
def test_an_address_must_be_host_and_port(address: str | list[str]) -> None:
    with pytest.raises(InvalidRequest):
        AsyncClient(address)

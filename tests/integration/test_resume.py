"""Dispatchers are killed while they serve streams; every stream continues at another dispatcher without losing a
token.
"""

import asyncio
import signal
import time
from collections.abc import Coroutine, Sequence

import grpc
import grpc.aio
import pytest
import redis

from ballast.client import AsyncClient, Generation, GenerationChunk, SamplingParams
from ballast.common import errors
from ballast.rpc.errors import from_rpc_error
from ballastpb.inference.v1 import inference_pb2 as pb
from tests.support.dispatchers import Arena, Dispatcher, request, until_async
from tests.support.timed_worker import TimedSettings, scripted_text, scripted_tokens

SECRET = b"sixteen bytes or"
Prompt = Sequence[int]


def client_of(*dispatchers: Dispatcher, resume_s: float = 30.0) -> AsyncClient:
    return AsyncClient([dispatcher.address for dispatcher in dispatchers], resume_s=resume_s)


async def read(
    client: AsyncClient, prompt: Prompt, max_tokens: int, begun: asyncio.Event, logprobs: int | None = None
) -> tuple[str, int]:
    """Reads a stream to its end and checks its tokens. Returns its text and the number of times that it was resumed."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=7, logprobs=logprobs)
    stream = client.stream(token_ids=prompt, sampling=sampling)
    chunks: list[GenerationChunk] = []
    async for chunk in stream:
        chunks.append(chunk)
        begun.set()
    expected = scripted_tokens(prompt, 7, max_tokens)
    assert [t for chunk in chunks for t in chunk.token_ids] == expected
    text = "".join(chunk.text for chunk in chunks)
    assert text == scripted_text(expected)
    if logprobs is not None:
        assert [lp.chosen.token_id for chunk in chunks for lp in chunk.logprobs] == expected
    assert [chunk.prompt_token_count for chunk in chunks if chunk.prompt_token_count] == [len(prompt)]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_token_count == max_tokens
    assert 0.0 < usage.ttft_s < usage.e2e_s
    return text, stream.resume_count


async def begun(
    client: AsyncClient, prompts: Sequence[Prompt], max_tokens: int, *, logprobs: bool = False
) -> list[asyncio.Task[tuple[str, int]]]:
    """Starts streams, and returns their tasks once each one has received a token. `logprobs`: requested for every other
    stream.
    """
    events = [asyncio.Event() for _ in prompts]
    reads = [
        asyncio.create_task(read(client, prompt, max_tokens, event, 0 if logprobs and index % 2 else None))
        for index, (prompt, event) in enumerate(zip(prompts, events, strict=True))
    ]
    async with asyncio.timeout(60.0):
        for event in events:
            await event.wait()
    return reads


def resumed(
    answer: Sequence[int] = (), *, attempt: int = 1, secret: bytes = SECRET, max_tokens: int = 4000, name: str = "r"
) -> pb.GenerateRequest:
    message = request(request_id=name, max_tokens=max_tokens)
    message.resumption.secret, message.resumption.attempt = secret, attempt
    message.resumption.token_ids.extend(answer)
    message.resumption.text_char_count = len(scripted_text(answer))
    return message


async def rest_of(call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]", why: str) -> list[int]:
    """The remaining tokens of a stream that ends with an error that contains `why`."""
    token_ids: list[int] = []
    try:
        while isinstance(response := await call.read(), pb.GenerateResponse):
            token_ids += response.token_ids
    except grpc.RpcError as error:
        assert why in str(from_rpc_error(error, ""))  # noqa: PT017 - the tokens before the error are returned
        return token_ids
    raise AssertionError(f"ended without an error after {len(token_ids)} tokens")


def kill(dispatcher: Dispatcher) -> None:
    dispatcher.process.send_signal(signal.SIGKILL)


async def test_every_stream_of_a_killed_dispatcher_continues() -> None:
    settings = [TimedSettings(worker_id=f"w{i}") for i in range(2)]
    async with Arena(*settings, dispatchers=2) as arena, client_of(*arena.dispatchers) as client:
        prompts = [[1, 2, index] for index in range(40)]
        reads = await begun(client, prompts, 300, logprobs=True)
        kill(arena.dispatchers[0])
        counts = [count for _, count in await asyncio.gather(*reads)]
        assert 10 < sum(counts) <= 20
        assert max(counts) == 1
        status = await client.status()
        assert status.dispatcher_id == "d1"
        assert status.running_request_count == 0


async def test_a_stream_waits_for_its_only_dispatcher_to_restart() -> None:
    async with (
        Arena(TimedSettings(), flags=["--port", "0"]) as arena,
        client_of(arena.dispatcher, resume_s=120.0) as client,
    ):
        old = arena.dispatcher
        [going] = await begun(client, [[1, 2, 3]], 200)
        kill(old)
        back = Dispatcher(*arena.place, "d0", ["--port", old.address.rpartition(":")[2]])
        arena.dispatchers.append(back)
        try:
            await back.start()
            assert (await going)[1] == 1
        finally:
            await back.stop()


async def test_a_stopped_dispatcher_is_replaced_and_ends_its_requests_once_continued() -> None:
    async with Arena(TimedSettings(), dispatchers=2) as arena, client_of(*arena.dispatchers) as client:
        going = await begun(client, [[1, index] for index in range(4)], 300)
        arena.dispatcher.process.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        try:
            assert sorted([count for _, count in await asyncio.gather(*going)]) == [0, 0, 1, 1]
            assert time.monotonic() - began_s < 60.0
        finally:
            arena.dispatcher.process.send_signal(signal.SIGCONT)

        async def nothing_runs() -> bool:
            return arena.worker.request_count == 0

        await until_async(nothing_runs, "earlier attempts to have ended at the worker")


@pytest.mark.parametrize("collect", [False, True])
async def test_queued_requests_of_a_dead_dispatcher_are_not_lost(collect: bool) -> None:
    async with (
        Arena(TimedSettings(max_running=1, max_waiting=1), dispatchers=2) as arena,
        client_of(*arena.dispatchers) as client,
    ):
        sampling = SamplingParams(max_tokens=20, seed=7)

        def ask(prompt: Prompt) -> Coroutine[object, object, Generation]:
            if collect:
                return client.generate(token_ids=prompt, sampling=sampling)
            return client.stream(token_ids=prompt, sampling=sampling).collect()

        prompts = [[5, index] for index in range(24)]
        tasks = [asyncio.create_task(ask(prompt)) for prompt in prompts]

        async def waits() -> bool:
            return (await arena.dispatcher.status()).backlog_request_count > 2

        await until_async(waits, "requests to wait in the dispatcher")
        kill(arena.dispatcher)
        for prompt, answer in zip(prompts, await asyncio.gather(*tasks), strict=True):
            assert list(answer.token_ids) == scripted_tokens(prompt, 7, 20)
            assert answer.text == scripted_text(answer.token_ids)


async def test_streams_continue_even_without_the_state_server() -> None:
    async with Arena(TimedSettings(), dispatchers=2) as arena, client_of(*arena.dispatchers) as client:
        [going] = await begun(client, [[1, 2]], 300)
        arena.state.stop()
        await asyncio.sleep(0.2)
        kill(arena.dispatchers[0])
        assert (await going)[1] == 1


async def test_without_resuming_the_error_tells_the_client_what_to_do() -> None:
    async with (
        Arena(TimedSettings(), dispatchers=2, flags=["--dev", "resume=false"]) as arena,
        client_of(*arena.dispatchers) as client,
    ):
        [going] = await begun(client, [[1, 2]], 400)
        kill(arena.dispatchers[0])
        with pytest.raises(errors.Unavailable, match=r"disabled .* \(--resume false\); send the request again"):
            await going


async def test_clients_that_cannot_or_do_not_resume_get_an_error() -> None:
    async with (
        Arena(TimedSettings(), dispatchers=1) as arena,
        client_of(arena.dispatcher, resume_s=0.0) as plain,
        client_of(arena.dispatcher, resume_s=0.5) as hasty,
    ):
        going = [*await begun(plain, [[1, 2]], 400), *await begun(hasty, [[1, 2]], 400)]
        kill(arena.dispatcher)
        began_s = time.monotonic()
        with pytest.raises(errors.Unavailable):
            await going[0]
        with pytest.raises(errors.Unavailable, match=r"no dispatcher went on with the request within 0\.5 s"):
            await going[1]
        assert time.monotonic() - began_s < 20.0


async def test_only_its_client_and_only_a_later_attempt_takes_a_request_over() -> None:
    async with Arena(TimedSettings(), dispatchers=2) as arena:
        d0, d1 = arena.dispatchers
        call = d0.stub.Generate(resumed())
        first = await call.read()
        assert isinstance(first, pb.GenerateResponse)
        assert first.prompt_digest
        first_ids = list(first.token_ids)
        for other in (
            resumed(first_ids, attempt=2, secret=b"another one's key"),
            resumed(first_ids, attempt=2, secret=b""),
            resumed(attempt=1),
            request(request_id="r"),
        ):
            for dispatcher in (d0, d1):
                assert (await dispatcher.generate(other)).error is not None
        # The second attempt goes to another dispatcher, which ends the first attempt at the first dispatcher.
        later = resumed(first_ids, attempt=2, max_tokens=4000)
        second = d1.stub.Generate(later)
        assert isinstance(await second.read(), pb.GenerateResponse)
        rest = await rest_of(call, "continues it on another dispatcher")
        assert first_ids + rest == scripted_tokens([1, 2, 3], 7, len(first_ids) + len(rest))
        # The third attempt goes to the dispatcher of the second one.
        count = len(first_ids) + 30
        third = await d1.generate(resumed(first_ids, attempt=3, max_tokens=count))
        assert third.error is None
        assert first_ids + third.token_ids == scripted_tokens([1, 2, 3], 7, count)
        await rest_of(second, "continues it over another connection")

        async def nothing_runs() -> bool:
            return arena.worker.request_count == 0

        await until_async(nothing_runs, "earlier attempts to have ended at the worker")


async def test_the_same_attempt_at_several_dispatchers_is_served_by_one() -> None:
    async with Arena(TimedSettings(), dispatchers=3) as arena:
        for number in range(10):
            twins = [
                dispatcher.generate(resumed(name=f"twin-{number}", max_tokens=40)) for dispatcher in arena.dispatchers
            ]
            answers = await asyncio.gather(*twins)
            served = [answer for answer in answers if answer.error is None]
            assert [answer.token_ids for answer in served] == [scripted_tokens([1, 2, 3], 7, 40)]
            refused = [answer for answer in answers if answer.error is not None]
            assert all(isinstance(answer.error, errors.AlreadyExists) for answer in refused)
            assert all(not answer.token_ids for answer in refused)


async def test_an_id_stays_reserved_for_a_client_that_resumes_late() -> None:
    async with Arena(TimedSettings(), dispatchers=2) as arena:
        d0, d1 = arena.dispatchers
        call = d0.stub.Generate(resumed())
        first = await call.read()
        assert isinstance(first, pb.GenerateResponse)
        kill(d0)
        with redis.Redis.from_url(arena.state.url) as store:  # as if the dispatcher's registration had expired
            store.delete("ballast:dispatchers:d0")
        stranger = await d1.generate(resumed(secret=b"another one's key"))
        assert isinstance(stranger.error, errors.AlreadyExists)
        count = len(first.token_ids) + 30
        answer = await d1.generate(resumed(first.token_ids, attempt=2, max_tokens=count))
        assert answer.error is None
        assert [*first.token_ids, *answer.token_ids] == scripted_tokens([1, 2, 3], 7, count)


async def test_a_request_cancelled_by_its_id_is_not_resumed_elsewhere() -> None:
    """The dispatcher dies right after answering the cancellation, before the stream's client has received the end."""

    async with Arena(TimedSettings(), dispatchers=2) as arena:
        d0, d1 = arena.dispatchers
        call = d0.stub.Generate(resumed())
        first = await call.read()
        assert isinstance(first, pb.GenerateResponse)
        assert (await d0.stub.Cancel(pb.CancelRequest(request_id="r"), timeout=60)).found
        kill(d0)
        answer = await d1.generate(resumed(first.token_ids, attempt=2))
        assert isinstance(answer.error, errors.Cancelled)
        assert not answer.token_ids
        # Afterwards the id is free: for other clients, and for a new request of the same client.
        other = await d1.generate(resumed(secret=b"another one's key", max_tokens=30))
        assert other.token_ids == scripted_tokens([1, 2, 3], 7, 30)


async def test_invalid_resume_fields_are_refused_by_name() -> None:
    async with Arena(TimedSettings()) as arena:
        ask = arena.dispatcher.generate
        without_seed = resumed([1], attempt=2)
        without_seed.sampling.ClearField("seed")
        without_seed.sampling.temperature = 1.0
        chars = resumed(attempt=2)
        chars.resumption.text_char_count = 5
        for message, field in (
            (resumed(secret=b"short"), "resumption.secret"),
            (resumed(secret=b"x" * 65), "resumption.secret"),
            (resumed(attempt=0), "resumption.attempt"),
            (resumed([1], attempt=1), "resumption.token_ids"),
            (resumed([1] * 9, attempt=2, max_tokens=8), "resumption.token_ids"),
            (resumed([1 << 30], attempt=2), "resumption.token_ids[0]"),
            (resumed(name=""), "request_id"),
            (chars, "resumption.text_char_count"),
            (without_seed, "sampling.seed"),
        ):
            error = (await ask(message)).error
            assert isinstance(error, errors.InvalidRequest), (field, error)
            assert error.field == field
        other_prompt = resumed([1], attempt=2)
        other_prompt.resumption.prompt_digest = 5
        assert isinstance((await ask(other_prompt)).error, errors.NotPossible)

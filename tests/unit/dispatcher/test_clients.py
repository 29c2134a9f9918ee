"""Streams from the core to clients: deltas are merged, a client that does not read delays a wave of messages only
briefly, and no stream is forgotten.
"""

import asyncio

from ballast.common.ids import RequestId
from ballast.common.sampling import FinishReason
from services.dispatcher.core.events import Facts, Finish
from services.dispatcher.shell.clients import ClientStream, Pacer

FACTS = Facts(prompt_token_count=1, completion_token_count=1, replay_count=0, queue_s=0.0, ttft_s=None, e2e_s=0.0)


def stream(name: str, pacer: Pacer) -> ClientStream:
    return ClientStream(RequestId(name), pacer)


def finish(name: str) -> Finish:
    return Finish(RequestId(name), FinishReason.LENGTH, "", FACTS)


async def test_output_that_accumulated_unread_is_returned_at_once_and_in_order() -> None:
    one = stream("r", Pacer())
    for token in range(60):
        one.push([token], f"{token},", [f"l{token}"], at_s=float(token))
    assert one.waiting_since_s == 0.0
    one.end(finish("r"), at_s=60.0)
    delivery = await one.take()
    assert list(delivery.token_ids) == list(range(60))
    assert delivery.text == "".join(f"{token}," for token in range(60))
    assert delivery.logprobs == [f"l{token}" for token in range(60)]
    assert delivery.ending == finish("r")
    assert one.waiting_since_s is None


async def test_many_logprobs_are_delivered_in_parts_and_the_ending_with_the_last_one() -> None:
    one = stream("r", Pacer())
    for token in range(150):
        one.push([token], f"{token},", [f"l{token}"], at_s=float(token))
    one.end(finish("r"), at_s=150.0)
    parts = [await one.take()]
    while parts[-1].ending is None:
        assert one.waiting_since_s is not None
        assert one.waiting_since_s > 150.0, "the client is reading"
        parts.append(await one.take())
    assert max(len(part.token_ids) for part in parts) <= 64
    assert [token for part in parts for token in part.token_ids] == list(range(150))
    assert [each for part in parts for each in part.logprobs] == [f"l{token}" for token in range(150)]
    assert "".join(part.text for part in parts) == "".join(f"{token}," for token in range(150))
    assert one.waiting_since_s is None


async def test_a_reader_wakes_for_tokens_and_for_an_ending_without_tokens() -> None:
    one = stream("r", Pacer())
    reader = asyncio.create_task(one.take())
    await asyncio.sleep(0)
    one.push([1], "", (), at_s=0.0)
    assert list((await reader).token_ids) == [1]
    reader = asyncio.create_task(one.take())
    await asyncio.sleep(0)
    one.end(finish("r"), at_s=0.0)
    delivery = await reader
    assert (list(delivery.token_ids), delivery.ending) == ([], finish("r"))


async def test_collecting_waits_for_the_ending() -> None:
    one = stream("r", Pacer())
    reader = asyncio.create_task(one.take_all())
    for token in range(3):
        await asyncio.sleep(0)
        one.push([token], "", (), at_s=0.0)
    await asyncio.sleep(0.03)
    assert not reader.done()
    one.end(finish("r"), at_s=0.0)
    assert list((await reader).token_ids) == [0, 1, 2]


async def test_a_client_that_does_not_read_delays_others_once_and_briefly() -> None:
    pacer = Pacer()
    quick, stuck = stream("quick", pacer), stream("stuck", pacer)
    got: list[int] = []
    blocked = asyncio.Event()

    async def read(one: ClientStream, block: bool) -> None:
        while True:
            delivery = await one.take()
            if block and blocked.is_set():
                await asyncio.Event().wait()
            if one is quick:
                got.extend(delivery.token_ids)

    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(read(quick, False)), tasks.create_task(read(stuck, True))]
        await asyncio.sleep(0)
        loop, token = asyncio.get_running_loop(), 0
        for _ in range(3):
            for one in (quick, stuck):
                one.push([token], "", (), at_s=0.0)
            token += 1
            await asyncio.sleep(0.005)
        blocked.set()
        begin_s = loop.time()
        while token < 40:
            for one in (quick, stuck):
                one.push([token], "", (), at_s=0.0)
            token += 1
            while got[-1] != token - 1:  # noqa: ASYNC110 - yields to the event loop
                await asyncio.sleep(0)
        # Forty waves, one of which timed out on the stuck client.
        assert loop.time() - begin_s < 0.5
        for reader in readers:
            reader.cancel()
    assert got == list(range(40))


async def test_a_request_that_ends_before_its_wave_delays_no_other() -> None:
    pacer, loop = Pacer(), asyncio.get_running_loop()
    sends, ends, goes_on = (stream(name, pacer) for name in ("sends", "ends", "goes on"))
    for one in (sends, ends, goes_on):
        one.push([0], "", (), at_s=0.0)
        await one.take()
    sending, ending, going_on = (asyncio.create_task(one.take()) for one in (sends, ends, goes_on))
    await asyncio.sleep(0)
    sends.push([1], "", (), at_s=0.0)
    await sending  # starts another wave, which ends when the client reads again
    ends.push([1], "", (), at_s=0.0)
    ends.end(finish("ends"), at_s=0.0)
    assert (await ending).ending is not None
    ends.close()
    begin_s = loop.time()
    sends.close()
    await asyncio.sleep(0)
    goes_on.push([1], "", (), at_s=0.0)
    await going_on
    assert loop.time() - begin_s < 0.015

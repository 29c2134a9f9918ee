import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ballast.client import Client
from ballast.common.errors import Cancelled, Overloaded, Unavailable
from tests.support.scripted_dispatcher import ScriptedDispatcher, serving_in_thread


@pytest.fixture
def scripted() -> Iterator[tuple[ScriptedDispatcher, str]]:
    with serving_in_thread() as found:
        yield found


def until(condition: object) -> None:
    assert callable(condition)
    waited = threading.Event()
    for _ in range(200):
        if condition():
            return
        waited.wait(0.01)
    pytest.fail("did not happen within 2 s")


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ballast-client"]


def test_generate_and_stream(scripted: tuple[ScriptedDispatcher, str]) -> None:
    dispatcher, address = scripted
    with Client(address) as client:
        assert client.generate("a").text == "t0 t1 t2 "
        assert [chunk.text for chunk in client.stream("a")] == ["t0 ", "t1 ", "t2 "]
        assert client.generate("a", stream=True).collect().token_ids == (0, 1, 2)
        assert client.tokenize("a") == (97,)
        assert client.status().dispatcher_id == "d0"
        dispatcher.refuse = [Overloaded("full", 3.0)]
        with pytest.raises(Overloaded):
            client.generate("a")
        assert client.drain(address) == 0
    assert client_threads() == []


def test_many_threads_share_one_client(scripted: tuple[ScriptedDispatcher, str]) -> None:
    _, address = scripted

    def answer(prompt: str) -> str:
        return "".join(chunk.text for chunk in client.stream(prompt))

    with Client(address) as client, ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(answer, ["a"] * 40))
    assert texts == ["t0 t1 t2 "] * 40


@pytest.mark.parametrize("way", ["break", "close", "with"])
def test_leaving_a_stream_cancels_it(scripted: tuple[ScriptedDispatcher, str], way: str) -> None:
    dispatcher, address = scripted
    dispatcher.tokens, dispatcher.pause_s = 1000, 0.02
    with Client(address) as client:
        match way:
            case "break":
                for _ in client.stream("a"):
                    break
            case "close":
                stream = client.stream("a")
                next(stream)
                stream.close()
                assert list(stream) == []
            case _:
                with client.stream("a") as stream:
                    next(stream)
        until(dispatcher.abandoned.is_set)
        assert dispatcher.running == {}


def test_closing_ends_waiting_calls(scripted: tuple[ScriptedDispatcher, str]) -> None:
    dispatcher, address = scripted
    dispatcher.pause_s = 30.0
    client = Client(address)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: client.generate("a"))
        until(lambda: dispatcher.running)
        client.close()
        with pytest.raises(Cancelled):
            waiting.result(60)
    client.close()
    with pytest.raises(Unavailable, match="closed"):
        client.generate("a")
    assert client_threads() == []


def test_a_stream_that_outlives_its_client_is_harmless(scripted: tuple[ScriptedDispatcher, str]) -> None:
    dispatcher, address = scripted
    dispatcher.tokens, dispatcher.pause_s = 1000, 0.02
    with Client(address) as client:
        stream = client.stream("a")
        next(stream)
    until(dispatcher.abandoned.is_set)
    with pytest.raises(Unavailable):
        next(stream)
    del stream
    gc.collect()

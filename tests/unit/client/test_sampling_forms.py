"""Sampling as users write it (a mapping, one stop or a list of stops), and usage under OpenAI's names."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

import ballast.client
from ballast.client import AsyncClient, Client, InvalidRequest, SamplingParams, Unavailable, Usage
from tests.support.scripted_dispatcher import serving_in_thread


def test_a_mapping_and_lists_are_accepted() -> None:
    with serving_in_thread() as (dispatcher, address), Client(address) as client:
        answer = client.generate("x", {"max_tokens": 4, "stop": ["a", "b"], "stop_token_ids": [7]})
        client.generate("x", {"stop": "end"})
    first, second = dispatcher.requests
    assert (first.sampling.max_tokens, list(first.sampling.stop), list(first.sampling.stop_token_ids)) == (
        4,
        ["a", "b"],
        [7],
    )
    assert list(second.sampling.stop) == ["end"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 3, 8)


def test_max_tokens_overrides_the_sampling_mapping() -> None:
    with serving_in_thread() as (dispatcher, address), Client(address) as client:
        client.generate("x", max_tokens=4)
        client.generate("x", SamplingParams(max_tokens=9, seed=3), max_tokens=5)
        client.generate("x", {"max_tokens": 9, "seed": 3}, max_tokens=6)
        list(client.stream("x", max_tokens=7))
        with pytest.raises(InvalidRequest, match=r"sampling\.max_tokens: must be between 1 and"):
            client.generate("x", max_tokens=0)
    assert [request.sampling.max_tokens for request in dispatcher.requests] == [4, 5, 6, 7]
    assert [request.sampling.seed for request in dispatcher.requests[1:3]] == [3, 3]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(InvalidRequest, match=r"sampling\.max_token: is not known.*max_tokens"),
    ):
        client.generate("x", {"max_token": 4})


def test_the_sdk_exports_its_errors_and_types() -> None:
    assert {"InvalidRequest", "Overloaded", "Unavailable", "BallastError", "ModelInfo"} <= set(ballast.client.__all__)
    assert all(hasattr(ballast.client, name) for name in ballast.client.__all__)
    assert Usage is ballast.client.Usage


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"prompt": 5}, "prompt: must be text, got 5"),
        ({"prompt": "x", "sampling": 5}, "sampling: must be SamplingParams or a mapping, got 5"),
        ({"prompt": "x", "sampling": {"stop": 5}}, "sampling.stop: must be a list, got 5"),
        ({"prompt": "x", "sampling": {"stop": [5]}}, "sampling.stop: must be strings, got 5"),
        ({"prompt": "x", "sampling": {"stop_token_ids": "5"}}, "sampling.stop_token_ids: must be a list, got '5'"),
        ({"messages": [5]}, "messages[0]: must be a ChatMessage or a mapping, got 5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]: only parts of type text are supported",
        ),
    ],
)
def test_arguments_of_the_wrong_type_are_named(given: dict[str, Any], why: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as refused:
        client.generate(**given)
    assert str(refused.value) == why


def test_content_may_consist_of_text_parts() -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "ship"}]
    with serving_in_thread() as (dispatcher, address), Client(address) as client:
        client.generate(messages=[{"role": "user", "content": parts}])
    assert dispatcher.requests[0].conversation.messages[0].content == "Hello, ship"


def test_a_closed_client_says_so() -> None:
    async def story() -> None:
        client = AsyncClient("127.0.0.1:1")
        await client.close()
        with pytest.raises(Unavailable, match="client: is closed"):
            await client.generate("x")

    asyncio.run(story())
    client = Client("127.0.0.1:1")
    client.close()
    with pytest.raises(Unavailable, match="client: is closed"):
        client.generate("x")


def test_the_import_loads_nothing_that_only_failures_and_tls_need() -> None:
    code = "import sys, ballast.client; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    later = {"google.rpc", "grpc_status", "secrets", "hmac", "ballast.rpc.tls"}
    assert later & set(done.stdout.split()) == set()

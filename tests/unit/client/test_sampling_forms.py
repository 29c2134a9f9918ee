"""Sampling as people write it: a mapping, a list of stops, one stop; and usage by OpenAI's names."""

import pytest

import ballast.client
from ballast.client import Client, InvalidRequest, Usage
from tests.support.scripted_dispatcher import serving_in_thread


def test_a_mapping_and_lists_are_taken() -> None:
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


def test_a_name_that_is_not_known_is_told_with_those_that_are() -> None:
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(InvalidRequest, match=r"sampling\.max_token: is not known.*max_tokens"),
    ):
        client.generate("x", {"max_token": 4})


def test_the_sdk_exports_its_errors_and_types() -> None:
    assert {"InvalidRequest", "Overloaded", "Unavailable", "BallastError", "ModelInfo"} <= set(ballast.client.__all__)
    assert all(hasattr(ballast.client, name) for name in ballast.client.__all__)
    assert Usage is ballast.client.Usage

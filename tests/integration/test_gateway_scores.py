"""Logprobs of prompts, in the way that lm-evaluation-harness and similar tools request them."""

from collections.abc import Generator
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI

from tests.support.cluster import RunningCluster

MODEL = "tiny"
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]
NOTHING: Any = {"logprobs": 1, "max_tokens": 0, "echo": True}


@pytest.fixture
def ai(with_a_gateway: RunningCluster) -> Generator[OpenAI]:
    with OpenAI(base_url=with_a_gateway.cluster.http_urls[0], api_key="unused", max_retries=0) as client:
        yield client


def generated(ai: OpenAI) -> tuple[list[int], Any]:
    """Greedy tokens and their logprobs."""
    options: Any = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}
    answer: Any = ai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1, **options)
    return answer.choices[0].token_ids, answer.choices[0].logprobs


def test_generated_tokens_have_the_same_logprobs_in_a_prompt(ai: OpenAI) -> None:
    tokens, logprobs = generated(ai)
    for limit in (0, 1):
        echoed: Any = ai.completions.create(
            model=MODEL, prompt=PROMPT + tokens, echo=True, logprobs=1, max_tokens=limit, temperature=0
        )
        [choice] = echoed.choices
        count = len(PROMPT) + len(tokens)
        assert len(choice.logprobs.token_logprobs) == count + limit
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.top_logprobs[0] is None
        scored = choice.logprobs.token_logprobs[len(PROMPT) : count]
        assert scored == pytest.approx(logprobs.token_logprobs, abs=1e-4)
        assert choice.logprobs.tokens[len(PROMPT) : count] == logprobs.tokens
        best = [max(top, key=top.get) for top in choice.logprobs.top_logprobs[len(PROMPT) : count]]
        assert best == logprobs.tokens, "greedy tokens have the highest logprob"
        lengths = [len(token) for token in choice.logprobs.tokens]
        assert choice.logprobs.text_offset == [sum(lengths[:at]) for at in range(len(lengths))]
        assert (echoed.usage.prompt_tokens, echoed.usage.completion_tokens) == (count, limit)
        assert choice.finish_reason == "length"


def test_texts_in_batches_and_streams(ai: OpenAI) -> None:
    prompts = ["A ship sails", "a"]
    whole = ai.completions.create(model=MODEL, prompt=prompts, **NOTHING)
    assert [choice.text for choice in whole.choices] == prompts
    for choice, prompt in zip(whole.choices, prompts, strict=True):
        stream = list(ai.completions.create(model=MODEL, prompt=prompt, stream=True, **NOTHING))
        assert "".join(part.choices[0].text for part in stream) == prompt
        logprobs = [part.choices[0].logprobs for part in stream if part.choices[0].logprobs is not None]
        assert logprobs[0] == choice.logprobs
    assert ai.completions.create(model=MODEL, prompt="A ship", max_tokens=0).choices[0].text == ""


def test_prompt_logprobs_are_vllms(ai: OpenAI, with_a_gateway: RunningCluster) -> None:
    tokens, logprobs = generated(ai)
    ask: Any = {"prompt_logprobs": 2}
    answer: Any = ai.completions.create(model=MODEL, prompt=PROMPT + tokens, max_tokens=1, extra_body=ask)
    found = answer.choices[0].prompt_logprobs
    assert (found[0], len(found)) == (None, len(PROMPT) + len(tokens))
    for position, token_id, logprob in zip(found[len(PROMPT) :], tokens, logprobs.token_logprobs, strict=True):
        assert position[str(token_id)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert position[str(token_id)]["rank"] == 1
        assert len(position) == 2
    assert answer.choices[0].logprobs is None
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **ask}
    chat = httpx.post(f"{with_a_gateway.cluster.http_urls[0]}/chat/completions", json=body).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["choices"][0]["logprobs"] is None
    with pytest.raises(openai.BadRequestError) as caught:
        ai.completions.create(model=MODEL, prompt="a", stream=True, extra_body=ask)
    assert caught.value.param == "prompt_logprobs"

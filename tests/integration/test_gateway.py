"""OpenAI's SDK against gateway, dispatchers and workers as real processes; answers are compared with those of our
SDK.
"""

import asyncio
import json
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import psutil
import pytest
from openai import AsyncOpenAI, OpenAI

from ballast.client import AsyncClient, ClusterStatus, Generation, SamplingParams
from tests.support.cluster import RunningCluster, idle, running_cluster, until
from tests.support.waiting import soon
from tools.model.tiny import make_preset

MODEL = "demo"
MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a ship, Schiff, 船"}]
TOKEN_IDS: Any = {"return_token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gateway") / MODEL
    make_preset("demo", folder)
    return folder


@pytest.fixture(scope="module")
def running(model: Path) -> Generator[RunningCluster]:
    with running_cluster(model, workers=2, gateways=1) as started:
        yield started


@pytest.fixture
def ai(running: RunningCluster) -> Generator[OpenAI]:
    with OpenAI(base_url=running.cluster.http_urls[0], api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def http(running: RunningCluster) -> Generator[httpx.Client]:
    with httpx.Client(base_url=running.cluster.http_urls[0].removesuffix("/v1"), timeout=60) as client:
        yield client


def through_the_sdk(running: RunningCluster, **arguments: Any) -> Generation:
    async def story() -> Generation:
        async with AsyncClient(running.cluster.address) as client:
            return await client.generate(**arguments)

    return running.run(story())


def everything_is_at_zero(running: RunningCluster) -> None:
    """Waits until all counters are zero, since the gateway notices a closed connection only when its event loop handles
    it.
    """

    def in_flight() -> list[str]:
        lines = http.get("/metrics").text.splitlines()
        return [line.split()[-1] for line in lines if line.startswith("ballast_gateway_") and "_in_flight" in line]

    async def story() -> None:
        async with AsyncClient(running.cluster.address) as client:
            await until(client, idle)
        await soon(lambda: in_flight() == ["0.0", "0.0"])

    with httpx.Client(base_url=running.cluster.http_urls[0].removesuffix("/v1"), timeout=60) as http:
        running.run(story())


# ----------------------------------------------------------------------------------------------- answers


def test_chat_equals_the_sdks_answer(running: RunningCluster, ai: OpenAI) -> None:
    ours = through_the_sdk(
        running, messages=MESSAGES, sampling=SamplingParams(max_tokens=24, temperature=0.9, top_p=0.8, seed=11)
    )
    answer = ai.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0.9, top_p=0.8, seed=11, extra_body=TOKEN_IDS
    )
    choice: Any = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", ours.text)
    assert (choice.token_ids, choice.finish_reason) == (list(ours.token_ids), "length")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == ours.usage.prompt_token_count
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (24, 24 + answer.usage.prompt_tokens)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", MODEL)

    chunks = list(
        ai.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_completion_tokens=24,
            temperature=0.9,
            top_p=0.8,
            seed=11,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ours.text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    # How many tokens arrive in one chunk depends on timing, but 900 never arrive in one.
    long = ai.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    assert len([chunk for chunk in long if chunk.choices[0].delta.content]) > 1


def test_cached_tokens_are_reported_and_a_salt_separates_caches(running: RunningCluster, ai: OpenAI) -> None:
    def cached_tokens(salt: str) -> int:
        answer = ai.completions.create(
            model=MODEL, prompt=list(range(40, 104)), max_tokens=2, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    found = [cached_tokens("one") for _ in range(6)]  # there are two workers, each with its own cache
    assert found[0] == 0
    assert max(found) == 48, "full blocks, without the last token"
    assert cached_tokens("other") == 0


def test_completions_equal_the_sdks_answers(running: RunningCluster, ai: OpenAI) -> None:
    ours = through_the_sdk(running, prompt="a ship", sampling=SamplingParams(max_tokens=16, temperature=0.0))
    tokens = [7, 8, 9]
    of_tokens = through_the_sdk(running, token_ids=tokens, sampling=SamplingParams(max_tokens=16, temperature=0.0))
    cases: Any = [("a ship", [ours.text]), (["a ship", "a ship"], [ours.text] * 2), (tokens, [of_tokens.text])]
    for prompt, expected in cases:
        answer = ai.completions.create(model=MODEL, prompt=prompt, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    echoed = ai.completions.create(model=MODEL, prompt=["a ship", "a ship"], temperature=0, echo=True, stream=True)
    texts = ["", ""]
    for chunk in echoed:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["a ship" + ours.text] * 2


def test_choices_differ_and_repeat_with_the_same_seed(running: RunningCluster, ai: OpenAI) -> None:
    def texts(**more: Any) -> list[str]:
        answer = ai.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, max_tokens=12, **more)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 36
        return [choice.message.content or "" for choice in answer.choices]

    first = texts(seed=5)
    assert len(set(first)) == 3
    assert texts(seed=5) == first
    assert texts() != first
    seeds = [SamplingParams(max_tokens=12, seed=5 + i) for i in range(3)]
    alone = [through_the_sdk(running, messages=MESSAGES, sampling=sampling) for sampling in seeds]
    assert [generation.text for generation in alone] == first
    streamed = ["", "", ""]
    stream = ai.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, max_tokens=12, seed=5, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == first


def test_logprobs_are_those_of_the_sdk(running: RunningCluster, ai: OpenAI) -> None:
    ours = through_the_sdk(running, messages=MESSAGES, sampling=SamplingParams(max_tokens=9, seed=3, logprobs=2))
    answer = ai.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=9, seed=3, logprobs=True, top_logprobs=2
    )
    said = answer.choices[0].logprobs
    assert said is not None
    assert said.content is not None
    assert [entry.logprob for entry in said.content] == [position.chosen.logprob for position in ours.logprobs]
    assert b"".join(bytes(entry.bytes or []) for entry in said.content).decode(errors="ignore") == ours.text
    expected = [[token.logprob for token in position.top] for position in ours.logprobs]
    assert [[token.logprob for token in entry.top_logprobs] for entry in said.content] == expected
    older = ai.completions.create(model=MODEL, prompt="a ship", max_tokens=5, logprobs=3, temperature=0)
    assert older.choices[0].logprobs is not None
    assert len(older.choices[0].logprobs.tokens or []) == 5
    assert (older.choices[0].logprobs.text_offset or [])[0] == 0


def test_bad_words_and_allowed_tokens(running: RunningCluster, ai: Any, http: httpx.Client) -> None:
    options: Any = {"model": MODEL, "max_tokens": 24, "temperature": 0, "prompt": "a ship"}

    def tokens(text: str) -> list[int]:
        return http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]

    def text_of(ids: list[int]) -> str:
        return http.post("/detokenize", json={"tokens": ids}).json()["prompt"]

    def written(**more: Any) -> list[int]:
        return ai.completions.create(**options, extra_body={**TOKEN_IDS, **more}).choices[0].token_ids

    plain = written()
    parts = [plain[i : i + length] for length in (2, 1) for i in range(24 - length)]
    part = next(ids for ids in parts if tokens(text_of(ids).strip()) == ids)
    bad = text_of(part).strip()
    without = written(bad_words=[bad])
    assert without[: plain.index(part[0])] == plain[: plain.index(part[0])]
    assert not any(without[i : i + len(part)] == part for i in range(24))
    allowed: Any = ai.completions.create(**options, extra_body={**TOKEN_IDS, "allowed_token_ids": [60, 70, 80]})
    assert set(allowed.choices[0].token_ids) <= {60, 70, 80}
    assert allowed.choices[0].finish_reason == "length"
    ours = through_the_sdk(
        running, prompt="a ship", sampling=SamplingParams(max_tokens=24, temperature=0, bad_words=(bad,))
    )
    assert list(ours.token_ids) == without


def test_usage_in_each_chunk(ai: Any) -> None:
    options: Any = {"stream": True, "stream_options": {"continuous_usage_stats": True}, "max_tokens": 12, "n": 2}
    options |= {"model": MODEL, "seed": 3}
    for chunks in (
        list(ai.chat.completions.create(messages=MESSAGES, **options)),
        list(ai.completions.create(prompt="a ship", **options)),
    ):
        *parts, last = chunks
        for index in range(2):
            of_choice = [chunk.usage for chunk in parts if chunk.choices[0].index == index]
            assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in of_choice)
            assert {usage.prompt_tokens for usage in of_choice} == {last.usage.prompt_tokens}
            counts = [usage.completion_tokens for usage in of_choice]
            assert counts == sorted(counts)
            assert len(set(counts)) > 1  # a chunk has all tokens since the previous one
        assert last.choices == []
        assert last.usage.completion_tokens == 24
    [*_, last] = ai.chat.completions.create(
        messages=MESSAGES, **{**options, "stream_options": {"include_usage": False}}
    )
    assert last.usage is None


def test_stop_strings_logit_bias_and_length_limits(running: RunningCluster, ai: OpenAI) -> None:
    plain = ai.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, temperature=0)
    text = plain.choices[0].message.content or ""
    stops = [text[4:7], "never, never"]
    stopped = ai.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20, temperature=0, stop=stops)
    assert stopped.choices[0].message.content == text[: text.index(stops[0])]
    assert stopped.choices[0].finish_reason == "stop"
    biased: Any = ai.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logit_bias={"50": 100}, extra_body=TOKEN_IDS
    )
    assert biased.choices[0].token_ids == [50] * 6
    without: Any = ai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=6,
        temperature=0,
        logit_bias={str(biased.choices[0].token_ids[0]): -100},
        extra_body={**TOKEN_IDS, "min_tokens": 6},
    )
    assert 50 not in without.choices[0].token_ids
    # Without any limit the answer ends at the model's maximum length.
    unlimited = ai.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}, timeout=120
    )
    assert unlimited.usage is not None
    assert unlimited.usage.total_tokens == 2048
    tier = ai.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, service_tier="flex")
    assert tier.service_tier == "flex"


def test_content_in_parts_and_alternative_role_names(running: RunningCluster, ai: OpenAI) -> None:
    parts: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "a ship, Schiff, 船"}]},
    ]
    answers = [
        ai.chat.completions.create(model=MODEL, messages=messages, max_tokens=5, temperature=0)
        for messages in (MESSAGES, parts)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        ai.chat.completions.create(model=MODEL, messages=picture)


def test_many_async_clients_at_once(running: RunningCluster) -> None:
    async def story() -> None:
        async with AsyncOpenAI(base_url=running.cluster.http_urls[0], api_key="x") as ai:

            async def one(seed: int) -> str:
                stream = await ai.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=16, seed=seed, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

            answers = await asyncio.gather(*(one(seed % 4) for seed in range(48)))
            assert [set(answers[i::4]) for i in range(4)] == [{answers[i]} for i in range(4)]

    running.run(story())
    everything_is_at_zero(running)


# ----------------------------------------------------------------------------------------------- refusals


def test_errors_have_openais_form(running: RunningCluster, ai: OpenAI, http: httpx.Client) -> None:
    def refused(status: int, param: str | None, code: str, **changes: Any) -> None:
        asked = {} if "prompt" in changes else {"messages": MESSAGES}
        path = "/completions" if "prompt" in changes else "/chat/completions"
        with pytest.raises(openai.APIStatusError) as caught:
            ai.post(path, body={"model": MODEL, **asked, **changes}, cast_to=object)
        error: Any = caught.value.body
        assert (caught.value.status_code, error["param"], error["code"]) == (status, param, code), error
        assert error["type"] == "invalid_request_error"
        assert error["message"]

    refused(404, "model", "model_not_found", model="gpt-9")
    refused(400, "temperature", "invalid_value", temperature=-1)
    refused(400, "temperature", "invalid_value", temperature="hot")
    refused(400, "max_tokens", "context_length_exceeded", max_tokens=5000)
    refused(400, "max_tokens", "invalid_value", max_tokens=0)
    refused(400, "messages", "invalid_value", messages=[])
    refused(400, "messages", "invalid_value", messages=[{"role": "ghost", "content": "boo"}])
    refused(400, "messages[0].content", "invalid_value", messages=[{"role": "user"}])
    refused(400, "top_logprobs", "invalid_value", logprobs=True, top_logprobs=21)
    refused(400, "n", "invalid_value", n=1000)
    refused(400, "logit_bias", "invalid_value", logit_bias={"x": 1})
    refused(400, "bad_words", "invalid_value", bad_words=["  "])
    refused(400, "bad_words", "invalid_value", bad_words="ship")
    refused(400, "allowed_token_ids", "invalid_value", allowed_token_ids=[])
    refused(400, "allowed_token_ids[0]", "invalid_value", allowed_token_ids=[1 << 30])
    refused(400, "functions", "unsupported_value", functions=[{"name": "f"}])
    refused(400, "prompt", "context_length_exceeded", prompt="a word " * 100_000)
    refused(400, "messages", "context_length_exceeded", messages=[{"role": "user", "content": "a word " * 100_000}])
    refused(400, "prompt[2]", "invalid_value", prompt=[1, 2, 1 << 30])
    refused(400, "regex", "invalid_value", structured_outputs={"regex": "["})

    for body in (b"{", b"[]", b"\xff", b"[" * 100_000):
        answer = http.post("/v1/chat/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    missing = http.post("/v1/chat/completions", json={})
    assert missing.json()["error"]["param"] == "messages"
    assert (http.post("/v1/chat/completions", content=b" " * (9 << 20)).status_code) == 413
    unknown = http.get("/v1/nothing")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
    assert http.get("/v1/chat/completions").status_code == 405
    everything_is_at_zero(running)


def test_small_endpoints(running: RunningCluster, ai: OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in ai.models.list()] == [MODEL]
    assert ai.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        ai.models.retrieve("other")
    assert http.get("/health").json() == {"status": "ok"}
    text = "a ship, 船 naïve"
    tokenized = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert tokenized["count"] == len(tokenized["tokens"])
    assert http.post("/detokenize", json={"tokens": tokenized["tokens"]}).json() == {"prompt": text}
    chat = http.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()
    longer = http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert 0 < chat["count"] < longer["count"]
    refused = http.post("/detokenize", json={"tokens": [1, 10**6]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens[1]")
    refused = http.post("/detokenize", json={"tokens": [2**31]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")
    refused = http.post("/v1/completions", json={"prompt": [1, 10**6], "echo": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt[1]")
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()


def test_request_ids_are_echoed_and_may_repeat(running: RunningCluster, ai: OpenAI) -> None:
    ids: set[str] = set()
    for _ in range(2):
        raw = ai.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "my-trace-7"}
        )
        assert raw.headers["x-request-id"] == "my-trace-7"
        ids.add(raw.parse().id)
    assert len(ids) == 2
    assert all("my-trace-7" in each for each in ids)


# ----------------------------------------------------------------------------------------------- disconnects


def test_a_disconnect_cancels_the_request(running: RunningCluster) -> None:
    async def story() -> None:
        endless: Any = {"model": MODEL, "messages": MESSAGES, "extra_body": {"ignore_eos": True}}
        async with AsyncOpenAI(base_url=running.cluster.http_urls[0], api_key="x", max_retries=0) as ai:
            for n in (1, 2):
                stream = await ai.chat.completions.create(**endless, stream=True, n=n)
                await anext(aiter(stream))
                await stream.close()
            for _ in range(2):  # the second time without streaming: the client leaves before it has the answer
                with pytest.raises(openai.APITimeoutError):
                    await ai.chat.completions.create(**endless, timeout=0.3)
            task = asyncio.create_task(ai.chat.completions.create(**endless))
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    running.run(story())
    everything_is_at_zero(running)
    with httpx.Client(base_url=running.cluster.http_urls[0].removesuffix("/v1"), timeout=60) as http:
        [line] = [line for line in http.get("/metrics").text.splitlines() if 'status="499"' in line]
        assert 'route="/v1/chat/completions"' in line
        assert float(line.split()[-1]) >= 3


def test_a_thousand_disconnects_leak_nothing(running: RunningCluster) -> None:
    host, port = running.cluster.processes["gateway"][0].address.rsplit(":", 1)
    body = json.dumps({"messages": MESSAGES, "stream": True, "ignore_eos": True, "n": 2}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    gateway = psutil.Process(running.cluster.processes["gateway"][0].pid)
    service = next(p for p in [gateway, *gateway.children()] if "services.gateway" in " ".join(p.cmdline()))

    async def leave(index: int, few: asyncio.Semaphore) -> None:
        """Sends a request of kind `index` and disconnects: after half of the request, or before, at or after the first
        token; cleanly or by a reset.
        """
        async with few:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head + (body if index % 8 else body[:-3]))
            if index % 8 > 1:
                await reader.readuntil(b"data: ")
            if index % 8 > 4:
                await asyncio.sleep(0.02)
            if index % 2:
                writer.transport.abort()
            else:
                writer.close()

    async def story() -> None:
        few = asyncio.Semaphore(50)
        async with asyncio.timeout(240):
            await asyncio.gather(*(leave(index, few) for index in range(1000)))

    everything_is_at_zero(running)
    files_before = service.num_fds()
    running.run(story(), timeout_s=250)
    everything_is_at_zero(running)
    # Allows for connections to dispatchers, and for this test's keep-alive connections.
    running.run(soon(lambda: service.num_fds() <= files_before + 8))


def test_overload_gives_a_retry_delay_and_a_lost_cluster_ends_streams_with_an_error(model: Path) -> None:
    flags: Any = {
        "dispatcher": ["--max-num-queued-reqs", "1", "--dev", "no_worker_timeout_s=1"],
        "worker": ["--max-num-seqs", "1"],
    }

    def accepted(status: ClusterStatus) -> int:
        return status.running_request_count + status.backlog_request_count

    with running_cluster(model, workers=1, gateways=1, flags=flags) as running:

        async def story() -> None:
            async with AsyncOpenAI(base_url=running.cluster.http_urls[0], api_key="x", max_retries=0) as ai:

                async def endless() -> str:
                    stream = await ai.chat.completions.create(
                        model=MODEL, messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}
                    )
                    return "".join([c.choices[0].delta.content or "" async for c in stream])

                tasks = [asyncio.create_task(endless()) for _ in range(8)]
                await soon(lambda: sum(task.done() for task in tasks) >= 4)  # two queue in the worker, one outside
                async with AsyncClient(running.cluster.address) as client:
                    await until(client, lambda now: accepted(now) == sum(not task.done() for task in tasks))
                running_on = [task for task in tasks if not task.done()]
                assert running_on
                for task in set(tasks) - set(running_on):
                    error = task.exception()
                    assert isinstance(error, openai.InternalServerError), error
                    assert (error.status_code, error.code, error.type) == (503, "overloaded", "server_error")
                    assert int(error.response.headers["retry-after"]) >= 1
                running.cluster.kill("worker")
                for task in running_on:
                    with pytest.raises(openai.APIError, match="worker"):
                        await task

        running.run(story())


def test_events_follow_the_specification(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 3, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events[:-2])


# --------------------------------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def with_page(model: Path) -> Generator[RunningCluster]:
    with running_cluster(model, workers=1, gateways=1, flags={"gateway": ["--dashboard", "true"]}) as running:
        yield running


def test_the_page_is_served_if_enabled_and_changes_nothing(with_page: RunningCluster) -> None:
    base = with_page.cluster.http_urls[0].removesuffix("/v1")
    with httpx.Client(base_url=base, timeout=60, follow_redirects=True) as http:
        assert "<title>Ballast</title>" in http.get("/dashboard").text
        assert http.get("/dashboard/static/app.js").status_code == 200

        def state() -> dict[str, Any]:
            return http.get("/dashboard/api/state").json()

        def workers() -> list[str]:
            return [worker["id"] for worker in state()["clusters"][0]["workers"]]

        with_page.run(soon(lambda: workers() == ["worker-0"]))
        [cluster] = state()["clusters"]
        assert (state()["load"], cluster["can_operate"], cluster["can_kill"]) == (None, False, False)
        for action in ("burst", "steady", "drop", "restore", "kill?worker=worker-0"):
            answer = http.post(f"/dashboard/api/{action}", headers={"X-Ballast-Dashboard": "1"})
            assert answer.status_code == 404, action
        assert http.get("/v1/models").status_code == 200


def test_the_page_is_not_served_by_default(http: httpx.Client) -> None:
    assert http.get("/dashboard").status_code == 404


def test_a_stopped_gateway_finishes_its_requests(with_page: RunningCluster) -> None:
    async def story() -> None:
        async with AsyncOpenAI(base_url=with_page.cluster.http_urls[0], api_key="x", max_retries=0) as ai:
            stream = await ai.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            )
            await anext(aiter(stream))
            process = with_page.cluster.kill("gateway", number=signal.SIGTERM)
            last = [chunk async for chunk in stream][-1]
            assert last.choices[0].finish_reason == "length"
            await soon(lambda: process.child.returncode is not None)
            assert process.child.returncode == 0

    with_page.run(story())

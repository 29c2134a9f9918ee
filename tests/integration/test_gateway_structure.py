"""Structured answers (JSON schemas, grammars, tool calls), also while the cluster drops, restores or loses a worker."""

import asyncio
import json
import os
import random
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from ballast.client import AsyncClient
from ballast.rpc.channel import open_channel
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from tests.support.cluster import RunningCluster, running_cluster, until
from tests.support.public_schemas import public_schemas
from tests.support.schemas import random_schema
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.rotating

MODEL = "tiny"
MESSAGES: Any = [{"role": "user", "content": "a ship"}]
COUNT = int(os.environ.get("BALLAST_SCHEMAS", "40"))  # random schemas
PUBLIC_COUNT = int(os.environ.get("BALLAST_PUBLIC_SCHEMAS", "24"))  # schemas of the Kubernetes API, drawn at random
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
            "required": ["days", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "description": "no arguments"}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningCluster]:
    model = Path(make_tiny("qwen2", tmp_path_factory.mktemp("structure") / MODEL, max_len=2048, vocab=700))
    flags: Any = {"worker": ["--dtype", "float64"], "planner": ["--overload-policy", "recompute"]}
    with running_cluster(model, workers=2, gateways=1, device_memory_bytes=16 << 20, flags=flags) as started:
        yield started


@pytest.fixture
def ai(running: RunningCluster) -> Generator[OpenAI]:
    with OpenAI(base_url=running.cluster.http_urls[0], api_key="unused", max_retries=0) as client:
        yield client


def as_format(schema: object) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


async def ask(ai: AsyncOpenAI, seed: int) -> str:
    """An answer to one of the random schemas, streamed for some seeds."""
    options: Any = {
        "model": MODEL,
        "messages": MESSAGES,
        "seed": seed,
        "temperature": seed % 3 / 2,
        "response_format": as_format(random_schema(seed)),
    }
    if seed % 2:
        answer = await ai.chat.completions.create(**options)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content or ""
    chunks = [chunk async for chunk in await ai.chat.completions.create(**options, stream=True)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.timeout(300 + 3 * COUNT)
def test_every_answer_validates_through_drops_restores_and_the_loss_of_a_worker(running: RunningCluster) -> None:
    async def all_of_them(ai: AsyncOpenAI) -> list[str]:
        few = asyncio.Semaphore(16)

        async def one(seed: int) -> str:
            async with few:
                return await ask(ai, seed)

        return await asyncio.gather(*(one(seed) for seed in range(COUNT)))

    async def story() -> None:
        async with AsyncOpenAI(base_url=running.cluster.http_urls[0], api_key="x", max_retries=0, timeout=180) as ai:
            calm = await all_of_them(ai)
            for seed, text in enumerate(calm):
                jsonschema.validate(json.loads(text), random_schema(seed))
            again = asyncio.create_task(all_of_them(ai))
            for change in ("Drop", "Restore"):
                await order(running, change)
            assert await again == calm
            again = asyncio.create_task(all_of_them(ai))
            await under_way(running, again)
            running.cluster.kill("worker")
            assert await again == calm

    running.run(story(), timeout_s=240 + 3 * COUNT)
    running.run(replace_the_lost_one(running))


class Public:
    """Answers to the public set of schemas, in a fixed random order."""

    def __init__(self, ai: AsyncOpenAI, closing: dict[str, int]) -> None:
        self._ai = ai
        self._closing = closing
        self.schemas = list(public_schemas())
        random.Random(7).shuffle(self.schemas)
        self.refused: list[int] = []

    async def draw(self, count: int) -> list[int]:
        """Indices of the first `count` schemas that the cluster accepts. Schemas that it does not support must be
        refused at once.
        """
        taken: list[int] = []
        for number in range(len(self.schemas)):
            try:
                await self._ask(number, {}, max_tokens=1)
            except openai.BadRequestError as error:
                if "grammar" not in str(error):
                    raise
                self.refused.append(number)
            else:
                taken.append(number)
            if len(taken) == count:
                return taken
        raise AssertionError(f"only {len(taken)} schemas of {len(self.schemas)} are supported")

    async def answer(self, number: int) -> str:
        """The answer to a schema. A random model ends no string by itself, so a logit bias makes it close open ones:
        first a small bias, then a large one.
        """
        for push in (6, 100):
            choice = await self._ask(number, dict.fromkeys(self._closing, push), max_tokens=900)
            if choice.finish_reason == "stop":
                return choice.message.content or ""
        raise AssertionError(f"the answer to schema {number} did not end")

    async def _ask(self, number: int, bias: dict[str, int], max_tokens: int) -> Any:
        schema = self.schemas[number]
        answer = await self._ai.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            seed=number,
            temperature=1.0,
            max_tokens=max_tokens,
            logit_bias=bias,
            response_format=as_format(schema),
        )
        return answer.choices[0]


@pytest.mark.timeout(300 + 3 * PUBLIC_COUNT)
def test_answers_to_a_public_set_of_schemas_validate_through_drops_and_replays(running: RunningCluster) -> None:
    url = running.cluster.http_urls[0]
    with OpenAI(base_url=url, api_key="unused") as once:
        ends = closing(once, '"', "}", "]")

    async def story() -> None:
        async with AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=180) as ai:
            public, few = Public(ai, ends), asyncio.Semaphore(16)
            numbers = await public.draw(PUBLIC_COUNT)

            async def one(number: int) -> str:
                async with few:
                    return await public.answer(number)

            async def all_of_them() -> list[str]:
                return await asyncio.gather(*map(one, numbers))

            calm = await all_of_them()
            for number, text in zip(numbers, calm, strict=True):
                jsonschema.validate(json.loads(text), public.schemas[number])
            said = sum(map(len, calm)) / len(calm)
            print(f"{len(calm)} answers of {said:.0f} characters validate; {len(public.refused)} schemas were refused")
            assert said > 5, "the answers are almost empty"
            again = asyncio.create_task(all_of_them())
            for change in ("Drop", "Restore"):
                await order(running, change)
            assert await again == calm
            again = asyncio.create_task(all_of_them())
            await under_way(running, again)
            running.cluster.kill("worker")
            assert await again == calm

    running.run(story(), timeout_s=240 + 3 * PUBLIC_COUNT)
    running.run(replace_the_lost_one(running))


async def under_way(running: RunningCluster, asked: asyncio.Task[list[str]]) -> None:
    """Waits until requests run. Returns as well if all have ended, in case this process is too slow to see them
    running.
    """
    async with AsyncClient(running.cluster.address) as client:
        await until(client, lambda now: now.running_request_count > 0 or asked.done())


async def order(running: RunningCluster, change: str) -> None:
    """Requests a drop or a restore, and waits until it has ended."""
    async with open_channel(running.cluster.address) as channel:
        planner = planner_pb2_grpc.PlannerServiceStub(channel)
        request_id = uuid.uuid4().hex  # with the same id, the planner would return the earlier result
        if change == "Drop":
            names = [worker.id for worker in running.cluster.processes["worker"]]
            request = planner_pb2.DropRequest(worker_ids=names, request_id=request_id)
            epoch = (await planner.Drop(request, timeout=60)).epoch
        else:
            epoch = (await planner.Restore(planner_pb2.RestoreRequest(request_id=request_id), timeout=60)).epoch
        while True:
            listed = await planner.ListTransitions(planner_pb2.ListTransitionsRequest(), timeout=60)
            if any(one.epoch == epoch and one.phase == "done" for one in listed.transitions):
                return
            await asyncio.sleep(0.05)


async def replace_the_lost_one(running: RunningCluster) -> None:
    workers = running.cluster.processes["worker"]
    workers[:] = [worker for worker in workers if worker.child.returncode is None]
    await running.cluster.start_worker(["--dtype", "float64"])


def test_openais_parsing_and_other_forms_of_constraints(ai: OpenAI) -> None:
    class Ship(BaseModel):
        name: str = Field(max_length=6)
        masts: int = Field(ge=1, le=9)

    parsed = ai.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Ship, seed=1)
    assert isinstance(parsed.choices[0].message.parsed, Ship)
    some_object = ai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_object"},
        logit_bias=closing(ai),
        seed=2,
    )
    assert isinstance(json.loads(some_object.choices[0].message.content or ""), dict)
    for structure, expected in (
        ({"choice": ["port", "star board"]}, ("port", "star board")),
        ({"regex": "ab|船"}, ("ab", "船")),
        ({"grammar": 'start: "x" "y"?'}, ("x", "xy")),
    ):
        answer = ai.completions.create(
            model=MODEL, prompt="x", max_tokens=50, extra_body={"structured_outputs": structure}
        )
        assert answer.choices[0].text in expected
    with pytest.raises(openai.BadRequestError, match="ship"):
        ai.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=as_format({"type": "ship"}))
    broken: Any = {"type": "xml"}
    with pytest.raises(openai.BadRequestError, match="response_format"):
        ai.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=broken)


def closing(ai: OpenAI, *texts: str) -> dict[str, int]:
    """A logit bias that makes a random model end its JSON: it would extend an unbounded object forever."""
    url = f"{str(ai.base_url).removesuffix('/v1/')}/tokenize"
    tokens = [httpx.post(url, json={"prompt": text}).json()["tokens"] for text in texts or ("}",)]
    return {str(token): 100 for some in tokens for token in some}


def test_tools_are_called_as_asked(ai: OpenAI) -> None:
    named = ai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        seed=1,
    )
    calls: Any = named.choices[0].message.tool_calls
    assert (len(calls), calls[0].function.name, named.choices[0].finish_reason) == (1, "weather", "tool_calls")
    jsonschema.validate(json.loads(calls[0].function.arguments), WEATHER["function"]["parameters"])

    required = ai.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=[WEATHER, CLOCK],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=2,
    )
    calls = required.choices[0].message.tool_calls
    assert len(calls) == 1
    assert calls[0].function.name in ("weather", "clock")
    assert required.choices[0].message.content is None

    # A tool call that the model generates freely is parsed according to its chat template; here a grammar forces the
    # model to generate one.
    written = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    free: Any = {"structured_outputs": {"choice": [f"Let me see. {written}"]}}
    auto = ai.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[CLOCK], extra_body=free)
    message: Any = auto.choices[0].message
    assert (message.content, message.tool_calls[0].function.name) == ("Let me see. ", "clock")
    with ai.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[CLOCK], extra_body=free) as stream:
        final: Any = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == ("Let me see. ", "tool_calls")
    assert (final.message.tool_calls[0].function.name, final.message.tool_calls[0].function.arguments) == (
        "clock",
        "{}",
    )

    answered = ai.chat.completions.create(
        model=MODEL,
        messages=[
            *MESSAGES,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12:00"},
        ],
        tools=[CLOCK],
        max_tokens=4,
    )
    assert answered.usage is not None
    assert answered.usage.prompt_tokens > (auto.usage.prompt_tokens if auto.usage else 0)
    none = ai.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[CLOCK], tool_choice="none", extra_body=free
    )
    assert none.choices[0].message.tool_calls is None
    assert none.choices[0].message.content == f"Let me see. {written}"


def said(text: str, **fields: Any) -> Any:
    """Fields of a request whose structured output is exactly `text`."""
    return {"model": MODEL, "messages": MESSAGES, "extra_body": {"structured_outputs": {"choice": [text]}}, **fields}


def test_reasoning_is_separated_and_a_call_within_it_is_ignored(ai: OpenAI) -> None:
    call = '<tool_call>{"name": "clock"}</tool_call>'
    text = f"<think>\nI could {call}\n</think>\n\n{call}"
    [choice] = ai.chat.completions.create(**said(text, tools=[CLOCK])).choices
    message: Any = choice.message
    assert message.reasoning_content == 'I could <tool_call>{"name": "clock"}</tool_call>'
    assert (message.content, choice.finish_reason) == (None, "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("clock", "{}")]
    deltas: Any = [
        c.delta for e in ai.chat.completions.create(**said("<think>a b</think>c"), stream=True) for c in e.choices
    ]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "a b"
    assert "".join(delta.content or "" for delta in deltas) == "c"


def test_arguments_stream_and_parallel_calls_can_be_disabled(ai: OpenAI) -> None:
    arguments = '{"days": 1e0, "unit": "' + "a long text " * 20 + '"}'
    call = f'<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>'
    asked = said(call + call, tools=[WEATHER], parallel_tool_calls=False)
    [choice] = ai.chat.completions.create(**asked).choices
    calls: Any = choice.message.tool_calls
    assert [each.function.arguments for each in calls] == [arguments]
    deltas = [
        each.function.arguments
        for event in ai.chat.completions.create(**asked, stream=True)
        for streamed in event.choices
        for each in streamed.delta.tool_calls or []
        if each.function is not None
    ]
    assert "".join(delta or "" for delta in deltas) == arguments
    assert len(deltas) > 4


def test_an_answer_continues_the_last_message(ai: OpenAI, running: RunningCluster) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "The ship"}]
    on: Any = {"continue_final_message": True, "add_generation_prompt": False}
    asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 1}
    tokens = httpx.post(
        running.cluster.http_urls[0].removesuffix("/v1") + "/tokenize", json={"messages": messages, **on}
    )
    answer = ai.chat.completions.create(**asked, extra_body=on)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == tokens.json()["count"]
    with pytest.raises(openai.BadRequestError, match="cannot both be true"):
        ai.chat.completions.create(**asked, extra_body={**on, "add_generation_prompt": True})


def test_unsupported_keywords_of_a_non_strict_schema_are_ignored(ai: OpenAI) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2, "uniqueItems": True}
    loose: Any = as_format(numbers)
    loose["json_schema"]["strict"] = False
    raw = ai.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, response_format=loose)
    assert raw.headers["x-ballast-schema-ignored"] == "uniqueItems"
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        ai.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=as_format(numbers))


@pytest.mark.parametrize("count", [5, 3000])
def test_an_answer_is_one_of_many_choices(ai: OpenAI, count: int) -> None:
    choices = [f"w{i}" for i in range(count - 3)] + ["a.b*c", "[x] {1,2}", "船 & ~/\n"]
    options: Any = {"extra_body": {"structured_outputs": {"choice": choices}}}
    for seed in range(3):
        answer = ai.chat.completions.create(model=MODEL, messages=MESSAGES, seed=seed, temperature=1.5, **options)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content in choices


def test_a_schema_without_a_valid_value_is_refused(ai: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no text can follow"):
        ai.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=as_format({"$ref": "#"}))

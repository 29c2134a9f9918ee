"""Seeded requests give the same tokens, text and finish reason under any batching, preemption or cancellation (I2)."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from tokenizers import Tokenizer

from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from ballast.service.tokenizer import load_tokenizer
from services.worker.engine.load import Engine, load_engine
from tests.golden.conftest import CheckpointMaker
from tests.support.engine_loop import Answer, EngineLoop

pytestmark = [pytest.mark.golden]

REQUESTS = 36
VOCAB = 512
LOGPROB_TOLERANCE = {"float32": 1e-3, "float64": 1e-5}


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True)
class World:
    """An engine, the requests, and the answer that each request gives when it runs alone."""

    engine: Engine
    tokenizer: Tokenizer
    dtype: str
    requests: tuple[Request, ...]
    alone: tuple[Answer, ...]

    def loop(
        self, *, chunk_tokens: int = 512, running: int = 36, blocks: int | None = None, swap: tuple[int, int] = (0, 0)
    ) -> EngineLoop:
        """An engine loop. `swap`: the number of host-memory blocks, and the maximum number of blocks that a step
        copies.
        """
        return EngineLoop(
            self.engine,
            self.tokenizer,
            block_count=blocks,
            max_running_count=running,
            max_batch_tokens=chunk_tokens,
            swap_block_count=swap[0],
            swap_blocks_per_step=swap[1],
        )


def run(loop: EngineLoop, requests: Sequence[Request]) -> tuple[Answer, ...]:
    answers = tuple(loop.submit(request.prompt, request.sampling) for request in requests)
    loop.run()
    loop.finish()
    return answers


def make_requests() -> list[Request]:
    """Requests that combine all sampling parameters in many ways. At high temperatures, wrong random numbers change the
    tokens.
    """
    rng = random.Random(3)
    requests: list[Request] = []
    for index in range(REQUESTS):
        sampling = SamplingParams(
            max_tokens=rng.randint(20, 48),
            min_tokens=rng.choice((0, 0, 8)),
            temperature=rng.choice((0.0, 0.5, 0.9, 1.0, 1.6)) if index % 3 else 1.2,
            top_k=rng.choice((0, 0, 1, 20, 100)),
            top_p=rng.choice((1.0, 1.0, 0.9, 0.5)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
            presence_penalty=rng.choice((0.0, 0.0, 0.7, -0.5)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
            seed=rng.randrange(-(2**63), 2**63),
            ignore_eos=index % 4 == 1,
            skip_special_tokens=index % 5 != 2,
            logprobs=rng.choice((None, None, 0, 3)),
            bad_words_token_ids=tuple((token,) for token in range(5, VOCAB, 7)) if index % 4 == 2 else (),
            allowed_token_ids=tuple(range(0, VOCAB, 2)) if index % 6 == 3 else (),
        )
        requests.append(Request(tuple(rng.randrange(5, VOCAB) for _ in range(rng.choice((1, 9, 33, 90)))), sampling))
    return requests


def with_stops(index: int, request: Request, free: Answer) -> Request:
    """The request with stop strings and stop tokens taken from its own output, near its beginning or end, or spanning
    several tokens.
    """
    text, tokens, place = free.text, free.token_ids, 2 + index % 15
    include = index % 2 == 0
    match index % 4:
        case 0 if len(text) > place + 5:
            stops = (text[place + 1 : place + 5], "never in the text", text[place : place + 9] + "#")
            return replace(
                request,
                sampling=replace(request.sampling, stop=stops, include_stop_str_in_output=include, min_tokens=0),
            )
        case 3 if len(tokens) > place:
            stop_ids = (tokens[place], 7)
            return replace(
                request, sampling=replace(request.sampling, stop_token_ids=stop_ids, include_stop_str_in_output=include)
            )
        case _:
            return request


@pytest.fixture(scope="module", params=["float32", "float64"])
def world(request: pytest.FixtureRequest, checkpoint: CheckpointMaker) -> Iterator[World]:
    model_dir = checkpoint("llama3", False)
    tokenizer = load_tokenizer(model_dir)
    with load_engine(model_dir, dtype=request.param, device_memory_bytes=32 << 20, block_tokens=4) as engine:
        bare = World(engine, tokenizer, request.param, (), ())

        def alone(one: Request) -> Answer:
            return run(bare.loop(running=1), [one])[0]

        requests = tuple(with_stops(i, one, alone(one)) for i, one in enumerate(make_requests()))
        yield replace(bare, requests=requests, alone=tuple(map(alone, requests)))


def assert_same(world: World, answers: Sequence[Answer]) -> None:
    for index, (answer, alone) in enumerate(zip(answers, world.alone, strict=True)):
        assert answer.token_ids == alone.token_ids, f"request {index}: {alone.sampling}"
        assert answer.text == alone.text, f"request {index}: {alone.sampling}"
        assert_same_ending(answer, alone)
        assert_same_logprobs(world, answer, alone, 0)


def assert_same_ending(answer: Answer, alone: Answer) -> None:
    assert answer.ending is not None
    assert alone.ending is not None
    assert replace(answer.ending, handle=0) == replace(alone.ending, handle=0)


def assert_same_logprobs(world: World, answer: Answer, alone: Answer, first: int) -> None:
    assert len(answer.logprobs) == len(alone.logprobs[first:])
    for ours, wanted in zip(answer.logprobs, alone.logprobs[first:], strict=True):
        assert ours.token_id == wanted.token_id
        assert ours.logprob == pytest.approx(wanted.logprob, abs=LOGPROB_TOLERANCE[world.dtype])
        assert len(ours.top) == alone.sampling.logprobs
        assert [p for _, p in ours.top] == pytest.approx([p for _, p in wanted.top], abs=LOGPROB_TOLERANCE[world.dtype])


def test_the_requests_cover_every_kind_of_ending(world: World) -> None:
    endings = [answer.ending for answer in world.alone if answer.ending is not None]
    assert len(endings) == REQUESTS
    matched = [ending.matched_stop for ending in endings]
    assert sum(ending.finish_reason is FinishReason.LENGTH for ending in endings) >= 8
    assert sum(bool(stop) and not stop.isdecimal() for stop in matched) >= 4
    assert sum(stop.isdecimal() for stop in matched) >= 4
    assert sum(len(answer.logprobs) > 0 for answer in world.alone) >= 8
    assert len({tuple(answer.token_ids) for answer in world.alone}) == REQUESTS


def test_in_a_batch(world: World) -> None:
    assert_same(world, run(world.loop(), world.requests))


@pytest.mark.parametrize(("chunk_tokens", "running"), [(5, 5), (36, 36)])
def test_in_chunks(world: World, chunk_tokens: int, running: int) -> None:
    assert_same(world, run(world.loop(chunk_tokens=chunk_tokens, running=running), world.requests))


def test_in_another_order_of_arrival(world: World) -> None:
    order = random.Random(1).sample(range(REQUESTS), REQUESTS)
    loop, left = world.loop(chunk_tokens=64, running=20), list(order)
    answers: dict[int, Answer] = {}

    def arrive() -> bool:
        if left:
            index = left.pop()
            answers[index] = loop.submit(world.requests[index].prompt, world.requests[index].sampling)
        return bool(left)

    loop.run(arrive)
    loop.finish()
    assert_same(world, [answers[index] for index in range(REQUESTS)])


@pytest.mark.parametrize("blocks", [36, 60, 120])
def test_after_preemptions(world: World, blocks: int) -> None:
    loop = world.loop(blocks=blocks)
    answers = run(loop, world.requests)
    assert loop.core.totals.preemptions >= 3
    assert_same(world, answers)


@pytest.mark.parametrize(("blocks", "swap"), [(36, (200, 1)), (60, (30, 2)), (60, (200, 0)), (120, (200, 8))])
def test_after_swaps(world: World, blocks: int, swap: tuple[int, int]) -> None:
    loop = world.loop(blocks=blocks, swap=swap)
    answers = run(loop, world.requests)
    assert loop.copied_blocks >= 6
    assert_same(world, answers)


@pytest.mark.parametrize(("blocks", "host"), [(60, 200), (60, 12), (100, 60), (60, 0)])
def test_after_yields(world: World, blocks: int, host: int) -> None:
    """Every third request is an online request that arrives while the others run."""
    loop, answers = world.loop(blocks=blocks, swap=(host, 0)), dict[int, Answer]()
    order = random.Random(blocks).sample(range(REQUESTS), REQUESTS)
    online, turns = [i for i in order if i % 3 == 0], 0

    def submit(index: int, priority: PriorityClass) -> None:
        request = world.requests[index]
        answers[index] = loop.submit(request.prompt, request.sampling, priority=priority)

    def arrive() -> bool:
        nonlocal turns
        turns += 1
        if online and turns % 12 == 0:
            submit(online.pop(), PriorityClass.INTERACTIVE)
        return bool(online)

    for index in order:
        if index % 3:
            submit(index, PriorityClass.BATCH)
    loop.run(arrive)
    loop.finish()
    load = loop.load()
    assert load.offline_yields_total >= 6
    assert (loop.copied_blocks > 0) == (host > 0)
    assert_same(world, [answers[index] for index in range(REQUESTS)])


@pytest.mark.parametrize("part", [0.1, 0.5, 1.0])
def test_resumed_after_output_of_an_earlier_attempt(world: World, part: float) -> None:
    loop = world.loop(chunk_tokens=64)
    resumed: list[tuple[Answer, Answer, int]] = []
    for alone in world.alone:
        count = round(part * (len(alone.token_ids) - 1))
        chars = alone.text_chars[count - 1] if count else 0
        answer = loop.submit(alone.prompt, alone.sampling, output=alone.token_ids[:count], delivered_chars=chars)
        resumed.append((answer, alone, count))
    loop.run()
    loop.finish()
    for answer, alone, count in resumed:
        assert answer.token_ids == alone.token_ids[count:]
        chars = alone.text_chars[count - 1] if count else 0
        assert alone.text[:chars] + answer.text == alone.text
        assert_same_ending(answer, alone)
        assert_same_logprobs(world, answer, alone, count)

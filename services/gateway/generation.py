"""Sends requests to dispatchers, one per choice of an answer, and merges their chunks into one stream."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from ballast.client import AsyncClient, Generation, GenerationChunk, GenerationStream
from ballast.client.codec import Messages
from ballast.common.sampling import PriorityClass, SamplingParams
from services.gateway.metrics import GatewayMetrics

Numbered = tuple[int, GenerationChunk]  # (index of the choice, chunk)

_UNREAD_CHUNKS = 4  # limit per choice; further chunks wait in the dispatcher, which merges them


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The request for one choice. Exactly one of `prompt`, `token_ids` and `messages` is its prompt."""

    sampling: SamplingParams
    prompt: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Messages | None = None
    template_variables: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCaller:
    """Properties shared by all choices of a request.

    Attributes:
        request_id: Id of the first choice's request; for the others a number is appended.
        priority: Priority class.
        metadata: Metadata of the calls to dispatchers: authorization, traceparent, targets.
        fit_max_tokens: Reduce a `max_tokens` beyond the model's maximum length instead of refusing the request.
        cache_salt: KV in the prefix cache is shared only with requests that have the same salt.
    """

    request_id: str
    priority: PriorityClass
    metadata: Mapping[str, str]
    fit_max_tokens: bool
    cache_salt: str = ""


class Generator:
    """Sends requests to dispatchers, and counts those in progress in a metric."""

    def __init__(self, client: AsyncClient, metrics: GatewayMetrics) -> None:
        self._client = client
        self._gauge = metrics.generations

    async def collect(self, asks: Sequence[Ask], caller: RequestCaller) -> list[Generation]:
        """Return all answers, in order. If one fails, the others are cancelled.

        Raises:
            BallastError: the error of the first answer that failed.
        """
        if len(asks) == 1:
            return [await self._collect(asks[0], caller, 0)]
        tasks = [asyncio.create_task(self._collect(ask, caller, index)) for index, ask in enumerate(asks)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stream(self, asks: Sequence[Ask], caller: RequestCaller) -> AsyncGenerator[Numbered, None]:
        """Yield the chunks of all choices, each with the index of its choice. Closing the generator cancels the
        requests.
        """
        return self._one(asks[0], caller) if len(asks) == 1 else self._many(asks, caller)

    async def _one(self, ask: Ask, caller: RequestCaller) -> AsyncGenerator[Numbered, None]:
        with self._gauge.track_inprogress():
            async with self._begin(ask, caller, 0) as stream:
                async for chunk in stream:
                    yield 0, chunk

    async def _many(self, asks: Sequence[Ask], caller: RequestCaller) -> AsyncGenerator[Numbered, None]:
        queue: asyncio.Queue[tuple[int, GenerationChunk | Exception | None]]
        queue = asyncio.Queue(maxsize=_UNREAD_CHUNKS * len(asks))

        async def read(index: int, ask: Ask) -> None:
            last: Exception | None = None
            try:
                with self._gauge.track_inprogress():
                    async with self._begin(ask, caller, index) as stream:
                        async for chunk in stream:
                            await queue.put((index, chunk))
            except Exception as error:  # noqa: BLE001 - raised by the reader of the queue
                last = error
            await queue.put((index, last))

        tasks = [asyncio.create_task(read(index, ask)) for index, ask in enumerate(asks)]
        left = len(tasks)
        try:
            while left:
                index, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _collect(self, ask: Ask, caller: RequestCaller, index: int) -> Generation:
        with self._gauge.track_inprogress():
            return await self._client.generate(
                ask.prompt,
                ask.sampling,
                token_ids=ask.token_ids,
                messages=ask.messages,
                request_id=_request_id(caller, index),
                priority=caller.priority,
                fit_max_tokens=caller.fit_max_tokens,
                cache_salt=caller.cache_salt,
                template_variables=ask.template_variables,
                metadata=caller.metadata,
            )

    def _begin(self, ask: Ask, caller: RequestCaller, index: int) -> GenerationStream:
        return self._client.stream(
            ask.prompt,
            ask.sampling,
            token_ids=ask.token_ids,
            messages=ask.messages,
            request_id=_request_id(caller, index),
            priority=caller.priority,
            fit_max_tokens=caller.fit_max_tokens,
            cache_salt=caller.cache_salt,
            template_variables=ask.template_variables,
            metadata=caller.metadata,
        )


def _request_id(caller: RequestCaller, index: int) -> str:
    return f"{caller.request_id}-{index}" if index else caller.request_id


async def first_of(chunks: AsyncGenerator[Numbered, None]) -> Numbered:
    """Await the first chunk, so that an early failure is raised before the response begins."""
    try:
        return await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise

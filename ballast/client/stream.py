"""One running generation: an asynchronous iterator of chunks that owns its call."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import grpc
import grpc.aio

from ballast.client.codec import chunk_from_proto
from ballast.client.endpoints import Endpoint, Endpoints
from ballast.client.retry import OverloadRetry
from ballast.client.types import Generation, GenerationChunk
from ballast.common.errors import (
    AlreadyExists,
    BallastError,
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    PeerViolation,
    Unavailable,
)
from ballast.rpc.errors import from_rpc_error
from ballastpb.inference.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from grpc.aio import UnaryStreamCall

    Call = UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


Metadata = Mapping[str, str]


def to_pairs(metadata: Metadata | None) -> tuple[tuple[str, str], ...] | None:
    """As gRPC wants it."""
    return None if metadata is None else tuple((name.lower(), value) for name, value in metadata.items())


class GenerationStream(AsyncIterator[GenerationChunk]):
    """The chunks of one request. Made by `AsyncClient.stream`; the request is sent with the first `anext`.

    Leaving it early cancels the request at once: `break` out of `async for client.stream(...)`, `aclose()`, the end of
    `async with`, or cancelling the task that reads.

    Attributes:
        request_id: The id of the request: given, or minted by the SDK.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        request: pb.GenerateRequest,
        *,
        deadline_s: float | None,
        connect_timeout_s: float,
        metadata: Metadata | None,
        retry: OverloadRetry,
    ) -> None:
        self.request_id = request.request_id
        self._endpoints = endpoints
        self._request = request
        self._give_up_at_s = None if deadline_s is None else time.monotonic() + deadline_s
        self._connect_timeout_s = connect_timeout_s
        self._metadata = to_pairs(metadata)
        self._retry = retry
        self._call: Call | None = None
        self._target = ""
        self._finished = False  # the chunk with the finish reason has come
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationChunk:
        if self._closed:
            raise StopAsyncIteration
        try:
            response = await (self._begin() if self._call is None else self._read(self._call))
            if (response is None) != self._finished:
                where = "without a finish reason" if response is None else "later than at its finish reason"
                raise PeerViolation(self._target, f"{self.request_id}: the stream ended {where}")
        except BaseException:
            self.cancel()
            raise
        if response is None:
            self._closed = True
            raise StopAsyncIteration
        chunk = chunk_from_proto(response)
        self._finished = chunk.finish_reason is not None
        return chunk

    async def aclose(self) -> None:
        """Cancels the request if it has not ended. Safe to call more than once."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    async def collect(self) -> Generation:
        """Reads to the end.

        Returns:
            Everything that the remaining chunks carry, as one answer.
        """
        chunks = [chunk async for chunk in self]
        last = chunks[-1] if chunks else None
        if last is None or last.finish_reason is None or last.usage is None:
            raise PeerViolation(self._target, f"{self.request_id}: the last response lacks finish reason or usage")
        return Generation(
            request_id=self.request_id,
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            logprobs=tuple(logprobs for chunk in chunks for logprobs in chunk.logprobs),
            finish_reason=last.finish_reason,
            matched_stop=last.matched_stop,
            usage=last.usage,
        )

    def cancel(self) -> None:
        """What `aclose` does, for callers that cannot await. Only in the event loop's own thread."""
        self._closed = True
        if self._call is not None and not self._call.done():
            self._call.cancel()

    async def _begin(self) -> pb.GenerateResponse | None:
        """The first response: over any dispatcher that takes the request, after as many refusals as are allowed."""
        while True:
            try:
                return await self._try_each()
            except Overloaded as error:
                await self._retry.wait(error, self._time_left_s())

    async def _try_each(self) -> pb.GenerateResponse | None:
        """Asks the dispatchers in turn until one answers; nothing has been delivered yet, so nothing is repeated."""
        first: BallastError | None = None
        for endpoint in self._endpoints.in_turn():
            try:
                return await self._try(endpoint)
            except Unavailable as error:
                endpoint.avoid()
                first = first or error
            except Overloaded as error:
                first = error  # another dispatcher may have room; if none has, this says when to come again
            except AlreadyExists:
                # The record of a dispatcher that has just died may outlive it for a while.
                if first is None:
                    raise
        assert first is not None, "there is at least one dispatcher"
        raise first

    async def _try(self, endpoint: Endpoint) -> pb.GenerateResponse | None:
        left_s = self._time_left_s()
        if left_s is not None and left_s <= 0.0:
            raise DeadlineExceeded(f"{self.request_id}: no dispatcher took the request in time")
        stub = await endpoint.connect(min(self._connect_timeout_s, left_s or self._connect_timeout_s))
        self._target = endpoint.address
        self._call = stub.Generate(self._request, timeout=self._time_left_s(), metadata=self._metadata)
        return await self._read(self._call)

    async def _read(self, call: "Call") -> pb.GenerateResponse | None:
        """The next response, or None at the end of the stream."""
        try:
            response = await call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._target) from error
        except asyncio.CancelledError:
            # grpc.aio says this, too, when the *call* was cancelled: by the server, or by our own `aclose`.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Cancelled(f"{self.request_id}: the request was cancelled") from None
        return None if response is grpc.aio.EOF else cast(pb.GenerateResponse, response)

    def _time_left_s(self) -> float | None:
        return None if self._give_up_at_s is None else self._give_up_at_s - time.monotonic()

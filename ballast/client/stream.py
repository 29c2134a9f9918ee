"""One running generation: an asynchronous iterator of chunks that owns its call."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import grpc
import grpc.aio

from ballast.client.codec import chunk_from_proto
from ballast.client.endpoints import Endpoint, Endpoints
from ballast.client.resuming import Patience, Progress
from ballast.client.retry import OverloadRetry
from ballast.client.types import Generation, GenerationChunk, Usage
from ballast.common.errors import (
    AlreadyExists,
    BallastError,
    Cancelled,
    DeadlineExceeded,
    NotPossible,
    Overloaded,
    PeerViolation,
    Unavailable,
)
from ballast.rpc.errors import from_rpc_error
from ballastpb.inference.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from grpc.aio import UnaryStreamCall

    Call = UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]

_LONGEST_S = 1e8  # limit on deadlines, because gRPC ends calls with extremely long ones at once

Metadata = Mapping[str, str]


def to_pairs(metadata: Metadata | None) -> tuple[tuple[str, str], ...] | None:
    """Metadata as (key, value) pairs for gRPC."""
    return None if metadata is None else tuple((name.lower(), value) for name, value in metadata.items())


class GenerationStream(AsyncIterator[GenerationChunk]):
    """The chunks of one request. Created by `AsyncClient.stream`; the request is sent with the first `anext`.

    Leaving it early cancels the request at once: `break` out of `async for client.stream(...)`, `aclose()`, the end of
    `async with`, or cancelling the task that reads.

    If its dispatcher dies, the stream continues after the last received token at another dispatcher, or at the same one
    after its restart.

    Attributes:
        request_id: The id of the request, given or generated.
        resume_count: How often another (or a restarted) dispatcher has continued the request.
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
        resume_s: float,
    ) -> None:
        self.request_id = request.request_id
        self.resume_count = 0
        self._endpoints = endpoints
        self._request = request
        self._give_up_at_s = None if deadline_s is None else time.monotonic() + min(deadline_s, _LONGEST_S)
        self._connect_timeout_s = connect_timeout_s
        self._metadata = to_pairs(metadata)
        self._retry = retry
        self._progress = Progress(request) if resume_s > 0.0 else None
        self._patience = Patience(resume_s)
        self._began_s = time.monotonic()
        self._first_s: float | None = None  # time of the first response
        self._call: Call | None = None
        self._target = ""
        self._finished = False  # the chunk with the finish reason was received
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerationChunk:
        if self._closed:
            raise StopAsyncIteration
        try:
            response = await self._next()
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
        self._note(chunk, response.prompt_digest)
        self._finished = chunk.finish_reason is not None
        return chunk if chunk.usage is None or not self.resume_count else replace(chunk, usage=self._seen(chunk.usage))

    async def aclose(self) -> None:
        """Cancels the request if it is still running. Idempotent."""
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
        """Reads the stream to its end.

        Returns:
            The contents of the remaining chunks as one answer.
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
        """The same as `aclose`, for callers that cannot await. To be called only in the event loop's thread."""
        self._closed = True
        if self._call is not None and not self._call.done():
            self._call.cancel()

    async def _next(self) -> pb.GenerateResponse | None:
        call = self._call
        try:
            return await (self._begin() if call is None else self._read(call))
        except Unavailable as error:
            if self._finished:  # everything was received
                return None
            if self._progress is None or not error.gone:
                raise
            if call is not None:
                self._patience.begin()
                self._endpoints.avoid(self._target)
            return await self._resume(self._progress, error)

    async def _resume(self, progress: Progress, cut: Unavailable) -> pb.GenerateResponse | None:
        """Resume the request at any dispatcher and return the next response. `cut`: how the connection to the last one
        was lost.
        """
        while True:
            try:
                response = await self._try_each()
            except NotPossible as error:
                why = f"{cut.why} after {progress.token_count} tokens, and no dispatcher could resume it: {error}"
                raise Unavailable(cut.target, why) from error
            except (Unavailable, Overloaded, AlreadyExists) as error:
                await self._patience.wait(error, cut)
            else:
                self.resume_count += 1
                return response

    def _note(self, chunk: GenerationChunk, prompt_digest: int) -> None:
        if self._first_s is None:
            self._first_s = time.monotonic()
        if self._progress is not None:
            self._progress.add(chunk, prompt_digest)
            if chunk.token_ids:
                self._patience.restore()

    def _seen(self, usage: Usage) -> Usage:
        """The usage with times of the whole request, measured by this client, because the last dispatcher knows only
        its own part.
        """
        first_s = self._began_s if self._first_s is None else self._first_s
        return replace(usage, ttft_s=first_s - self._began_s, e2e_s=time.monotonic() - self._began_s)

    async def _begin(self) -> pb.GenerateResponse | None:
        """Send the request and return the first response. Refusals for overload are retried (`OverloadRetry`)."""
        while True:
            try:
                return await self._try_each()
            except Overloaded as error:
                await self._retry.wait(error, self._time_left_s())

    async def _try_each(self) -> pb.GenerateResponse | None:
        """Send the request to the dispatchers in turn until one answers; then retry the unreachable ones. The request
        contains the tokens so far, so that none is repeated.
        """
        first: BallastError | None = None
        endpoints = self._endpoints.in_turn()
        for patiently, endpoint in itertools.product((False, True), endpoints):
            if patiently and not endpoint.unreached:
                continue
            try:
                return await self._try(endpoint, patiently)
            except Unavailable as error:
                endpoint.avoid()
                if error.gone and self._progress is not None:
                    self._patience.begin()
                if first is None or error.gone:  # `gone` is more specific: the request was lost there
                    first = error
            except Overloaded as error:
                first = error  # another dispatcher may have capacity
            except AlreadyExists:
                # The claim of a dispatcher that has just died may still exist for a while.
                if first is None:
                    raise
        assert first is not None, "there is at least one dispatcher"
        raise first

    async def _try(self, endpoint: Endpoint, patiently: bool) -> pb.GenerateResponse | None:
        left_s = self._time_left_s()
        if left_s is not None and left_s <= 0.0:
            raise DeadlineExceeded(f"{self.request_id}: no dispatcher took the request in time")
        within_s = min(self._connect_timeout_s, left_s or self._connect_timeout_s)
        stub = await endpoint.connect(within_s, patiently=patiently)
        self._target = endpoint.address
        if self._progress is not None:
            self._progress.next_attempt()
        self._call = stub.Generate(self._request, timeout=self._time_left_s(), metadata=self._metadata)
        return await self._read(self._call)

    async def _read(self, call: "Call") -> pb.GenerateResponse | None:
        """The next response; None at the end of the stream."""
        try:
            response = await call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._target) from error
        except asyncio.CancelledError:
            # grpc.aio also raises this if the call was cancelled, by the server or by our own `aclose`.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Cancelled(f"{self.request_id}: the request was cancelled") from None
        return None if response is grpc.aio.EOF else cast(pb.GenerateResponse, response)

    def _time_left_s(self) -> float | None:
        return None if self._give_up_at_s is None else self._give_up_at_s - time.monotonic()

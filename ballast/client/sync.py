"""The client for code without asyncio: the same calls, run in the event loop of a background thread."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeVar, Unpack, overload

from ballast.client.aio import AsyncClient
from ballast.client.codec import Messages, Sampling
from ballast.client.options import RequestOptions
from ballast.client.stream import GenerationStream, Metadata
from ballast.client.types import ClusterStatus, EndedRequests, Generation, GenerationChunk, RequestStory
from ballast.common.errors import Cancelled, Unavailable
from ballast.common.model import ModelInfo

if TYPE_CHECKING:
    from pathlib import Path

_CLOSE_TIMEOUT_S = 10.0

T = TypeVar("T")


class _LoopThread:
    """An event loop in a daemon thread. `run` may be called from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.RLock()  # the garbage collector may close a stream while this thread holds the lock
        self._open = True
        self._thread = threading.Thread(target=self._run, name="ballast-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Runs a coroutine in the loop and returns its result. An interrupt of the waiting thread cancels it."""
        with self._lock:
            if not self._open:
                work.close()
                raise Unavailable("client", "is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise Cancelled("the client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def cancel(self, stream: GenerationStream) -> None:
        """Cancels a stream in the loop's thread, where it must also be released."""
        with self._lock:
            if self._open:
                self._loop.call_soon_threadsafe(stream.cancel)

    def close(self, last: Coroutine[object, object, None]) -> None:
        """Cancels all tasks, runs `last` and ends the thread. A second call does nothing."""
        with self._lock:
            if not self._open:
                last.close()
                return
            self._open = False
            self._loop.call_soon_threadsafe(self._finish_with, last)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _finish_with(self, last: Coroutine[object, object, None]) -> None:
        async def finish() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await last

        task = self._loop.create_task(finish())
        task.add_done_callback(lambda _: self._loop.stop())


class SyncGenerationStream(Iterator[GenerationChunk]):
    """The chunks of one request as an ordinary iterator. Created by `Client.stream`.

    Leaving it early cancels the request at once: `break` out of `for chunk in client.stream(...)`, `close()`, or the
    end of `with`.

    Attributes:
        request_id: The id of the request, given or generated.
    """

    def __init__(self, loop: _LoopThread, stream: GenerationStream) -> None:
        self.request_id = stream.request_id
        self._loop = loop
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> GenerationChunk:
        chunk = self._loop.run(_next_or_none(self._stream))
        if chunk is None:
            raise StopIteration
        return chunk

    def collect(self) -> Generation:
        """Reads the stream to its end and returns the remaining chunks as one answer."""
        return self._loop.run(self._stream.collect())

    def close(self) -> None:
        """Cancels the request if it is still running. Idempotent."""
        self._loop.cancel(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


async def _next_or_none(stream: GenerationStream) -> GenerationChunk | None:
    try:
        return await anext(stream)
    except StopAsyncIteration:  # cannot be raised through a future
        return None


class Client:
    """A connection to one or more dispatchers. Thread-safe.

    It takes the same arguments as `AsyncClient` and has the same methods without `await`, except `default_sampling`.
    Close it, or use it as a context manager.
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        overload_retries: int = 0,
        max_retry_wait_s: float = 30.0,
        resume_s: float = 30.0,
        connect_timeout_s: float = 5.0,
        call_timeout_s: float = 10.0,
        token: str | None = None,
        ca_file: "str | Path | None" = None,
        tls: bool | None = None,
    ) -> None:
        self._client = AsyncClient(
            address,
            overload_retries=overload_retries,
            max_retry_wait_s=max_retry_wait_s,
            resume_s=resume_s,
            connect_timeout_s=connect_timeout_s,
            call_timeout_s=call_timeout_s,
            token=token,
            ca_file=ca_file,
            tls=tls,
        )
        self._loop = _LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels running requests and closes the connections. Idempotent."""
        self._loop.close(self._client.close())

    @overload
    def generate(
        self,
        prompt: str | None = None,
        sampling: Sampling | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: str | None = None,
        sampling: Sampling | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[RequestOptions],
    ) -> SyncGenerationStream: ...

    def generate(
        self,
        prompt: str | None = None,
        sampling: Sampling | None = None,
        *,
        stream: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Generation | SyncGenerationStream:
        """Generates an answer to one prompt; see `AsyncClient.generate` for arguments and errors."""
        if stream:
            return self.stream(prompt, sampling, **options)
        return self._loop.run(self._client.generate(prompt, sampling, **options))

    def stream(
        self, prompt: str | None = None, sampling: Sampling | None = None, **options: Unpack[RequestOptions]
    ) -> SyncGenerationStream:
        """The same as `generate(..., stream=True)`: `for chunk in client.stream("Once upon a time"): ...`"""
        return SyncGenerationStream(self._loop, self._client.stream(prompt, sampling, **options))

    def cancel(self, request_id: str) -> bool:
        """Cancels a request, including one sent by another client; see `AsyncClient.cancel`."""
        return self._loop.run(self._client.cancel(request_id))

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        template_variables: Mapping[str, object] | None = None,
        add_special_tokens: bool = True,
        metadata: Metadata | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a text or a conversation, as the model would receive them."""
        return self._loop.run(
            self._client.tokenize(
                prompt,
                messages=messages,
                template_variables=template_variables,
                add_special_tokens=add_special_tokens,
                metadata=metadata,
            )
        )

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, metadata: Metadata | None = None
    ) -> str:
        """The text of token ids."""
        return self._loop.run(
            self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens, metadata=metadata)
        )

    def model_info(self, *, metadata: Metadata | None = None) -> ModelInfo:
        """Facts about the served model."""
        return self._loop.run(self._client.model_info(metadata=metadata))

    def chat_template(self, *, metadata: Metadata | None = None) -> str:
        """The source of the model's chat template; empty if it has none."""
        return self._loop.run(self._client.chat_template(metadata=metadata))

    def status(self, address: str | None = None) -> ClusterStatus:
        """The cluster as one dispatcher sees it; see `AsyncClient.status`."""
        return self._loop.run(self._client.status(address))

    def describe_request(self, request_id: str) -> RequestStory:
        """The history of a request; see `AsyncClient.describe_request`."""
        return self._loop.run(self._client.describe_request(request_id))

    def ended_requests(self, address: str, after: int | None = None) -> EndedRequests:
        """Arrival times and lengths of requests that have ended at one dispatcher; see `AsyncClient.ended_requests`."""
        return self._loop.run(self._client.ended_requests(address, after))

    def drain(self, address: str) -> int:
        """Makes one dispatcher refuse new requests; see `AsyncClient.drain`."""
        return self._loop.run(self._client.drain(address))

    def undrain(self, address: str) -> None:
        """Reverts `drain`; see `AsyncClient.undrain`."""
        self._loop.run(self._client.undrain(address))

    def drain_worker(self, worker_id: str) -> int:
        """Takes a worker out of routing at all dispatchers; see `AsyncClient.drain_worker`."""
        return self._loop.run(self._client.drain_worker(worker_id))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the dispatchers."""
        return self._client.addresses

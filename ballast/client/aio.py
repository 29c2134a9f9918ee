"""The asynchronous client."""

import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self, TypeVar, Unpack, overload

import grpc

from ballast.client.access import Access
from ballast.client.codec import (
    Messages,
    Sampling,
    checked_sampling,
    checked_text,
    conversation_to_proto,
    ended_from_proto,
    request_to_proto,
    require_one_prompt,
    status_from_proto,
    story_from_proto,
)
from ballast.client.endpoints import Endpoint, Endpoints
from ballast.client.options import RequestOptions
from ballast.client.retry import OverloadRetry
from ballast.client.stream import GenerationStream, Metadata, to_pairs
from ballast.client.types import ClusterStatus, EndedRequests, Generation, RequestStory
from ballast.common.addresses import default_address
from ballast.common.errors import InvalidRequest, NotFound, Unavailable
from ballast.common.model import ModelInfo
from ballast.common.sampling import PriorityClass
from ballast.rpc import codec
from ballast.rpc.errors import from_rpc_error
from ballastpb.inference.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from pathlib import Path

    from ballastpb.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub

T = TypeVar("T")


class AsyncClient:
    """A connection to one or more dispatchers, for asyncio. Use it inside one event loop.

    Requests are sent to the dispatchers in turn. If one is unavailable, the request moves to the next with the same id;
    if one dies in the middle of an answer, another continues it, and no token is lost or repeated.

    Args:
        address: host:port, several separated by commas, or a sequence of them. None: BALLAST_ADDRESS, or
            127.0.0.1:50051.
        overload_retries: How often a request that an overloaded cluster refuses is retried, each time after the delay
            given in the refusal. 0: `Overloaded` is raised at once.
        max_retry_wait_s: Longest delay to wait for; beyond it `Overloaded` is raised.
        resume_s: How long to look for a dispatcher that continues a request whose dispatcher has died, possibly the
            same one after a restart. 0: the request ends with `Unavailable`.
        connect_timeout_s: Limit for connecting to one dispatcher.
        call_timeout_s: Limit for all calls except generation.
        token: Token that authenticates this client to dispatchers. None: BALLAST_TOKEN, or no token; "": no token.
        ca_file: CA of the dispatchers' certificates (PEM); calls then use TLS. None: BALLAST_CA_FILE, or no CA.
        tls: True: TLS, with this machine's CAs if there is no `ca_file`. False: no TLS, even for the token. None:
            BALLAST_TLS (1 or 0), or TLS if there is a `ca_file`.

    Raises:
        InvalidRequest: an address is not host:port.
        ConfigError: the CA cannot be read, or a token would be sent to another machine unencrypted.
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
        self._endpoints = Endpoints(
            address if address is not None else default_address(), Access.of(token, ca_file, tls)
        )
        self._overload_retries = overload_retries
        self._max_retry_wait_s = max_retry_wait_s
        self._resume_s = resume_s
        self._connect_timeout_s = connect_timeout_s
        self._call_timeout_s = call_timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections and cancels running requests."""
        await self._endpoints.close()

    @overload
    def generate(
        self,
        prompt: str | None = None,
        sampling: Sampling | None = None,
        *,
        stream: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> Coroutine[object, object, Generation]: ...

    @overload
    def generate(
        self,
        prompt: str | None = None,
        sampling: Sampling | None = None,
        *,
        stream: Literal[True],
        **options: Unpack[RequestOptions],
    ) -> GenerationStream: ...

    def generate(
        self,
        prompt: str | None = None,
        sampling: Sampling | None = None,
        *,
        stream: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Coroutine[object, object, Generation] | GenerationStream:
        """Generates an answer to one prompt. Exactly one of `prompt`, `token_ids` and `messages` must be given.

        Args:
            prompt: The prompt as text.
            sampling: Sampling and stopping: `SamplingParams`, or a mapping with the same names. None: the defaults of
                `SamplingParams`.
            max_tokens: Maximum number of generated tokens; overrides `sampling`.
            token_ids: The prompt as tokens, used unchanged.
            messages: A conversation, rendered with the model's chat template.
            stream: False: await the result, a `Generation`. True: returns a `GenerationStream` at once.
            deadline_s: The request fails with `DeadlineExceeded` if it takes longer. None: no limit.
            request_id: Id of the request in logs and for `cancel`; must be unique among running requests. None: the
                client generates one.
            priority: interactive, default or batch.
            include_text: False: the answer has token ids only.
            fit_max_tokens: True: a `max_tokens` beyond the model's maximum length is reduced. False: it is refused.
            cache_salt: The prompt's KV in the prefix cache is shared only with requests that have the same salt.
            template_variables: Further variables of the chat template, such as tools or enable_thinking.
            metadata: gRPC metadata of the call, such as authorization or traceparent.

        Raises:
            InvalidRequest: the request is invalid; the message names the field.
            Overloaded: a limit was reached; `retry_after_s` says when to retry.
            Unavailable: no dispatcher could be reached, or none accepted the request.
            DeadlineExceeded: the deadline has passed.
            Cancelled: the request was cancelled.
        """
        generation = self._request(prompt, sampling, collect=not stream, **options)
        return generation if stream else generation.collect()

    def stream(
        self, prompt: str | None = None, sampling: Sampling | None = None, **options: Unpack[RequestOptions]
    ) -> GenerationStream:
        """The same as `generate(..., stream=True)`: `async for chunk in client.stream("Once upon a time"): ...`"""
        return self._request(prompt, sampling, collect=False, **options)

    def _request(
        self,
        prompt: str | None,
        sampling: Sampling | None,
        *,
        collect: bool,
        max_tokens: int | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Messages | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        priority: PriorityClass | str = PriorityClass.DEFAULT,
        include_text: bool = True,
        fit_max_tokens: bool = False,
        cache_salt: str = "",
        template_variables: Mapping[str, object] | None = None,
        metadata: Metadata | None = None,
    ) -> GenerationStream:
        request = request_to_proto(
            prompt,
            token_ids,
            messages,
            checked_sampling(sampling, max_tokens),
            request_id=request_id or f"sdk-{os.urandom(8).hex()}",
            priority=_priority(priority),
            include_text=include_text,
            collect=collect,
            fit_max_tokens=fit_max_tokens,
            cache_salt=cache_salt,
            template_variables=template_variables,
        )
        if deadline_s is not None and not deadline_s > 0.0:
            raise InvalidRequest("deadline_s", f"must be above 0, got {deadline_s}")
        return GenerationStream(
            self._endpoints,
            request,
            deadline_s=deadline_s,
            connect_timeout_s=self._connect_timeout_s,
            metadata=metadata,
            retry=OverloadRetry(self._overload_retries, self._max_retry_wait_s),
            resume_s=self._resume_s,
        )

    async def cancel(self, request_id: str) -> bool:
        """Cancels a request, including one sent by another client.

        Returns:
            True if a dispatcher knew the request.

        Raises:
            Unavailable: no dispatcher that answered knew it, and at least one did not answer.
        """
        unavailable: Unavailable | None = None
        for endpoint in self._endpoints.all:
            try:
                response = await self._ask(
                    endpoint, lambda s, t: s.Cancel(pb.CancelRequest(request_id=request_id), timeout=t)
                )
            except Unavailable as error:
                unavailable = error
            else:
                if response.found:
                    return True
        if unavailable is not None:
            raise unavailable
        return False

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        template_variables: Mapping[str, object] | None = None,
        add_special_tokens: bool = True,
        metadata: Metadata | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a text or a conversation, as the model would receive them."""
        require_one_prompt(prompt=prompt, messages=messages)
        request = pb.TokenizeRequest(omit_special_tokens=not add_special_tokens)
        if prompt is not None:
            request.text = checked_text("prompt", prompt)
        else:
            request.conversation.CopyFrom(conversation_to_proto(messages or (), template_variables))
        response = await self._ask_any(lambda s, t: s.Tokenize(request, timeout=t, metadata=to_pairs(metadata)))
        return tuple(response.ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, metadata: Metadata | None = None
    ) -> str:
        """The text of token ids."""
        try:
            request = pb.DetokenizeRequest(ids=token_ids, skip_special_tokens=skip_special_tokens)
        except (ValueError, TypeError) as error:
            raise InvalidRequest("token_ids", f"must be whole numbers below 2**31: {error}") from error
        response = await self._ask_any(lambda s, t: s.Detokenize(request, timeout=t, metadata=to_pairs(metadata)))
        return response.text

    async def model_info(self, *, metadata: Metadata | None = None) -> ModelInfo:
        """Facts about the served model."""
        response = await self._get_model_info(metadata)
        return codec.MODEL.record(response.model)

    async def chat_template(self, *, metadata: Metadata | None = None) -> str:
        """The source of the model's chat template; empty if it has none."""
        return (await self._get_model_info(metadata)).chat_template

    async def default_sampling(self, *, metadata: Metadata | None = None) -> Mapping[str, float]:
        """Sampling parameters recommended by the model's authors, by their names in `SamplingParams`."""
        return dict((await self._get_model_info(metadata)).default_sampling)

    async def status(self, address: str | None = None, *, metadata: Metadata | None = None) -> ClusterStatus:
        """The cluster as one dispatcher sees it.

        Args:
            address: The dispatcher to ask; None: any that answers.
            metadata: gRPC metadata of the call, such as authorization.
        """
        endpoints = [self._endpoint(address)] if address is not None else self._endpoints.in_turn()
        endpoint, response = await self._ask_first(
            endpoints, lambda s, t: s.GetStatus(pb.GetStatusRequest(), timeout=t, metadata=to_pairs(metadata))
        )
        return status_from_proto(response, endpoint.address)

    async def describe_request(self, request_id: str) -> RequestStory:
        """The history of a request that is in progress or ended recently.

        Raises:
            NotFound: all dispatchers answered, and none remembers it.
            Unavailable: no dispatcher that answered remembers it, and at least one did not answer.
        """
        missing: NotFound | Unavailable | None = None
        request = pb.DescribeRequestRequest(request_id=request_id)
        for endpoint in self._endpoints.all:
            try:
                response = await self._ask(endpoint, lambda s, t: s.DescribeRequest(request, timeout=t))
            except (NotFound, Unavailable) as error:
                missing = error if missing is None or isinstance(error, Unavailable) else missing
            else:
                return story_from_proto(response)
        assert missing is not None, "there is at least one dispatcher"
        raise missing

    async def ended_requests(self, address: str, after: int | None = None) -> EndedRequests:
        """Arrival times and lengths of the requests that have ended at one dispatcher since an earlier call.

        Args:
            address: The dispatcher to ask.
            after: `last` of the previous answer; None: the answer has no requests, only `last`, where to start.
        """
        request = pb.ListEndedRequest(after=after)
        return ended_from_proto(await self._ask(self._endpoint(address), lambda s, t: s.ListEnded(request, timeout=t)))

    async def drain(self, address: str) -> int:
        """Makes one dispatcher refuse new requests; running ones finish.

        Args:
            address: The dispatcher.

        Returns:
            Number of requests still running there.
        """
        response = await self._ask(self._endpoint(address), lambda s, t: s.Drain(pb.DrainRequest(), timeout=t))
        return response.running_request_count

    async def undrain(self, address: str) -> None:
        """Reverts `drain`: the dispatcher accepts requests again.

        Args:
            address: The dispatcher.

        Raises:
            Unavailable: the dispatcher does not answer, or is shutting down.
        """
        await self._ask(self._endpoint(address), lambda s, t: s.Undrain(pb.UndrainRequest(), timeout=t))

    async def drain_worker(self, worker_id: str) -> int:
        """Takes a worker out of routing at all dispatchers; its running requests finish.

        Returns:
            Number of requests that still run or wait in its group.

        Raises:
            NotFound: there is no such worker.
            Unavailable: no dispatcher or no planner answers.
        """
        request = pb.DrainWorkerRequest(worker_id=worker_id, request_id=f"drain-{os.urandom(6).hex()}")
        response = await self._ask_any(lambda s, t: s.DrainWorker(request, timeout=t))
        return response.running_request_count

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the dispatchers."""
        return tuple(endpoint.address for endpoint in self._endpoints.all)

    async def _get_model_info(self, metadata: Metadata | None) -> pb.GetModelInfoResponse:
        request = pb.GetModelInfoRequest()
        return await self._ask_any(lambda s, t: s.GetModelInfo(request, timeout=t, metadata=to_pairs(metadata)))

    def _endpoint(self, address: str) -> Endpoint:
        for endpoint in self._endpoints.all:
            if endpoint.address == address:
                return endpoint
        raise InvalidRequest("address", f"{address} is none of {', '.join(self.addresses)}")

    async def _ask_any(self, call: "Callable[[InferenceServiceAsyncStub, float], Awaitable[T]]") -> T:
        _, response = await self._ask_first(self._endpoints.in_turn(), call)
        return response

    async def _ask_first(
        self, endpoints: Sequence[Endpoint], call: "Callable[[InferenceServiceAsyncStub, float], Awaitable[T]]"
    ) -> tuple[Endpoint, T]:
        """The first of these dispatchers that is available, and its answer."""
        unavailable: Unavailable | None = None
        for endpoint in endpoints:
            try:
                return endpoint, await self._ask(endpoint, call)
            except Unavailable as error:
                endpoint.avoid()
                unavailable = unavailable or error
        assert unavailable is not None, "there is at least one dispatcher"
        raise unavailable

    async def _ask(self, endpoint: Endpoint, call: "Callable[[InferenceServiceAsyncStub, float], Awaitable[T]]") -> T:
        stub = await endpoint.connect(self._connect_timeout_s)
        try:
            return await call(stub, self._call_timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, endpoint.address) from error


def _priority(name: PriorityClass | str) -> PriorityClass:
    try:
        return PriorityClass(name)
    except ValueError as error:
        known = ", ".join(PriorityClass)
        raise InvalidRequest("priority", f"must be one of {known}; got {name!r}") from error

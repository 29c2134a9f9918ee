"""Handling of failed calls: the caller gets a status, the owner of the server a notification.

Only a broken invariant of this process stops the service. Errors of peers, clients, codecs, sockets and libraries end
only the call in which they occur.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from ballast.common.errors import BallastError, CallFailed, InvalidRequest, InvariantViolation, Overloaded
from ballast.rpc.bounds import CallBook, CallBounds, Held
from ballast.rpc.callers import ANYBODY, Admit, set_caller
from ballast.rpc.errors import from_rpc_error, to_status
from ballast.rpc.tls import HANDSHAKES
from ballast.rpc.wire import LARGE_BYTES, MAX_MESSAGES, has_too_many

# Any: types of requests and responses differ between calls; grpc.aio has no better type.
if TYPE_CHECKING:
    _Handler = grpc.RpcMethodHandler[Any, Any]
else:  # generic only in the type stubs
    _Handler = grpc.RpcMethodHandler
_Context = grpc.aio.ServicerContext[Any, Any]

_log = logging.getLogger(__name__)

MALFORMED: Final = "malformed"  # the bytes cannot be parsed
GONE: Final = "client_gone"  # the connection ended before everything was written


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A call that ended with an unexpected exception."""

    method: str  # "/ballastpb.worker.v1.WorkerService/Attach"
    cause: str  # MALFORMED, GONE or the name of an exception
    error: Exception

    @property
    def is_ours(self) -> bool:
        """True if code of this process is the cause."""
        return self.cause not in (MALFORMED, GONE)


def log_failure(failure: CallFailure) -> None:
    """Log a failure: the `on_failure` of owners without metrics."""
    _log.error("%s failed: %s", failure.method, failure.cause, exc_info=failure.error if failure.is_ours else None)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Converts errors of `ballast.common.errors` to rich statuses and reports unexpected ones to the server's owner.

    Args:
        on_bug: Called with a broken invariant of this process; the owner should stop.
        on_failure: Called with every other unexpected failure; the owner may count it and continue.
        admit: Identifies the caller of a Ballast method, or raises if the call is denied; None: all are permitted.
        bounds: Limits on connections, callers and large messages.
    """

    def __init__(
        self,
        on_bug: Callable[[InvariantViolation], None],
        on_failure: Callable[[CallFailure], None],
        admit: Admit | None = None,
        bounds: CallBounds | None = None,
    ) -> None:
        self._on_bug = on_bug
        self._on_failure = on_failure
        self._admit = admit
        self.book = CallBook(bounds or CallBounds())
        self.large_turn = asyncio.Lock()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _Guarded(handler, handler_call_details.method, self).handler()

    def check(self, method: str, context: _Context) -> None:
        """Authenticate and count the call. It runs before the handler, in the handler's task.

        Raises:
            Unauthenticated, PermissionDenied: the call is denied.
            Overloaded: a limit is reached.
        """
        caller = ANYBODY
        connection = context.peer()
        HANDSHAKES.has_call(connection)
        if self._admit is not None and method.startswith("/ballastpb."):
            caller = self._admit(method, context)
            set_caller(caller)
        self.book.enter(connection, caller.name, context)

    async def settle(self, error: Exception, method: str, context: _Context) -> None:
        """End the call with the status of an error that its handler raised. Always raises."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, grpc.aio.BaseError):
            self._on_failure(CallFailure(method, GONE, error))
            raise asyncio.CancelledError from error  # the caller disconnected
        known = self._known(error, method)
        if isinstance(known, InvariantViolation):
            self._on_bug(known)
        status = rpc_status.to_status(to_status(known))
        try:
            await context.abort_with_status(cast(Any, status))
        except (grpc.aio.InternalError, grpc.aio.UsageError) as late:
            raise asyncio.CancelledError from late  # the caller disconnected meanwhile

    def _known(self, error: Exception, method: str) -> BallastError:
        match error:
            case BallastError():
                return error
            case DecodeError():
                self._on_failure(CallFailure(method, MALFORMED, error))
                return InvalidRequest("message", "is not a valid message of this method")
            case grpc.RpcError():
                return from_rpc_error(error, "peer")
            case _:
                name = type(error).__name__
                self._on_failure(CallFailure(method, name, error))
                return CallFailed(f"unexpected {name}; see the log of the called service")


@dataclass(frozen=True, slots=True)
class _Garbage:
    """A refused request and its error, raised later, because an exception in the parser makes gRPC
    print a traceback.
    """

    error: Exception


@dataclass(frozen=True, slots=True)
class _Large:
    """A large request that is not parsed yet; it counts towards `CallBounds.large_bytes`. One is parsed at a time."""

    data: bytes
    held: Held


class _Guarded:
    """Wraps the handler of a method with checks before it and error handling."""

    def __init__(self, handler: _Handler, method: str, settler: ErrorInterceptor) -> None:
        self._handler = handler
        self._method = method
        self._settler = settler
        # A handler has exactly one of these four functions, depending on the method's kind.
        streaming, unary = (
            (handler.stream_stream, handler.stream_unary)
            if handler.request_streaming
            else (handler.unary_stream, handler.unary_unary)
        )
        # The request's parser is a class method of the generated message type.
        message_type: object = getattr(handler.request_deserializer, "__self__", None)
        self._descriptor = cast(Descriptor | None, getattr(message_type, "DESCRIPTOR", None))
        self._inner = cast(Callable[[Any, Any], Any], streaming if handler.response_streaming else unary)

    def handler(self) -> _Handler:
        handler = self._handler
        deserialize = handler.request_deserializer if handler.request_streaming else self._parse
        if not handler.response_streaming:
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            return make(cast(Any, self._call), cast(Any, deserialize), handler.response_serializer)
        shape = grpc.stream_stream_rpc_method_handler if handler.request_streaming else None
        make = shape or grpc.unary_stream_rpc_method_handler
        call = self._generate if inspect.isasyncgenfunction(self._inner) else self._write
        return make(cast(Any, call), cast(Any, deserialize), handler.response_serializer)

    def _parse(self, data: bytes) -> object:
        try:
            deserialize = cast(Any, self._handler.request_deserializer)
            if len(data) <= LARGE_BYTES:
                return deserialize(data)
            if self._descriptor is not None and has_too_many(data, self._descriptor):
                return _Garbage(InvalidRequest("message", f"has more than {MAX_MESSAGES} messages or many more fields"))
            return _Large(data, self._settler.book.hold(len(data)))
        except Overloaded as error:
            return _Garbage(error)
        except Exception as error:  # noqa: BLE001 - parsers may raise anything on hostile bytes
            return _Garbage(error if isinstance(error, DecodeError) else DecodeError(str(error)))

    # A streaming handler yields its responses or writes them to the context; the latter is cheaper per message.

    async def _generate(self, request: Any, context: _Context) -> AsyncIterator[Any]:
        try:
            self._settler.check(self._method, context)
            async for response in self._inner(await self._unwrapped(request), context):
                yield response
        except Exception as error:  # noqa: BLE001 - the one place where every failure becomes a status
            await self._settler.settle(error, self._method, context)

    async def _write(self, request: Any, context: _Context) -> None:
        try:
            self._settler.check(self._method, context)
            await self._inner(await self._unwrapped(request), context)
        except Exception as error:  # noqa: BLE001 - as above
            await self._settler.settle(error, self._method, context)

    async def _call(self, request: Any, context: _Context) -> Any:
        try:
            self._settler.check(self._method, context)
            return await self._inner(await self._unwrapped(request), context)
        except Exception as error:  # noqa: BLE001 - as above
            await self._settler.settle(error, self._method, context)

    async def _unwrapped(self, request: object) -> object:
        if isinstance(request, _Garbage):
            raise request.error
        if not isinstance(request, _Large):
            return request
        async with self._settler.large_turn:  # one at a time, yielding to other tasks in between
            await asyncio.sleep(0)
            return cast(Any, self._handler.request_deserializer)(request.data)

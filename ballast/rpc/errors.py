"""The mapping between errors and gRPC statuses, in both directions.

Details follow google.rpc: BadRequest for a client's mistake, RetryInfo for back-off, and always ErrorInfo, whose
`reason` names the class of the error, so that the caller raises the same class.
"""

import asyncio
import contextlib
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from ballast.common import errors

# These modules are imported lazily, because clients need them only after a failure.
if TYPE_CHECKING:
    from google.protobuf import any_pb2
    from google.rpc import error_details_pb2, status_pb2

T = TypeVar("T")

DOMAIN = "ballast"
_MOST_CHARS = 1000
_LONGEST_RETRY_S = 3600.0  # upper bound of a retry delay that a peer sends

_CODES: dict[type[errors.BallastError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotPossible: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotActive: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PeerViolation: grpc.StatusCode.INTERNAL,
    errors.CallFailed: grpc.StatusCode.INTERNAL,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InvariantViolation: grpc.StatusCode.INTERNAL,
}


def cut(text: str) -> str:
    """Truncate a text to 1000 characters, because errors quote input, and headers are limited to 16 KiB."""
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}... ({len(text):,} characters)"


def code_of(error: errors.BallastError) -> grpc.StatusCode:
    return _CODES[type(error)]


def to_status(error: errors.BallastError) -> "status_pb2.Status":
    """The rich status of an error, for `rpc_status.to_status`."""
    from google.protobuf import duration_pb2
    from google.rpc import error_details_pb2, status_pb2

    fields: dict[str, str] = {}
    details: list[any_pb2.Any] = []
    match error:
        case errors.InvalidRequest():
            fields = {"field": error.field, "why": error.why}
            violation = error_details_pb2.BadRequest.FieldViolation(field=cut(error.field), description=cut(error.why))
            details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
        case errors.Overloaded():
            fields = {"why": error.why}
            nanos, seconds = math.modf(error.retry_after_s)
            delay = duration_pb2.Duration(seconds=int(seconds), nanos=int(nanos * 1e9))
            details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
        case errors.Unavailable():
            fields = {"target": error.target, "why": error.why, **({"gone": "1"} if error.gone else {})}
        case errors.StaleEpoch():
            fields = {"what": error.what, "have": str(error.have), "want": str(error.want)}
        case errors.NotActive():
            fields = {"who": error.who}
        case errors.PeerViolation():
            fields = {"peer": error.peer, "why": error.why}
        case errors.ConfigError():
            fields = {"path": error.path, "why": error.why}
        case errors.InvariantViolation():
            fields = {"why": error.why}
        case _:
            pass
    fields = {name: cut(text) for name, text in fields.items()}
    info = error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata=fields)
    details.append(_pack(info))
    return status_pb2.Status(code=code_of(error).value[0], message=cut(str(error)), details=details)


def answered(answer: T | None, target: str) -> T:
    """Return the response of a unary call; grpc.aio's is None if the bytes cannot be parsed.

    Raises:
        PeerViolation: the response is None.
    """
    if answer is None:
        raise errors.PeerViolation(target, "its answer is not a valid message of the method")
    return answer


def is_cancelled() -> bool:
    """In a handler of CancelledError: True if this task is being cancelled, False if only the awaited call was."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


@contextlib.contextmanager
def asking(target: str) -> Generator[None]:
    """Context manager that converts every failure of a call to `target` into a BallastError.

    This includes gRPC's errors for ended streams, the event loop's errors for closed connections, and cancellation of
    the call, which would otherwise end a task that was not cancelled.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, target) from error
    except (grpc.aio.BaseError, asyncio.InvalidStateError, RuntimeError) as error:
        raise errors.Unavailable(target, f"the call failed: {error or type(error).__name__}") from error
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise errors.Unavailable(target, "the call was cancelled") from error


def from_rpc_error(error: grpc.RpcError, target: str) -> errors.BallastError:
    """The error that the server raised, or the closest one if the status has no details of a BallastError.

    `target` names the server in `Unavailable`, `PeerViolation` and gRPC's own `DeadlineExceeded`.
    """
    # grpc.aio's error has the same methods without being a grpc.Call.
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return errors.Unavailable(target, str(error))
    info, retry_after_s = _read_details(error)
    message = error.details() or ""
    if info is not None:
        try:
            return _rebuild(info, message, retry_after_s, target)
        except ValueError:
            return errors.PeerViolation(target, f"a status with invalid details: {message}")
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE:
            return errors.InvalidRequest("request", message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            # gRPC's own error for a message above the size limit: retrying does not help.
            if "larger than max" in message:
                return errors.InvalidRequest("request", f"{message} (max_message_bytes of the receiver)")
            return errors.Overloaded(message, 1.0)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineExceeded(f"{target}: no answer in time")
        case grpc.StatusCode.CANCELLED:
            return errors.Cancelled(message)
        case grpc.StatusCode.UNAUTHENTICATED:
            return errors.Unauthenticated(message)
        case grpc.StatusCode.PERMISSION_DENIED:
            return errors.PermissionDenied(message)
        case grpc.StatusCode.NOT_FOUND:
            return errors.NotFound(message)
        case grpc.StatusCode.ALREADY_EXISTS:
            return errors.AlreadyExists(message)
        case grpc.StatusCode.UNAVAILABLE:
            return errors.Unavailable(target, message, gone=True)
        case code:
            return errors.PeerViolation(target, f"{code.name if code else 'no status'}: {message}")


def _rebuild(
    info: "error_details_pb2.ErrorInfo", message: str, retry_after_s: float, target: str
) -> errors.BallastError:
    fields = info.metadata
    match info.reason:
        case "InvalidRequest":
            return errors.InvalidRequest(fields["field"], fields["why"])
        case "Unauthenticated":
            return errors.Unauthenticated(message)
        case "PermissionDenied":
            return errors.PermissionDenied(message)
        case "AlreadyExists":
            return errors.AlreadyExists(message)
        case "NotFound":
            return errors.NotFound(message)
        case "Overloaded":
            return errors.Overloaded(fields["why"], retry_after_s)
        case "Unavailable":
            return errors.Unavailable(fields["target"], fields["why"], gone=fields["gone"] == "1")
        case "DeadlineExceeded":
            return errors.DeadlineExceeded(message)
        case "Cancelled":
            return errors.Cancelled(message)
        case "StaleEpoch":
            return errors.StaleEpoch(fields["what"], int(fields["have"]), int(fields["want"]))
        case "NotPossible":
            return errors.NotPossible(message)
        case "NotActive":
            return errors.NotActive(fields["who"])
        case "PeerViolation":
            return errors.PeerViolation(fields["peer"], fields["why"])
        case "CallFailed":
            return errors.CallFailed(message)
        case "ConfigError":
            return errors.ConfigError(fields["path"], fields["why"])
        case "InvariantViolation":
            # a bug in another process, for which a relaying process must not stop
            return errors.PeerViolation(target, f"stopped because an invariant is broken: {fields['why']}")
        case _:
            return errors.PeerViolation(info.domain, f"unknown reason {info.reason}: {message}")


def _read_details(call: grpc.Call | grpc.aio.AioRpcError) -> "tuple[error_details_pb2.ErrorInfo | None, float]":
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    try:
        status = rpc_status.from_call(cast(grpc.Call, call))
    except (ValueError, DecodeError):
        return None, 1.0
    found, retry_after_s = None, 1.0
    for detail in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            found = info
        elif detail.Unpack(retry):
            told_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
            retry_after_s = min(_LONGEST_RETRY_S, max(0.0, told_s))
    return found, retry_after_s


def _pack(
    message: "error_details_pb2.BadRequest | error_details_pb2.RetryInfo | error_details_pb2.ErrorInfo",
) -> "any_pb2.Any":
    from google.protobuf import any_pb2

    packed = any_pb2.Any()
    packed.Pack(message)
    return packed

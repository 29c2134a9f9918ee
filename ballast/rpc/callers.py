"""The authenticated caller of the current call, for handlers."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio

from ballast.common.sampling import ALL_CLASSES, PriorityClass


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller.

    Attributes:
        name: Name of the token, or ROLE/ID of the certificate; empty without authentication.
        operates: The caller may change the cluster and other callers' requests.
        has_token: `name` is that of a token.
        classes: Priority classes that the caller's requests may have.
    """

    name: str
    operates: bool
    classes: frozenset[PriorityClass] = ALL_CLASSES
    has_token: bool = False


ANYBODY = Caller("", operates=True)

# Authenticates the caller of a method (its full name) before the handler runs. Raises Unauthenticated or
# PermissionDenied. Any: the message types do not matter here.
Admit: TypeAlias = Callable[[str, grpc.aio.ServicerContext[Any, Any]], Caller]

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def caller() -> Caller:
    """The caller of the call handled by this task."""
    return _caller.get()


def caller_name(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The name under which a caller's calls are counted: that of its token or certificate, or its host address if no
    authentication is required.
    """
    return caller().name or context.peer().rpartition(":")[0]


def set_caller(found: Caller) -> None:
    _caller.set(found)

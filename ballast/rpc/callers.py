"""The authenticated caller of the current call, for handlers."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc.aio

from ballast.common.sampling import ALL_CLASSES, PriorityClass


@dataclass(frozen=True, slots=True)
class Caller:
    """Attributes:
    name: Of the token, or ROLE/ID of the certificate; empty where nobody is asked who he is.
    operates: It may change the cluster, and what others have started.
    has_token: The name is that of a token.
    classes: That its requests may be of.
    """

    name: str
    operates: bool
    classes: frozenset[PriorityClass] = ALL_CLASSES
    has_token: bool = False


ANYBODY = Caller("", operates=True)

# Decides on a call (its full method name) before the handler sees it. Raises Unauthenticated or PermissionDenied.
# Any: the message types of a call do not matter here.
Admit: TypeAlias = Callable[[str, grpc.aio.ServicerContext[Any, Any]], Caller]

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def caller() -> Caller:
    """The caller of the call that this task handles."""
    return _caller.get()


def caller_name(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Whose share a call takes: the name of its token, or the address of its host where no token is asked for."""
    return caller().name or context.peer().rpartition(":")[0]


def set_caller(found: Caller) -> None:
    _caller.set(found)

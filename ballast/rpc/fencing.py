"""Fencing tokens: workers refuse orders of a planner that is no longer active.

The active planner sends its lease's token (`ballast.service.leadership`) with each order to a worker, as gRPC metadata.
A worker refuses orders with a lower token than the highest it has seen.
"""

from typing import Any

import grpc.aio

from ballast.common.errors import InvalidRequest, StaleEpoch

PLANNER_TOKEN = "planner token"  # `StaleEpoch.what` of a refused order
# Tokens are milliseconds of the state server's clock, or slightly more; larger ones are invalid. They fit into a
# double.
MAX_TOKEN = 1 << 52

_KEY = "ballast-planner-token"


def with_token(token: int) -> tuple[tuple[str, str], ...]:
    """gRPC metadata of an order with this fencing token."""
    return ((_KEY, str(token)),)


class Fence:
    """The highest fencing token that a worker has seen. It is used only in the worker's event loop."""

    def __init__(self) -> None:
        self.highest = 0  # highest seen so far

    # Any: the message types do not matter here.
    def admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Validate and record the token of an order before it is executed. An order without a token has token 0, which
        is valid until a higher one has been seen.

        Raises:
            StaleEpoch: a higher token was seen.
            InvalidRequest: the token is not a number up to `MAX_TOKEN`.
        """
        self.take(_token_of(context))

    def take(self, token: int) -> None:
        """Record the token of an order. Raises StaleEpoch if a higher one was seen."""
        if token < self.highest:
            raise StaleEpoch(PLANNER_TOKEN, token, self.highest)
        self.highest = token


def _token_of(context: grpc.aio.ServicerContext[Any, Any]) -> int:
    for key, value in context.invocation_metadata() or ():
        if key == _KEY:
            text = str(value)
            if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= MAX_TOKEN):
                raise InvalidRequest(_KEY, f"must be a number from 0 to {MAX_TOKEN}")
            return int(text)
    return 0

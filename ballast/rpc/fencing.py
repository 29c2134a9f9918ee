"""Fencing tokens of orders: orders of a former leader are refused.

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
    """Metadata of an order."""
    return ((_KEY, str(token)),)


class Fence:
    """Tracks the highest token of a worker. Used in its event loop."""

    def __init__(self) -> None:
        self.highest = 0  # highest seen so far

    # Any: the message types do not matter here.
    def admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Validate the token before an order is executed. An order without one counts as 0, valid until a token was
        seen.

        Raises:
            StaleEpoch: a higher token was seen.
            InvalidRequest: the token is not a number up to `MAX_TOKEN`.
        """
        self.take(_token_of(context))

    def take(self, token: int) -> None:
        """Record an order's token. Raises StaleEpoch like `admit`."""
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

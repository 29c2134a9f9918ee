"""Fencing tokens of orders: a former leader's orders are refused.

The active planner sends the token of its lease (`ballast.service.leadership`) with each order to a worker, as gRPC
metadata. A worker refuses an order with a lower token than it has seen.
"""

from typing import Any

import grpc.aio

from ballast.common.errors import InvalidRequest, StaleEpoch

PLANNER_TOKEN = "planner token"  # `StaleEpoch.what` of an order that is refused
# Tokens are milliseconds of the state server's clock, or a little more; larger ones are invalid. A double holds it.
MAX_TOKEN = 1 << 52

_KEY = "ballast-planner-token"


def with_token(token: int) -> tuple[tuple[str, str], ...]:
    """The metadata of an order."""
    return ((_KEY, str(token)),)


class Fence:
    """Lives in each worker, in its event loop."""

    def __init__(self) -> None:
        self.highest = 0  # seen so far

    # Any: the message types of a call do not matter here.
    def admit(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Validate the token before an order is executed. An order without a token counts as 0: valid until one was
        seen.

        Raises:
            StaleEpoch: a higher token was seen here.
            InvalidRequest: the token is no number up to `MAX_TOKEN`.
        """
        self.take(_token_of(context))

    def take(self, token: int) -> None:
        """Record the token of an order. Raises StaleEpoch as `admit`."""
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

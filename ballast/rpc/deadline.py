"""Deadlines over hops: relative time only, because clocks of two machines are never compared."""

from typing import Any, cast

import grpc.aio

# Taken off at every hop, so that the inner call gives up before the outer one does.
HOP_MARGIN_S = 0.005


# Any: the message types do not matter here.
def remaining_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds the caller is still willing to wait; None without a deadline."""
    # The type stub forgets that a call may have no deadline.
    left = cast(float | None, context.time_remaining())
    return None if left is None else max(0.0, left - HOP_MARGIN_S)

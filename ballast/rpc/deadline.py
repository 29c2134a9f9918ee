"""Deadlines over several hops, passed as relative times, because clocks of different machines are never compared."""

from typing import Any, cast

import grpc.aio

# Subtracted from the deadline at every hop, so that the inner call times out before the outer one.
HOP_MARGIN_S = 0.005


# Any: the message types do not matter here.
def remaining_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds until the caller's deadline, less HOP_MARGIN_S and at least 0; None if the caller has set none."""
    # The type stub omits that a call may have no deadline.
    left = cast(float | None, context.time_remaining())
    return None if left is None else max(0.0, left - HOP_MARGIN_S)

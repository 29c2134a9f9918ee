"""Limits on the calls per connection, on those per token, and on the total size of large messages.

Calls beyond a limit are refused with a reason that names the limit; other calls are not affected.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, cast

import grpc.aio

from ballast.common.errors import Overloaded
from ballast.rpc.channel import MAX_MESSAGE_BYTES

_RETRY_S = 1.0
_ENOUGH: Final = 16_384  # limit on calls waiting for their handlers (`SERVER_OPTIONS`)


@dataclass(frozen=True, slots=True)
class CallBounds:
    """Limits of a server.

    Attributes:
        per_connection: Maximum concurrent calls of one connection.
        per_caller: Maximum concurrent calls of one token, over all its connections; 0: unlimited.
        connections: Maximum open connections; further ones are closed at once. 0: unlimited.
        large_bytes: Maximum total size of requests in memory that are larger than 64 KiB.
        message_bytes: Maximum size of one request. gRPC itself refuses larger ones.
    """

    per_connection: int = _ENOUGH
    per_caller: int = 0
    connections: int = 0
    large_bytes: int = 1 << 30
    message_bytes: int = MAX_MESSAGE_BYTES

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        """Options of a gRPC server. Its limit on streams is twice that on calls: excess calls are refused with a
        reason, while streams beyond gRPC's limit would wait at the client.
        """
        bounds = {
            "grpc.max_concurrent_streams": 2 * self.per_connection,
            "grpc.max_receive_message_length": self.message_bytes,
            "grpc.max_allowed_incoming_connections": self.connections,
        }
        return tuple((name, most) for name, most in bounds.items() if most)


# Any: the message types do not matter here.
_Context = grpc.aio.ServicerContext[Any, Any]


class CallBook:
    """Counts running calls and enforces the limits. It is used only in the event loop of its server."""

    def __init__(self, bounds: CallBounds) -> None:
        self.bounds = bounds
        self.large_bytes = 0  # total size of large requests in memory
        self._of_connection: Counter[str] = Counter()
        self._of_caller: Counter[str] = Counter()

    @property
    def call_count(self) -> int:
        return self._of_connection.total()

    def enter(self, connection: str, caller: str, context: _Context) -> None:
        """Count a call until it has ended. An empty `caller` has no limit of its own.

        Raises:
            Overloaded: a limit is reached.
        """
        bounds = self.bounds
        if self._of_connection[connection] >= bounds.per_connection:
            raise Overloaded(
                f"this connection has {bounds.per_connection} calls under way, the most that one may have"
                " (max_calls_per_connection)",
                _RETRY_S,
            )
        if caller and bounds.per_caller and self._of_caller[caller] >= bounds.per_caller:
            raise Overloaded(
                f"the token {caller} has {bounds.per_caller} calls under way, the most that one may have"
                " (max_calls_per_token)",
                _RETRY_S,
            )
        self._of_connection[connection] += 1
        if caller:
            self._of_caller[caller] += 1

        def leave(_: object) -> None:
            _take_one(self._of_connection, connection)
            if caller:
                _take_one(self._of_caller, caller)

        context.add_done_callback(cast(Any, leave))

    def hold(self, byte_count: int) -> "Held":
        """Reserve memory for a large message, for the lifetime of the returned object.

        Raises:
            Overloaded: the limit is reached.
        """
        if self.large_bytes + byte_count > self.bounds.large_bytes:
            raise Overloaded(
                f"requests of {self.large_bytes:,} bytes are in progress, the limit is {self.bounds.large_bytes:,}"
                " (max_request_bytes)",
                _RETRY_S,
            )
        return Held(self, byte_count)


class Held:
    def __init__(self, book: CallBook, byte_count: int) -> None:
        self._book = book
        self._byte_count = byte_count
        book.large_bytes += byte_count

    def __del__(self) -> None:
        self._book.large_bytes -= self._byte_count


def _take_one(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]

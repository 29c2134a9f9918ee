"""Client channels, and the gRPC options of clients and servers."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

# Large enough for a prompt of a million tokens (packed varints), small enough to bound a hostile message.
MAX_MESSAGE_BYTES = 16 << 20

_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # by default one minute, regardless of keepalive_timeout_ms
    ("grpc.keepalive_permit_without_calls", 1),
)
_SENT = ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)

SERVER_OPTIONS: Sequence[tuple[str, int]] = (  # limits on received messages are in `bounds.CallBounds`
    *_KEEPALIVE,
    _SENT,
    # A long generation may send no frames for a while, during which clients may ping.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Limits on calls waiting for a handler: above the first, gRPC ends random calls with a bare CANCELLED, above the
    # second, all. A burst should reach our own limits first, which refuse with a reason and a delay.
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 32_768),
    # By default gRPC also ends calls that have waited 30 s for a handler, with a bare CANCELLED; this happens on a busy
    # machine, and each call has its own deadline.
    ("grpc.server_max_unrequested_time_in_server", 3600),
    # Close connections that send nothing, or nothing valid.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Close connections without calls after a while; clients reconnect when needed.
    ("grpc.max_connection_idle_ms", 300_000),
    # Two processes on one port are a mistake here, not load balancing.
    ("grpc.so_reuseport", 0),
)

_WATCHFUL = (
    ("grpc.keepalive_time_ms", 4_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.max_reconnect_backoff_ms", 500),
)
_CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    _SENT,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, this is the timeout of a connection attempt. A busy peer needs longer than the back-off.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # By default, channels of one process to one address share a connection; a relay needs one for each channel.
    ("grpc.use_local_subchannel_pool", 1),
)


# For a name with several addresses, such as that of a service in containers: calls alternate between these addresses.
# New addresses are found when a connection ends, which servers enforce (`connection_age`).
ROUND_ROBIN: Sequence[tuple[str, str | int]] = (
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
)


def connection_age(seconds: float) -> Sequence[tuple[str, int]]:
    """Server options that make clients reconnect and resolve the name again after `seconds`. Running calls continue."""
    return (("grpc.max_connection_age_ms", int(seconds * 1000)),)


CHANNEL_OPTIONS = (*_KEEPALIVE, ("grpc.max_reconnect_backoff_ms", 2_000), *_CHANNEL_OPTIONS)

Dial: TypeAlias = Callable[[str], grpc.aio.Channel]  # opens a channel to host:port


def open_channel(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    peer: str | None = None,
    *,
    to_all: bool = False,
    watchful: bool = False,
) -> grpc.aio.Channel:
    """Open a channel to host:port. It connects lazily and reconnects by itself.

    Args:
        to_all: Distribute calls over all servers of the name, not only the first that answers; implies `watchful`.
        watchful: During calls, detect a server that has stopped or is cut off within 8 s instead of 30, and reconnect
            within half a second once it is back. For calls that another server can take over.
        credentials: TLS credentials; None: no TLS.
        peer: Role that the server's certificate must have (`ballast.rpc.tls`); None: it must match the host.
    """
    options = (*_WATCHFUL, *_CHANNEL_OPTIONS) if to_all or watchful else CHANNEL_OPTIONS
    options = (*options, *ROUND_ROBIN) if to_all else options
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    expected = () if peer is None else (("grpc.ssl_target_name_override", f"{peer}.ballast"),)
    return grpc.aio.secure_channel(address, credentials, options=(*options, *expected))


class _Bearer:
    """Wrapper of a channel that adds the token to each call of generated stubs.

    It is cheaper than gRPC's call credentials, which run a plug-in in another thread for each call, and than an
    interceptor, which wraps each call.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._authorization = ("authorization", f"Bearer {token}")

    # Any: as in gRPC, the types depend on the call.
    def __getattr__(self, name: str) -> Callable[..., Any]:
        make = getattr(self._channel, name)  # unary_unary, unary_stream, stream_unary or stream_stream
        return lambda *args, **options: functools.partial(self._call, make(*args, **options))

    def _call(
        self, call: Callable[..., Any], *args: Any, metadata: Sequence[tuple[str, str]] | None = None, **options: Any
    ) -> Any:
        """Make the call, with the token unless its metadata contains one."""
        given = tuple(metadata or ())
        own = () if any(key == "authorization" for key, _ in given) else (self._authorization,)
        return call(*args, metadata=(*own, *given), **options)


def bearing(channel: grpc.aio.Channel, token: str | None) -> grpc.aio.Channel:
    """A wrapper of `channel` whose stubs send the token; None: `channel` itself. Close `channel`, not the wrapper."""
    return channel if token is None else cast(grpc.aio.Channel, _Bearer(channel, token))


async def is_refused(address: str, timeout_s: float = 1.0) -> bool:
    """True if connections to host:port are refused because no process listens there; False if there is no answer in
    time or the connection succeeds.
    """
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False

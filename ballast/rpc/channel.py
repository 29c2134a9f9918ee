"""Client channels and the bounds that both ends of a call agree on."""

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
    ("grpc.http2.ping_timeout_ms", 10_000),  # else a minute, whatever the line above says
    ("grpc.keepalive_permit_without_calls", 1),
)
_SENT = ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)

SERVER_OPTIONS: Sequence[tuple[str, int]] = (  # what may be received: `bounds.CallBounds`
    *_KEEPALIVE,
    _SENT,
    # A long generation sends no frames for a while: clients may ping meanwhile.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Calls that a handler has not taken up yet. Beyond these gRPC kills calls with a bare CANCELLED, at random from the
    # first number on; a burst should get as far as our own bounds, which refuse with a reason and a delay.
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 32_768),
    # Nor does gRPC end those that have waited for their handler for 30 s, again with a bare CANCELLED, which a busy
    # machine comes to: each has its own deadline.
    ("grpc.server_max_unrequested_time_in_server", 3600),
    # Whoever connects and says nothing, or nothing that makes sense, is shown out.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A connection without calls is closed after a while; clients make another one when they need it.
    ("grpc.max_connection_idle_ms", 300_000),
    # Two processes on one port is a mistake here, not load balancing.
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
    # Despite its name not a wait, but what one attempt to connect may take: a busy peer needs more than the back-off.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Channels of one process to one address share a connection unless told otherwise; a relay wants its own.
    ("grpc.use_local_subchannel_pool", 1),
)


# For a name that stands for several servers, as that of a service in containers does: calls go round. Those that come
# up later are found when a connection ends, which servers see to (`connection_age`).
ROUND_ROBIN: Sequence[tuple[str, str | int]] = (
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
)


def connection_age(seconds: float) -> Sequence[tuple[str, int]]:
    """Server options: clients connect anew after that time and then resolve its name again. Calls that run go on."""
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
    """A channel to host:port. It connects lazily and reconnects by itself.

    Args:
        to_all: Calls go round all servers that the name stands for, not to the first of them that answers. Watchful.
        watchful: While calls run, a server that has stopped or is cut off is noticed within 8 s instead of 30, and one
            that is back is found within half a second: others can go on with them.
        credentials: Of TLS; None: in the clear.
        peer: The role that the other side's certificate must have (`ballast.rpc.tls`); None: it must name the host.
    """
    options = (*_WATCHFUL, *_CHANNEL_OPTIONS) if to_all or watchful else CHANNEL_OPTIONS
    options = (*options, *ROUND_ROBIN) if to_all else options
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    expected = () if peer is None else (("grpc.ssl_target_name_override", f"{peer}.ballast"),)
    return grpc.aio.secure_channel(address, credentials, options=(*options, *expected))


class _Bearer:
    """A channel for generated stubs, which make callables of it: each call carries the token.

    gRPC's own call credentials ask a plug-in in another thread for every call, and an interceptor wraps every call.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._authorization = ("authorization", f"Bearer {token}")

    # Any: as in gRPC, the types are those of the call.
    def __getattr__(self, name: str) -> Callable[..., Any]:
        make = getattr(self._channel, name)  # unary_unary, unary_stream, stream_unary or stream_stream
        return lambda *args, **options: functools.partial(self._call, make(*args, **options))

    def _call(
        self, call: Callable[..., Any], *args: Any, metadata: Sequence[tuple[str, str]] | None = None, **options: Any
    ) -> Any:
        """Adds the token unless the call brings its own."""
        given = tuple(metadata or ())
        own = () if any(key == "authorization" for key, _ in given) else (self._authorization,)
        return call(*args, metadata=(*own, *given), **options)


def bearing(channel: grpc.aio.Channel, token: str | None) -> grpc.aio.Channel:
    """The object from which stubs with the token are made. Closing and state are the channel's."""
    return channel if token is None else cast(grpc.aio.Channel, _Bearer(channel, token))


async def is_refused(address: str, timeout_s: float = 1.0) -> bool:
    """True if the machine at host:port answers that nothing listens there. No answer is no refusal."""
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

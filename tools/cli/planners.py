"""Calls to the planner: through any of the dispatchers, which pass them on to the active one, or to itself."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import grpc

from ballast.client.access import Access
from ballast.common.addresses import split_addresses
from ballast.common.errors import Unavailable
from ballast.rpc.errors import from_rpc_error
from ballastpb.planner.v1 import planner_pb2_grpc

if TYPE_CHECKING:
    from ballastpb.planner.v1.planner_pb2_grpc import PlannerServiceAsyncStub

T = TypeVar("T")
# As gRPC says it, of one address and of several.
_NOBODY = ("failed to connect to all addresses", "connections to all backends failing")
Ask: TypeAlias = "Callable[[PlannerServiceAsyncStub], Awaitable[T]]"


def ask_planner(addresses: str, ask: "Ask[T]", *, is_planner: bool = False) -> T:
    """The answer of the first of `addresses` (host:port, with commas) that can be reached.

    `is_planner`: they are planners and not dispatchers.

    Raises:
        InvalidRequest: an address that is not host:port.
        Unavailable: of the last one, if none can be reached.
        BallastError: what the planner refused with.
    """
    return asyncio.run(ask_planner_async(addresses, ask, is_planner=is_planner))


async def ask_planner_async(addresses: str, ask: "Ask[T]", *, is_planner: bool = False) -> T:
    """`ask_planner` inside an event loop."""
    failure, access = Unavailable(addresses), Access.of()
    for address in split_addresses(addresses):
        async with access.open_peer(address, "planner") if is_planner else access.open(address) as channel:
            try:
                return await ask(planner_pb2_grpc.PlannerServiceStub(access.bearing(channel)))
            except grpc.RpcError as error:
                cause = from_rpc_error(error, address)
                if not isinstance(cause, Unavailable):
                    raise cause from error
                failure = cause
                if (error.details() or "").startswith(_NOBODY):
                    who = "planner" if is_planner else "dispatcher"
                    failure = Unavailable(address, f"cannot connect; does a {who} run there, {access.how}?")
    raise failure

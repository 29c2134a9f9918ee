"""Calls the planner, directly or through a dispatcher, which forwards calls to the active planner."""

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
# Beginnings of gRPC's messages if no address of a name can be reached.
_NOBODY = ("failed to connect to all addresses", "connections to all backends failing")
Ask: TypeAlias = "Callable[[PlannerServiceAsyncStub], Awaitable[T]]"


def ask_planner(addresses: str, ask: "Ask[T]", *, is_planner: bool = False) -> T:
    """Call the planner through the first of `addresses` (host:port, comma-separated) that can be reached.

    `is_planner`: the addresses are those of planners, not of dispatchers.

    Raises:
        InvalidRequest: an address is not host:port.
        Unavailable: no address can be reached; the error is the last one's.
        BallastError: the planner refused the call.
    """
    return asyncio.run(ask_planner_async(addresses, ask, is_planner=is_planner))


async def ask_planner_async(addresses: str, ask: "Ask[T]", *, is_planner: bool = False) -> T:
    """The same as `ask_planner`, for callers in an event loop."""
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

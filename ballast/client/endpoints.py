"""The dispatchers known to a client: their order of preference and their connections."""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from ballast.client.access import Access
from ballast.common.addresses import split_addresses
from ballast.common.errors import Unavailable
from ballastpb.inference.v1 import inference_pb2_grpc

if TYPE_CHECKING:  # exists in the type stubs only
    from ballastpb.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_VAIN = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
_PATIENT_S = 0.7  # duration of a patient attempt, longer than gRPC's reconnect delay (`ballast.rpc.channel`)
_AVOID_S = 2.0  # how long a dispatcher that failed is tried last


class Endpoint:
    """One dispatcher. Its channel is opened on first use, inside the event loop."""

    def __init__(self, address: str, access: Access) -> None:
        self.address = address
        self._access = access
        self.unreached = False  # True if the last `connect` failed or is still running
        self._avoided_until_s = 0.0
        self._closed = False
        self._channel: grpc.aio.Channel | None = None
        self._stub: InferenceServiceAsyncStub | None = None

    @property
    def avoided(self) -> bool:
        return time.monotonic() < self._avoided_until_s

    def avoid(self) -> None:
        self._avoided_until_s = time.monotonic() + _AVOID_S

    async def connect(self, timeout_s: float, *, patiently: bool = False) -> "InferenceServiceAsyncStub":
        """Connect and return the stub. Without this, a call to an address that drops packets would wait forever.

        Args:
            patiently: Retry for a short time after a failed attempt, because the dispatcher may be restarting.

        Raises:
            Unavailable: there is no connection within `timeout_s`, it is refused, or this endpoint was closed.
        """
        if self._closed:
            raise Unavailable("client", "is closed")
        if self._channel is None or self._stub is None:
            self._channel = self._access.open(self.address)
            self._stub = inference_pb2_grpc.InferenceServiceStub(self._access.bearing(self._channel))
        if self._channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
            self.unreached = True
            await self._reach(self._channel, timeout_s, patiently=patiently)
        self.unreached = False
        return self._stub

    async def _reach(self, channel: grpc.aio.Channel, timeout_s: float, *, patiently: bool) -> None:
        in_vain = Unavailable(self.address, f"cannot connect; does a dispatcher run there, {self._access.how}?")
        state = channel.get_state(try_to_connect=True)
        try:
            async with asyncio.timeout(min(timeout_s, _PATIENT_S) if patiently else timeout_s):
                while state is not grpc.ChannelConnectivity.READY:
                    if state in _VAIN and not patiently:
                        raise in_vain
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError as error:
            if patiently:
                raise in_vain from error
            raise Unavailable(self.address, f"no connection within {timeout_s:g} s") from error

    async def close(self) -> None:
        self._closed = True
        if self._channel is not None:
            await self._channel.close()


class Endpoints:
    """All dispatchers of a client, and the order in which a request tries them."""

    def __init__(self, addresses: str | Sequence[str], access: Access) -> None:
        self.all = [Endpoint(address, access) for address in split_addresses(addresses)]
        self._turn = 0

    def in_turn(self) -> list[Endpoint]:
        """All dispatchers, starting with the next one at each call; those that failed recently are last."""
        start = self._turn % len(self.all)
        self._turn += 1
        rotated = self.all[start:] + self.all[:start]
        return sorted(rotated, key=lambda endpoint: endpoint.avoided)  # stable sort: False first

    def avoid(self, address: str) -> None:
        """Try the dispatcher at this address last for a while, because it has just failed."""
        for endpoint in self.all:
            if endpoint.address == address:
                endpoint.avoid()

    async def close(self) -> None:
        for endpoint in self.all:
            await endpoint.close()

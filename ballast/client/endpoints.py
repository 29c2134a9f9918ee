"""The dispatchers a client knows: which to ask next, and their connections."""

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

_AVOID_S = 2.0  # how long a dispatcher that was not available is tried last


class Endpoint:
    """One dispatcher. Its channel is opened on first use, inside the event loop."""

    def __init__(self, address: str, access: Access) -> None:
        self.address = address
        self._access = access
        self._avoided_until_s = 0.0
        self._channel: grpc.aio.Channel | None = None
        self._stub: InferenceServiceAsyncStub | None = None

    @property
    def avoided(self) -> bool:
        return time.monotonic() < self._avoided_until_s

    def avoid(self) -> None:
        self._avoided_until_s = time.monotonic() + _AVOID_S

    async def connect(self, timeout_s: float) -> "InferenceServiceAsyncStub":
        """Returns once connected; without this, an address that swallows packets would hold a call for ever.

        Raises:
            Unavailable: no connection within `timeout_s`, or refused.
        """
        if self._channel is None or self._stub is None:
            self._channel = self._access.open(self.address)
            self._stub = inference_pb2_grpc.InferenceServiceStub(self._access.bearing(self._channel))
        state = self._channel.get_state(try_to_connect=True)
        try:
            async with asyncio.timeout(timeout_s):
                while state is not grpc.ChannelConnectivity.READY:
                    if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                        raise Unavailable(
                            self.address, f"cannot connect; does a dispatcher run there, {self._access.how}?"
                        )
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state(try_to_connect=True)
        except TimeoutError as error:
            raise Unavailable(self.address, f"no connection within {timeout_s:g} s") from error
        return self._stub

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


class Endpoints:
    """All dispatchers, in the order in which a request should try them."""

    def __init__(self, addresses: str | Sequence[str], access: Access) -> None:
        self.all = [Endpoint(address, access) for address in split_addresses(addresses)]
        self._turn = 0

    def in_turn(self) -> list[Endpoint]:
        """Every dispatcher once, another one first each time; those that just failed come last."""
        start = self._turn % len(self.all)
        self._turn += 1
        rotated = self.all[start:] + self.all[:start]
        return sorted(rotated, key=lambda endpoint: endpoint.avoided)  # stable: False first

    async def close(self) -> None:
        for endpoint in self.all:
            await endpoint.close()

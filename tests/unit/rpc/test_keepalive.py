"""Both ends notice a peer that falls silent without a reset, within the time that the options promise."""

import asyncio
import time
from collections.abc import Sequence

import grpc.aio
import pytest

from ballast.rpc import channel, server
from ballastpb.planner.v1 import planner_pb2 as pb
from ballastpb.planner.v1 import planner_pb2_grpc
from tests.unit.rpc.test_server import Endless, make
from tools.local.proxy import Proxy

_FASTER = 10
_TIMES = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
_PROMISED_S = 30.0 / _FASTER
_SLACK_S = 4.0  # for a busy machine; without `ping_timeout_ms`, noticing takes a minute


def faster(options: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    return [(name, value // _FASTER if name in _TIMES else value) for name, value in options]


@pytest.mark.parametrize("who_notices", ["client", "server"])
def test_a_silent_peer_is_noticed_in_time(who_notices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [("grpc.keepalive_time_ms", 1 << 30)]
    ours, others = faster(channel.CHANNEL_OPTIONS), faster(channel.SERVER_OPTIONS)
    if who_notices == "server":
        ours = plain
    else:
        others = [(name, value) for name, value in others if name not in _TIMES]
    monkeypatch.setattr(server, "SERVER_OPTIONS", others)

    async def story() -> None:
        servicer = Quiet()  # pyright: ignore[reportAbstractUsage]
        running = make(servicer, 0)
        port = await running.start()
        try:
            async with (
                Proxy(f"127.0.0.1:{port}") as between,
                grpc.aio.insecure_channel(between.address, options=ours) as to_server,
                asyncio.timeout(50),
            ):
                call = planner_pb2_grpc.PlannerServiceStub(to_server).WatchLayout(pb.WatchLayoutRequest())
                assert isinstance(await call.read(), pb.WatchLayoutResponse)
                between.to_server.swallows = between.to_client.swallows = True
                began_s = time.monotonic()
                if who_notices == "client":
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call.read()
                else:
                    await servicer.ended.wait()
                assert time.monotonic() - began_s < _PROMISED_S + _SLACK_S
        finally:
            await running.stop(0)

    asyncio.run(story())


class Quiet(Endless):
    """Sends one message and then nothing, like an idle worker."""

    async def WatchLayout(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: pb.WatchLayoutRequest, context: "grpc.aio.ServicerContext[pb.WatchLayoutRequest, object]"
    ) -> None:
        context.add_done_callback(lambda _: self.ended.set())  # pyright: ignore[reportArgumentType, reportUnknownLambdaType]
        await context.write(pb.WatchLayoutResponse())
        await asyncio.Event().wait()


def test_a_watchful_channel_uses_the_same_short_ping_timeout() -> None:
    for options in (channel.CHANNEL_OPTIONS, channel.SERVER_OPTIONS, channel._WATCHFUL):  # pyright: ignore[reportPrivateUsage]
        found = dict(options)
        assert found["grpc.http2.ping_timeout_ms"] == found["grpc.keepalive_timeout_ms"]

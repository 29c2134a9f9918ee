"""The registry in a real state server: rows come back as written, expire, and strange ones are left out."""

import asyncio

from ballast.common.ids import Incarnation, WorkerId
from ballast.local.state_server import PrivateStateServer
from ballast.service.state import KEY_PREFIX, StateServer
from services.monitor.core.messages import Instance
from services.monitor.shell import Row
from services.monitor.store import RedisRegistry
from tests.support.reporting_worker import load_report, model_info


def row(name: str, *, reported: bool = True) -> Row:
    instance = Instance(WorkerId(name), Incarnation(3), f"{name}:1", model_info())
    return Row(instance, draining=False, load=load_report(7) if reported else None, report_age_s=0.25)


def test_rows_come_back_as_written_until_they_are_forgotten_or_expire() -> None:
    async def story() -> None:
        async with PrivateStateServer() as server, asyncio.timeout(30):
            state = StateServer(server.url)
            registry = RedisRegistry(state, ttl_s=0.5)
            assert await registry.read() == []
            many = [row(f"w{number:03}") for number in range(250)]
            await registry.write(many, set())
            assert await registry.read() == many
            await registry.write([row("v", reported=False)], {WorkerId("w000"), WorkerId("w001")})
            assert await registry.read() == [row("v", reported=False), *many[2:]]
            await asyncio.sleep(0.6)
            assert await registry.read() == []
            await registry.write([row("w1")], set())
            await state.run(state.redis.hset(f"{KEY_PREFIX}registry:zz", "incarnation", "one"))  # pyright: ignore[reportArgumentType]
            assert await registry.read() == [row("w1")]
            await state.close()

    asyncio.run(story())

"""A real state server: registry rows are read back and expire, and entries of planners and dispatchers are read."""

import asyncio
import base64
from collections.abc import Awaitable, Callable

from ballast.common.ids import DispatcherId, Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.traffic import Traffic
from ballast.rpc import codec
from ballast.service.state import KEY_PREFIX, StateServer
from services.dispatcher.shell.links import Identity
from services.dispatcher.store import DispatcherStore
from services.monitor.core.messages import BacklogWord, Instance, WholeMemory
from services.monitor.shell import InstanceRow
from services.monitor.store import RedisRegistry, RedisSurroundings
from tests.support.reporting_worker import load_report, model_info
from tools.local.state_server import PrivateStateServer


def row(name: str, *, reported: bool = True) -> InstanceRow:
    instance = Instance(WorkerId(name), Incarnation(3), f"{name}:1", model_info(), f"{name}:2")
    whole = WholeMemory(parameter_bytes=40, kv_bytes=7 << 40) if reported else None
    return InstanceRow(
        instance, draining=False, load=load_report(7) if reported else None, report_age_s=0.25, whole=whole
    )


async def test_rows_are_read_back_until_they_are_deleted_or_expire() -> None:
    async with PrivateStateServer() as server, asyncio.timeout(60):
        state = StateServer(server.url)
        registry, brief = RedisRegistry(state, ttl_s=600), RedisRegistry(state, ttl_s=0.1)
        assert await registry.read() == []
        many = [row(f"w{number:03}") for number in range(250)]
        await registry.write(many, set())
        assert await registry.read() == many
        await registry.write([row("v", reported=False)], {WorkerId("w000"), WorkerId("w001")})
        assert await registry.read() == [row("v", reported=False), *many[2:]]
        await brief.write([row("v", reported=False), *many[2:]], set())
        while await registry.read():  # noqa: ASYNC110 until they have expired; the time limit is above
            await asyncio.sleep(0.02)
        await registry.write([row("w1")], set())
        await state.run(state.redis.hset(f"{KEY_PREFIX}registry:zz", "incarnation", "one"))  # pyright: ignore[reportArgumentType]
        assert await registry.read() == [row("w1")]
        await state.close()


async def test_the_planners_layout_is_read_and_a_malformed_one_counts_as_none() -> None:
    async with PrivateStateServer() as server, asyncio.timeout(60):
        state = StateServer(server.url)
        environment = RedisSurroundings(state)
        assert await environment.read() == (None, ())
        member = Member(WorkerId("w1"), Incarnation(1), "w1:1", 0, 4)
        layout = Layout(Epoch(3), 4, (Group(GroupId("g"), (member,)),), "test")
        body = base64.b64encode(codec.LAYOUT.message(layout).SerializeToString()).decode()
        await state.run(state.redis.set(f"{KEY_PREFIX}layout", body))
        assert (await environment.read())[0] == layout
        assert (await environment.read())[0] == layout
        await state.run(state.redis.set(f"{KEY_PREFIX}layout", "nonsense"))
        assert (await environment.read())[0] is None
        await state.close()


async def test_a_dispatcher_reports_its_backlog_until_it_is_empty() -> None:
    async with PrivateStateServer() as server, asyncio.timeout(60):
        state = StateServer(server.url)
        environment = RedisSurroundings(state)
        dispatcher = DispatcherStore(state, Identity(DispatcherId("d 1"), Incarnation(7)))
        waiting: Traffic | None = Traffic(
            queued_count=3, queued_tokens=170, recent_count=5, calm_per_s=0.25, known_s=33.5
        )
        sharing = asyncio.create_task(dispatcher.share_traffic(lambda: waiting))

        async def heard() -> tuple[BacklogWord, ...]:
            return (await environment.read())[1]

        first = await _until(heard, lambda words: bool(words))
        assert [(w.dispatcher_id, w.traffic) for w in first] == [("d 1", waiting)]
        later = await _until(heard, lambda words: words != first)
        assert later[0].traffic == first[0].traffic, "only the serial has changed"
        waiting = None
        await asyncio.sleep(0.1)
        unchanged = await heard()
        await asyncio.sleep(0.1)
        assert await heard() == unchanged, "without changes the last entry stays"
        waiting = Traffic()
        await _until(heard, lambda words: not words)
        sharing.cancel()
        strange = state.redis.hset(
            f"{KEY_PREFIX}backlogs",
            mapping={
                "old": "3 1 2",
                "x": "1 2 three",
                "y": f"1 {'-1 ' * 10}",
                "ok": f"9 1 2{' 0' * 9} [] 0 0 []{' 0' * 4}",
            },
        )
        await state.run(strange)
        assert await heard() == (BacklogWord(DispatcherId("ok"), "9", Traffic(queued_count=1, queued_tokens=2)),)
        await environment.forget((DispatcherId("ok"), DispatcherId("old")))
        assert await heard() == ()
        await state.close()


async def _until(
    read: Callable[[], Awaitable[tuple[BacklogWord, ...]]], holds: Callable[[tuple[BacklogWord, ...]], bool]
) -> tuple[BacklogWord, ...]:
    """Poll until `holds(words)` and return the words; the caller's timeout bounds the wait."""
    while True:
        words = await read()
        if holds(words):
            return words
        await asyncio.sleep(0.02)


async def test_keys_of_another_type_count_as_empty_and_are_recreated() -> None:
    async with PrivateStateServer() as server, asyncio.timeout(60):
        state = StateServer(server.url)
        environment, registry = RedisSurroundings(state), RedisRegistry(state, ttl_s=600)
        for key in ("layout", "backlogs", "monitor:candidates", "registry:w1"):
            await state.run(state.redis.rpush(f"{KEY_PREFIX}{key}", "garbage"))  # pyright: ignore[reportArgumentType]
        assert await environment.read() == (None, ())
        assert await registry.read() == []
        await registry.write([row("w1"), row("w2")], set())
        await registry.write([row("w1"), row("w2")], set())
        assert await registry.read() == [row("w1"), row("w2")]
        await state.run(state.redis.hset(f"{KEY_PREFIX}backlogs", "d1", "nonsense"))  # pyright: ignore[reportArgumentType]
        await state.close()


async def test_leading_and_standby_monitors_are_known() -> None:
    async with PrivateStateServer() as server, asyncio.timeout(60):
        state = StateServer(server.url)
        environment = RedisSurroundings(state)
        await state.acquire_lease("monitor", "a", 10.0, "host:1")
        await state.acquire_lease("monitor", "b", 10.0, "host:2")
        await state.acquire_lease("monitor", "c", 10.0, "no address")
        await environment.read()
        assert environment.monitor_addresses == ("host:1", "host:2")
        await state.close()

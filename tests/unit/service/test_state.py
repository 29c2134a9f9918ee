"""The state server with a real Valkey: waiting, leases with fencing tokens, incarnations, leadership."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from ballast.common.errors import ConfigError, Unavailable
from ballast.rpc.tls import CA, CERTIFICATE, KEY
from ballast.service.leadership import Floor, LeaderAddress, Leadership
from ballast.service.state import KEY_PREFIX, StateServer, address_key, candidates_key, lease_key
from tests.support.waiting import soon
from tools.local.certificates import make_certificates
from tools.local.proxy import Proxy
from tools.local.state_server import PrivateStateServer

Story = Callable[[PrivateStateServer, StateServer], Coroutine[Any, Any, None]]


def tell(story: Story) -> None:
    async def run() -> None:
        async with PrivateStateServer() as server, asyncio.timeout(60):
            state = StateServer(server.url)
            try:
                await story(server, state)
            finally:
                await state.close()

    asyncio.run(run())


async def test_a_state_server_is_reached_over_tls_and_its_certificate_is_verified(tmp_path: Path) -> None:
    """The tests' Valkey has no TLS, so a proxy in front of it terminates TLS, as many clouds do."""
    for name in ("ours", "theirs"):
        make_certificates(tmp_path / name, days=1, hosts=["127.0.0.1"], workers=[])
    keys = tmp_path / "ours" / "dispatcher"  # the proxy's certificate, which names the host
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / CERTIFICATE, keys / KEY)

    async with PrivateStateServer() as server, Proxy(f"127.0.0.1:{server.port}", tls=context) as front:
        url = server.url.replace("redis://", "rediss://").replace(f"127.0.0.1:{server.port}", front.address)
        for name, reason in (("ours", ""), ("theirs", "certificate")):
            state = StateServer(url, ca_file=tmp_path / name / CA)
            try:
                if reason:
                    with pytest.raises(Unavailable, match=reason):
                        await state.acquire_lease("x", "a", 10.0, "host:1")
                else:
                    assert await state.acquire_lease("x", "a", 10.0, "host:1") is not None
            finally:
                await state.close()


def test_a_lease_has_one_holder_and_its_token_grows_with_each_new_one() -> None:
    async def story(server: PrivateStateServer, state: StateServer) -> None:
        first = await state.acquire_lease("x", "a", 10.0, "host:1")
        assert first is not None
        assert await state.acquire_lease("x", "a", 10.0, "host:1") == first, "renewed"
        assert await state.acquire_lease("x", "b", 10.0, "host:2") is None
        assert await state.leader_address("x") == "host:1"
        await state.release_lease("x", "b")
        assert await state.leader_address("x") == "host:1", "only the holder can release"
        await state.release_lease("x", "a")
        assert await state.leader_address("x") is None
        second = await state.acquire_lease("x", "b", 0.05, "host:2")
        assert second is not None
        assert second > first
        await asyncio.sleep(0.1)
        third = await state.acquire_lease("x", "a", 10.0, "host:1")
        assert third is not None
        assert third > second, "the second lease had expired"

    tell(story)


def test_a_new_lease_has_a_token_above_those_that_others_have_seen() -> None:
    """The state server acts as if it had restarted empty and with an earlier clock."""

    async def story(server: PrivateStateServer, state: StateServer) -> None:
        first = await state.acquire_lease("x", "a", 10.0, "host:1")
        assert first is not None
        seen = first + 3_600_000
        assert await state.acquire_lease("x", "b", 10.0, "host:2", above=seen) is None, (
            "only the holder can raise the token"
        )
        second = await state.acquire_lease("x", "a", 10.0, "host:1", above=seen)
        assert second == seen + 1
        assert await state.acquire_lease("x", "a", 10.0, "host:1", above=seen) == second, "renewed"
        await state.release_lease("x", "a")
        assert await state.acquire_lease("x", "b", 10.0, "host:2") == seen + 2

    tell(story)


def test_a_leader_that_is_refused_for_its_token_gets_a_higher_one() -> None:
    async def story(server: PrivateStateServer, state: StateServer) -> None:
        told: list[int | None] = []
        floor = Floor()
        leadership = Leadership(
            state, name="x", holder="a", address="host:1", ttl_s=0.3, on_change=told.append, floor=floor
        )
        running = asyncio.create_task(leadership.run())
        await soon(lambda: len(told) == 1)
        (first,) = told
        assert first is not None
        floor.fenced(first + 1000)
        first_above = first + 1001
        await soon(lambda: told[1:] == [first_above])
        running.cancel()

    tell(story)


def test_incarnations_and_tokens_grow_over_the_loss_of_the_state_server() -> None:
    async def story(server: PrivateStateServer, state: StateServer) -> None:
        before = [await state.next_incarnation("worker", "w1") for _ in range(3)]
        token = await state.acquire_lease("x", "a", 10.0, "host:1")
        server.restart()
        after = await state.take_incarnation("worker", "w1")
        assert sorted({*before, after}) == [*before, after]
        again = await state.acquire_lease("x", "a", 10.0, "host:1")
        assert token is not None
        assert again is not None
        assert again > token

    tell(story)


def test_an_operation_without_an_answer_is_unavailable_and_works_again_later() -> None:
    async def story(server: PrivateStateServer, state: StateServer) -> None:
        assert await state.next_incarnation("worker", "w1") > 0
        server.stop()
        with pytest.raises(Unavailable, match="state server"):
            await state.next_incarnation("worker", "w1")
        assert not state.reachable
        waiting = asyncio.create_task(state.take_incarnation("worker", "w1"))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        server.restart()
        assert await waiting > 0
        assert state.reachable

    tell(story)


def test_startup_retries_while_the_state_server_accepts_no_writes() -> None:
    async def story(server: PrivateStateServer, state: StateServer) -> None:
        async def allow_writing(needed_replica_count: int) -> None:
            await state.redis.config_set("min-replicas-to-write", needed_replica_count)  # pyright: ignore[reportUnknownMemberType]

        async def command_count() -> int:
            return (await state.redis.info("stats"))["total_commands_processed"]  # pyright: ignore[reportUnknownMemberType]

        await allow_writing(1)
        before = await command_count()
        waiting = asyncio.create_task(state.take_incarnation("worker", "w1"))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert await command_count() - before < 20
        await allow_writing(0)
        assert await waiting > 0

    tell(story)


def test_operations_beyond_the_number_of_connections_wait() -> None:
    async def story(server: PrivateStateServer, state: StateServer) -> None:
        numbers = await asyncio.gather(*(state.next_incarnation("worker", "w1") for _ in range(100)))
        assert len(set(numbers)) == 100

    tell(story)


def test_a_bad_url_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        StateServer("http://nowhere")


def test_leadership_is_acquired_survives_an_outage_and_is_handed_over() -> None:
    async def story(server: PrivateStateServer, state: StateServer) -> None:
        told: dict[str, list[int | None]] = {"a": [], "b": []}
        candidates = {
            name: Leadership(
                state, name="x", holder=name, address=f"host-{name}:1", ttl_s=1.5, on_change=told[name].append
            )
            for name in told
        }
        first = asyncio.create_task(candidates["a"].run())
        await candidates["a"].decided.wait()
        second = asyncio.create_task(candidates["b"].run())
        await candidates["b"].decided.wait()
        assert (len(told["a"]), told["b"]) == (1, [None])

        server.stop()
        await asyncio.sleep(0.5)
        assert len(told["a"]) == 1, "it keeps the lead, since no other process can be elected meanwhile"

        server.restart()
        await soon(lambda: any(len(told[name]) > 1 for name in told))
        await soon(lambda: sum(c.token is not None for c in candidates.values()) == 1)
        leader = "a" if candidates["a"].token is not None else "b"
        other = "b" if leader == "a" else "a"
        follower = LeaderAddress(state, "x", None, interval_s=0.02)
        following = asyncio.create_task(follower.follow())
        await soon(lambda: follower.current == f"host-{leader}:1")

        tasks = {"a": first, "b": second}
        tasks[leader].cancel()
        await asyncio.wait((tasks[leader],))
        await candidates[leader].resign()
        await soon(lambda: candidates[other].token is not None)
        await soon(lambda: follower.current == f"host-{other}:1")
        tokens = [token for token in (*told["a"], *told["b"]) if token is not None]
        assert len(tokens) == len(set(tokens)), "each term has its own token"
        for task in (*tasks.values(), following):
            task.cancel()
        await asyncio.wait((*tasks.values(), following))

    tell(story)


def test_a_leader_that_answers_is_looked_up_less_often_but_its_replacement_is_noticed() -> None:
    async def story(server: PrivateStateServer, state: StateServer) -> None:
        assert await state.acquire_lease("x", "a", 60.0, "a:1")
        follower = LeaderAddress(state, "x", None, interval_s=0.01)
        following = asyncio.create_task(follower.follow())
        await soon(lambda: follower.current == "a:1")
        await state.release_lease("x", "a")
        assert await state.acquire_lease("x", "b", 60.0, "b:1")

        def found() -> bool:
            follower.confirm()
            return follower.current == "b:1"

        await soon(found)
        following.cancel()
        await asyncio.wait((following,))

    tell(story)


async def test_a_fixed_address_is_never_looked_up() -> None:
    state = StateServer("redis://127.0.0.1:1")
    address = LeaderAddress(state, "x", "host:9")
    await address.follow()
    assert address.current == "host:9"
    await state.close()


async def test_a_cancellation_that_the_client_library_swallows_is_not_lost() -> None:
    """Before Python 3.12, asyncio.wait_for swallows a cancellation if the awaited call ends at the same moment."""

    async def swallow() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "sent"
        return "not cancelled"

    state = StateServer("redis://127.0.0.1:1/0")
    running = asyncio.create_task(state.run(swallow()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    async def while_ending() -> str:
        """Calls the state server from the handler of its own cancellation."""
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(await state.run(asyncio.sleep(0, "released")))
        return ""

    ended: list[str] = []
    ending = asyncio.create_task(while_ending())
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert ended == ["released"]
    await state.close()


def test_cut_connections_raise_only_unavailable() -> None:
    """uvloop, which services use, raises an error of its own for a write to a connection that was just reset."""

    async def story() -> None:
        async with PrivateStateServer() as server, Proxy(f"127.0.0.1:{server.port}") as front, asyncio.timeout(60):
            state = StateServer(server.url.replace(f"127.0.0.1:{server.port}", front.address))
            try:
                async with asyncio.TaskGroup() as askers:

                    async def ask() -> None:
                        while not done:
                            with contextlib.suppress(Unavailable):  # cut twice in a row
                                await state.leader_address("x")

                    done = False
                    for _ in range(24):
                        askers.create_task(ask())
                    for _ in range(100):
                        await asyncio.sleep(0.01)
                        front.reset()
                    done = True
                assert await state.leader_address("x") is None
            finally:
                await state.close()

    uvloop.run(story())


def test_corrupt_keys_do_not_prevent_leadership() -> None:
    async def story(server: PrivateStateServer, state: StateServer) -> None:
        redis = state.redis
        keys = (lease_key("x"), f"{lease_key('x')}:token", address_key("x"), candidates_key("x"))
        for key in keys:
            await state.run(redis.rpush(key, "garbage"))  # pyright: ignore[reportArgumentType]
        first = await state.acquire_lease("x", "a", 10.0, "host:1")
        assert first is not None
        assert await state.leader_address("x") == "host:1"
        for nonsense in ("-99999999999999999999", "1e999", "nan", "x"):
            await state.run(redis.set(keys[1], nonsense))
            await state.release_lease("x", "a")
            second = await state.acquire_lease("x", "a", 10.0, "host:1")
            assert second is not None
            assert first <= second < first + 60_000
        await state.run(redis.set(f"{KEY_PREFIX}incarnations:worker", "garbage"))
        assert await state.next_incarnation("worker", "w1") > 0

    tell(story)


def test_a_lease_without_expiry_has_no_holder() -> None:
    async def story(server: PrivateStateServer, state: StateServer) -> None:
        await state.acquire_lease("x", "a", 10.0, "host:1")
        await state.run(state.redis.persist(lease_key("x")))
        assert await state.acquire_lease("x", "b", 10.0, "host:2") is not None
        assert await state.leader_address("x") == "host:2"
        assert await state.acquire_lease("x", "a", 10.0, "host:1") is None

    tell(story)


def test_an_invalid_address_is_not_used() -> None:
    async def story(server: PrivateStateServer, state: StateServer) -> None:
        leader = LeaderAddress(state, "x", None, interval_s=0.01)
        following = asyncio.create_task(leader.follow())
        await state.acquire_lease("x", "a", 10.0, "host:1")
        await soon(lambda: leader.current == "host:1")
        for nonsense in ('{"epoch": 1e999', "host", "host:99999"):
            await state.run(state.redis.set(address_key("x"), nonsense))
            await asyncio.sleep(0.1)
            assert leader.current == "host:1"
        following.cancel()

    tell(story)

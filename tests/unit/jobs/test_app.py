"""Files and batches over HTTP: what is accepted, what is refused, and which key sees what."""

import asyncio
import contextlib
import errno
import json
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ballast.common.errors import Unavailable
from ballast.common.sampling import PriorityClass
from ballast.service.http_client import HttpClient
from ballast.service.http_server import HttpServer
from ballast.service.metrics import REGISTRY
from ballast.service.tokens import TokenBook, TokenRole
from services.jobs.app import Desk, Quotas, build_app
from services.jobs.core.batch import BatchState
from services.jobs.runner import Runner
from services.jobs.store import Store
from tests.support.jobs import RULES, URL, ScriptedGateway, batch, line, put_file, running
from tests.support.waiting import soon
from tools.cli.tokens import add_token

QUOTAS = Quotas(
    max_file_bytes=2000,
    max_bytes=10_000,
    max_key_bytes=5000,
    max_key_batches=2,
    max_key_lines=30,
    max_window_s=86400.0,
)
EDGE = "----edge"


def form(content: bytes, purpose: str = "batch", name: str = "in.jsonl", **more: str) -> bytes:
    parts = [f'--{EDGE}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{text}' for key, text in more.items()]
    if purpose:
        parts.append(f'--{EDGE}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}')
    parts.append(f'--{EDGE}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n')
    return "\r\n".join(parts).encode() + content + f"\r\n--{EDGE}--\r\n".encode()


@dataclass
class Service:
    """A jobs service in this process, with a client for it."""

    client: HttpClient
    store: Store
    desk: Desk
    token: str = ""
    is_full: list[bool] = field(default_factory=lambda: [False])

    async def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        async with self.client.call(method, path, headers, data) as response:
            raw = await response.read(1 << 20)
        is_json = response.header("content-type") == "application/json"
        return response.status, json.loads(raw) if is_json else raw

    async def upload(self, content: bytes, **fields: str) -> tuple[int, Any]:
        headers = {"content-type": f"multipart/form-data; boundary={EDGE}"}
        return await self.ask("POST", "/v1/files", form(content, **fields), **headers)

    async def create(self, file_id: object, **changes: object) -> tuple[int, Any]:
        given = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h", **changes}
        return await self.ask("POST", "/v1/batches", {key: value for key, value in given.items() if value is not ...})


@contextlib.asynccontextmanager
async def serving(
    folder: Path, gateway: ScriptedGateway | None = None, book: TokenBook | None = None
) -> AsyncGenerator[Service, None]:
    is_full = [False]

    def refuse(_: str) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    store = Store(folder, 1, refuse)
    desk = Desk(QUOTAS, book)
    server = HttpServer(build_app(desk), host="127.0.0.1", port=0, shutdown_timeout_s=1, client_stall_timeout_s=5)
    stopping = asyncio.Event()
    await server.start()
    http = asyncio.create_task(server.serve(stopping))
    client = HttpClient(f"http://127.0.0.1:{server.port}")
    async with running(store, gateway or ScriptedGateway()) as runner:
        desk.runner = runner
        yield Service(client, store, desk, is_full=is_full)
        desk.runner = None
    client.close()
    stopping.set()
    await http
    store.close()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 30))


def test_files_are_stored_and_returned_byte_for_byte(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            content = bytes(range(256)) * 3 + f"\r\n--{EDGE}x\r\n".encode()
            status, file = await service.upload(content, name="a b.jsonl")
            assert (status, file["bytes"], file["filename"], file["purpose"]) == (
                200,
                len(content),
                "a b.jsonl",
                "batch",
            )
            assert await service.ask("GET", f"/v1/files/{file['id']}/content") == (200, content)
            assert (await service.ask("GET", f"/v1/files/{file['id']}"))[1] == file
            assert (await service.ask("DELETE", f"/v1/files/{file['id']}"))[1]["deleted"] is True
            assert (await service.ask("GET", f"/v1/files/{file['id']}/content"))[0] == 404
            assert (await service.ask("GET", "/v1/files"))[1]["data"] == []
        assert list((tmp_path / "files").iterdir()) == []

    run(story())


def test_lists_are_paginated(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            ids = [(await service.upload(b"%d" % number))[1]["id"] for number in range(5)]
            seen: list[str] = []
            after = ""
            while True:
                page = (await service.ask("GET", f"/v1/files?limit=2{after}"))[1]
                seen += [one["id"] for one in page["data"]]
                if not page["has_more"]:
                    break
                after = f"&after={page['last_id']}"
            assert seen == ids[::-1]
            assert [one["id"] for one in (await service.ask("GET", "/v1/files?order=asc"))[1]["data"]] == ids
            assert (await service.ask("GET", "/v1/files?purpose=other"))[1]["data"] == []
            for wrong in ("limit=0", "limit=x", f"limit={'1' * 5000}", "order=up"):
                assert (await service.ask("GET", f"/v1/files?{wrong}"))[0] == 400

    run(story())


def test_an_invalid_upload_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            kind = {"content-type": f"multipart/form-data; boundary={EDGE}"}
            refused = [
                await service.upload(b"x", purpose="fine-tune"),
                await service.upload(b"x", purpose=""),
                await service.upload(b"x", expires_after="1"),
                await service.upload(b"x" * 2001),
                await service.ask("POST", "/v1/files", b"{}", **{"content-type": "application/json"}),
                await service.ask("POST", "/v1/files", form(b"x")[:-20], **kind),
                await service.ask("POST", "/v1/files", f"--{EDGE}--\r\n".encode(), **kind),
                await service.ask("POST", "/v1/files", b"rubbish", **kind),
                await service.ask("POST", "/v1/files", form(b"x"), **{"content-type": "multipart/form-data"}),
            ]
            assert [status for status, _ in refused] == [400, 400, 400, 413, 400, 400, 400, 400, 400]
            assert all(said["error"]["message"] for _, said in refused)
            assert list((tmp_path / "files").iterdir()) == []

    run(story())


def test_an_aborted_upload_leaves_no_file(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(service.client.url.rpartition(":")[2]))
            body = form(b"x" * 1500)
            head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            writer.write(f"{head}Content-Type: multipart/form-data; boundary={EDGE}\r\n\r\n".encode() + body[:1000])
            await writer.drain()
            await soon(lambda: bool(list((tmp_path / "files").iterdir())))
            writer.transport.abort()
            await soon(lambda: not list((tmp_path / "files").iterdir()))
            del reader

    run(story())


def test_errors_of_a_batch_are_named(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            file_id = (await service.upload(line(0).encode()))[1]["id"]
            for changes, param in (
                ({"endpoint": "/v1/embeddings"}, "endpoint"),
                ({"endpoint": ...}, "endpoint"),
                ({"input_file_id": 7}, "input_file_id"),
                ({"input_file_id": "file-none"}, "input_file_id"),
                ({"completion_window": "soon"}, "completion_window"),
                ({"completion_window": "2d"}, "completion_window"),
                ({"metadata": {"a": 1}}, "metadata"),
                ({"metadata": []}, "metadata"),
                ({"other": 1}, "other"),
                ({"metadata": {"a": "\ud800"}}, None),  # if accepted, no list of batches could be sent
                ({"input_file_id": "\ud800"}, None),
                ({"\ud800": 1}, None),
            ):
                status, said = await service.create(file_id, **changes)
                assert (status, said["error"]["param"]) == (400, param)
            assert (await service.ask("GET", "/v1/batches"))[1]["data"] == []
            assert (await service.ask("POST", "/v1/batches", b"{"))[0] == 400
            assert (await service.ask("POST", "/v1/batches", b"x" * 70_000))[0] == 413
            assert (await service.ask("GET", "/v1/batches/x"))[0] == 404
            assert (await service.ask("POST", "/v1/batches/x/cancel"))[0] == 404
            status, said = await service.ask("PUT", "/v1/batches")
            assert (status, said["error"]["code"]) == (405, "method_not_allowed")

    run(story())


def test_each_key_has_its_own_share(tmp_path: Path) -> None:
    async def story() -> None:
        gateway = ScriptedGateway(takes_s=60.0)
        async with serving(tmp_path, gateway) as service:
            file_id = (await service.upload("\n".join(line(i) for i in range(20)).encode()))[1]["id"]
            batch = (await service.create(file_id))[1]
            assert (await service.create(file_id))[0] == 200
            status, said = await service.create(file_id)
            assert (status, said["error"]["code"]) == (429, "quota_exceeded")
            assert "2 of your batches" in said["error"]["message"]
            assert (await service.ask("DELETE", f"/v1/files/{file_id}"))[0] == 409
            await soon(lambda: service.store.usage("").open_lines == 40)
            await service.ask("POST", f"/v1/batches/{batch['id']}/cancel")
            await soon(lambda: service.store.usage("").open_batches == 1)
            assert (await service.create(file_id))[0] == 200  # 20 of 30 lines are open
            for content in (b"x" * 2000, b"x" * 2000):
                status, said = await service.upload(content)
            assert (status, said["error"]["code"]) == (429, "quota_exceeded")

    run(story())


def test_a_full_disk_is_507_until_there_is_room(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            file_id = (await service.upload(line(0).encode()))[1]["id"]
            service.is_full[0] = True
            for answer in (await service.upload(b"x"), await service.create(file_id)):
                assert (answer[0], answer[1]["error"]["code"]) == (507, "store_full")
            assert (await service.ask("GET", "/v1/batches"))[1]["data"] == []
            service.is_full[0] = False
            status, batch = await service.create(file_id)
            assert status == 200
            await soon(lambda: service.store.batch(batch["id"], "").has_ended)
            assert (await service.ask("GET", "/health"))[0] == 200

    run(story())


def test_a_key_sees_only_its_own_batches_and_files(tmp_path: Path) -> None:
    async def story() -> None:
        tokens = tmp_path / "tokens"
        mine, theirs = (add_token(tokens, name, TokenRole.INFER) for name in ("me", "them"))
        async with serving(tmp_path / "jobs", book=TokenBook(tokens)) as service:
            assert (await service.upload(b"x"))[0] == 401
            service.token = mine
            file_id = (await service.upload(line(0).encode()))[1]["id"]
            batch_id = (await service.create(file_id))[1]["id"]
            service.token = theirs
            for path in (f"files/{file_id}", f"files/{file_id}/content", f"batches/{batch_id}"):
                assert (await service.ask("GET", f"/v1/{path}"))[0] == 404
            assert (await service.ask("DELETE", f"/v1/files/{file_id}"))[0] == 404
            assert (await service.ask("POST", f"/v1/batches/{batch_id}/cancel"))[0] == 404
            assert (await service.create(file_id))[1]["error"]["param"] == "input_file_id"
            for path in ("files", "batches"):
                assert (await service.ask("GET", f"/v1/{path}"))[1]["data"] == []
            service.token = f"{mine}x"
            assert (await service.ask("GET", "/v1/files"))[0] == 401

    run(story())


def test_a_key_without_the_class_batch_starts_no_batches(tmp_path: Path) -> None:
    async def story() -> None:
        tokens = tmp_path / "tokens"
        online = add_token(tokens, "online", TokenRole.INFER, frozenset({PriorityClass.INTERACTIVE}))
        async with serving(tmp_path / "jobs", book=TokenBook(tokens)) as service:
            put_file(service.store, [line(0)], owner="online")
            service.token = online
            for status, said in (await service.upload(b"x"), await service.create("file-in")):
                assert (status, said["error"]["code"]) == (403, "permission_denied")
                assert "classes interactive, but not batch" in said["error"]["message"]
            assert (await service.ask("GET", "/v1/batches"))[1]["data"] == []
            assert (await service.ask("DELETE", "/v1/files/file-in"))[0] == 200, "of the time before"

    run(story())


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/health"])
def test_a_replica_that_knows_no_active_replica_reports_it(tmp_path: Path, path: str) -> None:
    async def story() -> None:
        desk = Desk(QUOTAS, None)
        server = HttpServer(build_app(desk), host="127.0.0.1", port=0, shutdown_timeout_s=1, client_stall_timeout_s=5)
        stopping = asyncio.Event()
        await server.start()
        http = asyncio.create_task(server.serve(stopping))
        client = HttpClient(f"http://127.0.0.1:{server.port}")
        async with client.call("GET", path) as response:
            assert response.status == 503
            await response.read(1000)
        client.close()
        stopping.set()
        await http

    run(story())


def test_calls_during_a_change_of_the_leader_get_a_retry_delay(tmp_path: Path) -> None:
    async def story() -> None:
        async with serving(tmp_path) as service:
            file_id = (await service.upload(line(0).encode()))[1]["id"]
            async with running(service.store, ScriptedGateway()) as service.desk.runner:
                await asyncio.sleep(0.01)  # this replica then loses its role; running handlers still have its runner
            for status, said in (
                await service.create(file_id),
                await service.ask("GET", "/v1/batches"),
                await service.upload(b"x"),
            ):
                assert (status, said["error"]["code"]) == (503, "unavailable")

    run(story())


def test_a_batch_can_be_cancelled_as_soon_as_its_runner_has_loaded_it(tmp_path: Path) -> None:
    async def story() -> None:
        store = Store(tmp_path, 1)
        put_file(store, [line(0)])
        store.add_batch(batch())
        runner = Runner(store, ScriptedGateway(takes_s=60.0), RULES, lambda: 0.0)  # pyright: ignore[reportArgumentType]
        with pytest.raises(Unavailable, match="being loaded"):
            await runner.cancel("batch_1", "")
        task = asyncio.create_task(runner.run())
        await soon(lambda: bool(REGISTRY.get_sample_value("ballast_jobs_open_batches")))
        assert (await runner.cancel("batch_1", "")).state is BatchState.CANCELLING
        task.cancel()
        await asyncio.wait([task])
        assert REGISTRY.get_sample_value("ballast_jobs_open_batches") == 0
        store.close()

    run(story())

"""A cluster with TLS, certificates and tokens, as real processes: which calls succeed, and which are refused and
why.
"""

import asyncio
import contextlib
import json
import re
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from ballast.client import AsyncClient, PriorityClass, SamplingParams
from ballast.common.errors import BallastError, PermissionDenied, Unauthenticated, Unavailable
from ballast.rpc.channel import open_channel
from ballast.rpc.errors import from_rpc_error
from ballast.rpc.tls import TlsFolder
from ballast.service.state import StateServer
from ballast.service.tokens import TokenRole
from ballastpb.cluster.v1 import cluster_pb2
from ballastpb.monitor.v1 import monitor_pb2, monitor_pb2_grpc
from ballastpb.planner.v1 import planner_pb2, planner_pb2_grpc
from ballastpb.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.support.cluster import RunningCluster, running_cluster
from tests.support.dispatchers import until_async
from tools.cli.main import main
from tools.cli.tokens import add_token
from tools.local.certificates import make_certificates
from tools.local.cluster import Service
from tools.local.ports import free_ports
from tools.model.tiny import make_tiny

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)  # long enough to be cancelled


@dataclass(frozen=True)
class Secured:
    running: RunningCluster
    folder: Path
    tokens: Path
    infer: str
    operate: str
    metrics_ports: Mapping[Service, int]

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def address(self) -> str:
        return self.running.cluster.address

    def client(self, token: str | None) -> AsyncClient:
        return AsyncClient(self.address, token=token, ca_file=self.ca)

    def peer(self, service: Service, *, as_role: str, folder: Path | None = None) -> grpc.aio.Channel:
        """A channel directly to `service`, with the certificate of `as_role`."""
        credentials = TlsFolder((folder or self.folder) / as_role).channel_credentials()
        return open_channel(self.running.cluster.processes[service][0].address, credentials, service)

    def refused(self, service: Service, reason: str) -> float:
        return self.counted(service, rf'ballast_calls_refused_total{{[^}}]*reason="{reason}"[^}}]*}}')

    def counted(self, service: Service, pattern: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_ports[service]}/metrics", timeout=60) as page:
            text = page.read().decode()
        return sum(float(found) for found in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Generator[Secured]:
    base = tmp_path_factory.mktemp("identity")
    folder, tokens = base / "certs", base / "tokens"
    make_certificates(folder, days=1, hosts=["127.0.0.1"], workers=["worker-7"])
    infer, operate = (add_token(tokens, f"one-who-{role}s", role) for role in TokenRole)
    names: tuple[Service, ...] = ("dispatcher", "monitor", "worker", "planner")
    ports: dict[Service, int] = dict(zip(names, free_ports(len(names)), strict=True))
    # The user who starts a cluster may have exported a token; no service may use it for other clients.
    environ = {"BALLAST_DISPATCHER__LOG_LEVEL": "debug", "BALLAST_TOKEN": operate}
    flags: dict[Service, list[str]] = {name: ["--metrics-port", str(port)] for name, port in ports.items()}
    model = make_tiny("llama", base / "tiny", max_len=8192)
    with running_cluster(
        model,
        workers=1,
        device_memory_bytes=32 << 20,
        secure=folder,
        tokens_file=tokens,
        flags=flags,
        environ=environ,
        gateways=1,
        jobs=1,
        jobs_folder=base / "jobs",
    ) as running:
        yield Secured(running, folder, tokens, infer, operate, ports)


@contextlib.asynccontextmanager
async def refusal(kind: type[BallastError], match: str) -> AsyncGenerator[None]:
    with pytest.raises((BallastError, grpc.RpcError)) as raised:
        yield
    error = from_rpc_error(raised.value, "peer") if isinstance(raised.value, grpc.RpcError) else raised.value
    assert isinstance(error, kind), error
    assert re.search(match, str(error)), error


def test_with_a_token_and_the_ca_all_works(secured: Secured, capsys: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with secured.client(secured.infer) as client:
            assert len((await client.generate("A ship", GREEDY)).token_ids) == 8
            assert await client.tokenize("A ship")
            await client.model_info()
        async with secured.client(secured.operate) as client:
            assert len((await client.status()).workers) == 1

    secured.running.run(story())
    access = ["--address", secured.address, "--ca-file", str(secured.ca), "--token", secured.operate]
    with pytest.MonkeyPatch.context() as environment:  # main() sets these variables; restore them
        for variable in ("BALLAST_TOKEN", "BALLAST_CA_FILE", "BALLAST_TLS_DIR"):
            environment.setenv(variable, "")
        assert main(["generate", *access, "--max-tokens", "4", "--ignore-eos", "A ship"]) == 0
        assert main(["status", *access]) == 0
        assert main(["transitions", *access]) == 0
        assert main(["health", "dispatcher", secured.address, "--ca-file", str(secured.ca)]) == 0
        worker = secured.running.cluster.processes["worker"][0].address
        assert main(["health", "worker", worker, "--tls-dir", str(secured.folder / "operator")]) == 0
    capsys.readouterr()


def test_without_a_token_nothing_works(secured: Secured) -> None:
    async def story() -> None:
        for token, match in ((None, "a token is needed"), ("blst_wrong", "not known")):
            async with secured.client(token) as client:
                for call in (client.generate("A ship", GREEDY), client.status(), client.drain(secured.address)):
                    async with refusal(Unauthenticated, match):
                        await call
        async with AsyncClient(secured.address, token=secured.operate) as plain, refusal(Unavailable, "TLS"):
            await plain.status()

    before = [secured.refused("dispatcher", reason) for reason in ("no_token", "unknown_token")]
    secured.running.run(story())
    after = [secured.refused("dispatcher", reason) for reason in ("no_token", "unknown_token")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [3.0, 3.0]


def test_a_token_is_valid_for_its_classes_only(secured: Secured) -> None:
    token = add_token(secured.tokens, "nightly", TokenRole.INFER, frozenset([PriorityClass.DEFAULT]))

    async def story() -> None:
        async with secured.client(token) as client:
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(Unauthenticated):  # the server rereads the file periodically
                        assert len((await client.generate("A ship", GREEDY)).token_ids) == 8
                        break
                    await asyncio.sleep(0.2)
            async with refusal(PermissionDenied, "nightly may use the classes default, but not interactive"):
                await client.generate("A ship", GREEDY, priority=PriorityClass.INTERACTIVE)

    secured.running.run(story())


def test_a_token_for_inference_does_not_operate(secured: Secured) -> None:
    async def story() -> None:
        before = secured.refused("dispatcher", "role")
        async with secured.client(secured.infer) as client:
            for call in (client.drain(secured.address), client.drain_worker("worker-0"), client.status()):
                async with refusal(PermissionDenied, "needs a token with the role operate; one-who-infers may only"):
                    await call
        metadata = (("authorization", f"Bearer {secured.infer}"),)
        async with open_channel(
            secured.address, TlsFolder(secured.folder / "operator").channel_credentials()
        ) as channel:  # a certificate does not replace a token
            stub = planner_pb2_grpc.PlannerServiceStub(channel)
            for ask in (
                stub.Drop(planner_pb2.DropRequest(request_id="x"), metadata=metadata),
                stub.Restore(planner_pb2.RestoreRequest(request_id="x"), metadata=metadata),
                stub.ListTransitions(planner_pb2.ListTransitionsRequest(), metadata=metadata),
            ):
                async with refusal(PermissionDenied, "role operate"):
                    await ask
            async with refusal(PermissionDenied, "role operate"):
                async for _ in stub.WatchLayout(planner_pb2.WatchLayoutRequest(), metadata=metadata):
                    raise AssertionError("the layout was sent to a client without the role")
            async with refusal(Unauthenticated, "token is needed"):
                await stub.Restore(planner_pb2.RestoreRequest(request_id="x"))
        async with secured.client(secured.operate) as client:
            assert not (await client.status()).draining
        assert secured.refused("dispatcher", "role") == before + 7

    secured.running.run(story())


def test_only_its_own_token_or_an_operator_cancels_a_request(secured: Secured) -> None:
    async def story() -> None:
        other = add_token(secured.tokens, "another", TokenRole.INFER)
        async with (
            secured.client(secured.infer) as owner,
            secured.client(other) as stranger,
            secured.client(secured.operate) as operator,
        ):
            async with asyncio.timeout(60):
                while True:  # until the server has reread the file
                    with contextlib.suppress(Unauthenticated):
                        await stranger.tokenize("A")
                        break
                    await asyncio.sleep(0.1)
            for who in (owner, operator):
                stream = owner.stream("A ship", LONG, request_id="mine")
                await anext(stream)
                async with refusal(PermissionDenied, "mine was started with another token"):
                    await stranger.cancel("mine")
                assert await who.cancel("mine")
                await stream.aclose()
            assert not await stranger.cancel("nobody-s")

    secured.running.run(story())


def test_a_certificate_of_another_ca_is_refused_by_all_services(secured: Secured, tmp_path: Path) -> None:
    make_certificates(tmp_path, days=1, hosts=[], workers=[])
    for name in ("monitor", "planner", "worker", "dispatcher", "operator"):  # trusts our CA
        (tmp_path / name / "ca.crt").write_bytes(secured.ca.read_bytes())

    async def story() -> None:
        callers: dict[Service, str] = {"worker": "planner", "planner": "operator", "monitor": "worker"}
        for service, role in callers.items():
            async with secured.peer(service, as_role=role, folder=tmp_path) as channel:
                call = channel.unary_unary("/grpc.health.v1.Health/Check")
                async with refusal(Unavailable, ""):
                    await call(b"", timeout=60)
            async with secured.peer(service, as_role=role) as channel:
                await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
            process = secured.running.cluster.processes[service][0]
            async with grpc.aio.insecure_channel(process.address) as channel, refusal(Unavailable, ""):
                await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)

    secured.running.run(story())


def test_a_role_may_make_only_its_own_calls(secured: Secured) -> None:
    async def story() -> None:
        services: tuple[Service, ...] = ("worker", "monitor", "planner")
        before = {name: secured.refused(name, "role") for name in services}
        for role in ("dispatcher", "worker", "monitor", "operator"):
            async with secured.peer("worker", as_role=role) as channel:
                stub = worker_pb2_grpc.WorkerServiceStub(channel)
                async with refusal(PermissionDenied, f"a {role} may not call Drain"):
                    await stub.Drain(worker_pb2.DrainRequest())
        async with secured.peer("worker", as_role="worker") as channel:
            attach = worker_pb2_grpc.WorkerServiceStub(channel).Attach()
            async with refusal(PermissionDenied, "a worker may not call Attach"):
                await attach.read()  # if a refusal overtakes the write, the write fails without a reason
        async with (
            secured.peer("planner", as_role="worker") as channel,
            refusal(PermissionDenied, "a worker may not call Restore"),
        ):
            await planner_pb2_grpc.PlannerServiceStub(channel).Restore(planner_pb2.RestoreRequest(request_id="x"))
        async with secured.peer("monitor", as_role="dispatcher") as channel:
            report = monitor_pb2_grpc.MonitorServiceStub(channel).Report()
            async with refusal(PermissionDenied, "a dispatcher may not call Report"):
                await report.read()
        after = {name: secured.refused(name, "role") for name in services}
        assert {name: after[name] - before[name] for name in before} == {"worker": 5, "monitor": 1, "planner": 1}

    secured.running.run(story())


def test_a_server_with_another_roles_certificate_is_rejected(secured: Secured) -> None:
    """A worker's certificate cannot impersonate the monitor: the caller rejects it before sending anything."""

    async def story() -> None:
        address = secured.running.cluster.processes["worker"][0].address
        credentials = TlsFolder(secured.folder / "planner").channel_credentials()
        async with open_channel(address, credentials, "monitor") as channel:
            stub = monitor_pb2_grpc.MonitorServiceStub(channel)
            async with refusal(Unavailable, ""):
                await stub.GetClusterStatus(monitor_pb2.GetClusterStatusRequest(), timeout=60)

    secured.running.run(story())


def test_a_worker_that_claims_another_workers_id_is_refused(secured: Secured) -> None:
    def announce(worker_id: str) -> monitor_pb2.ReportRequest:
        return monitor_pb2.ReportRequest(
            announce=monitor_pb2.Announce(
                worker_id=worker_id,
                incarnation=1 << 50,
                address="127.0.0.1:1",
                model=cluster_pb2.ModelInfo(layer_count=2),
            )
        )

    async def story() -> None:
        before = secured.refused("monitor", "worker_id")
        async with secured.peer("monitor", as_role="worker-7") as channel:
            report = monitor_pb2_grpc.MonitorServiceStub(channel).Report()
            async with refusal(PermissionDenied, "the certificate of worker/worker-7 is not good for worker worker-0"):
                await report.write(announce("worker-0"))
                await report.read()
        assert secured.refused("monitor", "worker_id") == before + 1
        async with secured.client(secured.operate) as client:
            assert [worker.worker_id for worker in (await client.status()).workers] == ["worker-0"]

    secured.running.run(story())


def test_revoked_tokens_and_renewed_certificates_need_no_restart(secured: Secured) -> None:
    async def story() -> None:
        token = add_token(secured.tokens, "for-a-while", TokenRole.INFER)
        async with secured.client(token) as client, asyncio.timeout(60):
            while True:
                with contextlib.suppress(Unauthenticated):
                    await client.tokenize("A")
                    break
                await asyncio.sleep(0.1)
            main(["tokens", "remove", "--file", str(secured.tokens), "for-a-while"])
            async with refusal(Unauthenticated, "not known"):
                while True:
                    await client.tokenize("A")
                    await asyncio.sleep(0.1)
        make_certificates(secured.folder, days=2, hosts=["127.0.0.1"], workers=["worker-7"], renew=True)
        await asyncio.sleep(1.5)
        async with secured.client(secured.infer) as client:
            assert len((await client.generate("A ship", GREEDY, deadline_s=60)).token_ids) == 8
        secured.running.cluster.kill("worker", 0, signal.SIGKILL)  # its streams and reports require new handshakes
        await secured.running.cluster.start_worker()
        async with secured.client(secured.infer) as client:
            assert len((await client.generate("A ship", GREEDY, deadline_s=60)).token_ids) == 8

    secured.running.run(story())


def test_openai_clients_send_their_token_to_the_gateway(secured: Secured) -> None:
    """The clients use TLS. The gateway passes their token on to a dispatcher, which checks it."""
    context = ssl.create_default_context(cafile=str(secured.ca))
    (url,) = secured.running.cluster.http_urls

    def complete(token: str | None) -> tuple[int, dict[str, Any]]:
        body = json.dumps({"prompt": "A ship", "max_tokens": 4, "temperature": 0}).encode()
        headers = {"content-type": "application/json"} | ({} if token is None else {"authorization": f"Bearer {token}"})
        request = urllib.request.Request(f"{url}/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60, context=context) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    assert url.startswith("https://")
    assert complete(secured.infer)[0] == 200
    for token in (None, "blst_wrong"):
        status, answer = complete(token)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(url.removesuffix("/v1") + "/live", timeout=60)


def test_the_state_server_refuses_access_without_the_password(secured: Secured) -> None:
    async def story() -> None:
        stranger = StateServer(secured.running.cluster.redis_url)
        for command in ("GET ballast:layout", "KEYS *", "CONFIG GET *"):
            with pytest.raises(Unavailable, match=r"(?i)no permission|noauth"):
                await stranger.run(stranger.redis.execute_command(command))
        await stranger.close()
        password = (secured.folder / "redis.password").read_text()
        known = StateServer(secured.running.cluster.redis_url, user="ballast", password=password)
        assert await known.run(known.redis.execute_command("GET ballast:layout"))
        for command in ("GET other", "FLUSHALL", "CONFIG GET *", "CLIENT LIST"):
            with pytest.raises(Unavailable, match=r"(?i)no permission"):
                await known.run(known.redis.execute_command(command))
        await known.close()

    secured.running.run(story())


def test_no_token_and_no_secret_is_in_a_log(secured: Secured) -> None:
    logs = "".join(path.read_text() for path in secured.running.cluster.log_dir.glob("*.log"))
    assert "starting" in logs
    files = [(secured.folder / name).read_text() for name in ("cluster.secret", "redis.password")]
    for secret in (secured.infer, secured.operate, *files):
        assert secret not in logs


def test_handshakes_without_a_call_are_counted(secured: Secured) -> None:
    """A handshake without a call is counted once the time limit for a connection's first call has passed."""
    services: tuple[Service, ...] = ("worker", "planner", "monitor")

    def count(service: Service) -> float:
        return secured.counted(service, r"ballast_tls_handshakes_failed_total(?:\{[^}]*\})?")

    async def is_counted(service: Service, before: float) -> bool:
        address = secured.running.cluster.processes[service][-1].address
        credentials = grpc.ssl_channel_credentials(secured.ca.read_bytes())  # no client certificate
        async with open_channel(address, credentials, service) as channel, refusal(Unavailable, ""):
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
        await asyncio.sleep(1.0)
        return count(service) > before

    async def story() -> None:
        before = {service: count(service) for service in services}
        # More than one handshake, since the first call on a connection that was idle until now may be attributed to one
        # of them.
        waits = (
            until_async(lambda s=s: is_counted(s, before[s]), f"handshakes with {s} to be counted") for s in services
        )
        await asyncio.gather(*waits)

    secured.running.run(story())


def test_batches_belong_to_their_token_and_use_tls(secured: Secured, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}
    file.write_text(json.dumps(line))

    def ballast(token: str, *words: str) -> subprocess.CompletedProcess[str]:
        access = ["--url", secured.running.cluster.http_urls[0], "--ca-file", str(secured.ca), "--token", token]
        command = [sys.executable, "-m", "tools.cli.main", "batch", *words, *access]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    done = ballast(secured.infer, "submit", str(file), "--wait", "--json")
    assert done.returncode == 0, done.stderr
    batch = json.loads(done.stdout)
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)
    assert json.loads(ballast(secured.infer, "results", batch["id"]).stdout)["response"]["status_code"] == 200
    assert "there is no batch" in ballast(secured.operate, "status", batch["id"]).stderr
    assert "valid token" in ballast("blst_unknown", "list").stderr

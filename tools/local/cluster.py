"""Runs a whole cluster on this machine: each service is a process, and the state server is private.

A service that ends unexpectedly is an error, which `crash`, `wait_crash` and the end of the context report with the
last lines of its log, unless a `Keeper` restarts the service. All processes end with the process that started them,
even if that is killed.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypedDict

import grpc

from ballast.client.access import Access
from ballast.common.errors import ConfigError, Unavailable
from ballast.rpc.tls import CA
from ballast.service.security import read_secret
from ballast.service.tokens import cluster_token
from ballastpb.inference.v1 import inference_pb2, inference_pb2_grpc
from tools.local.ports import free_port
from tools.local.process import ChildProcess
from tools.local.secrets import CLUSTER_SECRET, REDIS_PASSWORD, REDIS_USER, REDIS_USERS, make_secrets
from tools.local.state_server import PrivateStateServer, state_server

Service = Literal["monitor", "planner", "dispatcher", "worker", "gateway", "jobs"]

_START_ORDER: tuple[Service, ...] = ("monitor", "planner", "worker", "dispatcher", "gateway", "jobs")
_STOP_ORDER: tuple[tuple[Service, ...], ...] = (
    ("jobs",),
    ("gateway",),
    ("dispatcher",),
    ("worker",),
    ("planner", "monitor"),
)
_OUTSIDE: tuple[Service, ...] = ("dispatcher", "gateway")  # services that clients call
_KEEPS_ITS_PORT: tuple[Service, ...] = (*_OUTSIDE, "jobs")  # services that keep their port when restarted
_NEEDS_MODEL: tuple[Service, ...] = ("dispatcher", "worker")
_POLL_S = 0.02
_STATUS_TIMEOUT_S = 2.0
_CONFIGURATION_WRONG = 2  # exit status of a service with an invalid configuration


@dataclass(slots=True)
class ServiceProcess:
    """One service of the cluster. `address`: host:port of its server; empty until it is ready."""

    service: Service
    id: str
    child: ChildProcess
    address: str = ""
    may_end: bool = False  # True while it is being ended on purpose, which is not a crash
    paused: bool = False

    @property
    def pid(self) -> int:
        return self.child.pid

    def read_ready(self) -> bool:
        """Set `address` if the service has printed its ready message. Returns whether it has."""
        line = self.child.find_line(f"ready service={self.service} id={self.id} ")
        if line is not None:
            self.address = dict(word.split("=", 1) for word in line.split()[1:])["address"]
        return line is not None


class Credentials(TypedDict):
    """The credentials of a client, as keyword arguments for its constructor."""

    token: str | None
    ca_file: Path | None


class LocalCluster:
    """`async with LocalCluster(model, workers=2) as cluster:` serves at `cluster.address` inside the block.

    Args:
        model: Folder of the checkpoint.
        workers: Number of workers; likewise for the other services.
        jobs: Number of replicas of the jobs service; none without `jobs_folder`.
        jobs_folder: Folder for batches and their files.
        host: Host on which dispatchers and gateways listen; all other services listen on 127.0.0.1.
        port: Port of the first dispatcher; the others have the following ports. 0: any free ports.
        http_port: Port of the first gateway; the others have the following ports. 0: any free ports.
        metrics_port: Port of the first service's Prometheus metrics; the others have the following ports. 0: any free
            ports; None: no metrics. `metrics_targets` has the addresses.
        device_memory_bytes: Budget of each worker for parameters and KV; None: the worker's default.
        flags: Further command line flags for each service: `{"worker": ["--max-num-seqs", "8"]}`.
        environ: Environment variables of the services, in addition to this process's.
        secure: Folder with certificates, as made by `ballast certs`; services then use TLS.
        tokens_file: File of tokens, as made by `ballast tokens`; dispatchers then require tokens.
        log_dir: Folder for each service's log, ID.log. None: a temporary folder, which is removed at the end unless
            something failed.
        redis_url: URL of a running state server; None: see `tools.local.state_server`.
        worker_ports: Ports of the workers, in order; None: any free ports.
        trees: Service -> folder of the source tree from which it is run, if that is not this one.
        state_front: Called with host:port of the state server; returns the address that services use instead.
        start_timeout_s: Time limit for the whole start, including the loading of the model.
        stop_timeout_s: Time for a service to finish its requests before it is killed.

    Raises:
        ConfigError: a service refused its configuration, or there is no state server on this machine.
        Unavailable: a service died or was not ready in time. On leaving the context: a service has crashed.
    """

    def __init__(
        self,
        model: Path,
        *,
        workers: int = 2,
        dispatchers: int = 1,
        monitors: int = 1,
        planners: int = 1,
        gateways: int = 0,
        jobs: int = 0,
        jobs_folder: Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        http_port: int = 0,
        metrics_port: int | None = None,
        device_memory_bytes: int | None = None,
        flags: Mapping[Service, Sequence[str]] | None = None,
        environ: Mapping[str, str] | None = None,
        secure: Path | None = None,
        tokens_file: Path | None = None,
        log_dir: Path | None = None,
        redis_url: str | None = None,
        worker_ports: Sequence[int] | None = None,
        trees: Mapping[Service, Path] | None = None,
        state_front: Callable[[str], Awaitable[str]] | None = None,
        start_timeout_s: float = 120.0,
        stop_timeout_s: float = 20.0,
    ) -> None:
        self.model = model
        self.processes: dict[Service, list[ServiceProcess]] = {service: [] for service in _START_ORDER}
        self.redis_url = redis_url or ""
        self.metrics_targets: dict[str, str] = {}  # name of a child process -> host:port of its metrics
        self._metrics_port = metrics_port
        self.state_server: PrivateStateServer | None = None  # the cluster's own, while it runs
        self.keep_logs = False  # True after a failure: a temporary log folder is preserved
        self._counts: dict[Service, int] = {
            "monitor": monitors,
            "planner": planners,
            "worker": workers,
            "dispatcher": dispatchers,
            "gateway": gateways,
            "jobs": jobs if jobs_folder is not None else 0,
        }
        self._jobs_folder = jobs_folder
        self._jobs_port = 0
        self._host = host
        self._ports: dict[Service, int] = {"dispatcher": port, "gateway": http_port}
        self._flags: dict[Service, tuple[str, ...]] = {s: tuple((flags or {}).get(s, ())) for s in _START_ORDER}
        if device_memory_bytes is not None:
            self._flags["worker"] = ("--device-memory-bytes", str(device_memory_bytes), *self._flags["worker"])
        self._environ = {**os.environ, **(environ or {}), "PYTHONUNBUFFERED": "1"}
        self._trees = trees or {}
        self._secure = None if secure is None else secure.absolute()
        self._own_state_server = False  # whether the state server is the cluster's own and has users
        self._tokens_file = tokens_file
        self._secret_file = None if self._secure is None else self._secure / CLUSTER_SECRET
        self._worker_ports = worker_ports or ()
        self._state_front = state_front
        self._service_redis_url = ""
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._resources = contextlib.AsyncExitStack()
        self._started: dict[Service, int] = dict.fromkeys(_START_ORDER, 0)  # number in the next id; ids are not reused

    @property
    def address(self) -> str:
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """Addresses of the dispatchers, including killed ones."""
        return [process.address for process in self.processes["dispatcher"]]

    @property
    def http_urls(self) -> list[str]:
        """Base URLs of the gateways for OpenAI's clients, including those of killed ones."""
        return [f"{self._scheme}://{process.address}/v1" for process in self.processes["gateway"]]

    @property
    def _scheme(self) -> str:
        return "http" if self._secure is None else "https"

    @property
    def secret_file(self) -> Path:
        """File with the cluster's secret, for processes that are started separately."""
        assert self._secret_file is not None, "it is made when the cluster starts"
        return self._secret_file

    @property
    def access(self) -> Access:
        """Credentials with all rights, for channels to dispatchers and other services."""
        return Access(**self.credentials, tls_dir=None if self._secure is None else self._secure / "operator")

    @property
    def credentials(self) -> Credentials:
        """Credentials of a client with the role operate: `AsyncClient(cluster.address, **cluster.credentials)`."""
        token = None
        if self._tokens_file is not None and self._secret_file is not None:
            token = cluster_token(read_secret(self._secret_file))
        return {"token": token, "ca_file": None if self._secure is None else self._secure / CA}

    @property
    def log_dir(self) -> Path:
        assert self._log_dir is not None, "set on entering the context"
        return self._log_dir

    async def __aenter__(self) -> Self:
        try:
            if self._log_dir is None:
                self._log_dir = Path(tempfile.mkdtemp(prefix="ballast-logs-"))
                self._resources.callback(self._remove_logs, self._log_dir)
            self._log_dir.mkdir(parents=True, exist_ok=True)
            if self._secret_file is None:
                folder = Path(tempfile.mkdtemp(prefix="ballast-secret-"))  # readable by this user only
                self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
                make_secrets(folder)
                self._secret_file = folder / CLUSTER_SECRET
            if not self.redis_url:
                users = None if self._secure is None else self._secure / REDIS_USERS
                self._own_state_server = users is not None
                opened = state_server(users=users)
                self.redis_url, self.state_server = await self._resources.enter_async_context(opened)
            self._service_redis_url = await self._fronted(self.redis_url)
            await self._start_all()
        except BaseException as error:
            self.keep_logs = isinstance(error, Unavailable)
            await self._stop_all(0.0)
            await self._resources.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        crash = self.crash()
        self.keep_logs = self.keep_logs or crash is not None
        try:
            await self._stop_all(self._stop_timeout_s)
        finally:
            await self._resources.aclose()
        if crash is not None:
            if error is None:
                raise crash
            error.add_note(f"meanwhile {crash}")

    async def _fronted(self, url: str) -> str:
        """The state server's URL for services: `url`, with the address from `state_front` if there is one."""
        if self._state_front is None:
            return url
        parts = urllib.parse.urlsplit(url)
        user, at, address = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user}{at}{await self._state_front(address)}").geturl()

    def crash(self) -> Unavailable | None:
        """An error with the name and the last lines of the log of a service that has ended unexpectedly; None if none
        has.
        """
        for processes in self.processes.values():
            for process in processes:
                if process.child.returncode is not None and not process.may_end:
                    return Unavailable(process.id, process.child.describe_end())
        return None

    async def wait_crash(self) -> Unavailable:
        """Wait until a service has ended unexpectedly, and return the error of `crash`."""
        while (crash := self.crash()) is None:  # noqa: ASYNC110 - the end of a process sets no asyncio.Event
            await asyncio.sleep(10 * _POLL_S)
        return crash

    def find(self, name: str) -> list[ServiceProcess]:
        """The services in the child process `name`: one, or several emulated workers."""
        everyone = [process for processes in self.processes.values() for process in processes]
        return [process for process in everyone if process.child.name == name]

    def respawn(self, name: str) -> list[ServiceProcess]:
        """Kill the child process `name` if it still runs, and start it again with the same ids and log; dispatchers,
        gateways and jobs keep their port. Returns its services, which replace the old ones in `processes`.
        """
        dead = self.find(name)
        old, command = dead[0].child, list(dead[0].child.command)
        old.kill()
        if dead[0].service in _KEEPS_ITS_PORT and dead[0].address:
            command[command.index("--port") + 1] = dead[0].address.rpartition(":")[2]
        child = ChildProcess(name, command, log_path=old.log_path, environ=self._environ)
        processes = self.processes[dead[0].service]
        fresh = [ServiceProcess(process.service, process.id, child) for process in dead]
        for before, after in zip(dead, fresh, strict=True):
            processes[processes.index(before)] = after
        return fresh

    def _remove_logs(self, folder: Path) -> None:
        if not self.keep_logs:
            shutil.rmtree(folder, ignore_errors=True)

    def kill(self, service: Service, index: int = 0, number: signal.Signals = signal.SIGKILL) -> ServiceProcess:
        """Send a signal to one service, whose end then does not count as a crash (except for SIGSTOP and SIGCONT)."""
        process = self.processes[service][index]
        process.may_end = process.may_end or number not in (signal.SIGSTOP, signal.SIGCONT)
        process.paused = number == signal.SIGSTOP
        process.child.send_signal(number)
        return process

    async def start_worker(self, flags: Sequence[str] = (), *, routable: bool = True) -> ServiceProcess:
        """Start another worker, with additional flags. Returns when it is ready; if `routable`, when every dispatcher
        is connected to it.
        """
        process = self._spawn("worker", flags)
        give_up_at_s = time.monotonic() + self._start_timeout_s
        await self._wait_ready(process, give_up_at_s)
        if routable:
            await self._wait_routable({process.id}, give_up_at_s)
        return process

    async def end_worker(self, process: ServiceProcess) -> None:
        """Stop a worker permanently. It has `stop_timeout_s` to finish its requests."""
        while running := [one for one in self.processes["worker"] if one.id == process.id]:  # `respawn` may replace it
            running[0].may_end = True
            await running[0].child.stop(self._stop_timeout_s)
            if running[0] in self.processes["worker"]:
                self.processes["worker"].remove(running[0])
        self.metrics_targets.pop(process.id, None)

    async def start_planner(self) -> ServiceProcess:
        """Start another planner. Returns when it is ready, as the active one or a standby."""
        process = self._spawn("planner")
        await self._wait_ready(process, time.monotonic() + self._start_timeout_s)
        return process

    async def _start_all(self) -> None:
        give_up_at_s = time.monotonic() + self._start_timeout_s
        for service in _START_ORDER:
            if self._counts[service] and service in ("gateway", "jobs"):  # they need the addresses of other services
                await self._wait_all_ready(give_up_at_s)
            for _ in range(self._counts[service]):
                self._spawn(service)
        await self._wait_all_ready(give_up_at_s)
        await self._wait_routable({process.id for process in self.processes["worker"]}, give_up_at_s)

    def _spawn(self, service: Service, flags: Sequence[str] = ()) -> ServiceProcess:
        number = self._started[service]
        self._started[service] += 1
        name = f"{service}-{number}"
        first_port = self._ports.get(service, 0)
        port = first_port + number if first_port else 0
        if service == "worker" and number < len(self._worker_ports):
            port = self._worker_ports[number]
        if service == "jobs" and number == 0:
            port = self._jobs_port
        host = self._host if service in _OUTSIDE else "127.0.0.1"
        command = [sys.executable, "-m", f"services.{service}", "--host", host, "--port", str(port)]
        command += [f"--{service}-id", name]
        if service == "gateway":
            command += ["--dispatchers", ",".join(self.addresses)]
            if self._counts["jobs"]:
                self._jobs_port = self._jobs_port or free_port()
                command += ["--jobs", f"{self._scheme}://127.0.0.1:{self._jobs_port}"]
        else:
            command += ["--metrics-port", str(self._take_metrics_port(name)), "--redis-url", self._service_redis_url]
        if service == "jobs":
            urls = [url.removesuffix("/v1") for url in self.http_urls]
            command += ["--folder", str(self._jobs_folder), "--gateways", ",".join(urls)]
        if service in _NEEDS_MODEL:
            command += ["--model", str(self.model)]
        command += ["--cluster-secret-file", str(self._secret_file)]
        if self._secure is not None:
            if self._own_state_server and service != "gateway":
                password = str(self._secure / REDIS_PASSWORD)
                command += ["--redis-user", REDIS_USER, "--redis-password-file", password]
            command += ["--tls-dir", str(self._secure / service)]
        if service in ("dispatcher", "jobs") and self._tokens_file is not None:
            command += ["--tokens-file", str(self._tokens_file)]
        command += [*self._flags[service], *flags]
        if service == "worker" and "--dist-init-addr" in self._flags["worker"]:  # workers get consecutive ports
            at = command.index("--dist-init-addr") + 1
            first_host, _, first = command[at].rpartition(":")
            command[at] = f"{first_host}:{int(first) + number}"
        tree = self._trees.get(service)
        environ = self._environ if tree is None else {**self._environ, "PYTHONPATH": str(tree)}
        child = ChildProcess(name, command, log_path=self.log_dir / f"{name}.log", environ=environ, cwd=tree)
        process = ServiceProcess(service, name, child)
        self.processes[service].append(process)
        return process

    def write_metrics_targets(self, file: Path) -> Path:
        """Write and return the file by which Prometheus finds the services: `file_sd_configs: [{files: [FILE]}]`."""
        found = {**self.metrics_targets, **{process.id: process.address for process in self.processes["gateway"]}}
        groups = [
            {"targets": [address], "labels": {"job": f"ballast-{name.rpartition('-')[0]}", "name": name}}
            for name, address in found.items()
        ]
        file.write_text(json.dumps(groups, indent=2))
        return file

    async def _wait_all_ready(self, give_up_at_s: float) -> None:
        for processes in self.processes.values():
            for process in processes:
                if not process.address:
                    await self._wait_ready(process, give_up_at_s)

    def _take_metrics_port(self, name: str) -> int:
        if self._metrics_port is None:
            return 0
        port = self._metrics_port + len(self.metrics_targets) if self._metrics_port else free_port()
        self.metrics_targets[name] = f"127.0.0.1:{port}"
        return port

    async def _wait_ready(self, process: ServiceProcess, give_up_at_s: float) -> None:
        while not process.read_ready():
            self._raise_if_crashed()
            if time.monotonic() > give_up_at_s:
                why = f"not ready within {self._start_timeout_s:g} s; its log ends with\n{process.child.log_tail()}"
                raise Unavailable(process.id, why)
            await asyncio.sleep(_POLL_S)

    async def _wait_routable(self, worker_ids: set[str], give_up_at_s: float) -> None:
        for dispatcher in self.processes["dispatcher"]:
            if dispatcher.may_end:
                continue
            async with self.access.open(dispatcher.address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(self.access.bearing(channel))
                while missing := worker_ids - await _connected_workers(stub):
                    self._raise_if_crashed()
                    if time.monotonic() > give_up_at_s:
                        why = f"is not connected to {', '.join(sorted(missing))}\n{self._log_tails()}"
                        raise Unavailable(dispatcher.id, why)
                    await asyncio.sleep(_POLL_S)

    async def is_routable(self, worker_ids: set[str]) -> bool:
        """Whether every running dispatcher is connected to all these workers, or to the leaders of their groups."""
        for dispatcher in self.processes["dispatcher"]:
            if dispatcher.child.returncode is not None or not dispatcher.address:
                continue
            async with self.access.open(dispatcher.address) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(self.access.bearing(channel))
                if not worker_ids <= await _connected_workers(stub):
                    return False
        return True

    def _log_tails(self) -> str:
        everyone = [process for processes in self.processes.values() for process in processes]
        return "\n".join(f"{process.id}:\n{process.child.log_tail(4)}" for process in everyone)

    def _raise_if_crashed(self) -> None:
        crash = self.crash()
        if crash is None:
            return
        child = next(p.child for ps in self.processes.values() for p in ps if p.id == crash.target)
        line = child.find_line("configuration error: ")
        if child.returncode == _CONFIGURATION_WRONG and line is not None:
            raise ConfigError(crash.target, line.removeprefix("configuration error: "))
        raise crash

    async def _stop_all(self, timeout_s: float) -> None:
        """Stop all services, in the order of `_STOP_ORDER`. Paused ones, or with a timeout of 0 all, are killed."""
        everyone = [process for processes in self.processes.values() for process in processes]
        for process in everyone:
            process.may_end = True
            if process.paused or timeout_s == 0.0:
                process.child.kill()
        try:
            for services in _STOP_ORDER:
                async with asyncio.TaskGroup() as tasks:
                    for child in {p.child: None for service in services for p in self.processes[service]}:
                        tasks.create_task(child.stop(timeout_s), name=f"stop {child.name}")
        finally:
            for process in everyone:
                process.child.kill()


async def _connected_workers(stub: "inference_pb2_grpc.InferenceServiceAsyncStub") -> set[str]:
    try:
        status = await stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=_STATUS_TIMEOUT_S)
    except grpc.RpcError:
        return set()
    return {worker.worker_id for worker in status.workers if worker.connected}

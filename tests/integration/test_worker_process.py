"""`python -m services.worker` as a process: startup, invalid configuration, drain, death of a dispatcher, metrics."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ballast.common.ids import WorkerId
from ballast.common.sampling import FinishReason
from ballast.rpc.channel import open_channel
from ballast.service.lifecycle import Lifecycle
from ballast.service.security import Role, Security
from ballast.service.settings import build
from ballast.service.state import StateServer
from services.worker.__main__ import WorkerProcess, load
from services.worker.config import WorkerSettings
from services.worker.engine.load import Engine
from tests.support.attached import Attached, status_of, until_idle
from tests.support.shells import Gate
from tools.local.ports import free_port
from tools.local.process import ChildProcess
from tools.local.state_server import PrivateStateServer
from tools.model.tiny import make_tiny

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
MAX_LEN = 16384
LONG = 5000  # tokens: takes seconds, or half a minute on a busy machine
SERVICE = "ballastpb.worker.v1.WorkerService"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "llama", tmp_path_factory.mktemp("model") / "llama", layers=2, hidden=32, max_len=MAX_LEN, shards=2
    )


@pytest.fixture(scope="module")
def state_url() -> Iterator[str]:
    with PrivateStateServer() as server:
        yield server.url


def arguments(model_dir: Path, redis_url: str, name: str) -> list[str]:
    where = ["--model", str(model_dir), "--redis-url", redis_url, "--port", "0"]
    return [*where, "--device-memory-bytes", "32MiB", "--worker-id", name]


def start(folder: Path, model_dir: Path, redis_url: str, *flags: str, name: str = "w1") -> ChildProcess:
    command = [sys.executable, "-m", "services.worker", *arguments(model_dir, redis_url, name), *flags]
    environ = {**os.environ, "BALLAST_WORKER__DEV": "{check_every_steps: 1}", "OMP_NUM_THREADS": "1"}
    return ChildProcess(name, command, log_path=folder / f"{name}.log", environ=environ)


async def line(child: ChildProcess, prefix: str) -> str:
    """Waits for the first log line that starts with `prefix`; returns it."""
    give_up_at_s = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while (found := child.find_line(prefix)) is None:
        assert child.returncode is None, child.describe_end()
        assert asyncio.get_running_loop().time() < give_up_at_s, child.log_tail()
        await asyncio.sleep(0.02)
    return found


async def has_logged(child: ChildProcess, text: str) -> None:
    give_up_at_s = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while text not in child.log():
        assert child.returncode is None, child.describe_end()
        assert asyncio.get_running_loop().time() < give_up_at_s, child.log_tail()
        await asyncio.sleep(0.02)


@dataclass(frozen=True)
class Serving:
    child: ChildProcess
    address: str
    channel: grpc.aio.Channel

    async def is_ready(self) -> bool:
        return await is_ready(self.channel)


async def is_ready(channel: grpc.aio.Channel) -> bool:
    stub = cast(Any, health_pb2_grpc).HealthStub(channel)  # Any: the add-on has no types
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def until_attached(channel: grpc.aio.Channel, count: int) -> None:
    give_up_at_s = asyncio.get_running_loop().time() + 60.0
    while (found := (await status_of(channel)).dispatcher_count) != count:
        assert asyncio.get_running_loop().time() < give_up_at_s, f"{found} dispatchers are attached"
        await asyncio.sleep(0.02)


async def until_ready(channel: grpc.aio.Channel, ready: bool) -> None:
    give_up_at_s = asyncio.get_running_loop().time() + 60.0
    while await is_ready(channel) != ready:
        assert asyncio.get_running_loop().time() < give_up_at_s, f"readiness is still {not ready}"
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def serving(child: ChildProcess) -> AsyncGenerator[Serving]:
    try:
        ready = await line(child, "ready service=worker id=w1 address=")
        address = ready.rpartition("=")[2]
        async with open_channel(address) as channel:
            yield Serving(child, address, channel)
    finally:
        child.kill()


@pytest.mark.rotating
async def test_a_signal_drains_and_a_restarted_worker_has_a_new_incarnation(
    model: Path, state_url: str, tmp_path: Path
) -> None:
    async with serving(start(tmp_path, model, state_url, "--shutdown-timeout", "120")) as worker:
        assert await worker.is_ready()
        first_life = (await status_of(worker.channel)).incarnation
        attached = await Attached.open(worker.channel)
        await attached.submit(1, LONG)
        await attached.started(1)
        worker.child.send_signal(signal.SIGTERM)
        await until_ready(worker.channel, ready=False)
        await attached.submit(2, 5)
        running, late = await attached.ended(1, 2)
        assert running.reason is FinishReason.LENGTH
        assert len(running.token_ids) == LONG
        assert late.ending is not None
        assert late.ending.refused
        assert await worker.child.wait(60)
        assert worker.child.returncode == 0, worker.child.describe_end()
    async with serving(start(tmp_path, model, state_url)) as worker:
        assert (await status_of(worker.channel)).incarnation > first_life
        worker.child.send_signal(signal.SIGTERM)
        assert await worker.child.wait(60)
        assert worker.child.returncode == 0, worker.child.describe_end()


async def test_a_drain_ends_after_its_time_limit(model: Path, state_url: str, tmp_path: Path) -> None:
    async with serving(start(tmp_path, model, state_url, "--shutdown-timeout", "0.2")) as worker:
        attached = await Attached.open(worker.channel)
        await attached.submit(1, LONG)
        await attached.started(1)
        worker.child.send_signal(signal.SIGTERM)
        assert await worker.child.wait(60)
        assert worker.child.returncode == 0, worker.child.describe_end()
        assert "not drained in time" in worker.child.log()


ABANDON = """
import asyncio, sys
from ballast.rpc.channel import open_channel
from tests.support.attached import Attached

async def main():
    attached = await Attached.open(open_channel(sys.argv[1]))
    for handle in range(1, 4):
        await attached.submit(handle, 15_000)
    await attached.started(3)
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_killed_dispatcher_frees_its_blocks(model: Path, state_url: str, tmp_path: Path) -> None:
    async with serving(start(tmp_path, model, state_url)) as worker:
        command = [sys.executable, "-c", ABANDON, worker.address]
        dispatcher = ChildProcess("dispatcher", command, log_path=tmp_path / "dispatcher.log")
        try:
            await line(dispatcher, "started")
            assert (await status_of(worker.channel)).load.running_count == 3
        finally:
            dispatcher.kill()
        await until_idle(worker.channel)
        assert (await status_of(worker.channel)).load.generation_tokens_total < 3 * 15_000, "not aborted"
        await until_attached(worker.channel, 0)
        assert await worker.is_ready()


async def test_metrics_equal_the_load_report(model: Path, state_url: str, tmp_path: Path) -> None:
    port = free_port()
    async with serving(start(tmp_path, model, state_url, "--metrics-port", str(port))) as worker:
        attached = await Attached.open(worker.channel)
        await attached.submit(1, 12)
        await attached.ended(1)
        await until_idle(worker.channel)
        load_report = (await status_of(worker.channel)).load
        shown = await asyncio.to_thread(scrape, f"http://127.0.0.1:{port}/metrics")
    memory = load_report.memory
    expected = {
        'ballast_kv_blocks{state="used"}': 0,
        'ballast_kv_blocks{state="free"}': load_report.block_count,
        'ballast_device_memory_bytes{use="parameters"}': memory.parameter_bytes,
        'ballast_device_memory_bytes{use="kv"}': memory.kv_bytes,
        'ballast_device_memory_bytes{use="free"}': memory.free_bytes,
        "ballast_kv_cache_usage_fraction": 0,
        "ballast_kv_waiting_blocks": 0,
        "ballast_requests_running": 0,
        "ballast_requests_waiting": 0,
        "ballast_engine_step_age_seconds": 0,
        "ballast_draining": 0,
        "ballast_engine_steps_total": 12,
        "ballast_preemptions_total": 0,
        "ballast_prompt_tokens_total": 3,
        "ballast_generation_tokens_total": 12,
        "ballast_invariant_violations_total": 0,
    }
    assert all('model_name="' in name for name in shown if name.startswith("ballast_"))
    shown = {re.sub(r'model_name="[^"]*",?|\{model_name="[^"]*"\}', "", name): v for name, v in shown.items()}
    shown = {name.replace("{}", ""): value for name, value in shown.items() if not name.endswith("_created")}
    stage = {name: shown.pop(name) for name in list(shown) if name.startswith("ballast_stage_")}
    migrations = {name: shown.pop(name) for name in list(shown) if name.startswith("ballast_migrat")}
    assert {name: shown.get(name) for name in expected} == expected
    assert migrations
    assert not any(migrations.values())
    assert stage.pop("ballast_stage_busy_seconds_total") > 0
    assert stage.pop("ballast_stage_idle_seconds_total") >= 0
    assert stage == {"ballast_stage_network_wait_seconds_total": 0, "ballast_stage_send_seconds_total": 0}


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=60) as response:
        lines: list[str] = response.read().decode().splitlines()
    return {name: float(value) for name, _, value in (one.rpartition(" ") for one in lines if not one.startswith("#"))}


@pytest.mark.rotating
async def test_startup_waits_for_the_state_server_and_says_so(model: Path, tmp_path: Path) -> None:
    port = free_port()
    child = start(tmp_path, model, f"redis://127.0.0.1:{port}/0")
    try:
        await has_logged(child, "waiting for the state server")
        assert child.find_line("ready") is None
        async with PrivateStateServer(port=port), serving(child) as worker:
            await has_logged(child, "state server is there")
            assert await worker.is_ready()
    finally:
        child.kill()


async def test_a_signal_ends_the_wait_for_the_state_server(model: Path, tmp_path: Path) -> None:
    child = start(tmp_path, model, f"redis://127.0.0.1:{free_port()}/0")
    try:
        await has_logged(child, "waiting for the state server")
        child.send_signal(signal.SIGTERM)
        assert await child.wait(60)
        assert child.returncode == 0, child.describe_end()
    finally:
        child.kill()


# ---------------------------------------------------------------- refusals to start


def damaged(folder: Path, model_dir: Path, name: str) -> Path:
    shutil.copytree(model_dir, folder / name)
    return folder / name


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusals(folder: Path, model_dir: Path, taken_port: int) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Expected part of the error line -> the model folder and the flags that cause it."""
    lacking, narrow, garbled, strange = (damaged(folder, model_dir, str(i)) for i in range(4))
    (lacking / "model-00002-of-00002.safetensors").unlink()
    edit_json(narrow / "config.json", intermediate_size=48)
    (garbled / "tokenizer.json").write_text('{"model": 3')
    edit_json(strange / "config.json", model_type="perceptron", architectures=["Perceptron"])
    file = folder / "ballast.yaml"
    file.write_text("worker:\n  modle: /tmp\n")
    return {
        "model-00002-of-00002.safetensors": (lacking, ()),
        "gate_proj": (narrow, ()),
        "tokenizer.json: is not a valid tokenizer": (garbled, ()),
        "erceptron": (strange, ()),
        "config.json": (folder / "nowhere", ()),
        "worker.modle: unknown setting": (model_dir, ("--config", str(file))),
        "worker.max_num_seqs": (model_dir, ("--max-num-seqs", "0")),
        "worker.tpot_target_s": (model_dir, ("--tpot-target-s", "0")),
        "max_num_batched_tokens": (model_dir, ("--max-num-seqs", "64", "--max-num-batched-tokens", "8")),
        "device_memory_bytes": (model_dir, ("--device-memory-bytes", "10KiB")),
        "max_model_len": (model_dir, ("--max-model-len", "100000")),
        f"cannot listen on 127.0.0.1:{taken_port}": (model_dir, ("--port", str(taken_port))),
        f"metrics_port: cannot listen on 127.0.0.1:{taken_port}": (model_dir, ("--metrics-port", str(taken_port))),
        "redis_url": (model_dir, ("--redis-url", "http://here")),
    }


# Imports once, then forks a process per argument list, since importing takes two seconds and refusing almost no time.
REFUSE = """
import json, os, sys
from ballast.service.lifecycle import run_service
from services.worker.__main__ import main

statuses = []
for number, arguments in enumerate(json.load(sys.stdin)):
    pid = os.fork()
    if not pid:
        log = os.open(f"refusal-{number}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv[1:] = arguments
        run_service(main)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(statuses))
"""


@pytest.mark.rotating
def test_a_wrong_configuration_ends_with_status_2_and_one_clear_line(
    model: Path, state_url: str, tmp_path: Path
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        cases = refusals(tmp_path, model, holder.getsockname()[1])
        every = [
            [*arguments(model_dir, state_url, f"refusal-{number}"), "--log-level", "error", *flags]
            for number, (model_dir, flags) in enumerate(cases.values())
        ]
        done = subprocess.run(
            [sys.executable, "-c", REFUSE],
            input=json.dumps(every),
            stdout=subprocess.PIPE,
            text=True,
            timeout=200,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            check=True,
        )
    logs = [(tmp_path / f"refusal-{number}.log").read_text() for number in range(len(cases))]
    for why, status, log in zip(cases, json.loads(done.stdout), logs, strict=True):
        assert status == 2, f"{why}: status {status}, {log}"
        assert log.startswith("configuration error: "), log
        assert log.count("\n") == 1, log
        assert why in log


async def test_a_running_process_reports_a_refused_configuration(model: Path, state_url: str, tmp_path: Path) -> None:
    child = start(tmp_path, model, state_url, "--log-level", "error", "--max-num-seqs", "0")
    try:
        assert await child.wait(START_TIMEOUT_S), child.log_tail()
    finally:
        child.kill()
    assert child.returncode == 2, child.describe_end()
    assert child.log().startswith("configuration error: worker.max_num_seqs"), child.log()


# ---------------------------------------------------------------- readiness


class Gated:
    """A model runner that waits for the gate before every step."""

    def __init__(self, runner: Any, gate: Gate) -> None:
        self._runner, self._gate = runner, gate

    def run_stage(self, *arguments: Any, **layers: Any) -> Any:
        self._gate(0)
        return self._runner.run_stage(*arguments, **layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


async def test_a_worker_whose_engine_hangs_is_not_ready(
    model: Path, state_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = build(WorkerSettings, {"model": model, "port": 0, "redis_url": state_url, "step_timeout_s": 0.3})
    kit, gate, life = load(settings), Gate(), Lifecycle()
    state = StateServer(state_url)
    engine = cast(Engine, kit.engine)
    hanging = replace(kit, engine=replace(engine, runner=cast(Any, Gated(engine.runner, gate))))
    security = Security(Role.WORKER, settings)
    process = WorkerProcess(life, settings, security, hanging, state, WorkerId("hanging"))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(process.run(WorkerId("hanging")))
        printed = ""
        while not (ready := re.search(r"^ready .* address=(\S+)$", printed, re.MULTILINE)):
            await asyncio.sleep(0.02)
            printed += capsys.readouterr().out
        async with open_channel(ready[1]) as channel:
            await until_ready(channel, ready=True)
            attached = await Attached.open(channel)
            await attached.submit(1, 3)
            await until_ready(channel, ready=False)
            gate.open()
            await attached.ended(1)
            await until_ready(channel, ready=True)
            attached.call.cancel()
        life.stop()
        await running
    await state.close()

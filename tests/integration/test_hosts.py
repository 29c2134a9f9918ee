"""Instances with ranks on two hosts, emulated by loopback addresses and a model folder per host, with nothing
shared.
"""

import asyncio
import contextlib
import functools
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ballast.client import AsyncClient, SamplingParams
from tests.support.cluster import until
from tests.support.group import Place, Sizes, _load
from tests.support.pages import ROOT, session, steps
from tools.cli.main import main
from tools.local.cluster import LocalCluster
from tools.local.ports import free_ports
from tools.model.tiny import make_tiny

pytestmark = pytest.mark.rotating

SAMPLING = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
ALONE = ["--overload-policy", "recompute"]  # workers must not merge
FIRST, OTHERS = "127.0.0.2", ("127.0.0.3", "127.0.0.4")
LOST_WITHIN_S = 15.0  # nnodes.SILENT_S and some slack


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny("llama", out, layers=4, kv_heads=4, intermediate=176, max_len=256)


@contextlib.contextmanager
def other_host(
    model: Path, flags: list[str], host: str, secret: Path | None, folder: Path
) -> Generator[psutil.Process]:
    """The processes of a second host: `services.worker --node-rank 1`."""
    copy = folder / host
    shutil.copytree(model, copy, dirs_exist_ok=True)
    command = [sys.executable, "-m", "services.worker", *flags, "--node-rank", "1", "--host", host]
    command += ["--model", str(copy), "--cluster-secret-file", str(secret)]
    with (folder / f"{host}.log").open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(20)


def flags_at(port: int) -> list[str]:
    return ["--tensor-parallel-size", "2", "--nnodes", "2", "--dist-init-addr", f"{FIRST}:{port}"]


@pytest.mark.timeout(120)
def test_the_commands_of_the_page_serve_a_model_on_two_hosts(tmp_path: Path) -> None:
    page = steps(ROOT / "docs/hosts.md")
    places = {"two-hosts": str(tmp_path), f"{FIRST}:29500": f"{FIRST}:{free_ports(1, FIRST)[0]}"}
    files, ranks, up, ask = (
        replace(step, source=functools.reduce(lambda s, of: s.replace(*of), places.items(), step.source))
        for step in page
    )
    with session("--port 0 --http-port 0") as shell, contextlib.ExitStack() as ending:
        shell.run(files)
        command = ranks.source.strip().rstrip("&").replace("python", sys.executable, 1)
        other = subprocess.Popen(["sh", "-c", f"exec {command}"], cwd=ROOT)
        ending.callback(lambda: other.wait(20))
        ending.callback(other.terminate)
        assert "ready: 1 worker" in shell.run(up)
        assert shell.run(ask).strip()
        assert other.poll() is None


def test_memory_of_the_other_host_is_read_and_written_through_its_image(model: Path) -> None:
    stop = threading.Event()
    with _load("a", model, Sizes(place=Place(ranks=4, hosts=2, memory_factor=2)), stop) as engine:
        memory, parameters, kv = engine.memory, engine.memory.parameters, engine.memory.kv
        assert [one.remote is not None for one in kv.mirrors] == [False, True, True]
        right = parameters.loaded_checksums[2]
        assert parameters.layer_checksum(2) == right
        parameters.fetch(2)
        pieces = parameters.pieces(2)
        kept = [piece.clone() for piece in pieces]
        assert all(bool(piece.any()) for piece in kept)
        pieces[-1].zero_()  # held by the last rank, on the other host
        assert parameters.stored_checksum(2, None, None) != right
        engine.read_layer(2)  # each host reads its own part
        assert parameters.layer_checksum(2) == right
        pieces[-1].copy_(kept[-1])
        assert parameters.stored_checksum(2, None, None) == right

        far = kv.mirrors[-1].layer(1)[3:5]
        far.fill_(7.0)
        kv.store(range(1, 2), [(3, 5)])
        far.zero_()
        kv.fetch(range(1, 2), [(3, 5)])
        assert bool((far == 7.0).all())
        memory.check()
    stop.set()


async def test_a_lost_host_ends_its_instances_only(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kills one host's processes under load. Its instance recovers when the host does. No instance that spans hosts can
    be parked.
    """
    common = ["--dtype", "float64", *ALONE]
    each = [flags_at(port) for port in free_ports(2, FIRST)]
    async with LocalCluster(
        model, workers=0, device_memory_bytes=2 << 20, flags={"worker": common, "planner": ALONE}
    ) as cluster:
        hosts = [
            other_host(model, flags, host, cluster._secret_file, tmp_path)
            for flags, host in zip(each, OTHERS, strict=True)
        ]
        with hosts[0] as lost, hosts[1] as kept:
            workers = [await cluster.start_worker(flags) for flags in each]
            async with AsyncClient(cluster.address) as client:
                expected = (await client.generate("A ship", SAMPLING)).token_ids
                park = ["park", workers[1].id, "--wait", "--address", cluster.address]
                assert await asyncio.to_thread(main, park) != 0
                assert f"{workers[1].id} serves again: it cannot be parked" in capsys.readouterr().err
                killed = asyncio.Event()

                async def ask() -> None:
                    while not killed.is_set():
                        assert (await client.generate("A ship", SAMPLING, deadline_s=60)).token_ids == expected

                asking = [asyncio.create_task(ask()) for _ in range(4)]
                await until(client, lambda status: all(w.load and w.load.running_count for w in status.workers))
                workers[0].may_end = True
                at_s = time.monotonic()
                for process in (lost, *lost.children(recursive=True)):
                    process.send_signal(signal.SIGKILL)
                assert await workers[0].child.wait(LOST_WITHIN_S)
                print(f"\nworker ended {time.monotonic() - at_s:.2f} s after its host")
                killed.set()
                await asyncio.gather(*asking)
                await until(client, lambda status: {w.worker_id for w in status.workers} == {workers[1].id})
                assert workers[1].child.returncode is None
                assert kept.is_running()
                assert len(kept.children()) == 1
                log = workers[0].child.log()
                assert "a rank is lost, and this instance ends" in log
                assert f"rank 1 on {OTHERS[0]}" in log

import importlib.util
import os
import socket
import subprocess
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from ballast.common.extras import CLUSTER_DISTRIBUTION
from tools.cli import checks
from tools.cli.checks import Finding, Verdict
from tools.cli.doctor import render
from tools.cli.main import main
from tools.model.tiny import make_preset


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="without torch no worker can run, as doctor says")
def test_this_machine_is_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = make_preset("tiny", tmp_path / "tiny")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["doctor", "--port", str(port), "--device-memory-bytes", "64MiB", "--model", str(model)]
    assert main(arguments) == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    for subject in (
        "Python",
        "torch",
        "state server",
        "ports",
        "/dev/shm",
        "open files",
        "clock",
        "model",
        "host copy",
    ):
        assert subject in shown
    assert "FAIL" not in shown


def test_a_host_copy_needs_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = make_preset("tiny", tmp_path / "tiny")
    assert checks.host_copy(model).verdict is Verdict.OK

    def disk_usage(path: str) -> SimpleNamespace:
        return SimpleNamespace(free=1000, path=path)

    monkeypatch.setattr(checks.shutil, "disk_usage", disk_usage)
    finding = checks.host_copy(model)
    assert finding.verdict is Verdict.WARN
    assert "--shm-size=2g" in finding.remedy


def test_a_taken_port_fails_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        finding = checks.ports(port, 1)
    assert finding.verdict is Verdict.FAIL
    assert str(port) in finding.text
    assert "--port" in finding.remedy


def test_old_software_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.python_version((3, 10, 4)).verdict is Verdict.FAIL

    def version(name: str) -> str | None:
        return {"torch": "2.4.1+cu121", "grpcio": "1.60.0"}.get(name, "999.0")

    monkeypatch.setattr(checks, "installed_version", version)
    assert checks.torch_version().verdict is Verdict.FAIL

    def requires(distribution: str) -> list[str]:
        if distribution == CLUSTER_DISTRIBUTION:
            return ["ballast-serve[cli]==0.1.0", "redis>=1000", "torch>=99; extra == 'worker'"]
        return ["grpcio>=1.72.1", "rich>=13; extra == 'cli'"]

    monkeypatch.setattr("importlib.metadata.requires", requires)
    packages = checks.packages()
    assert packages.verdict is Verdict.FAIL
    assert "grpcio>=1.72.1 (there is 1.60.0)" in packages.text
    assert "redis>=1000" in packages.text
    assert "torch" not in packages.text
    assert "ballast" not in packages.text


def test_too_little_memory_fails() -> None:
    assert checks.memory(2, 1 << 50).verdict is Verdict.FAIL
    assert checks.memory(1, 1 << 20).verdict is Verdict.OK


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    model = make_preset("tiny", tmp_path / "tiny")
    assert checks.model(model, 1 << 30).verdict is Verdict.OK
    assert checks.model(model, 1 << 10).verdict is Verdict.FAIL
    whole = int(checks.model(model, 1 << 10).remedy.split()[-1])
    assert checks.model(model, whole).verdict is Verdict.OK
    assert checks.model(model, whole - 1).verdict is Verdict.WARN
    assert checks.model(tmp_path, 1 << 30).verdict is Verdict.FAIL
    of_each = int(checks.model(model, 1 << 10, 2).remedy.split()[-1])
    assert whole / 2 < of_each < whole  # each of two ranks holds half of every layer, and the whole embedding
    assert checks.model(model, of_each, 2).verdict is Verdict.OK
    assert "2 KV heads do not divide by 4 ranks" in checks.model(model, 1 << 30, 4).text


def test_a_clock_in_the_past_is_reported() -> None:
    assert checks.clock(0.0).verdict is Verdict.WARN
    assert checks.clock().verdict is Verdict.OK


@pytest.mark.parametrize(("text", "version"), [("2.13.0+cpu", (2, 13, 0)), ("9.1.2.post2", (9, 1, 2)), ("2.0", (2, 0))])
def test_versions(text: str, version: tuple[int, ...]) -> None:
    assert checks.version_tuple(text) == version


def test_remedies_follow_their_finding() -> None:
    console = Console(file=StringIO(), width=60)
    console.print(render([Finding("ports", Verdict.FAIL, "taken: 1", "choose another")]))
    assert isinstance(console.file, StringIO)
    assert [line.split() for line in console.file.getvalue().splitlines()] == [
        ["FAIL", "ports", "taken:", "1"],
        ["choose", "another"],
    ]


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Programs found on a machine with a GPU: name -> path."""
    found = {"nvidia-smi": "/usr/bin/nvidia-smi"}
    monkeypatch.setattr(checks.shutil, "which", found.get)
    monkeypatch.setattr(checks, "installed_version", lambda name: "3.7.1")  # pyright: ignore[reportUnknownLambdaType]
    return found


def test_a_gpu_worker_needs_a_compiler_and_a_folder_for_kernel_launchers(
    there: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(checks.sysconfig, "get_path", lambda name: str(tmp_path))  # pyright: ignore[reportUnknownLambdaType]
    finding = checks.kernel_compiler()
    assert (finding.verdict, "install gcc" in finding.remedy) == (Verdict.FAIL, True)
    there["gcc"] = there["/usr/bin/gcc"] = "/usr/bin/gcc"
    assert "Python.h is not there" in checks.kernel_compiler().text
    (tmp_path / "Python.h").touch()
    finding = checks.kernel_compiler()
    assert (finding.verdict, "/usr/bin/gcc" in finding.text, str(tmp_path) in finding.text) == (Verdict.OK, True, True)
    monkeypatch.setattr(checks.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))  # pyright: ignore[reportUnknownLambdaType]
    finding = checks.kernel_compiler()
    assert (finding.verdict, "noexec" in finding.text) == (Verdict.FAIL, True)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/cache")
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)  # pyright: ignore[reportUnknownLambdaType]
    assert "cannot be written to" in checks.kernel_compiler().text
    del there["nvidia-smi"]
    assert checks.kernel_compiler().verdict is Verdict.OK


def test_a_torch_that_sees_no_gpu_despite_a_driver_is_reported(
    there: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for said, wanted in (("none False 0", "the CPU build"), ("13.0 False 0", "built for CUDA 13.0")):
        done = subprocess.CompletedProcess(["python"], 0, stdout=f"{said}\n", stderr="")
        monkeypatch.setattr(checks.subprocess, "run", lambda *_, done=done, **__: done)  # pyright: ignore[reportUnknownLambdaType]
        finding = checks.gpu_in_torch()
        assert (finding.verdict, wanted in finding.text) == (Verdict.WARN, True)
    there.clear()
    assert checks.gpu_in_torch().verdict is Verdict.OK


def test_containers_need_a_toolkit_to_use_gpus(there: dict[str, str]) -> None:
    assert checks.container_toolkit().verdict is Verdict.OK
    there["docker"] = "/usr/bin/docker"
    assert "container toolkit" in checks.container_toolkit().remedy
    there["nvidia-ctk"] = "/usr/bin/nvidia-ctk"
    assert checks.container_toolkit().verdict is Verdict.OK

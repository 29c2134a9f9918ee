"""`make install-check`: installs the wheels into empty environments of every supported Python, and checks them.

Checks for each interpreter: the SDK's wheel alone (size, import time, no cluster packages), the tests of SDK and
command line against the installed wheels without the sources, and `ballast up` with requests through SDK and HTTP.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = (_ROOT, _ROOT / "cluster")
_TEST_PACKAGES = ("hypothesis", "numpy", "pytest", "pytest-timeout")
_TESTS = ("tests/unit/client", "tests/unit/cli", "tests/unit/common", "tests/unit/rpc")
_MOST_MB, _MOST_IMPORT_S = 40.0, 0.15
_READY_WITHIN_S = 180.0
_REQUEST = """
from ballast.client import Client
with Client(ADDRESS) as client:
    answer = client.generate("A ship", {"max_tokens": 6, "ignore_eos": True})
    assert answer.usage.completion_tokens == 6, answer
"""


class CheckFailed(Exception):
    """A check failed; the message says which."""


@dataclass(frozen=True)
class Measured:
    version: str
    sdk_mb: float
    import_s: float
    tests: str
    up: str

    @property
    def row(self) -> str:
        return f"| {self.version} | {self.sdk_mb:.1f} MB | {self.import_s * 1e3:.0f} ms | {self.tests} | {self.up} |"


class Environment:
    """A new virtual environment, whose commands see neither the sources nor this shell's BALLAST_* settings."""

    def __init__(self, interpreter: str, folder: Path) -> None:
        run([interpreter, "-m", "venv", str(folder)])
        self._folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BALLAST_", "PYTHON"))}
        self.environ = {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

    def command(self, name: str) -> str:
        return str(self._folder / "bin" / name)

    def install(self, *what: str) -> None:
        self.run("pip", "install", "--quiet", "--disable-pip-version-check", *what, timeout_s=1800)

    def run(self, *command: str, cwd: Path | None = None, timeout_s: float = 600) -> str:
        return run([self.command(command[0]), *command[1:]], self.environ, cwd or self._folder, timeout_s)

    @property
    def site_packages(self) -> Path:
        [found] = self._folder.glob("lib/python*/site-packages")
        return found


def run(
    command: Sequence[str], environ: dict[str, str] | None = None, cwd: Path | None = None, timeout_s: float = 600
) -> str:
    done = subprocess.run(
        command, env=environ, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
    if done.returncode != 0:
        raise CheckFailed(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def build_wheels(interpreter: str, folder: Path) -> tuple[Path, Path]:
    """Build the wheels of the SDK and of the cluster."""
    for root in _FOLDERS:
        run([interpreter, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(root)])
    [sdk], [cluster] = folder.glob("ballast_serve-*.whl"), folder.glob("ballast_serve_cluster-*.whl")
    return sdk, cluster


def check_sdk(environment: Environment, wheel: Path) -> tuple[float, float]:
    """Install the SDK's wheel and return (size in MB, import time in seconds).

    The size includes dependencies, but not pip and bytecode. The import time is the best of five, with bytecode.

    Raises:
        CheckFailed: the SDK's wheel also installs packages of the cluster.
    """
    environment.install(str(wheel))
    site = environment.site_packages
    if beside := [name for name in ("services", "sim", "torch", "redis", "numpy") if (site / name).exists()]:
        raise CheckFailed(f"installing the SDK also installs {', '.join(beside)}")
    environment.environ.pop("PYTHONDONTWRITEBYTECODE")
    files = [path for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    ours = [path for path in files if path.relative_to(site).parts[0].partition("-")[0] not in ("pip", "setuptools")]
    size_mb = sum(path.stat().st_size for path in ours) / 1e6
    times_s = [import_s(environment) for _ in range(6)][1:]  # the first import compiles bytecode
    return size_mb, min(times_s)


def import_s(environment: Environment) -> float:
    told = environment.run("python", "-X", "importtime", "-c", "import ballast.client")
    lines = re.findall(r"\|\s*(\d+) \|( *)(\S+)", told)
    # Cumulative times in us; the package `ballast` is imported before, not within, `ballast.client`.
    return sum(int(us) for us, _, name in lines if name in ("ballast", "ballast.client")) / 1e6


def check_tests(environment: Environment, folder: Path) -> str:
    """Run the tests of SDK and command line from a copy outside the sources. Returns pytest's last line."""
    for name in ("tests", "docs", "examples"):
        if (_ROOT / name).is_dir():
            shutil.copytree(_ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_ROOT / "pyproject.toml", folder)
    told = environment.run(
        *("python", "-m", "pytest", "-q", "-m", "not slow and not gpu", *_TESTS), cwd=folder, timeout_s=1500
    )
    return told.strip().splitlines()[-1]


def check_up(environment: Environment, folder: Path, engine: str) -> str:
    """Start a cluster, send requests through SDK and HTTP, and stop it. Returns engine and start-up time as text."""
    command = [environment.command("ballast"), "up", "--workers", "2", "--port", "0", "--http-port", "0"]
    if engine == "emulated":
        command += ["--engine", "emulated", "--profile", "A100-40G", "--model", "Qwen2.5-14B"]
    log = folder / "up.log"
    began_s = time.monotonic()
    with log.open("w") as out:
        up = subprocess.Popen(command, env=environment.environ, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
    try:
        address, url = wait_ready(up, log)
        ready_s = time.monotonic() - began_s
        environment.run("python", "-c", _REQUEST.replace("ADDRESS", repr(address)))
        with urllib.request.urlopen(f"{url}/models", timeout=30) as answer:
            name = json.load(answer)["data"][0]["id"]
        body = json.dumps({"model": name, "prompt": [8, 9, 10], "max_tokens": 5, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            tokens = json.load(answer)["usage"]["completion_tokens"]
        if tokens != 5:
            raise CheckFailed(f"the gateway answered with {tokens} tokens instead of 5")
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(60)
    if up.returncode not in (0, 130):
        raise CheckFailed(f"ballast up ended with status {up.returncode}:\n{log.read_text()[-3000:]}")
    return f"{engine}, ready in {ready_s:.1f} s"


def wait_ready(up: "subprocess.Popen[bytes]", log: Path) -> tuple[str, str]:
    """Wait until `ballast up` is ready. Returns (address of the dispatcher, URL of the gateway)."""
    give_up_at_s = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < give_up_at_s and up.poll() is None:
        text = log.read_text()
        if ready := re.search(r"^ready: .* at (http://\S+), gRPC at (\S+:\d+) ", text, re.MULTILINE):
            return ready[2], ready[1]
        time.sleep(0.2)
    raise CheckFailed(f"ballast up is not ready after {_READY_WITHIN_S:g} s:\n{log.read_text()[-3000:]}")


def check(interpreter: str, wheels: tuple[Path, Path], folder: Path, extras: str) -> Measured:
    sdk, cluster = wheels
    version = run([interpreter, "-c", "import platform; print(platform.python_version())"]).strip()
    folder = folder / version
    folder.mkdir()
    alone = Environment(interpreter, folder / "sdk")
    size_mb, took_s = check_sdk(alone, sdk)
    if size_mb > _MOST_MB:
        raise CheckFailed(f"the SDK takes {size_mb:.1f} MB on {version}, more than {_MOST_MB:g}")
    print(f"{version}: the SDK takes {size_mb:.1f} MB and {took_s * 1e3:.0f} ms", flush=True)
    whole = Environment(interpreter, folder / "cluster")
    whole.install(f"{sdk}[cli,bench]", f"{cluster}[{extras}]", *_TEST_PACKAGES)
    tests = check_tests(whole, folder)
    print(f"{version}: {tests}", flush=True)
    up = check_up(whole, folder, "torch" if "worker" in extras.split(",") else "emulated")
    print(f"{version}: ballast up, {up}", flush=True)
    if took_s > _MOST_IMPORT_S:
        print(f"{version}: the import took more than {_MOST_IMPORT_S * 1e3:.0f} ms; is the machine busy?", flush=True)
    return Measured(version, size_mb, took_s, tests.strip("= "), up)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.install_check", description=__doc__)
    parser.add_argument("--pythons", nargs="+", default=["python3.11", "python3.12", "python3.13"], metavar="PYTHON")
    parser.add_argument(
        "--extras",
        default="local",
        help="extras of the cluster to install; with worker, which brings torch, the real engine is used",
    )
    args = parser.parse_args()
    pythons: list[str] = args.pythons
    lacking = [name for name in pythons if shutil.which(name) is None]
    if lacking:
        print(f"install-check: not here: {', '.join(lacking)}; --pythons takes names and paths", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ballast-install-") as name:
        folder = Path(name)
        try:
            wheels = build_wheels(pythons[0], folder)
            measured = [check(interpreter, wheels, folder, args.extras) for interpreter in pythons]
        except CheckFailed as error:
            print(f"install-check: {error}", file=sys.stderr)
            return 1
    print("\n| Python | SDK with all it needs | import ballast.client | tests | ballast up |\n|---|---|---|---|---|")
    print("\n".join(one.row for one in measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())

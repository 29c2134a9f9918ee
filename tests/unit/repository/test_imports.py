"""What importing a part of the code loads, in a fresh interpreter, because static analysis misses dynamic imports."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SERVICES = ("dispatcher", "monitor", "planner", "worker")


def modules_after(statement: str) -> set[str]:
    program = f"{statement}\nimport sys; print(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    return set(done.stdout.split())


def deciding_modules(service: str) -> list[str]:
    """The modules of the service's core and policy."""
    folder = ROOT / "services" / service
    sources = [path for part in ("core", "policy") for path in sorted((folder / part).glob("*.py"))]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in sources]


@pytest.mark.parametrize("service", SERVICES)
def test_a_core_is_pure(service: str) -> None:
    names = deciding_modules(service)
    assert len(names) >= 3
    loaded = modules_after(f"import {', '.join(names)}")
    assert set(names) <= loaded
    assert loaded & {"asyncio", "grpc", "redis", "socket", "torch", "google.protobuf", "logging", "structlog"} == set()


@pytest.mark.parametrize(
    "module",
    [
        "ballast.client",
        "tools.local.cluster",
        "services.dispatcher.__main__",
        "services.monitor.__main__",
        "services.planner.__main__",
    ],
)
def test_only_the_worker_needs_torch(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert loaded & {"torch", "transformers", "safetensors", "matplotlib"} == set()


def test_no_command_needs_torch_or_loads_other_commands() -> None:
    needless = {"torch", "transformers", "safetensors", "matplotlib"}
    every = modules_after("from tools.cli.main import build_parser; build_parser(chr(42))")
    assert {"tools.cli.status", "tools.cli.sim", "tools.bench.command"} <= every
    assert every & needless == set()
    one = modules_after("from tools.cli.main import build_parser; build_parser('status')")
    assert "tools.cli.status" in one
    assert one & {*needless, "tools.cli.sim", "tools.bench.command", "services", "pydantic"} == set()


def test_the_sdk_imports_no_service_and_no_state_server() -> None:
    loaded = modules_after("import ballast.client")
    assert {name for name in loaded if name.split(".")[0] in {"services", "sim", "redis", "uvloop", "rich"}} == set()


def test_names_of_transformers_come_from_its_modules() -> None:
    """If `transformers` is imported as a whole, the type checker reads 2,600 more files."""
    whole = re.compile(r"^\s*(import transformers$|from transformers import)", re.MULTILINE)
    folders = ("ballast", "services", "sim", "tools", "tests", "benchmarks")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in sources if whole.search(path.read_text())] == []

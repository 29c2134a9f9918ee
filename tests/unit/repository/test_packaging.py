"""The wheel holds what it should, and the files that name versions agree."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import ballast
from ballast.common.extras import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("ballast", "ballastpb", "services", "sim")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def sources() -> set[str]:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*"))
    names = (path.relative_to(ROOT) for path in files if path.suffix in {".py", ".pyi", ".typed"} or path.is_symlink())
    return {str(name) for name in names if "__pycache__" not in name.parts}


def test_the_wheel_holds_all_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    code = {name for name in names if ".dist-info/" not in name}
    assert sources() - code == set()
    assert {name.split("/")[0] for name in code} == set(PACKAGES)
    assert all(f"{package}/py.typed" in names for package in PACKAGES)


def test_the_sdk_runs_from_the_wheel_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ballast.client, ballast.cli.main as m;"
        " assert ballast.client.__file__.startswith(sys.argv[1]), ballast.client.__file__;"
        " assert 'torch' not in sys.modules; m.main(['--version'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, f"ballast {ballast.__version__}"), done.stderr


def test_nobody_else_owns_our_package_names() -> None:
    # An editable install is not listed here: absent or ours.
    owners = importlib.metadata.packages_distributions()
    assert {owner for name in PACKAGES for owner in owners.get(name, ())} <= {DISTRIBUTION, "ballast"}


def test_the_wheel_and_the_images_carry_the_version_of_the_code(wheel: Path) -> None:
    assert wheel.name.startswith(f"ballast_serve-{ballast.__version__}-")
    assert f"ballast-worker:${{BALLAST_VERSION:-{ballast.__version__}}}" in (ROOT / "docker-compose.yml").read_text()


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_dependency_is_pinned_and_torch_only_as_an_extra() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {_normal(name): version for name, version in pinned.items()}
    extras = project()["optional-dependencies"]
    names = [*project()["dependencies"], *(r for extra, given in extras.items() if extra != "cuda" for r in given)]
    missing = [name for name in map(_name, names) if name not in pinned and name != DISTRIBUTION]
    assert missing == []
    assert pinned["torch"] == "2.13.0"
    assert [extra for extra, given in extras.items() if "torch" in map(_name, given)] == ["worker"]


def test_the_sdk_needs_grpc_and_protobuf_and_nothing_else() -> None:
    assert [_name(one) for one in project()["dependencies"]] == [
        "googleapis-common-protos",
        "grpcio",
        "grpcio-status",
        "protobuf",
    ]


def test_floors_are_those_of_the_generated_code() -> None:
    floors = {_name(one): re.findall(r">=([\d.]+)", one)[0] for one in project()["dependencies"]}
    for path in (ROOT / "ballastpb").rglob("*_pb2.py"):
        made = re.search(r"Domain\.PUBLIC,\s*(\d+),\s*(\d+),", path.read_text())
        assert made is not None
        assert floors["protobuf"] == f"{made[1]}.{made[2]}", path
    for path in (ROOT / "ballastpb").rglob("*_pb2_grpc.py"):
        made = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", path.read_text())
        assert made is not None
        assert made[1] == floors["grpcio"], path


def test_what_the_sdk_imports_is_what_it_declares() -> None:
    """In a process whose only third parties are those of the SDK: the others cannot be imported."""
    program = (
        "import sys\n"
        "class Only:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        root = name.partition('.')[0]\n"
        "        if root in sys.stdlib_module_names or root in ('ballast', 'ballastpb', 'google', 'grpc'):\n"
        "            return None\n"
        "        if root in ('grpc_status', 'typing_extensions', '_distutils_hack', 'cygrpc', 'sitecustomize'):\n"
        "            return None\n"
        "        raise ModuleNotFoundError(f'No module named {root!r}', name=root)\n"
        "sys.meta_path.insert(0, Only())\n"
        "import ballast.client\n"
        "from ballast.cli.main import main\n"
        "raise SystemExit(main(['status']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(r"ballast: needs rich: pip install 'ballast-serve\[cli\]'\n", done.stderr), done.stderr


def test_declared_python_versions_begin_with_the_least() -> None:
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(project()["classifiers"]))
    assert versions == ["3.11", "3.12", "3.13"]
    assert project()["requires-python"] == ">=3.11"


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return _normal(found[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

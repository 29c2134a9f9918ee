"""Puts `services` and `sim` into the distributions of this folder, and the compiled kernels into its wheels.

Without a compiler for C++ a wheel is pure Python.
"""

import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGES = ("services", "sim")
_NATIVE = "services/worker/engine/native"


def _files(top: Path) -> Iterator[str]:
    """All sources, by their names in the repository."""
    for package in _PACKAGES:
        for path in sorted((top / package).rglob("*")):
            if path.is_file() and path.suffix not in {".pyc", ".so"}:
                yield path.relative_to(top).as_posix()


class ClusterHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        top = self._top()
        if version != "editable":
            build_data["force_include"] |= {str(top / name): name for name in _files(top)}
        if self.target_name == "wheel":
            self._add_kernels(top, version, build_data)

    def _top(self) -> Path:
        """The folder that contains the packages: the parent folder in the repository, this folder in a source
        distribution.
        """
        root = Path(self.root)
        return root if (root / _PACKAGES[0]).is_dir() else root.parent

    def _add_kernels(self, top: Path, version: str, build_data: dict[str, Any]) -> None:
        spec = importlib.util.spec_from_file_location("ballast_build_kernels", top / _NATIVE / "build.py")
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            library = build.build()
        except build.CannotBuild as error:
            print(f"{build.NOT_BUILT} {error}", file=sys.stderr)
            return
        if version == "editable":
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"  # the kernels do not use Python's C API
        build_data["force_include"][str(library)] = f"{_NATIVE}/{library.name}"

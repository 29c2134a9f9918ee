"""Compiles the kernels into wheels and editable installs. Without a compiler for C++ a wheel is pure Python."""

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD = "services/worker/engine/native/build.py"


class KernelsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        spec = importlib.util.spec_from_file_location("ballast_build_kernels", Path(self.root) / _BUILD)
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
        build_data["tag"] = f"py3-none-{platform}"  # nothing of Python's own interface is used
        build_data["artifacts"].append(library.relative_to(self.root).as_posix())

"""`python requirements.py EXTRA,...`: prints the third-party requirements of these extras of both distributions, one
per line.

The images' builds use it to install them before the sources are copied. Standard library only.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_OURS = re.compile(r"(ballast-serve(?:-cluster)?)(?:\[([^\]]*)\])?(?:==.*)?")


def requirements(root: Path, extras: Iterable[str]) -> list[str]:
    """Sorted third-party requirements of ballast-serve and ballast-serve-cluster with these extras."""
    projects = {"ballast-serve": _project(root), "ballast-serve-cluster": _project(root / "cluster")}
    seen: set[tuple[str, str]] = set()

    def of(name: str, extra: str) -> Iterator[str]:
        if (name, extra) in seen:
            return
        seen.add((name, extra))
        project = projects[name]
        for requirement in project["optional-dependencies"][extra] if extra else project["dependencies"]:
            ours = _OURS.fullmatch(requirement)
            if ours is None:
                yield requirement
                continue
            for wanted in ("", *filter(None, (ours[2] or "").split(","))):
                yield from of(ours[1], wanted)

    return sorted({one for extra in ("", *extras) for one in of("ballast-serve", extra)})


def _project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


if __name__ == "__main__":
    print("\n".join(requirements(Path(), sys.argv[1].split(","))))

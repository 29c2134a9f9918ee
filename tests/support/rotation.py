"""Rotating tests: with `--rotate`, as in the gate, a commit runs only its share of the tests marked `rotating`.

`@pytest.mark.rotating` runs one in three, `rotating(5)` one in five; a marked module counts as one test, since its
tests share a cluster. Without the option, as in `make test ROTATE=`, all of them run.
"""

import subprocess
import zlib
from collections.abc import Sequence

import pytest

_SHARES = 3
MARK = "rotating"


def _turn() -> int:
    """A number that is derived from the commit."""
    told = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout
    return zlib.crc32(told.encode())


def of_other_commits(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The rotating tests that this commit skips."""
    marked: list[tuple[pytest.Item, str, int]] = []
    for item in items:
        for node, mark in item.iter_markers_with_node(MARK):
            marked.append((item, node.nodeid, mark.args[0] if mark.args else _SHARES))
            break
    numbers = {name: number for number, name in enumerate(sorted({name for _, name, _ in marked}))}
    turn = _turn() if marked else 0
    return [item for item, name, shares in marked if (numbers[name] + turn) % shares]

"""Tests of a file stay in one process, whose clusters they share; those that share nothing go where there is time.

Files that take minutes come first: at the end one of them would keep a process busy, and the others would wait.
"""

from pathlib import Path

import pytest

_APART = {"test_group_exactness"}
_LONG = [f"test_{name}" for name in ("up", "gateway_structure", "dashboard", "dissolving", "bench", "links")]
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == _HERE and item.path.stem not in _APART:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    items.sort(key=lambda item: _LONG.index(item.path.stem) if item.path.stem in _LONG else len(_LONG))

"""Tests of a file stay in one process, whose clusters they share; those that share nothing go where there is time."""

from pathlib import Path

import pytest

_APART = {"test_group_exactness"}
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == _HERE and item.path.stem not in _APART:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))

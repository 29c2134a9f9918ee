"""Tests marked `gpu` are skipped where there is no CUDA device; a busy machine fails no property."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Before anybody imports grpc, and for all child processes: its notes about connections that end are no results.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# How long an example takes says more about the machine than about the property.
settings.register_profile("ballast", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ballast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # only then: it takes a second

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))

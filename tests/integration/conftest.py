"""All tests of a file run in one process and share its clusters; tests that share nothing run in any free process.

Files that take minutes are scheduled first, since otherwise one of them would run alone at the end.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import RunningCluster, running_cluster
from tools.model.tiny import make_tiny

_APART = {"test_group_exactness"}
_LONG = [
    f"test_{name}"
    for name in [
        "up",
        "gateway_structure",
        "dashboard",
        "chaos",
        "dissolving",
        "bench",
        "compose",
        "links",
        "overload_policies",
        "hostile",
    ]
]
_WITH_A_GATEWAY = (
    "test_gateway_docs",
    "test_gateway_fields",
    "test_gateway_paths",
    "test_gateway_responses",
    "test_gateway_scores",
    "test_gateway_strangers",
    "test_pages",
)  # these tests share `with_a_gateway`
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == _HERE and item.path.stem not in _APART:
            name = "with a gateway" if item.path.stem in _WITH_A_GATEWAY else item.path.stem
            item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: _LONG.index(item.path.stem) if item.path.stem in _LONG else len(_LONG))


@pytest.fixture(scope="session")
def with_a_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A worker with the model `tiny` behind a gateway, for tests that do not change the cluster."""
    model = Path(make_tiny("qwen2", tmp_path_factory.mktemp("with_a_gateway") / "tiny", max_len=1024, vocab=700))
    with running_cluster(model, workers=1, gateways=1) as running:
        yield running

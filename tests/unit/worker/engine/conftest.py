from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.model.tiny import make_tiny


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A small Llama checkpoint that the test may damage."""
    return make_tiny("llama", tmp_path / "model", seed=3, layers=2, vocab=320, max_len=256, shards=2)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An empty Triton cache: compilation reports registers and spills only for kernels that are not cached."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield

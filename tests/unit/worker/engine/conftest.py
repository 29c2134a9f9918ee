from pathlib import Path

import pytest

from ballast.model.tiny import make_tiny


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A small Llama checkpoint that the test may damage."""
    return make_tiny("llama", tmp_path / "model", seed=3, layers=2, vocab=320, max_len=256, shards=2)

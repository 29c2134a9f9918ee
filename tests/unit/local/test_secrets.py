"""The secrets of a cluster are generated once, and missing files are generated again."""

import hashlib
from pathlib import Path

import pytest

from tools.local.secrets import CLUSTER_SECRET, REDIS_PASSWORD, REDIS_USERS, make_secrets


@pytest.mark.parametrize("missing", [CLUSTER_SECRET, REDIS_PASSWORD, REDIS_USERS])
def test_a_missing_file_is_generated_again(tmp_path: Path, missing: str) -> None:
    make_secrets(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / missing).unlink()
    make_secrets(tmp_path)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert hashlib.sha256(after[REDIS_PASSWORD]).hexdigest().encode() in after[REDIS_USERS]
    if missing == REDIS_USERS:
        assert after == before

"""Small checkpoints of every architecture, created once per test session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.model.tiny import make_tiny

MAX_LEN = 512
CheckpointMaker = Callable[[str, bool], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointMaker:
    made: dict[tuple[str, bool], Path] = {}

    def get(arch: str, tied: bool) -> Path:
        if (arch, tied) not in made:
            out = tmp_path_factory.mktemp("checkpoint") / arch
            made[arch, tied] = make_tiny(arch, out, seed=7, layers=3, vocab=512, max_len=MAX_LEN, tied=tied, shards=2)
        return made[arch, tied]

    return get

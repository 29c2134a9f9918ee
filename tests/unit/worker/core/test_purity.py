"""The core gives the same answer in every process. `tests/unit/repository/test_imports.py` checks what it imports."""

import os
import re
import subprocess
import sys


def _python(*args: str, hash_seed: str = "0") -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, check=True, env=environment, timeout=110
    ).stdout


def test_the_same_events_give_the_same_commands_under_any_hash_seed() -> None:
    told = {_python("-m", "tests.support.worker_core_history", "11", hash_seed=seed) for seed in ("1", "2")}
    assert len(told) == 1
    preemptions = re.search(r"(\d+) preemptions", told.pop())
    assert preemptions is not None
    assert int(preemptions[1]) > 5  # enough preemptions to reach the rare cases


def test_groups_merge_and_split_equally_under_any_hash_seed() -> None:
    told = {_python("-m", "tests.support.pipeline_history", "3", hash_seed=seed) for seed in ("1", "2")}
    assert len(told) == 1
    resumed = re.search(r"(\d+) resumed", told.pop())
    assert resumed is not None
    assert int(resumed[1]) > 5

"""A member of a pipeline stops for a while on real processes, no connection is reset, and nobody waits for it; or it is
killed in the middle of a drop or a restore.

`python -m benchmarks.pauses` has more of them: from two seconds to for ever, and every stage of a change.
"""

import asyncio
import math
from pathlib import Path

import pytest

from benchmarks.pauses import Case, run_case
from tools.model.tiny import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", max_len=512)


@pytest.mark.parametrize(
    "case",
    [
        Case("pause", "stage", 5.0, 2, loaded=True),  # longer than a worker's lease, shorter than what breaks a link
        Case("pause", "leader", 13.0, 3, loaded=True),
        Case("pause", "leader", math.inf, 2, loaded=False),
        Case("kill", "stage", 2.0, 2, loaded=True, change="restore", stage="exchanging"),
    ],
    ids=str,
)
def test_a_pause_freezes_nothing(case: Case, model: Path, tmp_path: Path) -> None:
    found = asyncio.run(run_case(case, model, tmp_path))
    # What is right on a machine with nothing else to do, `benchmarks.pauses` asks for.
    why = found.why_not(recovery_s=60.0, limit_s=60.0)
    assert not why, "\n".join([why, *found.story])

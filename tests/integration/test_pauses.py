"""A member of a pipeline is killed, or paused without its connections being reset, during a drop or a restore: no
request waits for it.

`python -m benchmarks.nemesis --cases` has more cases: pauses from two seconds to forever, and every stage of a
transition.
"""

import asyncio
from pathlib import Path

import pytest

from benchmarks.nemesis import Case, run_case
from tools.model.tiny import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("model") / "tiny", max_len=512)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 2, 5.0),  # longer than a worker's lease, shorter than a link's timeout
        Case(0, 3, 13.0),
        Case(0, 2),
        Case(1, 2, change="restore", stage="exchanging"),
    ],
    ids=str,
)
def test_a_pause_freezes_nothing(case: Case, model: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    report = asyncio.run(run_case(case, model, tmp_path, lines.append))
    # A generous limit because machines may be busy; `benchmarks.nemesis` applies a tight one.
    why = report.why_not(longest_wait_s=60.0)
    assert not why, "\n".join([why, *lines])
    assert report.request_count > 10
    assert report.recoveries

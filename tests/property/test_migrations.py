"""Live migrations in virtual time: whatever is lost, late or broken, no sequence is lost or in two places, KV is right
where it is taken for right, and no block stays behind.
"""

import os

import pytest

from tests.support.migration_sim import story

SEEDS, CHUNK = int(os.environ.get("BALLAST_MIGRATION_SEEDS", "400")), 200


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_migrations_move_sequences_or_leave_them_alone(first: int) -> None:
    moved = stayed = anew = too_late = 0
    for seed in range(first, first + CHUNK):
        try:
            cluster = story(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        moved += sum(report.moved for report in cluster.reports)
        stayed += sum(not report.moved for report in cluster.reports)
        anew += cluster.adopted_anew
        too_late += cluster.too_late
    assert min(moved, stayed, anew, too_late) > 0, "the stories have seen what they are about"

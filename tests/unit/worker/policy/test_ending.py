"""When a draining worker may exit."""

from services.worker.policy.ending import may_end


def test_a_stage_stays_until_its_pipeline_is_dissolved_or_abandoned() -> None:
    assert may_end(None, 0.0)
    assert not may_end(0, 1.0)
    assert not may_end(3, 0.0)
    assert may_end(0, 60.0)  # no planner dissolves the group, and nothing runs in it

"""The tables of a transition: complete. What happens: `test_cluster_faults`; the page: `test_pages`."""

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.transition import Phase, TransitionKind
from services.planner.core import stages
from services.planner.core.stages import STAGES, CoordinatorRules, Stage
from services.worker.core import phases
from services.worker.core.phases import PHASES


def test_every_state_that_is_not_a_rest_has_a_deadline_and_a_way_out() -> None:
    assert set(STAGES) == set(Stage)
    assert set(PHASES) == set(Phase) - {Phase.NONE}
    rules = CoordinatorRules()
    for stage, row in STAGES.items():
        assert bool(row.next) is not stage.over
        if not stage.over:
            assert all(0 < row.deadline_s(kind, rules) <= 600 for kind in TransitionKind)
    for row in PHASES.values():
        assert (row.way_out == "at rest") is not bool(row.next)
        assert row.next or row.deadline_s is None


def test_a_step_that_no_table_has_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="done to preparing"):
        stages.check_step(Stage.DONE, Stage.PREPARING)
    with pytest.raises(InvariantViolation, match="exchanging to prepared"):
        phases.check_step(Phase.EXCHANGING, Phase.PREPARED)

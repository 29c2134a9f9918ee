"""The tables of a transition: complete, and printed as the page says. What happens: `test_cluster_faults`."""

from pathlib import Path

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.transition import Phase, TransitionKind
from services.planner.core import stages
from services.planner.core.stages import STAGES, CoordinatorRules, Stage
from services.worker.core import phases
from services.worker.core.phases import PHASES
from tests.support.transition_page import page

_ROOT = Path(__file__).parents[3]


def test_the_page_is_printed_from_the_tables() -> None:
    assert (_ROOT / "docs/transitions.md").read_text() == page(), "see tests/support/transition_page.py"


def test_every_state_that_is_not_a_rest_has_a_deadline_and_a_way_out() -> None:
    assert set(STAGES) == set(Stage)
    assert set(PHASES) == set(Phase) - {Phase.NONE}
    rules = CoordinatorRules()
    for stage, row in STAGES.items():
        assert bool(row.next) is not stage.over
        if not stage.over:
            assert all(0 < row.deadline_s(kind, rules) <= 600 for kind in TransitionKind)
    assert all(row.deadline != "-" for row in PHASES.values() if row.next)


def test_a_step_that_no_table_has_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="done to preparing"):
        stages.check_step(Stage.DONE, Stage.PREPARING)
    with pytest.raises(InvariantViolation, match="exchanging to prepared"):
        phases.check_step(Phase.EXCHANGING, Phase.PREPARED)

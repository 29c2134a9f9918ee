"""The tables of a transition: complete, printed as the page says, and what really happens."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.transition import Phase, TransitionKind
from services.planner.core import stages, transition
from services.planner.core.stages import STAGES, CoordinatorRules, Stage
from services.worker.core import phases
from services.worker.core import transition as member
from services.worker.core.phases import PHASES
from tests.support.cluster_campaign import story
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


def test_what_happens_under_faults_is_what_the_tables_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of the tables is seen, but those whose causes this simulation does not have."""
    seen: Counter[tuple[Stage, Stage]] = Counter()
    told: Counter[tuple[Phase, Phase]] = Counter()

    def note_stage(before: Stage, after: Stage) -> None:
        seen[before, after] += before is not after
        stages.check_step(before, after)

    def note_phase(before: Phase, after: Phase) -> None:
        told[before, after] += 1
        phases.check_step(before, after)

    monkeypatch.setattr(transition, "check_step", note_stage)
    monkeypatch.setattr(member, "check_step", note_phase)
    for seed in range(60):
        story(seed)
    steps = {(stage, following) for stage, row in STAGES.items() for following in row.next}
    assert steps - (+seen).keys() <= {(Stage.ABORTING, Stage.COMMITTING), (Stage.PREPARING, Stage.ABORTED)}
    calm = [Phase.PREPARING, Phase.PREPARED, Phase.COMMITTING, Phase.EXCHANGING, Phase.DONE]
    assert {*pairwise(calm)} <= {*told}

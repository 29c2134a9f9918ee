"""The transition tables are complete. `test_cluster_faults` tests the behaviour, `test_pages` the page."""

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.transition import Phase, TransitionKind
from services.planner.core import stages
from services.planner.core.stages import STAGES, CoordinatorRules, Stage
from services.worker.core import transition_messages
from services.worker.core.phases import DROP, RESTORE, On, Row, State


def test_every_state_except_rests_has_a_deadline_and_an_exit() -> None:
    assert set(STAGES) == set(Stage)
    rules = CoordinatorRules()
    for stage, row in STAGES.items():
        assert bool(row.next) is not stage.over
        if not stage.over:
            assert all(0 < row.deadline_s(kind, rules) <= 600 for kind in TransitionKind)


@pytest.mark.parametrize("table", [DROP, RESTORE])
def test_every_state_of_a_member_except_rests_has_an_exit(table: dict[State, Row]) -> None:
    assert {row.phase for row in table.values()} == set(Phase) - {Phase.NONE}
    for row in table.values():
        assert (row.way_out == "at rest") is not bool(row.ways)
        assert row.ways or row.deadline_s is None
        assert all(way.to is None or way.to in table for way in row.ways)
    reached, fresh = set[State](), [State.NEW]
    while fresh:
        state = fresh.pop()
        reached.add(state)
        fresh += [way.to for way in table[state].ways if way.to is not None and way.to not in reached]
    assert reached == set(table)


def test_every_event_of_a_transition_is_received_somewhere() -> None:
    received = {
        way.event for table in (DROP, RESTORE) for row in table.values() for way in row.ways if isinstance(way, On)
    }
    assert received == set(transition_messages.Event.__args__)


def test_a_step_outside_the_tables_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="done to preparing"):
        stages.check_step(Stage.DONE, Stage.PREPARING)

"""A member acts on the deadlines in its phase tables, whatever their values."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, Incarnation
from ballast.common.transition import Phase
from services.worker.core import phases
from services.worker.core.transition_messages import PreparationFailed
from services.worker.pipeline.events import Told
from services.worker.pipeline.layers import Rescue
from services.worker.pipeline.planner_side import Transitions
from services.worker.pipeline.progress import TransitionProgress
from tests.unit.worker.pipeline.test_planner_side import ME, whole_again

EPOCH = Epoch(5)


@pytest.fixture(params=[None, 4.0])
def limit_s(request: pytest.FixtureRequest) -> float | None:
    """The deadline that the test puts into the table for this request; None: the table is unchanged."""
    return request.param


def in_table(phase: Phase, limit_s: float | None, monkeypatch: pytest.MonkeyPatch) -> float:
    assert 0 < phases.deadline_s(phase) <= 60
    for name in ("DROP", "RESTORE") if limit_s is not None else ():
        table = getattr(phases, name)
        changed = {k: replace(row, deadline_s=limit_s) if row.phase is phase else row for k, row in table.items()}
        assert changed != table
        monkeypatch.setattr(phases, name, changed)
    return phases.deadline_s(phase)


@pytest.mark.parametrize("phase", phases.BEFORE_COMMIT)
def test_a_plan_is_rolled_back_when_no_planner_asks_for_it(
    phase: Phase, limit_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    within_s, now_s = in_table(phase, limit_s, monkeypatch), 0.0
    timers, posted = list[tuple[float, Callable[[], None]]](), list[object]()

    def later(delay_s: float, act: Callable[[Epoch], None], epoch: Epoch, /) -> Any:
        timers.append((now_s + delay_s, lambda: act(epoch)))
        return SimpleNamespace(cancel=lambda: None)

    member = SimpleNamespace(
        me=ME,
        newest_epoch=Epoch(0),
        published=SimpleNamespace(),
        progress={EPOCH: TransitionProgress(epoch=EPOCH, began_s=0.0, phase=phase)},
    )
    transitions = Transitions(cast("Any", member), Incarnation(1), posted.append, lambda: now_s, later)
    transitions.take(whole_again(4, 1), ())
    posted.clear()
    now_s = within_s / 2  # a planner asks, which extends the deadline
    assert transitions.said(EPOCH)[0] is phase
    while not posted:
        now_s, act = timers.pop()
        act()
    assert 1.5 * within_s <= now_s <= 2 * within_s
    (told,) = posted
    assert isinstance(told, Told)
    assert isinstance(told.event, PreparationFailed)


def test_a_member_ends_if_transfers_of_a_lost_group_never_end(
    limit_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    within_s = in_table(Phase.FAILED, limit_s, monkeypatch)
    progress, nothing = TransitionProgress(epoch=EPOCH, began_s=0.0), cast("Any", None)
    rescue = Rescue(EPOCH, progress, nothing, quiet=lambda: False, sources=dict, kept=range(2), began_s=10.0)
    assert not rescue.poll(10.0 + within_s, nothing)
    with pytest.raises(InvariantViolation, match=f"not ended {within_s:g} s after"):
        rescue.poll(10.1 + within_s, nothing)

"""Small models whose states are searched exhaustively."""

import os

import pytest

from ballast.common.ids import WorkerId
from ballast.common.transition import Phase
from services.dispatcher.core.dispatcher import DispatcherCore
from services.dispatcher.core.events import AbortOnWorker, Command, Event
from services.dispatcher.core.tracked import Tracked
from services.planner.core.stages import Stage
from services.planner.core.transition import Command as PlannerCommand
from services.planner.core.transition import Coordinator
from tests.support.exhaustive import Broken, search
from tests.support.planner_handover import Handover
from tests.support.request_ownership import Ownership

LIMIT = int(os.environ.get("BALLAST_STATES", "2000"))  # about 10,000 cover all states, with 3 losses of a request


def test_a_request_has_one_owner_and_one_ending_in_any_order_of_events() -> None:
    found = search(Ownership(losses=2), LIMIT)
    print(found)
    assert found.whole
    assert found.ends > 10


def test_a_drop_has_the_same_outcome_on_both_members_in_any_order_of_events() -> None:
    found = search(Handover(losses=0), LIMIT)
    print(found)
    assert found.whole
    assert found.ends > 0


@pytest.mark.rotating
def test_a_drop_has_the_same_outcome_on_both_members_despite_new_planners_and_lost_calls() -> None:
    found = search(Handover(losses=1), LIMIT // 2)
    print(found)
    assert found.depth > 6


def test_an_abort_without_notification_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = DispatcherCore.handle

    def forgetful(self: DispatcherCore, event: Event) -> list[Command]:
        return [command for command in handle(self, event) if not isinstance(command, AbortOnWorker)]

    monkeypatch.setattr(DispatcherCore, "handle", forgetful)
    with pytest.raises(Broken, match="Fail, and workers have it"):
        search(Ownership(losses=1), LIMIT)


def test_a_lost_token_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    move = DispatcherCore._enqueue

    def forgetful(self: DispatcherCore, tracked: object, at_s: float) -> None:
        tracked.output_token_ids.clear()  # pyright: ignore[reportAttributeAccessIssue]
        move(self, tracked, at_s)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(DispatcherCore, "_enqueue", forgetful)
    with pytest.raises(Broken):
        search(Ownership(losses=1), LIMIT)


def test_an_abort_that_does_not_wait_for_a_prepared_member_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding this fault takes a failing member, another member that is prepared, and a lost call. Random campaigns
    rarely combine these.
    """
    is_through = Coordinator._is_through

    def hasty(self: Coordinator, worker_id: WorkerId) -> bool:
        prepared = self.stage is Stage.ABORTING and self.said[worker_id] is Phase.PREPARED
        return prepared or is_through(self, worker_id)

    monkeypatch.setattr(Coordinator, "_is_through", hasty)
    with pytest.raises(Broken, match=r"it was aborted, but members are .*prepared"):
        search(Handover(losses=2, only=("b fails", "ABORT of p0 is lost")), LIMIT)


def test_a_request_that_is_placed_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    move = DispatcherCore._move

    def doubled(self: DispatcherCore, tracked: Tracked, worker_id: WorkerId, at_s: float) -> list[Command]:
        commands = move(self, tracked, worker_id, at_s)
        return [*commands, *commands]

    monkeypatch.setattr(DispatcherCore, "_move", doubled)
    with pytest.raises(Broken, match=r"resumed elsewhere after different tokens|workers have it"):
        search(Ownership(losses=1), LIMIT)


def test_a_commit_for_which_one_member_is_not_prepared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Coordinator._advance

    def hasty(self: Coordinator) -> list[PlannerCommand]:
        if self.stage is Stage.PREPARING and Phase.PREPARED in self.said.values() and self._writing is None:
            return self._write(Stage.COMMITTING)
        return advance(self)

    monkeypatch.setattr(Coordinator, "_advance", hasty)
    with pytest.raises(Broken, match="commit while preparing"):
        search(Handover(losses=0), LIMIT)

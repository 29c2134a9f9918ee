"""One worker's part in a change of the layout: a state machine driven by the tables of `core.phases` (pure).

The tables and `TransitionState` make all decisions of a transition. The member executes them: it connects links, moves
memory and KV, and reports.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import Member
from ballast.common.transition import Phase
from services.worker.core.phases import DROP, RESTORE, On, State, Then
from services.worker.core.plan import Plan, part_of
from services.worker.core.transition_messages import Command, Event, PeerLost
from services.worker.core.transition_state import TransitionState

AFTER_COMMIT = (Phase.COMMITTING, Phase.EXCHANGING)
STAND_IN_S = 3.0  # how long the remaining members of a group wait for a stand-in for a lost follower


class Reception(Enum):
    """How a member answers a plan."""

    IGNORE = auto()  # a repeated or outdated plan, or another plan is committed: the planner retries
    LEAVE = auto()  # the plan's base lacks this member's group, because a member counts as lost: leave the group
    CONFIRM = auto()  # the plan makes this member serve alone, which it already does, perhaps with requests
    TAKE = auto()


def reception(
    plan: Plan, me: WorkerId, newest_epoch: Epoch, transition: "Transition | None", *, in_group: bool, is_whole: bool
) -> Reception:
    """Decide how this worker answers a plan. `transition`: the current or last one. `in_group`: its group has several
    members. `is_whole`: it serves alone with all layers, without a transition.
    """
    part = part_of(plan, me)
    if plan.epoch <= newest_epoch or part is None:
        return Reception.IGNORE
    is_committed = transition is not None and transition.phase in AFTER_COMMIT
    if part.old is None and (in_group or is_committed):
        return Reception.LEAVE
    if part.old is None and len(part.new.members) == 1 and is_whole:
        return Reception.CONFIRM
    return Reception.IGNORE if is_committed else Reception.TAKE


@dataclass(frozen=True, slots=True)
class LostStage:
    """A lost follower of the current group. The other members keep their KV until `until_s`: until then, a plan may
    give the follower's layers to an instance that serves alone (a stand-in).
    """

    epoch: Epoch  # epoch of the group
    peer: WorkerId
    why: str
    until_s: float

    def waits(self, now_s: float, transition: "Transition | None") -> bool:
        """True while a plan with a stand-in may still arrive or is being executed."""
        if transition is None or self.peer not in transition.part.lost:
            return now_s < self.until_s
        return transition.phase not in (Phase.FAILED, Phase.ABORTED)


def lost_stage(
    at_s: float, epoch: Epoch, lost: PeerLost, stages: Sequence[Member], me: WorkerId, *, at_rest: bool
) -> LostStage | None:
    """Return the loss that a stand-in may repair. None if the group has to end, because its leader is lost or its
    layout is changing (not `at_rest`).
    """
    if not at_rest or lost.peer in (me, stages[0].worker_id):
        return None
    return LostStage(epoch, lost.peer, lost.why, at_s + STAND_IN_S)


class Transition(TransitionState):
    """One worker's state machine for one plan. Only `handle` changes its state."""

    def __init__(self, me: WorkerId, plan: Plan) -> None:
        super().__init__(me, plan)
        self.state = State.NEW
        self._table = RESTORE if self.part.dissolves else DROP

    @property
    def phase(self) -> Phase:
        return self._table[self.state].phase

    @property
    def takes_checksums(self) -> bool:
        """True while checksums of the layers to be dropped are computed, during which the layers must not be moved."""
        return self.state is State.PREPARING and not (self.part.dissolves or self.memory_ready)

    @property
    def undoing(self) -> bool:
        """True while layers loaded by a restore that failed before its commit are dropped again."""
        failed = self.state is State.FAILED and self.part.dissolves and not self.undone
        return failed or self.state is State.UNDOING

    @property
    def drains(self) -> bool:
        """True while the draining group still computes here."""
        return self.state is State.DRAINING

    @property
    def limits(self) -> bool:
        """True while this leader limits its group and requests still hold blocks beyond the limit."""
        return self.state is State.LIMITING

    @property
    def quiesces(self) -> bool:
        """True while no batch is formed and the last batches of the old layout complete."""
        return self.state is State.QUIESCING and self.led_before

    @property
    def has_lost_batches(self) -> bool:
        """True while results of batches that count as lost may still arrive."""
        return self.quiesces and bool(self.part.lost)

    @property
    def may_form(self) -> bool:
        """True if a leader may form batches."""
        return not self.quiesces and (self.part.dissolves or self.state is not State.GATHERING)

    @property
    def awaits_roster(self) -> bool:
        """True until the group's leader has announced which KV is kept."""
        return self.phase is Phase.EXCHANGING and self.part.new.leader.worker_id not in self.waves

    def handle(self, event: Event) -> list[Command]:
        for way in self._table[self.state].ways:
            if isinstance(way, On) and way.event is type(event) and (way.when is None or way.when(self, event)):
                self._go(way)
                return way.do(self, event) + self._go_on()
        return []

    def _go_on(self) -> list[Command]:
        commands: list[Command] = []
        while (way := self._open_way()) is not None:
            self._go(way)
            commands += way.do(self) if way.do is not None else ()
        return commands

    def _open_way(self) -> Then | None:
        ways = self._table[self.state].ways
        return next((way for way in ways if isinstance(way, Then) and way.when(self)), None)

    def _go(self, way: On | Then) -> None:
        self.state = way.to or self.state

    def check(self) -> None:
        """Raise InvariantViolation if actions under way contradict the state."""
        if self.state is State.DONE:
            self.check_done()
        if self._open_way() is not None:
            raise InvariantViolation(f"{self.me}: epoch {self.epoch} is stuck in {self.state}")

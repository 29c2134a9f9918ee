"""The stages of a transition in the planner, as a table that the coordinator follows (pure).

`docs/transitions.md` is generated from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from ballast.common.errors import InvariantViolation
from ballast.common.transition import TransitionKind


class Stage(StrEnum):
    """Stage of a transition, as journaled. No stage is followed by one above it."""

    PREPARING = "preparing"
    ABORTING = "aborting"
    COMMITTING = "committing"
    EXCHANGING = "exchanging"
    DONE = "done"
    ABORTED = "aborted"

    @property
    def over(self) -> bool:
        return self in (Stage.DONE, Stage.ABORTED)


@dataclass(frozen=True, slots=True)
class CoordinatorRules:
    """Timeouts in seconds, enforced regardless of the members' answers."""

    prepare_timeout_s: float = 10.0
    restore_prepare_timeout_s: float = 600.0
    commit_timeout_s: float = 30.0  # maximum time for the end of a step and remapping
    exchange_timeout_s: float = 60.0  # time without progress of any member
    abort_timeout_s: float = 10.0
    bereaved_s: float = 1.0  # after the commit: time left to members that depend on a lost one
    poll_s: float = 0.02  # polling interval for a member that will be ready soon; short, because requests wait
    slow_poll_s: float = 0.1  # polling interval for a member that loads parameters or exchanges KV


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage. `next`: possible next stages with their events. `deadline`: a field of `CoordinatorRules` for each
    kind of transition. `way_out`: what happens after the deadline.
    """

    next: Mapping[Stage, str]
    deadline: Mapping[TransitionKind, str]
    way_out: str

    def deadline_s(self, kind: TransitionKind, rules: CoordinatorRules) -> float:
        return getattr(rules, self.deadline[kind])


def _always(name: str) -> Mapping[TransitionKind, str]:
    return MappingProxyType(dict.fromkeys(TransitionKind, name))


STAGES: Mapping[Stage, StageRow] = MappingProxyType(
    {
        Stage.PREPARING: StageRow(
            next=MappingProxyType(
                {
                    Stage.COMMITTING: "every member is prepared, or already in the planned state",
                    Stage.ABORTING: "a member fails or is lost; demand has risen again; the planner has changed",
                    Stage.ABORTED: "the journal refuses the plan; no member has received it",
                }
            ),
            deadline=MappingProxyType(
                {
                    TransitionKind.DROP: "prepare_timeout_s",
                    TransitionKind.RESTORE: "restore_prepare_timeout_s",
                }
            ),
            way_out="it is aborted",
        ),
        Stage.COMMITTING: StageRow(
            next=MappingProxyType({Stage.EXCHANGING: "every remaining member has the new layout"}),
            deadline=_always("commit_timeout_s"),
            way_out="members without the new layout count as lost, with the others of their groups that are not done,"
            " and stay out of it until they hold all layers",
        ),
        Stage.EXCHANGING: StageRow(
            next=MappingProxyType({Stage.DONE: "every remaining member has all its KV"}),
            deadline=_always("exchange_timeout_s"),
            way_out="measured from the last progress; members that still wait count as lost, too",
        ),
        Stage.ABORTING: StageRow(
            next=MappingProxyType(
                {
                    Stage.ABORTED: "every member has rolled back",
                    Stage.COMMITTING: "a member has committed: the journal in the state server was outdated",
                }
            ),
            deadline=_always("abort_timeout_s"),
            way_out="members that have not answered count as lost, too",
        ),
        Stage.DONE: StageRow(MappingProxyType({}), MappingProxyType({}), "at rest"),
        Stage.ABORTED: StageRow(MappingProxyType({}), MappingProxyType({}), "at rest"),
    }
)


def check_step(before: Stage, after: Stage) -> None:
    """Raise InvariantViolation unless the table permits this step."""
    if after is not before and after not in STAGES[before].next:
        raise InvariantViolation(f"a transition changes from {before} to {after}, which its table does not permit")

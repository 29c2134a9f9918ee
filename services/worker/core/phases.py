"""The phases of a member in a transition, and of one that has left its group: one table, which every step is held
against, and which has the deadlines that a member acts on (pure).

`docs/transitions.md` is printed from it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ballast.common.errors import InvariantViolation
from ballast.common.transition import Phase


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """`next`: the phases that may follow, with the event that leads there. `deadline_s`: of the member's own; None: it
    is at rest, or the planner ends the phase. `way_out`: from when the deadline counts, and what follows.
    """

    drop: str  # what the member does meanwhile
    restore: str
    next: Mapping[Phase, str]
    deadline_s: float | None = None
    way_out: str = "at rest"


BEFORE_COMMIT = (Phase.PREPARING, Phase.PREPARED)
_FORGOTTEN_S = 15.0  # what is prepared will not be committed any more
_FORGOTTEN = "counted from the planner's last question: it fails"
_UNDONE = "Abort, a peer of the plan is lost, or a newer plan comes"
_LEFT = "a peer is lost, or a plan counts this worker in no group: it leaves"
_OVERDUE = "a plan without this worker's group follows: it leaves"

PHASES: Mapping[Phase, PhaseRow] = MappingProxyType(
    {
        Phase.PREPARING: PhaseRow(
            drop="links come up; checksums of the layers to be given up are taken",
            restore="links come up; the leader limits the group, layers come into what that frees and are verified",
            next=MappingProxyType(
                {
                    Phase.PREPARED: "links are up and memory is ready",
                    Phase.FAILED: "it does not fit, or a peer of the plan is lost",
                    Phase.ABORTED: _UNDONE,
                }
            ),
            deadline_s=_FORGOTTEN_S,
            way_out=_FORGOTTEN,
        ),
        Phase.PREPARED: PhaseRow(
            drop="serves on as before",
            restore="serves on as before",
            next=MappingProxyType(
                {
                    Phase.COMMITTING: "Commit",
                    Phase.FAILED: "a peer of the plan is lost; a request has become too long",
                    Phase.ABORTED: _UNDONE,
                }
            ),
            deadline_s=_FORGOTTEN_S,
            way_out=_FORGOTTEN,
        ),
        Phase.COMMITTING: PhaseRow(
            drop="no batch is formed; the last ones come back",
            restore="at once: KV of its own in the memory that is free; the group goes on beside that",
            next=MappingProxyType(
                {
                    Phase.EXCHANGING: "between two batches: memory is remapped, the role is another one",
                    Phase.FAILED: _LEFT,
                }
            ),
            way_out=_OVERDUE,
        ),
        Phase.EXCHANGING: PhaseRow(
            drop="the group serves new requests; KV of victims travels, in waves as there is room",
            restore="each member serves alone; what is left in the group ends, or goes to a member (Abort: now)",
            next=MappingProxyType(
                {
                    Phase.DONE: "a drop: all KV has come and gone; a restore: the group has ended, or lost a member",
                    Phase.FAILED: _LEFT,
                }
            ),
            way_out=_OVERDUE,
        ),
        Phase.DONE: PhaseRow("at rest", "at rest", MappingProxyType({})),
        Phase.FAILED: PhaseRow(
            drop="before the commit: undone. After it: requests are replayed elsewhere, missing layers are read",
            restore="before the commit: layers go again",
            next=MappingProxyType({Phase.ABORTED: "Abort"}),
            deadline_s=30.0,
            way_out="after the commit, for transfers to end: the process ends. Reading the checkpoint has no deadline",
        ),
        Phase.ABORTED: PhaseRow("at rest", "at rest", MappingProxyType({})),
    }
)


def deadline_s(phase: Phase) -> float:
    """Of the member's own; infinity: it has none."""
    limit_s = PHASES[phase].deadline_s
    return math.inf if limit_s is None else limit_s


def check_step(before: Phase, after: Phase) -> None:
    """Raise InvariantViolation unless a chain of the table's steps, within one event, leads from one to the other."""
    reached, fresh = {before}, [before]
    while fresh:
        for phase in PHASES[fresh.pop()].next:
            if phase not in reached:
                reached.add(phase)
                fresh.append(phase)
    if after not in reached:
        raise InvariantViolation(f"a member goes from {before} to {after}, which its table does not have")

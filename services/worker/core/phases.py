"""The phases of a member in a transition, and of one that has left its group: one table, which every step is held
against (pure).

`docs/transitions.md` is printed from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ballast.common.errors import InvariantViolation
from ballast.common.transition import Phase


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """`next`: the phases that may follow, with the event that leads there. `deadline`: who ends it, and when."""

    drop: str  # what the member does meanwhile
    restore: str
    next: Mapping[Phase, str]
    deadline: str


_UNDONE = "Abort, a peer of the plan is lost, or a newer plan comes"
_LEFT = "a peer is lost, or a plan counts this worker in no group: it leaves"

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
            deadline="the planner's; 15 s without a planner's question",
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
            deadline="15 s without a planner's question",
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
            deadline="the planner's: a plan without this worker's group follows",
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
            deadline="the planner's: a plan without this worker's group follows",
        ),
        Phase.DONE: PhaseRow("at rest", "at rest", MappingProxyType({}), "-"),
        Phase.FAILED: PhaseRow(
            drop="before the commit: undone. After it: requests are replayed elsewhere, missing layers are read",
            restore="before the commit: layers go again",
            next=MappingProxyType({Phase.ABORTED: "Abort"}),
            deadline="30 s for transfers to end, else the process ends; then reading the checkpoint",
        ),
        Phase.ABORTED: PhaseRow("at rest", "at rest", MappingProxyType({}), "-"),
    }
)


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

"""The planner's side of a transition: a journaled two-phase commit over the members of the changing groups.

The decision to commit is journaled before the first Commit is sent, so that the next leader can complete the transition
from COMMITTING or roll it back from PREPARING (I5). No call blocks; events carry the time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import Layout, members_of, peers_of
from ballast.common.transition import Phase, Status, TransitionKind
from services.planner.core.stages import STAGES, CoordinatorRules, Stage, check_step


@dataclass(frozen=True, slots=True)
class Journal:
    """The part of a transition's state that survives the planner."""

    kind: TransitionKind
    base: Layout
    target: Layout
    stage: Stage
    why: str  # reason of the plan
    failure: str = ""  # reason of the abort

    @property
    def epoch(self) -> Epoch:
        return self.target.epoch


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Journaled:
    """The last journal was written."""

    at_s: float
    stage: Stage


@dataclass(frozen=True, slots=True)
class JournalRefused:
    """The last journal was refused permanently, because the stored layout is not the plan's base."""

    at_s: float
    stage: Stage
    why: str


@dataclass(frozen=True, slots=True)
class MemberSaid:
    at_s: float
    worker_id: WorkerId
    phase: Phase
    why: str = ""
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class MemberLost:
    at_s: float
    worker_id: WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class PlannerTick:
    at_s: float


@dataclass(frozen=True, slots=True)
class AbortWanted:
    """A request with precedence. An undecided transition is aborted; after the decision, draining groups are ended
    early.
    """

    at_s: float
    why: str


Event = Journaled | JournalRefused | MemberSaid | MemberLost | PlannerTick | AbortWanted

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class SendPrepare:
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class SendCommit:
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class SendAbort:
    worker_id: WorkerId
    why: str


@dataclass(frozen=True, slots=True)
class Poll:
    """Request a member's progress. Answered with MemberSaid, or not at all."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class Ended:
    stage: Stage
    why: str
    lost: tuple[WorkerId, ...]  # members lost after the commit, which the next plan excludes


# A journal is written with the fencing token. With COMMITTING, the target becomes the layout in the same write.
Command = Journal | SendPrepare | SendCommit | SendAbort | Poll | Ended


def changed_members(base: Layout, target: Layout) -> tuple[WorkerId, ...]:
    """Return the members whose group changes."""
    kept = set(base.groups)
    return tuple(sorted(m.worker_id for g in target.groups if g not in kept for m in g.members))


class Coordinator:
    """One transition, from the first Prepare to its end."""

    def __init__(self, journal: Journal, at_s: float, rules: CoordinatorRules) -> None:
        self.journal = journal
        self.rules = rules
        self.members = changed_members(journal.base, journal.target)
        if not self.members:
            raise InvariantViolation(f"epoch {journal.epoch} changes nothing")
        self._said: dict[WorkerId, Phase] = dict.fromkeys(self.members, Phase.NONE)
        self._lost: dict[WorkerId, str] = {}
        self.given_up: set[WorkerId] = set()  # lost members that may be alive and hold unknown layers
        self._began_s = at_s
        self._entered_s = at_s  # time at which the stage began
        self._progress_s = at_s  # time of a member's last progress
        self._first_loss_s = math.inf
        self._sent_s = at_s
        self._hurried = ""  # reason for ending draining groups early; empty: they are not ended early
        self._writing: Journal | None = None
        self.statuses: dict[WorkerId, Status] = {}

    @property
    def stage(self) -> Stage:
        return self.journal.stage

    @property
    def said(self) -> Mapping[WorkerId, Phase]:
        return self._said

    def begin(self) -> list[Command]:
        """Start, or continue from a previous planner's journal."""
        match self.stage:
            case Stage.PREPARING:
                return self._write(Stage.PREPARING)
            case Stage.COMMITTING | Stage.EXCHANGING | Stage.ABORTING:
                return self._send()
            case Stage.DONE | Stage.ABORTED:
                return []

    @property
    def decided(self) -> bool:
        """True after the decision, when the target layout is the cluster's layout."""
        return self.stage in (Stage.COMMITTING, Stage.EXCHANGING, Stage.DONE)

    @classmethod
    def resume(cls, journal: Journal, at_s: float, rules: CoordinatorRules) -> tuple["Coordinator", list[Command]]:
        """Continue for a new leader: abort an uncommitted transition, complete a committed one."""
        coordinator = cls(journal, at_s, rules)
        if journal.stage is Stage.PREPARING:
            return coordinator, coordinator._write(Stage.ABORTING, "the planner changed before the decision")
        return coordinator, coordinator.begin()

    def handle(self, event: Event) -> list[Command]:
        if self.stage.over:
            return []
        match event:
            case Journaled(stage=stage):
                return self._journaled(stage, event.at_s)
            case JournalRefused():
                return self._refused(event)
            case MemberSaid():
                return self._on_member_status(event)
            case MemberLost():
                return self._member_lost(event)
            case AbortWanted(why=why):
                return self._hurry(why) if self.stage is Stage.EXCHANGING else self._abort(why)
            case PlannerTick(at_s=at_s):
                return self._tick(at_s)

    # ------------------------------------------------------------ steps

    def _write(self, stage: Stage, failure: str = "") -> list[Command]:
        self._writing = replace(self.journal, stage=stage, failure=failure or self.journal.failure)
        return [self._writing]

    def _journaled(self, stage: Stage, at_s: float) -> list[Command]:
        if self._writing is None or stage is not self._writing.stage:
            return []
        check_step(self.journal.stage, stage)
        self.journal, self._writing = self._writing, None
        self._sent_s = self._entered_s = self._progress_s = at_s
        if stage is Stage.COMMITTING:  # members that failed while the decision was written are left out
            for worker_id in (w for w, phase in self._said.items() if phase in (Phase.FAILED, Phase.ABORTED)):
                self._lose(worker_id, "it failed before the commit", at_s)
        if stage.over:
            return [Ended(stage, self.journal.failure, tuple(sorted(self._lost)))]
        return self._send() + self._advance()

    def _refused(self, event: JournalRefused) -> list[Command]:
        """Handle a refused journal. Only writes up to the decision can be refused; later ones depend only on the
        lease.
        """
        if self._writing is None or event.stage is not self._writing.stage:
            return []
        self._writing = None
        if event.stage is Stage.PREPARING:  # no member has been called yet
            self.journal = replace(self.journal, stage=Stage.ABORTED, failure=event.why)
            return [Ended(Stage.ABORTED, event.why, ())]
        if self.stage is Stage.ABORTING:  # some members have committed, and the layout has changed without them
            self._give_up(dict.fromkeys(self._committed, f"it has committed, and {event.why}"))
            return self._advance()
        return self._abort(event.why)

    @property
    def _committed(self) -> list[WorkerId]:
        """Return the members that report a phase after the commit."""
        return [w for w in self.members if self._said[w] in _FORWARD and w not in self._lost]

    def _send(self) -> list[Command]:
        """Send each member the call that it has not answered."""
        commands: list[Command] = []
        for worker_id in self.members:
            if worker_id in self._lost:
                continue
            phase = self._said[worker_id]
            match self.stage:
                case Stage.PREPARING:
                    commands.append(SendPrepare(worker_id) if phase is Phase.NONE else Poll(worker_id))
                case Stage.COMMITTING:
                    done = phase in (Phase.COMMITTING, Phase.EXCHANGING, Phase.DONE)
                    commands.append(Poll(worker_id) if done else SendCommit(worker_id))
                case Stage.EXCHANGING:
                    if phase is not Phase.DONE:
                        commands.append(SendAbort(worker_id, self._hurried) if self._hurried else Poll(worker_id))
                case Stage.ABORTING:
                    if phase is not Phase.ABORTED:
                        commands.append(SendAbort(worker_id, self.journal.failure))
                case Stage.DONE | Stage.ABORTED:
                    pass
        return commands

    def _tick(self, at_s: float) -> list[Command]:
        if self._writing is not None:
            return []
        limit_s = STAGES[self.stage].deadline_s(self.journal.kind, self.rules)
        if self.stage is Stage.PREPARING and at_s - self._began_s >= limit_s:
            slow = [w for w in self.members if self._said[w] is not Phase.PREPARED]
            return self._abort(f"not prepared within {limit_s:g} s: {', '.join(slow)}")
        if at_s < self.tick_at_s:
            return []
        self._sent_s = at_s
        overdue = self._overdue(at_s)
        self._give_up(overdue)
        return self._send() + (self._advance() if overdue else [])

    def _give_up(self, members: Mapping[WorkerId, str]) -> None:
        for worker_id, why in members.items():
            self._lost.setdefault(worker_id, why)
            self.given_up.add(worker_id)

    def _overdue(self, at_s: float) -> dict[WorkerId, str]:
        """Return the members that have exceeded the stage's timeout, because each stage must end regardless of its
        members.

        They count as lost for this transition. The layers that they hold are unknown, so they are out of the layout
        until they have left the group and hold all layers.
        """
        waited_for = [w for w in self.members if w not in self._lost and not self._is_through(w)]
        rules, limit_s = self.rules, STAGES[self.stage].deadline_s(self.journal.kind, self.rules)
        since_s = self._progress_s if self.stage is Stage.EXCHANGING else self._entered_s
        if self.stage is not Stage.PREPARING and at_s - since_s >= limit_s:
            if self.decided:  # the next plan dissolves these groups in any case
                groups = [members_of(group) for group in self.journal.target.groups]
                late = [group for group in groups if not set(group).isdisjoint(waited_for)]
                waited_for = [w for group in late for w in group if self._said[w] is not Phase.DONE]
            return dict.fromkeys(waited_for, f"{self.stage} for {limit_s:g} s")
        bereaved = self.decided and at_s - max(self._first_loss_s, self._entered_s) >= rules.bereaved_s
        return {w: self._why_bereaved(w) for w in waited_for if self._why_bereaved(w)} if bereaved else {}

    def _is_through(self, worker_id: WorkerId) -> bool:
        """True if the member has completed this stage."""
        said = self._said[worker_id]
        if self.stage is Stage.ABORTING:
            return said in (Phase.ABORTED, Phase.FAILED)
        return said is Phase.DONE or (self.stage is Stage.COMMITTING and said is Phase.EXCHANGING)

    def _why_bereaved(self, worker_id: WorkerId) -> str:
        """Return why the member waits for a lost member's KV or message; empty if it does not."""
        waits_for = peers_of(self.journal.base, self.journal.target, worker_id)
        lost = sorted(waits_for & self._lost.keys())
        return f"it depends on {', '.join(lost)}" if lost else ""

    @property
    def tick_at_s(self) -> float:
        """Time of the next Tick."""
        slow = self.stage in (Stage.EXCHANGING, Stage.ABORTING) or (
            self.stage is Stage.PREPARING and self.journal.kind is TransitionKind.RESTORE
        )
        return self._sent_s + (self.rules.slow_poll_s if slow else self.rules.poll_s)

    def _on_member_status(self, event: MemberSaid) -> list[Command]:
        if event.worker_id not in self._said or event.worker_id in self._lost:
            return []
        if _ORDER[event.phase] < _ORDER[self._said[event.worker_id]]:
            return []  # an outdated answer
        news = event.phase is not self._said[event.worker_id]
        self._said[event.worker_id] = event.phase
        if event.status is not None:
            news |= event.status != self.statuses.get(event.worker_id)
            self.statuses[event.worker_id] = event.status
        if news:
            self._progress_s = event.at_s
        if self.stage is Stage.ABORTING and event.phase in _FORWARD and self._writing is None:
            # The journal predates the commit, so the member's state counts.
            return self._write(Stage.COMMITTING)
        has_left = event.phase is Phase.DONE and event.why and self.decided  # it has left and holds all layers
        if event.phase in (Phase.FAILED, Phase.ABORTED) or has_left:
            if self.stage is Stage.PREPARING:
                return self._abort(f"{event.worker_id}: {event.why}")
            if self.stage in (Stage.COMMITTING, Stage.EXCHANGING):
                self._lose(event.worker_id, event.why, event.at_s)
        return self._advance()

    def _lose(self, worker_id: WorkerId, why: str, at_s: float) -> None:
        self._lost.setdefault(worker_id, why)
        self._first_loss_s = min(self._first_loss_s, at_s)

    def _member_lost(self, event: MemberLost) -> list[Command]:
        if event.worker_id not in self._said:
            return []
        self._lose(event.worker_id, event.why, event.at_s)
        if self.stage is Stage.PREPARING:
            return self._abort(f"{event.worker_id} is lost: {event.why}")
        return self._advance()

    def _abort(self, why: str) -> list[Command]:
        """Abort the transition, unless it is decided. A journal that is being written as committed counts as
        decided.
        """
        writing = self._writing.stage if self._writing is not None else None
        if self.stage is not Stage.PREPARING or writing in (Stage.COMMITTING, Stage.ABORTING):
            return []
        return self._write(Stage.ABORTING, why)

    def _hurry(self, why: str) -> list[Command]:
        if self.journal.kind is not TransitionKind.RESTORE or self._hurried or self._writing is not None:
            return []
        self._hurried = why
        return self._send()

    def _advance(self) -> list[Command]:
        if self._writing is not None:
            return []
        alive = [w for w in self.members if w not in self._lost]
        said = [self._said[w] for w in alive]
        match self.stage:
            case Stage.PREPARING if len(alive) == len(self.members) and all(p in _READY for p in said):
                return self._write(Stage.COMMITTING)
            case Stage.COMMITTING if all(p in (Phase.EXCHANGING, Phase.DONE) for p in said):
                return self._write(Stage.EXCHANGING)
            case Stage.EXCHANGING if all(p is Phase.DONE for p in said):
                return self._write(Stage.DONE)
            case Stage.ABORTING if all(self._is_through(w) for w in alive):
                return self._write(Stage.ABORTED)
            case _:
                return []


# Phases only advance, so an earlier phase is an outdated answer.
_ORDER = {phase: i for i, phase in enumerate(Phase)}
_READY = (Phase.PREPARED, Phase.DONE)  # DONE before the commit: the plan required no change
_FORWARD = (Phase.COMMITTING, Phase.EXCHANGING, Phase.DONE)

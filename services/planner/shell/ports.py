"""What the shell needs of the outside: the state server, the monitor, members of transitions, and who counts."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout, Member
from ballast.common.reach import Reach
from services.planner.core import messages as p
from services.planner.core.prediction_log import Predicted
from services.planner.core.record import TransitionRecord
from services.planner.core.transition import MemberSaid
from services.planner.policy.migrate import Move


class LayoutStore(Protocol):
    """The layout in the state server. Every call ends within seconds."""

    async def load(self) -> p.StoredLayout | None: ...

    async def write(self, command: p.WriteLayout) -> p.WriteOutcome: ...

    async def write_journal(self, command: p.WriteJournal) -> p.WriteOutcome: ...

    async def write_reach(self, reach: Reach, token: int) -> None:
        """For dispatchers. Raises Unavailable: no answer; of a planner that leads no more nothing is written."""
        ...


class MonitorPort(Protocol):
    def events(self) -> AsyncGenerator[p.MonitorEvent, None]: ...

    async def load(self, timeout_s: float) -> p.ClusterLoad: ...


class MembersPort(Protocol):
    """Calls to workers: members of transitions, and others."""

    def lead(self, token: int | None) -> None:
        """Orders carry this fencing token from now on; None: another planner leads."""
        ...

    async def call(self, command: p.CallMember, timeout_s: float) -> MemberSaid | None:
        """None: no answer that could be used."""
        ...

    async def probe(self, address: str, worker_id: WorkerId, incarnation: Incarnation) -> p.Probed:
        """Whether that life of a worker is at its address."""
        ...

    async def drain(self, address: str, worker_id: WorkerId, incarnation: Incarnation, timeout_s: float) -> int:
        """Asks a worker to take nothing new; gives its number of running requests."""
        ...

    async def order_standing(self, member: Member, timeout_s: float, *, park: bool) -> None:
        """Tells a worker to park, or to wake. Raises BallastError: it does not hear, or refuses."""
        ...

    async def name_partners(
        self, member: Member, partners: Sequence[Member], settled_epoch: Epoch, timeout_s: float
    ) -> Epoch:
        """Returns the highest epoch that it has heard of. Raises BallastError: it does not answer."""
        ...

    async def migrate(self, epoch: Epoch, move: Move, within_s: float, cause_id: str, timeout_s: float) -> None:
        """Tells both. Raises BallastError: one of them does not hear, or refuses."""
        ...

    async def close(self) -> None: ...


class Counting(Protocol):
    """What is counted for metrics, at the moment it happens."""

    def layout(self, layout: Layout) -> None:
        """It took effect."""
        ...

    def kept_out(self, count: int) -> None:
        """Instances that are put into no group now."""
        ...

    def wanted(self, count: int) -> None:
        """Instances that should serve; 0: another planner leads."""
        ...

    def write(self, outcome: p.WriteOutcome) -> None: ...

    def rejected(self) -> None:
        """An instance, for it serves another model."""
        ...

    def stale(self) -> None:
        """News of an old life of a worker."""
        ...

    def ended(self, record: TransitionRecord) -> None: ...

    def migrations_ordered(self) -> None:
        """From one instance to another."""
        ...

    def nothing_done(self, asked_by: str, shortfall_bytes: int) -> None:
        """No plan met what was asked for."""
        ...

    def predicted(self, predicted: Predicted) -> None:
        """What came of a decision has turned out."""
        ...

"""Interfaces of the shell to the state server, the monitor, workers and metrics."""

from collections.abc import AsyncGenerator, Sequence, Set
from typing import Protocol

from ballast.common.ids import Epoch, Incarnation, WorkerId
from ballast.common.layout import Layout, Member
from ballast.common.reach import Reach
from services.planner.core import messages as p
from services.planner.core.prediction_log import Predicted
from services.planner.core.record import TransitionRecord
from services.planner.core.transition import MemberSaid
from services.planner.policy.migrate import Move
from services.planner.policy.reserve import Learnt


class LayoutStore(Protocol):
    """The layout in the state server. Every call ends within seconds."""

    async def load(self) -> p.StoredLayout | None: ...

    async def write(self, command: p.WriteLayout) -> p.WriteOutcome: ...

    async def write_journal(self, command: p.WriteJournal) -> p.WriteOutcome: ...

    async def write_reach(self, reach: Reach, token: int) -> None:
        """Publish the reach for dispatchers. A former leader's write is ignored. Raises Unavailable if the state server
        does not answer.
        """
        ...

    async def write_learnt(self, learnt: Learnt, token: int) -> None:
        """Store learned data for the next planner. `token` and errors are the same as for `write_reach`."""
        ...


class MonitorPort(Protocol):
    def events(self) -> AsyncGenerator[p.MonitorEvent, None]: ...

    async def load(self, timeout_s: float) -> p.ClusterLoad: ...


class MembersPort(Protocol):
    """Calls to workers: members of transitions, and others."""

    def lead(self, token: int | None) -> None:
        """Use this fencing token for orders from now on; None: another planner leads."""
        ...

    async def call(self, command: p.CallMember, timeout_s: float) -> MemberSaid | None:
        """Call a member of a transition. Returns None if there is no usable answer."""
        ...

    async def probe(self, address: str, worker_id: WorkerId, incarnation: Incarnation) -> p.Probed:
        """Check whether the incarnation is at its address."""
        ...

    async def drain(self, address: str, worker_id: WorkerId, incarnation: Incarnation, timeout_s: float) -> int:
        """Drain a worker and return its number of running requests."""
        ...

    async def order_standing(self, member: Member, timeout_s: float, *, park: bool) -> None:
        """Order a worker to park, or to wake. Raises BallastError if the worker is unreachable or refuses."""
        ...

    async def name_partners(
        self, member: Member, partners: Sequence[Member], settled_epoch: Epoch, timeout_s: float
    ) -> Epoch:
        """Send a worker its likely partners. Returns the highest epoch that it knows. Raises BallastError if the worker
        does not answer.
        """
        ...

    async def migrate(self, epoch: Epoch, move: Move, within_s: float, cause_id: str, timeout_s: float) -> None:
        """Order a migration from both groups. Raises BallastError if a group is unreachable or refuses."""
        ...

    async def keep(self, addresses: Set[str]) -> None:
        """Close the connections to all other addresses, once their calls have ended."""
        ...

    async def close(self) -> None: ...


class Counting(Protocol):
    """Counts events for metrics."""

    def layout(self, layout: Layout) -> None:
        """Count a layout that took effect."""
        ...

    def kept_out(self, count: int) -> None:
        """Set the number of instances that are currently kept out of groups."""
        ...

    def wanted(self, count: int) -> None:
        """Set the number of instances that should serve; 0: another planner leads."""
        ...

    def write(self, outcome: p.WriteOutcome) -> None: ...

    def rejected(self) -> None:
        """Count an instance rejected because it serves another model."""
        ...

    def stale(self) -> None:
        """Count an event of an old incarnation."""
        ...

    def ended(self, record: TransitionRecord) -> None: ...

    def migrations_ordered(self) -> None:
        """Count a migration ordered from one group to another."""
        ...

    def nothing_done(self, asked_by: str, shortfall_bytes: int) -> None:
        """Count a change request that no plan met, or not completely."""
        ...

    def predicted(self, predicted: Predicted) -> None:
        """Count a prediction whose outcome is known."""
        ...

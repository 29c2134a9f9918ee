"""What members of a group say to one another: messages over the network, which end in the other's inbox."""

from collections.abc import Callable, Mapping
from typing import Protocol

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.room import Room, RoomSizes
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.transition_messages import Event as TransitionEvent
from services.worker.core.transition_messages import RosterReceived
from sim.clock import Clock
from sim.network import Network
from sim.role import Role

CONTROL_BYTES = 1024


class Hearer(Protocol):
    """A member, as the others see it."""

    def told(self, epoch: Epoch, event: TransitionEvent) -> None: ...

    def handover(
        self, epoch: Epoch, source: WorkerId, snapshots: tuple[SequenceSnapshot, ...], counts: tuple[int, int]
    ) -> None: ...

    def roster(self, roster: RosterReceived, recomputed: tuple[SequenceId, ...]) -> None: ...

    def later_roster(self, roster: RosterReceived, recomputed: tuple[SequenceId, ...]) -> None: ...

    def kv_asked(self, epoch: Epoch, sequence_id: SequenceId, peer: WorkerId) -> None: ...

    def kv_came(self, epoch: Epoch, sequence_id: SequenceId, source: WorkerId) -> None: ...

    def kv_gone(self, epoch: Epoch, sequence_id: SequenceId, to: WorkerId, size_bytes: int) -> None: ...

    def capacity_told(
        self, epoch: Epoch, source: WorkerId, block_count: int, sizes: RoomSizes, withdrawn: Epoch
    ) -> None: ...

    def room_is_granted(self, epoch: Epoch, room: Room) -> None: ...

    def layers_are_back(self, epoch: Epoch, stage: WorkerId) -> None: ...

    def room_is_withdrawn(self, epoch: Epoch) -> None: ...


class Post(Protocol):
    """Another instance. `post` puts something into its engine's inbox."""

    @property
    def member(self) -> Hearer: ...

    def post(self, act: Callable[[], None]) -> None: ...


Say = Callable[[Hearer], None]


class Voice:
    def __init__(self, role: Role, peers: Mapping[WorkerId, Post], clock: Clock, network: Network) -> None:
        """`peers` of the whole cluster, this one included."""
        self._role = role
        self._peers = peers
        self._clock = clock
        self._network = network

    def tell(self, to: WorkerId, say: Say, size_bytes: int = CONTROL_BYTES) -> None:
        peer, me = self._peers[to], self._role.me
        self._network.send(me, to, size_bytes, f"tell {me}>{to}".encode(), lambda: peer.post(lambda: say(peer.member)))

    def pass_on(self, say: Say) -> None:
        """Down the pipeline, behind the last batch."""
        if not self._role.is_last:
            self.tell(self._role.next_stage, say)

    def post(self, to: WorkerId, say: Say) -> None:
        """What the network has told the other already."""
        peer = self._peers[to]
        peer.post(lambda: say(peer.member))

    def post_here(self, act: Callable[[], None]) -> None:
        """As a thread of one's own does."""
        self._peers[self._role.me].post(act)

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Posted here when it has ended."""
        self._clock.after(delay_s, f"{self._role.me} later".encode(), lambda: self.post_here(act))

"""Taking all layers back: the counterpart of `services.worker.pipeline.homecoming` and `.layers`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.room import Room
from services.worker.core.stage import StageBook
from services.worker.pipeline.status import Progress
from sim.clock import Clock
from sim.hardware import Timings
from sim.memory import VirtualMemory
from sim.network import Bulk, Network

_AT_ONCE = 2  # layers under way, as the workers have it

Came = Callable[[Epoch, int], None]


def disk_of(worker_id: WorkerId) -> str:
    """The network's name of where an instance reads the checkpoint."""
    return f"disk of {worker_id}"


class Homecoming:
    """One restore at a time: `begin`, `make_room_for_layers` once the leader grants it, `arrived` until they are here,
    `make_room_for_kv` likewise; or `undo`.
    """

    def __init__(
        self,
        *,
        memory: VirtualMemory,
        book: StageBook,
        clock: Clock,
        network: Network,
        timings: Timings,
        me: WorkerId,
        spend: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._memory = memory
        self._book = book
        self._clock = clock
        self._network = network
        self._timings = timings
        self._me = me
        self._spend = spend
        self._epoch = Epoch(0)
        self._sources: Mapping[int, Sequence[WorkerId]] = {}
        self._progress: Progress | None = None
        self._queue: list[int] = []
        self._under_way: set[int] = set()
        self.wants = Room.NONE
        self.complete = False

    def begin(self, epoch: Epoch, sources: Mapping[int, Sequence[WorkerId]], progress: Progress) -> None:
        self._epoch, self._sources, self._progress = epoch, sources, progress
        self.wants, self.complete = Room.LAYERS, False

    def make_room_for_layers(self, came: Came) -> None:
        """No more blocks are held than there are beside all layers, which are asked for."""
        progress = self._counted()
        self.wants = Room.NONE
        self._shrink_book(self._memory.beside_block_count)
        missing = [layer for layer in range(self._memory.geometry.layer_count) if layer not in self._memory.held]
        self._memory.make_room_for_layers(missing)
        progress.remap_s += self._timings.remap_s
        progress.parameter_bytes_to_pull = len(missing) * self._memory.layer_bytes
        self._queue = missing
        if missing:
            self._spend(self._timings.remap_s, lambda: self._go_on(came))
        self._settle()

    def make_room_for_kv(self, member_count: int) -> None:
        """As much as this member's share of the sequences of so many takes. Copying KV ahead is not simulated."""
        self.wants, self.complete = Room.NONE, True
        wide, narrow = self._memory.divided_extents(member_count)
        self._shrink_book(self._memory.geometry.blocks_in(wide))
        self._memory.make_room_for_kv(wide)
        self._memory.expect_kv(narrow)
        self._book.divide(self._memory.geometry.blocks_in(narrow))
        self._counted().remap_s += self._timings.remap_s

    def arrange(self, sequence_ids: Collection[SequenceId]) -> None:
        """These stay here: their blocks move to where all layers have KV, and those of the others away from there."""
        if self._book.split is None:
            return
        self._book.favour(sequence_ids)
        while moves := self._book.next_moves(sequence_ids, evacuate=True):
            self._book.compacted(moves)

    def level(self) -> int | None:
        """The exchange is over: all layers get as many blocks as at home. Returns how many; None: there was none."""
        if self._book.split is None:
            return None
        self._book.rejoin()
        block_count = self._memory.level_kv()
        self._book.shrink(block_count)
        return block_count

    def _shrink_book(self, block_count: int) -> None:
        self._book.compacted(self._book.compaction_plan(block_count))
        self._book.shrink(block_count)

    def _go_on(self, came: Came) -> None:
        epoch = self._epoch
        while self._queue and len(self._under_way) < _AT_ONCE:
            layer = self._queue.pop(0)
            self._under_way.add(layer)
            peers = self._sources.get(layer, ())
            source = peers[0] if peers else disk_of(self._me)
            self._network.transfer(
                source,
                self._me,
                self._memory.layer_bytes,
                Bulk.PARAMETERS,
                partial(self._checked, epoch, layer, came),
            )

    def _checked(self, epoch: Epoch, layer: int, came: Came) -> None:
        rate = self._timings.checksum_bytes_per_s
        check_s = self._memory.layer_bytes / rate if rate else 0.0
        self._clock.after(check_s, f"{self._me} layer {layer}".encode(), lambda: came(epoch, layer))

    def arrived(self, epoch: Epoch, layer: int, came: Came) -> bool:
        """False: it was about another restore, or one that has been given up."""
        self._under_way.discard(layer)
        if epoch != self._epoch or self._progress is None:
            return False
        self._progress.parameter_bytes_pulled += self._memory.layer_bytes
        self._go_on(came)
        self._settle()
        return True

    def _settle(self) -> None:
        if not self._queue and not self._under_way and not self.complete:
            self.wants = Room.KV

    def undo(self, kept: range) -> int | None:
        """Gives up all but the layers `kept` again; None while something still writes into them.

        Returns the number of blocks there are now.
        """
        self.wants = Room.NONE
        self._queue.clear()
        self._progress = None
        if self._under_way:
            return None
        self.complete = False
        self._book.undivide()
        self._memory.drop_layers([layer for layer in sorted(self._memory.held) if layer not in kept])
        return self._memory.release_retired()

    def _counted(self) -> Progress:
        if self._progress is None:
            raise InvariantViolation("no restore has begun")
        return self._progress

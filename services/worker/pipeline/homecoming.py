"""Taking all layers back: the KV makes room for them, they come, and it makes room once more, for copies of theirs.

The other direction of a drop, prepared while the group goes on serving. Parameters alone want no more than the drop has
given: the KV that all members had before it fits beside them, if each goes on with its own layers. Copies of the KV
want twice as much, so that room is made last, and for no longer than it takes. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.service.logs import get_logger
from services.worker.core.batch import SequenceId
from services.worker.core.room import Room
from services.worker.pipeline.events import LayerArrived, LayerAsked, LayerChecked, Woken
from services.worker.pipeline.ground import Background, Ground
from services.worker.pipeline.layers import LayerPull, LayerServer
from services.worker.pipeline.status import Progress

if TYPE_CHECKING:
    from services.worker.links.connection import Link


class Homecoming:
    """One restore at a time: `begin`, `make_room_for_layers` once the leader grants it, `handle` until they are here,
    `make_room_for_kv` likewise, `map_kv` until `complete`; or `undo`.
    """

    def __init__(
        self,
        ground: Ground,
        *,
        background: Background,
        hurried: Callable[[], bool],
    ) -> None:
        """`hurried`: requests wait for the end of it."""
        self._layer_count = ground.role.layer_count
        self._memory = memory = ground.memory
        self._book = ground.book
        self._hub = ground.hub
        self._ask = ground.links.ask_for_layer
        self._hurried = hurried
        self._now = ground.now
        self._post = post = ground.post
        self._workers = background
        self._server = LayerServer(memory.parameters, self._workers, post)
        self._server.learn_each(memory.parameters.held_layers)
        self._pull: LayerPull | None = None
        self._epoch = Epoch(0)
        self._sources: Mapping[int, Sequence[WorkerId]] = {}
        self._progress: Progress | None = None
        self._has_kv_room = False
        self._narrow = 0  # extents of each layer whose KV is coming
        self.wants = Room.NONE
        self.failure = ""

    @property
    def maps_kv(self) -> bool:
        """`map_kv` is to be called."""
        return self._has_kv_room and not self.complete

    @property
    def complete(self) -> bool:
        """All layers are here, and there is room for their KV."""
        return self._has_kv_room and not self._without_kv

    def serve(self, link: Link, event: LayerAsked, executed: range) -> None:
        """A peer wants a layer: one that is executed here, as others may be held and not be filled yet."""
        if event.layer in executed and event.layout != self._memory.parameters.layout(event.layer):
            # As when one computes with the compiled kernels and the other with torch's: the checkpoint has it too.
            why = "its weights are laid out otherwise; start all workers with the same --kernels"
            get_logger().warning("layer is not sent", layer=event.layer, to=link.peer_id, why=why)
            self._server.refuse(link, event.layer, why)
        elif event.layer in executed:
            self._server.send(link, event.epoch, event.layer)
        else:
            self._server.refuse(link, event.layer)

    def refuse(self, link: Link, event: LayerAsked) -> None:
        self._server.refuse(link, event.layer)

    def learn(self, layers: Sequence[int]) -> None:
        """What these layers are, before they are given up. Done once nothing reads layers any more."""
        self._server.cancel()
        self._server.learn(layers)

    @property
    def reads_layers(self) -> bool:
        """Some thread does: they must stay where they are."""
        return not self._server.idle

    def begin(self, epoch: Epoch, sources: Mapping[int, Sequence[WorkerId]], progress: Progress) -> None:
        self._epoch, self._sources, self._progress = epoch, sources, progress
        self.wants, self._has_kv_room, self.failure = Room.LAYERS, False, ""

    def make_room_for_layers(self) -> None:
        """Blocks in the tail move down, the tail goes, and the missing layers get memory again: asks for them.

        No more blocks are held than there are beside all layers, and none beyond will be asked for.
        """
        progress, began_s = self._counted(), self._now()
        self.wants = Room.NONE
        beside = self._memory.beside_block_count
        self._compact(beside)
        missing = [i for i in range(self._layer_count) if i not in self._memory.parameters.held_layers]
        self._memory.make_room_for_layers(missing, used_blocks_end=beside)
        self._book.shrink(beside)
        progress.remap_s += self._now() - began_s
        progress.parameter_bytes_to_pull = sum(
            t.nbytes for layer in missing for t in self._memory.parameters.layer(layer).values()
        )
        self._pull = LayerPull(
            self._epoch,
            missing,
            self._sources,
            parameters=self._memory.parameters,
            hub=self._hub,
            ask=lambda peer, layer: self._ask(peer, self._epoch, layer, self._memory.parameters.layout(layer)),
            server=self._server,
            workers=self._workers,
            hurried=self._hurried,
            post=self._post,
        )
        self._pull.go_on()
        self._settle(self._pull)

    def make_room_for_kv(self, member_count: int) -> None:
        """The same once more, for KV of the layers that are back: as much as this member's share of the sequences of so
        many members takes.
        """
        progress, began_s = self._counted(), self._now()
        self.wants, self._has_kv_room = Room.NONE, True
        wide, self._narrow = self._memory.divided_extents(member_count)
        wide_count = self._memory.blocks_in(wide)
        self._compact(wide_count)
        self._book.shrink(self._memory.make_room_for_kv(wide, used_blocks_end=wide_count))
        self._book.divide(self._memory.blocks_in(self._narrow))
        progress.remap_s += self._now() - began_s
        progress.room_s = self._now() - progress.began_s
        self._post(Woken())

    def map_kv(self) -> None:
        """Maps the KV of one layer more: mapping holds batches up."""
        began_s = self._now()
        self._memory.kv.expect(self._without_kv[0], self._narrow)
        self._counted().remap_s += self._now() - began_s
        self._post(Woken())

    @property
    def _without_kv(self) -> list[int]:
        usable = self._memory.kv.usable_layers
        return [layer for layer in range(self._layer_count) if layer not in usable]

    def arrange(self, sequence_ids: Collection[SequenceId], *, evacuate: bool) -> None:
        """These stay here: their blocks move to where all layers have KV, and no others, since after the commit one
        that was to stay may be on its way elsewhere. With `evacuate` those of all that do not stay, which nothing
        reads, move away from there.
        """
        if self._book.split is None:
            return
        self._book.favour(sequence_ids)
        while moves := self._book.next_moves(sequence_ids, evacuate=evacuate):
            self._memory.kv.move(moves)
            self._book.compacted(moves)

    def level(self) -> int | None:
        """The exchange is over: all layers get as many blocks as at home. Returns how many; None: there was none."""
        if self._book.split is None:
            return None
        self._book.rejoin()
        block_count = self._memory.level_kv()
        self._book.shrink(block_count)
        return block_count

    def _compact(self, block_count: int) -> None:
        moves = self._book.compaction_plan(block_count)
        if not moves:
            return
        self._memory.kv.move(moves)
        self._book.compacted(moves)

    def handle(self, event: LayerArrived | LayerChecked) -> bool:
        """False: it was about another restore, or one that has been given up."""
        pull = self._pull
        if pull is None or event.epoch != self._epoch:
            return False
        if isinstance(event, LayerArrived):
            pull.arrived(event)
        else:
            pull.checked(event)
        self._settle(pull)
        return True

    def _settle(self, pull: LayerPull) -> None:
        progress = self._counted()
        progress.parameter_bytes_pulled, progress.repulled_layers = pull.pulled_bytes, pull.repulled
        self.failure = pull.failure
        if pull.finished and not self._has_kv_room and self.wants is not Room.KV:
            self.wants = Room.KV
            progress.layers_s = self._now() - progress.began_s

    def end(self) -> None:
        """The commit: what is here, stays."""
        self.wants, self._has_kv_room, self._pull = Room.NONE, False, None

    def undo(self, kept: range) -> int | None:
        """Gives up all but the layers `kept` again. None: something still writes into them; ask again later.

        Returns the number of blocks there are now.
        """
        self.wants = Room.NONE
        self._server.cancel()
        if self._pull is not None:
            self._pull.cancel()
            if not self._pull.idle:
                return None
        if not self._server.idle:
            return None
        self._pull, self._has_kv_room = None, False
        self._book.undivide()
        self._memory.drop_layers([i for i in self._memory.parameters.held_layers if i not in kept])
        return self._memory.release_retired()

    def close(self) -> None:
        self._workers.shutdown()

    def _counted(self) -> Progress:
        if self._progress is None:
            raise InvariantViolation("no restore has begun")
        return self._progress

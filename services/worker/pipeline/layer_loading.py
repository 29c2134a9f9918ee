"""Taking all layers back: the KV makes room for them, and they come.

The other direction of a drop, prepared while the group goes on serving. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ballast.common.ids import Epoch, WorkerId
from ballast.service.logs import get_logger
from services.worker.pipeline.context import Background, MemberContext
from services.worker.pipeline.events import LayerArrived, LayerAsked, LayerChecked
from services.worker.pipeline.layers import LayerPull, LayerServer
from services.worker.pipeline.status import Progress

if TYPE_CHECKING:
    from services.worker.links.connection import Link


class LayerLoading:
    """One restore at a time: `load` once the leader grants room, `handle` until `complete`; or `undo`."""

    def __init__(
        self,
        context: MemberContext,
        *,
        background: Background,
        hurried: Callable[[], bool],
    ) -> None:
        """`hurried`: requests wait for the end of it."""
        self._layer_count = context.role.layer_count
        self._memory = memory = context.memory
        self._context = context
        self._hub = context.hub
        self._ask = context.links.ask_for_layer
        self._hurried = hurried
        self._now = context.now
        self._post = post = context.post
        self._workers = background
        self._server = LayerServer(memory.parameters, self._workers, post)
        self._server.learn_each(memory.parameters.held_layers)
        self._pull: LayerPull | None = None
        self._epoch = Epoch(0)
        self._progress: Progress | None = None
        self.failure = ""

    @property
    def complete(self) -> bool:
        """All layers are here."""
        return self._pull is not None and self._pull.finished

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

    def stop_reading(self) -> None:
        """Layers are about to be given up, and nobody waits for what they are."""
        self._server.cancel()

    @property
    def reads_layers(self) -> bool:
        """Some thread does: they must stay where they are."""
        return not self._server.idle

    def load(
        self,
        epoch: Epoch,
        sources: Mapping[int, Sequence[WorkerId]],
        progress: Progress,
        block_count: int,
        *,
        own: bool = False,
    ) -> None:
        """The KV keeps so many blocks, and the missing layers get memory again: asks for them. No more blocks are held,
        and none beyond will be asked for. `own`: they come from this process' memory, and are as they were.
        """
        self._epoch, self._progress, self.failure, began_s = epoch, progress, "", self._now()
        self.shrink(block_count)
        missing = [i for i in range(self._layer_count) if i not in self._memory.parameters.held_layers]
        self._memory.make_room_for_layers(missing, block_count=self._context.book.block_count)
        progress.remap_s += self._now() - began_s
        progress.parameter_bytes_to_pull = sum(
            t.nbytes for layer in missing for t in self._memory.parameters.pieces(layer)
        )
        self._pull = LayerPull(
            epoch,
            missing,
            sources,
            hub=self._hub,
            ask=lambda peer, layer: self._ask(peer, self._epoch, layer, self._memory.parameters.layout(layer)),
            server=self._server,
            hurried=self._hurried,
            own=own,
        )
        self._pull.go_on()
        self._settle(self._pull, progress)

    def shrink(self, block_count: int) -> None:
        """The book ends there: blocks behind move down."""
        book = self._context.book
        if block_count < book.block_count:
            if moves := book.compaction_plan(block_count):
                self._memory.move(moves)
                book.compacted(moves)
            book.shrink(block_count)

    def handle(self, event: LayerArrived | LayerChecked) -> bool:
        """False: it was about another restore, or one that has been given up."""
        pull = self._pull
        if pull is None or event.epoch != self._epoch:
            return False
        if isinstance(event, LayerArrived):
            pull.arrived(event)
        else:
            pull.checked(event)
        if self._progress is not None:
            self._settle(pull, self._progress)
        return True

    def _settle(self, pull: LayerPull, progress: Progress) -> None:
        progress.parameter_bytes_pulled, progress.repulled_layers = pull.pulled_bytes, pull.repulled
        self.failure = pull.failure
        if pull.finished:
            progress.layers_s = self._now() - progress.began_s

    def end(self) -> None:
        """The commit: what is here, stays."""
        self._pull = None

    def undo(self, kept: range) -> int | None:
        """Gives up all but the layers `kept` again. None: something still writes into them; ask again later.

        Returns the number of blocks there are now.
        """
        self._server.cancel()
        if self._pull is not None:
            self._pull.cancel()
            if not self._pull.idle:
                return None
        if not self._server.idle:
            return None
        self._pull = None
        if self._memory.leaving is not None:
            self._memory.close_leaving()
        self._memory.drop_layers([i for i in self._memory.parameters.held_layers if i not in kept])
        return self._memory.release_retired()

    def close(self) -> None:
        self._workers.shutdown()

"""Loads missing layers while the group serves: from host memory, peers or the checkpoint, verified by checksum.

The KV cache is shrunk first. A few layers at a time are requested at the lowest priority. A layer with a wrong checksum
is requested again from the next source. Only the engine thread uses this module, except for checksums and disk reads,
which have their own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, TypeVarTuple

from ballast.common.errors import BallastError, InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from ballast.common.transition import Phase
from ballast.service.logs import get_logger
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core.phases import deadline_s
from services.worker.core.turns import MemberEvent
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Transfer
from services.worker.memory.parameters import ParameterStore
from services.worker.pipeline.context import Background, MemberContext
from services.worker.pipeline.events import LayerArrived, LayerAsked, LayerChecked, Woken
from services.worker.pipeline.hub import Hub, layer_key, whole
from services.worker.pipeline.links import LAYERS
from services.worker.pipeline.progress import TransitionProgress
from services.worker.pipeline.wire import Topic

if TYPE_CHECKING:
    import torch

    from services.worker.links.connection import Link


_Given = TypeVarTuple("_Given")
_AT_ONCE = 2  # maximum layers being received
_ROUNDS = 3  # attempts per source


class LayerServer:
    """Sends this worker's layers to peers on request."""

    def __init__(self, parameters: ParameterStore, workers: Background, post: Callable[[MemberEvent], None]) -> None:
        self.parameters = parameters
        self.workers = workers
        self.post = post
        self._checksums = dict(parameters.loaded_checksums)  # layer -> checksum of its contents, which never change
        self._hashing = Lock()  # held while a checksum is computed, for which other threads may wait
        self._jobs: list[Future[None]] = []  # jobs that read layers
        self._cancel_count = 0
        self._lock = Lock()
        self._sending: list[Transfer] = []

    def checksum(self, layer: int, between: Callable[[], None] | None = None) -> bytes:
        """Return the layer's checksum. The first call is slow, so the engine thread must not make it. `between` is
        called between pieces.
        """
        with self._hashing:
            known = self._checksums.get(layer)
            if known is None:
                known = self._checksums[layer] = self.parameters.layer_checksum(layer, between)
            return known

    def learn(self, layers: Sequence[int]) -> None:
        """Compute checksums of layers about to be dropped, which verify a later reload."""
        if unknown := [layer for layer in layers if layer not in self._checksums]:
            self._start(self._learn, unknown)

    def learn_each(self, layers: Sequence[int]) -> None:
        """Compute checksums in advance, one job per layer, so that a drop does not wait for them; `cancel` stops the
        jobs. Layers read by the checkpoint loader already have checksums.
        """
        for layer in layers:
            if layer in self._checksums:
                continue
            self._start(self._learn_unhurried, layer, self._cancel_count)

    def _learn(self, layers: Sequence[int]) -> None:
        for layer in layers:
            self.checksum(layer)

    def _learn_unhurried(self, layer: int, cancel_count: int) -> None:
        self.checksum(layer, self.workers.rest(lambda: self._cancel_count != cancel_count))

    def known_checksum(self, layer: int) -> bytes | None:
        """Return the checksum that this worker computed when it held the layer; None: unknown."""
        return self._checksums.get(layer)

    def send(self, link: Link, epoch: Epoch, layer: int) -> None:
        pieces = self.parameters.pieces(layer)
        future = self._start(self._send, link, epoch, layer, pieces)
        future.add_done_callback(lambda f: self.refuse(link, layer) if f.cancelled() or f.exception() else None)

    def _start(self, job: Callable[[*_Given], None], *given: *_Given) -> Future[None]:
        future = self.workers.submit(job, *given)
        self._jobs = [f for f in self._jobs if not f.done()] + [future]
        future.add_done_callback(lambda _: self.post(Woken()))
        return future

    def serve(self, event: LayerAsked, executed: range) -> None:
        """Send a requested layer if it is executed here. Other layers may be mapped but not loaded yet."""
        link, layer = event.link, event.layer
        if layer not in executed:
            self.refuse(link, layer)
        elif event.layout != self.parameters.layout(layer):
            # For example, one worker uses compiled kernels and the other torch's. The peer then requests the layer
            # elsewhere.
            why = "its weights have another layout; start all workers with the same --kernels"
            get_logger().warning("layer is not sent", layer=layer, to=link.peer_id, why=why)
            self.refuse(link, layer, why)
        else:
            self.send(link, event.epoch, layer)

    def refuse(self, link: Link, layer: int, why: str = "") -> None:
        """Notify a peer that it does not get a layer, so that it requests the layer elsewhere. If the message cannot be
        sent, the link ends, which the peer notices.
        """
        try:
            link.send(TrafficClass.CONTROL, Topic.LAYER_REFUSED, meta=why.encode(), stream=layer)
        except BallastError as error:
            link.give_up(f"a layer could not be refused: {error}")

    def _send(self, link: Link, epoch: Epoch, layer: int, pieces: Sequence[torch.Tensor]) -> None:
        wanted = pb.LayerWanted(epoch=epoch, layer=layer, checksum=self.checksum(layer))
        wanted.algorithm = self.parameters.checksums_by.value
        meta = wanted.SerializeToString()
        self.parameters.fetch(layer)
        try:
            transfer = link.transfer(TrafficClass.PARAMETERS, pieces, topic=Topic.LAYER, meta=meta, stream=layer)
        except BallastError as error:
            get_logger().warning("layer was not sent", layer=layer, to=link.peer_id, why=str(error))
            self.refuse(link, layer)
            return
        with self._lock:
            self._sending = [t for t in self._sending if not t.done.done()] + [transfer]
        transfer.done.add_done_callback(lambda _: self.post(Woken()))

    def cancel(self) -> None:
        """Cancel jobs and transfers. Must be called repeatedly until `idle`, because a running job may still start a
        transfer.
        """
        self._cancel_count += 1
        for job in self._jobs:
            job.cancel()
        with self._lock:
            sending = list(self._sending)
        for transfer in sending:
            transfer.cancel()

    @property
    def idle(self) -> bool:
        """True if no thread reads a layer."""
        if not all(job.done() for job in self._jobs):
            return False
        with self._lock:
            return all(transfer.done.done() for transfer in self._sending)


class LayerPull:
    """Loads the missing layers of one restore. It is over once `finished` is true or `failure` is set."""

    def __init__(
        self,
        epoch: Epoch,
        sources: Mapping[int, Sequence[WorkerId]],
        progress: TransitionProgress,
        *,
        hub: Hub,
        ask: Callable[[WorkerId, int], bool],
        server: LayerServer,
        hurried: Callable[[], bool],
    ) -> None:
        """`sources`: the peers that hold each missing layer, which are asked unless this host's memory has a copy.
        `server`: knows the checksums of layers that this worker held before.
        """
        self.epoch = epoch
        self._queue = list(sources)
        self._parameters = server.parameters
        self._hub = hub
        self._ask = ask
        self._server = server
        self._workers = workers = server.workers
        self._sources = {  # None: host copy or checkpoint
            layer: [*([None] if workers.holds(layer) else ()), *[*holders, None] * _ROUNDS]
            for layer, holders in sources.items()
        }
        self._hurried = hurried
        self._post = server.post
        self._under_way: dict[int, WorkerId | None] = {}
        self._cancelled = False
        self.failure = ""
        self.progress = progress

    @property
    def finished(self) -> bool:
        return not (self._queue or self._under_way or self.failure or self._cancelled)

    @property
    def idle(self) -> bool:
        """True if no write into the layers' memory is under way."""
        return not self._under_way

    def go_on(self) -> None:
        while self._queue and len(self._under_way) < _AT_ONCE and not self.failure and not self._cancelled:
            self._begin(self._queue.pop(0))

    def cancel(self) -> None:
        """Stop requesting layers. Writes under way run to their end, and other transfers are refused."""
        self._cancelled = True
        self._queue.clear()
        for layer, source in list(self._under_way.items()):
            if source is not None and self._hub.places.forget(layer_key(self.epoch, layer, source)):
                del self._under_way[layer]

    def _begin(self, layer: int) -> None:
        while self._sources[layer]:
            source = self._sources[layer].pop(0)
            self._under_way[layer] = source
            if source is None:
                future = self._workers.fill(layer)
                future.add_done_callback(lambda f, i=layer: self._post(_arrival(self.epoch, i, f)))
                return
            self._hub.places.put(layer_key(self.epoch, layer, source), whole(self._parameters.pieces(layer)))
            if self._ask(source, layer):
                return
            self._hub.places.forget(layer_key(self.epoch, layer, source))
        self._under_way.pop(layer, None)
        self.failure = f"layer {layer} could not be obtained from any source"

    def arrived(self, event: LayerArrived) -> None:
        if self._under_way.get(event.layer, _NOBODY) != event.peer:
            return
        if event.failure or self._cancelled:
            self._again(event.layer, event.failure)
            return
        known = self._server.known_checksum(event.layer)
        wanted, by = (known, None) if known else (event.checksum, event.by)
        if event.peer is None and (event.verified or not wanted):  # no checksum to compare with
            self.checked(LayerChecked(event.epoch, event.layer, True))
            return
        # Verify layers read from the checkpoint, too: it may have been replaced or damaged, which would make all tokens
        # wrong.
        between = self._workers.rest(lambda: self._cancelled, self._hurried)
        checksum = self._parameters.layer_checksum if event.peer is None else self._parameters.stored_checksum
        future = self._workers.submit(checksum, event.layer, between, by)
        future.add_done_callback(lambda f, i=event.layer: self._post(_verdict(self.epoch, i, f, wanted)))

    def checked(self, event: LayerChecked) -> None:
        source = self._under_way.get(event.layer, _NOBODY)
        if source == _NOBODY:
            return
        if self._cancelled:
            self._again(event.layer, "cancelled")
            return
        if not event.right:
            get_logger().error("a pulled layer has a wrong checksum", layer=event.layer, source=source)
            self.progress.repulled_layers += 1
            self._again(event.layer, "wrong checksum")
            return
        del self._under_way[event.layer]
        self.progress.parameter_bytes_pulled += sum(t.nbytes for t in self._parameters.pieces(event.layer))
        self.go_on()

    def peer_lost(self, peer: WorkerId) -> None:
        """Request from other sources the layers that a lost peer was to send. Transfers that have begun end with the
        link.
        """
        for layer, source in list(self._under_way.items()):
            if source == peer and self._hub.places.forget(layer_key(self.epoch, layer, peer)):
                self._again(layer, f"{peer} is lost")

    def _again(self, layer: int, why: str) -> None:
        source = self._under_way.pop(layer)
        if source is not None:
            self._hub.places.forget(layer_key(self.epoch, layer, source))
        if self._cancelled:
            return
        get_logger().warning("layer is requested again", layer=layer, why=why)
        self._queue.insert(0, layer)
        self.go_on()


_NOBODY = WorkerId("")


def _arrival(epoch: Epoch, layer: int, read: Future[bool]) -> LayerArrived:
    error = "cancelled" if read.cancelled() else read.exception()
    return LayerArrived(epoch, layer, None, b"", str(error) if error else "", verified=not error and read.result())


def _verdict(epoch: Epoch, layer: int, checksum: Future[bytes], wanted: bytes) -> LayerChecked:
    known = not checksum.cancelled() and checksum.exception() is None
    return LayerChecked(epoch, layer, known and checksum.result() == wanted)


class LayerLoading:
    """Loads the layers of one restore at a time. Call `load` once the leader has granted room, then `handle` until
    `complete`, or `undo`.
    """

    def __init__(
        self,
        context: MemberContext,
        *,
        background: Background,
        hurried: Callable[[], bool],
    ) -> None:
        """`hurried()`: True while requests wait for the end of a restore."""
        self._layer_count = context.role.layer_count
        self._memory = memory = context.memory
        self._context = context
        self._hub = context.hub
        self._ask = context.links.ask_for_layer
        self._hurried = hurried
        self._now = context.now
        self.server = LayerServer(memory.parameters, background, context.post)
        self.server.learn_each(memory.parameters.held_layers)
        self._pull: LayerPull | None = None

    @property
    def complete(self) -> bool:
        """True if all layers are loaded."""
        return self._pull is not None and self._pull.finished

    def all_here(self) -> bool:
        """True if all layers are loaded. Raises InvariantViolation if a layer cannot be loaded, because this worker
        then cannot serve.
        """
        if self.failure:
            raise InvariantViolation(f"a layer cannot be reloaded: {self.failure}")
        return self.complete

    @property
    def failure(self) -> str:
        """Reason why a layer could not be loaded from any source; empty if no layer has failed."""
        return "" if self._pull is None else self._pull.failure

    def learn(self, layers: Sequence[int]) -> None:
        """Compute checksums of layers before they are dropped. They are complete when no thread reads layers."""
        self.server.cancel()
        self.server.learn(layers)

    def load(
        self,
        epoch: Epoch,
        sources: Mapping[int, Sequence[WorkerId]],
        progress: TransitionProgress,
        block_count: int,
    ) -> None:
        """Shrink the KV cache to `block_count` blocks, map memory for the missing layers and request them. No higher
        block may be held or reserved from now on.
        """
        began_s = self._now()
        self.shrink(block_count)
        missing = [i for i in range(self._layer_count) if i not in self._memory.parameters.held_layers]
        self._memory.make_room_for_layers(missing, block_count=self._context.book.block_count)
        progress.remap_s += self._now() - began_s
        progress.parameter_bytes_to_pull = sum(
            t.nbytes for layer in missing for t in self._memory.parameters.pieces(layer)
        )
        progress.parameter_bytes_pulled = progress.repulled_layers = 0
        self._pull = LayerPull(
            epoch,
            {layer: sources.get(layer, ()) for layer in missing},
            progress,
            hub=self._hub,
            ask=lambda peer, layer: self._ask(peer, epoch, layer, self._memory.parameters.layout(layer)),
            server=self.server,
            hurried=self._hurried,
        )
        self._pull.go_on()
        self._note_end(self._pull)

    def shrink(self, block_count: int) -> None:
        """Shrink the book to `block_count` blocks, after copying down higher ones."""
        book = self._context.book
        if block_count < book.block_count:
            if moves := book.compaction_plan(block_count):
                self._memory.move(moves)
                book.compacted(moves)
            book.shrink(block_count)

    def handle(self, event: LayerArrived | LayerChecked) -> bool:
        """Handle an event of a layer. Returns False if it belongs to another restore, or no restore is under way."""
        pull = self._pull
        if pull is None or event.epoch != pull.epoch:
            return False
        if isinstance(event, LayerArrived):
            pull.arrived(event)
        else:
            pull.checked(event)
        self._note_end(pull)
        return True

    def peer_lost(self, peer: WorkerId) -> None:
        if self._pull is not None:
            self._pull.peer_lost(peer)

    def _note_end(self, pull: LayerPull) -> None:
        if pull.finished:
            pull.progress.layers_s = self._now() - pull.progress.began_s

    def end(self) -> None:
        """Keep the loaded layers, at the commit."""
        self._pull = None

    def undo(self, kept: range, *, serves: bool = False) -> int | None:
        """Drop all layers except `kept` again. `serves`: transfers of `kept` layers to peers continue.

        Returns the current number of blocks. None: a write into the layers is still under way, so call again later.
        """
        if not serves:
            self.server.cancel()
        if self._pull is not None:
            self._pull.cancel()
            if not self._pull.idle:
                return None
        if not (serves or self.server.idle):
            return None
        self._pull = None
        if self._memory.leaving is not None:
            self._memory.close_leaving()
        self._memory.drop_layers([i for i in self._memory.parameters.held_layers if i not in kept])
        return self._memory.release_retired()

    def close(self) -> None:
        self.server.workers.shutdown()


@dataclass(slots=True)
class Rescue:
    """Recovery of a member whose group is lost: it loads its missing layers from peers that hold them, or from the
    checkpoint.

    Its requests have been dropped and are replayed by dispatchers. All reads and writes of this worker's memory must
    have ended before the KV is discarded.
    """

    epoch: Epoch  # reported as failed until this worker holds all layers, then as done
    progress: TransitionProgress
    layer_loading: LayerLoading
    quiet: Callable[[], bool]  # True if the KV cache is neither sent from nor written into
    sources: Callable[[], Mapping[int, Sequence[WorkerId]]]  # peers to ask for each layer, in order
    kept: range  # layers that this worker executes
    began_s: float
    under_way: bool = False

    def poll(self, now_s: float, grow: Callable[[int], None]) -> bool:
        """Advance the recovery. Returns True once all layers are loaded. `grow` is called with the new number of blocks
        before layers are loaded. Raises InvariantViolation if transfers do not end, or a layer cannot be loaded.
        """
        if not self.under_way:
            block_count = self.layer_loading.undo(self.kept, serves=True) if self.quiet() else None
            if block_count is None:
                limit_s = deadline_s(Phase.FAILED)
                if now_s - self.began_s > limit_s:
                    raise InvariantViolation(f"transfers have not ended {limit_s:g} s after their links")
                return False
            grow(block_count)
            self.under_way = True
            self.layer_loading.load(LAYERS, self.sources(), self.progress, 0)
        return self.layer_loading.all_here()

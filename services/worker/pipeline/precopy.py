"""Carries out what `core.precopy` decides: KV that is copied ahead of a restore, while its sequences go on decoding.

The leader says early who is going to take which sequence. Whoever takes one asks the other stages for whole blocks of
it; they come into a buffer, not into the cache, as the sequence may be gone by then and its blocks be another one's.
Between two batches the buffer is copied to where the sequence's blocks are. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ballast.common.errors import BallastError
from ballast.common.ids import Epoch, WorkerId
from ballast.common.layout import group_of, members_of
from ballast.common.transition import TransitionKind
from ballast.service.logs import get_logger
from ballastpb.worker.v1 import stage_pb2 as pb
from services.worker.core.batch import Batch, SequenceId
from services.worker.core.plan import Plan
from services.worker.core.precopy import Precopy, Source, Span, sources_of
from services.worker.links.traffic import TrafficClass
from services.worker.links.transfer import Transfer
from services.worker.pipeline.events import KvAheadArrived, KvAheadAsked, ShareTold, Woken
from services.worker.pipeline.exchange import BEHIND_EXCHANGE, kv_pieces
from services.worker.pipeline.ground import Ground
from services.worker.pipeline.status import Progress
from services.worker.pipeline.wire import Topic
from services.worker.policy.placement import MemberView, PlacementView, place

if TYPE_CHECKING:
    import torch

_BUFFER_BYTES = 2 << 20  # of one answer, unless a block of all the layers is more
_PATIENCE_S = 5.0  # a commit does not wait longer for the first round
_DEAF_S = 30.0  # nor for the leader's word


@dataclass(frozen=True, slots=True)
class Place:
    """Where this worker stands in the plan, and what there is for each member afterwards."""

    me: WorkerId
    plan: Plan
    leads: bool
    share_block_count: int  # for the sequences that it is going to lead, while KV is copied
    max_running_count: int


class PrecopyRun:
    """One restore: `begins` and `ran` from the start, `ready` when the layers are here, `end` at the commit."""

    def __init__(
        self,
        where: Place,
        progress: Progress,
        ground: Ground,
        arrange: Callable[[Collection[SequenceId], bool], None],
    ) -> None:
        """`arrange` moves blocks of sequences that stay to where there is room for what comes, and, if so told, those
        of the others away from there.
        """
        self._where = where
        self._progress = progress
        self._kv = kv = ground.memory.kv
        self._book = book = ground.book
        self._hub = ground.hub
        self._links = ground.links
        self._synchronise = ground.memory.pool.backend.synchronise
        self._arrange = arrange
        self._post = ground.post
        self._sources = {s.worker_id: s for s in sources_of(where.plan, where.me)}
        most_layers = max((s.last_layer - s.first_layer for s in self._sources.values()), default=1)
        max_blocks = max(1, _BUFFER_BYTES // (most_layers * kv.shape.block_bytes))
        self._core = Precopy(tuple(self._sources.values()), kv.shape.block_tokens, max_blocks, book.before_split)
        self._own_layers = _layers_of(where)
        self._chosen: dict[SequenceId, WorkerId] = {}  # leader: told to whom it goes
        self._has_told = False
        self._buffers: dict[tuple[SequenceId, WorkerId], torch.Tensor] = {}
        self._transfers: list[Transfer] = []
        self._ready_at_s: float | None = None
        self._heard_at_s: float | None = None
        self._share: set[SequenceId] = set()
        self.arranged = False  # blocks of sequences that leave lie where they stay until they have been sent
        self._over = False

    @property
    def epoch(self) -> Epoch:
        return self._where.plan.epoch

    def begins(self, batch: Batch) -> None:
        self._core.begins(batch)

    def ran(self, batch: Batch) -> None:
        self._core.ran(batch)

    def handle(self, event: ShareTold | KvAheadAsked | KvAheadArrived, now_s: float) -> None:
        if self._over:
            return
        match event:
            case ShareTold():
                self._hear(event.sequence_ids, now_s)
            case KvAheadAsked():
                self._answer(event)
            case KvAheadArrived():
                self._land(event)

    def _tell(self, to: WorkerId, topic: Topic, body: bytes, stream: int) -> None:
        """Over the link of the layout that is to come."""
        self._links.send(to, TrafficClass.CONTROL, topic, body, stream=stream, epoch=self.epoch)

    # ------------------------------------------------------------ what goes where

    def ready(self, now_s: float) -> None:
        """All layers are here, and there is room for their KV."""
        self._ready_at_s = now_s

    @property
    def is_ready(self) -> bool:
        return self._ready_at_s is not None

    def enough(self, now_s: float) -> bool:
        """Whether the commit need not wait for what is still to be copied."""
        if self._ready_at_s is None:
            return False
        if not self._sources or self._core.converged:
            return True
        since_s, bound_s = (self._ready_at_s, _DEAF_S) if self._heard_at_s is None else (self._heard_at_s, _PATIENCE_S)
        return now_s - since_s > bound_s

    def poll(self, now_s: float, placements: Callable[[], Sequence[PlacementView]]) -> None:
        """Between two batches."""
        if self._over or self._ready_at_s is None:
            return
        if self._where.leads and self._where.plan.kind is TransitionKind.RESTORE:
            self._choose(placements(), now_s)
        if self._heard_at_s is not None:
            if not self.arranged:
                self._arrange(self._share, True)
                self.arranged = True
            for source, span in self._core.wants():
                self._ask(source, span)

    def destinations(self, placements: Sequence[PlacementView]) -> dict[SequenceId, WorkerId]:
        """Leader: the coming leader of every sequence, the same as those who copy have been told."""
        where = self._where
        members = members_of(group_of(where.plan.base, where.me))
        leaders = sorted({_leader_of(where.plan, member) for member in members})
        views = [MemberView(leader, where.share_block_count, where.max_running_count) for leader in leaders]
        return place(placements, views, self._chosen)

    def _choose(self, placements: Sequence[PlacementView], now_s: float) -> None:
        """What has come since the last time is given to a leader too."""
        running = [view for view in placements if view.running]
        if self._has_told and all(view.sequence_id in self._chosen for view in running):
            return
        shares: dict[WorkerId, list[SequenceId]] = {}
        for sequence_id, to in self.destinations(running).items():
            if sequence_id not in self._chosen:
                self._chosen[sequence_id] = to
                shares.setdefault(to, []).append(sequence_id)
        members = members_of(group_of(self._where.plan.base, self._where.me))
        for member in members:
            share = sorted(shares.get(member, ()))
            if member == self._where.me:
                self._hear(share, now_s)
            elif share or not self._has_told:
                body = pb.Share(epoch=self.epoch, sequence_ids=share).SerializeToString()
                self._tell(member, Topic.SHARE, body, 0)
        self._has_told = True

    def _hear(self, sequence_ids: Sequence[SequenceId], now_s: float) -> None:
        self._heard_at_s = self._heard_at_s or now_s
        self._share.update(sequence_ids)
        if self.arranged:
            self._arrange(self._share, False)
        self._core.share(sequence_ids)

    # ------------------------------------------------------------ as the one that takes

    def _ask(self, name: WorkerId, span: Span) -> None:
        source = self._sources[name]
        size = (span.last_block - span.first_block) * (source.last_layer - source.first_layer)
        buffer = self._kv.scratch(size)
        self._buffers[span.sequence_id, name] = buffer
        self._hub.ahead.put((self.epoch, span.sequence_id, name, 0), [buffer])
        body = pb.KvWanted(
            epoch=self.epoch, sequence_id=span.sequence_id, first_block=span.first_block, last_block=span.last_block
        ).SerializeToString()
        self._tell(name, Topic.KV_AHEAD_WANTED, body, span.sequence_id)

    def _land(self, event: KvAheadArrived) -> None:
        buffer = self._buffers.pop((event.span.sequence_id, event.source), None)
        if buffer is None:
            return
        if event.failure:
            self._core.failed(event.source, event.span.sequence_id)
        elif self._core.landed(event.source, event.span, event.step_id):
            self._put(self._sources[event.source], event.span, buffer)

    def _put(self, source: Source, span: Span, buffer: torch.Tensor) -> None:
        count, shape = span.last_block - span.first_block, self._kv.shape
        if not count:
            return
        table = self._book.table(span.sequence_id)[span.first_block : span.last_block]
        layer_bytes = count * shape.block_bytes
        for i, layer in enumerate(range(source.first_layer, source.last_layer)):
            self._kv.put(layer, table, buffer[i * layer_bytes : (i + 1) * layer_bytes])
        self._progress.kv_bytes_copied_ahead += layer_bytes * (source.last_layer - source.first_layer)

    # ------------------------------------------------------------ as a source

    def _answer(self, event: KvAheadAsked) -> None:
        span, step_id = self._core.offer(event.span)
        table = self._book.table(span.sequence_id)
        first, last = self._own_layers
        pieces = kv_pieces(self._kv, table, span.first_block, span.last_block, first, last)
        meta = pb.KvPiece(
            epoch=self.epoch,
            sequence_id=span.sequence_id,
            first_layer=first,
            last_layer=last,
            first_block=span.first_block,
            last_block=span.last_block,
            step_id=step_id,
        ).SerializeToString()
        self._synchronise()
        try:
            transfer = event.link.transfer(
                TrafficClass.KV,
                pieces,
                topic=Topic.KV_AHEAD,
                meta=meta,
                stream=span.sequence_id,
                rank=BEHIND_EXCHANGE,
            )
        except BallastError as error:
            get_logger().warning("KV is not copied ahead", to=event.link.peer_id, why=str(error))
            return  # the link is broken, and its end is told too
        self._transfers = [t for t in self._transfers if not t.done.done()] + [transfer]
        transfer.done.add_done_callback(lambda _: self._post(Woken()))

    # ------------------------------------------------------------ the end of it

    def end(self) -> None:
        """The commit, or that there will be none: what is on its way comes to nothing."""
        self._over = True
        self._core.end()
        self._buffers.clear()
        self._hub.ahead.clear()
        for transfer in self._transfers:
            transfer.cancel()

    @property
    def idle(self) -> bool:
        """Nothing of the cache is being read for it."""
        return all(transfer.done.done() for transfer in self._transfers)

    def copied_blocks(self, sequence_id: SequenceId, source: WorkerId) -> int:
        """So many of its first blocks have the KV of that source's layers here."""
        return self._core.copied_blocks(sequence_id, source)

    def check(self) -> None:
        self._core.check()


def _leader_of(plan: Plan, worker_id: WorkerId) -> WorkerId:
    group = group_of(plan.target, worker_id)
    return worker_id if group is None else group.leader.worker_id


def _layers_of(where: Place) -> tuple[int, int]:
    group = group_of(where.plan.base, where.me)
    members = () if group is None else group.members
    return next(((m.first_layer, m.last_layer) for m in members if m.worker_id == where.me), (0, 0))

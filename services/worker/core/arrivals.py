"""The target's side of live migrations: running sequences that arrive from other groups. Owned by the leader of the
target group; pure.

Rule 1: blocks are reserved before the first byte arrives, and released only after all writes have completed or been
cancelled. Rule 2: a sequence that was handed over is accepted, with its KV or, if that is lost, by recomputation. Rule
3: a refusal is sent before any KV has moved.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.migration_messages import (
    MOST_AT_ONCE,
    PATIENCE_S,
    SPARE_BLOCKS,
    Adopt,
    Handed,
    Keep,
    MigrationId,
    Off,
    Offer,
    Say,
    Stop,
    Take,
    Taken,
    TargetCommand,
    Want,
)
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.spans import KvRange, StageLayers

_TARGET_PATIENCE_S = 2 * PATIENCE_S
_LAST_PATIENCE_S = 2.0  # maximum wait for the last span of a handed-over sequence, which cannot run until then
_REMEMBERED = 256  # ended migrations whose ids are remembered
_NEARLY = 2  # with fewer whole blocks missing, the next span is the last one
_SOON_S = 0.1  # expected time until the KV that existed at the offer has arrived, unless the link is slow
_MOST_WAIT_S = 0.3  # maximum time for which prompts are held back to let one migration finish


class ArrivalPhase(Enum):
    COPYING = "copying"  # spans may arrive
    HANDED = "handed over"  # only its last span is missing
    ENDING = "ending"  # its blocks are released once all writes into them have ended


class _End(Enum):
    GIVEN_UP = "given up"
    TAKEN = "taken"


@dataclass(slots=True)
class _KvArrival:
    migration_id: MigrationId
    sequence_id: SequenceId
    source: WorkerId
    epoch: Epoch  # epoch of the links
    givers: tuple[StageLayers, ...]  # stages of the source group
    takers: tuple[StageLayers, ...]  # stages of this group
    block_count: int  # blocks reserved on each stage of this group
    progress_s: float
    offered_s: float
    nearly_since_s: float = math.inf  # time since which only the last span has been missing
    phase: ArrivalPhase = ArrivalPhase.COPYING
    unready: set[WorkerId] = field(default_factory=set[WorkerId])  # stages that have not reserved the requested blocks
    writing: set[WorkerId] = field(default_factory=set[WorkerId])  # stages that have not confirmed the end of writes
    failed: bool = False  # True: a stage did not receive its span, and the others were sent `Stop`
    landed_blocks: int = 0
    kv_tokens: int = 0  # tokens with KV on all stages, set once the last span has arrived
    snapshot: SequenceSnapshot | None = None  # None: not handed over yet

    def keep(self, token_count: int) -> Keep:
        return Keep(self.migration_id, self.sequence_id, token_count)


class KvArrivals:
    def __init__(self, block_tokens: int, why_no_room: Callable[[int, bool], str]) -> None:
        """`why_no_room(block_count, new)` returns why `block_count` more blocks cannot be reserved for a sequence that
        is new (`new`) or already arriving; empty if they can.
        """
        self._block_tokens = block_tokens
        self._why_no_room = why_no_room
        self._open: dict[MigrationId, _KvArrival] = {}
        self._over: OrderedDict[MigrationId, _End] = OrderedDict()
        self.stale_total = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def block_count(self) -> int:
        """Blocks reserved for all arriving sequences."""
        return sum(arrival.block_count for arrival in self._open.values())

    @property
    def running_count(self) -> int:
        """Number of arriving sequences whose migration has not been cancelled."""
        return sum(arrival.phase is not ArrivalPhase.ENDING for arrival in self._open.values())

    def prompt_limit_blocks(self, at_s: float) -> int | None:
        """Maximum prompt tokens of a batch, in blocks; None: no limit. A handed-over sequence gets its next token only
        after the current step and its own next step, so neither may take longer than a step without prompts.
        """
        limit: int | None = None
        for arrival in self._open.values():
            if arrival.phase is ArrivalPhase.ENDING:
                continue
            if arrival.nearly_since_s <= at_s < arrival.nearly_since_s + _MOST_WAIT_S:
                return 0
            if at_s < arrival.offered_s + _SOON_S or arrival.nearly_since_s <= at_s:
                limit = 1
        return limit

    # ------------------------------------------------------------ messages from the source

    def offered(
        self, at_s: float, peer: WorkerId, epoch: Epoch, offer: Offer, takers: tuple[StageLayers, ...], why_not: str
    ) -> list[TargetCommand]:
        """Handle an offer. `epoch`: epoch of the links. `takers`: this group's stages. `why_not`: why no sequence is
        accepted at present; empty if sequences are accepted.
        """
        migration_id = offer.migration_id
        if migration_id in self._open or migration_id in self._over:
            self.stale_total += 1
            return []
        block_count = blocks_for(offer.token_count + 1, self._block_tokens) + SPARE_BLOCKS
        if not why_not and len(self._open) >= MOST_AT_ONCE:
            why_not = f"{len(self._open)} others are already arriving"
        if not why_not and any(a.sequence_id == offer.sequence_id for a in self._open.values()):
            why_not = "an earlier migration of this sequence has not ended here"
        why_not = why_not or self._why_no_room(block_count, True)
        if why_not:
            self._remember(migration_id, _End.GIVEN_UP)
            return [Say(peer, Off(migration_id, why_not))]
        givers = offer.givers
        arrival = _KvArrival(migration_id, offer.sequence_id, peer, epoch, givers, takers, block_count, at_s, at_s)
        self._note_missing(at_s, arrival, offer.token_count)
        self._open[migration_id] = arrival
        return self._ask(arrival)

    def heard(self, at_s: float, peer: WorkerId, message: Handed | Off) -> list[TargetCommand]:
        arrival = self._open.get(message.migration_id)
        if arrival is not None and arrival.source != peer:
            self.stale_total += 1
            return []
        match message:
            case Handed():
                return self._handed(at_s, arrival, message)
            case Off() if arrival is not None and arrival.phase is ArrivalPhase.COPYING:
                return self._stop(arrival)
            case Off():
                self.stale_total += 1
                return []

    def _handed(self, at_s: float, arrival: _KvArrival | None, handed: Handed) -> list[TargetCommand]:
        snapshot = handed.snapshot
        if arrival is None:
            if self._over.get(handed.migration_id) is not _End.GIVEN_UP:  # repeated, or no longer remembered
                self.stale_total += 1
                return []
            self._remember(handed.migration_id, _End.TAKEN)
            return [Adopt(snapshot, 0)]
        if arrival.snapshot is not None:
            self.stale_total += 1
            return []
        arrival.snapshot, arrival.progress_s = snapshot, at_s
        if arrival.phase is ArrivalPhase.ENDING:  # cancelled here before the source was notified: see `_quiet`
            return []
        arrival.phase = ArrivalPhase.HANDED
        return self._take(arrival) if arrival.kv_tokens else []

    # ------------------------------------------------------------ KV

    def ready(self, at_s: float, migration_id: MigrationId, stage: WorkerId) -> list[TargetCommand]:
        """Handle a stage's report that it has reserved the blocks of the last `Take`."""
        arrival = self._open.get(migration_id)
        if arrival is None or stage not in arrival.unready:
            self.stale_total += 1
            return []
        arrival.unready.discard(stage)
        if arrival.unready or arrival.failed or arrival.phase is not ArrivalPhase.COPYING:
            return []
        first, last = arrival.landed_blocks, arrival.block_count
        return [Say(arrival.source, Want(migration_id, first, last, arrival.takers))]

    def landed(
        self, at_s: float, migration_id: MigrationId, stage: WorkerId, span: KvRange | None
    ) -> list[TargetCommand]:
        """Handle a stage's report that a span has been written there, or has failed (None). No write is under way on
        that stage any more.
        """
        arrival = self._open.get(migration_id)
        if arrival is None or stage not in arrival.writing:
            self.stale_total += 1
            return []
        arrival.writing.discard(stage)
        arrival.unready.discard(stage)
        if span is None and arrival.writing and not (arrival.failed or arrival.phase is ArrivalPhase.ENDING):
            arrival.failed = True
            return [Stop(migration_id)]
        arrival.failed = arrival.failed or span is None
        if arrival.writing:
            return []
        if arrival.phase is ArrivalPhase.ENDING:
            return self._quiet(arrival)
        arrival.progress_s = at_s
        if span is None or arrival.failed:
            return self._lose_kv(arrival)
        if span.first_block != arrival.landed_blocks or not span.first_block <= span.last_block <= arrival.block_count:
            return self._lose_kv(arrival)  # not the requested span
        arrival.landed_blocks = span.last_block
        self._note_missing(at_s, arrival, span.token_count)
        if span.last:
            arrival.kv_tokens = span.token_count
            return self._take(arrival) if arrival.snapshot is not None else []
        return self._make_room(arrival, blocks_for(span.token_count + 1, self._block_tokens) + SPARE_BLOCKS)

    def _note_missing(self, at_s: float, arrival: _KvArrival, token_count: int) -> None:
        """Note, from the source's latest number of tokens with KV, whether only the last span is missing."""
        nearly = token_count // self._block_tokens - arrival.landed_blocks < _NEARLY
        arrival.nearly_since_s = min(arrival.nearly_since_s, at_s) if nearly else math.inf

    def _make_room(self, arrival: _KvArrival, block_count: int) -> list[TargetCommand]:
        more = max(0, block_count - arrival.block_count)
        if more and (why := self._why_no_room(more, False)):
            return [Say(arrival.source, Off(arrival.migration_id, why)), *self._stop(arrival)]
        arrival.block_count += more
        return self._ask(arrival)

    def _ask(self, arrival: _KvArrival) -> list[TargetCommand]:
        """Make the stages reserve blocks; `Want` is sent when all have them."""
        arrival.unready = {stage.worker_id for stage in arrival.takers}
        arrival.writing = set(arrival.unready)
        first, last = arrival.landed_blocks, arrival.block_count
        return [Take(arrival.migration_id, arrival.sequence_id, arrival.epoch, first, last, arrival.givers)]

    def _take(self, arrival: _KvArrival) -> list[TargetCommand]:
        assert arrival.snapshot is not None
        with_kv = arrival.kv_tokens == arrival.snapshot.computed_tokens > 0
        self._close(arrival, _End.TAKEN)
        kv_tokens = arrival.kv_tokens if with_kv else 0
        taken = Say(arrival.source, Taken(arrival.migration_id, with_kv))
        return [arrival.keep(kv_tokens), Adopt(arrival.snapshot, kv_tokens), taken]

    def _lose_kv(self, arrival: _KvArrival) -> list[TargetCommand]:
        """End a migration whose remaining KV will not arrive; no write is under way. The sequence is recomputed here if
        it was handed over, and refused otherwise.
        """
        if arrival.phase is ArrivalPhase.HANDED:
            arrival.kv_tokens = 0
            return self._take(arrival)
        self._close(arrival, _End.GIVEN_UP)
        why = "its KV has not arrived"
        return [arrival.keep(0), Say(arrival.source, Off(arrival.migration_id, why))]

    # ------------------------------------------------------------ end of a migration

    def _quiet(self, arrival: _KvArrival) -> list[TargetCommand]:
        """End a stopped migration, now that all writes for it have completed or been cancelled."""
        arrival.kv_tokens = 0
        if arrival.snapshot is not None:
            return self._take(arrival)
        self._close(arrival, _End.GIVEN_UP)
        return [arrival.keep(0)]

    def tick(self, at_s: float) -> list[TargetCommand]:
        commands: list[TargetCommand] = []
        for arrival in list(self._open.values()):
            waited_s = at_s - arrival.progress_s
            if arrival.phase is ArrivalPhase.COPYING and waited_s > _TARGET_PATIENCE_S:
                why = f"no message for {_TARGET_PATIENCE_S:g} s"
                commands += [Say(arrival.source, Off(arrival.migration_id, why)), *self._stop(arrival)]
            elif arrival.phase is ArrivalPhase.HANDED and waited_s > _LAST_PATIENCE_S:
                commands += self._stop(arrival)
        return commands

    def abandon(self, why: str) -> list[TargetCommand]:
        """End all migrations because the group and all its blocks are lost. Dispatchers replay the sequences handed
        over to it.
        """
        copying = [a for a in self._open.values() if a.phase is ArrivalPhase.COPYING]
        for arrival in list(self._open.values()):
            self._close(arrival, _End.TAKEN if arrival.snapshot is not None else _End.GIVEN_UP)
        return [Say(arrival.source, Off(arrival.migration_id, why)) for arrival in copying]

    def give_up_all(self, why: str) -> list[TargetCommand]:
        """Cancel all migrations whose sequence has not been handed over, because the layout is about to change."""
        commands: list[TargetCommand] = []
        for arrival in [a for a in self._open.values() if a.phase is ArrivalPhase.COPYING]:
            commands += [Say(arrival.source, Off(arrival.migration_id, why)), *self._stop(arrival)]
        return commands

    def peer_lost(self, peer: WorkerId) -> list[TargetCommand]:
        theirs = [a for a in self._open.values() if a.source == peer and a.phase is not ArrivalPhase.ENDING]
        return [command for arrival in theirs for command in self._stop(arrival)]

    def _stop(self, arrival: _KvArrival) -> list[TargetCommand]:
        if arrival.phase is ArrivalPhase.ENDING:
            return []
        arrival.phase = ArrivalPhase.ENDING
        if not arrival.writing:
            return self._quiet(arrival)
        return [] if arrival.failed else [Stop(arrival.migration_id)]

    def _close(self, arrival: _KvArrival, end: _End) -> None:
        del self._open[arrival.migration_id]
        self._remember(arrival.migration_id, end)

    def _remember(self, migration_id: MigrationId, end: _End) -> None:
        self._over[migration_id] = end
        self._over.move_to_end(migration_id)
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def check(self) -> None:
        """Raise InvariantViolation if a sequence arrives twice, KV exceeds the reserved blocks, or a sequence that has
        arrived does not run.
        """
        coming = [arrival.sequence_id for arrival in self._open.values()]
        if len(set(coming)) != len(coming) or len(coming) > MOST_AT_ONCE:
            raise InvariantViolation(f"arriving sequences: {coming}")
        for arrival in self._open.values():
            if arrival.landed_blocks > arrival.block_count:
                raise InvariantViolation(f"more KV has arrived than blocks are reserved: {arrival}")
            if arrival.phase is ArrivalPhase.HANDED and (arrival.snapshot is None or arrival.kv_tokens):
                raise InvariantViolation(f"all KV has arrived, but the sequence does not run: {arrival}")

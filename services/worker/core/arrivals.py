"""Sequences that come to this group while they run elsewhere: live migrations at the target's leader (pure).

Rule 1: blocks are taken before the first byte comes, and given back only when none is, or will be, written any more.
Rule 2: a sequence that was handed over is taken, with its KV or, if that does not come, without.
Rule 3: whatever is refused is refused before anything has moved.
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
from services.worker.core.spans import Span, Stage

_TARGET_PATIENCE_S = 2 * PATIENCE_S
_LAST_PATIENCE_S = 2.0  # for the last span of a sequence that was handed over: it stands still meanwhile
_REMEMBERED = 256  # migrations that are over
_NEARLY = 2  # with fewer whole blocks missing, the next that comes of a sequence is its end
_SOON_S = 0.1  # after an offer; unless the link is slow, all that there was then has come by then
_MOST_WAIT_S = 0.3  # prompts wait for so long at most for the end of one sequence


class Phase(Enum):
    COPYING = "copying"  # a span may come at any time
    HANDED = "handed over"  # only its last span is missing
    ENDING = "ending"  # its blocks are free when nothing is written into them any more


class _End(Enum):
    GIVEN_UP = "given up"
    TAKEN = "taken"


@dataclass(slots=True)
class _Arrival:
    migration_id: MigrationId
    sequence_id: SequenceId
    source: WorkerId
    epoch: Epoch  # of the links
    givers: tuple[Stage, ...]
    takers: tuple[Stage, ...]  # this group's
    block_count: int  # that it holds on each of them
    progress_s: float
    offered_s: float
    nearly_since_s: float = math.inf  # only its end is missing
    phase: Phase = Phase.COPYING
    unready: set[WorkerId] = field(default_factory=set[WorkerId])  # stages that have no blocks yet for what was asked
    writing: set[WorkerId] = field(default_factory=set[WorkerId])  # have not said that nothing is, or will be, written
    failed: bool = False  # a stage has not got what was asked for, and the others have been told
    landed_blocks: int = 0
    kv_tokens: int = 0  # all of them have come
    snapshot: SequenceSnapshot | None = None  # handed over

    def keep(self, token_count: int) -> Keep:
        return Keep(self.migration_id, self.sequence_id, token_count)


class Arrivals:
    def __init__(self, block_tokens: int, why_no_room: Callable[[int, bool], str]) -> None:
        """`why_no_room` for so many blocks more, of a new sequence or of one that is coming; empty: there is."""
        self._block_tokens = block_tokens
        self._why_no_room = why_no_room
        self._open: dict[MigrationId, _Arrival] = {}
        self._over: OrderedDict[MigrationId, _End] = OrderedDict()
        self.stale_total = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def block_count(self) -> int:
        """Held for all that are on their way."""
        return sum(arrival.block_count for arrival in self._open.values())

    @property
    def running_count(self) -> int:
        """How many sequences are going to run here."""
        return sum(arrival.phase is not Phase.ENDING for arrival in self._open.values())

    def prompt_limit_blocks(self, at_s: float) -> int | None:
        """The most blocks of prompts in a batch; None: as many as ever. A sequence that is handed over stands still
        until the step that runs here has ended, and for the one that it takes part in: none is to be longer than a
        step without prompts.
        """
        limit: int | None = None
        for arrival in self._open.values():
            if arrival.phase is Phase.ENDING:
                continue
            if arrival.nearly_since_s <= at_s < arrival.nearly_since_s + _MOST_WAIT_S:
                return 0
            if at_s < arrival.offered_s + _SOON_S or arrival.nearly_since_s <= at_s:
                limit = 1
        return limit

    # ------------------------------------------------------------ what the source says

    def offered(
        self, at_s: float, peer: WorkerId, epoch: Epoch, offer: Offer, takers: tuple[Stage, ...], why_not: str
    ) -> list[TargetCommand]:
        """`epoch`: of the links. `takers`: the stages of this group. `why_not`: why it takes no sequence at all; empty:
        it may.
        """
        migration_id = offer.migration_id
        if migration_id in self._open or migration_id in self._over:
            self.stale_total += 1
            return []
        block_count = blocks_for(offer.token_count + 1, self._block_tokens) + SPARE_BLOCKS
        if not why_not and len(self._open) >= MOST_AT_ONCE:
            why_not = f"{len(self._open)} others are on their way here"
        if not why_not and any(a.sequence_id == offer.sequence_id for a in self._open.values()):
            why_not = "an earlier migration of it has not ended here"
        why_not = why_not or self._why_no_room(block_count, True)
        if why_not:
            self._remember(migration_id, _End.GIVEN_UP)
            return [Say(peer, Off(migration_id, why_not))]
        givers = offer.givers
        arrival = _Arrival(migration_id, offer.sequence_id, peer, epoch, givers, takers, block_count, at_s, at_s)
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
            case Off() if arrival is not None and arrival.phase is Phase.COPYING:
                return self._stop(arrival)
            case Off():
                self.stale_total += 1
                return []

    def _handed(self, at_s: float, arrival: _Arrival | None, handed: Handed) -> list[TargetCommand]:
        snapshot = handed.snapshot
        if arrival is None:
            if self._over.get(handed.migration_id) is not _End.GIVEN_UP:  # twice, or forgotten
                self.stale_total += 1
                return []
            self._remember(handed.migration_id, _End.TAKEN)
            return [Adopt(snapshot, 0)]
        if arrival.snapshot is not None:
            self.stale_total += 1
            return []
        arrival.snapshot, arrival.progress_s = snapshot, at_s
        if arrival.phase is Phase.ENDING:  # this side has given up and the other had not heard: see `quiet`
            return []
        arrival.phase = Phase.HANDED
        return self._take(arrival) if arrival.kv_tokens else []

    # ------------------------------------------------------------ KV

    def ready(self, at_s: float, migration_id: MigrationId, stage: WorkerId) -> list[TargetCommand]:
        """That stage has blocks for what was asked for last."""
        arrival = self._open.get(migration_id)
        if arrival is None or stage not in arrival.unready:
            self.stale_total += 1
            return []
        arrival.unready.discard(stage)
        if arrival.unready or arrival.failed or arrival.phase is not Phase.COPYING:
            return []
        first, last = arrival.landed_blocks, arrival.block_count
        return [Say(arrival.source, Want(migration_id, first, last, arrival.takers))]

    def landed(self, at_s: float, migration_id: MigrationId, stage: WorkerId, span: Span | None) -> list[TargetCommand]:
        """A span has come to that stage, or what was coming will not (None). Nothing is written there any more."""
        arrival = self._open.get(migration_id)
        if arrival is None or stage not in arrival.writing:
            self.stale_total += 1
            return []
        arrival.writing.discard(stage)
        arrival.unready.discard(stage)
        if span is None and arrival.writing and not (arrival.failed or arrival.phase is Phase.ENDING):
            arrival.failed = True
            return [Stop(migration_id)]
        arrival.failed = arrival.failed or span is None
        if arrival.writing:
            return []
        if arrival.phase is Phase.ENDING:
            return self._quiet(arrival)
        arrival.progress_s = at_s
        if span is None or arrival.failed:
            return self._lose_kv(arrival)
        if span.first_block != arrival.landed_blocks or not span.first_block <= span.last_block <= arrival.block_count:
            return self._lose_kv(arrival)  # another span than was asked for
        arrival.landed_blocks = span.last_block
        self._note_missing(at_s, arrival, span.token_count)
        if span.last:
            arrival.kv_tokens = span.token_count
            return self._take(arrival) if arrival.snapshot is not None else []
        return self._make_room(arrival, blocks_for(span.token_count + 1, self._block_tokens) + SPARE_BLOCKS)

    def _note_missing(self, at_s: float, arrival: _Arrival, token_count: int) -> None:
        """The source has so many tokens, as far as it is known here."""
        nearly = token_count // self._block_tokens - arrival.landed_blocks < _NEARLY
        arrival.nearly_since_s = min(arrival.nearly_since_s, at_s) if nearly else math.inf

    def _make_room(self, arrival: _Arrival, block_count: int) -> list[TargetCommand]:
        more = max(0, block_count - arrival.block_count)
        if more and (why := self._why_no_room(more, False)):
            return [Say(arrival.source, Off(arrival.migration_id, why)), *self._stop(arrival)]
        arrival.block_count += more
        return self._ask(arrival)

    def _ask(self, arrival: _Arrival) -> list[TargetCommand]:
        """The stages for blocks: the source hears when all have them."""
        arrival.unready = {stage.worker_id for stage in arrival.takers}
        arrival.writing = set(arrival.unready)
        first, last = arrival.landed_blocks, arrival.block_count
        return [Take(arrival.migration_id, arrival.sequence_id, arrival.epoch, first, last, arrival.givers)]

    def _take(self, arrival: _Arrival) -> list[TargetCommand]:
        assert arrival.snapshot is not None
        with_kv = arrival.kv_tokens == arrival.snapshot.computed_tokens > 0
        self._close(arrival, _End.TAKEN)
        kv_tokens = arrival.kv_tokens if with_kv else 0
        taken = Say(arrival.source, Taken(arrival.migration_id, with_kv))
        return [arrival.keep(kv_tokens), Adopt(arrival.snapshot, kv_tokens), taken]

    def _lose_kv(self, arrival: _Arrival) -> list[TargetCommand]:
        """Whatever was coming does not come, and nothing is written any more."""
        if arrival.phase is Phase.HANDED:
            arrival.kv_tokens = 0
            return self._take(arrival)
        self._close(arrival, _End.GIVEN_UP)
        why = "its KV has not come"
        return [arrival.keep(0), Say(arrival.source, Off(arrival.migration_id, why))]

    # ------------------------------------------------------------ the end of it

    def _quiet(self, arrival: _Arrival) -> list[TargetCommand]:
        """Nothing is, or will be, written for it any more."""
        arrival.kv_tokens = 0
        if arrival.snapshot is not None:
            return self._take(arrival)
        self._close(arrival, _End.GIVEN_UP)
        return [arrival.keep(0)]

    def tick(self, at_s: float) -> list[TargetCommand]:
        commands: list[TargetCommand] = []
        for arrival in list(self._open.values()):
            waited_s = at_s - arrival.progress_s
            if arrival.phase is Phase.COPYING and waited_s > _TARGET_PATIENCE_S:
                why = f"nothing has come for {_TARGET_PATIENCE_S:g} s"
                commands += [Say(arrival.source, Off(arrival.migration_id, why)), *self._stop(arrival)]
            elif arrival.phase is Phase.HANDED and waited_s > _LAST_PATIENCE_S:
                commands += self._stop(arrival)
        return commands

    def abandon(self, why: str) -> list[TargetCommand]:
        """The group is lost, with all blocks. What was handed over to it is nobody's: dispatchers have it replayed."""
        copying = [a for a in self._open.values() if a.phase is Phase.COPYING]
        for arrival in list(self._open.values()):
            self._close(arrival, _End.TAKEN if arrival.snapshot is not None else _End.GIVEN_UP)
        return [Say(arrival.source, Off(arrival.migration_id, why)) for arrival in copying]

    def give_up_all(self, why: str) -> list[TargetCommand]:
        """The layout changes. What was handed over is still waited for."""
        commands: list[TargetCommand] = []
        for arrival in [a for a in self._open.values() if a.phase is Phase.COPYING]:
            commands += [Say(arrival.source, Off(arrival.migration_id, why)), *self._stop(arrival)]
        return commands

    def peer_lost(self, peer: WorkerId) -> list[TargetCommand]:
        theirs = [a for a in self._open.values() if a.source == peer and a.phase is not Phase.ENDING]
        return [command for arrival in theirs for command in self._stop(arrival)]

    def _stop(self, arrival: _Arrival) -> list[TargetCommand]:
        if arrival.phase is Phase.ENDING:
            return []
        arrival.phase = Phase.ENDING
        if not arrival.writing:
            return self._quiet(arrival)
        return [] if arrival.failed else [Stop(arrival.migration_id)]

    def _close(self, arrival: _Arrival, end: _End) -> None:
        del self._open[arrival.migration_id]
        self._remember(arrival.migration_id, end)

    def _remember(self, migration_id: MigrationId, end: _End) -> None:
        self._over[migration_id] = end
        self._over.move_to_end(migration_id)
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def check(self) -> None:
        """Raise InvariantViolation if a sequence comes twice, or more has landed than there are blocks for."""
        coming = [arrival.sequence_id for arrival in self._open.values()]
        if len(set(coming)) != len(coming) or len(coming) > MOST_AT_ONCE:
            raise InvariantViolation(f"sequences that come: {coming}")
        for arrival in self._open.values():
            if arrival.landed_blocks > arrival.block_count:
                raise InvariantViolation(f"more has landed than there is room for: {arrival}")
            if arrival.phase is Phase.HANDED and (arrival.snapshot is None or arrival.kv_tokens):
                raise InvariantViolation(f"all is here, and it does not run: {arrival}")

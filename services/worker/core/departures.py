"""The source's side of live migrations: running sequences that move to other groups. Owned by the leader of the source
group; pure.

Rule 1: until `HandOverNow` the sequence belongs to this group and keeps running, whatever happens to the migration.
Rule 2: from `HandOverNow` on it belongs to the target. Its dispatcher submits it there with all tokens so far, so
losing KV in transit costs time, but no token. Rule 3: KV is sent only when the target has reserved room for it
(`Want`), one span at a time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from ballast.common.errors import InvariantViolation
from ballast.common.ids import Epoch, WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.blocks import blocks_for
from services.worker.core.migration_messages import (
    MOST_AT_ONCE,
    PATIENCE_S,
    Give,
    HandOverNow,
    MigrationId,
    Off,
    Offer,
    Report,
    Say,
    SourceCommand,
    Taken,
    Want,
)
from services.worker.core.spans import KvRange, StageLayers
from services.worker.policy.departure import Decoding

WORTH_BLOCKS = 2  # with fewer whole blocks left, the last span is sent instead of starting another copy round
_TAIL_ROUNDS = 8  # maximum copy rounds for KV computed during earlier rounds; then the sequence stops for the last span
_MOST_ROUNDS = 2 * _TAIL_ROUNDS


class DeparturePhase(Enum):
    OFFERED = "offered"
    READY = "ready"  # waiting for the target's next `Want`
    SENDING = "sending"  # a span is on its way, or not yet confirmed by the target
    HANDED = "handed over"  # the target has not confirmed it yet


@dataclass(slots=True)
class _Departure:
    migration_id: MigrationId
    sequence_id: SequenceId
    to: WorkerId
    epoch: Epoch  # epoch of the links to the target
    began_s: float
    progress_s: float
    phase: DeparturePhase = DeparturePhase.OFFERED
    kv_tokens: int = 0  # its tokens with KV when `look` was last called
    takers: tuple[StageLayers, ...] = ()  # the target's stages
    copied_blocks: int = 0  # blocks whose arrival the target has confirmed
    sent_blocks: int = 0  # end of the last span sent, in blocks
    room_blocks: int = 0  # blocks reserved by the target
    rounds: int = 0
    tail_rounds: int = 0
    last_blocks: int = 0  # blocks in the last span
    handed_s: float = 0.0

    def give(self, span: KvRange) -> Give:
        return Give(self.migration_id, self.sequence_id, self.epoch, span, self.takers)


class Departures:
    def __init__(self, block_tokens: int, max_span_blocks: int) -> None:
        """`max_span_blocks`: maximum blocks of a span that is sent while the sequence decodes."""
        self._block_tokens = block_tokens
        self._max_span_blocks = max_span_blocks
        self._open: dict[MigrationId, _Departure] = {}
        self.stale_total = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def leaving(self) -> frozenset[SequenceId]:
        """Migrating sequences that have not been handed over yet."""
        return frozenset(d.sequence_id for d in self._open.values() if d.phase is not DeparturePhase.HANDED)

    @property
    def may_begin(self) -> bool:
        return len(self._open) < MOST_AT_ONCE

    def begin(
        self,
        at_s: float,
        migration_id: MigrationId,
        to: WorkerId,
        epoch: Epoch,
        chosen: Decoding,
        givers: Iterable[StageLayers],
    ) -> list[SourceCommand]:
        """Offer a sequence to the target. `epoch`: epoch of the links. `givers`: this group's stages. Raises
        InvariantViolation if the sequence is already leaving, or too many sequences are.
        """
        sequence_id = chosen.sequence_id
        if not self.may_begin or sequence_id in self.leaving:
            raise InvariantViolation(f"sequence {sequence_id} cannot leave, {len(self._open)} are leaving")
        self._open[migration_id] = _Departure(migration_id, sequence_id, to, epoch, at_s, at_s)
        return [Say(to, Offer(migration_id, sequence_id, chosen.token_count, tuple(givers)))]

    def heard(self, at_s: float, peer: WorkerId, message: Want | Taken | Off) -> list[SourceCommand]:
        departure = self._open.get(message.migration_id)
        if departure is None or departure.to != peer:
            self.stale_total += 1
            return []
        match message:
            case Want():
                self._wanted(departure, message, at_s)
            case Taken() if departure.phase is DeparturePhase.HANDED:
                return [self._end(departure, at_s, "", with_kv=message.with_kv)]
            case Off() if departure.phase is not DeparturePhase.HANDED:
                return [self._end(departure, at_s, message.why)]
            case _:
                self.stale_total += 1
        return []

    def _wanted(self, departure: _Departure, want: Want, at_s: float) -> None:
        first_block = {DeparturePhase.OFFERED: 0, DeparturePhase.SENDING: departure.sent_blocks}.get(departure.phase)
        if want.first_block != first_block:
            self.stale_total += 1
            return
        departure.phase, departure.progress_s = DeparturePhase.READY, at_s
        departure.copied_blocks, departure.room_blocks = want.first_block, want.last_block
        departure.takers = want.takers

    def sent(self, at_s: float, migration_id: MigrationId, why_not: str) -> list[SourceCommand]:
        """Handle a stage's report that it has sent the current span or (`why_not`) could not send it."""
        departure = self._open.get(migration_id)
        if departure is None or departure.phase is not DeparturePhase.SENDING:
            return []  # the target has reported the outcome already
        if why_not:
            return self._give_up(departure, at_s, why_not)
        departure.progress_s = at_s
        return []

    def look(
        self,
        at_s: float,
        kv_tokens: Callable[[SequenceId], int | None],
        in_flight: Callable[[SequenceId], bool],
    ) -> list[SourceCommand]:
        """Advance all migrations; called between two steps. `kv_tokens(sequence_id)`: number of the sequence's tokens
        with KV on every stage; None: the sequence is no longer running.
        """
        commands: list[SourceCommand] = []
        for departure in list(self._open.values()):
            if departure.phase is DeparturePhase.HANDED:
                if at_s - departure.handed_s > PATIENCE_S:
                    commands.append(self._end(departure, at_s, "its target has not confirmed it", with_kv=False))
                continue
            token_count = kv_tokens(departure.sequence_id)
            # If it has fewer tokens with KV than before, the sequence was preempted and admitted again, and others have
            # written into its blocks.
            if token_count is None or token_count < departure.kv_tokens:
                commands += self._give_up(departure, at_s, "it has ended or was preempted")
                continue
            departure.kv_tokens = token_count
            if departure.phase is DeparturePhase.READY:
                commands += self._go_on(departure, at_s, token_count, in_flight)
            elif at_s - departure.progress_s > PATIENCE_S:
                commands += self._give_up(departure, at_s, f"no progress for {PATIENCE_S:g} s")
        return commands

    def _go_on(
        self, departure: _Departure, at_s: float, token_count: int, in_flight: Callable[[SequenceId], bool]
    ) -> list[SourceCommand]:
        first, room = departure.copied_blocks, departure.room_blocks
        whole, end = token_count // self._block_tokens, blocks_for(token_count, self._block_tokens)
        enough = whole - first < WORTH_BLOCKS or departure.tail_rounds >= _TAIL_ROUNDS
        if enough and end <= room:
            if in_flight(departure.sequence_id):
                return []  # retried when the token in flight has been computed
            departure.phase, departure.handed_s, departure.last_blocks = DeparturePhase.HANDED, at_s, end - first
            span = KvRange(first, end, token_count, last=True)
            return [HandOverNow(departure.to, departure.give(span))]
        if departure.rounds >= _MOST_ROUNDS and departure.tail_rounds >= _TAIL_ROUNDS:
            return self._give_up(departure, at_s, "its KV grows as fast as it is copied")
        last = min(whole, room, first + self._max_span_blocks)
        departure.phase, departure.progress_s = DeparturePhase.SENDING, at_s
        departure.sent_blocks = max(first, last)
        departure.rounds += 1
        departure.tail_rounds += departure.rounds > 1 and whole - first <= self._max_span_blocks
        span = KvRange(first, departure.sent_blocks, token_count)
        return [departure.give(span)]

    def give_up(self, at_s: float, migration_id: MigrationId, why: str) -> list[SourceCommand]:
        """Cancel a migration whose span could not be sent. The sequence stays here, even if that was the last span."""
        departure = self._open.get(migration_id)
        if departure is None:
            return []
        departure.last_blocks = 0
        return self._give_up(departure, at_s, why)

    def give_up_all(self, at_s: float, why: str) -> list[SourceCommand]:
        """Cancel all migrations whose sequence has not been handed over, because the layout is about to change."""
        still_here = [d for d in self._open.values() if d.phase is not DeparturePhase.HANDED]
        return [command for departure in still_here for command in self._give_up(departure, at_s, why)]

    def peer_lost(self, at_s: float, peer: WorkerId, why: str) -> list[SourceCommand]:
        theirs = [d for d in self._open.values() if d.to == peer]
        return [self._end(departure, at_s, f"the link has ended: {why}") for departure in theirs]

    def _give_up(self, departure: _Departure, at_s: float, why: str) -> list[SourceCommand]:
        departure.phase = DeparturePhase.OFFERED  # even if it was about to be handed over
        return [Say(departure.to, Off(departure.migration_id, why)), self._end(departure, at_s, why)]

    def _end(self, departure: _Departure, at_s: float, why: str, *, with_kv: bool = False) -> Report:
        del self._open[departure.migration_id]
        moved = departure.phase is DeparturePhase.HANDED
        return Report(
            departure.migration_id,
            departure.sequence_id,
            departure.to,
            moved,
            why,
            with_kv,
            departure.rounds,
            departure.copied_blocks,
            departure.last_blocks,
            at_s - departure.began_s,
            at_s - departure.handed_s if moved else 0.0,
        )

    def check(self) -> None:
        """Raise InvariantViolation if a sequence is in two migrations, or more KV is sent than the target reserved."""
        still_here = [d.sequence_id for d in self._open.values() if d.phase is not DeparturePhase.HANDED]
        if len(set(still_here)) != len(still_here) or len(self._open) > MOST_AT_ONCE:
            raise InvariantViolation(f"leaving sequences: {still_here}, {len(self._open)} migrations in all")
        for departure in self._open.values():
            if departure.sent_blocks > departure.room_blocks or departure.copied_blocks > departure.room_blocks:
                raise InvariantViolation(f"more KV was sent than the target has reserved blocks for: {departure}")

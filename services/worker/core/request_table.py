"""All sequences of a worker, each with the dispatcher stream that gets its output."""

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import FinishReason
from services.worker.core.batch import SequenceId
from services.worker.core.deadlines import SequenceDeadlines
from services.worker.core.events import SequenceKey
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.limits import WorkerLimits
from services.worker.core.outbox import Outbox
from services.worker.core.sequence import Sequence, SequenceState
from services.worker.core.waits import Waits


class DispatcherStream:
    __slots__ = ("live", "seen_handle")

    def __init__(self) -> None:
        self.live: dict[int, Sequence] = {}  # handle -> sequence
        self.seen_handle = 0


class RequestTable:
    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self.streams: dict[int, DispatcherStream] = {}  # stream id -> its sequences
        self.live: dict[SequenceId, Sequence] = {}
        self.group_schedulers: dict[SequenceId, GroupScheduler] = {}  # absent while a sequence waits for its KV
        self.waiting_for_kv = Waits(limits.handover_timeout_s)  # requests without their KV
        self.kept = Waits(limits.handover_timeout_s)  # KV whose request has not arrived; not in `live`
        self.outbox = Outbox()
        self.turned: list[Sequence] = []  # preempted or resumed since the last report
        self.endings_total = dict.fromkeys(FinishReason, 0)
        self.refused_total = 0
        self._deadlines = SequenceDeadlines()

    @property
    def next_deadline_at_s(self) -> float | None:
        deadline_at_s = self._deadlines.next_at_s
        if not self.waits:
            return deadline_at_s
        instants = (deadline_at_s, self.waiting_for_kv.next_at_s, self.kept.next_at_s)
        return min((at_s for at_s in instants if at_s is not None), default=None)

    @property
    def waits(self) -> bool:
        """True if a request waits for its KV, or KV for its request."""
        return bool(self.waiting_for_kv or self.kept)

    # ---------------------------------------------------------------- insertion

    def enter(self, sequence: Sequence) -> None:
        """Add a sequence of a stream that is in no group yet."""
        self.live[sequence.sequence_id] = sequence
        self.streams[sequence.key.stream_id].live[sequence.key.handle] = sequence
        self._watch(sequence)

    def rename(self, sequence: Sequence, sequence_id: SequenceId) -> None:
        """Give the sequence the id by which the stages know its KV."""
        del self.live[sequence.sequence_id]
        sequence.sequence_id = sequence_id
        self.live[sequence_id] = sequence
        self._watch(sequence)

    def place(self, sequence: Sequence, group_scheduler: GroupScheduler, at_s: float, *, waits: bool = False) -> None:
        """Assign the sequence to the group that will run it. `waits`: its KV waits for room."""
        self.group_schedulers[sequence.sequence_id] = group_scheduler
        group_scheduler.enter(sequence, at_s, waits=waits)

    def _watch(self, sequence: Sequence) -> None:
        """Register the sequence's deadline, so that it is checked."""
        if sequence.deadline_at_s is not None:
            self._deadlines.add(sequence.deadline_at_s, sequence.sequence_id)
            self._deadlines.tidy(self.live)

    def report_preempted(self) -> None:
        """Report each sequence in `turned` as preempted or resumed, unless its dispatcher already knows. New waiting
        sequences are not reported.
        """
        for sequence in self.turned:
            if sequence.sequence_id not in self.live:
                continue
            if (waits := sequence.waits) != sequence.preempted:
                sequence.preempted = waits
                self.outbox.turned(sequence.key, waits=waits)
        self.turned.clear()

    def turn_away(self, key: SequenceKey, why: str, *, invalid: bool) -> None:
        if invalid:
            self.endings_total[FinishReason.ERROR] += 1
        else:
            self.refused_total += 1
        self.outbox.record_refused(key, why, invalid)

    # ---------------------------------------------------------------- removal

    def end(
        self, sequence: Sequence, at_s: float, reason: FinishReason, error: str = "", *, invalid: bool = False
    ) -> None:
        """End a sequence and report it. No other function emits an `Ending`."""
        self.outbox.text(sequence, sequence.stop.flush())
        self.remove(sequence, at_s, reason, error)
        self.outbox.ended(sequence, reason, error, invalid)

    def end_too_big(self, sequence: Sequence, at_s: float) -> None:
        """End a sequence that does not fit into the cache, even alone. It is not `invalid`, because it may have begun
        in a larger group and another group may run it.
        """
        block_count = self.group_schedulers[sequence.sequence_id].scheduler.block_count
        error = (
            f"{sequence.token_count} tokens do not fit into the KV cache of this worker"
            f" ({block_count} blocks of {self._limits.block_tokens} tokens), even alone"
        )
        self.end(sequence, at_s, FinishReason.ERROR, error)

    def remove(self, sequence: Sequence, at_s: float, reason: FinishReason, why: str = "") -> None:
        """End a sequence without reporting it."""
        if (group_scheduler := self.group_schedulers.pop(sequence.sequence_id, None)) is not None:
            group_scheduler.end(sequence)
        self._leave(sequence, at_s, f"{reason.value} {why}".rstrip())
        self.endings_total[reason] += 1

    def move_out(self, sequence: Sequence, at_s: float, why: str) -> None:
        """Remove a sequence that another leader has taken over or will take over."""
        if (group_scheduler := self.group_schedulers.pop(sequence.sequence_id, None)) is not None:
            group_scheduler.give_away(sequence)
        self._leave(sequence, at_s, why)

    def _leave(self, sequence: Sequence, at_s: float, why: str) -> None:
        self.waiting_for_kv.discard(sequence)
        sequence.move(SequenceState.ENDED, at_s, why)
        del self.live[sequence.sequence_id]
        del self.streams[sequence.key.stream_id].live[sequence.key.handle]

    def close(self, stream_id: int, at_s: float) -> None:
        for sequence in list(self.streams[stream_id].live.values()):
            self.remove(sequence, at_s, FinishReason.CANCELLED, "its stream has closed")
        del self.streams[stream_id]
        self.outbox.close(stream_id)

    def abandon(self, at_s: float) -> None:
        """End all sequences without reporting them, because the group and with it all streams are lost."""
        for sequence in list(self.live.values()):
            self.remove(sequence, at_s, FinishReason.CANCELLED, "the group is lost")
        for kept in self.kept.sequences:
            self.kept.discard(kept)
            kept.move(SequenceState.ENDED, at_s, "the group is lost")
        for stream_id in self.streams:
            self.outbox.close(stream_id)
        self.streams.clear()

    def expire(self, at_s: float) -> None:
        for sequence_id in self._deadlines.pop_due(at_s):
            sequence = self.live.get(sequence_id)
            if sequence is not None and sequence.deadline_at_s is not None and sequence.deadline_at_s <= at_s:
                self.end(sequence, at_s, FinishReason.DEADLINE)

    # ---------------------------------------------------------------- inspector

    def check(self) -> None:
        """Raise InvariantViolation unless the tables contain exactly the live sequences."""
        for sequence_id, sequence in self.live.items():
            self._check_live(sequence_id, sequence)
            if (sequence_id in self.group_schedulers) == (sequence.state is SequenceState.WAITING_FOR_KV):
                raise InvariantViolation(f"{sequence.name} waits for KV in a group, or has no group", sequence.story())
        streamed = sum(len(stream.live) for stream in self.streams.values())
        if len(self.live) != streamed:
            raise InvariantViolation(f"{len(self.live)} live sequences, {streamed} in streams")
        for kept in self.kept.sequences:
            if kept.snapshot is None or kept.state not in (SequenceState.SUSPENDED, SequenceState.WAITING):
                raise InvariantViolation(f"{kept.name} is not waiting for its request", kept.story())
            if (kept.state is SequenceState.WAITING) != (kept.computed_tokens == 0):
                raise InvariantViolation(f"{kept.name} has KV in no block", kept.story())
            if self.waiting_for_kv.get(kept.request_id) is not None:
                raise InvariantViolation(f"request and KV of {kept.name} are here, but not bound", kept.story())

    def _check_live(self, sequence_id: SequenceId, sequence: Sequence) -> None:
        if sequence.sequence_id != sequence_id or sequence.state is SequenceState.ENDED:
            raise InvariantViolation(f"{sequence.name} is listed as {sequence_id}", sequence.story())
        if self.streams[sequence.key.stream_id].live.get(sequence.key.handle) is not sequence:
            raise InvariantViolation(f"{sequence.name} is unknown to its stream", sequence.story())
        is_new = not (sequence.may_overfill or sequence.output_token_ids or sequence.state is SequenceState.SWAPPED)
        if sequence.preempted != (sequence.waits and not is_new):
            raise InvariantViolation(f"{sequence.name} waits or runs unknown to its dispatcher", sequence.story())
        if sequence.token_count != len(sequence.prompt_token_ids) + len(sequence.output_token_ids):
            raise InvariantViolation(f"{sequence.name} miscounts its tokens", sequence.story())

"""Every sequence of a worker from its coming to its going, and whom to tell of it.

A sequence has a dispatcher's stream, or it is an orphan: handed over by another leader, producing into its `unsent`
until its dispatcher submits the request here.
"""

from collections import OrderedDict

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import FinishReason
from services.worker.core.batch import SequenceId
from services.worker.core.deadlines import Deadlines
from services.worker.core.events import SequenceKey, Submitted
from services.worker.core.group_scheduler import GroupScheduler
from services.worker.core.limits import WorkerLimits
from services.worker.core.outbox import Outbox
from services.worker.core.sequence import Sequence, SequenceState, Unsent
from services.worker.core.waits import Waits

_MOVED_REMEMBERED = 256


class Stream:
    __slots__ = ("live", "seen_handle")

    def __init__(self) -> None:
        self.live: dict[int, Sequence] = {}  # handle -> sequence
        self.seen_handle = 0


class RequestTable:
    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self.streams: dict[int, Stream] = {}  # stream id -> what came over it
        self.live: dict[SequenceId, Sequence] = {}
        self.group_schedulers: dict[SequenceId, GroupScheduler] = {}  # that each of these is in, unless it is held
        self.orphans = Waits(limits.orphan_timeout_s)  # for their dispatchers; those that have ended, too
        self.held = Waits(limits.orphan_timeout_s)  # for their sequence to be handed over
        self.forsaken = Waits(limits.orphan_timeout_s)  # held, and ended before their sequence has come
        self.claims: dict[SequenceId, Submitted] = {}  # what those were submitted with
        self._moved: OrderedDict[SequenceKey, SequenceId] = OrderedDict()  # the latest that other leaders have now
        self.outbox = Outbox()
        self.turned: list[Sequence] = []  # let in again, or waiting again, and their dispatchers may not know
        self.endings_total = dict.fromkeys(FinishReason, 0)
        self.refused_total = 0
        self._deadlines = Deadlines()

    @property
    def next_deadline_at_s(self) -> float | None:
        deadline_at_s = self._deadlines.next_at_s
        if not self.orphans and not self.held:
            return deadline_at_s
        instants = (deadline_at_s, self.orphans.next_at_s, self.held.next_at_s)
        return min((at_s for at_s in instants if at_s is not None), default=None)

    @property
    def waits(self) -> bool:
        """Whether something is awaited here that may not come in time."""
        return bool(self.orphans or self.held or self.forsaken)

    # ---------------------------------------------------------------- coming

    def enter(self, sequence: Sequence, at_s: float) -> None:
        """A sequence of a stream, or an orphan, comes. In a group it is not yet."""
        self.live[sequence.sequence_id] = sequence
        if sequence.unsent is None:
            self.streams[sequence.key.stream_id].live[sequence.key.handle] = sequence
        else:
            self.orphans.add(sequence, at_s)
        self.watch(sequence)

    def place(
        self,
        sequence: Sequence,
        group_scheduler: GroupScheduler,
        at_s: float,
        *,
        suspended: bool = False,
        waits: bool = False,
    ) -> None:
        """Into the group that is to run it."""
        self.group_schedulers[sequence.sequence_id] = group_scheduler
        group_scheduler.enter(sequence, at_s, suspended=suspended, waits=waits)

    def watch(self, sequence: Sequence) -> None:
        """Its deadline is new."""
        if sequence.deadline_at_s is not None:
            self._deadlines.add(sequence.deadline_at_s, sequence.sequence_id)
            self._deadlines.tidy(self.live)

    def attach(self, orphan: Sequence, claim: Submitted) -> None:
        """Its dispatcher is here, and gets what it does not have yet."""
        unsent = orphan.unsent
        assert unsent is not None
        self.orphans.discard(orphan)
        orphan.unsent = None
        orphan.key, orphan.attempt = claim.key, claim.attempt
        orphan.wants_text, orphan.deadline_at_s = claim.wants_text, claim.deadline_at_s
        orphan.note(claim.at_s, f"claimed as attempt {claim.attempt}")
        self._tell_unsent(orphan, unsent, claim)
        if unsent.finish_reason is not None:
            self.outbox.ended(orphan, unsent.finish_reason, unsent.error, unsent.invalid)
        else:
            self.streams[claim.key.stream_id].live[claim.key.handle] = orphan
            self.turned.append(orphan)
            self.watch(orphan)

    def _tell_unsent(self, orphan: Sequence, unsent: Unsent, claim: Submitted) -> None:
        claimed_count = len(claim.output_token_ids)
        text = "".join(unsent.texts)[claim.delivered_text_chars - unsent.char_count :] if claim.wants_text else ""
        logprobs = unsent.logprobs[max(0, claimed_count - unsent.token_count) :]
        self.outbox.caught_up(orphan, orphan.output_token_ids[claimed_count:], text, logprobs)

    def tell_turned(self) -> None:
        """Whether each of `turned` waits or has been let in, if that is news. A newcomer that waits is none."""
        for sequence in self.turned:
            if sequence.unsent is not None or sequence.sequence_id not in self.live:
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
        self.outbox.turned_away(key, why, invalid)

    # ---------------------------------------------------------------- going

    def end(
        self, sequence: Sequence, at_s: float, reason: FinishReason, error: str = "", *, invalid: bool = False
    ) -> None:
        """The one place where a dispatcher learns of an ending; of an orphan's as soon as it asks."""
        unsent, rest = sequence.unsent, sequence.stop.flush()
        if sequence.state is SequenceState.HELD and len(self.forsaken) < self._limits.max_held_count:
            self.forsaken.add(sequence, at_s)
        if unsent is None:
            self.outbox.text(sequence, rest)
            self.remove(sequence, at_s, reason, error)
            self.outbox.ended(sequence, reason, error, invalid)
        else:
            unsent.add(rest)
            self.remove(sequence, at_s, reason, error)
            unsent.finish_reason, unsent.error, unsent.invalid = reason, error, invalid

    def end_too_big(self, sequence: Sequence, at_s: float) -> None:
        """Not the request's fault: it may have begun in a larger group, and there may be another one."""
        block_count = self.group_schedulers[sequence.sequence_id].scheduler.block_count
        error = (
            f"{sequence.token_count} tokens do not fit into the KV cache of this worker"
            f" ({block_count} blocks of {self._limits.block_tokens} tokens), even alone"
        )
        self.end(sequence, at_s, FinishReason.ERROR, error)

    def remove(self, sequence: Sequence, at_s: float, reason: FinishReason, why: str = "") -> None:
        """Without a word."""
        if (group_scheduler := self.group_schedulers.pop(sequence.sequence_id, None)) is not None:
            group_scheduler.end(sequence)
        self._leave(sequence, at_s, f"{reason.value} {why}".rstrip())
        self.endings_total[reason] += 1

    def move_out(self, sequence: Sequence, at_s: float, why: str) -> None:
        """Somebody else has it now."""
        if sequence.state is not SequenceState.ENDED:
            if (group_scheduler := self.group_schedulers.pop(sequence.sequence_id, None)) is not None:
                group_scheduler.give_away(sequence)
            self._leave(sequence, at_s, why)
        self.orphans.discard(sequence)

    def remember_moved(self, sequence: Sequence) -> None:
        self._moved[sequence.key] = sequence.sequence_id
        while len(self._moved) > _MOVED_REMEMBERED:
            self._moved.popitem(last=False)

    def take_moved(self, key: SequenceKey) -> SequenceId | None:
        """What that handle stood for, if another leader has it since a moment ago."""
        return self._moved.pop(key, None)

    def drop_orphan(self, orphan: Sequence, at_s: float, why: str) -> None:
        self.orphans.discard(orphan)
        if orphan.state is not SequenceState.ENDED:
            self.remove(orphan, at_s, FinishReason.CANCELLED, why)
        orphan.unsent = None

    def hold(self, sequence: Sequence, claim: Submitted) -> None:
        self.held.add(sequence, claim.at_s)
        self.claims[sequence.sequence_id] = claim

    def unhold(self, sequence: Sequence) -> None:
        self.held.discard(sequence)
        self.claims.pop(sequence.sequence_id, None)

    def _leave(self, sequence: Sequence, at_s: float, why: str) -> None:
        if sequence.state is SequenceState.HELD:
            self.unhold(sequence)
        sequence.move(SequenceState.ENDED, at_s, why)
        del self.live[sequence.sequence_id]
        if sequence.unsent is None:
            del self.streams[sequence.key.stream_id].live[sequence.key.handle]

    def close(self, stream_id: int, at_s: float) -> None:
        for sequence in list(self.streams[stream_id].live.values()):
            self.remove(sequence, at_s, FinishReason.CANCELLED, "its stream has closed")
        del self.streams[stream_id]

    def abandon(self, at_s: float) -> None:
        """The group is lost, and with it all streams: nobody is left to be told."""
        for sequence in list(self.live.values()):
            self.remove(sequence, at_s, FinishReason.CANCELLED, "the group is lost")
        for orphan in self.orphans.sequences:
            self.orphans.discard(orphan)
        self.streams.clear()

    def expire(self, at_s: float) -> None:
        for sequence_id in self._deadlines.pop_due(at_s):
            sequence = self.live.get(sequence_id)
            if sequence is not None and sequence.deadline_at_s is not None and sequence.deadline_at_s <= at_s:
                self.end(sequence, at_s, FinishReason.DEADLINE)
        for orphan in self.orphans.pop_due(at_s):
            self.drop_orphan(orphan, at_s, "nobody has asked for it")
        self.forsaken.pop_due(at_s)

    # ---------------------------------------------------------------- inspector

    def check(self) -> None:
        """Raise InvariantViolation unless every live sequence is known where it has to be, and nothing else is."""
        for sequence_id, sequence in self.live.items():
            self._check_live(sequence_id, sequence)
            if (sequence_id in self.group_schedulers) == (sequence.state is SequenceState.HELD):
                raise InvariantViolation(
                    f"{sequence.name} is held and in a group_scheduler, or neither", sequence.story()
                )
        streamed = sum(len(stream.live) for stream in self.streams.values())
        orphaned = sum(s.state is not SequenceState.ENDED for s in self.orphans.sequences)
        if len(self.live) != streamed + orphaned:
            raise InvariantViolation(f"{len(self.live)} sequences live, {streamed} streamed, {orphaned} are orphans")

    def _check_live(self, sequence_id: SequenceId, sequence: Sequence) -> None:
        if sequence.sequence_id != sequence_id or sequence.state is SequenceState.ENDED:
            raise InvariantViolation(f"{sequence.name} is listed as {sequence_id}", sequence.story())
        if sequence.unsent is not None:
            if self.orphans.get(sequence.request_id) is not sequence:
                raise InvariantViolation(f"{sequence.name} is an orphan that nobody can claim", sequence.story())
        elif self.streams[sequence.key.stream_id].live.get(sequence.key.handle) is not sequence:
            raise InvariantViolation(f"{sequence.name} is unknown to its stream", sequence.story())
        is_new = not (sequence.may_overfill or sequence.output_token_ids or sequence.state is SequenceState.SWAPPED)
        if sequence.preempted != (sequence.unsent is None and sequence.waits and not is_new):
            raise InvariantViolation(f"the dispatcher of {sequence.name} has not heard the latest", sequence.story())
        if sequence.token_count != len(sequence.prompt_token_ids) + len(sequence.output_token_ids):
            raise InvariantViolation(f"{sequence.name} miscounts its tokens", sequence.story())

"""A request's state inside a worker."""

from collections import deque
from enum import Enum

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import NewSequence, SequenceId
from services.worker.core.events import SequenceKey, Submitted
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.stop import StopRule

STORY_LINES = 32


NOBODY = SequenceKey(0, 0)  # key of a sequence without a dispatcher's stream


class SequenceState(Enum):
    WAITING = "waiting"  # accepted; holds no KV
    RUNNING = "running"  # its KV is reserved; scheduled into batches
    SUSPENDED = "suspended"  # its KV is reserved and being transferred between stages
    SWAPPED = "swapped"  # its KV is in host memory, or being swapped out or in
    WAITING_FOR_KV = "waiting for KV"  # in no queue yet: another leader may be sending its KV
    ENDED = "ended"


_MOVES = frozenset(
    {
        (SequenceState.WAITING, SequenceState.RUNNING),  # admitted
        (SequenceState.RUNNING, SequenceState.WAITING),  # preempted
        (SequenceState.RUNNING, SequenceState.SUSPENDED),
        (SequenceState.WAITING, SequenceState.SWAPPED),  # admitted, while KV of its prompt is copied from host memory
        (SequenceState.WAITING, SequenceState.SUSPENDED),  # adopted while its KV is transferred
        (SequenceState.SUSPENDED, SequenceState.RUNNING),  # its KV is complete
        (SequenceState.SUSPENDED, SequenceState.WAITING),  # its KV is lost
        (SequenceState.RUNNING, SequenceState.SWAPPED),  # preempted, its KV swapped out
        (SequenceState.SWAPPED, SequenceState.RUNNING),  # its KV is swapped in
        (SequenceState.SWAPPED, SequenceState.WAITING),  # its swapped KV was dropped
        (SequenceState.WAITING, SequenceState.WAITING_FOR_KV),
        (SequenceState.WAITING_FOR_KV, SequenceState.WAITING),
        (SequenceState.WAITING_FOR_KV, SequenceState.SUSPENDED),
        *((state, SequenceState.ENDED) for state in SequenceState if state is not SequenceState.ENDED),
    }
)


class Sequence:
    """Tokens and bookkeeping of one request. Only its owning scheduler and core change it."""

    __slots__ = (
        "_story",
        "ahead",
        "arrival",
        "attempt",
        "block_keys",
        "cache_salt",
        "cached_tokens",
        "caller",
        "computed_tokens",
        "deadline_at_s",
        "dispatched_tokens",
        "first_token_at_s",
        "in_engine",
        "key",
        "marks",
        "may_overfill",
        "on_stages",
        "output_token_ids",
        "preempted",
        "prompt_token_ids",
        "rank",
        "request_id",
        "reserved_block_count",
        "reserved_tokens",
        "sampling",
        "sequence_id",
        "snapshot",
        "state",
        "step_id",
        "stop",
        "targets",
        "token_count",
        "waits_since_s",
        "wants_text",
    )

    def __init__(self, sequence_id: SequenceId, submitted: Submitted, stop: StopRule) -> None:
        self.sequence_id = sequence_id
        self.key: SequenceKey = submitted.key
        self.request_id = submitted.request_id
        self.attempt = submitted.attempt
        self.prompt_token_ids = submitted.prompt_token_ids
        self.output_token_ids = list(submitted.output_token_ids)
        self.token_count = len(self.prompt_token_ids) + len(self.output_token_ids)
        self.sampling = submitted.sampling
        self.rank = submitted.priority.rank
        self.arrival = (submitted.at_s, sequence_id)
        self.waits_since_s = submitted.at_s  # when it last began to wait
        self.deadline_at_s = submitted.deadline_at_s
        self.wants_text = submitted.wants_text
        self.targets = submitted.targets  # its own targets, or those of its class
        self.cache_salt = submitted.cache_salt  # KV is shared only among sequences with the same salt
        self.caller = submitted.caller
        self.block_keys: list[bytes] = []  # prefix keys of its first full blocks, computed on demand: `core.prefixes`
        self.marks: list[int] = []  # prefix marks reported to dispatchers: `ballast.common.marks`
        # Prompt tokens whose KV was cached at its first admission; None: not admitted yet.
        self.cached_tokens: int | None = 0 if self.output_token_ids else None
        self.stop = stop
        self.ahead = self._ahead()
        self.state = SequenceState.WAITING
        self.computed_tokens = 0  # number of leading tokens with KV in the cache
        self.dispatched_tokens = 0  # number of leading tokens with KV once its batches in flight have completed
        self.reserved_block_count = 0
        self.reserved_tokens = 0  # capacity of its reserved blocks
        self.step_id = 0  # step of the last batch that it was in
        self.in_engine = False  # True: a batch of this leader has added it, and none has removed it
        self.on_stages = False  # True: stages hold state or blocks of it, and must be notified when it is removed
        self.snapshot: SequenceSnapshot | None = None  # set for KV whose request has not arrived
        self.may_overfill = False  # True: admitted before it entered the queue, so the queue's bound does not apply
        self.first_token_at_s: float | None = None  # when this attempt's first token was sampled
        self.preempted = False  # True: its dispatcher was notified that it waits, and not yet that it runs again
        self._story: deque[tuple[float, str]] = deque(maxlen=STORY_LINES)

    def _ahead(self) -> range:
        """Token counts at which the next token may be computed before the last one is known. Excluded are tokens whose
        constraints depend on the last one, the last token allowed by count, and a first token that is returned with
        logprobs of the prompt.
        """
        sampling, prompt_count = self.sampling, len(self.prompt_token_ids)
        if sampling.grammar is not None or sampling.bad_words_token_ids:
            return range(0)
        first = max(sampling.min_tokens, 0 if sampling.prompt_logprobs is None else 1)
        return range(prompt_count + first, prompt_count + self.stop.max_output_count - 1)

    @property
    def planned_tokens(self) -> int:
        """Number of leading tokens that have KV or are in a batch."""
        return max(self.computed_tokens, self.dispatched_tokens)

    @property
    def left_tokens(self) -> int:
        """Number of tokens to be computed that are in no batch; at least 1, for the token that is sampled in flight."""
        return self.token_count - self.planned_tokens or 1

    @property
    def limit_tokens(self) -> int:
        """Maximum number of tokens, prompt and output together."""
        return len(self.prompt_token_ids) + self.stop.max_output_count

    def move(self, to: SequenceState, at_s: float, why: str) -> None:
        if (self.state, to) not in _MOVES:
            raise InvariantViolation(f"{self.name} cannot change from {self.state.value} to {to.value}", self.story())
        self.state = to
        if to is SequenceState.WAITING:
            self.waits_since_s = at_s
        self.note(at_s, f"{to.value}: {why}")

    @property
    def waits(self) -> bool:
        """True if the sequence waits for admission and holds no blocks. While being swapped out it still holds some."""
        waiting, swapped = self.state is SequenceState.WAITING, self.state is SequenceState.SWAPPED
        return waiting or (swapped and not self.reserved_block_count)

    def note(self, at_s: float, what: str) -> None:
        self._story.append((at_s, what))

    @property
    def name(self) -> str:
        return f"sequence {self.sequence_id} (request {self.request_id}, attempt {self.attempt})"

    def story(self) -> list[str]:
        """The latest STORY_LINES notes on the sequence, then its current state, one line each."""
        now = f"now {self.state.value}: {self.token_count} tokens, {self.computed_tokens} with KV,"
        return [f"{at_s:.6f} {what}" for at_s, what in self._story] + [
            f"{now} {self.reserved_block_count} blocks reserved"
        ]

    def append(self, token_id: int) -> int:
        """Append a new token, whose KV is not computed yet. Returns the number of output tokens."""
        self.output_token_ids.append(token_id)
        self.token_count += 1
        return len(self.output_token_ids)

    def token_ids(self, first: int, count: int) -> tuple[int, ...]:
        """Tokens at positions [first, first + count), over prompt and output."""
        prompt_count = len(self.prompt_token_ids)
        end = first + count
        if end <= prompt_count:
            return self.prompt_token_ids[first:end]
        output = self.output_token_ids[max(0, first - prompt_count) : end - prompt_count]
        return (*self.prompt_token_ids[first:], *output)

    @property
    def scores_prompt(self) -> bool:
        """True if the prompt's logprobs are still to be computed, for which one engine must compute the whole
        prompt.
        """
        return self.sampling.prompt_logprobs is not None and not self.output_token_ids

    def enter_engine(self) -> None:
        """Make the next batch add the sequence to an engine that does not know it."""
        self.in_engine = False
        if self.scores_prompt and self.state is SequenceState.RUNNING:
            self.computed_tokens = self.dispatched_tokens = 0

    def as_new(self) -> NewSequence:
        return NewSequence(self.sequence_id, self.prompt_token_ids, tuple(self.output_token_ids), self.sampling)

    # ---------------------------------------------------------------- inspector

    def check_running(self, block_tokens: int) -> None:
        """Raise InvariantViolation unless the sequence has tokens to compute, and blocks for the computed ones."""
        if self.state is not SequenceState.RUNNING:
            raise InvariantViolation(f"{self.name} is in the running set", self.story())
        if not 0 <= self.computed_tokens < self.token_count:
            raise InvariantViolation(f"{self.name} has no tokens left to compute", self.story())
        if self.reserved_tokens != self.reserved_block_count * block_tokens:
            raise InvariantViolation(f"{self.name} has a wrong count of reserved tokens", self.story())
        if self.computed_tokens > self.reserved_tokens:
            raise InvariantViolation(f"{self.name} has KV beyond its reservation", self.story())

    def check_waiting(self) -> None:
        """Raise InvariantViolation if the sequence holds blocks."""
        if self.state is not SequenceState.WAITING or self.computed_tokens or self.reserved_tokens:
            raise InvariantViolation(f"{self.name} waits but holds blocks", self.story())

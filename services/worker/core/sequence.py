"""A request inside a worker."""

from collections import deque
from enum import Enum

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import NewSequence, SequenceId
from services.worker.core.events import SequenceKey, Submitted
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.stop import StopRule

STORY_LINES = 32


NOBODY = SequenceKey(0, 0)  # the key of a sequence that no dispatcher's stream is attached to


class SequenceState(Enum):
    WAITING = "waiting"  # accepted; holds no KV
    RUNNING = "running"  # its KV is reserved; takes part in batches
    SUSPENDED = "suspended"  # its KV is reserved and on its way from stage to stage
    SWAPPED = "swapped"  # its KV is in host memory, or on its way there or back
    WAITING_FOR_KV = "waiting for KV"  # in no line yet: another leader may be handing its KV over
    ENDED = "ended"


_MOVES = frozenset(
    {
        (SequenceState.WAITING, SequenceState.RUNNING),  # admitted
        (SequenceState.RUNNING, SequenceState.WAITING),  # preempted
        (SequenceState.RUNNING, SequenceState.SUSPENDED),
        (SequenceState.WAITING, SequenceState.SWAPPED),  # admitted, while KV of its prompt comes from host memory
        (SequenceState.WAITING, SequenceState.SUSPENDED),  # adopted while its KV travels
        (SequenceState.SUSPENDED, SequenceState.RUNNING),  # its KV is complete
        (SequenceState.SUSPENDED, SequenceState.WAITING),  # its KV is lost
        (SequenceState.RUNNING, SequenceState.SWAPPED),  # preempted, and its KV is kept
        (SequenceState.SWAPPED, SequenceState.RUNNING),  # its KV is back
        (SequenceState.SWAPPED, SequenceState.WAITING),  # what was copied is of no use any more
        (SequenceState.WAITING, SequenceState.WAITING_FOR_KV),
        (SequenceState.WAITING_FOR_KV, SequenceState.WAITING),
        (SequenceState.WAITING_FOR_KV, SequenceState.SUSPENDED),
        *((state, SequenceState.ENDED) for state in SequenceState if state is not SequenceState.ENDED),
    }
)


class Sequence:
    """Tokens and bookkeeping of one request. Changed by the scheduler and by the core that own it, by nobody else."""

    __slots__ = (
        "_story",
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
        self.waits_since_s = submitted.at_s  # of the last time that it began to wait
        self.deadline_at_s = submitted.deadline_at_s
        self.wants_text = submitted.wants_text
        self.targets = submitted.targets  # its own, or else those of its class
        self.cache_salt = submitted.cache_salt  # sequences that have another one do not share its KV
        self.caller = submitted.caller
        self.block_keys: list[bytes] = []  # of its first whole blocks, as far as they were needed: `core.prefixes`
        self.marks: list[int] = []  # that dispatchers have been told of: `ballast.common.marks`
        # Prompt tokens whose KV was there when it was first let in; None: it has not been yet.
        self.cached_tokens: int | None = 0 if self.output_token_ids else None
        self.stop = stop
        self.state = SequenceState.WAITING
        self.computed_tokens = 0  # so many of the first tokens have their KV in the cache
        self.dispatched_tokens = 0  # while it is in flight: so many have their KV when it has landed
        self.reserved_block_count = 0
        self.reserved_tokens = 0  # what the reserved blocks hold
        self.step_id = 0  # of the last batch that it took part in
        self.in_engine = False  # a batch of this leader has added it and none has removed it
        self.on_stages = False  # stages hold blocks for it, or know it: they have to be told when it goes
        self.snapshot: SequenceSnapshot | None = None  # of KV whose request is not here yet
        self.may_overfill = False  # it had been let in before it came to the waiting line: the bound is for others
        self.first_token_at_s: float | None = None  # of this attempt
        self.preempted = False  # its dispatcher has been told that it waits, and not yet that it runs again
        self._story: deque[tuple[float, str]] = deque(maxlen=STORY_LINES)

    @property
    def limit_tokens(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt_token_ids) + self.stop.max_output_count

    def move(self, to: SequenceState, at_s: float, why: str) -> None:
        if (self.state, to) not in _MOVES:
            raise InvariantViolation(f"{self.name} cannot go from {self.state.value} to {to.value}", self.story())
        self.state = to
        if to is SequenceState.WAITING:
            self.waits_since_s = at_s
        self.note(at_s, f"{to.value}: {why}")

    @property
    def waits(self) -> bool:
        """For memory, with none of it reserved. What is being copied to the host still has its own."""
        waiting, swapped = self.state is SequenceState.WAITING, self.state is SequenceState.SWAPPED
        return waiting or (swapped and not self.reserved_block_count)

    def note(self, at_s: float, what: str) -> None:
        self._story.append((at_s, what))

    @property
    def name(self) -> str:
        return f"sequence {self.sequence_id} (request {self.request_id}, attempt {self.attempt})"

    def story(self) -> list[str]:
        """What has happened to it, the latest STORY_LINES changes."""
        now = f"now {self.state.value}: {self.token_count} tokens, {self.computed_tokens} with KV,"
        return [f"{at_s:.6f} {what}" for at_s, what in self._story] + [
            f"{now} {self.reserved_block_count} blocks reserved"
        ]

    def append(self, token_id: int) -> int:
        """A new token, its KV not yet computed. Returns the number of output tokens."""
        self.output_token_ids.append(token_id)
        self.token_count += 1
        return len(self.output_token_ids)

    def token_ids(self, first: int, count: int) -> tuple[int, ...]:
        """The tokens at positions [first, first + count), of prompt and output together."""
        prompt_count = len(self.prompt_token_ids)
        end = first + count
        if end <= prompt_count:
            return self.prompt_token_ids[first:end]
        output = self.output_token_ids[max(0, first - prompt_count) : end - prompt_count]
        return (*self.prompt_token_ids[first:], *output)

    @property
    def scores_prompt(self) -> bool:
        """Its prompt's logprobs are wanted and not there yet: one engine computes all of it, from its beginning."""
        return self.sampling.prompt_logprobs is not None and not self.output_token_ids

    def enter_engine(self) -> None:
        """It comes to an engine that does not know it."""
        self.in_engine = False
        if self.scores_prompt and self.state is SequenceState.RUNNING:
            self.computed_tokens = self.dispatched_tokens = 0

    def as_new(self) -> NewSequence:
        return NewSequence(self.sequence_id, self.prompt_token_ids, tuple(self.output_token_ids), self.sampling)

    # ---------------------------------------------------------------- inspector

    def check_running(self, block_tokens: int) -> None:
        """Raise InvariantViolation unless it has something to compute, and blocks for what is."""
        if self.state is not SequenceState.RUNNING:
            raise InvariantViolation(f"{self.name} is in the running set", self.story())
        if not 0 <= self.computed_tokens < self.token_count:
            raise InvariantViolation(f"{self.name} has nothing left to compute", self.story())
        if self.reserved_tokens != self.reserved_block_count * block_tokens:
            raise InvariantViolation(f"{self.name} miscounts its reservation", self.story())
        if self.computed_tokens > self.reserved_tokens:
            raise InvariantViolation(f"{self.name} has KV beyond its reservation", self.story())

    def check_waiting(self) -> None:
        """Raise InvariantViolation if it holds anything."""
        if self.state is not SequenceState.WAITING or self.computed_tokens or self.reserved_tokens:
            raise InvariantViolation(f"{self.name} waits and holds something", self.story())

"""A request inside a worker."""

from collections import deque
from enum import Enum

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import NewSequence, SequenceId
from services.worker.core.events import SequenceKey, Submitted
from services.worker.core.stop import StopRule

STORY_LINES = 32


class SequenceState(Enum):
    WAITING = "waiting"  # accepted; holds no KV
    RUNNING = "running"  # its KV is reserved; takes part in batches
    ENDED = "ended"


_MOVES = frozenset(
    {
        (SequenceState.WAITING, SequenceState.RUNNING),  # admitted
        (SequenceState.RUNNING, SequenceState.WAITING),  # preempted
        (SequenceState.WAITING, SequenceState.ENDED),
        (SequenceState.RUNNING, SequenceState.ENDED),
    }
)


class Sequence:
    """Tokens and bookkeeping of one request. Changed by the scheduler and by the core that own it, by nobody else."""

    __slots__ = (
        "_story",
        "arrival",
        "attempt",
        "computed_tokens",
        "deadline_at_s",
        "first_token_at_s",
        "in_engine",
        "key",
        "output_token_ids",
        "preemption_count",
        "prompt_token_ids",
        "rank",
        "request_id",
        "reserved_block_count",
        "reserved_tokens",
        "sampling",
        "sequence_id",
        "state",
        "stop",
        "token_count",
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
        self.arrival: int = sequence_id  # ids are given in order of arrival
        self.deadline_at_s = submitted.deadline_at_s
        self.wants_text = submitted.wants_text
        self.stop = stop
        self.state = SequenceState.WAITING
        self.computed_tokens = 0  # so many of the first tokens have their KV in the cache
        self.reserved_block_count = 0
        self.reserved_tokens = 0  # what the reserved blocks hold
        self.in_engine = False  # a batch has added it and none has removed it
        self.first_token_at_s: float | None = None  # of this attempt
        self.preemption_count = 0
        self._story: deque[tuple[float, str]] = deque(maxlen=STORY_LINES)

    def move(self, to: SequenceState, at_s: float, why: str) -> None:
        if (self.state, to) not in _MOVES:
            raise InvariantViolation(f"{self.name} cannot go from {self.state.value} to {to.value}", self.story())
        self.state = to
        self.note(at_s, f"{to.value}: {why}")

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

    @property
    def last_token_id(self) -> int:
        return (self.output_token_ids or self.prompt_token_ids)[-1]

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

    def as_new(self) -> NewSequence:
        return NewSequence(self.sequence_id, self.prompt_token_ids, tuple(self.output_token_ids), self.sampling)

"""Events and commands of a dispatcher. Times are monotonic seconds."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ballast.common.errors import BallastError
from ballast.common.ids import RequestId
from ballast.common.layout import Layout
from ballast.common.load import LoadReport
from ballast.common.marks import Mark
from ballast.common.model import ModelInfo
from ballast.common.reach import Reach
from ballast.common.record import record
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from ballast.common.targets import NO_TARGETS, Targets
from services.dispatcher.core.story import Story
from services.dispatcher.policy.freeness import WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request. Its sampling parameters have a seed, so that every attempt samples the same tokens.

    Prompts and answers are excluded from `repr`, because events are logged when an invariant breaks.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int] = field(repr=False)
    sampling: SamplingParams = field(repr=False)  # excluded from `repr` because it contains stop strings
    priority: PriorityClass
    deadline_at_s: float
    omit_text: bool = False
    caller: str = ""  # name of the sender's token, or address of its connection
    traceparent: str = ""  # W3C traceparent header
    output_token_ids: Sequence[int] = field(default=(), repr=False)  # answer tokens from another dispatcher
    text_chars: int = 0  # characters of the text of `output_token_ids` that the client has received
    cache_salt: bytes = b""  # workers share KV only among requests with the same salt
    targets: Targets = NO_TARGETS  # latency targets of the request; default: those of the worker
    taken_over: bool = False  # True: another dispatcher served it before

    @property
    def caller_number(self) -> int:
        """Hash of the caller for workers, the same on all dispatchers; 0: unknown."""
        name = self.caller.encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") if name else 0


@dataclass(frozen=True, slots=True)
class Ending:
    """A worker's last message about a handle."""

    handle: int
    finish_reason: FinishReason | None  # None if refused or moved
    matched_stop: str = field(default="", repr=False)
    error: str = ""
    refused: bool = False
    invalid: bool = False
    moved_to: str = ""  # the worker that continues it
    cached_token_count: int = 0  # prompt tokens whose KV was cached at its first admission


# ------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class LayoutChanged:
    at_s: float
    layout: Layout


@dataclass(frozen=True, slots=True)
class ReachChanged:
    """The planner has published the longest context that the cluster can hold."""

    at_s: float
    reach: Reach


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    at_s: float
    worker: WorkerKey
    model: ModelInfo
    load: LoadReport
    max_waiting_count: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream to a worker has ended; the worker has dropped its requests."""

    at_s: float
    worker: WorkerKey
    why: str


@dataclass(frozen=True, slots=True)
class RequestSubmitted:
    at_s: float
    request: Request


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The client has disconnected or cancelled, or does not read."""

    at_s: float
    request_id: RequestId
    why: str


@record()
class StepReceived:
    """One message of a worker, in parallel arrays as on the wire; their lengths have been checked."""

    at_s: float
    worker: WorkerKey
    handles: Sequence[int]
    token_counts: Sequence[int]
    token_ids: Sequence[int] = field(repr=False)
    texts: Sequence[str] = field(repr=False)  # empty, or one for each handle
    logprobs: Sequence[object] = field(repr=False)  # relayed unchanged
    endings: Sequence[Ending]
    load: LoadReport
    seen_handle: int
    preempted: Sequence[int] = ()  # handles of requests preempted after these tokens
    resumed: Sequence[int] = ()  # handles of preempted requests that were admitted again
    marks: Sequence[Mark] = ()  # prefix marks of prompts whose KV the worker has cached or reused


@dataclass(frozen=True, slots=True)
class DispatcherTick:
    """`next_timer_s` has passed."""

    at_s: float


@dataclass(frozen=True, slots=True)
class DispatcherDrainRequested:
    """Refuse new requests. `for_good`: the process is about to exit."""

    at_s: float
    for_good: bool = False


@dataclass(frozen=True, slots=True)
class UndrainRequested:
    """Cancel a drain, unless it is final (`for_good`)."""

    at_s: float


@dataclass(frozen=True, slots=True)
class TimeIsUp:
    """The drain timeout has passed, so all remaining requests fail."""

    at_s: float


Event = (
    LayoutChanged
    | ReachChanged
    | WorkerConnected
    | WorkerLost
    | RequestSubmitted
    | Withdrawn
    | StepReceived
    | DispatcherTick
    | DispatcherDrainRequested
    | UndrainRequested
    | TimeIsUp
)

# ------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Connect:
    """Keep a stream to this worker open."""

    worker: WorkerKey
    address: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    worker: WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOnWorker:
    worker: WorkerKey
    handle: int
    attempt: int
    request: Request
    output_token_ids: Sequence[int]
    delivered_text_chars: int
    deadline_s: float  # seconds until the request's deadline
    expects_handover: bool = False  # the worker has the request's KV, or will receive it


@dataclass(frozen=True, slots=True)
class AbortOnWorker:
    worker: WorkerKey
    handle: int


class Deliver(NamedTuple):
    """New tokens for a client. A named tuple for speed, because one is created per token."""

    request_id: RequestId
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Statistics of an ended request."""

    prompt_token_count: int
    completion_token_count: int
    replay_count: int
    queue_s: float
    ttft_s: float | None  # None: no token, or another dispatcher has delivered the first one
    e2e_s: float
    cached_token_count: int = 0  # prompt tokens whose KV was cached
    caller: str = ""
    traceparent: str = ""
    priority: PriorityClass = PriorityClass.DEFAULT
    max_token_count: int = 0
    arrived_at_s: float = 0.0
    worker_id: str = ""  # its last worker
    move_count: int = 0
    recall_count: int = 0
    longest_gap_s: float = 0.0  # longest time between two tokens
    longest_gap_token: int = 0
    story: Story = field(default_factory=Story, compare=False)

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None if there are fewer than two, or `ttft_s` is None."""
        if self.ttft_s is None or self.completion_token_count < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.completion_token_count - 1)


@dataclass(frozen=True, slots=True)
class Finish:
    request_id: RequestId
    finish_reason: FinishReason
    matched_stop: str
    facts: Facts


@dataclass(frozen=True, slots=True)
class Fail:
    """An accepted request ends with an error."""

    request_id: RequestId
    error: BallastError
    facts: Facts


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request was not accepted."""

    request_id: RequestId
    error: BallastError


Command = Connect | Disconnect | PlaceOnWorker | AbortOnWorker | Deliver | Finish | Fail | Refuse

"""What can happen to a dispatcher, and what it can order. Times are seconds of the dispatcher's monotonic clock."""

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
    """What a client wants, validated. Its sampling has a seed, so that every attempt draws the same tokens.

    Events are told when an invariant breaks: what clients said and were told is not shown.
    """

    request_id: RequestId
    prompt_token_ids: Sequence[int] = field(repr=False)
    sampling: SamplingParams = field(repr=False)  # its stop strings
    priority: PriorityClass
    deadline_at_s: float
    omit_text: bool = False
    caller: str = ""  # who sent it: the name of a token, or the address of a connection
    traceparent: str = ""  # of the trace that it belongs to, as W3C writes it
    output_token_ids: Sequence[int] = field(default=(), repr=False)  # that its client has from another dispatcher
    text_chars: int = 0  # of their text, that the client has
    cache_salt: bytes = b""  # workers share KV only among requests with the same
    targets: Targets = NO_TARGETS  # of its own; else workers have some for its class
    taken_over: bool = False  # another dispatcher was serving it

    @property
    def caller_number(self) -> int:
        """The caller as workers know it, equal at all dispatchers; 0: unknown."""
        name = self.caller.encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") if name else 0


@dataclass(frozen=True, slots=True)
class Ending:
    """A worker's last word on a handle."""

    handle: int
    finish_reason: FinishReason | None  # None when refused or moved
    matched_stop: str = field(default="", repr=False)
    error: str = ""
    refused: bool = False
    invalid: bool = False
    moved_to: str = ""  # this worker goes on with it
    cached_token_count: int = 0  # of its prompt, whose KV was there when it was first let in


# ------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class LayoutChanged:
    at_s: float
    layout: Layout


@dataclass(frozen=True, slots=True)
class ReachTold:
    """How long a context the cluster holds, as the planner says."""

    at_s: float
    reach: Reach | None  # None: it does not say


@dataclass(frozen=True, slots=True)
class WorkerConnected:
    at_s: float
    worker: WorkerKey
    model: ModelInfo
    load: LoadReport
    max_waiting_count: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream to a worker has ended; the worker has dropped what came over it."""

    at_s: float
    worker: WorkerKey
    why: str


@dataclass(frozen=True, slots=True)
class Submitted:
    at_s: float
    request: Request


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The client went away, asked to cancel, or does not read."""

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
    logprobs: Sequence[object] = field(repr=False)  # carried through, never looked at
    endings: Sequence[Ending]
    load: LoadReport
    seen_handle: int
    preempted: Sequence[int] = ()  # handles of what had been let in, and waits there now, after these tokens
    resumed: Sequence[int] = ()  # handles of what was told to wait so, and has been let in again
    marks: Sequence[Mark] = ()  # of prompts whose KV is there now, or was used again


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_timer_s` has passed."""

    at_s: float


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Nothing new from now on. `for_good`: the process is going to end."""

    at_s: float
    for_good: bool = False


@dataclass(frozen=True, slots=True)
class UndrainRequested:
    """A drain is taken back, unless it was for good."""

    at_s: float


@dataclass(frozen=True, slots=True)
class TimeIsUp:
    """The time for draining has passed: what still runs is given up."""

    at_s: float


Event = (
    LayoutChanged
    | ReachTold
    | WorkerConnected
    | WorkerLost
    | Submitted
    | Withdrawn
    | StepReceived
    | Tick
    | DrainRequested
    | UndrainRequested
    | TimeIsUp
)

# ------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Connect:
    """Keep a stream to this worker until told otherwise."""

    worker: WorkerKey
    address: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    worker: WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    worker: WorkerKey
    handle: int
    attempt: int
    request: Request
    output_token_ids: Sequence[int]
    delivered_text_chars: int
    deadline_s: float  # time left
    expects_handover: bool = False  # the worker has the request already, or will be handed it in a moment


@dataclass(frozen=True, slots=True)
class AbortOnWorker:
    worker: WorkerKey
    handle: int


class Deliver(NamedTuple):
    """New tokens for a client. A named tuple because there is one for each token."""

    request_id: RequestId
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known about a request at its end."""

    prompt_token_count: int
    completion_token_count: int
    replay_count: int
    queue_s: float
    ttft_s: float | None  # None: no token came
    e2e_s: float
    cached_token_count: int = 0  # of the prompt
    caller: str = ""
    traceparent: str = ""
    priority: PriorityClass = PriorityClass.DEFAULT
    max_token_count: int = 0
    arrived_at_s: float = 0.0
    worker_id: str = ""  # the last one that had it
    move_count: int = 0
    recall_count: int = 0
    longest_gap_s: float = 0.0  # between two tokens
    longest_gap_token: int = 0
    story: Story = field(default_factory=Story, compare=False)

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None: there was none."""
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
    """An accepted request ends without having been completed."""

    request_id: RequestId
    error: BallastError
    facts: Facts


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request was not accepted."""

    request_id: RequestId
    error: BallastError


Command = Connect | Disconnect | Place | AbortOnWorker | Deliver | Finish | Fail | Refuse

"""What a worker's core is told and what it answers.

Every event carries the instant it happened at (`at_s`, monotonic seconds of this process); a core sees no clock.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ballast.common.ids import RequestId
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from services.worker.core.batch import Batch, StepResult, TokenLogprobs


class SequenceKey(NamedTuple):
    """What a sequence is called outside of the core."""

    stream_id: int  # number of one dispatcher's stream, never used again within the life of the worker
    handle: int  # chosen by that dispatcher, rising on its stream


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """A dispatcher has attached. What comes over a stream that is not open is ignored."""

    at_s: float
    stream_id: int


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The stream has ended in some way. All its sequences end without a word; there is nobody to tell."""

    at_s: float
    stream_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    at_s: float
    key: SequenceKey
    request_id: RequestId
    attempt: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams  # with a seed, unless it is greedy
    output_token_ids: tuple[int, ...] = ()  # of earlier attempts; generation goes on behind them
    output_text: str = ""  # the text of output_token_ids, as far as it is certain
    delivered_text_chars: int = 0  # so much of the text has reached the client
    priority: PriorityClass = PriorityClass.DEFAULT
    deadline_at_s: float | None = None
    wants_text: bool = True


@dataclass(frozen=True, slots=True)
class Aborted:
    """The client has withdrawn. Answered with a CANCELLED ending; a sequence that has ended already stays as it is."""

    at_s: float
    key: SequenceKey


@dataclass(frozen=True, slots=True)
class BatchWanted:
    """The engine is free. Answered with Execute, or with nothing if there is nothing to run."""

    at_s: float


@dataclass(frozen=True, slots=True)
class StepDone:
    """The batch of the last Execute has been run."""

    at_s: float
    result: StepResult
    texts: tuple[str, ...]  # aligned with result.token_ids: the text that each token adds, "" where none is wanted


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The engine could not run the batch. Its sequences end with ERROR, the others go on."""

    at_s: float
    step_id: int
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at."""

    at_s: float


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Take nothing new, finish what is there."""

    at_s: float


@dataclass(frozen=True, slots=True)
class BlocksAdded:
    """The KV cache has grown at its end. Told between two steps."""

    at_s: float
    block_count: int  # so many more


Event = (
    StreamOpened
    | StreamClosed
    | Submitted
    | Aborted
    | BatchWanted
    | StepDone
    | StepFailed
    | Tick
    | DrainRequested
    | BlocksAdded
)

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Execute:
    """Run the batch, then report StepDone or StepFailed. No other batch is formed before that.

    A sequence may end while its batch runs. Its blocks are free at once, and yet this step may still write them:
    nobody else gets them before the next Execute.
    """

    batch: Batch
    block_tables: tuple[tuple[int, ...], ...]  # this stage's, aligned with batch.slices; same object while unchanged
    text_wanted: tuple[bool, ...]  # aligned with batch.added: whether StepDone must bring the sequence's text


@dataclass(frozen=True, slots=True)
class Ending:
    """The one ending of a sequence; or, with `refused`, that it was never taken."""

    handle: int
    finish_reason: FinishReason | None  # None when refused
    matched_stop: str = ""  # the stop string, or the decimal id of the stop token
    error: str = ""
    refused: bool = False  # not taken: place it elsewhere or later
    invalid: bool = False  # with ERROR: the request itself is at fault, no other worker would do better


@dataclass(frozen=True, slots=True)
class Emit:
    """News for one dispatcher, in the parallel arrays of its wire message."""

    stream_id: int
    handles: tuple[int, ...]  # sequences with new tokens or text
    token_counts: tuple[int, ...]  # aligned with handles
    token_ids: tuple[int, ...]  # of all handles, in their order
    texts: tuple[str, ...]  # aligned with handles, or empty if there is no text at all
    logprobs: tuple[TokenLogprobs, ...]  # of the new tokens of those that asked for them, in order
    endings: tuple[Ending, ...]
    seen_handle: int  # the highest handle that the core knows of this stream


@dataclass(frozen=True, slots=True)
class Drained:
    """Draining, and the last sequence has ended. Said once."""


Command = Execute | Emit | Drained

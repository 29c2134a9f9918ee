"""What a worker's core is told and what it answers.

Every event carries the instant it happened at (`at_s`, monotonic seconds of this process); a core sees no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ballast.common.ids import RequestId, WorkerId
from ballast.common.record import record
from ballast.common.sampling import FinishReason, PriorityClass, SamplingParams
from ballast.common.targets import NO_TARGETS, Targets
from services.worker.core.batch import Batch, SequenceId, StepResult, TokenLogprobs
from services.worker.core.blocks import BlockBook
from services.worker.core.snapshot import SequenceSnapshot


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
    cache_salt: bytes = b""  # KV is shared only among requests with the same
    targets: Targets = NO_TARGETS  # of its own; else its class has some
    caller: int = 0  # who asks: callers take turns with memory; 0: unknown
    expects_handover: bool = False  # another leader had it, and may be handing its KV over to this one
    overtaken: bool = False  # its grammar was compiled meanwhile: requests with higher handles may have come before it


@dataclass(frozen=True, slots=True)
class Aborted:
    """The client has withdrawn. Answered with a CANCELLED ending; a sequence that has ended already stays as it is."""

    at_s: float
    key: SequenceKey


@record()
class BatchWanted:
    """The first stage is free. Answered with Execute, or with nothing if there is nothing to run: in a pipeline also
    because all that could run is in flight. At most as many batches as there are stages are in flight.
    """

    at_s: float


@record()
class StepDone:
    """The batch of the oldest Execute that is in flight has been run."""

    at_s: float
    result: StepResult
    texts: tuple[str, ...]  # aligned with result.token_ids: the text that each token adds, "" where none is wanted


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The oldest batch in flight could not be run. Its sequences end with ERROR, the others go on."""

    at_s: float
    step_id: int
    why: str


@dataclass(frozen=True, slots=True)
class StepPreempted:
    """The oldest batch in flight, of offline sequences alone, has given way to online work before its last layer. What
    of it was computed is computed anew; the copies beside it have been made.
    """

    at_s: float
    step_id: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines are looked at."""

    at_s: float


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Take nothing new, finish what is there."""

    at_s: float


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """The smallest stage of the group has so many blocks now, or is about to.

    Less than are reserved: the latest of the lowest class are preempted, those in flight as soon as they land. The
    blocks may be taken away once the core is `settled`. What does not fit in `block_count` even alone ends with ERROR.
    """

    at_s: float
    block_count: int
    lent_block_count: int = 0  # part of them: held for KV not the leader's (leaving, not adopted yet), or waiting
    before_block_count: int = 0  # not 0: there may be so many again soon, and what needs them waits instead of ending
    swap_block_count: int | None = None  # of host memory, on the stage with the fewest; None: as before


@dataclass(frozen=True, slots=True)
class AdmissionLimited:
    """Nothing new is admitted above that, what runs may go on growing. None, or GroupLost: no limit."""

    at_s: float
    block_count: int | None


@dataclass(frozen=True, slots=True)
class PrefillLimited:
    """Beside decodes at most so many tokens of prompts in a batch, or (`always`) in any: another group decodes on the
    same devices. None, or RoleChanged: as many as fit.
    """

    at_s: float
    token_count: int | None
    always: bool = False


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """This worker leads a group of so many stages, or it follows (and has handed everything over). Told while nothing
    is in flight. Every stage forgets what it knows of sequences, except their blocks: batches add them anew.
    """

    at_s: float
    leads: bool
    stage_count: int = 1


@dataclass(frozen=True, slots=True)
class KvTravels:
    """Layers of these sequences have moved to another member, and their KV follows. They are left out of batches until
    KvArrived or KvLost is told for each. Told while nothing is in flight; what has no KV is not affected.
    """

    at_s: float
    sequence_ids: frozenset[SequenceId]
    waiting_ids: frozenset[SequenceId] = frozenset()  # the ones without room on all stages yet: KvAdmitted says when


@dataclass(frozen=True, slots=True)
class KvAdmitted:
    """There is room on all stages for the KV of these sequences, and it is on its way now. Until then they count among
    the lent blocks, for what they hold on some stages.
    """

    at_s: float
    sequence_ids: frozenset[SequenceId]


@dataclass(frozen=True, slots=True)
class KvArrived:
    """All stages have all KV of the sequence: it goes on where it was."""

    at_s: float
    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class KvLost:
    """Some KV of the sequence will never come, and nothing of it is being written any more. It is computed again."""

    at_s: float
    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class HandOver:
    """Give sequences to other leaders. None of them is in flight. Answered with HandedOver."""

    at_s: float
    to: WorkerId | Mapping[SequenceId, WorkerId]  # all there is to one, or those named; the others stay
    frees: bool = False  # their KV is not needed here any more: the stages are told to forget them
    by_tokens: bool = False  # nor anywhere: they are computed anew where they go


@dataclass(frozen=True, slots=True)
class Adopted:
    """Sequences of another leader. Each goes on as soon as its KV and its request are here: its dispatcher submits it.

    Sequences with KV come while nothing is in flight, on any stage: the stages take blocks for their KV just before,
    and those must not be blocks that a batch on its way has been promised. Else they take them `in_order` with batches.
    """

    at_s: float
    snapshots: tuple[SequenceSnapshot, ...]
    suspended_ids: frozenset[SequenceId] = frozenset()  # their KV is on its way: KvArrived or KvLost will follow
    lost_ids: frozenset[SequenceId] = frozenset()  # their KV will not come: computed again
    last: bool = False  # no other handover is coming: requests that still wait for KV are computed again
    waiting_ids: frozenset[SequenceId] = frozenset()  # suspended, no room on all stages yet: KvAdmitted says when
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class RoomWanted:
    """So many blocks may be wanted outside of a batch: what is retained makes way, and the stages are told."""

    at_s: float
    block_count: int


@dataclass(frozen=True, slots=True)
class OfflinePaused:
    """The group is about to change, and offline sequences leave it first: those in no batch now, others when they have
    landed. None is let in until it is not `paused`.
    """

    at_s: float
    paused: bool


@dataclass(frozen=True, slots=True)
class RoomExpected:
    """So much of the cache, and so many places among the running, are kept for sequences that are on their way here."""

    at_s: float
    block_count: int
    running_count: int


@dataclass(frozen=True, slots=True)
class GroupOpened:
    """This worker leads itself from now on, with blocks of its own in `book`, and new requests come there. The group
    that it has led before, if it has led one, is leaving: what is in it ends, is handed over or moves over.
    """

    at_s: float
    book: BlockBook


@dataclass(frozen=True, slots=True)
class OfLeaving:
    """Something happens to the group that is leaving."""

    at_s: float
    event: CapacityChanged | HandOver


@dataclass(frozen=True, slots=True)
class LeavingStopped:
    """No batch of the group that is leaving is formed any more."""

    at_s: float


@dataclass(frozen=True, slots=True)
class MovedOver:
    """Sequences of the group that is leaving go on in the other one, computed anew. None of them is in flight. What is
    among `suspended_ids` keeps its KV and waits for room: KvAdmitted or KvLost is told for it.
    """

    at_s: float
    sequence_ids: frozenset[SequenceId]
    suspended_ids: frozenset[SequenceId] = frozenset()


@dataclass(frozen=True, slots=True)
class GroupClosed:
    """Nothing is in the group that is leaving."""

    at_s: float


@dataclass(frozen=True, slots=True)
class BatchesLost:
    """A stage of the group that is leaving is gone: what was in flight never lands, and no stage is told anything."""

    at_s: float


@dataclass(frozen=True, slots=True)
class GroupLost:
    """A member of the group is gone, and with it KV and batches. Every sequence ends without a word and every stream
    is closed: dispatchers replay. Answered with StreamsLost.
    """

    at_s: float


GroupEvent = (
    CapacityChanged
    | AdmissionLimited
    | PrefillLimited
    | RoleChanged
    | KvTravels
    | KvAdmitted
    | KvArrived
    | KvLost
    | RoomExpected
    | RoomWanted
    | OfflinePaused
)  # what happens to a group, and not to a worker

Event = (
    GroupEvent
    | StreamOpened
    | StreamClosed
    | Submitted
    | Aborted
    | BatchWanted
    | StepDone
    | StepFailed
    | StepPreempted
    | Tick
    | DrainRequested
    | HandOver
    | Adopted
    | GroupOpened
    | OfLeaving
    | LeavingStopped
    | MovedOver
    | BatchesLost
    | GroupClosed
    | GroupLost
)

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """KV of some blocks, all layers held, from device to host memory or back. Both aligned."""

    out: bool  # to the host
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


@record()
class Execute:
    """Run the batch, then report StepDone or StepFailed. Reports come in the order of the batches.

    A sequence may end while its batch runs. A later batch removes it and may give its blocks to others: as every
    stage runs batches in order, nobody writes into them after that.
    """

    batch: Batch
    block_tables: tuple[
        tuple[int, ...], ...
    ]  # the leader's own stage's, aligned with batch.slices; same object while unchanged
    text_wanted: tuple[bool, ...]  # aligned with batch.added: whether StepDone must bring the sequence's text
    copies: tuple[BlockCopy, ...] = ()  # at the same time; the batch touches none of these blocks
    leaving: bool = False  # of the group that is leaving


@dataclass(frozen=True, slots=True)
class Removed:
    """A batch that only removes, for every stage, in order with the others. Nothing is reported for it."""

    batch: Batch
    copies: tuple[BlockCopy, ...] = ()  # with nothing to compute meanwhile
    leaving: bool = False  # of the group that is leaving


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The sequences that have left. The core knows nothing of them any more, the stages' tables still do."""

    snapshots: tuple[tuple[WorkerId, tuple[SequenceSnapshot, ...]], ...]  # by receiver


@dataclass(frozen=True, slots=True)
class Ending:
    """The one ending of a sequence here; or, with `refused`, that it was never taken; or that another leader has it."""

    handle: int
    finish_reason: FinishReason | None  # None when refused or moved
    matched_stop: str = ""  # the stop string, or the decimal id of the stop token
    error: str = ""
    refused: bool = False  # not taken: place it elsewhere or later
    invalid: bool = False  # with ERROR: the request itself is at fault, no other worker would do better
    moved_to: str = ""  # not at its end: it goes on at this worker once it is submitted there
    cached_token_count: int = 0  # of its prompt, whose KV was there when it was first let in


@record()
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
    preempted: tuple[int, ...] = ()  # handles of what had been let in, here or elsewhere, and waits now
    resumed: tuple[int, ...] = ()  # handles of what was told to wait so, and has been let in again
    marks: tuple[int, ...] = ()  # of prompts whose KV is here now, or was used again


@dataclass(frozen=True, slots=True)
class StreamsLost:
    """Close the stream of every dispatcher; batches that were in flight do not come back."""


Command = Execute | Removed | HandedOver | Emit | StreamsLost

"""Messages and commands of live migrations (pure).

A migration moves one running sequence from one group to another; either may be a lone worker. The leaders decide.
`Offer` opens it; the target answers with the blocks that it has reserved (`Want`) or with `Off`. Each `Want` permits
one span of KV, so no KV arrives without reserved blocks. The last span is sent with `Handed`, which transfers the
sequence. Every message has the migration's number, which is unique in the cluster and never reused, so late messages
have no effect.

KV is sent from stage to stage (`core.spans`). A leader tells its stages what to send (`Give`) and what to receive
(`Take`, `Stop`, `Keep`) in order with batches. Every stage therefore reads a block before a later batch frees it, and
reserves only blocks that an earlier batch has freed. Each `Take` is answered by `Ready`, when blocks are reserved, and
then by `Landed`; or by `Landed` alone.
"""

from dataclasses import dataclass

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.spans import KvRange, StageLayers

MigrationId = int
MOST_AT_ONCE = 4  # maximum concurrent migrations of a group, in both directions together
PATIENCE_S = 3.0  # maximum time without progress at the source; the target waits longer, so the source gives up first
SPARE_BLOCKS = 2  # reserved by the target beyond the present KV, because the sequence keeps growing


# ---------------------------------------------------------------- source to target


@dataclass(frozen=True, slots=True)
class Offer:
    migration_id: MigrationId
    sequence_id: SequenceId
    token_count: int
    givers: tuple[StageLayers, ...]


@dataclass(frozen=True, slots=True)
class Handed:
    """From now on the sequence belongs to the target. Its dispatcher submits it there."""

    migration_id: MigrationId
    snapshot: SequenceSnapshot


# ---------------------------------------------------------------- target to source


@dataclass(frozen=True, slots=True)
class Want:
    """Blocks `[first_block, last_block)` of the sequence are reserved; earlier ones have arrived."""

    migration_id: MigrationId
    first_block: int
    last_block: int
    takers: tuple[StageLayers, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """Confirms that the target has adopted the sequence. `with_kv`: with its KV; otherwise the target recomputes it."""

    migration_id: MigrationId
    with_kv: bool


# ---------------------------------------------------------------- from either side


@dataclass(frozen=True, slots=True)
class Off:
    """Cancels a migration before `Handed`. The sequence stays at the source."""

    migration_id: MigrationId
    why: str


# ---------------------------------------------------------------- leader to its stages


@dataclass(frozen=True, slots=True)
class Give:
    """Send a span of KV. The last span is copied at once, because the next batch may free its blocks; others are read
    while the sequence decodes. The caller calls `sent` when the transfer ends.
    """

    migration_id: MigrationId
    sequence_id: SequenceId
    epoch: Epoch  # epoch of the links
    span: KvRange
    takers: tuple[StageLayers, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """Reserve the first `last_block` blocks of the sequence, and receive KV from `first_block` on."""

    migration_id: MigrationId
    sequence_id: SequenceId
    epoch: Epoch
    first_block: int
    last_block: int
    givers: tuple[StageLayers, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Refuse KV that has not arrived. `Landed` follows once no write is under way."""

    migration_id: MigrationId


@dataclass(frozen=True, slots=True)
class Keep:
    """The transfer has ended: keep the sequence's blocks for `token_count` tokens and release the others."""

    migration_id: MigrationId
    sequence_id: SequenceId
    token_count: int


# ---------------------------------------------------------------- stage to its leader


@dataclass(frozen=True, slots=True)
class Ready:
    """The blocks of the last Take are reserved."""

    migration_id: MigrationId


@dataclass(frozen=True, slots=True)
class Landed:
    """This stage has received a span in its layers. `span`: None if it will not receive the span, and no write is under
    way.
    """

    migration_id: MigrationId
    span: KvRange | None


ForStages = Give | Take | Stop | Keep
Message = Offer | Handed | Want | Taken | Off | ForStages | Ready | Landed


# ---------------------------------------------------------------- commands of source and target


@dataclass(frozen=True, slots=True)
class Say:
    to: WorkerId
    message: Message


# ---------------------------------------------------------------- commands of the source


@dataclass(frozen=True, slots=True)
class HandOverNow:
    """Hand the sequence over now, between two steps: send the last span, remove the sequence, send `Handed`. If the
    span cannot be sent, nothing changes and `Departures.give_up` is called.
    """

    to: WorkerId
    give: Give


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of a migration, as its source sees it."""

    migration_id: MigrationId
    sequence_id: SequenceId
    to: WorkerId
    moved: bool
    why: str  # why it has not moved, or that its target has not confirmed; empty: moved
    with_kv: bool  # True: moved with its KV, so no token is recomputed
    rounds: int  # copy rounds while the sequence was decoding
    copied_blocks: int  # blocks copied in those rounds
    last_blocks: int  # blocks sent in the last span
    took_s: float
    downtime_s: float  # from its last step here until the target has reported that it runs


# ---------------------------------------------------------------- commands of the target


@dataclass(frozen=True, slots=True)
class Adopt:
    """The sequence now runs here. `kv_tokens` of its tokens have KV in its blocks; with 0 it has no blocks."""

    snapshot: SequenceSnapshot
    kv_tokens: int


SourceCommand = Say | Give | HandOverNow | Report
TargetCommand = Say | Take | Stop | Keep | Adopt

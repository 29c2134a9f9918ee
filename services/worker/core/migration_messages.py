"""What is said of a live migration, and what its halves want done (pure).

A migration moves one running sequence from one group to another; either may be a worker alone. Its leaders decide.
`Offer` opens it; the target answers with the blocks that it has room for (`Want`) or with `Off`. Each `Want` is leave
to send one span of KV, so nothing ever comes for which there is no place. The last span goes with `Handed`: the
sequence as it is. Everything names the migration, whose number no other one in the cluster has or has had, so that what
is late does nothing.

KV goes from stage to stage (`core.spans`). A leader tells its stages what to give (`Give`) and what to take (`Take`,
`Stop`, `Keep`) in order with batches: so every stage reads a block before a later batch frees it, and takes blocks that
an earlier batch has freed. Each `Take` is answered by `Ready`, when there are blocks, and then by `Landed`; or by
`Landed` alone.
"""

from dataclasses import dataclass

from ballast.common.ids import Epoch, WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.snapshot import SequenceSnapshot
from services.worker.core.spans import Span, Stage

MigrationId = int
MOST_AT_ONCE = 4  # that a group takes part in, in either direction
PATIENCE_S = 3.0  # of the source, without progress. The target waits longer, so that it hears of the end first
SPARE_BLOCKS = 2  # that the target has room for beyond what there is: the sequence goes on growing


# ---------------------------------------------------------------- from the source


@dataclass(frozen=True, slots=True)
class Offer:
    migration_id: MigrationId
    sequence_id: SequenceId
    token_count: int
    givers: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Handed:
    """From here on the sequence is the target's, whatever happens. Its dispatcher submits it there."""

    migration_id: MigrationId
    snapshot: SequenceSnapshot


# ---------------------------------------------------------------- from the target


@dataclass(frozen=True, slots=True)
class Want:
    """There are blocks for `[first_block, last_block)` of the sequence, in its own order; the ones before are here."""

    migration_id: MigrationId
    first_block: int
    last_block: int
    takers: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """The sequence runs here."""

    migration_id: MigrationId
    with_kv: bool


# ---------------------------------------------------------------- from both


@dataclass(frozen=True, slots=True)
class Off:
    """Before Handed: the sequence stays where it is."""

    migration_id: MigrationId
    why: str


# ---------------------------------------------------------------- from a leader to its stages


@dataclass(frozen=True, slots=True)
class Give:
    """From where the KV lies. The last span is copied at once, as a batch behind it may free the blocks; the others are
    read while the sequence goes on decoding. `sent` is to be called at the end of these.
    """

    migration_id: MigrationId
    sequence_id: SequenceId
    epoch: Epoch  # of the links
    span: Span
    takers: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Take:
    """Have blocks for the first `last_block` of the sequence, and let its KV come from `first_block` on."""

    migration_id: MigrationId
    sequence_id: SequenceId
    epoch: Epoch
    first_block: int
    last_block: int
    givers: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Whatever has not come is not let in any more. `Landed` follows when nothing is being written."""

    migration_id: MigrationId


@dataclass(frozen=True, slots=True)
class Keep:
    """It is over: of the blocks of the sequence those for so many tokens are held, the others are free."""

    migration_id: MigrationId
    sequence_id: SequenceId
    token_count: int


# ---------------------------------------------------------------- from a stage to its leader


@dataclass(frozen=True, slots=True)
class Ready:
    """There are blocks here."""

    migration_id: MigrationId


@dataclass(frozen=True, slots=True)
class Landed:
    """A span is here, in the layers of this stage; or what was coming will not come (None), and nothing is written."""

    migration_id: MigrationId
    span: Span | None


ForStages = Give | Take | Stop | Keep
Message = Offer | Handed | Want | Taken | Off | ForStages | Ready | Landed


# ---------------------------------------------------------------- commands of both halves


@dataclass(frozen=True, slots=True)
class Say:
    to: WorkerId
    message: Message


# ---------------------------------------------------------------- commands of the source


@dataclass(frozen=True, slots=True)
class HandAway:
    """Now, between two steps: give the last span, let go of the sequence, and say Handed. If the span cannot be given
    here, nothing has happened: `give_up`.
    """

    to: WorkerId
    give: Give


@dataclass(frozen=True, slots=True)
class Report:
    """A migration is over, as its source sees it."""

    migration_id: MigrationId
    sequence_id: SequenceId
    to: WorkerId
    moved: bool
    why: str  # if it has not moved; or that its target has not confirmed it
    with_kv: bool  # nothing is computed anew
    rounds: int  # of copying while it was decoding
    copied_blocks: int  # in these
    last_blocks: int  # while it stood still
    took_s: float
    downtime_s: float  # from its last step here until the word that it runs there has come


# ---------------------------------------------------------------- commands of the target


@dataclass(frozen=True, slots=True)
class Adopt:
    """It is this group's. `kv_tokens` of its tokens have their KV in its blocks; with 0 it holds none."""

    snapshot: SequenceSnapshot
    kv_tokens: int


SourceCommand = Say | Give | HandAway | Report
TargetCommand = Say | Take | Stop | Keep | Adopt

"""What the two workers of a live migration say to each other, and what their halves want done (pure).

A migration moves one running sequence from a worker that leads alone to another one. `Offer` opens it; the target
answers with the blocks that it has room for (`Want`) or with `Off`. Each `Want` is leave to send one span of KV, so
nothing ever comes for which there is no place. The last span goes with `Handed`: the sequence as it is. Everything
names the migration, whose number no other one in the cluster has or has had, so that what is late does nothing.
"""

from dataclasses import dataclass

from ballast.common.ids import WorkerId
from services.worker.core.batch import SequenceId
from services.worker.core.snapshot import SequenceSnapshot

MigrationId = int
MOST_AT_ONCE = 4  # that a worker takes part in, in either direction
PATIENCE_S = 3.0  # of the source, without progress. The target waits longer, so that it hears of the end first
SPARE_BLOCKS = 2  # that the target has room for beyond what there is: the sequence goes on growing


# ---------------------------------------------------------------- from the source


@dataclass(frozen=True, slots=True)
class Offer:
    migration_id: MigrationId
    sequence_id: SequenceId
    token_count: int


@dataclass(frozen=True, slots=True)
class Handed:
    """From here on the sequence is the target's, whatever happens."""

    migration_id: MigrationId
    snapshot: SequenceSnapshot


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Its client has gone, and the dispatcher has told the source, which does not have it any more."""

    migration_id: MigrationId


# ---------------------------------------------------------------- from the target


@dataclass(frozen=True, slots=True)
class Want:
    """There are blocks for `[first_block, last_block)` of the sequence, in its own order; the ones before are here."""

    migration_id: MigrationId
    first_block: int
    last_block: int


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


Message = Offer | Handed | Withdrawn | Want | Taken | Off


@dataclass(frozen=True, slots=True)
class Span:
    """KV that has come. `last`: nothing follows, and `token_count` tokens have theirs."""

    first_block: int
    last_block: int
    token_count: int  # with KV at the source when it was sent
    last: bool = False


# ---------------------------------------------------------------- commands of both halves


@dataclass(frozen=True, slots=True)
class Say:
    to: WorkerId
    message: Message


# ---------------------------------------------------------------- commands of the source


@dataclass(frozen=True, slots=True)
class SendSpan:
    """From where the KV lies, while the sequence goes on decoding. `sent` is to be called at its end."""

    migration_id: MigrationId
    sequence_id: SequenceId
    to: WorkerId
    span: Span


@dataclass(frozen=True, slots=True)
class HandAway:
    """Now, between two steps: send the last span, let go of the sequence, and say Handed. If the span cannot be sent,
    nothing has happened: `give_up`.
    """

    migration_id: MigrationId
    sequence_id: SequenceId
    to: WorkerId
    span: Span


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
class Expect:
    """Have blocks for the first `last_block` of the sequence, and let its KV come from `first_block` on."""

    migration_id: MigrationId
    sequence_id: SequenceId
    source: WorkerId
    first_block: int
    last_block: int


@dataclass(frozen=True, slots=True)
class StopExpecting:
    """`quiet` is to be called when nothing is, or will be, written for it any more: perhaps at once."""

    migration_id: MigrationId


@dataclass(frozen=True, slots=True)
class Release:
    """Its blocks are free."""

    sequence_id: SequenceId


@dataclass(frozen=True, slots=True)
class Adopt:
    """It is this worker's. `kv_tokens` of its tokens have their KV in its blocks; with 0 it holds none."""

    snapshot: SequenceSnapshot
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class DropOrphan:
    """If nobody has asked for it, nobody will."""

    sequence_id: SequenceId


SourceCommand = Say | SendSpan | HandAway | Report
TargetCommand = Say | Expect | StopExpecting | Release | Adopt | DropOrphan

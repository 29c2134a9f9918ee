"""The contract between scheduling and execution: what one step computes, and its result.

A stage keeps its own block tables (`core.blocks.BlockBook`), so a batch contains sequences and positions but no block
ids, and every stage of a pipeline can execute the same batch. Everything else about a sequence (sampling parameters,
the prompt for penalties) is sent once, in `added`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ballast.common.record import record
from ballast.common.sampling import SamplingParams

SequenceId = int  # chosen by the leader's core, never reused within the life of a worker
IN_FLIGHT = -1  # placeholder for the token id that the previous batch samples for this sequence
PREEMPTED = "online work waits"  # `failure` of a batch of offline work that was preempted at a safepoint


class Preempted(Exception):
    """Raised for a batch that was preempted at a safepoint and therefore has no result."""


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that enters (or, after a preemption, re-enters) the running set with this batch."""

    sequence_id: SequenceId
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]  # generated before: by an earlier attempt, or before a preemption
    sampling: SamplingParams  # its seed is set


class Slice(NamedTuple):
    """One sequence's share of a step: the tokens at positions `[first_position, first_position + len(token_ids))`.

    A named tuple for speed, because one is created per token.
    """

    sequence_id: SequenceId
    first_position: int  # number of the sequence's tokens with KV in the cache
    token_ids: tuple[int, ...]  # `(IN_FLIGHT,)`: one token that is not known yet
    samples: bool  # False: a prompt chunk that is not the last one, so nothing is sampled


def row_order(slices: Sequence[Slice]) -> list[int]:
    """Indices of the slices in the order in which engines pack their rows into hidden states: decodes first, shorter
    contexts before longer ones.
    """
    return sorted(range(len(slices)), key=lambda i: (len(slices[i][2]) > 1, slices[i][1] + len(slices[i][2])))


BlockNumber = int  # number of a shareable block, the same on every stage: see `core.prefixes`
BlockKey = bytes  # digest of the tokens of such a block and of all tokens before them


@dataclass(frozen=True, slots=True)
class SwapCopy:
    """A copy of KV between a stage's own blocks and host memory, of one sequence or of retained blocks. It overlaps
    with a batch that does not write these blocks.
    """

    sequence_id: SequenceId  # 0: retained blocks, named by `numbers`
    out: bool  # to the host
    first: int  # index into the sequence's block table
    token_count: int  # tokens with KV
    host_blocks: tuple[int, ...]  # one per block of the table from `first` on; the same on every stage
    numbers: tuple[BlockNumber, ...] = ()  # retained blocks, one for each of `host_blocks`


NumberRuns = tuple[tuple[BlockNumber, int], ...]  # (first, count) of consecutive numbers


class NamedBlocks(NamedTuple):
    """Blocks of a sequence's table that are given consecutive numbers, so that they can be shared."""

    sequence_id: SequenceId
    first_block: int  # index into its table
    first_number: BlockNumber
    block_count: int


class TakenBlocks(NamedTuple):
    """Numbered blocks (a prefix hit) at the start of a new sequence's table."""

    sequence_id: SequenceId
    runs: NumberRuns


@record()
class Batch:
    """One microbatch. A stage first numbers the `named` blocks, then frees blocks of `removed` sequences and
    `forgotten` numbers, starts tables with the `taken` blocks, adds the `added` sequences, and runs the slices.
    """

    step_id: int
    removed: tuple[SequenceId, ...]
    added: tuple[NewSequence, ...]
    slices: tuple[Slice, ...]  # decodes (one token) first, then prefill chunks
    # The next three fields are set by the stages:
    quiet_s: float = 0.0  # time for which the leader had no work before this batch
    memory_is_awaited: bool = False  # requests wait for KV blocks
    failure: str = ""  # why a stage failed to run it, or empty; later stages then get it without slices
    copies: tuple[SwapCopy, ...] = ()
    named: tuple[NamedBlocks, ...] = ()
    forgotten: NumberRuns = ()
    taken: tuple[TakenBlocks, ...] = ()
    safepoint_layers: int = 0  # layers between two safepoints of a batch of offline work only; 0: not preemptible


class LaunchedStep(Protocol):
    """A batch launched on a device that executes all layers of the model."""

    def collect(self) -> "StepResult":
        """Wait for the result and return it. Called once for each batch, in the order of launch."""
        ...


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first
    prompt: "tuple[TokenLogprobs, ...]" = ()  # the prompt's logprobs, with the first generated token, if requested


@record()
class StepResult:
    """The result of a batch. `token_ids` and `logprobs` are aligned with the slices that sample."""

    step_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]  # None if not requested
    execute_s: float  # time the engine took
    copy_s: float = 0.0  # time of the copies between device and host that overlapped with it
    errors: tuple[tuple[int, str], ...] = ()  # (index into token_ids, why sampling failed); the sequence ends

"""How large the next microbatch of a pipeline is, so that as many as there are stages circulate and are alike.

A function of this kind sees all that the leader has to run. Another one, which cuts a whole backlog into parts of
equal cost, takes the same view and gives the same answer.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineView:
    """Work of all running sequences, those in flight included."""

    stage_count: int
    decode_count: int  # sequences that need one token
    prefill_count: int  # sequences that need more
    prefill_tokens: int  # which have no KV yet
    max_batch_tokens: int


@dataclass(frozen=True, slots=True)
class MicrobatchShape:
    max_decode_count: int
    max_prefill_count: int
    budget_tokens: int  # decodes and chunks together


Microbatching = Callable[[PipelineView], MicrobatchShape]


def by_token_count(view: PipelineView) -> MicrobatchShape:
    """Equal shares of the tokens for each stage. The longest wait for a place is then one trip through the pipeline.

    A sequence is in one microbatch at a time, so prompts are spread too: a part of each in one microbatch would leave
    nothing for the next. A lone prompt is not cut finer than a full batch is among the stages, as its parts cannot
    overlap.
    """
    stages = view.stage_count
    share_tokens = -(-(view.decode_count + view.prefill_tokens) // stages)
    floor_tokens = -(-view.max_batch_tokens // stages)
    return MicrobatchShape(
        max_decode_count=-(-view.decode_count // stages),
        max_prefill_count=-(-view.prefill_count // stages),
        budget_tokens=min(view.max_batch_tokens, max(share_tokens, floor_tokens)),
    )

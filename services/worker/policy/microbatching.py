"""Forms the next microbatch of a pipeline. As many microbatches as stages, or one more, are in flight and have similar
cost.

A policy sees all running sequences and picks from the ready ones. The policy in this module balances token counts, like
other engines; `policy.lookahead` balances costs.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.worker.policy.batching import PrefillView, chunk_prefills


class MicrobatchCandidate(NamedTuple):
    """A running sequence."""

    rank: int  # rank of its priority class; 0 is served first
    computed_tokens: int  # tokens with KV
    dispatched_tokens: int  # tokens with KV once the batches in flight have completed
    token_count: int  # known tokens; if equal to dispatched_tokens, the next token is being sampled
    step_id: int  # step of the last batch that it was in
    has_room: bool  # False: it needs another block, but none is free


class PipelineView(NamedTuple):
    stage_count: int
    completed_step_id: int  # later batches are in flight
    max_batch_tokens: int
    waiting_count: int  # admitted sequences that have been in no microbatch yet
    candidates: Sequence[MicrobatchCandidate]  # in order of service
    in_flight_count: int = 0  # number of microbatches; if it is at least stage_count, an additional one is requested
    max_prompt_tokens: int = sys.maxsize  # maximum of all chunks together
    lacks_room: bool = False  # True: waiting sequences lack blocks or places; False: they only wait for earlier prompts


Share = list[tuple[int, int]]  # (index of the candidate, tokens >= 1)


@dataclass(frozen=True, slots=True)
class Microbatching:
    """A method of forming microbatches. While sequences wait, `form` is called for `ahead` more microbatches than
    stages, and may return an empty share for these.
    """

    form: Callable[[PipelineView], Share]
    ahead: int = 0

    def __call__(self, view: PipelineView) -> Share:
        return self.form(view)


def _by_token_count(view: PipelineView) -> Share:
    """Give each microbatch an equal share of the tokens, so that a sequence waits at most one round of the pipeline.

    A sequence is in one microbatch at a time, so prompts are spread as well: a microbatch with a chunk of each would
    leave no prompt for the next one. A single prompt gets chunks of at least a full batch's tokens divided by the
    number of stages, because its chunks cannot overlap.
    """
    stages = view.stage_count
    decode_count = prefill_count = prefill_tokens = 0
    decodes: list[int] = []
    prefills: list[int] = []
    for index, c in enumerate(view.candidates):
        left = c.token_count - c.computed_tokens
        ready = c.step_id <= view.completed_step_id and c.has_room
        if left == 1:
            decode_count += 1
            if ready:
                decodes.append(index)
        else:
            prefill_count += 1
            prefill_tokens += left
            if ready:
                prefills.append(index)
    max_decode_count = -(-decode_count // stages)
    if len(decodes) > max_decode_count:  # longest-waiting first
        decodes = sorted(decodes, key=lambda i: view.candidates[i].step_id)[:max_decode_count]
    del prefills[-(-prefill_count // stages) :]
    share_tokens = -(-(decode_count + prefill_tokens) // stages)
    floor_tokens = -(-view.max_batch_tokens // stages)
    budget_tokens = min(view.max_batch_tokens, max(share_tokens, floor_tokens), len(decodes) + view.max_prompt_tokens)
    views = [_prefill_view(view.candidates[i]) for i in prefills]
    counts = chunk_prefills(len(decodes), views, budget_tokens)
    return [*((i, 1) for i in decodes), *((i, n) for i, n in zip(prefills, counts, strict=True) if n)]


by_token_count = Microbatching(_by_token_count)


def _prefill_view(candidate: MicrobatchCandidate) -> PrefillView:
    left = candidate.token_count - candidate.computed_tokens
    return PrefillView(candidate.rank, candidate.computed_tokens, left)

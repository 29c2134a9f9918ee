"""What the next microbatch of a pipeline is, so that as many as there are stages circulate, or one more, and are alike.

A function of this kind sees all running sequences and picks from those that are ready. Token count, below, is what
every engine has; `policy.lookahead` goes by cost.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.worker.policy.batching import PrefillView, chunk_prefills


class Candidate(NamedTuple):
    """A running sequence."""

    rank: int  # of its priority class; 0 is served first
    computed_tokens: int  # have their KV
    dispatched_tokens: int  # have it once the batches in flight have landed
    token_count: int  # that are known; as many as have departed: it waits for its next token
    step_id: int  # of the last batch that it took part in
    has_room: bool  # False: it needs a block more, and there is none


class PipelineView(NamedTuple):
    stage_count: int
    completed_step_id: int  # later batches are in flight
    max_batch_tokens: int
    waiting_count: int  # sequences that have been let into no microbatch yet
    candidates: Sequence[Candidate]  # in order of service
    in_flight_count: int = 0  # microbatches; fewer than there are stages, or one of those ahead is asked for
    max_prompt_tokens: int = sys.maxsize  # of all prompts in a microbatch
    lacks_room: bool = False  # those that wait lack blocks or places; else only prompts before them are to be computed


Share = list[tuple[int, int]]  # (index of the candidate, tokens, at least 1)


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How microbatches are formed. While sequences wait, `form` is asked for `ahead` more than there are stages; those
    it may refuse with an empty share.
    """

    form: Callable[[PipelineView], Share]
    ahead: int = 0

    def __call__(self, view: PipelineView) -> Share:
        return self.form(view)


def _by_token_count(view: PipelineView) -> Share:
    """Equal shares of the tokens for each stage. The longest wait for a place is then one trip through the pipeline.

    A sequence is in one microbatch at a time, so prompts are spread too: a part of each in one microbatch would leave
    nothing for the next. A lone prompt is not cut finer than a full batch is among the stages, as its parts cannot
    overlap.
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
    if len(decodes) > max_decode_count:  # who has waited longest goes first
        decodes = sorted(decodes, key=lambda i: view.candidates[i].step_id)[:max_decode_count]
    del prefills[-(-prefill_count // stages) :]
    share_tokens = -(-(decode_count + prefill_tokens) // stages)
    floor_tokens = -(-view.max_batch_tokens // stages)
    budget_tokens = min(view.max_batch_tokens, max(share_tokens, floor_tokens), len(decodes) + view.max_prompt_tokens)
    views = [_prefill_view(view.candidates[i]) for i in prefills]
    counts = chunk_prefills(len(decodes), views, budget_tokens)
    return [*((i, 1) for i in decodes), *((i, n) for i, n in zip(prefills, counts, strict=True) if n)]


by_token_count = Microbatching(_by_token_count)


def _prefill_view(candidate: Candidate) -> PrefillView:
    left = candidate.token_count - candidate.computed_tokens
    return PrefillView(candidate.rank, candidate.computed_tokens, left)

"""Validation of a request before it becomes a sequence."""

from dataclasses import replace

from ballast.common.sampling import SamplingParams
from services.worker.core.blocks import blocks_for
from services.worker.core.events import Submitted
from services.worker.core.limits import WorkerLimits


def fault_of(submitted: Submitted, limits: WorkerLimits, block_count: int) -> str:
    """Why this request can never run here, beginning with the field at fault; empty if it can.

    The dispatcher has validated most of this already. It is repeated because one bad token id would fail the whole
    engine.
    """
    prompt, output = submitted.prompt_token_ids, submitted.output_token_ids
    if not prompt:
        return "prompt_token_ids: must not be empty"
    if len(prompt) >= limits.max_model_len:
        return (
            f"prompt_token_ids: {len(prompt)} tokens leave no room for an answer,"
            f" the model's maximum length is {limits.max_model_len}"
        )
    for field, token_ids in (
        ("prompt_token_ids", prompt),
        ("output_token_ids", output),
        ("sampling.stop_token_ids", submitted.sampling.stop_token_ids),
        ("sampling.logit_bias", submitted.sampling.logit_bias),
        ("sampling.allowed_token_ids", submitted.sampling.allowed_token_ids),
        *(("sampling.bad_words_token_ids", ids) for ids in submitted.sampling.bad_words_token_ids),
    ):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < limits.vocab_size)
            return f"{field}: token id {wrong} is not in the vocabulary of {limits.vocab_size}"
    if (adapter := submitted.sampling.adapter) and adapter not in limits.adapters:
        return f"sampling.adapter: {adapter!r} is not loaded here"
    if submitted.sampling.seed is None and not submitted.sampling.greedy:
        return "sampling.seed: must be drawn where the request enters the cluster"
    if submitted.delivered_text_chars < 0:
        return f"delivered_text_chars: must not be negative, got {submitted.delivered_text_chars}"
    token_count = len(prompt) + len(output)
    need = blocks_for(token_count + 1, limits.block_tokens)
    if need > block_count:
        return (
            f"prompt_token_ids: {token_count} tokens and the next one need {need} KV blocks of"
            f" {limits.block_tokens} tokens, this worker has {block_count}"
        )
    return ""


def with_seed(sampling: SamplingParams) -> SamplingParams:
    """The sampling parameters with a seed, which the engine relies on; greedy requests may arrive without one."""
    return sampling if sampling.seed is not None else replace(sampling, seed=0)

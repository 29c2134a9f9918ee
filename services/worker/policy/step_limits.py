"""Default limits on sequences and tokens per step, by device and memory."""

from dataclasses import dataclass

_SEQUENCES, _TOKENS = 64, 512  # saturate a CPU
# GPUs by memory, largest first. According to its data sheet, an H100 takes a tenth of a second for this many tokens of
# an 8B model, which is how long decodes in the same step wait.
_GPUS = ((160 << 30, 512, 8192), (70 << 30, 512, 4096), (0, 256, 2048))


@dataclass(frozen=True, slots=True)
class StepLimits:
    sequences: int  # maximum number of running sequences
    tokens: int  # maximum number of tokens in a step
    queued: int  # maximum number of requests waiting in the worker


def step_limits(
    gpu_bytes: int | None, *, sequences: int | None = None, tokens: int | None = None, queued: int | None = None
) -> StepLimits:
    """Return the limits. Values other than None take precedence. `gpu_bytes`: the GPU's memory; None: a CPU."""
    default_sequences, default_tokens = _SEQUENCES, _TOKENS
    if gpu_bytes is not None:
        default_sequences, default_tokens = next(found for least, *found in _GPUS if gpu_bytes >= least)
    if sequences is None:
        sequences = default_sequences if tokens is None else min(default_sequences, tokens)
    if tokens is None:
        tokens = max(default_tokens, sequences)
    if queued is None:
        queued = _SEQUENCES if gpu_bytes is None else sequences
    return StepLimits(sequences, tokens, queued)


def limiting_factor(limits: StepLimits, kv_tokens: int, max_model_len: int) -> str:
    """Describe the limit on concurrent requests, as a sentence for the log."""
    mean = kv_tokens // limits.sequences
    step = f"a step computes at most {limits.tokens} tokens"
    if mean >= max_model_len:
        why = f"--max-num-seqs, since KV memory for {kv_tokens} tokens holds that many of the longest contexts"
        return f"{limits.sequences} requests run at once: {why}; {step}"
    rows = f"up to contexts of {mean} tokens on average --max-num-seqs, {limits.sequences}"
    return f"{rows}; above that KV memory, {kv_tokens} tokens; {step}"

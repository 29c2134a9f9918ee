"""Facts about the model that is served, equal on all workers of a cluster."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    name: str
    architecture: str
    layer_count: int
    vocab_size: int
    max_model_len: int  # prompt + generated tokens
    dtype: str
    parameter_count: int
    kv_bytes_per_token: int  # over all layers
    eos_token_ids: tuple[int, ...]

"""Facts about the model that is served, equal on all workers of a cluster."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about the model that is served."""

    name: str
    architecture: str
    layer_count: int
    vocab_size: int
    max_model_len: int  # prompt + generated tokens
    dtype: str
    parameter_count: int
    kv_bytes_per_token: int  # over all layers
    eos_token_ids: tuple[int, ...]
    # What plans are made from; empty or 0: the worker does not say. In whole extents of device memory.
    layer_parameter_bytes: tuple[int, ...] = ()
    other_parameter_bytes: int = 0  # embedding, head ...: never dropped
    block_bytes: int = 0  # of one KV block in one layer
    extent_bytes: int = 0  # memory is dealt out in multiples of this
    tensor_parallel_size: int = 1  # ranks of an instance, whose bytes are added up above

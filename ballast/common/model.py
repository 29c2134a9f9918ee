"""Facts about the served model. Workers of a cluster serve the same model, possibly on different devices."""

from dataclasses import dataclass, fields

_MEASURES = ("layer_parameter_bytes", "other_parameter_bytes", "extent_bytes")  # fields that do not affect tokens


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter served with the model."""

    name: str  # its name in requests
    revision: str  # digest of its files


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about the model that is served."""

    name: str
    architecture: str
    layer_count: int
    vocab_size: int
    max_model_len: int  # maximum of prompt and generated tokens together
    dtype: str
    parameter_count: int
    kv_bytes_per_token: int  # summed over all layers
    eos_token_ids: tuple[int, ...]
    # Sizes for planning; empty or 0 if not reported. Workers of version 0.1 reported them in extents of `extent_bytes`;
    # today they are bytes, and `extent_bytes` is 0.
    layer_parameter_bytes: tuple[int, ...] = ()
    other_parameter_bytes: int = 0  # embedding, head ...: never dropped
    block_bytes: int = 0  # size of one KV block in one layer
    extent_bytes: int = 0  # unit of memory allocation
    tensor_parallel_size: int = 1  # ranks of an instance; the sizes above are sums over them
    revision: str = ""  # digest of the checkpoint; empty if not reported
    adapters: tuple[Adapter, ...] = ()
    kv_cache_dtype: str = ""  # number format of KV; empty: dtype

    def differences(self, other: "ModelInfo") -> list[str]:
        """Names of the fields that differ in a way that affects tokens or KV.

        Parameter sizes may differ, because they depend on the device, and an unknown revision is not a difference.
        """
        names = [f.name for f in fields(self) if f.name not in _MEASURES]
        if not (self.revision and other.revision):
            names.remove("revision")
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def is_same(self, other: "ModelInfo | None") -> bool:
        return other is not None and (self is other or not self.differences(other))

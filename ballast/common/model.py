"""Facts about the model that is served. Workers of one cluster serve the same model, on devices that may differ."""

from dataclasses import dataclass, fields

_MEASURES = ("layer_parameter_bytes", "other_parameter_bytes", "extent_bytes")  # make no token another one


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that is served beside the model."""

    name: str  # what requests call it by
    revision: str  # of its files, a digest


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
    # What plans are made from; empty or 0: the worker does not say. Of a worker of version 0.1 in whole extents of its
    # memory, which `extent_bytes` tells; those of today tell the sizes themselves, and 0.
    layer_parameter_bytes: tuple[int, ...] = ()
    other_parameter_bytes: int = 0  # embedding, head ...: never dropped
    block_bytes: int = 0  # of one KV block in one layer
    extent_bytes: int = 0  # memory is dealt out in multiples of this
    tensor_parallel_size: int = 1  # ranks of an instance, whose bytes are added up above
    revision: str = ""  # of the checkpoint, a digest; empty: the worker does not say
    adapters: tuple[Adapter, ...] = ()

    def differences(self, other: "ModelInfo") -> list[str]:
        """Names of the fields in which these are two models: their tokens, or the KV of these, are not the same.

        How much memory parameters take depends on the device. A revision that is not known is no difference.
        """
        names = [f.name for f in fields(self) if f.name not in _MEASURES]
        if not (self.revision and other.revision):
            names.remove("revision")
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    def is_same(self, other: "ModelInfo | None") -> bool:
        return other is not None and (self is other or not self.differences(other))

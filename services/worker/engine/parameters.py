"""How a model's parameters are named and shaped in memory, and which checkpoint tensors each is made of.

Projections that read the same input are one matrix here, so that a layer is four matrix products. A checkpoint tensor
is thus a band of rows of a parameter.

Matrices are stored as [in, out], but for the embedding: oneDNN then multiplies a few rows a third faster, since it need
not rearrange the matrix first, unless the stored width is a power of two. Such a width is padded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from services.worker.engine.model_config import ModelConfig
from services.worker.memory.parameters import TensorSpec

EMBEDDING, HEAD = "embedding", "head"  # the parts that are no layer
_PADDING = 16  # a vector register of float32


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor and the rows that it fills."""

    tensor: str
    first_row: int
    row_count: int


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str  # inside its part
    shape: tuple[int, ...]  # as the checkpoint has it: [out] or [out, in]
    sources: tuple[Source, ...]
    transposed: bool = False
    padding: int = 0  # zeros behind the outputs

    @property
    def stored_shape(self) -> tuple[int, ...]:
        out = self.shape[0] + self.padding
        return (self.shape[1], out) if self.transposed else (out, *self.shape[1:])

    def padded_view(self, stored: torch.Tensor) -> torch.Tensor:
        """The stored tensor as [out and padding, ...]."""
        return stored.t() if self.transposed else stored

    def view(self, stored: torch.Tensor) -> torch.Tensor:
        """The stored tensor in the checkpoint's shape."""
        return self.padded_view(stored)[: self.shape[0]]


def layer_parameters(config: ModelConfig, layer: int) -> tuple[Parameter, ...]:
    prefix = f"model.layers.{layer}."
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = (("q_proj", config.query_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size))
    gate_up = (("gate_proj", inner), ("up_proj", inner))

    def parameters() -> Iterator[Parameter]:
        yield _whole("attention_norm", (hidden,), f"{prefix}input_layernorm.weight")
        yield from _stacked("qkv", hidden, f"{prefix}self_attn.", qkv, has_bias=config.has_qkv_bias)
        if config.has_qk_norm:
            yield _whole("query_norm", (config.head_dim,), f"{prefix}self_attn.q_norm.weight")
            yield _whole("key_norm", (config.head_dim,), f"{prefix}self_attn.k_norm.weight")
        yield _matrix("output", (hidden, config.query_size), f"{prefix}self_attn.o_proj.weight")
        if config.has_output_bias:
            yield _whole("output_bias", (hidden,), f"{prefix}self_attn.o_proj.bias", _padding(hidden))
        yield _whole("mlp_norm", (hidden,), f"{prefix}post_attention_layernorm.weight")
        yield from _stacked("gate_up", hidden, f"{prefix}mlp.", gate_up, has_bias=config.has_mlp_bias)
        yield _matrix("down", (hidden, inner), f"{prefix}mlp.down_proj.weight")
        if config.has_mlp_bias:
            yield _whole("down_bias", (hidden,), f"{prefix}mlp.down_proj.bias", _padding(hidden))

    return tuple(parameters())


def end_parameters(config: ModelConfig) -> dict[str, tuple[Parameter, ...]]:
    """Part -> its parameters. A tied head multiplies with the embedding part's matrix."""
    table = (config.vocab_size, config.hidden_size)
    head = [_whole("norm", (config.hidden_size,), "model.norm.weight")]
    if not config.tied_embeddings:
        head.append(_matrix("weight", table, "lm_head.weight"))
    return {EMBEDDING: (_whole("weight", table, "model.embed_tokens.weight"),), HEAD: tuple(head)}


def part_specs(parameters: tuple[Parameter, ...], dtype: torch.dtype) -> dict[str, TensorSpec]:
    return {parameter.name: TensorSpec(parameter.stored_shape, dtype) for parameter in parameters}


def parameter_count(config: ModelConfig) -> int:
    parts = [*end_parameters(config).values(), *(layer_parameters(config, i) for i in range(config.layer_count))]
    return sum(torch.Size(parameter.shape).numel() for part in parts for parameter in part)


def _whole(name: str, shape: tuple[int, ...], tensor: str, padding: int = 0) -> Parameter:
    return Parameter(name, shape, (Source(tensor, 0, shape[0]),), padding=padding)


def _matrix(name: str, shape: tuple[int, int], tensor: str) -> Parameter:
    source = Source(tensor, 0, shape[0])
    return Parameter(name, shape, (source,), transposed=True, padding=_padding(shape[0]))


def _stacked(
    name: str, columns: int, prefix: str, bands: tuple[tuple[str, int], ...], *, has_bias: bool
) -> Iterator[Parameter]:
    rows = sum(size for _, size in bands)
    padding = _padding(rows)
    yield Parameter(name, (rows, columns), _bands(prefix, bands, "weight"), transposed=True, padding=padding)
    if has_bias:
        yield Parameter(f"{name}_bias", (rows,), _bands(prefix, bands, "bias"), padding=padding)


def _bands(prefix: str, bands: tuple[tuple[str, int], ...], kind: str) -> tuple[Source, ...]:
    sources: list[Source] = []
    row = 0
    for projection, rows in bands:
        sources.append(Source(f"{prefix}{projection}.{kind}", row, rows))
        row += rows
    return tuple(sources)


def _padding(width: int) -> int:
    return _PADDING if width & (width - 1) == 0 else 0

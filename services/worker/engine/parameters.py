"""How a model's parameters are named and shaped in memory, and which checkpoint tensors each is made of.

Projections that read the same input are one matrix here, so that a layer is four matrix products. A checkpoint tensor
is thus a band of rows of a parameter.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from services.worker.engine.model_config import ModelConfig
from services.worker.memory.parameters import TensorSpec

EMBEDDING, HEAD = "embedding", "head"  # the parts that are no layer


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor and the rows that it fills."""

    tensor: str
    first_row: int
    row_count: int


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str  # inside its part
    shape: tuple[int, ...]
    sources: tuple[Source, ...]


def layer_parameters(config: ModelConfig, layer: int) -> tuple[Parameter, ...]:
    prefix = f"model.layers.{layer}."
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = (("q_proj", config.query_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size))
    gate_up = (("gate_proj", inner), ("up_proj", inner))

    def parameters() -> Iterator[Parameter]:
        yield _whole("attention_norm", (hidden,), f"{prefix}input_layernorm.weight")
        yield _stacked("qkv", hidden, f"{prefix}self_attn.", qkv)
        if config.has_qkv_bias:
            yield _stacked("qkv_bias", None, f"{prefix}self_attn.", qkv)
        if config.has_qk_norm:
            yield _whole("query_norm", (config.head_dim,), f"{prefix}self_attn.q_norm.weight")
            yield _whole("key_norm", (config.head_dim,), f"{prefix}self_attn.k_norm.weight")
        yield _whole("output", (hidden, config.query_size), f"{prefix}self_attn.o_proj.weight")
        if config.has_output_bias:
            yield _whole("output_bias", (hidden,), f"{prefix}self_attn.o_proj.bias")
        yield _whole("mlp_norm", (hidden,), f"{prefix}post_attention_layernorm.weight")
        yield _stacked("gate_up", hidden, f"{prefix}mlp.", gate_up)
        yield _whole("down", (hidden, inner), f"{prefix}mlp.down_proj.weight")
        if config.has_mlp_bias:
            yield _stacked("gate_up_bias", None, f"{prefix}mlp.", gate_up)
            yield _whole("down_bias", (hidden,), f"{prefix}mlp.down_proj.bias")

    return tuple(parameters())


def end_parameters(config: ModelConfig) -> dict[str, tuple[Parameter, ...]]:
    """Part -> its parameters. A tied head multiplies with the embedding part's matrix."""
    table = (config.vocab_size, config.hidden_size)
    head = [_whole("norm", (config.hidden_size,), "model.norm.weight")]
    if not config.tied_embeddings:
        head.append(_whole("weight", table, "lm_head.weight"))
    return {EMBEDDING: (_whole("weight", table, "model.embed_tokens.weight"),), HEAD: tuple(head)}


def part_specs(parameters: tuple[Parameter, ...], dtype: torch.dtype) -> dict[str, TensorSpec]:
    return {parameter.name: TensorSpec(parameter.shape, dtype) for parameter in parameters}


def parameter_count(config: ModelConfig) -> int:
    parts = [*end_parameters(config).values(), *(layer_parameters(config, i) for i in range(config.layer_count))]
    return sum(torch.Size(parameter.shape).numel() for part in parts for parameter in part)


def _whole(name: str, shape: tuple[int, ...], tensor: str) -> Parameter:
    return Parameter(name, shape, (Source(tensor, 0, shape[0]),))


def _stacked(name: str, columns: int | None, prefix: str, bands: tuple[tuple[str, int], ...]) -> Parameter:
    sources: list[Source] = []
    row = 0
    for projection, rows in bands:
        kind = "bias" if columns is None else "weight"
        sources.append(Source(f"{prefix}{projection}.{kind}", row, rows))
        row += rows
    return Parameter(name, (row,) if columns is None else (row, columns), tuple(sources))

"""Names, shapes and memory layouts of a model's parameters, and the checkpoint tensors that each is made of.

Projections with the same input are joined to one matrix, so that a layer has four matrix products. A checkpoint tensor
is thus a band of rows of a parameter.

On a CPU, for torch's kernels, matrices except the embedding are stored as [in, out]: oneDNN then multiplies a few rows
a third faster, since it need not reorder the matrix first. Stored widths that are a power of two would lose this
advantage and are padded. For the compiled kernels matrices are packed into panels (`native`), including an embedding
that is also the head. On a GPU they are stored as in the checkpoint.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch

from services.worker.engine.model_config import ModelConfig
from services.worker.engine.native.library import Kernels, packed_shape
from services.worker.engine.native.structs import PANEL
from services.worker.memory.parameters import TensorSpec

EMBEDDING, HEAD = "embedding", "head"  # names of the parts that are not layers
_PADDING = 16  # elements: a vector register of float32


class ParameterLayout(Enum):
    """Memory layout of a parameter."""

    ROWS = "rows"  # as in the checkpoint
    COLUMNS = "columns"  # [in, out]
    PANELS = "panels"  # see `native.library.packed_shape`


@dataclass(frozen=True, slots=True)
class Share:
    """One of `count` equal parts."""

    index: int
    count: int


WHOLE = Share(0, 1)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor and the rows of a parameter that it fills. With tensor parallelism, a rank reads only its
    share of the tensor's rows or columns.
    """

    tensor: str
    first_row: int
    row_count: int
    row_share: Share = WHOLE
    column_share: Share = WHOLE


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str  # name within its part
    shape: tuple[int, ...]  # shape in the checkpoint: [out] or [out, in]
    sources: tuple[Source, ...]  # empty: all zeros
    layout: ParameterLayout = ParameterLayout.ROWS
    padding: int = 0  # zeros after the outputs; panels pad implicitly

    def stored_shape(self, dtype: torch.dtype) -> tuple[int, ...]:
        if self.layout is ParameterLayout.PANELS:
            return packed_shape(self.shape, dtype)
        out = self.shape[0] + self.padding
        return (self.shape[1], out) if self.layout is ParameterLayout.COLUMNS else (out, *self.shape[1:])

    def padded_view(self, stored: torch.Tensor) -> torch.Tensor:
        """The stored tensor as [out and padding, ...]. Not for panels."""
        assert self.layout is not ParameterLayout.PANELS
        return stored.t() if self.layout is ParameterLayout.COLUMNS else stored

    def clear_padding(self, stored: torch.Tensor) -> None:
        """Zero the padding: checksums cover it, and memory from the pool has arbitrary contents."""
        if self.layout is not ParameterLayout.PANELS:
            self.padded_view(stored)[self.shape[0] :].zero_()
        elif self.shape[0] % PANEL:
            stored[-1].zero_()

    def write(self, stored: torch.Tensor, first_row: int, rows: torch.Tensor, kernels: Kernels | None) -> None:
        """Write a band of rows, converting to the dtype of the memory. `kernels` are required for panels."""
        if self.layout is ParameterLayout.PANELS:
            assert kernels is not None
            kernels.pack(stored, first_row, rows.to(stored.dtype))
        else:
            self.padded_view(stored)[first_row : first_row + len(rows)] = rows

    def read(self, stored: torch.Tensor, kernels: Kernels | None) -> torch.Tensor:
        """The stored parameter in the checkpoint's shape. `kernels` are required for panels."""
        if self.layout is ParameterLayout.PANELS:
            assert kernels is not None
            return kernels.unpack(stored, torch.arange(self.shape[0]), self.shape[1])
        return self.padded_view(stored)[: self.shape[0]]


def layout_for(device: torch.device | str, kernels: Kernels | None) -> ParameterLayout:
    """Layout of matrices for a device and its kernels."""
    if kernels is not None:
        return ParameterLayout.PANELS
    return ParameterLayout.COLUMNS if torch.device(device).type == "cpu" else ParameterLayout.ROWS


def layer_parameters(
    config: ModelConfig, layer: int, layout: ParameterLayout = ParameterLayout.COLUMNS
) -> tuple[Parameter, ...]:
    prefix = f"model.layers.{layer}."
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = (("q_proj", config.query_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size))
    gate_up = (("gate_proj", inner), ("up_proj", inner))
    pad, share = _PADDINGS[layout], Share(config.rank, config.rank_count)

    def matrix(name: str, shape: tuple[int, int], sources: tuple[Source, ...]) -> Parameter:
        return Parameter(name, shape, sources, layout, pad(shape[0]))

    def whole(name: str, size: int, tensor: str, padding: int = 0) -> Parameter:
        return Parameter(name, (size,), (Source(tensor, 0, size),), padding=padding)

    def projection(name: str, inputs: int, tensor: str) -> Parameter:
        """Projection to the hidden size: ranks split the inputs (columns), and the sum over ranks is the product."""
        return matrix(name, (hidden, inputs), (Source(f"{tensor}.weight", 0, hidden, column_share=share),))

    def added_once(name: str, tensor: str) -> Parameter:
        """Bias of a projection back to the hidden size: only the first rank adds it, the others have zeros."""
        bias = whole(name, hidden, tensor, pad(hidden))
        return replace(bias, sources=()) if config.rank else bias

    def stacked(name: str, inside: str, bands: tuple[tuple[str, int], ...], has_bias: bool) -> Iterator[Parameter]:
        rows = sum(size for _, size in bands)
        yield matrix(name, (rows, hidden), _bands(prefix + inside, bands, "weight", share))
        if has_bias:
            yield Parameter(f"{name}_bias", (rows,), _bands(prefix + inside, bands, "bias", share), padding=pad(rows))

    def parameters() -> Iterator[Parameter]:
        yield whole("attention_norm", hidden, f"{prefix}input_layernorm.weight")
        yield from stacked("qkv", "self_attn.", qkv, config.has_qkv_bias)
        if config.has_qk_norm:
            yield whole("query_norm", config.head_dim, f"{prefix}self_attn.q_norm.weight")
            yield whole("key_norm", config.head_dim, f"{prefix}self_attn.k_norm.weight")
        output = f"{prefix}self_attn.o_proj"
        yield projection("output", config.query_size, output)
        if config.has_output_bias:
            yield added_once("output_bias", f"{output}.bias")
        yield whole("mlp_norm", hidden, f"{prefix}post_attention_layernorm.weight")
        yield from stacked("gate_up", "mlp.", gate_up, config.has_mlp_bias)
        yield projection("down", inner, f"{prefix}mlp.down_proj")
        if config.has_mlp_bias:
            yield added_once("down_bias", f"{prefix}mlp.down_proj.bias")

    return tuple(parameters())


def end_parameters(
    config: ModelConfig, layout: ParameterLayout = ParameterLayout.COLUMNS
) -> dict[str, tuple[Parameter, ...]]:
    """Parameters of the embedding and the head, by part. A tied head uses the matrix of the embedding part."""
    shape, hidden = (config.vocab_size, config.hidden_size), config.hidden_size
    embedding = (Source("model.embed_tokens.weight", 0, shape[0]),)
    norm = Parameter("norm", (hidden,), (Source("model.norm.weight", 0, hidden),))
    if config.tied_embeddings:
        shared = layout if layout is ParameterLayout.PANELS else ParameterLayout.ROWS
        return {EMBEDDING: (Parameter("weight", shape, embedding, shared),), HEAD: (norm,)}
    head = Parameter("weight", shape, (Source("lm_head.weight", 0, shape[0]),), layout, _PADDINGS[layout](shape[0]))
    return {EMBEDDING: (Parameter("weight", shape, embedding),), HEAD: (norm, head)}


def part_specs(parameters: tuple[Parameter, ...], dtype: torch.dtype) -> dict[str, TensorSpec]:
    return {parameter.name: TensorSpec(parameter.stored_shape(dtype), dtype) for parameter in parameters}


def parameter_count(config: ModelConfig) -> int:
    parts = [*end_parameters(config).values(), *(layer_parameters(config, i) for i in range(config.layer_count))]
    return sum(torch.Size(parameter.shape).numel() for part in parts for parameter in part)


def _bands(prefix: str, bands: tuple[tuple[str, int], ...], kind: str, share: Share) -> tuple[Source, ...]:
    sources: list[Source] = []
    row = 0
    for projection, rows in bands:
        sources.append(Source(f"{prefix}{projection}.{kind}", row, rows, row_share=share))
        row += rows
    return tuple(sources)


def _padding(width: int) -> int:
    return _PADDING if width & (width - 1) == 0 else 0


def _panel_padding(width: int) -> int:
    return -width % PANEL


_PADDINGS: dict[ParameterLayout, Callable[[int], int]] = {
    ParameterLayout.ROWS: lambda _: 0,
    ParameterLayout.COLUMNS: _padding,
    ParameterLayout.PANELS: _panel_padding,
}

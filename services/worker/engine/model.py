"""The forward pass of a stage: the layers `[first, last)` of a decoder-only transformer over packed tokens.

Shapes: T packed rows, D hidden size, N query heads, K KV heads, H head dim, I size inside the MLP, V vocabulary, R rows
whose logits are computed. Weights are [out, in], with outputs possibly padded. Large products are written to buffers
that live as long as the model, because on a CPU fresh memory may cost a page fault per 4 KiB.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.worker.engine.attention import AttentionStep
from services.worker.engine.kernels import padded_rows
from services.worker.engine.lora import Lora, Product
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.operations import HeadNorms, operations_for
from services.worker.engine.parameters import EMBEDDING, HEAD, Parameter, end_parameters, layer_parameters, layout_for
from services.worker.engine.products import Linear, linear
from services.worker.memory.kv_cache import KvCache
from services.worker.memory.parameters import ParameterStore


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's parameters and its KV. The tensors are created once and stay valid through remaps."""

    kv_B2TKH: torch.Tensor
    attention_norm_D: torch.Tensor
    qkv: torch.Tensor  # [(N + 2K) * H, D]
    qkv_bias: torch.Tensor | None
    head_norms: HeadNorms | None
    output: torch.Tensor  # [D, N * H]
    output_bias: torch.Tensor | None
    mlp_norm_D: torch.Tensor
    gate_up: torch.Tensor  # [2 * I, D]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [D, I]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _AdaptedLayer:
    """LoRA updates of one layer's matrix products."""

    qkv: Product
    output: Product
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Buffers for the reserved number of rows; without a reservation, for the largest step so far."""

    qkv: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    added: torch.Tensor


class Model:
    """A model that can execute ranges of its layers, so that several stages share it.

    Not thread-safe: one step at a time.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: ParameterStore,
        kv: KvCache,
        *,
        max_model_len: int,
        sum_over_ranks: Callable[[torch.Tensor], None] | None = None,
        products: Linear = linear,
    ) -> None:
        """`sum_over_ranks` all-reduces a tensor in place over the instance's ranks; `products` multiplies matrices."""
        self._config = config
        self._sum_over_ranks = sum_over_ranks
        self._linear = products
        self._embedding_VD = parameters.part(EMBEDDING)["weight"]
        layout = layout_for(self._embedding_VD.device, None)
        head = _views(end_parameters(config, layout)[HEAD], parameters.part(HEAD))
        self._final_norm_D = head["norm"]
        self._head_VD = head.get("weight", self._embedding_VD)
        self._layers = [_layer(config, parameters, kv, i) for i in range(config.layer_count)]
        dtype, device = self._embedding_VD.dtype, self._embedding_VD.device
        self._operations = operations_for(config, max_model_len, dtype, device)
        self._buffers = self._make_buffers(rows=1)
        self._keeps_buffers = False
        self._lora: Lora | None = None
        self._adapted: list[_AdaptedLayer] = []

    def adapt(self, lora: Lora) -> None:
        """Set the adapters; `Lora.use` assigns rows to them for each step."""
        config, self._lora = self._config, lora
        for index in range(config.layer_count):
            attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
            query, kv, inner = config.query_size, config.kv_size, config.intermediate_size
            qkv = (f"{attention}q_proj", 0), (f"{attention}k_proj", query), (f"{attention}v_proj", query + kv)
            adapted = _AdaptedLayer(
                qkv=lora.product(qkv),
                output=lora.product([(f"{attention}o_proj", 0)]),
                gate_up=lora.product([(f"{mlp}gate_proj", 0), (f"{mlp}up_proj", inner)]),
                down=lora.product([(f"{mlp}down_proj", 0)]),
            )
            self._adapted.append(adapted)

    @property
    def layer_count(self) -> int:
        return len(self._layers)

    def reserve(self, rows: int) -> None:
        """Size the buffers for `rows` rows. They keep their addresses from then on, so that graphs may contain them: a
        step with more rows, of a leader with a higher limit, uses buffers of its own.
        """
        self._buffers, self._keeps_buffers = self._buffers_for(rows), True

    def embed(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, D] of the tokens, in fresh memory. First stage only."""
        return self._embedding_VD.index_select(0, token_ids_T)

    def run_layers(
        self,
        hidden_TD: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionStep,
        *,
        first_layer: int,
        last_layer: int,
    ) -> torch.Tensor:
        """Apply the layers `[first_layer, last_layer)`. The result may or may not share memory with `hidden_TD`."""
        config, rows = self._config, hidden_TD.shape[0]
        hidden_TD = self._pad(hidden_TD)
        padded = hidden_TD.shape[0]
        buffers, operations = self._buffers_for(padded), self._operations
        if not self._keeps_buffers:
            self._buffers = buffers
        out_TD = buffers.added[:padded]
        buffers.attended[rows:padded].zero_()  # attention does not write padding rows; keep them finite
        rotation = operations.rotation(positions_T)
        added_TD: torch.Tensor | None = None
        lora = self._lora
        for index, layer in enumerate(self._layers[first_layer:last_layer], first_layer):
            normed_TD = operations.norm(hidden_TD, added_TD, layer.attention_norm_D)
            qkv = self._linear(normed_TD, layer.qkv, layer.qkv_bias, buffers.qkv[:padded])[:rows]
            if lora is not None:
                lora.add_to(self._adapted[index].qkv, normed_TD, qkv)
            operations.attend(
                layer.kv_B2TKH,
                qkv[:, : config.query_size + 2 * config.kv_size].view(rows, -1, config.head_dim),
                layer.head_norms,
                rotation,
                attention,
                buffers.attended[:rows].view(rows, config.head_count, config.head_dim),
            )
            adapted = self._adapted[index] if lora is not None else None
            added_TD = self._project(
                buffers.attended[:padded], layer.output, layer.output_bias, adapted and adapted.output, out_TD
            )
            normed_TD = operations.norm(hidden_TD, added_TD, layer.mlp_norm_D)
            gate_up = self._linear(normed_TD, layer.gate_up, layer.gate_up_bias, buffers.gate_up[:padded])
            if lora is not None:
                lora.add_to(self._adapted[index].gate_up, normed_TD, gate_up)
            activated_TI = operations.activate(gate_up)
            added_TD = self._project(activated_TI, layer.down, layer.down_bias, adapted and adapted.down, out_TD)
        return hidden_TD[:rows] if added_TD is None else hidden_TD.add_(added_TD)[:rows]

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] from hidden states after the last layer. Last stage only."""
        normed_RD = self._operations.norm(self._pad(hidden_RD), None, self._final_norm_D)
        logits = self._linear(normed_RD, self._head_VD, None, normed_RD.new_empty(0))
        return logits[: hidden_RD.shape[0], : self._config.vocab_size]

    def _project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapted: Product | None,
        out_TD: torch.Tensor,
    ) -> torch.Tensor:
        """Output projection to the hidden size."""
        projected = self._linear(x, weight, bias, out_TD)
        if self._lora is not None and adapted is not None:
            self._lora.add_to(adapted, x, projected)
        if self._sum_over_ranks is not None:
            self._sum_over_ranks(projected)
        return projected[:, : self._config.hidden_size]

    def _pad(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Pad with rows of zeros if that avoids compiling kernels for another number of rows."""
        added = padded_rows(hidden_TD.shape[0]) - hidden_TD.shape[0] if hidden_TD.device.type == "cpu" else 0
        return F.pad(hidden_TD, (0, 0, 0, added)) if added else hidden_TD

    def _buffers_for(self, rows: int) -> _Buffers:
        return self._buffers if rows <= self._buffers.qkv.shape[0] else self._make_buffers(rows)

    def _make_buffers(self, rows: int) -> _Buffers:
        like, layer = self._embedding_VD, self._layers[0]
        return _Buffers(
            qkv=like.new_empty(rows, layer.qkv.shape[0]),
            attended=like.new_empty(rows, self._config.query_size),
            gate_up=like.new_empty(rows, layer.gate_up.shape[0]),
            added=like.new_empty(rows, layer.down.shape[0]),
        )


def _views(parameters: Iterable[Parameter], stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {parameter.name: parameter.padded_view(stored[parameter.name]) for parameter in parameters}


def _layer(config: ModelConfig, parameters: ParameterStore, kv: KvCache, index: int) -> _Layer:
    layout = layout_for(kv.layer(index).device, None)
    named = _views(layer_parameters(config, index, layout), parameters.layer(index))
    return _Layer(
        kv_B2TKH=kv.layer(index),
        attention_norm_D=named["attention_norm"],
        qkv=named["qkv"],
        qkv_bias=named.get("qkv_bias"),
        head_norms=HeadNorms(named["query_norm"], named["key_norm"]) if config.has_qk_norm else None,
        output=named["output"],
        output_bias=named.get("output_bias"),
        mlp_norm_D=named["mlp_norm"],
        gate_up=named["gate_up"],
        gate_up_bias=named.get("gate_up_bias"),
        down=named["down"],
        down_bias=named.get("down_bias"),
    )

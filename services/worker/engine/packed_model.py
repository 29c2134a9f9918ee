"""The forward pass with the compiled kernels, over matrices packed for them. Shapes as in `model`.

One call computes all layers of a step without the GIL. A row is computed the same way whatever the rest of the batch:
its bits depend neither on the batch nor on the chunk sizes of a prompt.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from services.worker.engine.attention import AttentionStep
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.native import structs
from services.worker.engine.native.library import Kernels, dtype_code, kv_dtype_code
from services.worker.engine.packed_attention import PagedAttentionStep
from services.worker.engine.parameters import EMBEDDING, HEAD
from services.worker.engine.rotary import rotary_table
from services.worker.memory.kv_cache import KvCache
from services.worker.memory.parameters import ParameterStore


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory for as many rows as the largest step so far."""

    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor


class PackedModel:
    """Counterpart of `Model`: executes ranges of layers, one step at a time."""

    def __init__(
        self, config: ModelConfig, parameters: ParameterStore, kv: KvCache, kernels: Kernels, *, max_model_len: int
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._embedding = parameters.part(EMBEDDING)["weight"]
        head = parameters.part(HEAD)
        self._final_norm_D = head["norm"]
        self._head = head.get("weight", self._embedding)
        self._dtype = self._embedding.dtype
        self._rotary_P2H = rotary_table(
            config.rope, config.head_dim, max_model_len, self._dtype, torch.device("cpu")
        ).contiguous()
        self._layers = (structs.Layer * config.layer_count)(
            *(_layer(parameters.layer(i), kv.layer(i)) for i in range(config.layer_count))
        )
        self._model = structs.Model(
            dtype=dtype_code(self._dtype),
            kv_dtype=kv_dtype_code(kv.shape.dtype),
            hidden=config.hidden_size,
            heads=config.head_count,
            kv_heads=config.kv_head_count,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            block_tokens=kv.shape.block_tokens,
            eps=config.rms_norm_eps,
            rotary=self._rotary_P2H.data_ptr(),
            layers=ctypes.addressof(self._layers),
        )
        self._buffers = self._make_buffers(rows=1)
        self._logits = self._make_logits(0)

    @property
    def layer_count(self) -> int:
        return len(self._layers)

    def reserve(self, rows: int) -> None:
        """Size the buffers for `rows` rows. They are reallocated only if a step has more."""
        if rows > self._buffers.qkv.shape[0]:
            self._buffers = self._make_buffers(rows)

    def embed(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, D] of the tokens, in fresh memory. First stage only."""
        if self._head is self._embedding:  # packed, since it is also the head
            return self._kernels.unpack(self._embedding, token_ids_T, self._config.hidden_size)
        return self._embedding.index_select(0, token_ids_T)

    def run_layers(
        self,
        hidden_TD: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionStep,
        *,
        first_layer: int,
        last_layer: int,
    ) -> torch.Tensor:
        """Apply the layers `[first_layer, last_layer)`; `attention` is a `PagedAttentionStep`.

        Writes over `hidden_TD` if it is dense.
        """
        assert isinstance(attention, PagedAttentionStep)
        hidden_TD = hidden_TD.contiguous()
        positions_T = positions_T.contiguous()
        rows = hidden_TD.shape[0]
        self.reserve(rows)
        buffers = self._buffers
        step = structs.Step(
            rows=rows,
            slots=attention.slots,
            spans=attention.spans,
            hidden=hidden_TD.data_ptr(),
            positions=positions_T.data_ptr(),
            normed=buffers.normed.data_ptr(),
            qkv=buffers.qkv.data_ptr(),
            attended=buffers.attended.data_ptr(),
            gate_up=buffers.gate_up.data_ptr(),
        )
        self._kernels.run_layers(self._model, step, first_layer, last_layer)
        return hidden_TD

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits [R, V], in float32 for bfloat16 models; valid until the next call. Last stage only."""
        hidden_RD = hidden_RD.contiguous()
        rows = hidden_RD.shape[0]
        if rows > self._logits.shape[0]:
            self._logits = self._make_logits(rows)
        normed_RD = self._kernels.rms_norm(
            hidden_RD, self._final_norm_D, torch.empty_like(hidden_RD), self._config.rms_norm_eps
        )
        return self._kernels.linear(normed_RD, self._head, self._logits[:rows])

    def _make_logits(self, rows: int) -> torch.Tensor:
        wide = torch.float64 if self._dtype == torch.float64 else torch.float32
        return torch.empty(rows, self._config.vocab_size, dtype=wide)

    def _make_buffers(self, rows: int) -> _Buffers:
        config = self._config
        widths = (
            config.hidden_size,
            config.query_size + 2 * config.kv_size,
            config.query_size,
            2 * config.intermediate_size,
        )
        return _Buffers(*(torch.empty(rows, width, dtype=self._dtype) for width in widths))


def _layer(tensors: Mapping[str, torch.Tensor], kv_B2TKH: torch.Tensor) -> structs.Layer:
    return structs.Layer(kv=kv_B2TKH.data_ptr(), **{name: tensor.data_ptr() for name, tensor in tensors.items()})

"""Operations between the matrix products of a layer: norms, residuals, rotary embedding, KV cache, activation.

Shapes as in `model`. Both implementations round at the same points; sums may differ in the last bit.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ballast.common.extras import lacking
from services.worker.engine.attention import AttentionStep
from services.worker.engine.attention_cuda import GpuAttentionStep, for_kernels, power_of_two
from services.worker.engine.model_config import ModelConfig
from services.worker.engine.rotary import rotary_table

_TILE_HEADS = 8
_TILE_ELEMENTS = 1024
_ELEMENTS_PER_WARP = 512  # elements of a normalised row: 16 in the registers of each thread


@dataclass(frozen=True, slots=True)
class HeadNorms:
    query_H: torch.Tensor
    key_H: torch.Tensor


class Operations(Protocol):
    def norm(self, hidden_TD: torch.Tensor, added_TD: torch.Tensor | None, weight_D: torch.Tensor) -> torch.Tensor:
        """Add `added_TD`, if not None, to the hidden states in place and return their RMS norm."""
        ...

    def rotation(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Position data for `attend`, computed once for all layers."""
        ...

    def attend(
        self,
        kv_B2TKH: torch.Tensor,
        qkv: torch.Tensor,  # [T, N + 2K, H]; may be overwritten
        norms: HeadNorms | None,
        rotation: torch.Tensor,
        attention: AttentionStep,
        out_TNH: torch.Tensor,
    ) -> None:
        """Rotate queries and keys, write keys and values to the cache, and attend."""
        ...

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU(gate) * up, [T, I], from [T, 2I and padding], which may be overwritten."""
        ...


class TorchOperations:
    """Operations with torch, on any device and in any dtype."""

    def __init__(self, config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._rotary_P2H = rotary_table(config.rope, config.head_dim, max_model_len, dtype, device)
        self._rms_norm = _fused_rms_norm if dtype == torch.float32 else _reference_rms_norm

    def norm(self, hidden_TD: torch.Tensor, added_TD: torch.Tensor | None, weight_D: torch.Tensor) -> torch.Tensor:
        if added_TD is not None:
            hidden_TD.add_(added_TD)
        return self._rms_norm(hidden_TD, weight_D, self._config.rms_norm_eps)

    def rotation(self, positions_T: torch.Tensor) -> torch.Tensor:
        return self._rotary_P2H.index_select(0, positions_T)

    def attend(
        self,
        kv_B2TKH: torch.Tensor,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        rotation: torch.Tensor,
        attention: AttentionStep,
        out_TNH: torch.Tensor,
    ) -> None:
        heads, eps = out_TNH.shape[1], self._config.rms_norm_eps
        rotating = (heads + qkv.shape[1]) // 2
        qk, v_TKH = qkv[:, :rotating], qkv[:, rotating:]
        if norms is not None:
            q_TNH, k_TKH = qk[:, :heads], qk[:, heads:]
            q_TNH.copy_(self._rms_norm(q_TNH, norms.query_H, eps))
            k_TKH.copy_(self._rms_norm(k_TKH, norms.key_H, eps))
        cos_T1H, sin_T1H = rotation[:, :1], rotation[:, 1:]
        rotated = torch.addcmul(qk * cos_T1H, qk.roll(qk.shape[2] // 2, -1), sin_T1H)
        attention.run(kv_B2TKH, rotated[:, :heads], rotated[:, heads:], v_TKH, out_TNH)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        inner = self._config.intermediate_size
        return F.silu(gate_up[:, :inner], inplace=True).mul_(gate_up[:, inner : 2 * inner])


class FusedOperations:
    """Operations with Triton on a GPU: one launch per norm with its residual, for rotation with the KV write, and for
    the activation.
    """

    def __init__(self, config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError if triton is not installed."""
        try:
            self._kernels: Any = importlib.import_module("services.worker.engine.fused_kernels")
        except ImportError as error:
            raise lacking("device cuda", "triton", "cuda") from error
        self._eps = config.rms_norm_eps
        self._rotary_P2H = rotary_table(config.rope, config.head_dim, max_model_len, dtype, device)

    def norm(self, hidden_TD: torch.Tensor, added_TD: torch.Tensor | None, weight_D: torch.Tensor) -> torch.Tensor:
        rows, size = hidden_TD.shape
        normed_TD = hidden_TD.new_empty(rows, size)
        added = hidden_TD if added_TD is None else added_TD
        self._kernels.add_and_norm[(rows,)](
            normed_TD,
            hidden_TD,
            added,
            weight_D,
            hidden_TD.stride(0),
            added.stride(0),
            self._eps,
            **norm_constants(size, has_added=added_TD is not None),
        )
        return normed_TD

    def rotation(self, positions_T: torch.Tensor) -> torch.Tensor:
        return positions_T

    def attend(
        self,
        kv_B2TKH: torch.Tensor,
        qkv: torch.Tensor,
        norms: HeadNorms | None,
        rotation: torch.Tensor,
        attention: AttentionStep,
        out_TNH: torch.Tensor,
    ) -> None:
        assert isinstance(attention, GpuAttentionStep)
        heads = out_TNH.shape[1]
        self._kernels.rotate_and_write[(qkv.shape[0], -(-qkv.shape[1] // _TILE_HEADS))](
            qkv,
            for_kernels(kv_B2TKH)[attention.base_block :],
            self._rotary_P2H,
            rotation,
            attention.k_rows_T,
            self._rotary_P2H if norms is None else norms.query_H,
            self._rotary_P2H if norms is None else norms.key_H,
            qkv.stride(0),
            self._eps,
            attention.base_block,
            **rotation_constants(heads, *kv_B2TKH.shape[2:], has_norm=norms is not None),
        )
        attention.attend(kv_B2TKH, qkv[:, :heads], out_TNH)

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        inner = gate_up.shape[1] // 2
        grid = (gate_up.shape[0], -(-inner // _TILE_ELEMENTS))
        self._kernels.activate[grid](gate_up, gate_up.stride(0), **activation_constants(inner))
        return gate_up[:, :inner]


def norm_constants(size: int, *, has_added: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel: one variant with and one without `added_TD`."""
    padded = power_of_two(size)
    warps = min(16, max(1, padded // _ELEMENTS_PER_WARP))
    return {"SIZE": size, "SIZE_PAD": padded, "HAS_ADDED": has_added, "num_warps": warps}


def rotation_constants(
    heads: int, block_tokens: int, kv_heads: int, head_dim: int, *, has_norm: bool
) -> dict[str, Any]:
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": head_dim // 2,
        "HALF_PAD": power_of_two(head_dim // 2),
        "BLOCK_TOKENS": block_tokens,
        "TILE_HEADS": _TILE_HEADS,
        "HAS_NORM": has_norm,
        "num_warps": max(1, head_dim // 128),
    }


def activation_constants(inner: int) -> dict[str, Any]:
    return {"SIZE": inner, "TILE": _TILE_ELEMENTS}


def operations_for(config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> Operations:
    kind = FusedOperations if device.type == "cuda" else TorchOperations
    return kind(config, max_model_len, dtype, device)


def _fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _reference_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm with the reference's rounding: computed in float32 even for float64, converted before multiplying the
    weight.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)

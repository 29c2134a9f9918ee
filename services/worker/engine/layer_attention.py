"""Attention that differs between layers: windows, scales, soft caps, sinks, keys and values of different widths.

The kernels of `attention`, `packed_attention` and `attention_cuda` compute plain attention. They run a layer that is
plain, or equivalent to plain because no context exceeds its window; torch computes all other layers. Shapes as in
`attention`; E elements per block, L head dim of the values. In a block all keys precede all values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from ballast.service.logs import get_logger
from services.worker.engine.attention import AttentionStep
from services.worker.engine.kv_dtype import converted
from services.worker.engine.packed_attention import PagedAttention
from services.worker.engine.packing import Ints, PackedChunk, PackedStep
from services.worker.engine.upload import upload

_SCORES_BYTES = 64 << 20  # limit for the scores in memory at once
_BUCKET_BYTES = 4 << 20  # limit for K and V gathered at once on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Kind of attention of a layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float  # factor on the product of a query and a stored key
    window: int | None = None  # number of tokens visible to a token, itself included
    chunk: int | None = None  # size of the chunks of chunked attention: a token sees only tokens of its own chunk
    soft_cap: float | None = None
    has_sinks: bool = False
    key_scale: float = 1.0  # keys are divided by it when they are stored
    value_scale: float = 1.0  # values are divided by it when they are stored; outputs are multiplied by it

    @property
    def token_elements(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def extras(self) -> tuple[str, ...]:
        """Features that kernels for plain attention lack."""
        named = {
            "a window": self.window,
            "chunks": self.chunk,
            "a soft cap": self.soft_cap,
            "sinks": self.has_sinks,
            "keys and values of different widths": self.key_dim != self.value_dim,
        }
        return tuple(name for name, there in named.items() if there)

    def first_seen(self, positions: Ints) -> Ints:
        """First visible position for each of `positions`."""
        if self.chunk is not None:
            return positions // self.chunk * self.chunk
        return np.maximum(0, positions + 1 - self.window) if self.window is not None else np.zeros_like(positions)

    def sees_all(self, longest: int) -> bool:
        """True if every token sees its whole context, for contexts of up to `longest` tokens."""
        return longest <= min(self.window or longest, self.chunk or longest)


class WholeSteps(Protocol):
    """Attention backend for layers of one kind."""

    def prepare(self, step: PackedStep) -> AttentionStep: ...


class LayerAttention:
    """An `AttentionBackend` for layers of different kinds."""

    def __init__(self, kinds: Sequence[LayerKind], slot_elements: int, fast: WholeSteps | None) -> None:
        """`slot_elements`: elements per token in every layer's cache, sized for the largest layer. `fast` computes the
        layers that use all elements of a slot, with keys and values of equal width, no soft cap or sinks, and a scale
        of 1 / sqrt(head dim).
        """
        self.kinds = tuple(kinds)
        self._fast = fast
        self._suits = [
            fast is not None
            and kind.token_elements == slot_elements
            and kind.key_dim == kind.value_dim
            and kind.soft_cap is None
            and not kind.has_sinks
            for kind in kinds
        ]
        name = type(fast).__name__ if fast is not None else "none"
        slow = [kind for kind, suits in zip(kinds, self._suits, strict=True) if not suits]
        others = sorted({extra for kind in slow for extra in kind.extras})
        get_logger().info(
            "attention of each layer",
            kernels=name,
            layers=sum(self._suits),
            by_torch=len(slow),
            because=", ".join(others) or None,
        )

    def prepare(self, step: PackedStep) -> "LayerAttentionStep":
        return LayerAttentionStep(self.kinds, self._suits, self._fast, step)


class LayerAttentionStep:
    """Attention of one step in all layers. State for particular kinds of layers is prepared on first use."""

    def __init__(
        self, kinds: Sequence[LayerKind], suits: Sequence[bool], fast: WholeSteps | None, step: PackedStep
    ) -> None:
        self._kinds, self._suits, self._fast, self._step = kinds, suits, fast, step
        ends = [int(step.decode_contexts_S[-1])] if step.decode_count else []
        self._longest = max([*ends, *(chunk.context_tokens for chunk in step.chunks)])
        self._whole: AttentionStep | None = None
        self._windowed: dict[tuple[int | None, int | None], AttentionStep] = {}
        self._by_torch: _TorchStep | None = None

    def attend(
        self,
        layer: int,
        kv_B2TKH: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKL: torch.Tensor,
        out_TNL: torch.Tensor,
        sinks_N: torch.Tensor | None = None,
    ) -> None:
        """Like `AttentionStep.run`, for a given layer."""
        kind = self._kinds[layer]
        if (kind.key_scale, kind.value_scale) != (1.0, 1.0):
            k_TKH, v_TKL = k_TKH / kind.key_scale, v_TKL / kind.value_scale
        self._attend(layer, kv_B2TKH, q_TNH, k_TKH, v_TKL, out_TNL, sinks_N)
        if kind.value_scale != 1.0:
            out_TNL.mul_(kind.value_scale)

    def _attend(
        self,
        layer: int,
        kv_B2TKH: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKL: torch.Tensor,
        out_TNL: torch.Tensor,
        sinks_N: torch.Tensor | None,
    ) -> None:
        kind = self._kinds[layer]
        fast = self._fast_step(kind) if self._suits[layer] else None
        if fast is None:
            if self._by_torch is None:
                self._by_torch = _TorchStep(self._step, q_TNH.device)
            self._by_torch.run(kind, kv_B2TKH.view(kv_B2TKH.shape[0], -1), q_TNH, k_TKH, v_TKL, out_TNL, sinks_N)
            return
        factor = kind.scale * math.sqrt(kind.key_dim)
        scaled_TNH = q_TNH if math.isclose(factor, 1.0, rel_tol=1e-9) else q_TNH * factor
        if scaled_TNH.stride(-1) != 1 or scaled_TNH.stride(-2) != kind.key_dim:
            scaled_TNH = scaled_TNH.contiguous()
        block_tokens = self._step.block_tokens
        kv_B2TKH = kv_B2TKH.view(-1, 2, block_tokens, kind.kv_heads, kind.key_dim)
        fast.run(kv_B2TKH, scaled_TNH, k_TKH.contiguous(), v_TKL.contiguous(), out_TNL)

    def run(
        self,
        kv_B2TKH: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        out_TNH: torch.Tensor,
    ) -> None:
        """Like `attend`, for the first layer."""
        self.attend(0, kv_B2TKH, q_TNH, k_TKH, v_TKH, out_TNH)

    def _fast_step(self, kind: LayerKind) -> AttentionStep | None:
        assert self._fast is not None
        if kind.sees_all(self._longest):
            if self._whole is None:
                self._whole = self._fast.prepare(self._step)
            return self._whole
        if not isinstance(self._fast, PagedAttention):
            return None
        key = (kind.window, kind.chunk)
        if key not in self._windowed:
            self._windowed[key] = self._fast.prepare(self._step, kind.first_seen)
        return self._windowed[key]


class _TorchStep:
    """Computes any kind of attention with torch on any device: gathers whole blocks and masks invisible tokens."""

    def __init__(self, step: PackedStep, device: torch.device) -> None:
        self._step, self._device = step, device
        size = step.block_tokens
        self._blocks_T, self._offsets_T = upload([step.slots_T // size, step.slots_T % size], device)

    def run(
        self,
        kind: LayerKind,
        kv_BE: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKL: torch.Tensor,
        out_TNL: torch.Tensor,
        sinks_N: torch.Tensor | None,
    ) -> None:
        size, heads = self._step.block_tokens, kind.kv_heads
        middle, end = size * heads * kind.key_dim, size * kind.token_elements
        keys_BX, values_BX = kv_BE[:, :middle], kv_BE[:, middle:end]
        keys_BX.unflatten(1, (size, heads, kind.key_dim)).index_put_(
            (self._blocks_T, self._offsets_T), converted(k_TKH, kv_BE.dtype)
        )
        values_BX.unflatten(1, (size, heads, kind.value_dim)).index_put_(
            (self._blocks_T, self._offsets_T), converted(v_TKL, kv_BE.dtype)
        )
        for first, last in self._buckets(kind, kv_BE.element_size()):
            positions = self._step.decode_contexts_S[first:last] - 1
            blocks_SW = self._step.decode_blocks_SW[first:last]
            rows_S1NH, out = q_TNH[first:last, None], out_TNL[first:last, None]
            self._attend(kind, keys_BX, values_BX, blocks_SW, positions[:, None], rows_S1NH, out, sinks_N)
        for chunk in self._step.chunks:
            for part in self._parts(chunk, q_TNH):
                rows = slice(chunk.first_row + part.start, chunk.first_row + part.stop)
                positions = chunk.positions[None, part]
                out = out_TNL[None, rows]
                self._attend(kind, keys_BX, values_BX, chunk.blocks[None], positions, q_TNH[None, rows], out, sinks_N)

    def _buckets(self, kind: LayerKind, element_bytes: int) -> list[tuple[int, int]]:
        """Ranges of decodes gathered together, limited in size and in padding. Decodes are sorted by ascending context
        length; the bucket of the longest ones is first.
        """
        contexts_S = self._step.decode_contexts_S
        found: list[tuple[int, int]] = []
        last = len(contexts_S)
        while last > 0:
            tokens = int(contexts_S[last - 1])
            room = _BUCKET_BYTES // (tokens * kind.token_elements * element_bytes)
            if self._device.type != "cpu":
                room = last
            first = max(last - max(1, room), int(np.searchsorted(contexts_S, tokens * 3 // 4)))
            found.append((min(first, last - 1), last))
            last = found[-1][0]
        return found

    def _parts(self, chunk: PackedChunk, q_TNH: torch.Tensor) -> list[slice]:
        """Split a chunk's rows so that the scores of a part stay below the limit."""
        per_row = chunk.context_tokens * q_TNH.shape[1] * 4
        rows = max(1, _SCORES_BYTES // per_row)
        return [slice(at, min(at + rows, chunk.row_count)) for at in range(0, chunk.row_count, rows)]

    def _attend(
        self,
        kind: LayerKind,
        keys_BX: torch.Tensor,
        values_BX: torch.Tensor,
        blocks_SW: Ints,
        positions_SR: Ints,
        q_SRNH: torch.Tensor,
        out_SRNL: torch.Tensor,
        sinks_N: torch.Tensor | None,
    ) -> None:
        """Attention of R rows of each of S sequences."""
        size, (count, rows) = self._step.block_tokens, positions_SR.shape
        seen_SR = kind.first_seen(positions_SR)
        first_block, end_block = int(seen_SR.min()) // size, int(positions_SR.max()) // size + 1
        context = np.arange(first_block * size, end_block * size)
        hidden_SRC = (context > positions_SR[..., None]) | (context < seen_SR[..., None])
        unowned_SC = context > positions_SR.max(1)[:, None]
        blocks, hidden_SRC, unowned_SC = upload(
            [blocks_SW[:, first_block:end_block].reshape(-1), hidden_SRC, unowned_SC], self._device
        )
        heads, groups = kind.kv_heads, q_SRNH.shape[2] // kind.kv_heads
        keys_SKCH, values_SKCL = (
            cache_BX.index_select(0, blocks).to(q_SRNH.dtype).view(count, -1, heads, width).transpose(1, 2)
            for cache_BX, width in ((keys_BX, kind.key_dim), (values_BX, kind.value_dim))
        )
        # A weight of zero does not mask NaN in slots that do not belong to the sequence.
        keys_SKCH.masked_fill_(unowned_SC[:, None, :, None], 0.0)
        values_SKCL.masked_fill_(unowned_SC[:, None, :, None], 0.0)
        # Group the queries by KV head, so that K and V are not repeated.
        q_SKXH = q_SRNH.unflatten(2, (heads, groups)).permute(0, 2, 3, 1, 4).reshape(count, heads, groups * rows, -1)
        hidden_S1XC = hidden_SRC[:, None, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
        if kind.soft_cap is None and sinks_N is None:
            attended = F.scaled_dot_product_attention(
                q_SKXH, keys_SKCH, values_SKCL, attn_mask=~hidden_S1XC, scale=kind.scale
            )
        else:
            scores = torch.matmul(q_SKXH * kind.scale, keys_SKCH.transpose(2, 3))
            if kind.soft_cap is not None:
                scores = torch.tanh(scores / kind.soft_cap) * kind.soft_cap
            scores = scores.masked_fill(hidden_S1XC, -math.inf)
            if sinks_N is not None:
                sinks = sinks_N.to(scores.dtype).view(1, heads, groups, 1, 1)
                sinks = sinks.expand(count, -1, -1, rows, -1).reshape(count, heads, -1, 1)
                scores = torch.cat([scores, sinks], -1)
            wide = torch.promote_types(scores.dtype, torch.float32)
            weights = torch.softmax(scores, -1, dtype=wide).to(values_SKCL.dtype)
            attended = torch.matmul(weights[..., : values_SKCL.shape[2]], values_SKCL)
        out_SRNL.unflatten(2, (heads, groups)).copy_(attended.unflatten(2, (groups, rows)).permute(0, 3, 1, 2, 4))

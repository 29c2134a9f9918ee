"""Attention over the paged KV cache: the interface, and the implementation for CPUs.

Shapes: T packed rows, S sequences that compute one token, N query heads, K KV heads, G = N / K, H head dim, B blocks, C
context tokens. The cache of a layer is `kv_B2TKH`: `[:, 0]` holds keys, `[:, 1]` values, and T is the number of tokens
per block there.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from services.worker.engine.kv_dtype import rounded, write_rows
from services.worker.engine.packing import Ints, PackedChunk, PackedStep

# Size of the gathered K and V of one bucket: small enough to stay in the processor's cache until attention reads them.
_BUCKET_BYTES = 4 << 20


class AttentionStep(Protocol):
    """Attention of one step, prepared once and run in every layer."""

    def run(
        self,
        kv_B2TKH: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        out_TNH: torch.Tensor,
    ) -> None:
        """Write K and V of the rows to the cache, then fill `out_TNH`. The head dimension must be contiguous; heads may
        be strided.
        """
        ...


class AttentionBackend(Protocol):
    def prepare(self, step: PackedStep) -> AttentionStep: ...


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket of decodes, `[first, last)`, padded to its longest context."""

    first: int
    last: int
    block_count: int  # blocks of each sequence, after padding
    planes: torch.Tensor  # the cache viewed as [2B, T*K*H]: first the keys of all blocks, then the values
    mask_S11C: torch.Tensor | None
    unowned: torch.Tensor | None  # indices of the gathered K and V past the sequences' ends


@dataclass(frozen=True, slots=True)
class _PreparedChunk:
    chunk: PackedChunk
    planes: torch.Tensor | None  # None: the chunk has no prefix and attends to its own K and V only
    mask_TC: torch.Tensor | None


class CpuAttention:
    """Gathers whole blocks and runs SDPA on grouped queries.

    Decodes are gathered bucket by bucket into a small buffer. The first chunk of a prompt needs no gather.
    """

    def __init__(self, head_count: int, kv_head_count: int, head_dim: int, dtype: torch.dtype) -> None:
        self._groups = head_count // kv_head_count
        self._kv_head_count = kv_head_count
        self._head_dim = head_dim
        self._dtype = dtype
        self._gathered = torch.empty(0, dtype=dtype)

    def prepare(self, step: PackedStep) -> "CpuAttentionStep":
        row_elements = step.block_tokens * self._kv_head_count * self._head_dim
        buckets = [self._bucket(step, first, last) for first, last in self._bucket_bounds(step, row_elements)]
        chunks = [self._prepare_chunk(chunk, step.block_tokens) for chunk in step.chunks]
        plane_counts = [b.planes.numel() for b in buckets]
        plane_counts += [c.planes.numel() for c in chunks if c.planes is not None]
        needed = max(plane_counts, default=0) * row_elements
        if self._gathered.numel() < needed:
            self._gathered = torch.empty(needed, dtype=self._dtype)
        k_planes = step.slots_T // step.block_tokens * step.block_tokens + step.slots_T
        return CpuAttentionStep(
            kv_head_count=self._kv_head_count,
            groups=self._groups,
            block_tokens=step.block_tokens,
            k_rows_T=torch.from_numpy(k_planes),
            v_rows_T=torch.from_numpy(k_planes + step.block_tokens),
            buckets=buckets,
            chunks=chunks,
            gathered=self._gathered,
        )

    def _bucket_bounds(self, step: PackedStep, row_elements: int) -> Iterator[tuple[int, int]]:
        """Split the decodes, sorted by ascending length, into buckets, starting with the longest."""
        block_counts = -(-step.decode_contexts_S // step.block_tokens)
        block_bytes = 2 * row_elements * self._dtype.itemsize
        last = step.decode_count
        while last > 0:
            longest = int(block_counts[last - 1])
            room = max(1, _BUCKET_BYTES // (longest * block_bytes))
            # Bound the padding to a quarter of the bucket.
            first = max(last - room, int(np.searchsorted(block_counts, longest * 3 // 4)))
            yield min(first, last - 1), last
            last = min(first, last - 1)

    def _bucket(self, step: PackedStep, first: int, last: int) -> _Bucket:
        contexts_S = step.decode_contexts_S[first:last]
        block_count = -(-int(contexts_S[-1]) // step.block_tokens)
        padded_tokens = block_count * step.block_tokens
        mask_S11C = unowned = None
        if int(contexts_S[0]) < padded_tokens:
            hidden_SC = np.arange(padded_tokens) >= contexts_S[:, None]
            mask_S11C = self._mask(hidden_SC)[:, None, None]
            (keys,) = np.nonzero(hidden_SC.reshape(-1))
            unowned = torch.from_numpy(np.concatenate([keys, keys + hidden_SC.size]))
        planes = _planes(step.decode_blocks_SW[first:last, :block_count])
        return _Bucket(first, last, block_count, planes, mask_S11C, unowned)

    def _prepare_chunk(self, chunk: PackedChunk, block_tokens: int) -> _PreparedChunk:
        if chunk.first_position == 0:
            return _PreparedChunk(chunk, None, None)
        hidden_TC = np.arange(chunk.context_tokens) > chunk.positions[:, None]
        return _PreparedChunk(chunk, _planes(chunk.blocks), self._mask(hidden_TC))

    def _mask(self, hidden: np.ndarray) -> torch.Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), -math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuAttentionStep:
    kv_head_count: int
    groups: int
    block_tokens: int
    k_rows_T: torch.Tensor  # rows of the cache viewed as [B*2*T, K*H]
    v_rows_T: torch.Tensor
    buckets: list[_Bucket]
    chunks: list[_PreparedChunk]
    gathered: torch.Tensor

    def run(
        self,
        kv_B2TKH: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        out_TNH: torch.Tensor,
    ) -> None:
        token_rows = kv_B2TKH.view(-1, k_TKH.shape[1] * k_TKH.shape[2])
        write_rows(token_rows, self.k_rows_T, k_TKH.flatten(1))
        write_rows(token_rows, self.v_rows_T, v_TKH.flatten(1))
        planes = kv_B2TKH.view(kv_B2TKH.shape[0] * 2, -1)
        for bucket in self.buckets:
            self._decode(bucket, planes, q_TNH, out_TNH)
        for prepared in self.chunks:
            self._prefill(prepared, planes, q_TNH, k_TKH, v_TKH, out_TNH)

    def _decode(self, bucket: _Bucket, planes: torch.Tensor, q_TNH: torch.Tensor, out_TNH: torch.Tensor) -> None:
        kv_2SCKH = self._gather(planes, bucket.planes, bucket.last - bucket.first, q_TNH.shape[-1])
        if bucket.unowned is not None:  # an attention weight of zero does not mask NaN in slots past a sequence's end
            kv_2SCKH.view(-1, kv_2SCKH.shape[-2] * kv_2SCKH.shape[-1]).index_fill_(0, bucket.unowned, 0.0)
        grouped = (self.kv_head_count, self.groups)
        attended_SKGH = F.scaled_dot_product_attention(
            q_TNH[bucket.first : bucket.last].unflatten(1, grouped),
            kv_2SCKH[0].transpose(1, 2),
            kv_2SCKH[1].transpose(1, 2),
            attn_mask=bucket.mask_S11C,
        )
        out_TNH[bucket.first : bucket.last].unflatten(1, grouped).copy_(attended_SKGH)

    def _prefill(
        self,
        prepared: _PreparedChunk,
        planes: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        out_TNH: torch.Tensor,
    ) -> None:
        chunk = prepared.chunk
        rows = slice(chunk.first_row, chunk.first_row + chunk.row_count)
        grouped = (self.kv_head_count, self.groups)
        if prepared.planes is None:
            k_CKH, v_CKH = rounded(k_TKH[rows], planes.dtype), rounded(v_TKH[rows], planes.dtype)
        else:
            kv_CKH = self._gather(planes, prepared.planes, 1, q_TNH.shape[-1])[:, 0, : chunk.context_tokens]
            k_CKH, v_CKH = kv_CKH[0], kv_CKH[1]
        # KV heads become the batch dimension; each is broadcast to its G query heads.
        attended_KGTH = F.scaled_dot_product_attention(
            q_TNH[rows].unflatten(1, grouped).permute(1, 2, 0, 3),
            k_CKH.transpose(0, 1)[:, None].expand(-1, self.groups, -1, -1),
            v_CKH.transpose(0, 1)[:, None].expand(-1, self.groups, -1, -1),
            attn_mask=prepared.mask_TC,
            is_causal=prepared.mask_TC is None,
        )
        out_TNH[rows].unflatten(1, grouped).copy_(attended_KGTH.permute(2, 0, 1, 3))

    def _gather(self, planes: torch.Tensor, wanted: torch.Tensor, sequences: int, head_dim: int) -> torch.Tensor:
        """Gather blocks to [2, sequences, C, K, H], valid until the next gather."""
        gathered = self.gathered[: wanted.numel() * planes.shape[1]].view(wanted.numel(), planes.shape[1])
        if planes.dtype == gathered.dtype:
            torch.index_select(planes, 0, wanted, out=gathered)
        else:
            gathered.copy_(planes.index_select(0, wanted))
        return gathered.view(2, sequences, -1, self.kv_head_count, head_dim)


def _planes(blocks: Ints) -> torch.Tensor:
    keys = blocks.reshape(-1) * 2
    return torch.from_numpy(np.concatenate([keys, keys + 1]))

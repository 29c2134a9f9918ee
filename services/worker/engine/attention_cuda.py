"""Attention over the paged KV cache on a CUDA device: the shell around the Triton kernel.

Importable without triton and without a device; constructing `CudaAttention` says what is missing.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ballast.common.errors import ConfigError
from ballast.common.extras import lacking
from services.worker.engine.packing import PackedStep

_TILE_QUERIES = 64  # rows of a chunk's tile times query heads per KV head
_MIN_DOT = 16  # the least that a matrix product on tensor cores takes
_TILE_TOKENS = 64
_DTYPES = (torch.float32, torch.bfloat16)


class CudaAttention:
    """One kernel for decodes and chunks. float32 products are computed in full precision, not in TF32."""

    def __init__(
        self, head_count: int, kv_head_count: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """
        Raises:
            ConfigError: triton is not installed, or the dtype is not one that the kernel computes in.
        """
        if dtype not in _DTYPES:
            raise ConfigError("dtype", f"{dtype} runs on the cpu device only, use float32 or bfloat16 on cuda")
        try:
            kernels = importlib.import_module("services.worker.engine.paged_kernel")
        except ImportError as error:
            raise lacking("device cuda", "triton", "cuda") from error
        self._kernel: Any = kernels.paged_attention  # a compiled kernel has no static type
        self._groups = head_count // kv_head_count
        self._kv_head_count = kv_head_count
        self._head_dim = head_dim
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        self._device = device

    def prepare(self, step: PackedStep) -> "CudaAttentionStep":
        tiles, rows_per_tile = self._tiles(step)
        tables = _tables(step)
        k_rows = step.slots_T // step.block_tokens * step.block_tokens + step.slots_T
        return CudaAttentionStep(
            kernel=self._kernel,
            tiles=torch.from_numpy(tiles).to(self._device),
            tables=torch.from_numpy(tables).to(self._device),
            k_rows_T=torch.from_numpy(k_rows).to(self._device),
            v_rows_T=torch.from_numpy(k_rows + step.block_tokens).to(self._device),
            block_tokens=step.block_tokens,
            kv_head_count=self._kv_head_count,
            groups=self._groups,
            head_dim=self._head_dim,
            tile_queries=max(_MIN_DOT, _power_of_two(rows_per_tile * self._groups)),
            precision=self._precision,
        )

    def _tiles(self, step: PackedStep) -> tuple[np.ndarray, int]:
        """[tiles, 4] as the kernel wants them, and the most rows that one has."""
        rows_per_tile = max(1, _TILE_QUERIES // self._groups) if step.chunks else 1
        decodes = np.arange(step.decode_count)
        parts = [np.stack([decodes, decodes, np.ones_like(decodes), step.decode_contexts_S - 1], 1)]
        for at, chunk in enumerate(step.chunks):
            starts = np.arange(0, chunk.row_count, rows_per_tile)
            table = np.full_like(starts, step.decode_count + at)
            rows = np.minimum(rows_per_tile, chunk.row_count - starts)
            parts.append(np.stack([table, chunk.first_row + starts, rows, chunk.first_position + starts], 1))
        return np.concatenate(parts).astype(np.int32), rows_per_tile


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaAttentionStep:
    kernel: Any
    tiles: torch.Tensor
    tables: torch.Tensor
    k_rows_T: torch.Tensor
    v_rows_T: torch.Tensor
    block_tokens: int
    kv_head_count: int
    groups: int
    head_dim: int
    tile_queries: int
    precision: str

    def run(
        self,
        kv_B2TKH: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        out_TNH: torch.Tensor,
    ) -> None:
        token_rows = kv_B2TKH.view(-1, self.kv_head_count * self.head_dim)
        token_rows.index_copy_(0, self.k_rows_T, k_TKH.flatten(1))
        token_rows.index_copy_(0, self.v_rows_T, v_TKH.flatten(1))
        self.kernel[(self.tiles.shape[0], self.kv_head_count)](
            out_TNH,
            q_TNH,
            kv_B2TKH,
            self.tables,
            self.tiles,
            q_TNH.stride(0),
            self.tables.shape[1],
            self.head_dim**-0.5,
            KV_HEADS=self.kv_head_count,
            GROUPS=self.groups,
            HEAD_DIM=self.head_dim,
            HEAD_PAD=max(_MIN_DOT, _power_of_two(self.head_dim)),
            BLOCK_TOKENS=self.block_tokens,
            TILE_QUERIES=self.tile_queries,
            TILE_TOKENS=_TILE_TOKENS,
            PRECISION=self.precision,
        )


def _tables(step: PackedStep) -> np.ndarray:
    """[sequences, blocks of the longest]: decodes, then chunks. Entries past a table's end are never read."""
    widths = [step.decode_blocks_SW.shape[1], *(len(chunk.blocks) for chunk in step.chunks)]
    tables = np.zeros((step.decode_count + len(step.chunks), max(widths)), np.int32)
    tables[: step.decode_count, : widths[0]] = step.decode_blocks_SW
    for row, chunk in zip(tables[step.decode_count :], step.chunks, strict=True):
        row[: len(chunk.blocks)] = chunk.blocks
    return tables


def _power_of_two(value: int) -> int:
    """The least that is not below the value."""
    return 1 << (value - 1).bit_length()

"""Attention over the paged KV cache on a CUDA device: the shell around the Triton kernel.

Importable without triton and without a device; constructing `CudaAttention` says what is missing.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ballast.common.errors import ConfigError
from ballast.common.extras import lacking
from services.worker.engine.packing import PackedStep
from services.worker.engine.upload import upload

_MIN_DOT = 16  # the least that a matrix product on tensor cores takes
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Tiling(NamedTuple):
    """The shapes of a tile: what fits into registers and shared memory of sm_80 and sm_90."""

    decode_tokens: int  # of the context at a time, in a step of decodes alone
    chunk_queries: int  # rows of a chunk's tile times query heads per KV head
    chunk_tokens: int


def tiling(dtype: torch.dtype, head_dim: int) -> Tiling:
    if dtype == torch.float32:
        return Tiling(32, 32 if head_dim <= 128 else 16, 32)
    if head_dim <= 64:
        return Tiling(32, 64, 64)
    return Tiling(64, 64, 64) if head_dim <= 128 else Tiling(32, 32, 32)


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
            raise ConfigError("dtype", f"{dtype} runs on the cpu device only, use float32, bfloat16 or float16 on cuda")
        try:
            kernels = importlib.import_module("services.worker.engine.paged_kernel")
        except ImportError as error:
            raise lacking("device cuda", "triton", "cuda") from error
        self._kernel: Any = kernels.paged_attention  # a compiled kernel has no static type
        self._groups = head_count // kv_head_count
        self._kv_head_count = kv_head_count
        self._head_dim = head_dim
        self._dtype = dtype
        self._tiling = tiling(dtype, head_dim)
        self._device = device

    def prepare(self, step: PackedStep) -> "CudaAttentionStep":
        k_rows = step.slots_T // step.block_tokens * step.block_tokens + step.slots_T
        tiles, tables, k_rows_T, v_rows_T = upload(
            [self._tiles(step), _tables(step), k_rows, k_rows + step.block_tokens], self._device
        )
        return CudaAttentionStep(
            kernel=self._kernel,
            tiles=tiles,
            tables=tables,
            k_rows_T=k_rows_T,
            v_rows_T=v_rows_T,
            constants=self.constants(step.block_tokens, with_chunks=bool(step.chunks)),
        )

    def constants(self, block_tokens: int, *, with_chunks: bool) -> Mapping[str, Any]:
        """What the kernel is compiled for. There are these two variants and no other: nothing else is specialised on
        that changes from step to step.
        """
        rows = self._rows_per_tile if with_chunks else 1
        return {
            "KV_HEADS": self._kv_head_count,
            "GROUPS": self._groups,
            "HEAD_DIM": self._head_dim,
            "HEAD_PAD": max(_MIN_DOT, power_of_two(self._head_dim)),
            "BLOCK_TOKENS": block_tokens,
            "TILE_QUERIES": max(_MIN_DOT, power_of_two(rows * self._groups)),
            "TILE_TOKENS": self._tiling.chunk_tokens if with_chunks else self._tiling.decode_tokens,
            "PRECISION": "ieee" if self._dtype == torch.float32 else "tf32",
        }

    @property
    def _rows_per_tile(self) -> int:
        return max(1, self._tiling.chunk_queries // self._groups)

    def _tiles(self, step: PackedStep) -> np.ndarray:
        """[tiles, 4] as the kernel wants them."""
        rows_per_tile = self._rows_per_tile
        decodes = np.arange(step.decode_count)
        parts = [np.stack([decodes, decodes, np.ones_like(decodes), step.decode_contexts_S - 1], 1)]
        for at, chunk in enumerate(step.chunks):
            starts = np.arange(0, chunk.row_count, rows_per_tile)
            table = np.full_like(starts, step.decode_count + at)
            rows = np.minimum(rows_per_tile, chunk.row_count - starts)
            parts.append(np.stack([table, chunk.first_row + starts, rows, chunk.first_position + starts], 1))
        return np.concatenate(parts).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaAttentionStep:
    kernel: Any
    tiles: torch.Tensor
    tables: torch.Tensor
    k_rows_T: torch.Tensor
    v_rows_T: torch.Tensor
    constants: Mapping[str, Any]

    def run(
        self,
        kv_B2TKH: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        out_TNH: torch.Tensor,
    ) -> None:
        kv_head_count, head_dim = k_TKH.shape[1:]
        token_rows = kv_B2TKH.view(-1, kv_head_count * head_dim)
        token_rows.index_copy_(0, self.k_rows_T, k_TKH.flatten(1))
        token_rows.index_copy_(0, self.v_rows_T, v_TKH.flatten(1))
        self.attend(kv_B2TKH, q_TNH, out_TNH)

    def attend(self, kv_B2TKH: torch.Tensor, q_TNH: torch.Tensor, out_TNH: torch.Tensor) -> None:
        """The rows' K and V are in the cache."""
        kv_head_count, head_dim = kv_B2TKH.shape[3:]
        self.kernel[(self.tiles.shape[0], kv_head_count)](
            out_TNH,
            q_TNH,
            kv_B2TKH,
            self.tables,
            self.tiles,
            q_TNH.stride(0),
            self.tables.shape[1],
            head_dim**-0.5,
            **self.constants,
        )


def _tables(step: PackedStep) -> np.ndarray:
    """[sequences, blocks of the longest]: decodes, then chunks. Entries past a table's end are never read."""
    widths = [step.decode_blocks_SW.shape[1], *(len(chunk.blocks) for chunk in step.chunks)]
    tables = np.zeros((step.decode_count + len(step.chunks), max(widths)), np.int32)
    tables[: step.decode_count, : widths[0]] = step.decode_blocks_SW
    for row, chunk in zip(tables[step.decode_count :], step.chunks, strict=True):
        row[: len(chunk.blocks)] = chunk.blocks
    return tables


def power_of_two(value: int) -> int:
    """The least that is not below the value."""
    return 1 << (value - 1).bit_length()

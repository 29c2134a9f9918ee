"""Attention over the paged KV cache on a CUDA device: the host side of the Triton kernel.

Importable without triton and without a device; constructing `CudaAttention` raises if either is missing.
"""

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ballast.common.errors import ConfigError
from ballast.common.extras import lacking
from services.worker.engine.kv_dtype import FP8, write_rows
from services.worker.engine.packing import PackedStep
from services.worker.engine.upload import upload

_TILE_FIELDS = 8
_MIN_DOT = 16  # smallest dimension of a matrix product on tensor cores
_LEAST_PART = 512  # minimum context tokens of a decode per program
_MOST_PARTS = 32  # maximum parts of a decode's context: with 8 KV heads 256 programs, two per multiprocessor of an H100
# Limits of a recorded step. Programs without a tile are cheap but not free; a program with several tiles loops over
# them.
_MOST_TILES, _LEAST_PROGRAMS, _PROGRAMS_PER_ROW = 8192, 64, 2
Capability = tuple[int, int]  # (9, 0) is sm_90
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Tiling(NamedTuple):
    """Tile sizes that fit into the registers and shared memory of a multiprocessor."""

    decode_tokens: int  # context tokens per iteration in a decode-only step
    chunk_queries: int  # rows of a chunk's tile times query heads per KV head
    chunk_tokens: int
    chunk_warps: int = 4
    chunk_stages: int = 3
    chunk_unmasked: bool = False  # a loop without masks for most tiles: fewer instructions, more registers


def tiling(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, capability: Capability) -> Tiling:
    """Tile sizes for a GPU. Chunks get the largest tiles at which nothing spills. sm_90 and sm_100 take operands of
    products from shared memory; other GPUs hold them in registers, and sm_86 to sm_89 and sm_120 have 99 KiB of shared
    memory.
    """
    if dtype == torch.float32:
        return Tiling(32, 32 if head_dim <= 128 else 16, 32)
    if head_dim > 128:
        return Tiling(32, 32, 32)
    decode_tokens = 32 if head_dim <= 64 else 64
    # float8 is converted in registers, and heads of other sizes lack aligned addresses.
    narrow = bool(head_dim % 16) or (kv_dtype == FP8 and head_dim > 64)
    if capability[0] in (9, 10):
        queries, chunk_tokens, warps = 128, 64 if narrow else 128, 8
    else:
        queries, chunk_tokens, warps = (64, 32, 4) if narrow else (128, 64 if head_dim <= 64 else 32, 8)
    return Tiling(decode_tokens, queries, chunk_tokens, chunk_warps=warps, chunk_stages=2, chunk_unmasked=True)


class CudaAttention:
    """An `AttentionBackend` with one kernel in two variants, for decodes and for chunks. The bits of a row do not
    depend on the batch. Products in float32 use full precision, not TF32.
    """

    def __init__(
        self,
        head_count: int,
        kv_head_count: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kv_dtype: torch.dtype | None = None,
        capability: Capability | None = None,
    ) -> None:
        """`kv_dtype`: of the KV cache, if not `dtype`. `capability`: of the GPU to tile for, if not the device's.

        Raises ConfigError if triton is not installed or the kernel does not support the dtype.
        """
        if dtype not in _DTYPES:
            raise ConfigError("dtype", f"{dtype} runs on the cpu device only, use float32, bfloat16 or float16 on cuda")
        try:
            kernels = importlib.import_module("services.worker.engine.paged_kernel")
        except ImportError as error:
            raise lacking("device cuda", "triton", "cuda") from error
        self._kernel: Any = kernels.paged_attention  # Any: compiled kernels have no static type
        self._join: Any = kernels.join_parts
        self._groups = head_count // kv_head_count
        self._kv_head_count = kv_head_count
        self._head_dim = head_dim
        self._dtype = dtype
        self._tiling = tiling(dtype, kv_dtype or dtype, head_dim, capability or _capability(device))
        self._device = device

    def prepare(self, step: PackedStep) -> "CudaAttentionStep":
        decode_tiles, joins, part_count = _decode_tiles(step.decode_contexts_S)
        tables = _tables(step)
        tiles, joins, shape, tables, k_rows_T = upload(
            [
                np.concatenate([decode_tiles, *self._chunk_tiles(step)]).astype(np.int32),
                joins.astype(np.int32),
                np.array([len(decode_tiles), tables.shape[1], 0, 0], np.int32),
                tables,
                key_rows(step),
            ],
            self._device,
        )
        launches = (
            (tiles[: len(decode_tiles)], len(decode_tiles), self.constants(step.block_tokens, chunks=False)),
            (
                tiles[len(decode_tiles) :],
                len(tiles) - len(decode_tiles),
                self.constants(step.block_tokens, chunks=True),
            ),
        )
        return self.step(
            launches=tuple(launch for launch in launches if launch[1]),
            joins=joins,
            shape=shape,
            tables=tables,
            parts=self.parts(part_count),
            k_rows_T=k_rows_T,
            base_block=step.base_block,
        )

    def step(
        self,
        *,
        launches: "tuple[Launch, ...]",
        joins: torch.Tensor,
        shape: torch.Tensor,
        tables: torch.Tensor,
        parts: tuple[torch.Tensor, torch.Tensor],
        k_rows_T: torch.Tensor,
        base_block: int,
    ) -> "CudaAttentionStep":
        return CudaAttentionStep(
            kernel=self._kernel,
            join=self._join,
            launches=launches,
            joins=joins,
            shape=shape,
            tables=tables,
            parts=parts[0],
            weights=parts[1],
            k_rows_T=k_rows_T,
            base_block=base_block,
        )

    def parts(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Scratch memory for the partial results of split contexts and their weights."""
        head_count = self._groups * self._kv_head_count
        return (
            torch.empty(count, head_count, self._head_dim, device=self._device),
            torch.empty(count, head_count, device=self._device),
        )

    @property
    def device(self) -> torch.device:
        return self._device

    def constants(self, block_tokens: int, *, chunks: bool) -> Mapping[str, Any]:
        """Compile-time constants of the chunk or decode variant. The kernel is specialised on nothing else that varies
        between steps, so exactly two variants are compiled.
        """
        rows = self._rows_per_tile if chunks else 1
        return {
            "KV_HEADS": self._kv_head_count,
            "GROUPS": self._groups,
            "HEAD_DIM": self._head_dim,
            "HEAD_PAD": max(_MIN_DOT, power_of_two(self._head_dim)),
            "BLOCK_TOKENS": block_tokens,
            "TILE_QUERIES": max(_MIN_DOT, power_of_two(rows * self._groups)),
            "TILE_TOKENS": self._tiling.chunk_tokens if chunks else self._tiling.decode_tokens,
            "SPLITS": not chunks,
            "UNMASKED": chunks and self._tiling.chunk_unmasked,
            "num_warps": self._tiling.chunk_warps if chunks else 4,
            "num_stages": self._tiling.chunk_stages if chunks else 3,
            "PRECISION": "ieee" if self._dtype == torch.float32 else "tf32",
        }

    @property
    def _rows_per_tile(self) -> int:
        return max(1, self._tiling.chunk_queries // self._groups)

    def _chunk_tiles(self, step: PackedStep) -> Iterator[np.ndarray]:
        rows_per_tile = self._rows_per_tile
        for at, chunk in enumerate(step.chunks):
            starts = np.arange(0, chunk.row_count, rows_per_tile)
            rows = np.minimum(rows_per_tile, chunk.row_count - starts)
            first_positions = chunk.first_position + starts
            ends = first_positions + rows
            yield _tile_rows(step.decode_count + at, chunk.first_row + starts, rows, first_positions, 0, ends, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAttentionStep(ABC):
    """An `AttentionStep` whose kernel reads K and V from the cache, where `run` writes them first."""

    k_rows_T: torch.Tensor  # index of each row's K in the cache viewed as tokens; -1: K and V are not written
    base_block: int  # a mapped block: Triton rejects pointers to unmapped addresses

    @abstractmethod
    def attend(self, kv_B2TKH: torch.Tensor, q_TNH: torch.Tensor, out_TNH: torch.Tensor) -> None:
        """Attend with the rows' K and V already in the cache."""

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
        write_rows(token_rows, self.k_rows_T, k_TKH.flatten(1))
        write_rows(token_rows, self.k_rows_T + kv_B2TKH.shape[2], v_TKH.flatten(1))
        self.attend(kv_B2TKH, q_TNH, out_TNH)


Launch = tuple[torch.Tensor, int, Mapping[str, Any]]  # (tiles, programs, compile-time constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaAttentionStep(GpuAttentionStep):
    kernel: Any
    join: Any
    launches: tuple[Launch, ...]
    joins: torch.Tensor  # empty if no context is split
    shape: torch.Tensor
    parts: torch.Tensor
    weights: torch.Tensor
    tables: torch.Tensor

    def attend(self, kv_B2TKH: torch.Tensor, q_TNH: torch.Tensor, out_TNH: torch.Tensor) -> None:
        kv_head_count, head_dim = kv_B2TKH.shape[3:]
        kv_from_base = for_kernels(kv_B2TKH)[self.base_block :]
        for tiles, program_count, constants in self.launches:
            self.kernel[(program_count, kv_head_count)](
                out_TNH,
                q_TNH,
                kv_from_base,
                self.shape,
                self.tables,
                tiles,
                self.parts,
                self.weights,
                q_TNH.stride(0),
                head_dim**-0.5,
                self.base_block,
                **constants,
            )
        if len(self.joins):
            head_count = out_TNH.shape[1]
            self.join[(len(self.joins), head_count)](
                out_TNH, self.parts, self.weights, self.joins, **join_constants(head_count, head_dim)
            )


class StagedDecodes:
    """A decode-only step in memory at fixed addresses, so that a CUDA graph can read it. One copy fills it: a head of
    fixed size, followed by the tiles and block tables of the step.
    """

    def __init__(self, attention: CudaAttention, rows: int, longest: int, block_tokens: int) -> None:
        """Allocate memory for at most `rows` rows with contexts of at most `longest` tokens."""
        self._rows = rows
        self._attention = attention
        self._tile_count = min(rows * _MOST_PARTS, max(rows, _MOST_TILES))
        self._parts = attention.parts(self._tile_count)
        self._constants = attention.constants(block_tokens, chunks=False)
        self._block_tokens = block_tokens
        self._ends = np.cumsum([4, *(-(-2 * rows // 4) * 4,) * 3, 4 * rows]).tolist()
        size = self._ends[-1] + self._tile_count * _TILE_FIELDS + rows * -(-longest // block_tokens)
        self._there = torch.zeros(size, dtype=torch.int32, device=attention.device)
        shape, tokens, positions, k_rows, joins = self._sections(self._there)
        self._shape, self._joins = shape, joins.view(rows, 4)
        self._k_rows_T = k_rows.view(torch.int64)
        self._k_rows_T.fill_(-1)  # no effect until filled
        self.token_ids_T, self.positions_T = tokens.view(torch.int64), positions.view(torch.int64)

    def _sections(self, head: torch.Tensor) -> list[torch.Tensor]:
        return [head[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def fill(self, step: PackedStep) -> bool:
        """Copy a decode-only step to the device. Returns False if its contexts have too many parts."""
        rows, (tiles, joins, _) = step.row_count, _decode_tiles(step.decode_contexts_S)
        if len(tiles) > self._tile_count:
            return False
        # Tables may contain blocks beyond the longest context, which are not read.
        tables = step.decode_blocks_SW[:, : -(-int(step.decode_contexts_S[-1]) // self._block_tokens)]
        at = self._ends[-1]
        numbers = np.empty(at + tiles.size + tables.size, np.int32)
        numbers[:at] = 0
        shape, tokens, positions, k_rows, padded_joins = (
            numbers[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)
        )
        shape[:3] = len(tiles), tables.shape[1], tiles.size
        tokens.view(np.int64)[:rows] = step.token_ids_T
        positions.view(np.int64)[:rows] = step.positions_T
        k_rows.view(np.int64)[rows:] = -1
        k_rows.view(np.int64)[:rows] = key_rows(step)
        padded_joins[: joins.size] = joins.reshape(-1)
        numbers[at : at + tiles.size] = tiles.reshape(-1)
        numbers[at + tiles.size :] = tables.reshape(-1)
        staged = torch.from_numpy(numbers)
        if self._there.is_cuda:
            staged = staged.pin_memory()  # torch keeps the pinned memory until the copy has completed
        self._there[: len(numbers)].copy_(staged, non_blocking=True)
        if step.in_flight is not None:
            step.in_flight.put(self.token_ids_T)
        return True

    def first(self, rows: int, base_block: int) -> CudaAttentionStep:
        """Attention step over the first `rows` rows."""
        behind = self._there[self._ends[-1] :]
        return self._attention.step(
            launches=((behind, max(_LEAST_PROGRAMS, rows * _PROGRAMS_PER_ROW), self._constants),),
            joins=self._joins[:rows],
            shape=self._shape,
            tables=behind,
            parts=self._parts,
            k_rows_T=self._k_rows_T[:rows],
            base_block=base_block,
        )


def join_constants(head_count: int, head_dim: int) -> dict[str, int]:
    """Compile-time constants of `join_parts`."""
    padded = max(_MIN_DOT, power_of_two(head_dim))
    return {"HEADS": head_count, "HEAD_DIM": head_dim, "HEAD_PAD": padded, "MOST_PARTS": _MOST_PARTS}


def part_tokens(contexts_S: np.ndarray) -> np.ndarray:
    """Tokens per part of each split context. They depend on the context only, not on the batch, so that the bits of a
    row do not depend on the batch either.
    """
    least = np.maximum(_LEAST_PART, -(-contexts_S // _MOST_PARTS))
    return 1 << np.ceil(np.log2(least)).astype(np.int64)


def _decode_tiles(contexts_S: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Tiles, the [split rows, 4] table for `join_parts`, and the number of parts."""
    sizes = part_tokens(contexts_S)
    counts = -(-contexts_S // sizes)
    rows = np.repeat(np.arange(len(contexts_S)), counts)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts, contexts, is_split = nth * sizes[rows], contexts_S[rows], counts[rows] > 1
    ends = np.minimum(starts + sizes[rows], contexts)
    parts = np.where(is_split, np.cumsum(is_split) - 1, -1)
    (split,) = np.nonzero(counts > 1)
    firsts = np.cumsum(counts[split]) - counts[split]
    joins = np.stack([split, firsts, counts[split], np.zeros_like(split)], 1)
    return _tile_rows(rows, rows, 1, contexts - 1, starts, ends, parts), joins, int(counts[split].sum())


def key_rows(step: PackedStep) -> np.ndarray:
    """Index of each row's K in the cache viewed as tokens; its V is one block of tokens further on."""
    return step.slots_T // step.block_tokens * step.block_tokens + step.slots_T


def _tile_rows(*columns: np.ndarray | int) -> np.ndarray:
    """Tiles as [tiles, 8] int32 for the kernel."""
    return np.stack(np.broadcast_arrays(*columns, 0), 1)


def _tables(step: PackedStep) -> np.ndarray:
    """Block tables as [sequences, blocks of the longest]: decodes, then chunks. Entries past a table's end are never
    read.
    """
    widths = [step.decode_blocks_SW.shape[1], *(len(chunk.blocks) for chunk in step.chunks)]
    tables = np.zeros((step.decode_count + len(step.chunks), max(widths)), np.int32)
    tables[: step.decode_count, : widths[0]] = step.decode_blocks_SW
    for row, chunk in zip(tables[step.decode_count :], step.chunks, strict=True):
        row[: len(chunk.blocks)] = chunk.blocks
    return tables


def for_kernels(kv_B2TKH: torch.Tensor) -> torch.Tensor:
    """The cache as passed to kernels: float8 viewed as bytes on GPUs before sm_89, for which Triton lacks that type."""
    return kv_B2TKH.view(torch.uint8) if kv_B2TKH.dtype == FP8 and not _has_fp8(kv_B2TKH.device) else kv_B2TKH


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device) >= (8, 9)


@functools.cache
def _capability(device: torch.device) -> Capability:
    """The device's compute capability. On a CPU, where kernels are interpreted, (10, 0)."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (10, 0)


def power_of_two(value: int) -> int:
    """Smallest power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()

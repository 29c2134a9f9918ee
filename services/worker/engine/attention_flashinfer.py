"""Attention over the paged KV cache with FlashInfer's kernels, for `--attention-backend flashinfer`.

FlashInfer plans a step once on the host and runs the plan in every layer. Its pages are our blocks: `kv_B2TKH` is its
paged cache in the NHD layout, so nothing is copied or converted.

Importable without flashinfer and without a device; constructing `FlashInferAttention` raises if either is missing.
"""

import importlib
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ballast.common.errors import ConfigError
from ballast.common.extras import lacking
from services.worker.engine.attention_cuda import GpuAttentionStep, key_rows
from services.worker.engine.packing import PackedStep
from services.worker.engine.upload import upload

# Workspace for split contexts, which need 17 MiB on an H100 according to the code of version 0.7.2 (`PrefillPlan` in
# its scheduler.cuh), independent of the step; its documentation recommends 128 MiB.
_WORKSPACE_BYTES = 128 << 20
_KERNELS = "fa2"  # for every GPU from sm_80 on; one compiled module serves decodes and chunks
_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128, 256)
_LEAST_VERSION = (0, 7, 2)  # in older versions a plan's workspace grows with the query heads per KV head


class PlanCopy:
    """Protects the host buffer from which a plan is copied to the device. The next plan overwrites the buffer, so it
    must wait for the copy; otherwise layers not yet executed would use the wrong plan. The copy has completed once the
    previous step has.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._over = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        if self._over is not None:
            self._over.synchronize()

    def begun(self) -> None:
        if self._over is not None:
            self._over.record(torch.cuda.current_stream(self._device))


@dataclass(frozen=True, slots=True)
class Pages:
    """FlashInfer's page table: the block ids of all sequences concatenated, the index of each sequence's first one, and
    the number of tokens in its last block.
    """

    blocks: np.ndarray  # int32, like the other two
    starts: np.ndarray  # one more entry than sequences: the last is the number of blocks
    last_tokens: np.ndarray

    @classmethod
    def of_decodes(cls, step: PackedStep) -> "Pages":
        counts_S = -(-step.decode_contexts_S // step.block_tokens)
        owned_SW = np.arange(step.decode_blocks_SW.shape[1]) < counts_S[:, None]
        return cls._of(step.decode_blocks_SW[owned_SW], counts_S, step.decode_contexts_S, step.block_tokens)

    @classmethod
    def of_chunks(cls, step: PackedStep) -> "Pages":
        counts = np.array([len(chunk.blocks) for chunk in step.chunks], np.int64)
        contexts = np.array([chunk.context_tokens for chunk in step.chunks], np.int64)
        blocks = np.concatenate([np.empty(0, np.int64), *(chunk.blocks for chunk in step.chunks)])
        return cls._of(blocks, counts, contexts, step.block_tokens)

    @classmethod
    def _of(cls, blocks: np.ndarray, counts: np.ndarray, contexts: np.ndarray, block_tokens: int) -> "Pages":
        last_tokens = (contexts - 1) % block_tokens + 1
        return cls(blocks.astype(np.int32), _starts(counts), last_tokens.astype(np.int32))


class FlashInferAttention:
    """An `AttentionBackend` that makes one plan for a step's decodes and one for its chunks. A prepared step is valid
    until the next one is prepared.

    Supports any number of query heads per KV head: decodes also use tensor cores. FlashInfer splits contexts depending
    on the whole batch, so the last bits of a row may depend on the other rows.
    """

    def __init__(
        self,
        head_count: int,
        kv_head_count: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        library: Any = None,  # replaces flashinfer in tests
    ) -> None:
        """Raises ConfigError if flashinfer is not installed or too old, or does not support the heads or the dtype."""
        if dtype not in _DTYPES:
            raise _refused(f"computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}")
        if head_dim not in _HEAD_DIMS:
            raise _refused(f"takes heads of 64, 128 or 256 dimensions, the model's have {head_dim}")
        self._planned_as: dict[str, Any] = {"sm_scale": head_dim**-0.5, "q_data_type": dtype, "kv_data_type": dtype}
        self._heads = (head_count, kv_head_count, head_dim)
        self._device = device
        library = library or installed()
        # Both share one workspace, which holds the intermediate results of one launch: launches run one after the
        # other.
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._decodes = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True, backend=_KERNELS
        )
        self._chunks = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=_KERNELS)
        self._copy = PlanCopy(device)

    def prepare(self, step: PackedStep) -> "FlashInferStep":
        decodes, chunks = Pages.of_decodes(step), Pages.of_chunks(step)
        decode_blocks, chunk_blocks, k_rows_T = upload([decodes.blocks, chunks.blocks, key_rows(step)], self._device)
        self._copy.wait()
        if step.decode_count:
            self._decodes.plan(
                torch.from_numpy(decodes.starts),
                decode_blocks,
                torch.from_numpy(decodes.last_tokens),
                *self._heads,
                step.block_tokens,
                **self._planned_as,
            )
        if step.chunks:
            self._chunks.plan(
                torch.from_numpy(_starts(np.array([chunk.row_count for chunk in step.chunks]))),
                torch.from_numpy(chunks.starts),
                chunk_blocks,
                torch.from_numpy(chunks.last_tokens),
                *self._heads,
                step.block_tokens,
                causal=True,
                **self._planned_as,
            )
        self._copy.begun()
        return FlashInferStep(
            k_rows_T=k_rows_T,
            base_block=step.base_block,
            decode_count=step.decode_count,
            decodes=self._decodes,
            chunks=self._chunks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferStep(GpuAttentionStep):
    decode_count: int
    decodes: Any  # Any: FlashInfer's wrappers have no static types
    chunks: Any

    def attend(self, kv_B2TKH: torch.Tensor, q_TNH: torch.Tensor, out_TNH: torch.Tensor) -> None:
        rows = self.decode_count
        if rows:
            self.decodes.run(q_TNH[:rows], kv_B2TKH, out=out_TNH[:rows])
        if rows < len(q_TNH):
            self.chunks.run(q_TNH[rows:], kv_B2TKH, out=out_TNH[rows:])


def installed() -> Any:
    """The flashinfer package.

    Raises:
        ConfigError: it is not installed or too old.
    """
    try:
        library = importlib.import_module("flashinfer")
    except ImportError as error:
        raise lacking("attention_backend flashinfer", "flashinfer-python", "flashinfer") from error
    require_version(library.__version__)
    return library


def require_version(version: str) -> None:
    """Raise ConfigError if the version is too old."""
    if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _LEAST_VERSION:
        least = ".".join(str(part) for part in _LEAST_VERSION)
        raise ConfigError("attention_backend", f"flashinfer {version} is too old, at least {least} is required")


def _refused(why: str) -> ConfigError:
    return ConfigError("attention_backend", f"flashinfer {why}; use triton")


def _starts(counts: np.ndarray) -> np.ndarray:
    """Index of the first element of each sequence, followed by the total length."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

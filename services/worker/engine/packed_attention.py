"""Attention with the compiled kernels: reads K and V in place through block tables, without gathers or masks."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.worker.engine.native.library import Kernels, dtype_code, kv_dtype_code
from services.worker.engine.native.structs import SPAN_FIELDS, Attention, Spans
from services.worker.engine.packing import Ints, PackedStep

FirstSeen = Callable[[Ints], Ints]


class PagedAttention:
    """An `AttentionBackend` with the compiled kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(self, step: PackedStep, first_seen: FirstSeen | None = None) -> "PagedAttentionStep":
        """Lay out the attention of a step. `first_seen` maps positions to the first position visible from each; with
        it, every row of a chunk is computed on its own.
        """
        return PagedAttentionStep(self._kernels, step, first_seen)


class PagedAttentionStep:
    """An `AttentionStep`. `PackedModel` runs its attention inside the kernel of the layers."""

    def __init__(self, kernels: Kernels, step: PackedStep, first_seen: FirstSeen | None = None) -> None:
        self._kernels = kernels
        self._slots = np.ascontiguousarray(step.slots_T)
        self._fields = _span_fields(step) if first_seen is None else _row_fields(step, first_seen)
        self._blocks = _joined(step)
        # Arguments of the kernels; the memory lives as long as this object.
        self.spans = Spans(len(self._fields), self._fields.ctypes.data, self._blocks.ctypes.data)

    @property
    def slots(self) -> int:
        """Address of the cache slots where K and V of each row are written."""
        return self._slots.ctypes.data

    def run(
        self,
        kv_B2TKH: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        out_TNH: torch.Tensor,
    ) -> None:
        self._kernels.write_kv(kv_B2TKH, k_TKH, v_TKH, self.slots)
        self._kernels.attend(
            Attention(
                dtype=dtype_code(q_TNH.dtype),
                kv_dtype=kv_dtype_code(kv_B2TKH.dtype),
                heads=q_TNH.shape[1],
                kv_heads=kv_B2TKH.shape[3],
                head_dim=kv_B2TKH.shape[4],
                block_tokens=kv_B2TKH.shape[2],
                kv=kv_B2TKH.data_ptr(),
                q=q_TNH.data_ptr(),
                q_stride=q_TNH.stride(0),
                out=out_TNH.data_ptr(),
                out_stride=out_TNH.stride(0),
                spans=self.spans,
            )
        )


def _span_fields(step: PackedStep) -> Ints:
    """Fields of one span per sequence in the order of rows: decodes, then chunks."""
    decodes, chunks = step.decode_count, step.chunks
    width = step.decode_blocks_SW.shape[1]
    fields = np.zeros((decodes + len(chunks), len(SPAN_FIELDS)), np.int64)
    rows = np.arange(decodes)
    fields[:decodes, 0], fields[:decodes, 1] = rows, 1
    fields[:decodes, 3], fields[:decodes, 5] = step.decode_contexts_S, rows * width
    first_block = decodes * width
    for field, chunk in zip(fields[decodes:], chunks, strict=True):
        field[:] = chunk.first_row, chunk.row_count, 0, chunk.first_position + 1, 1, first_block
        first_block += len(chunk.blocks)
    return fields


def _row_fields(step: PackedStep, first_seen: FirstSeen) -> Ints:
    """Fields of one span per row, limited to the tokens visible to it."""
    spans = _span_fields(step)
    counts = spans[:, 1]
    fields = spans.repeat(counts, axis=0)
    inside = np.arange(len(fields)) - (counts.cumsum() - counts).repeat(counts)
    fields[:, 0] += inside
    fields[:, 1], fields[:, 4] = 1, 0
    fields[:, 3] += inside
    fields[:, 2] = first_seen(fields[:, 3] - 1)
    return fields


def _joined(step: PackedStep) -> Ints:
    tables: Sequence[Ints] = [step.decode_blocks_SW.reshape(-1), *(chunk.blocks for chunk in step.chunks)]
    return np.concatenate(tables)

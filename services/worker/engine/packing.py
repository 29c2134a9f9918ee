"""The layout of one step: the rows of the packed token matrix by sequence, and where their KV is written.

Plain integers in NumPy arrays; made once per step, read by every layer. Order of rows: first the sequences that compute
one token (decodes), by ascending context length so that neighbours can share a padded gather, then chunk after chunk.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import SequenceId, Slice
from services.worker.engine.upload import upload

Ints = NDArray[np.int64]

_LEAST_ROWS, _LEAST_WIDTH = 16, 16


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """Rows of a sequence that computes more than one token."""

    first_row: int
    row_count: int
    first_position: int  # tokens of the sequence before the chunk, whose KV is in the cache
    blocks: Ints  # blocks of the whole context, chunk included

    @property
    def context_tokens(self) -> int:
        return self.first_position + self.row_count

    @property
    def positions(self) -> Ints:
        return np.arange(self.first_position, self.context_tokens)


@dataclass(frozen=True, slots=True)
class InFlightTokens:
    """Input tokens that the previous step is still sampling, and the rows of this step that they belong to."""

    rows_L: Ints
    sources_L: Ints  # index of each row's token in `token_ids_R`
    token_ids_R: torch.Tensor  # tokens sampled by the previous step, on the device

    def put(self, token_ids_T: torch.Tensor) -> None:
        """Write the tokens into the step's token ids on the device, without waiting for them on the host."""
        rows_L, sources_L = upload([self.rows_L, self.sources_L], token_ids_T.device)
        token_ids_T.index_copy_(0, rows_L, self.token_ids_R.index_select(0, sources_L).to(token_ids_T.dtype))


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Layout of a step. Legend: T rows in total, S decodes, W blocks of the longest table of a decode."""

    block_tokens: int
    token_ids_T: Ints
    positions_T: Ints
    slots_T: Ints  # cache slot of each row's K and V: block * block_tokens + offset
    decode_contexts_S: Ints  # context tokens, the new one included; ascending
    decode_blocks_SW: Ints  # whole tables, padded with the sequence's first block
    chunks: tuple[PackedChunk, ...]
    first_rows: Ints  # for each of the batch's slices, the row of its first token
    sample_rows: Ints  # for each of the batch's slices that sample, the row of its last token
    blocks_end: int  # highest block id in use, plus one
    in_flight: InFlightTokens | None = None  # tokens missing from `token_ids_T`

    @property
    def row_count(self) -> int:
        return len(self.token_ids_T)

    @property
    def base_block(self) -> int:
        """A block that the step writes, so it is mapped. Kernels get a pointer to the cache at this block."""
        return int(self.slots_T[0]) // self.block_tokens

    @property
    def decode_count(self) -> int:
        return len(self.decode_contexts_S)


class _Table(NamedTuple):
    given: Sequence[int]
    row: int  # row in the packer's tables
    length: int  # number of blocks
    end: int  # highest block id, plus one


class Packer:
    """Lays out batches. Keeps block tables as rows of an array and rewrites those that changed."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._tables: dict[SequenceId, _Table] = {}
        self._blocks_RW = np.zeros((0, _LEAST_WIDTH), np.int64)  # padded with the table's first block
        self._free_rows: list[int] = []

    def forget(self, sequence_id: SequenceId) -> None:
        if (known := self._tables.pop(sequence_id, None)) is not None:
            self._free_rows.append(known.row)

    def forget_all(self) -> None:
        for sequence_id in tuple(self._tables):
            self.forget(sequence_id)

    def pack(self, slices: Sequence[Slice], block_tables: Sequence[Sequence[int]]) -> PackedStep:
        """Lay out a batch's slices, at least one; `block_tables` is aligned with them.

        A table that is the same object as in the previous step is taken to be unchanged.

        Raises:
            InvariantViolation: a slice is empty, or its table does not cover it.
        """
        known = [self._table(part, table) for part, table in zip(slices, block_tables, strict=True)]
        lengths = np.array([len(part.token_ids) for part in slices], np.int64)
        starts = np.array([part.first_position for part in slices], np.int64)
        order = np.lexsort((starts + lengths, lengths > 1))
        decode_count = int(np.count_nonzero(lengths == 1))
        rows_of_slices = np.empty(len(slices), np.int64)
        rows_of_slices[order] = first_rows = np.cumsum(lengths[order]) - lengths[order]
        last_rows = rows_of_slices + lengths - 1
        starts = starts[order]
        decoded, chunked = order[:decode_count].tolist(), order[decode_count:].tolist()
        width = max((known[i].length for i in decoded), default=0)
        decode_blocks_SW = self._blocks_RW[[known[i].row for i in decoded], :width]
        chunks = tuple(
            PackedChunk(int(row), len(slices[i].token_ids), slices[i].first_position, self._cut(known[i], slices[i]))
            for row, i in zip(first_rows[decode_count:], chunked, strict=True)
        )
        token_ids = itertools.chain.from_iterable([slices[i].token_ids for i in order.tolist()])
        return PackedStep(
            block_tokens=self._block_tokens,
            token_ids_T=np.fromiter(token_ids, np.int64, int(lengths.sum())),
            positions_T=np.concatenate([starts[:decode_count], *(chunk.positions for chunk in chunks)]),
            slots_T=self._slots(starts[:decode_count], decode_blocks_SW, chunks),
            decode_contexts_S=starts[:decode_count] + 1,
            decode_blocks_SW=decode_blocks_SW,
            chunks=chunks,
            first_rows=rows_of_slices,
            sample_rows=last_rows[[part.samples for part in slices]],
            blocks_end=max(table.end for table in known),
        )

    def _slots(self, decode_positions: Ints, decode_blocks_SW: Ints, chunks: Sequence[PackedChunk]) -> Ints:
        size = self._block_tokens
        rows = np.arange(len(decode_positions))
        slots = [decode_blocks_SW[rows, decode_positions // size] * size + decode_positions % size]
        slots += [chunk.blocks[chunk.positions // size] * size + chunk.positions % size for chunk in chunks]
        return np.concatenate(slots)

    def _table(self, part: Slice, table: Sequence[int]) -> _Table:
        known = self._tables.get(part.sequence_id)
        if known is None or known.given is not table:
            known = self._tables[part.sequence_id] = self._write(table, None if known is None else known.row)
        end = part.first_position + len(part.token_ids)
        if not part.token_ids or known.length * self._block_tokens < end:
            raise InvariantViolation(
                f"sequence {part.sequence_id} computes {len(part.token_ids)} tokens up to position {end}:"
                f" {known.length} blocks of {self._block_tokens} tokens"
            )
        return known

    def _write(self, table: Sequence[int], row: int | None) -> _Table:
        row_count, width = self._blocks_RW.shape
        count = len(table)
        if count > width:
            grown = np.zeros((row_count, 2 * count), np.int64)
            grown[:, :width], grown[:, width:] = self._blocks_RW, self._blocks_RW[:, :1]
            self._blocks_RW = grown
        if row is None:
            if not self._free_rows:
                more = np.zeros((max(_LEAST_ROWS, row_count), self._blocks_RW.shape[1]), np.int64)
                self._blocks_RW = np.concatenate([self._blocks_RW, more])
                self._free_rows.extend(range(row_count, len(self._blocks_RW)))
            row = self._free_rows.pop()
        blocks_W = self._blocks_RW[row]
        blocks_W[:count] = table
        blocks_W[count:] = table[0] if count else 0
        return _Table(table, row, count, max(table, default=-1) + 1)

    def _cut(self, table: _Table, part: Slice) -> Ints:
        count = -(-(part.first_position + len(part.token_ids)) // self._block_tokens)
        return self._blocks_RW[table.row, : min(count, table.length)].copy()

"""The shape of one step: which rows of the packed token matrix belong to which sequence, and where their KV goes.

Plain integers in NumPy arrays; made once per step, read by every layer. Rows: first the sequences that compute one
token (decodes), by ascending context length so that neighbours can share a padded gather, then chunk after chunk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import SequenceId, Slice

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of more than one token of one sequence."""

    first_row: int
    row_count: int
    first_position: int  # tokens of the sequence before the chunk; their KV is in the cache
    blocks: Ints  # of the whole context, chunk included

    @property
    def context_tokens(self) -> int:
        return self.first_position + self.row_count


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Legend: T rows in all, S decodes, W blocks of the longest decode."""

    block_tokens: int
    token_ids_T: Ints
    positions_T: Ints
    slots_T: Ints  # block * block_tokens + offset: where each row's K and V go
    decode_contexts_S: Ints  # tokens, the new one included; ascending
    decode_blocks_SW: Ints  # padded with the sequence's own first block
    chunks: tuple[Chunk, ...]
    sample_rows: Ints  # aligned with the batch's slices that sample
    blocks_end: int  # highest block id in use, plus one

    @property
    def row_count(self) -> int:
        return len(self.token_ids_T)

    @property
    def decode_count(self) -> int:
        return len(self.decode_contexts_S)


def pack(slices: Sequence[Slice], block_tables: Mapping[SequenceId, Sequence[int]], block_tokens: int) -> PackedStep:
    """Lay out a batch's slices. Row order differs from slice order; `sample_rows` leads back.

    Raises:
        InvariantViolation: a sequence has no table, or one that does not cover the slice.
    """
    ends = [s.first_position + len(s.token_ids) for s in slices]
    order = sorted(range(len(slices)), key=lambda i: (len(slices[i].token_ids) > 1, ends[i], i))
    decode_count = sum(len(s.token_ids) == 1 for s in slices)
    tables = [_table(slices[i], block_tables, -(-ends[i] // block_tokens)) for i in order]
    counts = np.array([len(slices[i].token_ids) for i in order], np.int64)
    first_rows = np.cumsum(counts) - counts
    decode_contexts_S = np.array([ends[i] for i in order[:decode_count]], np.int64)
    decode_blocks_SW = _padded(tables[:decode_count])
    chunks = tuple(
        Chunk(int(first_rows[at]), int(counts[at]), slices[order[at]].first_position, tables[at])
        for at in range(decode_count, len(order))
    )
    decode_positions = decode_contexts_S - 1
    last_blocks = decode_blocks_SW[np.arange(decode_count), decode_positions // block_tokens]
    slots = [last_blocks * block_tokens + decode_positions % block_tokens]
    positions = [decode_positions]
    for chunk in chunks:
        chunk_positions = np.arange(chunk.first_position, chunk.context_tokens)
        positions.append(chunk_positions)
        slots.append(chunk.blocks[chunk_positions // block_tokens] * block_tokens + chunk_positions % block_tokens)
    last_rows = np.empty(len(slices), np.int64)  # slice -> row of its last token
    last_rows[order] = first_rows + counts - 1
    return PackedStep(
        block_tokens=block_tokens,
        token_ids_T=np.array([token for i in order for token in slices[i].token_ids], np.int64),
        positions_T=np.concatenate(positions),
        slots_T=np.concatenate(slots),
        decode_contexts_S=decode_contexts_S,
        decode_blocks_SW=decode_blocks_SW,
        chunks=chunks,
        sample_rows=last_rows[[s.samples for s in slices]],
        blocks_end=max((int(table.max()) for table in tables), default=-1) + 1,
    )


def _table(part: Slice, block_tables: Mapping[SequenceId, Sequence[int]], block_count: int) -> Ints:
    table = block_tables.get(part.sequence_id)
    if table is None or len(table) < block_count or not part.token_ids:
        raise InvariantViolation(
            f"sequence {part.sequence_id} computes {len(part.token_ids)} tokens from position {part.first_position} on,"
            f" which takes {block_count} blocks; its table has {'none' if table is None else len(table)}"
        )
    return np.array(table[:block_count], np.int64)


def _padded(tables: Sequence[Ints]) -> Ints:
    padded = np.empty((len(tables), max((len(table) for table in tables), default=0)), np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
        row[len(table) :] = table[0]
    return padded

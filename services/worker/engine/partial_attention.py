"""Attention over a part of each context, with what it takes to put parts together: softmax's log-sum-exp per query.

Shapes: R rows of queries, N query heads, K KV heads, G = N / K, H head dim, S sequences side by side, C tokens seen.
Partial results are in float32, or in float64 for float64 queries: 16-bit ones would lose digits with every merge.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from services.worker.engine.packing import Ints

_SIDE_BY_SIDE_BYTES = 4 << 20  # gathered K and V of sequences that are computed at once
_SCORE_ELEMENTS = 4 << 20  # of one sequence's rows computed at once
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)  # with its log-sum-exp


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one sequence, and which of its tokens they see here."""

    row_count: int
    first_token: int
    end_token: int  # seen by the first row
    grows: bool  # every row sees one token more than the row before it
    blocks: Ints  # of the sequence, from its first token on

    @property
    def last_end_token(self) -> int:
        return self.end_token + (self.row_count - 1 if self.grows else 0)


class Partial(NamedTuple):
    out_RNH: torch.Tensor
    lse_RN: torch.Tensor


def merged(parts: Sequence[Partial]) -> torch.Tensor:
    """`out_RNH` over the tokens of all parts, which are disjoint."""
    lse_RN = torch.stack([part.lse_RN for part in parts]).logsumexp(0)
    out_RNH = torch.zeros_like(parts[0].out_RNH)
    for part in parts:
        out_RNH.addcmul_(part.out_RNH, (part.lse_RN - lse_RN).exp_().unsqueeze(-1))
    return out_RNH


@dataclass(frozen=True, slots=True)
class _Group:
    """Spans computed at once: several with one row each, or one with some of its rows."""

    rows_SR: torch.Tensor
    planes: torch.Tensor  # rows of the cache seen as [2B, T*K*H], padded: all keys' planes, then all values'
    hidden_SRC: torch.Tensor | None  # None: all of them are seen


class PartialAttention:
    """Prepared for a list of spans, whose rows follow each other; run in every layer."""

    def __init__(self, spans: Sequence[Span], block_tokens: int, device: torch.device) -> None:
        self._block_tokens = block_tokens
        self._row_count = sum(span.row_count for span in spans)
        first_rows = np.cumsum([0, *(span.row_count for span in spans)])[:-1]
        single = [i for i, span in enumerate(spans) if span.row_count == 1]
        # By blocks, not tokens: two tokens on either side of a boundary need more blocks than three inside of one.
        single.sort(key=lambda i: self._block_span(spans[i]))
        self._spans = spans
        self._device = device
        self._first_rows = first_rows
        self._single = single
        self._groups: list[_Group] | None = None

    def run(self, kv_B2TKH: torch.Tensor, q_RNH: torch.Tensor) -> Partial:
        kv_heads, head_dim = kv_B2TKH.shape[-2:]
        heads = q_RNH.shape[1]
        wide = torch.float64 if q_RNH.dtype == torch.float64 else torch.float32
        if self._groups is None:
            token_bytes = 2 * kv_heads * head_dim * kv_B2TKH.dtype.itemsize
            self._groups = [*self._side_by_side(token_bytes), *self._tiles(heads)]
        out_RNH = q_RNH.new_empty(self._row_count, heads, head_dim, dtype=wide)
        lse_RN = q_RNH.new_empty(self._row_count, heads, dtype=wide)
        planes = kv_B2TKH.view(kv_B2TKH.shape[0] * 2, -1)
        for group in self._groups:
            rows, sequences = group.rows_SR.flatten(), group.rows_SR.shape[0]
            q_SRKGH = q_RNH.index_select(0, rows).to(wide).view(*group.rows_SR.shape, kv_heads, -1, head_dim)
            kv_2SCKH = planes.index_select(0, group.planes).to(wide).view(2, sequences, -1, kv_heads, head_dim)
            attend = _attend if _FUSED is None or q_RNH.device.type != "cpu" else _attend_fused
            attended, lse = attend(q_SRKGH, kv_2SCKH[0], kv_2SCKH[1], group.hidden_SRC)
            out_RNH.index_copy_(0, rows, attended.reshape(-1, heads, head_dim))
            lse_RN.index_copy_(0, rows, lse.reshape(-1, heads))
        return Partial(out_RNH, lse_RN)

    def _side_by_side(self, token_bytes: int) -> Iterator[_Group]:
        """Sequences with one row, the longest first, as many at once as stay in the cache and are of a length."""
        left = list(self._single)
        while left:
            longest = self._block_span(self._spans[left[-1]])
            room = max(1, _SIDE_BY_SIDE_BYTES // (longest * self._block_tokens * token_bytes))
            chosen = [i for i in left[-room:] if self._block_span(self._spans[i]) >= longest * 3 // 4]
            del left[-len(chosen) :]
            yield self._group([(i, 0, 1) for i in chosen], longest)

    def _tiles(self, heads: int) -> Iterator[_Group]:
        for i, span in enumerate(self._spans):
            if span.row_count == 1:
                continue
            blocks = self._block_span(span)
            size = max(1, _SCORE_ELEMENTS // (blocks * self._block_tokens * heads))
            for row in range(0, span.row_count, size):
                yield self._group([(i, row, min(size, span.row_count - row))], blocks)

    def _block_span(self, span: Span) -> int:
        return -(-span.last_end_token // self._block_tokens) - span.first_token // self._block_tokens

    def _group(self, parts: Sequence[tuple[int, int, int]], block_count: int) -> _Group:
        """`parts`: index of a span, first row of it, number of rows, which is the same for all."""
        rows = np.stack([self._first_rows[i] + row + np.arange(count) for i, row, count in parts])
        blocks = np.empty((len(parts), block_count), np.int64)
        token_count = block_count * self._block_tokens
        hidden = np.empty((*rows.shape, token_count), np.bool_)
        for at, (i, row, count) in enumerate(parts):
            span = self._spans[i]
            first_block = span.first_token // self._block_tokens
            held = span.blocks[first_block : -(-span.last_end_token // self._block_tokens)]
            blocks[at, : len(held)], blocks[at, len(held) :] = held, held[0]
            tokens_C = first_block * self._block_tokens + np.arange(token_count)
            ends_R = span.end_token + (row + np.arange(count) if span.grows else np.zeros(count, np.int64))
            hidden[at] = (tokens_C < span.first_token) | (tokens_C >= ends_R[:, None])
        keys = blocks.reshape(-1) * 2
        return _Group(
            torch.from_numpy(rows).to(self._device),
            torch.from_numpy(np.concatenate([keys, keys + 1])).to(self._device),
            torch.from_numpy(hidden).to(self._device) if hidden.any() else None,
        )


def _attend_fused(
    q_SRKGH: torch.Tensor, k_SCKH: torch.Tensor, v_SCKH: torch.Tensor, hidden_SRC: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_attend`, in a third of the time; torch has the op for CPUs only, and with no public name."""
    assert _FUSED is not None
    sequences, rows, kv_heads, groups, head_dim = q_SRKGH.shape
    q = q_SRKGH.transpose(1, 2).reshape(sequences, kv_heads, rows * groups, head_dim)
    mask = None
    if hidden_SRC is not None:
        seen = torch.zeros(hidden_SRC.shape, dtype=q.dtype).masked_fill_(hidden_SRC, -math.inf)
        mask = seen.repeat_interleave(groups, 1)[:, None] if rows > 1 else seen[:, None]
    attended, lse = _FUSED(q, k_SCKH.transpose(1, 2), v_SCKH.transpose(1, 2), 0.0, False, attn_mask=mask)
    shape = sequences, kv_heads, rows, groups
    return attended.reshape(*shape, head_dim).transpose(1, 2), lse.reshape(shape).transpose(1, 2)


def _attend(
    q_SRKGH: torch.Tensor, k_SCKH: torch.Tensor, v_SCKH: torch.Tensor, hidden_SRC: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, R, K, G, H] and [S, R, K, G]; every row sees something."""
    sequences, rows, kv_heads, groups, head_dim = q_SRKGH.shape
    q = q_SRKGH.transpose(1, 2).reshape(sequences, kv_heads, rows * groups, head_dim)
    scores = torch.matmul(q, k_SCKH.permute(0, 2, 3, 1)).mul_(head_dim**-0.5)
    scores_SKRGC = scores.view(sequences, kv_heads, rows, groups, -1)
    if hidden_SRC is not None:
        scores_SKRGC.masked_fill_(hidden_SRC[:, None, :, None], -math.inf)
    lse_SKRG = scores_SKRGC.logsumexp(-1)
    weights = scores_SKRGC.sub_(lse_SKRG.unsqueeze(-1)).exp_().view(scores.shape)
    attended = torch.matmul(weights, v_SCKH.transpose(1, 2)).view(sequences, kv_heads, rows, groups, head_dim)
    return attended.transpose(1, 2), lse_SKRG.transpose(1, 2)

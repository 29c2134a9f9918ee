"""Attention of a step some of whose contexts lie elsewhere (KunServe, first arXiv version, section 4.2).

While the KV of a sequence travels to this stage, its old holder attends to it: it gets the queries of a layer and
answers with its partial result. New tokens' K and V are written here, where they will be needed, and attended to here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from services.worker.core.batch import SequenceId, Slice
from services.worker.engine.attention import AttentionBackend, AttentionStep
from services.worker.engine.packing import Ints, PackedStep, Packer
from services.worker.engine.partial_attention import Partial, PartialAttention, Span, merged


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The first `token_count` tokens' KV of a sequence in the layers `[first_layer, last_layer)`."""

    holder: str
    token_count: int
    first_layer: int
    last_layer: int


class Holders(Protocol):
    def of(self, sequence_id: SequenceId) -> Sequence[Elsewhere]:
        """With layers that do not overlap."""
        ...

    def ask(
        self, holder: str, layer: int, rows: Sequence[tuple[SequenceId, int]], q_RNH: torch.Tensor
    ) -> Callable[[], Partial]:
        """Send the queries of some sequences, so many rows of each, without waiting. What is returned waits.

        Raises (both):
            Unavailable: the holder is gone, or does not answer.
        """
        ...


class Nowhere:
    """`Holders` of a worker whose KV is all here."""

    def of(self, sequence_id: SequenceId) -> Sequence[Elsewhere]:
        return ()

    def ask(
        self, holder: str, layer: int, rows: Sequence[tuple[SequenceId, int]], q_RNH: torch.Tensor
    ) -> Callable[[], Partial]:
        raise NotImplementedError(f"nothing is at {holder}")


@dataclass(frozen=True, slots=True)
class _Question:
    holder: str
    rows: tuple[tuple[SequenceId, int], ...]
    first: int  # of the rows of all questions
    last: int


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    """The same for all layers in which the same contexts are elsewhere."""

    here: AttentionStep | None
    rows_here: torch.Tensor
    rows: torch.Tensor  # the others
    k_rows: torch.Tensor  # where their K goes, in the cache seen as [B*2*T, K*H]
    v_rows: torch.Tensor
    new_tokens: PartialAttention
    questions: tuple[_Question, ...]


class SpreadAttentionStep:
    """An `AttentionStep`: `run` is to be called for one layer after the other, from `first_layer` on."""

    def __init__(
        self,
        backend: AttentionBackend,
        packer: Packer,
        packed: PackedStep,
        slices: Sequence[Slice],
        block_tables: Sequence[Sequence[int]],
        holders: Holders,
        first_layer: int,
        device: torch.device,
    ) -> None:
        self._backend = backend
        self._packer = packer
        self._packed = packed
        self._slices = slices
        self._tables = block_tables
        self._holders = holders
        self._layer = first_layer
        self._device = device
        self._elsewhere = [tuple(holders.of(part.sequence_id)) for part in slices]
        self._plans: dict[tuple[Elsewhere | None, ...], _LayerPlan | AttentionStep] = {}

    def run(
        self,
        kv_B2TKH: torch.Tensor,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        out_TNH: torch.Tensor,
    ) -> None:
        layer, self._layer = self._layer, self._layer + 1
        plan = self._plan_of(layer)
        if not isinstance(plan, _LayerPlan):
            plan.run(kv_B2TKH, q_TNH, k_TKH, v_TKH, out_TNH)
            return
        q_RNH = q_TNH.index_select(0, plan.rows)
        answers = [self._holders.ask(q.holder, layer, q.rows, q_RNH[q.first : q.last]) for q in plan.questions]
        token_rows = kv_B2TKH.view(-1, k_TKH.shape[1] * k_TKH.shape[2])
        token_rows.index_copy_(0, plan.k_rows, k_TKH.index_select(0, plan.rows).flatten(1))
        token_rows.index_copy_(0, plan.v_rows, v_TKH.index_select(0, plan.rows).flatten(1))
        if plan.here is not None:
            q, k, v = (tensor.index_select(0, plan.rows_here) for tensor in (q_TNH, k_TKH, v_TKH))
            out = torch.empty_like(q)
            plan.here.run(kv_B2TKH, q, k, v, out)
            out_TNH.index_copy_(0, plan.rows_here, out)
        new = plan.new_tokens.run(kv_B2TKH, q_RNH)
        answered = [answer() for answer in answers]
        old = Partial(*(torch.cat(tensors).to(new.out_RNH.dtype) for tensors in zip(*answered, strict=True)))
        out_TNH.index_copy_(0, plan.rows, merged([new, old]).to(out_TNH.dtype))

    def _plan_of(self, layer: int) -> _LayerPlan | AttentionStep:
        key = tuple(
            next((e for e in contexts if e.first_layer <= layer < e.last_layer), None) for contexts in self._elsewhere
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(key) if any(key) else self._backend.prepare(self._packed)
        return plan

    def _make_plan(self, elsewhere: Sequence[Elsewhere | None]) -> _LayerPlan:
        away = [(e.holder, i, e) for i, e in enumerate(elsewhere) if e is not None]
        away.sort(key=lambda one: one[:2])
        spans: list[Span] = []
        rows: list[Ints] = []
        for _, i, context in away:
            part, table = self._slices[i], np.array(self._tables[i], np.int64)
            spans.append(Span(len(part.token_ids), context.token_count, part.first_position + 1, True, table))
            rows.append(self._rows(i))
        rows_R = np.concatenate(rows)
        slots_R = self._packed.slots_T[rows_R]
        block_tokens = self._packed.block_tokens
        k_rows_R = slots_R // block_tokens * block_tokens + slots_R
        here, rows_here = self._plan_here([i for i, e in enumerate(elsewhere) if e is None])
        return _LayerPlan(
            here=here,
            rows_here=self._index(rows_here),
            rows=self._index(rows_R),
            k_rows=self._index(k_rows_R),
            v_rows=self._index(k_rows_R + block_tokens),
            new_tokens=PartialAttention(spans, block_tokens, self._device),
            questions=self._questions([(holder, i) for holder, i, _ in away]),
        )

    def _plan_here(self, here: Sequence[int]) -> tuple[AttentionStep | None, Ints]:
        """Of slices whose contexts are all here. Packed by themselves their rows have the same order."""
        if not here:
            return None, np.empty(0, np.int64)
        packed = self._packer.pack([self._slices[i] for i in here], [self._tables[i] for i in here])
        rows = np.sort(np.concatenate([self._rows(i) for i in here]))
        return self._backend.prepare(packed), rows

    def _questions(self, away: Sequence[tuple[str, int]]) -> tuple[_Question, ...]:
        questions: list[_Question] = []
        at = 0
        for holder in sorted({holder for holder, _ in away}):
            asked = [self._slices[i] for one, i in away if one == holder]
            rows = tuple((part.sequence_id, len(part.token_ids)) for part in asked)
            count = sum(count for _, count in rows)
            questions.append(_Question(holder, rows, at, at + count))
            at += count
        return tuple(questions)

    def _rows(self, slice_index: int) -> Ints:
        first = int(self._packed.first_rows[slice_index])
        return np.arange(first, first + len(self._slices[slice_index].token_ids))

    def _index(self, rows: Ints) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._device)

"""Samples the next tokens on a GPU, with a few launches for all rows and a single wait. The rules are the same as in
`sampler`; draws differ by rounding only, since sums over a vocabulary have float32 terms here.

Shapes: R rows that sample, V vocabulary, L rows with logprobs, H histories of penalised sequences.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ballast.common.extras import lacking
from ballast.common.sampling import SamplingParams
from ballast.service.grammar import Grammars
from services.worker.core.batch import NewSequence, SequenceId, TokenLogprobs
from services.worker.engine.constraint import Constraint, constraint_of
from services.worker.engine.random_numbers import uniforms
from services.worker.engine.sampler import Sampled, SampleRow, require_new
from services.worker.engine.upload import upload

_TILE, _WARPS = 4096, 16  # logits that a program reads per iteration
# Minimum and maximum candidates that `find_best` collects for a filtered row; ties may exceed the minimum.
_LEAST, _ROOM = 512, 1024
_EDITS = 128
_ADJUSTED = 2048
_FIRST_HISTORIES, _FIRST_PLACES = 8, 256


@dataclass(frozen=True, slots=True)
class _GpuSequence:
    place: int  # row in the sampler's tables
    sampling: SamplingParams
    constraint: Constraint | None
    history: int  # row of the sampler's token counts; -1: not penalised

    @property
    def special(self) -> bool:
        """True if a step has to process this sequence individually."""
        sampling = self.sampling
        return sampling.logprobs is not None or self.constraint is not None or bool(sampling.logit_bias)


@dataclass(frozen=True, slots=True)
class GpuRows:
    """`PreparedRows` on a GPU: the arrays to upload, and flags for the features used."""

    sampler: "GpuSampler"
    sequences: Sequence[_GpuSequence]
    arrays: list[np.ndarray]
    draws: bool
    masked: bool
    penalised: bool
    edit_count: int
    ranked: tuple[int, ...]  # rows with logprobs

    def launch(self, uploaded: Sequence[torch.Tensor], logits_RV: torch.Tensor) -> "GpuChoosing":
        return self.sampler.launch(self, uploaded, logits_RV)


@dataclass(frozen=True, slots=True)
class GpuChoosing:
    """The launched sampling of a step's rows on the device."""

    token_ids_R: torch.Tensor  # on the device, int32
    sequences: Sequence[_GpuSequence]
    ranked: tuple[int, ...]
    copies: Sequence[torch.Tensor]  # on the host, valid after the event
    over: torch.cuda.Event | None
    raw_LV: torch.Tensor | None = None  # logits of the ranked rows

    def collect(self) -> Sampled:
        """Wait for the sampled tokens and return them."""
        if self.over is not None:
            self.over.synchronize()
        tokens, *ranked = (copy.tolist() for copy in self.copies)
        errors: list[tuple[int, str]] = []
        for i, sequence in enumerate(self.sequences):
            if sequence.constraint is not None:
                sequence.constraint.add(tokens[i])
                if sequence.constraint.error:
                    errors.append((i, sequence.constraint.error))
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if ranked:
            for at, (i, logprob, values, top, found) in enumerate(zip(self.ranked, *ranked, strict=True)):
                count = self.sequences[i].sampling.logprobs or 0
                if found < count:
                    values, top = self._best_of_all(at, count)
                logprobs[i] = TokenLogprobs(tokens[i], logprob, tuple(zip(top[:count], values[:count], strict=True)))
        return Sampled(tuple(tokens), tuple(logprobs), tuple(errors))

    def _best_of_all(self, row: int, count: int) -> tuple[list[float], list[int]]:
        """Top tokens of a row in which more are tied than `find_best` can collect. Waits for the device again."""
        assert self.raw_LV is not None
        logits_V = self.raw_LV[row].float()
        top = logits_V.topk(min(count, len(logits_V)))
        return (top.values - logits_V.logsumexp(-1)).tolist(), top.indices.tolist()


class GpuSampler:
    """Keeps the sampling state of running sequences; token counts of penalised ones are on the device."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        grammars: Grammars | None = None,
    ) -> None:
        """Raises ConfigError if triton is not installed."""
        try:
            self._kernels: Any = importlib.import_module("services.worker.engine.sampling_kernels")
        except ImportError as error:
            raise lacking("device cuda", "triton", "cuda") from error
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        self._sequences: dict[SequenceId, _GpuSequence] = {}
        self._numbers = np.zeros((0, 8))  # one row per place; columns as in the kernels
        self._wholes = np.zeros((0, 4), np.int32)
        self._seeds = np.zeros(0, np.int64)
        self._special = np.zeros(0, np.bool_)
        self._free_places: list[int] = []
        self._counts_HV = torch.zeros(0, vocab_size, dtype=torch.int16, device=device)
        self._free_histories: list[int] = []
        self._begun: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # histories to write: (tokens, counts)
        self._scratch: tuple[torch.Tensor, ...] = ()
        self._places = torch.zeros(0, dtype=torch.int32, device=device)
        self._told: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        return tuple(self._sequences)

    def add(self, new: NewSequence) -> None:
        require_new(new, self._sequences)
        sampling = new.sampling
        self._sequences[new.sequence_id] = sequence = _GpuSequence(
            place=self._place(),
            sampling=sampling,
            constraint=constraint_of(new, self._grammars, self._eos_token_ids, self._vocab_size),
            history=self._begin_history(new) if sampling.penalised else -1,
        )
        place = sequence.place
        floor = abs(sampling.temperature * math.log(sampling.min_p)) if sampling.min_p > 0 else math.inf
        penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._numbers[place] = (sampling.temperature, sampling.top_p, floor, 0.0, *penalties, 0.0)
        self._wholes[place] = (min(sampling.top_k, self._vocab_size), sequence.history, -1, 0)
        self._seeds[place] = sampling.seed or 0
        self._special[place] = sequence.special

    def _place(self) -> int:
        if not self._free_places:
            known = len(self._seeds)
            count = max(_FIRST_PLACES, 2 * known)
            self._numbers = np.resize(self._numbers, (count, 8))
            self._wholes = np.resize(self._wholes, (count, 4))
            self._seeds = np.resize(self._seeds, count)
            self._special = np.resize(self._special, count)
            self._free_places.extend(range(known, count))
        return self._free_places.pop()

    def remove(self, sequence_id: SequenceId) -> None:
        """Forget a sequence, if it is known."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            return
        self._free_places.append(sequence.place)
        if sequence.history >= 0:
            self._free_histories.append(sequence.history)
            self._begun.pop(sequence.history, None)

    def _begin_history(self, new: NewSequence) -> int:
        if not self._free_histories:
            known = len(self._counts_HV)
            count = max(_FIRST_HISTORIES, 2 * known)
            grown_HV = self._counts_HV.new_zeros(count, self._vocab_size)
            grown_HV[:known] = self._counts_HV
            self._counts_HV = grown_HV
            self._free_histories.extend(range(known, count))
        history = self._free_histories.pop()
        prompt = np.unique(np.array(new.prompt_token_ids, np.int64))
        output, counts = np.unique(np.array(new.output_token_ids, np.int64), return_counts=True)
        prompt = prompt[~np.isin(prompt, output)]
        values = np.concatenate([np.ones(len(prompt), np.int16), np.minimum(counts + 1, 32767).astype(np.int16)])
        self._begun[history] = (np.concatenate([prompt, output]), values)
        return history

    @torch.inference_mode()
    def _write_histories(self) -> None:
        """Write the histories of the sequences that were added since the last step, all in one operation."""
        histories = np.fromiter(self._begun, np.int64, len(self._begun))
        tokens, values = zip(*self._begun.values(), strict=True)
        rows = np.repeat(histories, [len(each) for each in tokens])
        self._begun.clear()
        there = upload([histories, rows, np.concatenate(tokens), np.concatenate(values)], self._device)
        self._counts_HV.index_fill_(0, there[0], 0)
        self._counts_HV.index_put_((there[1], there[2]), there[3])

    def prepare(self, rows: Sequence[SampleRow]) -> GpuRows:
        """Prepare the arrays that are uploaded with the step."""
        if self._begun:
            self._write_histories()
        sequences = [self._sequences[row.sequence_id] for row in rows]
        places_R = np.array([sequence.place for sequence in sequences], np.int64)
        numbers, wholes = self._numbers[places_R], self._wholes[places_R]
        draws = bool(numbers[:, 0].any())
        if draws:
            positions_R = np.array([row.position for row in rows], np.int64)
            numbers[:, 3] = uniforms(self._seeds[places_R], positions_R)
        masks: list[np.ndarray] = []
        places: list[tuple[int, int]] = []
        values: list[float] = []
        ranked: list[int] = []
        for i in np.flatnonzero(self._special[places_R]).tolist():
            sequence = sequences[i]
            if sequence.sampling.logprobs is not None:
                ranked.append(i)
            bits, excluded = (None, ()) if sequence.constraint is None else sequence.constraint.next()
            if bits is not None:
                wholes[i, 2] = len(masks)
                masks.append(_words(bits, self._vocab_size))
            if excluded or sequence.sampling.logit_bias:
                edits = dict(sequence.sampling.logit_bias) | dict.fromkeys(excluded, -math.inf)
                places.extend((i, token) for token in edits)
                values.extend(edits.values())
        arrays: list[np.ndarray] = [numbers, wholes]
        if masks:
            arrays.append(np.stack(masks))
        if places:
            arrays += [np.array(places, np.int32), np.array(values, np.float32)]
        if ranked:
            arrays.append(np.array(ranked, np.int64))
        return GpuRows(
            self,
            sequences,
            arrays,
            draws=draws,
            masked=bool(masks),
            penalised=bool((wholes[:, 1] >= 0).any()),
            edit_count=len(places),
            ranked=tuple(ranked),
        )

    def launch(self, rows: GpuRows, uploaded: Sequence[torch.Tensor], logits_RV: torch.Tensor) -> GpuChoosing:
        row_count, vocabulary = logits_RV.shape
        if rows.edit_count or rows.penalised:
            logits_RV = logits_RV.float()  # small changes would be lost by rounding
        there = iter(uploaded)
        numbers, wholes = next(there), next(there)
        masks = next(there) if rows.masked else wholes
        kernels, stride = self._kernels, logits_RV.stride(0)
        edits = (next(there), next(there)) if rows.edit_count else None
        ranked_L = next(there) if rows.ranked else None
        raw_LV = None if ranked_L is None else logits_RV.index_select(0, ranked_L)  # before logits are changed
        if edits is not None:
            count = rows.edit_count
            kernels.edit[(-(-count // _EDITS),)](logits_RV, *edits, stride, count, TILE=_EDITS)
        if rows.masked or rows.penalised:
            kernels.adjust[(row_count, -(-vocabulary // _ADJUSTED))](
                logits_RV,
                numbers,
                wholes,
                masks,
                self._counts_HV,
                stride,
                masks.stride(0),
                vocabulary,
                **adjust_constants(),
            )
        chosen_R = torch.empty(row_count, dtype=torch.int32, device=self._device)
        given = (logits_RV, numbers, wholes, chosen_R, *self._found(row_count), stride, vocabulary)
        kernels.find_best[(row_count,)](*given, **find_constants())
        if rows.draws:
            kernels.draw[(row_count,)](*given, **draw_constants())
        if rows.penalised:
            kernels.take_in[(row_count,)](wholes, chosen_R, self._counts_HV, vocabulary)
        results = [chosen_R]
        if raw_LV is not None:
            assert ranked_L is not None
            most = max(rows.sequences[i].sampling.logprobs or 0 for i in rows.ranked)
            results += self._rank(raw_LV, chosen_R.index_select(0, ranked_L).long(), min(most, vocabulary))
        copies, over = _to_host(results)
        return GpuChoosing(chosen_R, rows.sequences, rows.ranked, copies, over, raw_LV)

    def _rank(self, raw_LV: torch.Tensor, chosen_L: torch.Tensor, count: int) -> list[torch.Tensor]:
        """Logprobs of the chosen tokens; logprobs and ids of the best tokens; number of best tokens found per row."""
        row_count, vocabulary = raw_LV.shape
        numbers, wholes, best_token_L = self._unfiltered(row_count)
        best_L, seen, total_L, near, near_tokens = (each[:row_count] for each in self._found(row_count))
        given = (raw_LV, numbers, wholes, best_token_L, best_L, seen, total_L, near, near_tokens)
        self._kernels.find_best[(row_count,)](*given, raw_LV.stride(0), vocabulary, **find_constants())
        found_L1, log_total_L1 = seen[:, 1:2], total_L.log()[:, None].float()
        near = near.masked_fill(self._places >= found_L1, math.inf)
        distances, places = near.topk(min(count, _ROOM), largest=False)
        own_L1 = raw_LV.gather(1, chosen_L[:, None]).float() - best_L[:, None] - log_total_L1
        return [own_L1[:, 0], -distances - log_total_L1, near_tokens.gather(1, places), found_L1[:, 0].clone()]

    def _unfiltered(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sampling parameters with which `find_best` ranks rows without filters, and memory for their best tokens."""
        if self._told is None or len(self._told[0]) < rows:
            numbers = np.zeros((rows, 8))
            numbers[:, :3] = 1.0, 1.0, math.inf
            wholes = np.full((rows, 4), -1, np.int32)
            wholes[:, 0] = 1
            there = upload([numbers, wholes, np.zeros(rows, np.int32)], self._device)
            self._told = (there[0], there[1], there[2])
        return self._told

    def _found(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Outputs of `find_best`, reused by every launch."""
        if not self._scratch or len(self._scratch[0]) < rows:
            floats, ints = torch.float32, torch.int32
            kinds = ((floats, ()), (ints, (4,)), (torch.float64, ()), (floats, (_ROOM,)), (ints, (_ROOM,)))
            self._scratch = tuple(torch.empty(rows, *shape, dtype=dtype, device=self._device) for dtype, shape in kinds)
            self._places = torch.arange(_ROOM, dtype=ints, device=self._device)
        return self._scratch


def find_constants() -> dict[str, int]:
    """Compile-time constants of `find_best`."""
    return {"TILE": _TILE, "LEAST": _LEAST, "ROOM": _ROOM, "num_warps": _WARPS}


def draw_constants() -> dict[str, int]:
    return {"TILE": _TILE, "ROOM": _ROOM, "num_warps": _WARPS}


def adjust_constants() -> dict[str, int]:
    return {"TILE": _ADJUSTED}


def _to_host(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
    """Copies in host memory, valid after the event; without a GPU, the tensors themselves and None."""
    if tensors[0].device.type != "cuda":
        return list(tensors), None
    copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
    for copy, each in zip(copies, tensors, strict=True):
        copy.copy_(each, non_blocking=True)
    over = torch.cuda.Event()
    over.record()
    return copies, over


def _words(bits: np.ndarray, vocab_size: int) -> np.ndarray:
    """Convert a bit mask from bytes to 32-bit words, padded to the vocabulary."""
    words = np.zeros(-(-vocab_size // 32), np.int32)
    count = min(len(bits), words.nbytes)
    words.view(np.uint8)[:count] = bits[:count]
    return words

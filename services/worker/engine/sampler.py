"""Samples the next tokens. A row's token depends only on its logits, parameters, seed and position.

Order, as in vLLM: constraints, logit bias, penalties, temperature, min-p, top-k, top-p. Everything random is computed
in float64 and row by row, so that neither the other rows nor their number can change a token. Tokens with the same
probability as the last one kept by a filter are also kept; otherwise the result would depend on how a sort orders ties.

Shapes: R rows that sample, V vocabulary.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ballast.common.errors import InvariantViolation
from ballast.common.sampling import SamplingParams
from ballast.service.grammar import Grammars
from services.worker.core.batch import NewSequence, SequenceId, TokenLogprobs
from services.worker.engine.constraint import Constraint, constraint_of
from services.worker.engine.native.library import Kernels, RowParameters
from services.worker.engine.penalties import Bias, TokenHistory
from services.worker.engine.random_numbers import uniforms


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row to sample: its sequence, and the position of the token to be sampled."""

    sequence_id: SequenceId
    position: int


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    errors: tuple[tuple[int, str], ...] = ()  # (row, reason) for rows whose constraint has failed


@dataclass(frozen=True, slots=True)
class _SampledSequence:
    sampling: SamplingParams
    seed: int
    constraint: Constraint | None
    bias: Bias | None
    history: TokenHistory | None
    plain: bool  # greedy, without constraints, penalties, bias or logprobs


def require_new(new: NewSequence, known: Container[SequenceId]) -> None:
    """Raises InvariantViolation if a sampled sequence has no seed, or if the sequence is known already."""
    if new.sampling.seed is None and not new.sampling.greedy:
        raise InvariantViolation(f"sequence {new.sequence_id} is sampled without a seed")
    if new.sequence_id in known:
        raise InvariantViolation(f"sequence {new.sequence_id} is added twice")


class _Ranked(NamedTuple):
    """Top tokens of a row, and the normalisation for the logprob of any other token."""

    top: tuple[tuple[int, float], ...]
    values_V: torch.Tensor  # logprobs plus `best` and `log_total`
    best: float
    log_total: float

    def of(self, token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id, float(self.values_V[token_id]) - self.best - self.log_total, self.top)


class Choosing(Protocol):
    """The launched sampling of a step's rows."""

    @property
    def token_ids_R(self) -> torch.Tensor:
        """The sampled tokens, on the device."""
        ...

    def collect(self) -> Sampled:
        """Wait for the sampled tokens and return them."""
        ...


class PreparedRows(Protocol):
    """Host-side data of a step's rows, prepared before its execution."""

    @property
    def arrays(self) -> Sequence[np.ndarray]:
        """Arrays to upload with the step."""
        ...

    def launch(self, uploaded: Sequence[torch.Tensor], logits_RV: torch.Tensor) -> Choosing:
        """Launch the sampling of one token per row. `logits_RV` is overwritten; `uploaded` are the arrays on its
        device.
        """
        ...


class AnySampler(Protocol):
    """A sampler, with the state of each running sequence."""

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]: ...

    def add(self, new: NewSequence) -> None: ...

    def remove(self, sequence_id: SequenceId) -> None:
        """Forget a sequence, if it is known."""
        ...

    def prepare(self, rows: Sequence[SampleRow]) -> PreparedRows: ...


@dataclass(frozen=True, slots=True)
class _Chosen:
    sampled: Sampled

    @property
    def token_ids_R(self) -> torch.Tensor:
        return torch.tensor(self.sampled.token_ids)

    def collect(self) -> Sampled:
        return self.sampled


@dataclass(frozen=True, slots=True)
class _HostRows:
    sampler: "Sampler"
    rows: Sequence[SampleRow]
    arrays: tuple[()] = ()

    def launch(self, uploaded: Sequence[torch.Tensor], logits_RV: torch.Tensor) -> _Chosen:
        return _Chosen(self.sampler.sample(self.rows, logits_RV))


class Sampler:
    """Samples on the host."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
        grammars: Grammars | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """The compiled `kernels` sample all rows in one call; without them, torch samples the same tokens."""
        self._grammars = grammars
        self._kernels = kernels
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        self._sequences: dict[SequenceId, _SampledSequence] = {}
        self._special = 0  # number of sequences that are not plain

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        return tuple(self._sequences)

    def add(self, new: NewSequence) -> None:
        require_new(new, self._sequences)
        sampling = new.sampling
        constraint = constraint_of(new, self._grammars, self._eos_token_ids, self._vocab_size)
        penalised = sampling.penalised
        sequence = _SampledSequence(
            sampling=sampling,
            seed=sampling.seed or 0,
            constraint=constraint,
            bias=Bias(sampling.logit_bias, self._device) if sampling.logit_bias else None,
            history=TokenHistory(new, self._device) if penalised else None,
            plain=sampling.greedy
            and not (penalised or constraint is not None or sampling.logit_bias)
            and sampling.logprobs is None,
        )
        self._sequences[new.sequence_id] = sequence
        self._special += not sequence.plain

    def remove(self, sequence_id: SequenceId) -> None:
        """Forget a sequence, if it is known."""
        sequence = self._sequences.pop(sequence_id, None)
        self._special -= sequence is not None and not sequence.plain

    def prepare(self, rows: Sequence[SampleRow]) -> _HostRows:
        return _HostRows(self, rows)

    def sample(self, rows: Sequence[SampleRow], logits_RV: torch.Tensor) -> Sampled:
        """Sample one token per row. `logits_RV` is overwritten."""
        if logits_RV.dtype not in (torch.float32, torch.float64):
            logits_RV = logits_RV.float()  # required by the kernels; small penalties would be lost by rounding
        if not self._special:
            return Sampled(tuple(self._best(logits_RV)), (None,) * len(rows))
        sequences = [self._sequences[row.sequence_id] for row in rows]
        raw_logprobs = {
            i: self._raw_logprobs(logits_RV[i], sequence.sampling.logprobs)
            for i, sequence in enumerate(sequences)
            if sequence.sampling.logprobs is not None
        }
        for sequence, logits_V in zip(sequences, logits_RV, strict=True):
            if sequence.constraint is not None:
                sequence.constraint.restrict(logits_V)
            if sequence.bias is not None:
                sequence.bias.apply(logits_V)
            if sequence.history is not None:
                sequence.history.apply(logits_V)
        token_ids = self._choose(rows, sequences, logits_RV)
        errors: list[tuple[int, str]] = []
        for i, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
            if sequence.history is not None:
                sequence.history.add(token_id)
            if sequence.constraint is not None:
                sequence.constraint.add(token_id)
                if sequence.constraint.error:
                    errors.append((i, sequence.constraint.error))
        logprobs = [raw_logprobs[i].of(token) if i in raw_logprobs else None for i, token in enumerate(token_ids)]
        return Sampled(tuple(token_ids), tuple(logprobs), tuple(errors))

    def _raw_logprobs(self, logits_V: torch.Tensor, count: int) -> "_Ranked":
        """Logprobs of a row whose logits have not been modified yet, with the `count` best tokens."""
        count = min(count, len(logits_V))
        if self._kernels is None:
            logprobs_V = torch.log_softmax(logits_V.double(), -1)
            values, indices = logprobs_V.topk(count)
            return _Ranked(tuple(zip(indices.tolist(), values.tolist(), strict=True)), logprobs_V, 0.0, 0.0)
        indices, logits, best, log_total = self._kernels.rank(logits_V, count)
        top = zip(indices.tolist(), (logits - best - log_total).tolist(), strict=True)
        return _Ranked(tuple(top), logits_V.clone(), best, log_total)

    def _best(self, logits_RV: torch.Tensor) -> list[int]:
        if self._kernels is None:
            return logits_RV.argmax(-1).tolist()
        zeros = np.zeros(len(logits_RV))
        none = np.zeros(len(logits_RV), np.int64)
        return self._kernels.sample(logits_RV, RowParameters(zeros, none, zeros, zeros, zeros)).tolist()

    def _choose(
        self, rows: Sequence[SampleRow], sequences: Sequence[_SampledSequence], logits_RV: torch.Tensor
    ) -> list[int]:
        if self._kernels is not None:
            return _choose_at_once(self._kernels, rows, sequences, logits_RV)
        token_ids: list[int] = logits_RV.argmax(-1).tolist()
        drawn = [i for i, sequence in enumerate(sequences) if not sequence.sampling.greedy]
        if drawn:
            seeds = np.array([sequences[i].seed for i in drawn], np.int64)
            positions = np.array([rows[i].position for i in drawn], np.int64)
            drawn_RV = logits_RV.index_select(0, torch.tensor(drawn, device=logits_RV.device)).double()
            chosen = draw(drawn_RV, [sequences[i].sampling for i in drawn], uniforms(seeds, positions))
            for i, token_id in zip(drawn, chosen, strict=True):
                token_ids[i] = token_id
        return token_ids


def _choose_at_once(
    kernels: Kernels, rows: Sequence[SampleRow], sequences: Sequence[_SampledSequence], logits_RV: torch.Tensor
) -> list[int]:
    given = [sequence.sampling for sequence in sequences]
    seeds = np.array([sequence.seed for sequence in sequences], np.int64)
    positions = np.array([row.position for row in rows], np.int64)
    parameters = RowParameters(
        temperatures=np.array([s.temperature for s in given], np.float64),
        top_k=np.array([s.top_k for s in given], np.int64),
        top_p=np.array([s.top_p for s in given], np.float64),
        min_p=np.array([s.min_p for s in given], np.float64),
        uniforms=uniforms(seeds, positions),
    )
    return kernels.sample(logits_RV, parameters).tolist()


def draw(logits_RV: torch.Tensor, sampling: Sequence[SamplingParams], uniforms_R: np.ndarray) -> list[int]:
    """Draw one token per row by inversion, in vocabulary order. `logits_RV` is float64 and is overwritten."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits_RV.device)[:, None]

    logits_RV /= column([s.temperature for s in sampling])
    if any(s.min_p > 0 for s in sampling):
        floors = column([math.log(s.min_p) if s.min_p > 0 else -math.inf for s in sampling])
        logits_RV.masked_fill_(logits_RV < logits_RV.amax(-1, keepdim=True) + floors, -math.inf)
    if any(0 < s.top_k < logits_RV.shape[1] or s.top_p < 1 for s in sampling):
        for i in keep_best_at_once(logits_RV, sampling):
            keep_best(logits_RV[i], sampling[i].top_k, sampling[i].top_p)
    cumulated_RV = torch.softmax(logits_RV, -1).cumsum_(-1)
    # The last cumulative value is 1 up to rounding; scaling by it keeps the draw within the row.
    targets_R1 = torch.from_numpy(uniforms_R).to(logits_RV.device)[:, None] * cumulated_RV[:, -1:]
    chosen_R = torch.searchsorted(cumulated_RV, targets_R1, right=True)[:, 0]
    return chosen_R.clamp_(max=logits_RV.shape[1] - 1).tolist()


_FIRST_LOOK = 256  # tokens examined first: most nuclei are smaller, and this topk is much cheaper than a full sort


def keep_best_at_once(logits_RV: torch.Tensor, sampling: Sequence[SamplingParams]) -> list[int]:
    """Apply `keep_best` to all rows at once. Returns the rows that need more than the `_FIRST_LOOK` best tokens: the
    caller processes these one by one, which takes less memory.
    """
    size, device = logits_RV.shape[1], logits_RV.device
    looked_at = min(size, _FIRST_LOOK)
    ranks_R = torch.tensor([s.top_k if 0 < s.top_k <= looked_at else looked_at for s in sampling], device=device) - 1
    limited_R = torch.tensor([0 < s.top_k <= looked_at for s in sampling], device=device)
    is_wide = [looked_at < s.top_k < size for s in sampling]
    narrows_R = torch.tensor(
        [s.top_p < 1 and not wide for s, wide in zip(sampling, is_wide, strict=True)], device=device
    )
    top_p_R = torch.tensor([s.top_p for s in sampling], dtype=logits_RV.dtype, device=device)
    best_RK = logits_RV.topk(looked_at).values

    def from_there(ranks_R: torch.Tensor, applies_R: torch.Tensor) -> torch.Tensor:
        return best_RK.gather(1, ranks_R[:, None]).masked_fill_(~applies_R[:, None], -math.inf)

    least_R1 = from_there(ranks_R, limited_R)
    logits_RV.masked_fill_(logits_RV < least_R1, -math.inf)
    best_RK.masked_fill_(best_RK < least_R1, -math.inf)
    total_R1 = torch.logsumexp(logits_RV, -1, keepdim=True)
    reached_RK = (best_RK - total_R1).exp_().cumsum_(-1) >= top_p_R[:, None]
    is_reached_R = reached_RK[:, -1]
    least_R1 = from_there(reached_RK.int().argmax(-1), is_reached_R & narrows_R)
    logits_RV.masked_fill_(logits_RV < least_R1, -math.inf)
    missed = (narrows_R & ~is_reached_R).tolist() if looked_at < size else [False] * len(sampling)
    return [i for i, wide in enumerate(is_wide) if wide or missed[i]]


def keep_best(row_V: torch.Tensor, top_k: int, top_p: float) -> None:
    """Mask all logits but the top k, and of those all but the smallest set with a probability of at least top_p."""
    size = len(row_V)
    limit = top_k if 0 < top_k < size else size
    if limit < size:
        threshold = row_V.topk(limit).values[-1]
        row_V.masked_fill_(row_V < threshold, -math.inf)
    if top_p >= 1.0:
        return
    total = torch.logsumexp(row_V, -1)
    looked_at = min(size, _FIRST_LOOK)
    while True:
        best = row_V.topk(looked_at).values
        reached = (best - total).exp_().cumsum_(-1) >= top_p
        if bool(reached[-1]) or looked_at == size:
            break
        looked_at = size
    last = int(reached.int().argmax()) if bool(reached[-1]) else looked_at - 1
    row_V.masked_fill_(row_V < best[last], -math.inf)

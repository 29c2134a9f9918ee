"""Changes of logits by penalties, which depend on a sequence's tokens so far, and by logit bias."""

from collections.abc import Mapping

import torch

from services.worker.core.batch import NewSequence


class TokenHistory:
    """Token counts of a penalised sequence, stored while it runs."""

    def __init__(self, new: NewSequence, device: torch.device) -> None:
        self._sampling = new.sampling
        self._device = device
        self._counts: dict[int, int] = dict.fromkeys(new.prompt_token_ids, 0)  # token -> count in the output
        for token_id in new.output_token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Add a generated token."""
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def apply(self, logits_V: torch.Tensor) -> None:
        """Penalise logits in place: repetition for prompt and output, frequency and presence for the output."""
        sampling, seen = self._sampling, torch.tensor(list(self._counts), dtype=torch.int64, device=self._device)
        logits = logits_V[seen]
        if sampling.repetition_penalty != 1.0:
            penalty = sampling.repetition_penalty
            logits = torch.where(logits > 0, logits / penalty, logits * penalty)
        counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype, device=self._device)
        if sampling.frequency_penalty != 0.0:
            logits -= counts * sampling.frequency_penalty
        if sampling.presence_penalty != 0.0:
            logits -= (counts > 0).to(logits.dtype) * sampling.presence_penalty
        logits_V[seen] = logits


class Bias:
    """A request's logit bias."""

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self._token_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float64, device=device)

    def apply(self, logits_V: torch.Tensor) -> None:
        """Add the bias to logits in place."""
        logits_V.index_add_(0, self._token_ids, self._values.to(logits_V.dtype))

"""Changes to logits that depend on the tokens a sequence has had so far, or on how many it has generated."""

import math
from collections.abc import Mapping

import torch

from services.worker.core.batch import NewSequence


class TokenHistory:
    """Which tokens a penalised sequence has seen. Lives as long as the sequence runs."""

    def __init__(self, new: NewSequence, vocab_size: int, device: torch.device) -> None:
        self._sampling = new.sampling
        self._seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # in prompt or output
        self._output_counts_V = torch.zeros(vocab_size, dtype=torch.float64, device=device)
        prompt, output = torch.tensor(new.prompt_token_ids), torch.tensor(new.output_token_ids, dtype=torch.int64)
        self._seen_V[prompt.to(device)] = True
        self._seen_V[output.to(device)] = True
        ones = torch.ones(len(output), dtype=torch.float64, device=device)
        self._output_counts_V.index_add_(0, output.to(device), ones)

    def add(self, token_id: int) -> None:
        """Take in a token that was generated."""
        self._seen_V[token_id] = True
        self._output_counts_V[token_id] += 1

    def apply(self, logits_V: torch.Tensor) -> None:
        """Penalise in place: repetition over prompt and output, frequency and presence over the output."""
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0:
            divided = torch.where(
                logits_V > 0, logits_V / sampling.repetition_penalty, logits_V * sampling.repetition_penalty
            )
            logits_V.copy_(torch.where(self._seen_V, divided, logits_V))
        counts_V = self._output_counts_V.to(logits_V.dtype)
        if sampling.frequency_penalty != 0.0:
            logits_V.sub_(counts_V * sampling.frequency_penalty)
        if sampling.presence_penalty != 0.0:
            logits_V.sub_((counts_V > 0).to(logits_V.dtype) * sampling.presence_penalty)


class Bias:
    """What a request adds to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self._token_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float64, device=device)

    def apply(self, logits_V: torch.Tensor) -> None:
        """Adds in place."""
        logits_V.index_add_(0, self._token_ids, self._values.to(logits_V.dtype))


def forbid(logits_V: torch.Tensor, token_ids: tuple[int, ...]) -> None:
    """Make these tokens impossible, in place."""
    logits_V[list(token_ids)] = -math.inf

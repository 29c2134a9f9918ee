"""Prompt logprobs, collected chunk by chunk until the first token is generated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ballast.common.errors import InvariantViolation
from services.worker.core.batch import NewSequence, SequenceId, Slice, TokenLogprobs

_ROWS_AT_ONCE = 32  # maximum rows whose float64 logits are in memory at once


@dataclass(slots=True)
class _Prompt:
    token_ids: tuple[int, ...]
    top_count: int
    known: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])  # logprobs of the prompt's first tokens


class PromptLogprobs:
    """Collects prompt logprobs. `logits`: maps hidden states after the last layer to logits."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._logits = logits
        self._prompts: dict[SequenceId, _Prompt] = {}

    def add(self, new: NewSequence) -> None:
        if new.sampling.prompt_logprobs is not None and not new.output_token_ids:
            first = TokenLogprobs(new.prompt_token_ids[0], 0.0, ())
            self._prompts[new.sequence_id] = _Prompt(new.prompt_token_ids, new.sampling.prompt_logprobs, [first])

    def remove(self, sequence_id: SequenceId) -> None:
        self._prompts.pop(sequence_id, None)

    def take(self, slices: Sequence[Slice], first_rows: np.ndarray, hidden_TD: torch.Tensor) -> None:
        """Record the logprobs of prompt tokens predicted by a computed batch. All ranks of an instance call it with the
        same slices.
        """
        if not self._prompts:
            return
        for part, first_row in zip(slices, first_rows.tolist(), strict=True):
            if (prompt := self._prompts.get(part.sequence_id)) is not None:
                self._take(prompt, part, hidden_TD[first_row : first_row + len(part.token_ids)])

    def with_prompt(self, sequence_id: SequenceId, logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
        """The logprobs of a generated token. The first one also gets the prompt's logprobs, if requested.

        Raises:
            InvariantViolation: tokens of the prompt were not computed.
        """
        prompt = self._prompts.pop(sequence_id, None) if self._prompts else None
        if prompt is None or logprobs is None:
            return logprobs
        if len(prompt.known) != len(prompt.token_ids):
            raise InvariantViolation(f"logprobs of {len(prompt.known)} of {len(prompt.token_ids)} tokens of a prompt")
        return TokenLogprobs(logprobs.token_id, logprobs.logprob, logprobs.top, tuple(prompt.known))

    def _take(self, prompt: _Prompt, part: Slice, hidden_CD: torch.Tensor) -> None:
        first = part.first_position + 1  # position predicted by the first row
        if first > len(prompt.known):
            raise InvariantViolation(f"a prompt with {len(prompt.known)} logprobs continues at {first}")
        del prompt.known[first:]
        predicted = prompt.token_ids[first : first + len(part.token_ids)]
        for at in range(0, len(predicted), _ROWS_AT_ONCE):
            token_ids = predicted[at : at + _ROWS_AT_ONCE]
            logprobs_RV = self._logits(hidden_CD[at : at + len(token_ids)]).double().log_softmax(-1)
            chosen_R1 = torch.tensor(token_ids, device=logprobs_RV.device).unsqueeze(1)
            chosen = logprobs_RV.gather(1, chosen_R1).squeeze(1).tolist()
            values, indices = logprobs_RV.topk(min(prompt.top_count, logprobs_RV.shape[1]))
            for token_id, logprob, *top in zip(token_ids, chosen, indices.tolist(), values.tolist(), strict=True):
                prompt.known.append(TokenLogprobs(token_id, logprob, tuple(zip(*top, strict=True))))

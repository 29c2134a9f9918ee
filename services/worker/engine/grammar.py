"""Constrains a sequence to its grammar: masks tokens that may not follow before sampling."""

import math

import numpy as np
import torch

from ballast.common.errors import InvalidRequest
from ballast.service.grammar import Grammars, why_given_up
from services.worker.core.batch import NewSequence


class GrammarState:
    """A sequence's state in its grammar. If the grammar is invalid or fails later, `error` has the reason: tokens
    sampled from then on are unconstrained and must not reach the client.
    """

    def __init__(self, grammars: Grammars | None, new: NewSequence) -> None:
        self.error = ""
        self._matcher = None
        grammar = new.sampling.grammar
        if grammars is None or grammar is None:
            self.error = "the model has no tokenizer.json, so that no grammar can be followed"
            return
        try:
            self._matcher = grammars.start(grammar, new.output_token_ids)
        except InvalidRequest as error:
            self.error = str(error)
        else:
            self.error = why_given_up(self._matcher)

    def allowed(self) -> np.ndarray | None:
        """Bit mask of the allowed tokens as bytes, lowest token first. None: the mask is unknown."""
        if self._matcher is None or self.error:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self.error = why_given_up(self._matcher)  # a failed matcher allows the end of the sequence and reports no error
        return bits

    def restrict(self, logits_V: torch.Tensor) -> None:
        """Mask logits in place. When the grammar is complete, only end-of-sequence tokens remain."""
        if (bits := self.allowed()) is None:
            return
        allowed_V = np.unpackbits(bits, bitorder="little", count=len(logits_V)).view(np.bool_)
        logits_V.masked_fill_(torch.from_numpy(~allowed_V).to(logits_V.device), -math.inf)

    def add(self, token_id: int) -> None:
        """Advance by one generated token."""
        if self._matcher is not None and not self.error:
            self._matcher.consume_token(token_id)
            self.error = why_given_up(self._matcher)

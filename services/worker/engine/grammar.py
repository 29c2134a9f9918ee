"""Constrains a sequence to its grammar: tokens that may not follow are masked before sampling."""

import math

import numpy as np
import torch

from ballast.common.errors import InvalidRequest
from ballast.service.grammar import Grammars, why_given_up
from services.worker.core.batch import NewSequence


class GrammarState:
    """State of one sequence in its grammar. A grammar that is invalid, or fails later, leaves its reason in `error`:
    tokens sampled afterwards are unconstrained, and must not reach the client.
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
        """A bit for each token, as bytes, lowest first. None: the mask is unknown."""
        if self._matcher is None or self.error:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self.error = why_given_up(self._matcher)  # such a matcher allows the end, and says nothing by itself
        return bits

    def restrict(self, logits_V: torch.Tensor) -> None:
        """Mask logits in place. At the grammar's end only end-of-sequence tokens are left."""
        if (bits := self.allowed()) is None:
            return
        allowed_V = np.unpackbits(bits, bitorder="little", count=len(logits_V)).view(np.bool_)
        logits_V.masked_fill_(torch.from_numpy(~allowed_V).to(logits_V.device), -math.inf)

    def add(self, token_id: int) -> None:
        """Advance by a generated token."""
        if self._matcher is not None and not self.error:
            self._matcher.consume_token(token_id)
            self.error = why_given_up(self._matcher)

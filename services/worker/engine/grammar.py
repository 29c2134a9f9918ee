"""Keeps a sequence within its grammar: what may not follow is made impossible before a token is drawn."""

import math

import numpy as np
import torch

from ballast.common.errors import InvalidRequest
from ballast.service.grammar import Grammars, why_given_up
from services.worker.core.batch import NewSequence


class GrammarState:
    """Where one sequence stands in its grammar. A grammar that cannot be followed, or no further, leaves its reason in
    `error`: tokens that are drawn from then on are of no grammar, and must not reach the client.
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
        """A bit for each token, as bytes, lowest first. None: no more is known of what may follow."""
        if self._matcher is None or self.error:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self.error = why_given_up(self._matcher)  # such a matcher allows the end, and says nothing by itself
        return bits

    def restrict(self, logits_V: torch.Tensor) -> None:
        """Changes them in place. Where the grammar has come to its end only tokens that end the sequence are left."""
        if (bits := self.allowed()) is None:
            return
        allowed_V = np.unpackbits(bits, bitorder="little", count=len(logits_V)).view(np.bool_)
        logits_V.masked_fill_(torch.from_numpy(~allowed_V).to(logits_V.device), -math.inf)

    def add(self, token_id: int) -> None:
        """Take in a token that was generated."""
        if self._matcher is not None and not self.error:
            self._matcher.consume_token(token_id)
            self.error = why_given_up(self._matcher)

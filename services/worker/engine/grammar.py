"""Keeps a sequence within its grammar: what may not follow is made impossible before a token is drawn."""

import math

import numpy as np
import torch

from ballast.common.errors import InvalidRequest, InvariantViolation
from ballast.service.grammar import Grammars
from services.worker.core.batch import NewSequence


class GrammarState:
    """Where one sequence stands in its grammar.

    Raises:
        InvariantViolation: the grammar cannot be followed; a dispatcher should have refused it.
    """

    def __init__(self, grammars: Grammars | None, new: NewSequence) -> None:
        grammar = new.sampling.grammar
        if grammars is None or grammar is None:
            raise InvariantViolation(f"sequence {new.sequence_id} has a grammar, and this model no tokenizer.json")
        try:
            self._matcher = grammars.start(grammar, new.output_token_ids)
        except InvalidRequest as error:
            raise InvariantViolation(f"sequence {new.sequence_id}: {error}") from error

    def restrict(self, logits_V: torch.Tensor) -> None:
        """Changes them in place. Where the grammar has come to its end only tokens that end the sequence are left."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed_V = np.unpackbits(bits, bitorder="little", count=len(logits_V)).view(np.bool_)
        logits_V.masked_fill_(torch.from_numpy(~allowed_V).to(logits_V.device), -math.inf)

    def add(self, token_id: int) -> None:
        """Take in a token that was generated."""
        self._matcher.consume_token(token_id)

"""Restricts the next token of a sequence: by min_tokens, bad words, allowed tokens and its grammar.

A constraint depends only on the tokens so far, so a replayed or moved sequence continues under the same one.
"""

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from ballast.common.errors import InvalidRequest
from ballast.common.sampling import SamplingParams
from ballast.service.grammar import Grammars, matcher_failure
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
            self.error = "grammars need a tokenizer.json, which the model does not have"
            return
        try:
            self._matcher = grammars.start(grammar, new.output_token_ids)
        except InvalidRequest as error:
            self.error = str(error)
        else:
            self.error = matcher_failure(self._matcher)

    def allowed(self) -> np.ndarray | None:
        """Bit mask of the tokens that the grammar allows, as bytes, lowest token first; once the grammar is complete,
        these are the end-of-sequence tokens. None: the mask is unknown.
        """
        if self._matcher is None or self.error:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self.error = matcher_failure(
            self._matcher
        )  # a failed matcher allows end-of-sequence tokens and reports no error
        return bits

    def add(self, token_id: int) -> None:
        """Advance by one generated token."""
        if self._matcher is not None and not self.error:
            self._matcher.consume_token(token_id)
            self.error = matcher_failure(self._matcher)


class Constraint:
    """All constraints of one sequence. If no token is left or the grammar fails, `error` has the reason."""

    def __init__(
        self, new: NewSequence, grammars: Grammars | None, eos_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        sampling = new.sampling
        self._vocab_size = vocab_size
        self._grammar = GrammarState(grammars, new) if sampling.grammar is not None else None
        ends = sampling.stop_token_ids + (() if sampling.ignore_eos else tuple(eos_token_ids))
        self._ends = tuple(token for token in dict.fromkeys(ends) if token < vocab_size)
        self._ends_wait = sampling.min_tokens - len(new.output_token_ids)  # tokens until the sequence may end
        self._bad_words = sampling.bad_words_token_ids
        longest = max(map(len, self._bad_words), default=1)
        self._tail = deque(new.output_token_ids, maxlen=longest - 1)
        self._allowed = _bits(sampling.allowed_token_ids, vocab_size) if sampling.allowed_token_ids else None
        self._why = ""

    @property
    def error(self) -> str:
        return self._why or (self._grammar.error if self._grammar is not None else "")

    def next(self) -> tuple[np.ndarray | None, tuple[int, ...]]:
        """Bit mask of the allowed tokens as bytes, and tokens to exclude if the mask is None (all others are allowed).
        Sets `error` if no token is left.
        """
        bits = self._grammar.allowed() if self._grammar is not None else None
        if self._allowed is not None:
            bits = self._allowed if bits is None else bits[: len(self._allowed)] & self._allowed[: len(bits)]
        excluded = self._excluded()
        if bits is not None and excluded:
            bits = bits.copy()
            tokens = np.array([token for token in excluded if token < 8 * len(bits)], np.int64)
            np.bitwise_and.at(bits, tokens >> 3, (~(1 << (tokens & 7))).astype(np.uint8))
            excluded = ()
        if len(excluded) >= self._vocab_size if bits is None else not bits.any():
            self._why = "no token can follow here: bad_words, allowed_token_ids, min_tokens and the grammar exclude all"
            return None, ()
        return bits, excluded

    def restrict(self, logits_V: torch.Tensor) -> None:
        """Set the logits of disallowed tokens to -inf, in place."""
        bits, excluded = self.next()
        if bits is not None:
            allowed_V = np.unpackbits(bits, bitorder="little", count=len(logits_V)).view(np.bool_)
            logits_V.masked_fill_(torch.from_numpy(~allowed_V).to(logits_V.device), -math.inf)
        if excluded:
            logits_V.index_fill_(0, torch.tensor(excluded, device=logits_V.device), -math.inf)

    def add(self, token_id: int) -> None:
        """Advance by one generated token."""
        self._ends_wait -= 1
        self._tail.append(token_id)
        if self._grammar is not None:
            self._grammar.add(token_id)

    def _excluded(self) -> tuple[int, ...]:
        """Tokens that would end the sequence before `min_tokens`, or complete a bad word whose beginning is the end of
        the answer so far (as in vLLM, the prompt does not count).
        """
        tail = tuple(self._tail)
        ends = self._ends if self._ends_wait > 0 else ()
        if not self._bad_words:
            return ends
        words = (word[-1] for word in self._bad_words if tail[max(0, len(tail) + 1 - len(word)) :] == word[:-1])
        return tuple(dict.fromkeys((*ends, *words)))


def constraint_of(
    new: NewSequence, grammars: Grammars | None, eos_token_ids: Sequence[int], vocab_size: int
) -> Constraint | None:
    """The constraint of a new sequence; None if no token is ever excluded."""
    return Constraint(new, grammars, eos_token_ids, vocab_size) if constrained(new.sampling) else None


def constrained(sampling: SamplingParams) -> bool:
    given = sampling.bad_words_token_ids or sampling.allowed_token_ids
    return bool(sampling.min_tokens or given or sampling.grammar is not None)


def _bits(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    allowed_V = np.zeros(vocab_size, np.bool_)
    allowed_V[np.array([token for token in token_ids if token < vocab_size], np.int64)] = True
    return np.packbits(allowed_V, bitorder="little")

"""Incremental detokenisation: never emits a partial character, nor the same character twice.

A tokenizer's decoder depends on neighbours (byte sequences, word boundaries), so a window of recent tokens is decoded
and only final new text is emitted. An incomplete UTF-8 sequence at the end appears as U+FFFD (one, or one per byte,
depending on the decoder). It is held back until the following tokens complete it or prove it invalid, and dropped at
the end of generation.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from services.worker.core.batch import NewSequence

_CONTEXT_TOKENS = 6  # tokens before the window that preserve the decoder's context
_WINDOW_TOKENS = 16  # the window is shortened to the context when it reaches this length
_REPLACEMENT = "\ufffd"
_INCOMPLETE_CHARS = 3  # maximum bytes of an incomplete UTF-8 character, each of which may appear as U+FFFD


class Detokenizer:
    """Detokenises one sequence. The prompt's tokens only provide context."""

    __slots__ = ("_given_chars", "_skip_special", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        # Number of leading characters of the window's text that must not be emitted, because they belong to the prompt
        # or have already been emitted.
        self._given_chars = len(self._stable_text())

    def push(self, token_id: int) -> str:
        """Add a token. Returns the new text, possibly empty."""
        self._window.append(token_id)
        text = self._stable_text()
        new = text[self._given_chars :]
        if new:
            if len(self._window) >= _WINDOW_TOKENS:
                self._window = self._window[-_CONTEXT_TOKENS:]
                text = self._stable_text()
            self._given_chars = len(text)
        elif self._is_skipped(token_id):
            self._window.pop()  # many of them would make the window long, and each push slow
        return new

    def _is_skipped(self, token_id: int) -> bool:
        """True if decoding ignores the token: it is a special token, or unknown to the tokenizer."""
        if self._tokenizer.id_to_token(token_id) is None:
            return True
        alone: list[str] = [self._tokenizer.decode([token_id], skip_special_tokens=skip) for skip in (False, True)]
        return self._skip_special and alone[0] != alone[1]

    def _stable_text(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special)
        for _ in range(_INCOMPLETE_CHARS):
            text = text.removesuffix(_REPLACEMENT)
        return text


def primed_detokenizer(tokenizer: Tokenizer, new: NewSequence) -> Detokenizer:
    """Return a detokenizer positioned after the output of earlier attempts."""
    skip = new.sampling.skip_special_tokens
    detokenizer = Detokenizer(tokenizer, new.prompt_token_ids, skip_special_tokens=skip)
    for token_id in new.output_token_ids:
        detokenizer.push(token_id)
    return detokenizer

"""Grammars as llguidance reads them: what dispatchers check and workers follow is one and the same.

The state of a grammar follows from the tokens alone, so that a replay or a move goes on where the sequence was.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from ballast.common.errors import ConfigError, InvalidRequest
from ballast.common.sampling import Grammar, GrammarKind
from ballast.service.one_of import narrowed

if TYPE_CHECKING:  # exists in the type stubs only
    from llguidance._lib import JsonCompileOptions

MOST_KEPT = 256  # compiled: most requests of an application share a few
_SILENT = 0
# Between two tokens of JSON. Without a bound a model may write nothing but blanks to the end of its length.
_JSON_DEFAULTS: "JsonCompileOptions" = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}"}


class Grammars:
    """Compiles grammars for one vocabulary, each once: who asks for one that is being compiled waits for it. Safe for
    use from any thread.

    Args:
        tokenizer_file: tokenizer.json of the model.
        vocab_size: Of the model; may be larger than the tokenizer's. None: the tokenizer's.
        eos_token_ids: Tokens that end a sequence, which are allowed where a grammar may end. None: the tokenizer's.

    Raises:
        ConfigError: the file is no tokenizer that llguidance can read.
    """

    def __init__(
        self, tokenizer_file: Path, vocab_size: int | None = None, eos_token_ids: Sequence[int] | None = None
    ) -> None:
        eos = list(eos_token_ids) if eos_token_ids else None
        try:
            self._tokenizer = LLTokenizer(str(tokenizer_file), n_vocab=vocab_size, eos_token=eos)
        except (ValueError, RuntimeError, OSError) as error:
            raise ConfigError(str(tokenizer_file), f"is not a valid tokenizer: {error}") from error
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()  # the one that was asked for last is last

    def check(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> None:
        """Raises InvalidRequest, with what llguidance says, for a grammar that cannot be followed, or that these
        tokens of an answer do not follow.
        """
        matcher = self._compile(grammar)
        if token_ids and (right := matcher.deep_copy().validate_tokens(list(token_ids))) < len(token_ids):
            why = f"token {right} of the answer so far does not follow the grammar"
            raise InvalidRequest("resumption.token_ids", why)

    def start(self, grammar: Grammar, token_ids: Sequence[int]) -> LLMatcher:
        """The state behind these tokens of the answer."""
        matcher = self._compile(grammar).deep_copy()
        if token_ids:
            matcher.consume_tokens(list(token_ids))
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            found = self._kept.get(grammar)
            ours: Future[LLMatcher] = found or Future()
            self._kept[grammar] = ours
            self._kept.move_to_end(grammar)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        if found is not None:
            return found.result()
        try:
            ours.set_result(self._compiled(grammar))
        except BaseException as error:
            with self._lock:
                if self._kept.get(grammar) is ours:
                    del self._kept[grammar]
            ours.set_exception(error)
            raise
        return ours.result()

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, _text(grammar), log_level=_SILENT)
        if matcher.is_error():
            raise InvalidRequest(f"sampling.grammar.{grammar.kind}", matcher.get_error().split("\n<state>")[0].strip())
        return matcher


def _text(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(narrowed(grammar.text), defaults=_JSON_DEFAULTS)
            except ValueError as error:
                raise InvalidRequest("sampling.grammar.json_schema", f"is not valid JSON: {error}") from error
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)

"""Grammars for llguidance, validated by dispatchers and applied by workers.

The state of a grammar is a function of the tokens, so it can be rebuilt after a replay or a move of a sequence.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ballast.common.errors import ConfigError, InvalidRequest
from ballast.common.sampling import Grammar, GrammarKind
from ballast.service.grammar_bounds import check_bounds
from ballast.service.one_of import narrowed

if TYPE_CHECKING:  # exists in the type stubs only
    from llguidance._lib import JsonCompileOptions

MOST_KEPT = 256  # default limit on cached grammars; most applications use only a few
_SILENT = 0
_TRIED_TOKENS = 4  # some grammars compile and exceed limits only from their second token on
_MAX_WHY_CHARS = 300
_DEAD_END = "NoExtensionBias"
# Whitespace around reasoning and between two tokens of JSON is bounded, because otherwise a model may generate
# whitespace up to its maximum length.
_GAP = r"/[ \t\r\n]{0,8}/"
_JSON_DEFAULTS: "JsonCompileOptions" = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}"}


class Grammars:
    """Compiles and caches grammars for one vocabulary. Concurrent callers with the same grammar share one compilation.
    Thread-safe.

    Args:
        tokenizer_file: tokenizer.json of the model.
        vocab_size: Vocabulary size of the model, which may exceed the tokenizer's. None: the tokenizer's.
        eos_token_ids: End-of-sequence tokens, allowed where a grammar may end. None or empty: the tokenizer's.
        most_kept: Maximum number of compiled grammars to cache.

    Raises:
        ConfigError: llguidance cannot read the tokenizer file.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        most_kept: int = MOST_KEPT,
    ) -> None:
        eos = list(eos_token_ids) if eos_token_ids else None
        try:
            self._tokenizer = LLTokenizer(str(tokenizer_file), n_vocab=vocab_size, eos_token=eos)
        except (ValueError, RuntimeError, OSError) as error:
            raise ConfigError(str(tokenizer_file), f"is not a valid tokenizer: {error}") from error
        self._threads = ThreadPoolExecutor(1, "grammars")  # starts its thread on first use
        self._lock = threading.Lock()
        self._most_kept = most_kept
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()  # least recently used first

    def ahead(self, grammar: Grammar) -> Future[Any]:
        """Compile a grammar in the background thread, one at a time. The future raises InvalidRequest if it fails, and
        can be cancelled before it starts.
        """
        with self._lock:
            if (found := self._kept.get(grammar)) is not None and found.done():
                self._kept.move_to_end(grammar)
                return found
        return self._threads.submit(self._compile, grammar)

    def check(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> None:
        """Raise InvalidRequest if the grammar is invalid, too large or unsatisfiable, or if the answer's tokens so far
        (`token_ids`) violate it.
        """
        matcher = self._compile(grammar)
        self._try(grammar, matcher.deep_copy())
        if token_ids and (right := matcher.deep_copy().validate_tokens(list(token_ids))) < len(token_ids):
            why = f"token {right} of the answer so far does not follow the grammar"
            raise InvalidRequest("resumption.token_ids", why)

    def start(self, grammar: Grammar, token_ids: Sequence[int]) -> LLMatcher:
        """A matcher for one sequence, in the state after the answer's tokens so far (`token_ids`)."""
        matcher = self._compile(grammar).deep_copy()
        if token_ids:
            matcher.consume_tokens(list(token_ids))
        return matcher

    def _try(self, grammar: Grammar, matcher: LLMatcher) -> None:
        """Advance the matcher by a few tokens, because some failures appear only then. Raises InvalidRequest if it
        fails.
        """
        for count in range(_TRIED_TOKENS):
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            if (why := matcher_failure(matcher)) and (count == 0 or _DEAD_END not in matcher.get_error()):
                raise InvalidRequest(f"sampling.grammar.{grammar.kind}", why)
            if why or matcher.is_accepting() or matcher.is_stopped() or not mask.any():
                return
            matcher.consume_token(int(mask.argmax()))

    def _compile(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            found = self._kept.get(grammar)
            ours: Future[LLMatcher] = found or Future()
            self._kept[grammar] = ours
            self._kept.move_to_end(grammar)
            if len(self._kept) > self._most_kept:
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
        check_bounds(grammar)
        text = _text(grammar) if not grammar.thought_end else self._behind_thought(grammar)
        matcher = LLMatcher(self._tokenizer, text, log_level=_SILENT)
        if matcher.is_error():
            raise InvalidRequest(f"sampling.grammar.{grammar.kind}", matcher_failure(matcher))
        return matcher

    def _behind_thought(self, grammar: Grammar) -> str:
        """llguidance's form of a grammar that allows or requires reasoning before the text of `grammar`."""
        text = _text(grammar)
        answer = {"lark_grammar": text} if grammar.kind is GrammarKind.LARK else json.loads(text)["grammars"][0]
        if (special := self._special(grammar.thought_end)) is None:
            thought = f"thought[suffix={json.dumps(grammar.thought_end)}]: /(.|\\n)*/"
        else:
            thought = f"thought: ANYTHING <[{special}]>\nANYTHING: /(.|\\n)*/"
        begin = "thought GAP"
        if grammar.thought_begin:
            special = self._special(grammar.thought_begin)
            tag = json.dumps(grammar.thought_begin) if special is None else f"<[{special}]>"
            begin = f"(GAP {tag} thought GAP)?"
        rules = f"start: {begin} @answer\nGAP: {_GAP}\n{thought}"
        return json.dumps({"grammars": [{"lark_grammar": rules}, {**answer, "name": "answer"}]})

    def _special(self, tag: str) -> int | None:
        """Id of the special token that equals a tag; None if the tag is ordinary text."""
        token_ids = self._tokenizer.tokenize_str(tag)
        return token_ids[0] if len(token_ids) == 1 and self._tokenizer.is_special_token(token_ids[0]) else None


def matcher_failure(matcher: LLMatcher) -> str:
    """Why a matcher has failed; "" if it has not. A failed matcher silently allows only the end of the answer, so
    callers check it after each mask and each token.
    """
    if not matcher.is_error():
        return ""
    why = matcher.get_error().split("\n<state>")[0].strip()
    if why.startswith(_DEAD_END):
        return "no text can follow here: the grammar allows none"
    return why[:_MAX_WHY_CHARS] or "the grammar cannot be followed any further"


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

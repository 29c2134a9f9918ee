"""Parameters for sampling and stopping. Names and meanings are those of vLLM and Hugging Face."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

from ballast.common.errors import InvalidRequest

MAX_LOGIT_BIAS = 1024
MAX_GRAMMAR_CHARS = 1 << 18
MAX_TAG_CHARS = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_ADAPTER_CHARS = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_ALLOWED_TOKEN_IDS = 1 << 14


class FinishReason(StrEnum):
    """Why a request ended; each request gets exactly one reason (I6). STOP and LENGTH mean success."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the model's maximum length
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


class PriorityClass(StrEnum):
    """Priority classes, most urgent first. They are names, because serving systems disagree about which number is
    urgent.
    """

    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BATCH = "batch"

    @property
    def rank(self) -> int:
        return _RANKS[self]

    @property
    def offline(self) -> bool:
        """Whether this class is offline work: its requests use only capacity that online work leaves idle, and release
        it at once when needed.
        """
        return self is PriorityClass.BATCH


_RANKS = {c: i for i, c in enumerate(PriorityClass)}
ALL_CLASSES = frozenset(PriorityClass)


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # "{}": any JSON value
    REGEX = "regex"
    LARK = "lark"  # llguidance's dialect of Lark


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the generated text, from the first token (or the end of the reasoning) to the end of the
    sequence.

    Attributes:
        kind: The language in which `text` is written.
        text: The grammar: a JSON schema, a regular expression or a Lark grammar.
        thought_end: Tag that ends the reasoning, such as `</think>`; any text may precede it. Empty: there is no
            reasoning.
        thought_begin: Tag that begins optional reasoning. Empty: the prompt has already begun the reasoning.

    Raises:
        InvalidRequest: on construction, if the text or a tag is too long. A dispatcher checks whether `text` is valid.
    """

    kind: GrammarKind
    text: str
    thought_end: str = ""
    thought_begin: str = ""

    def __post_init__(self) -> None:
        if max(len(self.thought_end), len(self.thought_begin)) > MAX_TAG_CHARS:
            raise InvalidRequest("sampling.grammar", f"tags of thoughts have at most {MAX_TAG_CHARS} characters")
        if len(self.text) > MAX_GRAMMAR_CHARS:
            why = f"at most {MAX_GRAMMAR_CHARS} characters, got {len(self.text)}"
            raise InvalidRequest(f"sampling.grammar.{self.kind}", why)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters for sampling and stopping of one request.

    `temperature` 0 is greedy; `top_k` 0 means no limit. A seed makes the tokens reproducible: the random number for the
    token at position p depends only on (seed, p). If `seed` is None, one is drawn where the request enters the cluster,
    so that a replay after a failure still samples the same tokens.

    Raises:
        InvalidRequest: on construction, naming the field and the reason.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # number of alternatives to the chosen token; None: no logprobs at all
    prompt_logprobs: int | None = None  # alternatives for each prompt token; returned with the first output token
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])  # token id -> added to its logit
    grammar: Grammar | None = None  # constraint on the answer's text; None: no constraint
    adapter: str = ""  # name of the LoRA adapter; empty: the base model
    bad_words: tuple[str, ...] = ()  # never generated, with or without a leading space; dispatchers tokenise them
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that are never generated
    allowed_token_ids: tuple[int, ...] = ()  # only these tokens may be generated; empty: all tokens

    def __post_init__(self) -> None:
        # Callers may pass a single stop string or lists; both are stored as tuples.
        stop = cast(object, self.stop)
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else _tuple("stop", stop))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _real("temperature", self.temperature, 0.0, 100.0)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
            if self.logprobs is None:
                raise InvalidRequest("sampling.prompt_logprobs", "must be requested together with logprobs")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("sampling.stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidRequest("sampling.stop", f"must be strings, got {text!r}")
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    "sampling.stop", f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest("sampling.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 2**31 - 1)
        if self.logit_bias:
            self._check_logit_bias()
        if self.bad_words or self.bad_words_token_ids:
            self._check_bad_words()
        if self.allowed_token_ids:
            ids = _tuple("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", ids)
            _token_ids("allowed_token_ids", ids, MAX_ALLOWED_TOKEN_IDS)
        if len(self.adapter) > MAX_ADAPTER_CHARS:
            raise InvalidRequest("sampling.adapter", f"a name has at most {MAX_ADAPTER_CHARS} characters")
        if self.grammar is not None and (self.min_tokens or self.ignore_eos):
            raise InvalidRequest("sampling.grammar", "cannot be combined with min_tokens or ignore_eos")

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("sampling.logit_bias", f"at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias", token_id, 0, 2**31 - 1)
            _real(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    def _check_bad_words(self) -> None:
        words = _tuple("bad_words", self.bad_words)
        object.__setattr__(self, "bad_words", words)
        if len(words) > MAX_BAD_WORDS:
            raise InvalidRequest("sampling.bad_words", f"at most {MAX_BAD_WORDS} words, got {len(words)}")
        for word in words:
            if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
                why = (
                    f"a word is a text of 1 to {MAX_BAD_WORD_CHARS} characters that are not all blank, got {word!r:.80}"
                )
                raise InvalidRequest("sampling.bad_words", why)
        if len(self.bad_words_token_ids) > 2 * MAX_BAD_WORDS:
            raise InvalidRequest("sampling.bad_words_token_ids", f"at most {2 * MAX_BAD_WORDS} sequences")
        for ids in self.bad_words_token_ids:
            _token_ids("bad_words_token_ids", ids, 4 * MAX_BAD_WORD_CHARS)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether penalties make the logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _tuple(field: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise InvalidRequest(f"sampling.{field}", f"must be a list, got {value!r}")
    return tuple(cast(Iterable[object], value))


def _token_ids(field: str, ids: Sequence[object], most: int) -> None:
    if not 1 <= len(ids) <= most:
        raise InvalidRequest(f"sampling.{field}", f"1 to {most} token ids, got {len(ids)}")
    for token_id in ids:
        _whole(field, cast(int, token_id), 0, 2**31 - 1)


def _whole(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest(f"sampling.{field}", f"must be a whole number, got {value!r}")
    if not low <= value <= high:
        raise InvalidRequest(f"sampling.{field}", f"must be between {low} and {high}, got {value}")


def _real(field: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequest(f"sampling.{field}", f"must be a number, got {value!r}")
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"sampling.{field}", f"must be in {bracket}{low:g}, {high:g}], got {value}")

"""Converts text and conversations to token ids and back, with the model's own tokenizer and chat template.

The results are the same as with `transformers`: plain text gets the tokenizer's special tokens, while a rendered
conversation already contains them.
"""

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from ballast.common.errors import ConfigError, InvalidRequest
from ballast.common.sampling import Grammar
from ballast.service.tokenizer import load_tokenizer
from services.dispatcher.grammars import GrammarChecks
from services.dispatcher.template import ChatTemplate, RenderingTooLong

# Longer texts take milliseconds. They are tokenised in a thread with the batch call, because only that call releases
# the GIL.
_THREAD_CHARS = 4_000
_HUGE_CHARS = 256_000  # longer texts take almost a second each and are tokenised one at a time
_LOOP_MESSAGES = 64  # a longer conversation is rendered in a thread, too
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PromptEncoder:
    """Converts texts and conversations to token ids and back.

    Args:
        model: The folder.
        chat_template: File of a template that replaces the model's own.
        generation_config: Source of sampling defaults: `auto`: the model's; `ballast`: none; or another folder.

    Raises:
        ConfigError: a file is missing or corrupt; the message names it.
    """

    def __init__(self, model: Path, chat_template: Path | None = None, generation_config: str = "auto") -> None:
        self._tokenizer = load_tokenizer(model)
        config = _read_json(model / "tokenizer_config.json")
        variables = {name: _token_text(config.get(name)) for name in _SPECIAL_TOKENS if name in config}
        self._template = ChatTemplate(model, config, variables, chat_template)
        folder = {"auto": model, "ballast": None}.get(generation_config, Path(generation_config))
        self.default_sampling = {} if folder is None else _default_sampling(folder / "generation_config.json")
        self.token_bytes = TokenBytes(self._tokenizer)
        self._grammars = GrammarChecks(model / "tokenizer.json")
        self._longest_token_chars = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._huge = ThreadPoolExecutor(1, "huge texts")

    @property
    def chat_template(self) -> str:
        """Source of the chat template; empty if there is none."""
        return self._template.source

    async def encode_text(
        self, text: str, *, add_special_tokens: bool = True, longest: int | None = None
    ) -> Sequence[int]:
        """Return the token ids of a text. `longest`: maximum number of tokens; a text that certainly has more is
        refused before tokenisation (InvalidRequest).
        """
        return await self._encode("text", text, longest, add_special_tokens=add_special_tokens)

    async def encode_conversation(
        self,
        messages: Sequence[Mapping[str, object]],
        variables: Mapping[str, object] | None = None,
        longest: int | None = None,
    ) -> Sequence[int]:
        """Return the token ids of a rendered conversation.

        Args:
            messages: Messages with role, content, and further fields for the template.
            variables: Further variables of the template: tools, enable_thinking and so on.

        Raises:
            InvalidRequest: the template refuses the messages, or the model has none.
        """
        text = None
        if len(messages) <= _LOOP_MESSAGES:
            with contextlib.suppress(RenderingTooLong):
                text = self._template.render(messages, variables or {}, short=True)
        if text is None:
            text = await asyncio.to_thread(self._template.render, messages, variables or {})
        return await self._encode("conversation", text, longest, add_special_tokens=False)

    def encode_bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token sequences of each word, as in vLLM: without a leading space, and also with one if that
        changes the first token but not the number of tokens.

        Raises:
            InvalidRequest: a word has no tokens.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            alone, spaced = (
                tuple(self._tokenizer.encode(space + word.lstrip(), add_special_tokens=False).ids)
                for space in ("", " ")
            )
            if not alone:
                raise InvalidRequest("sampling.bad_words", f"{word!r:.80} has no tokens")
            found.append(alone)
            if len(spaced) == len(alone) and spaced[0] != alone[0]:
                found.append(spaced)
        return found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the tokens. Unknown ids are left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def check_grammar(self, grammar: Grammar, token_ids: Sequence[int], caller: str) -> None:
        """Raise InvalidRequest for an invalid grammar, or one that these tokens of the answer violate; see
        `GrammarChecks.check`.
        """
        await self._grammars.check(grammar, token_ids, caller)

    async def close(self) -> None:
        await self._grammars.close()

    async def _encode(self, field: str, text: str, longest: int | None, *, add_special_tokens: bool) -> Sequence[int]:
        if longest is not None and len(text) > longest * self._longest_token_chars:
            why = f"has {len(text)} characters, but the {longest} tokens that fit (max_model_len {longest + 1}) have"
            raise InvalidRequest(field, f"{why} at most {longest * self._longest_token_chars}")
        try:
            if len(text) <= _THREAD_CHARS:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            encode = functools.partial(self._tokenizer.encode_batch_fast, [text], add_special_tokens=add_special_tokens)
            pool = self._huge if len(text) > _HUGE_CHARS else None
            [encoding] = await asyncio.get_running_loop().run_in_executor(pool, encode)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(field, f"cannot be tokenized: {error}") from error
        return encoding.ids


def _default_sampling(path: Path) -> dict[str, float]:
    """Read the sampling parameters of a generation_config.json; empty if there is none."""
    config: Mapping[str, object] = _read_json(path) if path.is_file() else {}
    found: dict[str, float] = {}
    for name in _RECOMMENDED:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(str(path), f"{name} must be a number, got {value!r}")
        found[name] = float(value)
    return found


class TokenBytes:
    """Maps a token id to its bytes, which may be partial characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        self._is_byte_level = decoder is not None and b"ByteLevel" in cast(bytes, decoder.__getstate__())
        self._look_up = functools.lru_cache(maxsize=1 << 16)(self._find)

    def __call__(self, token_id: int) -> bytes:
        return self._look_up(token_id)

    def _find(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode()
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._is_byte_level:
            return bytes(_BYTE_OF[char] for char in token if char in _BYTE_OF)
        found = _BYTE_FALLBACK.fullmatch(token)
        return bytes([int(found[1], 16)]) if found else token.replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte alphabet of byte-level tokenizers (since GPT-2): printable bytes are themselves, others begin at
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _read_json(path: Path) -> Mapping[str, Any]:  # Any: external JSON, whose keys are checked one by one
    if not path.is_file():
        return {}
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), "must be a JSON object")
    return cast(Mapping[str, Any], content)


def _token_text(value: object) -> str:
    """Return the text of a special token, given as a string or as an object with its content; empty for None."""
    if isinstance(value, dict):
        return str(cast(Mapping[str, object], value).get("content", ""))
    return "" if value is None else str(value)

"""Text and conversations -> token ids, with the model's own tokenizer and chat template.

Same results as `transformers`: a text gets the tokenizer's special tokens, a rendered conversation brings its own.
"""

import asyncio
import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from ballast.common.errors import ConfigError, InvalidRequest

# A longer text is tokenized in a thread: that takes milliseconds, and only the batch call releases the GIL.
_THREAD_CHARS = 4_000
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class PromptEncoder:
    """Built once at start from the model's folder.

    Raises:
        ConfigError: a file is missing or corrupt; names it.
    """

    def __init__(self, model: Path) -> None:
        self._tokenizer = _load_tokenizer(model)
        config = _read_json(model / "tokenizer_config.json")
        self._variables = {name: _token_text(config.get(name)) for name in _SPECIAL_TOKENS if name in config}
        source = _template_source(model, config)
        self._template = None if source is None else _compile(source, model)

    async def encode_text(self, text: str) -> Sequence[int]:
        return await self._encode("text", text, add_special_tokens=True)

    async def encode_conversation(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Ends where the assistant's answer begins.

        Raises:
            InvalidRequest: the template refuses the messages, or the model has none.
        """
        if self._template is None:
            raise InvalidRequest("conversation", "this model has no chat template; send text or token ids")
        if not messages:
            raise InvalidRequest("conversation.messages", "must not be empty")
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._variables)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequest("conversation", f"the chat template refuses it: {error}") from error
        return await self._encode("conversation", text, add_special_tokens=False)

    async def _encode(self, field: str, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        try:
            if len(text) <= _THREAD_CHARS:
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            [encoding] = await asyncio.to_thread(
                self._tokenizer.encode_batch_fast, [text], add_special_tokens=add_special_tokens
            )
        except (TypeError, ValueError) as error:
            raise InvalidRequest(field, f"cannot be tokenized: {error}") from error
        return encoding.ids


def _load_tokenizer(model: Path) -> Tokenizer:
    path = model / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(str(path), "no such file; --model names a checkpoint folder with its tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(str(path), f"is not a valid tokenizer: {error}") from error
    # A file may have been saved with the settings of somebody's training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> Mapping[str, Any]:  # Any: foreign JSON, looked at key by key
    if not path.is_file():
        return {}
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), "must be a JSON object")
    return cast(Mapping[str, Any], content)


def _token_text(value: object) -> str:
    """A special token stands as a string or as an object with its content."""
    if isinstance(value, dict):
        return str(cast(Mapping[str, object], value).get("content", ""))
    return "" if value is None else str(value)


def _template_source(model: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own goes before the entry in tokenizer_config.json; of several templates the default one."""
    path = model / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(str(path), f"cannot be read: {error}") from error
    entry: object = config.get("chat_template")
    if isinstance(entry, list):
        named = cast(Sequence[Mapping[str, str]], entry)
        return next((t.get("template") for t in named if t.get("name") == "default"), None)
    return entry if isinstance(entry, str) else None


def _compile(source: str, model: Path):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    # jinja2 infers the type of its globals from those it has itself.
    cast(dict[str, object], environment.globals).update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(str(model), f"its chat template is not valid: {error}") from error


def _to_json(value: object, indent: int | None = None) -> str:
    """Without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(why: str) -> NoReturn:
    raise TemplateError(why)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)

"""Chat templates, rendered as `transformers` does it."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ballast.common.errors import ConfigError, InvalidRequest

_DEFAULT, _WITH_TOOLS = "default", "tool_use"


class ChatTemplate:
    """The templates of a model; most have one, some have another one for conversations with tools.

    Args:
        model: Folder of the checkpoint.
        config: Its tokenizer_config.json.
        variables: What every rendering sees: the special tokens.

    Raises:
        ConfigError: a template cannot be read or is not valid.
    """

    def __init__(self, model: Path, config: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        sources = _sources(model, config)
        self._templates = {name: _compile(source, model) for name, source in sources.items()}
        self._variables = variables
        self.source = sources.get(_DEFAULT, "")  # empty: there is none

    def render(self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]) -> str:
        """Ends where the assistant's answer begins, unless a variable add_generation_prompt says otherwise.

        Raises:
            InvalidRequest: the template refuses the messages, or the model has none.
        """
        name = _WITH_TOOLS if variables.get("tools") and _WITH_TOOLS in self._templates else _DEFAULT
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequest("conversation", "this model has no chat template; send text or token ids")
        if not messages:
            raise InvalidRequest("conversation.messages", "must not be empty")
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self._variables, **variables}
        try:
            return template.render({**given, "messages": messages})
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InvalidRequest("conversation", f"the chat template refuses it: {error}") from error


def _sources(model: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Of each template by its name. A file of its own goes before the entry in tokenizer_config.json."""
    path = model / "chat_template.jinja"
    if path.is_file():
        try:
            return {_DEFAULT: path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(str(path), f"cannot be read: {error}") from error
    entry: object = config.get("chat_template")
    if isinstance(entry, list):
        named = cast(Sequence[Mapping[str, str]], entry)
        return {t["name"]: t["template"] for t in named if t.get("name") in (_DEFAULT, _WITH_TOOLS) and "template" in t}
    return {_DEFAULT: entry} if isinstance(entry, str) else {}


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks an assistant's words, for training; here they are words."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, model: Path) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    # jinja2 infers the type of its globals from those it has itself.
    cast(dict[str, object], environment.globals).update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ConfigError(str(model), f"its chat template is not valid: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(why: str) -> NoReturn:
    raise TemplateError(why)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)

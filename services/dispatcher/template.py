"""Renders chat templates like `transformers`, with limits on loops and output."""

import datetime
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ballast.common.errors import ConfigError, InvalidRequest

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_MAX_CHARS: Final = 32 << 20  # maximum length of the output, and of intermediate strings
_MAX_WIDTH: Final = 10_000  # maximum padding width
_MAX_TIME_CHARS: Final = 256  # maximum length of a date format
_FILLING: Final = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_DIGITS: Final = re.compile(r"\d+")
_GIVEN_WIDTH: Final = re.compile(r"\*|:[^{}]*\{")
_MOST_TURNS: Final = 2_000_000  # maximum iterations of loops and calls of macros, which take some seconds
_SHORT_TURNS: Final = 20_000  # limit for a short rendering: some tens of milliseconds
_TICK: Final = "_ballast_tick"
_JOIN: Final = "_ballast_join"


class RenderingTooLong(Exception):
    """A rendering has exceeded the iterations allowed for a short one."""


class ChatTemplate:
    """The chat templates of a model. Some models have a separate template for conversations with tools.

    Args:
        model: Folder of the checkpoint.
        config: Its tokenizer_config.json.
        variables: Available in every rendering: the special tokens.
        file: Template file that replaces the model's own.

    Raises:
        ConfigError: a template cannot be read or is invalid.
    """

    def __init__(
        self, model: Path, config: Mapping[str, Any], variables: Mapping[str, str], file: Path | None = None
    ) -> None:
        sources = _sources(model, config) if file is None else {_DEFAULT: _read(file)}
        self._templates = {name: _compile(source, model) for name, source in sources.items()}
        self._variables = variables
        self.source = sources.get(_DEFAULT, "")  # empty: the model has no template

    def render(
        self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object], *, short: bool = False
    ) -> str:
        """Render a conversation. Ends with the generation prompt, unless the variable add_generation_prompt is false;
        or with the last message's text if the variable continue_final_message is true.

        Raises:
            InvalidRequest: the template refuses the messages or exceeds the limits, or the model has no template.
            RenderingTooLong: the rendering exceeds the limit of a `short` one.
        """
        name = _WITH_TOOLS if variables.get("tools") and _WITH_TOOLS in self._templates else _DEFAULT
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequest("conversation", "this model has no chat template; send text or token ids")
        if not messages:
            raise InvalidRequest("conversation.messages", "must not be empty")
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self._variables, **variables}
        try:
            text = _bounded(template, {**given, "messages": messages, _TICK: _ticks(short=short)})
        except _REFUSALS as error:
            raise InvalidRequest("conversation", f"the chat template refuses it: {error}") from error
        return _ended_with(text, str(messages[-1].get("content"))) if given.get("continue_final_message") else text


def _ended_with(text: str, final: str) -> str:
    """Return the rendering truncated after the last message, with the same trailing white space as
    in `transformers`.
    """
    place = text.rfind(final.strip())
    if place < 0:
        why = "the chat template changes the last message, so that it cannot be continued"
        raise InvalidRequest("conversation", why)
    whole = final.lstrip()
    return text[: place + len(whole if text.startswith(whole, place) else final.strip())]


_REFUSALS = (
    *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
    *(RecursionError, MemoryError),
)


def _bounded(template: Template, variables: Mapping[str, object]) -> str:
    pieces: list[str] = []
    left = _MAX_CHARS
    for piece in template.generate(variables):
        left -= len(piece)
        if left < 0:
            raise TemplateError(f"its output has more than {_MAX_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _ticks(*, short: bool) -> Callable[[], str]:
    """Return a function that counts iterations of loops and calls of macros, and raises when there are too many."""
    left = _SHORT_TURNS if short else _MOST_TURNS

    def tick() -> str:
        nonlocal left
        left -= 1
        if left < 0:
            raise RenderingTooLong if short else TemplateError(f"its loops have more than {_MOST_TURNS} iterations")
        return ""

    return tick


def _sources(model: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the template sources by name. A separate file has precedence over tokenizer_config.json."""
    path = model / "chat_template.jinja"
    if path.is_file():
        return {_DEFAULT: _read(path)}
    entry: object = config.get("chat_template")
    if isinstance(entry, list):
        named = cast(Sequence[object], entry)
        texts = [cast(Mapping[str, object], one) for one in named if isinstance(one, dict)]
        return {
            str(one["name"]): str(one.get("template", ""))
            for one in texts
            if one.get("name") in (_DEFAULT, _WITH_TOOLS)
        }
    return {_DEFAULT: entry} if isinstance(entry, str) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant tokens for training. Here its contents are rendered
    without marks.
    """

    tags = {"generation"}  # noqa: RUF012 - as declared by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """jinja2 environment in which no operator produces unbounded strings or numbers."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    # Any: values of templates.
    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> object:
        if operator == "**" and not abs(right) <= 64:
            raise TemplateError("a power of more than 64")
        if operator == "*" and max(_size(left) * _count(right), _size(right) * _count(left)) > _MAX_CHARS:
            raise TemplateError(f"a repetition of more than {_MAX_CHARS}")
        if operator == "%" and isinstance(left, str):
            _check_form(left, right)
        value = cast(object, super().call_binop(context, operator, left, right))
        if _size(value) > _MAX_CHARS:
            raise TemplateError(f"a text or list of more than {_MAX_CHARS}")
        return value

    # Any: callables of templates.
    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(getattr(obj, "__self__", None), str) and getattr(obj, "__name__", "") in _FILLING:
            _check_widths((*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            mapped = [cast(Mapping[str, object], arg).values() for arg in args if isinstance(arg, Mapping)]
            _check_form(value.__self__, (*args, *kwargs.values(), *itertools.chain.from_iterable(mapped)))
            return wrapped(*args, **kwargs)

        return checked


def _check_widths(values: object) -> None:
    """Raise TemplateError for unbounded padding."""
    each = cast(Sequence[object], values) if isinstance(values, (tuple, list)) else (values,)
    if any(isinstance(value, int) and value > _MAX_WIDTH for value in each):
        raise TemplateError(f"a width of more than {_MAX_WIDTH} characters")


def _check_form(form: str, values: object) -> None:
    """Check the widths in format strings of `%` or `format`, in which `*` and `{:{}}` take widths from values."""
    _check_widths([int(digits[:9]) for digits in _DIGITS.findall(form)])
    if _GIVEN_WIDTH.search(form):
        _check_widths(values)


def _bounded_filter(act: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a jinja2 filter whose numeric arguments are widths, in order to limit them. Any: its arguments."""

    @functools.wraps(act)  # keeps jinja2's markers of context arguments
    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if name == "format":
            _check_form(str(args[0]), values[1:])
        else:
            _check_widths(values)
        return act(*args, **kwargs)

    return bounded


def _size(value: object) -> int:
    return len(cast(Sequence[object], value)) if isinstance(value, (str, list, tuple)) else 0


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0


def _joined(*parts: object) -> str:
    """Implement the template operator for concatenation, with a limit."""
    text = "".join(map(str, parts))
    if len(text) > _MAX_CHARS:
        raise TemplateError(f"a text of more than {_MAX_CHARS} characters")
    return text


def _guard(tree: nodes.Template) -> nodes.Template:
    """Make a template count its iterations and limit its concatenations."""
    for turning in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        turning.body.insert(0, nodes.ExprStmt(tick).set_lineno(turning.lineno, override=True))
    return cast(nodes.Template, _Joins().visit(tree))


class _Joins(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name(_JOIN, "load"), node.nodes, [], None, None).set_lineno(node.lineno, override=True)


def _compile(source: str, model: Path) -> Template:
    environment = _TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    for name in ("center", "indent", "batch", "slice", "wordwrap", "format", "tojson"):
        environment.filters[name] = _bounded_filter(environment.filters[name], name)
    # jinja2 infers the type of globals from its own globals.
    added = {"raise_exception": _raise_exception, "strftime_now": _strftime_now, _JOIN: _joined}
    cast(dict[str, object], environment.globals).update(added)
    environment.globals.pop("lipsum", None)
    try:
        code = environment.compile(_guard(environment.parse(source)))
        return Template.from_code(environment, code, environment.make_globals(None))
    except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
        raise ConfigError(str(model), f"its chat template is not valid: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Implement the filter `tojson` without the HTML escaping of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(why: str) -> NoReturn:
    raise TemplateError(why)


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_TIME_CHARS:
        raise TemplateError(f"a date format of more than {_MAX_TIME_CHARS} characters")
    return datetime.datetime.now().astimezone().strftime(form)

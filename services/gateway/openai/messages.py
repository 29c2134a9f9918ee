"""Converts a client's conversation to the form that chat templates expect."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from services.gateway.errors import invalid
from services.gateway.openai.requests import Message

# Any: external JSON, checked part by part.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

_THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning")
_ROLES = {"developer": "system", "function": "tool"}  # OpenAI's newer and older names -> names in templates


def messages_for_template(messages: Sequence[Message]) -> list[Message]:
    """Convert messages. Raises Failure for malformed ones, and for content that is not text."""
    if not messages:
        raise invalid("messages", "must not be empty")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: Message) -> Message:
    role, content = message.get("role"), message.get("content")
    if type(content) is str and len(message) == 2 and type(role) is str:  # fast path for most messages
        return {"role": _ROLES.get(role, role), "content": content}
    field = f"messages[{index}]"
    if not isinstance(role, str):
        raise invalid(f"{field}.role", "must be a string such as user")
    result = {name: value for name, value in message.items() if value is not None and name != "audio"}
    result["role"] = role = _ROLES.get(role, role)
    calls = message.get("tool_calls")
    if (older := result.pop("function_call", None)) and not calls:
        calls = [{"function": older}]
    if content is None and not calls and role not in ("assistant", "tool"):
        raise invalid(f"{field}.content", "is missing")
    thought = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(content, list):
        thoughts, content = _apart(cast(list[object], content))
        thought = thought or thoughts
    result["content"] = "" if content is None else text_of(f"{field}.content", content)
    if role == "assistant" and isinstance(thought, str):  # templates use different names for reasoning
        result |= {"reasoning_content": thought, "reasoning": thought, "thinking": thought}
    if calls:
        result["tool_calls"] = [_call(f"{field}.tool_calls[{i}]", call) for i, call in enumerate(_list(field, calls))]
    return result


def _apart(parts: Sequence[object]) -> tuple[str | None, list[object]]:
    """Return (reasoning, other parts) of an assistant's content. Clients of Mistral and Anthropic send reasoning as
    parts.
    """
    thoughts, others = list[Mapping[str, Any]](), list[object]()
    for part in parts:
        if isinstance(part, Mapping) and (given := cast(Mapping[str, Any], part)).get("type") in _THOUGHT_PARTS:
            thoughts.append(given)
        else:
            others.append(cast(object, part))
    texts = [part.get("thinking") or part.get("text") or "" for part in thoughts]
    thought = "\n".join(text if isinstance(text, str) else text_of("thinking", text) for text in texts)
    return thought or None, others


def text_of(field: str, content: object) -> str:
    """Return the text of a message's content, which is a string or a list of parts. Raises Failure for a part that is
    not text.
    """
    if isinstance(content, str):
        return content
    return "\n".join(_part(f"{field}[{index}]", part) for index, part in enumerate(_list(field, content)))


def _part(field: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        given = cast(Mapping[str, Any], part)
        name = _TEXT_PARTS.get(str(given.get("type")))
        if name is None:
            raise invalid(field, f"parts of type {given.get('type')!r} are not supported; this model reads text")
        text = given.get(name)
        if isinstance(text, str):
            return text
    raise invalid(field, "must be a part with a type and a text")


def _call(field: str, call: object) -> Message:
    """Convert a tool call. Its arguments become an object, because templates serialise them themselves."""
    if not isinstance(call, Mapping):
        raise invalid(field, "must be an object")
    given = cast(Mapping[str, Any], call)
    function: object = given.get("function")
    named = cast(Mapping[str, Any], function if isinstance(function, Mapping) else {})
    if not isinstance(named.get("name"), str):
        raise invalid(f"{field}.function", "needs a name and arguments")
    arguments: object = named.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # arguments that are not valid JSON remain text
            arguments = json.loads(arguments)
    return {**given, "type": "function", "function": {"name": named["name"], "arguments": arguments}}


def _list(field: str, value: object) -> list[object]:
    if not isinstance(value, list):
        raise invalid(field, "must be a string or a list of parts")
    return cast(list[object], value)

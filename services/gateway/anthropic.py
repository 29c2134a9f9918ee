"""/v1/messages, Anthropic's chat interface: converts its requests to OpenAI's chat requests, and answers and failures
to Anthropic's format.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from ballast.client import FinishReason, Generation, GenerationChunk, Usage
from ballast.rpc.errors import cut
from services.gateway.errors import Failure, invalid
from services.gateway.openai.chat import Head, Wishes
from services.gateway.openai.requests import ChatRequest, Message, TokenizeRequest, refused
from services.gateway.openai.scanner import Arguments, CallBegin, CallEnd, Event, Reasoning, Text
from services.gateway.openai.writing import event

# Any: external JSON.
Block = dict[str, Any]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKS = {"enabled": True, "disabled": False}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    504: "timeout_error",
}
_OVERLOADED = 529
_UNSUPPORTED = ("container", "mcp_servers", "context_management")


class MessagesRequest(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    messages: list[Message]
    max_tokens: int | None = None
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Block] | None = None
    tool_choice: Block | None = None
    thinking: Block | None = None
    output_config: Block | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    seed: int | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None

    def as_chat(self) -> ChatRequest:
        """The equivalent chat request.

        Raises:
            Failure: the request is invalid, or uses an unsupported feature.
        """
        if self.max_tokens is None:
            raise invalid("max_tokens", "is missing", code="missing_required_parameter")
        messages, choice, output = self._messages(), self.tool_choice or {}, self.output_config or {}
        goes_on = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        try:
            return ChatRequest(
                model=self.model,
                n=None,
                messages=messages,
                max_completion_tokens=self.max_tokens,
                stop=self.stop_sequences,
                stream=self.stream,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                seed=self.seed,
                tools=self._tools(),
                tool_choice=_choice(choice),
                parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
                response_format=_format(output.get("format")),
                chat_template_kwargs=self.chat_template_kwargs,
                enable_thinking=_THINKS.get(str((self.thinking or {}).get("type"))),
                reasoning_effort=output.get("effort"),
                continue_final_message=goes_on or None,
            )
        except ValidationError as error:
            raise refused(error) from error

    def as_tokens(self) -> TokenizeRequest:
        """The equivalent tokenisation request, which counts the prompt's tokens."""
        chat = self.model_copy(update={"max_tokens": 1}).as_chat()
        given = {"enable_thinking": chat.enable_thinking, "reasoning_effort": chat.reasoning_effort}
        return TokenizeRequest(
            model=chat.model,
            messages=chat.messages,
            tools=chat.tools,
            continue_final_message=chat.continue_final_message,
            chat_template_kwargs={
                **(chat.chat_template_kwargs or {}),
                **{k: v for k, v in given.items() if v is not None},
            },
        )

    def _messages(self) -> list[Message]:
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise invalid(name, "is not supported", code="unsupported_value")
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": _text("system", self.system)})
        for index, message in enumerate(self.messages):
            messages += _turn(f"messages[{index}]", message)
        if not messages:
            raise invalid("messages", "must not be empty")
        return messages

    def _tools(self) -> list[Block] | None:
        return [_tool(f"tools[{index}]", tool) for index, tool in enumerate(self.tools)] if self.tools else None


def failure_form(failure: Failure, request_id: str) -> dict[str, object]:
    kind = _KINDS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    if status_of(failure) == _OVERLOADED:
        kind = "overloaded_error"
    error = {"type": kind, "message": cut(failure.message)}
    return {"type": "error", "error": error, "request_id": request_id}


def status_of(failure: Failure) -> int:
    """HTTP status of a failure: 529, Anthropic's own status, for overload."""
    return _OVERLOADED if failure.code == "overloaded" else failure.status


def _turn(field: str, message: Message) -> list[Message]:
    """Convert Anthropic's message to OpenAI's. Tool results become separate messages, which precede it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{field}.role", f"must be user or assistant, not {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Message] = []
    texts: list[str] = []
    calls: list[Block] = []
    thought = ""
    for number, block in enumerate(_blocks(f"{field}.content", content)):
        place = f"{field}.content[{number}]"
        match block.get("type"):
            case "tool_result":
                result = block.get("content")
                text = _text(f"{place}.content", "" if result is None else result)
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            case "tool_use":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "thinking":
                thought += str(block.get("thinking", ""))
            case "redacted_thinking":
                pass  # encrypted for Anthropic's own models
            case _:
                texts.append(_text(place, [block]))
    said: Message = {"role": role, "content": "\n".join(texts)}
    said |= {"tool_calls": calls} if calls else {}
    said |= {"reasoning_content": thought} if thought else {}
    return [*results, said] if len(said) > 2 or texts or not results else results


def _text(field: str, content: object) -> str:
    """Return the text of `content`, which is a string or a list of blocks. Raises Failure for a block that is not
    text.
    """
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, block in enumerate(_blocks(field, content)):
        source: object = block.get("source")
        text: object = block.get("text")
        if block.get("type") == "document" and isinstance(source, Mapping):
            given = cast(Block, source)
            text = given.get("data") if given.get("type") == "text" else None
        if not isinstance(text, str):
            why = f"blocks of type {block.get('type')!r} are not supported here; this model reads text"
            raise invalid(f"{field}[{number}]", why, code="unsupported_value")
        texts.append(text)
    return "\n".join(texts)


def _blocks(field: str, content: object) -> list[Block]:
    if isinstance(content, list) and all(isinstance(block, dict) for block in cast(list[object], content)):
        return cast(list[Block], content)
    raise invalid(field, "must be a string or a list of blocks")


def _tool(field: str, tool: Block) -> Block:
    if tool.get("type") not in (None, "custom"):
        why = f"tools of type {tool['type']!r} are not supported, only those with an input_schema"
        raise invalid(field, why, code="unsupported_value")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def _choice(choice: Block) -> str | Block | None:
    if not choice:
        return None
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    kind = str(choice.get("type"))
    if kind not in _CHOICES:
        raise invalid("tool_choice", "must be of type auto, any, tool or none")
    return _CHOICES[kind]


def _format(given: object) -> Block | None:
    if not isinstance(given, Mapping):
        return None
    schema: object = cast(Block, given).get("schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


class MessagesWriter:
    """Writes one answer in Anthropic's format, as one message or as a stream of events."""

    def __init__(self, head: Head, wishes: Wishes, stop: Sequence[str]) -> None:
        self._head = head
        self._parser = wishes.parser()
        self._stop = stop
        self._blocks: list[Block] = []
        self._pieces: list[str] = []  # text of the current block so far
        self._is_open = False
        self._cut: set[int] = set()  # indices of incomplete tool calls
        self._has_begun = False  # True: message_start has been written
        self._has_called = False

    def complete(self, generations: Sequence[Generation]) -> Mapping[str, object]:
        [generation] = generations
        self._write(generation)
        message = self._message(generation.usage.prompt_token_count)
        message["usage"] = self._usage(generation.usage)
        return message | self._end(generation)

    def chunk(self, index: int, chunk: GenerationChunk) -> bytes:
        """Write a chunk. Returns its events; may be empty."""
        events: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            events.append(_event("message_start", message=self._message(chunk.prompt_token_count)))
        events += self._write(chunk)
        if chunk.finish_reason is not None and chunk.usage is not None:
            events.append(_event("message_delta", delta=self._end(chunk), usage=self._usage(chunk.usage)))
            events.append(_event("message_stop"))
        return b"".join(events)

    def end(self) -> bytes:
        """Return no bytes, because the last chunk's events end the stream."""
        return b""

    def _write(self, part: Generation | GenerationChunk) -> list[bytes]:
        events = self._parser.feed(part.text, part.token_ids)
        if part.finish_reason is not None:
            events += self._parser.finish(cut=part.finish_reason is FinishReason.LENGTH)
        written = [piece for event in events for piece in self._take(event)]
        return [*written, *self._close()] if part.finish_reason is not None else written

    def _take(self, event: Event) -> list[bytes]:
        match event:
            case Text(text):
                opened = self._say({"type": "text", "text": ""})
                return [*opened, self._delta(text, type="text_delta", text=text)]
            case Reasoning(text):
                opened = self._say({"type": "thinking", "thinking": "", "signature": ""})
                return [*opened, self._delta(text, type="thinking_delta", thinking=text)]
            case CallBegin(name):
                call_id = f"toolu_{self._head.id.partition('-')[2]}_{len(self._blocks)}"
                return [*self._close(), *self._say({"type": "tool_use", "id": call_id, "name": name, "input": {}})]
            case Arguments(text):
                return [self._delta(text, type="input_json_delta", partial_json=text)]
            case CallEnd(complete):
                self._has_called |= complete
                return self._close(keep=complete)

    def _say(self, block: Block) -> list[bytes]:
        """Continue the current block if it has the type of `block`, otherwise open `block`. Returns the events."""
        if self._is_open and self._blocks[-1]["type"] == block["type"]:
            return []
        events = self._close()
        self._blocks.append(block)
        self._pieces, self._is_open = [], True
        return [*events, _event("content_block_start", index=len(self._blocks) - 1, content_block=block)]

    def _delta(self, piece: str, **delta: str) -> bytes:
        self._pieces.append(piece)
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self, *, keep: bool = True) -> list[bytes]:
        """End the open block, if any, and return its event. `keep`: False for an incomplete tool call, which is omitted
        from a message.
        """
        if not self._is_open:
            return []
        self._is_open = False
        block, text, at = self._blocks[-1], "".join(self._pieces), len(self._blocks) - 1
        is_call = block["type"] == "tool_use"
        self._blocks[-1] = {**block, "input": _input(text)} if is_call else {**block, block["type"]: text}
        self._cut |= set() if keep else {at}
        return [_event("content_block_stop", index=at)]

    def _message(self, input_token_count: int) -> Block:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": [block for at, block in enumerate(self._blocks) if at not in self._cut],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": input_token_count, "output_tokens": 0},
        }

    def _end(self, part: Generation | GenerationChunk) -> Block:
        stopped = part.matched_stop if part.matched_stop in self._stop else None
        reason = "stop_sequence" if stopped else "tool_use" if self._has_called else "end_turn"
        if part.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _usage(self, usage: Usage) -> Block:
        return {
            "input_tokens": usage.prompt_token_count,
            "output_tokens": usage.completion_token_count,
            "output_tokens_details": {"thinking_tokens": self._parser.reasoning_token_count},
        }


def _input(arguments: str) -> Block:
    """Return a call's arguments as an object, which Anthropic's format requires. Any other value becomes {"arguments":
    value}.
    """
    try:
        given: object = json.loads(arguments, parse_constant=str)
    except (ValueError, RecursionError):
        given = arguments
    return cast(Block, given) if isinstance(given, dict) else {"arguments": given}


def _event(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, kind)

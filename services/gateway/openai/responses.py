"""/v1/responses, as far as a chat goes: nothing is stored, so nothing can be referred to later."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, ConfigDict

from ballast.client import FinishReason, Generation, GenerationChunk, Usage
from services.gateway.errors import invalid
from services.gateway.openai.chat import Head, Wishes, call_id
from services.gateway.openai.requests import ChatRequest, Message
from services.gateway.openai.tools import Listener, ToolCall
from services.gateway.openai.writing import dumps

# Any: foreign JSON.
Item = dict[str, Any]

_NEEDS_STORE = ("previous_response_id", "conversation", "background", "prompt")


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[Item] | None = None
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    text: Item | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    seed: int | None = None
    previous_response_id: str | None = None
    conversation: str | Item | None = None
    background: bool | None = None
    prompt: Item | None = None

    def as_chat(self) -> ChatRequest:
        """The chat that it asks for.

        Raises:
            Failure: for what a chat cannot do.
        """
        for name in _NEEDS_STORE:
            if getattr(self, name):
                raise invalid(name, "is not supported: nothing is stored here", code="unsupported_value")
        text_format: object = (self.text or {}).get("format")
        return ChatRequest(
            model=self.model,
            n=None,
            messages=_messages(self.instructions, self.input),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stream=self.stream,
            tools=[_tool(index, tool) for index, tool in enumerate(self.tools)] if self.tools else None,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=cast(Item, text_format) if isinstance(text_format, dict) else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def _messages(instructions: str | None, given: str | list[Item]) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for index, item in enumerate(given):
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role", "user"), "content": item.get("content", "")})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                if messages and messages[-1].get("tool_calls"):
                    messages[-1]["tool_calls"].append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                output = item.get("output", "")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case "reasoning":
                pass  # what a model has thought is not shown to it again
            case other:
                raise invalid(f"input[{index}]", f"items of type {other!r} are not supported", code="unsupported_value")
    return messages


def _tool(index: int, tool: Mapping[str, Any]) -> Item:
    if tool.get("type") != "function":
        why = f"tools of type {tool.get('type')!r} are not supported, only functions are"
        raise invalid(f"tools[{index}]", why, code="unsupported_value")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


class ResponsesWriter:
    """Writes one answer, in one piece or as events."""

    def __init__(self, head: Head, wishes: Wishes, request: ResponsesRequest) -> None:
        self._head = head
        self._request = request
        self._listener: Listener | None = wishes.tools.listener() if wishes.tools is not None else None
        self._items: list[Item] = []
        self._texts: list[str] = []  # of the message that is being written
        self._call_count = 0
        self._sequence_number = 0
        self._usage: Usage | None = None
        self._finish_reason: FinishReason | None = None

    def complete(self, generations: Sequence[Generation]) -> Mapping[str, object]:
        [generation] = generations
        self._hear(generation.text, is_last=True)
        self._finish_reason, self._usage = generation.finish_reason, generation.usage
        return self._response()

    def chunk(self, index: int, chunk: GenerationChunk) -> bytes:
        """The chunk as events; empty if there is nothing to say yet."""
        events: list[bytes] = []
        if self._sequence_number == 0:
            events = [self._event(f"response.{kind}", response=self._response()) for kind in ("created", "in_progress")]
        is_last = chunk.finish_reason is not None
        events += self._hear(chunk.text, is_last=is_last)
        if is_last:
            self._finish_reason, self._usage = chunk.finish_reason, chunk.usage
            events.append(self._event(f"response.{self._status()}", response=self._response()))
        return b"".join(events)

    def end(self) -> bytes:
        """The last event has been the end."""
        return b""

    def _hear(self, text: str, *, is_last: bool) -> list[bytes]:
        if self._listener is None:
            events = self._say(text)
        else:
            heard = [self._listener.feed(text), *([self._listener.finish()] if is_last else [])]
            events = list[bytes]()
            for each in heard:
                events += self._say(each.text)
                for call in each.calls:
                    events += self._close_message() + self._call(call)
        if is_last:
            if not self._items:
                events += self._say("", even_if_empty=True)
            events += self._close_message()
        return events

    def _say(self, text: str, *, even_if_empty: bool = False) -> list[bytes]:
        if not text and not even_if_empty:
            return []
        events: list[bytes] = []
        if not self._is_in_message():
            item: Item = {"type": "message", "id": self._id("msg"), "role": "assistant", "content": []}
            item["status"] = "in_progress"
            self._items.append(item)
            self._texts = []
            events.append(self._event("response.output_item.added", output_index=self._at, item=item))
            events.append(self._event("response.content_part.added", **self._part_place, part=_part("")))
        self._texts.append(text)
        if text:
            events.append(self._event("response.output_text.delta", **self._part_place, delta=text, logprobs=[]))
        return events

    def _close_message(self) -> list[bytes]:
        if not self._is_in_message():
            return []
        text = "".join(self._texts)
        place = self._part_place
        events = [
            self._event("response.output_text.done", **place, text=text, logprobs=[]),
            self._event("response.content_part.done", **place, part=_part(text)),
        ]
        self._items[-1] = {**self._items[-1], "content": [_part(text)], "status": "completed"}
        return [*events, self._event("response.output_item.done", output_index=self._at, item=self._items[-1])]

    def _call(self, call: ToolCall) -> list[bytes]:
        item: Item = {
            "type": "function_call",
            "id": self._id("fc"),
            "call_id": call_id(self._head.id, 0, self._call_count),
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self._call_count += 1
        done = {**item, "arguments": call.arguments, "status": "completed"}
        self._items.append(done)
        place = {"output_index": self._at, "item_id": item["id"]}
        return [
            self._event("response.output_item.added", output_index=self._at, item=item),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, arguments=call.arguments, name=call.name),
            self._event("response.output_item.done", output_index=self._at, item=done),
        ]

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    @property
    def _part_place(self) -> dict[str, object]:
        return {"output_index": self._at, "item_id": self._items[-1]["id"], "content_index": 0}

    def _is_in_message(self) -> bool:
        return bool(self._items) and self._items[-1]["type"] == "message" and self._items[-1]["status"] != "completed"

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._head.id.partition('-')[2]}_{len(self._items)}"

    def _event(self, kind: str, **fields: object) -> bytes:
        value = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return f"event: {kind}\ndata: {dumps(value)}\n\n".encode()

    def _status(self) -> str:
        if self._finish_reason is None:
            return "in_progress"
        return "incomplete" if self._finish_reason is FinishReason.LENGTH else "completed"

    def _response(self) -> dict[str, object]:
        request = self._request
        status = self._status()
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._head.model,
            "output": list(self._items) if self._finish_reason is not None else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature if request.temperature is not None else 1.0,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p if request.top_p is not None else 1.0,
            "usage": None if self._usage is None else _usage(self._usage),
        }


def _part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_token_count,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.completion_token_count,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_token_count + usage.completion_token_count,
    }

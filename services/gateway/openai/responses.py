"""/v1/responses, with the features that /v1/chat/completions supports. Answers are not stored, so requests cannot refer
to earlier ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from ballast.client import FinishReason, Generation, GenerationChunk, Usage
from services.gateway.errors import invalid
from services.gateway.openai.chat import Head, Wishes, call_id
from services.gateway.openai.requests import ChatRequest, Message, refused
from services.gateway.openai.scanner import Arguments, CallBegin, CallEnd, Event, Reasoning, Text
from services.gateway.openai.writing import dumps, event

# Any: external JSON.
Item = dict[str, Any]

_NEEDS_STORE = ("previous_response_id", "conversation", "background", "prompt")
_UNSUPPORTED = {
    "context_management": "shorten the input",
    "image": "this model writes text only",
    "moderation": "use a separate moderation service",
    "previous_input_messages": "put them into input",
    "top_logprobs": "/v1/chat/completions has them",
    "truncation": "shorten the input",
}
_LOGPROBS = "message.output_text.logprobs"  # the other parts that `include` can name are never in an answer
# Fields that do not affect the answer: accepted and ignored.
IGNORED = frozenset(
    {
        *(
            "access_programs",
            "background_options",
            "enable_response_messages",
            "max_tool_calls",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "prompt_cache_key",
            "request_id",
            "safety_identifier",
        ),
        *("prompt_cache_options", "prompt_cache_retention", "store", "stream_options", "user"),
    }
)
# Fields that have the same name and meaning in chat requests, which validate or refuse them.
_AS_IN_CHAT = (
    *("model", "temperature", "top_p", "seed", "stream", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *("service_tier", "priority", "top_k", "stop", "logit_bias", "repetition_penalty", "ignore_eos"),
    *("skip_special_tokens", "include_stop_str_in_output", "structured_outputs", "vllm_xargs", "kv_transfer_params"),
)


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
    service_tier: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    seed: int | None = None
    reasoning: Item | None = None
    previous_response_id: str | None = None
    conversation: str | Item | None = None
    background: bool | None = None
    prompt: Item | None = None
    include: list[str] | None = None
    priority: Any = None
    top_k: Any = None
    stop: Any = None
    logit_bias: Any = None
    repetition_penalty: Any = None
    ignore_eos: Any = None
    skip_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    structured_outputs: Any = None
    vllm_xargs: Any = None
    kv_transfer_params: Any = None
    # these fields are refused with any value
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    previous_input_messages: Any = None
    top_logprobs: Any = None
    truncation: Any = None

    def as_chat(self) -> ChatRequest:
        """The equivalent chat request.

        Raises:
            Failure: the request is invalid, or uses an unsupported feature.
        """
        for name in _NEEDS_STORE:
            if getattr(self, name):
                raise invalid(name, "is not supported, because answers are not stored", code="unsupported_value")
        for name, instead in _UNSUPPORTED.items():
            if getattr(self, name) not in (None, 0, "disabled"):
                raise invalid(name, f"is not supported: {instead}", code="unsupported_value")
        if _LOGPROBS in (self.include or ()):
            why = f"{_LOGPROBS} is not supported: {_UNSUPPORTED['top_logprobs']}"
            raise invalid("include", why, code="unsupported_value")
        text = self.text or {}
        values = {
            **{name: getattr(self, name) for name in _AS_IN_CHAT},
            "messages": _messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_tool(index, tool) for index, tool in enumerate(self.tools)] if self.tools else None,
            "response_format": text.get("format"),
            "verbosity": text.get("verbosity"),
            "cache_salt": self.cache_salt or None,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
        }
        try:
            # These fields are repeated in the answer.
            dumps([self.text, self.tools, self.tool_choice, self.metadata]).encode()
            return ChatRequest.model_validate(values)
        except ValidationError as error:
            raise refused(error) from error
        except ValueError as error:
            raise invalid(None, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _messages(instructions: str | None, given: str | list[Item]) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    thought = ""  # the assistant's reasoning that precedes its next message
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
                parts: object = item.get("content") or item.get("summary") or []
                if not isinstance(parts, list) or not all(isinstance(p, dict) for p in cast(list[object], parts)):
                    raise invalid(f"input[{index}]", "must have a content or a summary that is a list of parts")
                thought = "\n".join(str(part.get("text", "")) for part in cast(list[Item], parts))
                continue
            case other:
                raise invalid(f"input[{index}]", f"items of type {other!r} are not supported", code="unsupported_value")
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return messages


def _tool(index: int, tool: Mapping[str, Any]) -> Item:
    if tool.get("type") != "function":
        why = f"tools of type {tool.get('type')!r} are not supported, only functions"
        raise invalid(f"tools[{index}]", why, code="unsupported_value")
    function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
    return {"type": "function", "function": function}


class ResponsesWriter:
    """Writes one answer of /v1/responses, as one object or as a stream of events."""

    def __init__(self, head: Head, wishes: Wishes, request: ResponsesRequest) -> None:
        self._head = head
        self._request = request
        self._parser = wishes.parser()
        self._items: list[Item] = []
        self._texts: list[str] = []  # text of the current item so far
        self._call_count = 0
        self._sequence_number = 0
        self._usage: Usage | None = None
        self._finish_reason: FinishReason | None = None

    def complete(self, generations: Sequence[Generation]) -> Mapping[str, object]:
        [generation] = generations
        self._write(generation.text, generation.finish_reason, generation.token_ids)
        self._finish_reason, self._usage = generation.finish_reason, generation.usage
        return self._response()

    def chunk(self, index: int, chunk: GenerationChunk) -> bytes:
        """Write a chunk. Returns its events, which may be empty."""
        events: list[bytes] = []
        if self._sequence_number == 0:
            events = [self._event(f"response.{kind}", response=self._response()) for kind in ("created", "in_progress")]
        is_last = chunk.finish_reason is not None
        events += self._write(chunk.text, chunk.finish_reason, chunk.token_ids)
        if is_last:
            self._finish_reason, self._usage = chunk.finish_reason, chunk.usage
            events.append(self._event(f"response.{self._status()}", response=self._response()))
        return b"".join(events)

    def end(self) -> bytes:
        """Return no bytes, because the last chunk's events end the stream."""
        return b""

    def _write(self, text: str, finish_reason: FinishReason | None, token_ids: Sequence[int]) -> list[bytes]:
        events = self._parser.feed(text, token_ids)
        if finish_reason is not None:
            events += self._parser.finish(cut=finish_reason is FinishReason.LENGTH)
        written = [part for event in events for part in self._take(event)]
        if finish_reason is not None:
            if not self._items:
                written += self._take(Text(""))
            written += self._close()
        return written

    def _take(self, event: Event) -> list[bytes]:
        match event:
            case Text(text):
                return self._say("message", text)
            case Reasoning(text):
                return self._say("reasoning", text)
            case CallBegin(name):
                item: Item = {
                    "type": "function_call",
                    "id": self._id("fc"),
                    "call_id": call_id(self._head.id, 0, self._call_count),
                    "name": name,
                    "arguments": "",
                }
                self._call_count += 1
                return [*self._close(), *self._open(item)]
            case Arguments(text):
                self._texts.append(text)
                place = {"output_index": self._at, "item_id": self._items[-1]["id"]}
                return [self._event("response.function_call_arguments.delta", **place, delta=text)]
            case CallEnd(complete):
                return self._close(complete=complete)

    def _say(self, kind: str, text: str) -> list[bytes]:
        events: list[bytes] = []
        if not (self._is_open() and self._items[-1]["type"] == kind):
            events += self._close()
            if kind == "message":
                events += self._open({"type": kind, "id": self._id("msg"), "role": "assistant", "content": []})
                events.append(self._event("response.content_part.added", **self._part_place, part=_part("")))
            else:
                events += self._open({"type": kind, "id": self._id("rs"), "summary": [], "content": []})
        self._texts.append(text)
        if text and kind == "message":
            events.append(self._event("response.output_text.delta", **self._part_place, delta=text, logprobs=[]))
        elif text:
            events.append(self._event("response.reasoning_text.delta", **self._part_place, delta=text))
        return events

    def _open(self, item: Item) -> list[bytes]:
        item["status"] = "in_progress"
        self._items.append(item)
        self._texts = []
        return [self._event("response.output_item.added", output_index=self._at, item=item)]

    def _close(self, *, complete: bool = True) -> list[bytes]:
        """End the open item, if any, and return its events. `complete`: False for an incomplete tool call."""
        if not self._is_open():
            return []
        item, text, place = self._items[-1], "".join(self._texts), self._part_place
        events: list[bytes] = []
        match item["type"]:
            case "message":
                item = {**item, "content": [_part(text)]}
                events.append(self._event("response.output_text.done", **place, text=text, logprobs=[]))
                events.append(self._event("response.content_part.done", **place, part=_part(text)))
            case "reasoning":
                item = {**item, "content": [{"type": "reasoning_text", "text": text}]}
                events.append(self._event("response.reasoning_text.done", **place, text=text))
            case _:
                item = {**item, "arguments": text}
                place = {"output_index": self._at, "item_id": item["id"]}
                done = "response.function_call_arguments.done"
                events.append(self._event(done, **place, arguments=text, name=item["name"]))
        self._items[-1] = {**item, "status": "completed" if complete else "incomplete"}
        return [*events, self._event("response.output_item.done", output_index=self._at, item=self._items[-1])]

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    @property
    def _part_place(self) -> dict[str, object]:
        return {"output_index": self._at, "item_id": self._items[-1]["id"], "content_index": 0}

    def _is_open(self) -> bool:
        return bool(self._items) and self._items[-1]["status"] == "in_progress"

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._head.id.partition('-')[2]}_{len(self._items)}"

    def _event(self, kind: str, **fields: object) -> bytes:
        value = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event(value, kind)

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
            "usage": None if self._usage is None else _usage(self._usage, self._parser.reasoning_token_count),
        }


def _part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage, reasoning_token_count: int) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_token_count,
        "input_tokens_details": {"cached_tokens": usage.cached_token_count},
        "output_tokens": usage.completion_token_count,
        "output_tokens_details": {"reasoning_tokens": reasoning_token_count},
        "total_tokens": usage.prompt_token_count + usage.completion_token_count,
    }

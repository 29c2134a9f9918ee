"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.client import FinishReason, Generation, GenerationChunk, Usage
from services.gateway.openai.tools import Listener, ToolCall, ToolUse, listen
from services.gateway.openai.writing import DONE, chat_logprobs, dumps, event, quote, usage_of

TOOL_CALLS = "tool_calls"  # why an answer has ended that has called functions


def call_to_json(request_id: str, choice: int, number: int, call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(request_id, choice, number), "type": "function", "function": function}


def call_id(request_id: str, choice: int, number: int) -> str:
    """The same for the same call of the same answer."""
    return f"call_{request_id.partition('-')[2]}_{choice}_{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all parts of an answer begin with.

    Attributes:
        id: The request's.
        created: Seconds since 1970.
        model: As the client has called it.
        service_tier: As the client has asked for; None: it has not.
    """

    id: str
    created: int
    model: str
    service_tier: str | None = None

    def begin(self, kind: str) -> dict[str, object]:
        tier = {} if self.service_tier is None else {"service_tier": self.service_tier}
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **tier}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What an answer shall hold beside its text."""

    logprobs: bool
    usage: bool  # in a stream; complete answers always have it
    token_ids: bool
    tools: ToolUse | None = None


class ChatWriter:
    """Writes one answer, in one piece or chunk by chunk."""

    def __init__(self, head: Head, wishes: Wishes) -> None:
        self._head = head
        self._wishes = wishes
        self._usages: dict[int, Usage] = {}
        self._begun: set[int] = set()
        self._listeners: dict[int, Listener] = {}
        self._call_counts: dict[int, int] = {}  # of each choice
        prefix = dumps({**head.begin("chat.completion.chunk"), "choices": []}).removesuffix("]}")
        self._prefix = f'data: {prefix}{{"index":'
        # Most chunks are nothing but text, and there is one for each token: they are put together by hand.
        no_usage = ',"usage":null' if wishes.usage else ""
        self._after_text = f'}},"logprobs":null,"finish_reason":null}}]{no_usage}}}\n\n'
        self._is_plain = not (wishes.logprobs or wishes.token_ids or wishes.tools)

    def complete(self, generations: Sequence[Generation]) -> dict[str, object]:
        usages = [generation.usage for generation in generations]
        return {
            **self._head.begin("chat.completion"),
            "choices": [self._choice(index, generation) for index, generation in enumerate(generations)],
            "usage": usage_of(usages[:1], usages),
        }

    def chunk(self, index: int, chunk: GenerationChunk) -> bytes:
        """The chunk as events; empty if there is nothing to say yet."""
        parts: list[bytes] = []
        if index not in self._begun:
            self._begun.add(index)
            parts.append(self._event(index, {"role": "assistant", "content": ""}, None))
        if self._is_plain:
            if chunk.text:
                parts.append(
                    f'{self._prefix}{index},"delta":{{"content":{quote(chunk.text)}{self._after_text}'.encode()
                )
        elif self._wishes.tools is not None:
            parts += [self._event(index, delta, chunk) for delta in self._heard(index, chunk, self._wishes.tools)]
        elif chunk.text or chunk.token_ids:
            parts.append(self._event(index, {"content": chunk.text}, chunk))
        if chunk.finish_reason is not None:
            called = self._call_counts.get(index) and chunk.finish_reason is FinishReason.STOP
            reason = TOOL_CALLS if called else chunk.finish_reason
            parts.append(self._event(index, {}, None, finish_reason=reason))
            if chunk.usage is not None:
                self._usages[index] = chunk.usage
        return b"".join(parts)

    def end(self) -> bytes:
        """What follows the last chunk of the last choice."""
        if not self._wishes.usage:
            return DONE
        usages = [usage for _, usage in sorted(self._usages.items())]
        last: dict[str, object] = {
            **self._head.begin("chat.completion.chunk"),
            "choices": [],
            "usage": usage_of(usages[:1], usages),
        }
        return event(last) + DONE

    def _heard(self, index: int, chunk: GenerationChunk, tools: ToolUse) -> list[dict[str, object]]:
        """Deltas that a chunk brings: text that is no call, and calls that are complete."""
        listener = self._listeners.get(index)
        if listener is None:
            listener = self._listeners[index] = tools.listener()
        heard = [listener.feed(chunk.text)]
        if chunk.finish_reason is not None:
            heard.append(listener.finish())
        deltas: list[dict[str, object]] = []
        for each in heard:
            if each.text:
                deltas.append({"content": each.text})
            for call in each.calls:
                number = self._call_counts.get(index, 0)
                self._call_counts[index] = number + 1
                deltas.append({"tool_calls": [{"index": number, **call_to_json(self._head.id, index, number, call)}]})
        return deltas or ([{}] if chunk.token_ids and (self._wishes.logprobs or self._wishes.token_ids) else [])

    def _choice(self, index: int, generation: Generation) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": generation.text, "refusal": None}
        reason: str = generation.finish_reason
        if self._wishes.tools is not None:
            text, calls = listen(self._wishes.tools.listener(), generation.text)
            message["content"] = text or (None if calls else "")
            if calls:
                numbered = enumerate(calls)
                message["tool_calls"] = [call_to_json(self._head.id, index, number, call) for number, call in numbered]
                reason = TOOL_CALLS if generation.finish_reason is FinishReason.STOP else reason
        choice: dict[str, object] = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(generation.logprobs) if self._wishes.logprobs else None,
            "finish_reason": reason,
        }
        return choice | ({"token_ids": list(generation.token_ids)} if self._wishes.token_ids else {})

    def _event(
        self, index: int, delta: dict[str, object], chunk: GenerationChunk | None, finish_reason: str | None = None
    ) -> bytes:
        choice: dict[str, object] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if chunk is not None and self._wishes.logprobs:
            choice["logprobs"] = chat_logprobs(chunk.logprobs)
        if chunk is not None and self._wishes.token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        no_usage: dict[str, object] = {"usage": None} if self._wishes.usage else {}
        return event({**self._head.begin("chat.completion.chunk"), "choices": [choice], **no_usage})

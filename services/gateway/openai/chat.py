"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ballast.client import FinishReason, Generation, GenerationChunk, Usage
from services.gateway.openai.formats import plain
from services.gateway.openai.requests import UsageWish
from services.gateway.openai.scanner import AnswerParser, Arguments, CallBegin, CallEnd, Event, Format, Reasoning, Text
from services.gateway.openai.writing import (
    DONE,
    StreamUsage,
    chat_logprobs,
    dumps,
    event,
    prompt_logprobs,
    quote,
    usage_of,
)

TOOL_CALLS = "tool_calls"  # finish reason of an answer with tool calls


def call_id(request_id: str, choice: int, number: int) -> str:
    """Return the id of a tool call, derived from its request, choice and number."""
    return f"call_{request_id.partition('-')[2]}_{choice}_{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The fields with which every response object or chunk of an answer begins.

    Attributes:
        id: The request's id.
        created: Time of the request, in seconds since 1970.
        model: The model's name as given by the client.
        service_tier: The service tier that the client has requested; None if it has requested none.
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
    """Parts of an answer that the client wants in addition to the text, and how to parse the text.

    Attributes:
        logprobs: Whether to return logprobs of generated tokens.
        usage: Where a stream contains usage; complete answers always contain it.
        token_ids: Whether to return ids of generated tokens.
        format: The format of reasoning and tool calls in the text.
        prompt_logprobs: Whether to return logprobs of prompt tokens.
        reasoning: Whether to return the reasoning.
        most_calls: Maximum number of tool calls; None: unlimited.
        thought_end_id: The token that ends the reasoning; None: it is not a single token.
    """

    logprobs: bool
    usage: UsageWish
    token_ids: bool
    format: Format = plain
    prompt_logprobs: bool = False
    reasoning: bool = True
    most_calls: int | None = None
    thought_end_id: int | None = None

    def parser(self) -> AnswerParser:
        return AnswerParser(self.format, self.most_calls, self.thought_end_id)


class ChatWriter:
    """Writes one answer of /v1/chat/completions, as one object or as a stream of chunks."""

    def __init__(self, head: Head, wishes: Wishes) -> None:
        self._head = head
        self._wishes = wishes
        self._usages: dict[int, Usage] = {}
        self._begun: set[int] = set()
        self._parsers: dict[int, AnswerParser] = {}
        self._passing: set[int] = set()  # choices whose further chunks contain only text
        self._call_counts: dict[int, int] = {}  # tool calls begun, by choice
        self._called: set[int] = set()  # choices with a complete tool call
        prefix = dumps({**head.begin("chat.completion.chunk"), "choices": []}).removesuffix("]}")
        self._prefix = f'data: {prefix}{{"index":'
        # Most chunks contain only text, and each token has one, so they are formatted without the JSON encoder.
        self._stream_usage = StreamUsage(wishes.usage)
        no_usage = ',"usage":null' if wishes.usage is UsageWish.AT_THE_END else ""
        self._after_text = f'}},"logprobs":null,"finish_reason":null}}]{no_usage}}}\n\n'
        self._is_plain = not (wishes.logprobs or wishes.token_ids or wishes.usage is UsageWish.IN_EACH_CHUNK)

    def complete(self, generations: Sequence[Generation]) -> dict[str, object]:
        usages = [generation.usage for generation in generations]
        self._parsers = {index: self._wishes.parser() for index in range(len(generations))}
        return {
            **self._head.begin("chat.completion"),
            "choices": [self._choice(index, generation) for index, generation in enumerate(generations)],
            "usage": usage_of(usages[:1], usages, self._reasoning_token_count()),
            **({"prompt_logprobs": prompt_logprobs(generations[0].logprobs)} if self._wishes.prompt_logprobs else {}),
        }

    def chunk(self, index: int, chunk: GenerationChunk) -> bytes:
        """Write a chunk of choice `index`. Returns its events, which may be empty."""
        if index in self._passing and chunk.finish_reason is None:
            return self._text(index, chunk.text) if chunk.text else b""
        parts: list[bytes] = []
        if index not in self._begun:
            self._begun.add(index)
            self._stream_usage.begin(index, chunk)
            parts.append(self._event(index, {"role": "assistant", "content": ""}, None))
        self._stream_usage.add(index, chunk)
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._wishes.parser()
        if parser.passes_text:
            events: Sequence[Event] = (Text(chunk.text),) if chunk.text else ()
            if self._is_plain:
                self._passing.add(index)
        else:
            events = parser.feed(chunk.text, chunk.token_ids)
            if chunk.finish_reason is not None:
                events = [*events, *parser.finish(cut=chunk.finish_reason is FinishReason.LENGTH)]
        parts += self._deltas(index, events, chunk)
        if chunk.finish_reason is not None:
            called = index in self._called and chunk.finish_reason is FinishReason.STOP
            parts.append(self._event(index, {}, None, finish_reason=TOOL_CALLS if called else chunk.finish_reason))
            if chunk.usage is not None:
                self._usages[index] = chunk.usage
        return b"".join(parts)

    def end(self) -> bytes:
        """Return the events after the last chunk of the last choice: usage if requested, and the end of the stream."""
        if self._wishes.usage is UsageWish.NONE:
            return DONE
        usages = [usage for _, usage in sorted(self._usages.items())]
        last: dict[str, object] = {
            **self._head.begin("chat.completion.chunk"),
            "choices": [],
            "usage": usage_of(usages[:1], usages, self._reasoning_token_count()),
        }
        return event(last) + DONE

    def _reasoning_token_count(self) -> int:
        return sum(parser.reasoning_token_count for parser in self._parsers.values())

    def _deltas(self, index: int, events: Sequence[Event], chunk: GenerationChunk) -> list[bytes]:
        """Return the deltas for a chunk. Its logprobs and token ids are in the first delta, or in an empty one."""
        parts: list[bytes] = []
        for each in events:
            if self._is_plain and isinstance(each, Text):
                parts.append(self._text(index, each.text))
            elif (delta := self._delta(index, each)) is not None:
                parts.append(self._event(index, delta, None if parts else chunk))
        if not parts and not self._is_plain and chunk.token_ids:
            parts.append(self._event(index, {"content": ""}, chunk))
        return parts

    def _text(self, index: int, text: str) -> bytes:
        return f'{self._prefix}{index},"delta":{{"content":{quote(text)}{self._after_text}'.encode()

    def _delta(self, index: int, event: Event) -> dict[str, object] | None:
        number = self._call_counts.get(index, 0) - 1  # number of the current call
        match event:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return _reasoning(text) if self._wishes.reasoning else None
            case CallBegin(name):
                number += 1
                self._call_counts[index] = number + 1
                return {"tool_calls": [{"index": number, **_call(self._head.id, index, number, name, "")}]}
            case Arguments(text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}
            case CallEnd(complete):
                if complete:
                    self._called.add(index)
                return None

    def _choice(self, index: int, generation: Generation) -> dict[str, object]:
        read = read_answer(self._parsers[index], generation)
        content = read.text or (None if read.calls else "")
        message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
        if read.reasoning and self._wishes.reasoning:
            message |= _reasoning(read.reasoning)
        if read.calls:
            numbered = enumerate(read.calls)
            message["tool_calls"] = [_call(self._head.id, index, number, *call) for number, call in numbered]
        called = read.calls and generation.finish_reason is FinishReason.STOP
        choice: dict[str, object] = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(generation.logprobs) if self._wishes.logprobs else None,
            "finish_reason": TOOL_CALLS if called else generation.finish_reason,
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
        return event(
            {**self._head.begin("chat.completion.chunk"), "choices": [choice], **self._stream_usage.field(index)}
        )


@dataclass(slots=True)
class Answer:
    """A complete answer, split into reasoning, text and tool calls."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # (name, JSON text of the arguments)


def read_answer(parser: AnswerParser, generation: Generation) -> Answer:
    """Parse a complete answer. Incomplete tool calls are omitted."""
    answer = Answer()
    name, arguments = "", ""
    cut = generation.finish_reason is FinishReason.LENGTH
    for each in parser.whole(generation.text, generation.token_ids, cut=cut):
        match each:
            case Text(text):
                answer.text += text
            case Reasoning(text):
                answer.reasoning += text
            case CallBegin(name):
                arguments = ""
            case Arguments(text):
                arguments += text
            case CallEnd(complete):
                if complete:
                    answer.calls.append((name, arguments))
    return answer


def _reasoning(text: str) -> dict[str, object]:
    """Return reasoning under both names that clients read: DeepSeek's name and the shorter one."""
    return {"reasoning_content": text, "reasoning": text}


def _call(request_id: str, choice: int, number: int, name: str, arguments: str) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id(request_id, choice, number), "type": "function", "function": function}

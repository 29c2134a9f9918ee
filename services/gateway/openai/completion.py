"""Answers of /v1/completions, OpenAI's older interface, in which the text continues the prompt."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ballast.client import FinishReason, Generation, GenerationChunk, Usage
from services.gateway.openai.chat import Head, Wishes
from services.gateway.openai.requests import UsageWish
from services.gateway.openai.writing import (
    DONE,
    StreamUsage,
    completion_logprobs,
    dumps,
    event,
    prompt_logprobs,
    quote,
    usage_of,
)

_KIND = "text_completion"
Part = TypeVar("Part", Generation, GenerationChunk)


def _nothing_of(part: Part) -> Part:
    """Return the part without its generated text and tokens. Its logprobs stay, because they include those of the
    prompt.
    """
    usage = None if part.usage is None else replace(part.usage, completion_token_count=0)
    ended = None if part.finish_reason is None else FinishReason.LENGTH
    return replace(part, text="", token_ids=(), usage=usage, finish_reason=ended)


class CompletionWriter:
    """Writes one completion response, whole or as stream chunks.

    Args:
        head: Fields that the response starts with.
        wishes: Optional fields that the client has requested.
        echoes: Text before each choice's own: its prompt if `echo` is set, otherwise empty.
        choices_per_prompt: Number of consecutive choices that share a prompt.
        drops: `max_tokens` is 0, so the generated token is left out (an engine generates at least one).
    """

    def __init__(
        self, head: Head, wishes: Wishes, echoes: Sequence[str], choices_per_prompt: int, *, drops: bool = False
    ) -> None:
        self._drops = drops
        self._head = head
        self._wishes = wishes
        self._echoes = list(echoes)
        self._choices_per_prompt = choices_per_prompt
        self._offsets = [len(echo) for echo in echoes]  # by choice: characters of the tokens so far, including the echo
        self._usages: dict[int, Usage] = {}
        prefix = dumps({**head.begin(_KIND), "choices": []}).removesuffix("]}")
        self._prefix = f'data: {prefix}{{"index":'
        self._stream_usage = StreamUsage(wishes.usage)
        no_usage = ',"usage":null' if wishes.usage is UsageWish.AT_THE_END else ""
        self._after_text = f',"logprobs":null,"finish_reason":null}}]{no_usage}}}\n\n'
        self._is_plain = not (wishes.logprobs or wishes.token_ids or wishes.usage is UsageWish.IN_EACH_CHUNK)

    def complete(self, generations: Sequence[Generation]) -> dict[str, object]:
        choices: list[dict[str, object]] = []
        if self._drops:
            generations = [_nothing_of(generation) for generation in generations]
        for index, generation in enumerate(generations):
            choice: dict[str, object] = {
                "index": index,
                "text": self._echoes[index] + generation.text,
                "logprobs": None,
                "finish_reason": generation.finish_reason,
            }
            if self._wishes.logprobs:
                choice["logprobs"] = self._logprobs(index, generation)
            if self._wishes.prompt_logprobs:
                choice["prompt_logprobs"] = prompt_logprobs(generation.logprobs)
            if self._wishes.token_ids:
                choice["token_ids"] = list(generation.token_ids)
            choices.append(choice)
        return {**self._head.begin(_KIND), "choices": choices, "usage": self._usage([g.usage for g in generations])}

    def chunk(self, index: int, chunk: GenerationChunk) -> bytes:
        """Write a chunk of choice `index`. Returns its events, which may be empty."""
        if self._drops:
            chunk = _nothing_of(chunk)
        if chunk.prompt_token_count:  # set only in the first chunk
            self._stream_usage.begin(index, chunk)
        self._stream_usage.add(index, chunk)
        text = self._echoes[index] + chunk.text
        if self._is_plain and chunk.finish_reason is None:
            self._echoes[index] = ""
            if not text:
                return b""
            return f'{self._prefix}{index},"text":{quote(text)}{self._after_text}'.encode()
        choice: dict[str, object] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": chunk.finish_reason,
        }
        if self._wishes.logprobs and chunk.logprobs:
            choice["logprobs"] = self._logprobs(index, chunk)
        self._echoes[index] = ""
        if self._wishes.token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        if chunk.usage is not None:
            self._usages[index] = chunk.usage
        return event({**self._head.begin(_KIND), "choices": [choice], **self._stream_usage.field(index)})

    def end(self) -> bytes:
        """Return the events after the last chunk of the last choice: usage if requested, and the end of the stream."""
        if self._wishes.usage is UsageWish.NONE:
            return DONE
        usage = self._usage([usage for _, usage in sorted(self._usages.items())])
        return event({**self._head.begin(_KIND), "choices": [], "usage": usage}) + DONE

    def _logprobs(self, index: int, part: Generation | GenerationChunk) -> dict[str, object]:
        """Return the logprobs of a part, preceded by those of the prompt if the prompt's text is echoed in this
        part.
        """
        prompt = part.logprobs[0].prompt if part.logprobs and self._echoes[index] else ()
        made = () if self._drops else part.logprobs
        found, self._offsets[index] = completion_logprobs(made, 0 if prompt else self._offsets[index], prompt)
        return found

    def _usage(self, usages: Sequence[Usage]) -> dict[str, object]:
        return usage_of(usages[:: self._choices_per_prompt], usages)

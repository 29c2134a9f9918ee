"""Common parts of several kinds of answers: usage, logprobs, server-sent events."""

import json
import math
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring as quote

from ballast.client import GenerationChunk, Logprobs, TokenLogprob, Usage
from services.gateway.openai.requests import UsageWish

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0  # OpenAI's value for minus infinity (an impossible token), which JSON lacks

__all__ = ["DONE", "chat_logprobs", "completion_logprobs", "dumps", "encoded", "event", "quote", "usage_of"]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encoded(value: object) -> bytes:
    """Return `value` as JSON. Lone surrogates, which a model may write as escapes in a call, become question marks."""
    return dumps(value).encode(errors="replace")


def event(value: object, kind: str = "") -> bytes:
    """Return a server-sent event whose data is `value` as JSON. `kind`: its type; empty: none is written."""
    return (f"event: {kind}\n" if kind else "").encode() + b"data: " + encoded(value) + b"\n\n"


def usage_of(
    prompts: Sequence[Usage], usages: Iterable[Usage], reasoning_token_count: int | None = None
) -> dict[str, object]:
    """Return the usage of an answer. `prompts`: one Usage for each prompt, which several choices may share; `usages`:
    one for each choice.
    """
    prompt = sum(usage.prompt_token_count for usage in prompts)
    completion = sum(usage.completion_token_count for usage in usages)
    found: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_token_count for usage in prompts)},
    }
    if reasoning_token_count is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning_token_count}
    return found


class StreamUsage:
    """The field `usage` in chunks of a stream: absent, null, or the token counts of the choice so far."""

    def __init__(self, wish: UsageWish) -> None:
        self.wish = wish
        self._prompts: dict[int, int] = {}
        self._completions: dict[int, int] = {}

    def begin(self, index: int, first: GenerationChunk) -> None:
        """Record the first chunk of a choice."""
        self._prompts[index] = first.prompt_token_count

    def add(self, index: int, chunk: GenerationChunk) -> None:
        """Count the tokens of a chunk of a choice."""
        if self.wish is UsageWish.IN_EACH_CHUNK:
            self._completions[index] = self._completions.get(index, 0) + len(chunk.token_ids)

    def field(self, index: int) -> dict[str, object]:
        """Return the `usage` entry to merge into a choice's next chunk: empty, null, or the counts so far."""
        if self.wish is UsageWish.NONE:
            return {}
        if self.wish is UsageWish.AT_THE_END:
            return {"usage": None}
        prompt, completion = self._prompts.get(index, 0), self._completions.get(index, 0)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        return {"usage": counts}


def chat_logprobs(logprobs: Sequence[Logprobs]) -> dict[str, object]:
    return {
        "content": [
            {**_entry(position.chosen), "top_logprobs": [_entry(other) for other in position.top]}
            for position in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(
    logprobs: Sequence[Logprobs], first_offset: int, prompt: Sequence[Logprobs] = ()
) -> tuple[dict[str, object], int]:
    """Return (logprobs in the format of /v1/completions, number of characters up to the end of the last token).

    `first_offset`: number of characters before the first of these tokens, which may be ahead of the text in a stream.
    `prompt`: logprobs of the prompt's tokens, which precede them; those of the very first token are null.
    """
    positions = [*prompt, *logprobs]
    offsets: list[int] = []
    for position in positions:
        offsets.append(first_offset)
        first_offset += len(_text(position.chosen))
    values = [_value(position.chosen) for position in positions]
    top = [{_text(other): _value(other) for other in (*position.top, position.chosen)} for position in positions]
    known = 1 if prompt else 0
    found: dict[str, object] = {
        "tokens": [_text(position.chosen) for position in positions],
        "token_logprobs": [None] * known + values[known:],
        "top_logprobs": [None] * known + top[known:],
        "text_offset": offsets,
    }
    return found, first_offset


def prompt_logprobs(logprobs: Sequence[Logprobs]) -> list[dict[str, object] | None]:
    """Return the logprobs of a prompt's tokens in vLLM's format: by token id, with ranks if they are known."""
    prompt = logprobs[0].prompt if logprobs else ()
    found: list[dict[str, object] | None] = []
    for position in prompt[1:]:
        ranks = {token.token_id: rank for rank, token in enumerate(position.top, 1)}
        found.append(
            {
                str(token.token_id): {
                    "logprob": _value(token),
                    "rank": ranks.get(token.token_id),
                    "decoded_token": _text(token),
                }
                for token in (*position.top, position.chosen)
            }
        )
    return [None, *found] if prompt else []


def _entry(token: TokenLogprob) -> dict[str, object]:
    return {"token": _text(token), "logprob": _value(token), "bytes": list(token.token)}


def _text(token: TokenLogprob) -> str:
    return token.token.decode(errors="replace")


def _value(token: TokenLogprob) -> float:
    return token.logprob if math.isfinite(token.logprob) else _LEAST_LOGPROB

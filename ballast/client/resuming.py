"""State with which a client resumes a request at another dispatcher (`Resumption` in inference.proto)."""

import asyncio
import os
import random
import time

from ballast.client.types import GenerationChunk
from ballast.common.errors import BallastError, Overloaded, Unavailable
from ballastpb.inference.v1 import inference_pb2 as pb

_SECRET_BYTES = 16
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
_MAX_VAIN = 5  # limit on dispatchers lost in a row without a token, because the request itself may be the cause


class Progress:
    """The answer so far, which is sent with the request at each further attempt.

    It sets a random seed in a request without one, so that every attempt generates the same tokens.
    """

    def __init__(self, request: pb.GenerateRequest) -> None:
        self._request = request
        if not request.sampling.HasField("seed"):
            request.sampling.seed = int.from_bytes(os.urandom(8)) >> 1
        request.resumption.secret = os.urandom(_SECRET_BYTES)
        self._token_ids: list[int] = []
        self._text_char_count = 0

    @property
    def token_count(self) -> int:
        return len(self._token_ids)

    def add(self, chunk: GenerationChunk, prompt_digest: int) -> None:
        """Add a response. `prompt_digest`: set in the first response of each dispatcher, otherwise 0."""
        self._token_ids += chunk.token_ids
        self._text_char_count += len(chunk.text)
        if prompt_digest:
            self._request.resumption.prompt_digest = prompt_digest

    def next_attempt(self) -> None:
        """Add the answer so far to the request and increase its attempt number, before it is sent (again)."""
        told = self._request.resumption
        told.attempt += 1
        del told.token_ids[:]
        told.token_ids.extend(self._token_ids)
        told.text_char_count = self._text_char_count


class Patience:
    """Limits how long, and over how many lost dispatchers, a client tries to resume a request."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._vain_count = 0

    def begin(self) -> None:
        """Start the time limit, because the request's dispatcher was lost."""
        self._vain_count += 1
        self._until_s = time.monotonic() + self._within_s
        self._pause_s = _FIRST_PAUSE_S

    def restore(self) -> None:
        """Reset the count of lost dispatchers, because a token was received."""
        self._vain_count = 0

    async def wait(self, why: BallastError, cut: Unavailable) -> None:
        """Wait until the dispatchers may be tried again. `why`: the last error; `cut`: how the dispatcher was lost.

        Raises:
            Unavailable: the time limit has passed, or too many dispatchers were lost; the message has both causes.
        """
        if self._vain_count > _MAX_VAIN:
            why_not = f"{self._vain_count} dispatchers in a row were lost without a new token"
            raise Unavailable(cut.target, f"{cut.why}; the request is given up: {why_not}") from why
        pause_s = why.retry_after_s if isinstance(why, Overloaded) else self._pause_s
        if time.monotonic() + pause_s > self._until_s:
            told = f"{cut.why}, and no dispatcher went on with the request within {self._within_s:g} s: {why}"
            raise Unavailable(cut.target, told) from why
        self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s)
        await asyncio.sleep(pause_s * random.uniform(0.75, 1.0))

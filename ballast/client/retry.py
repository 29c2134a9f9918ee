"""Retries after an overloaded dispatcher's refusal."""

import asyncio
import random
from dataclasses import dataclass

from ballast.common.errors import Overloaded

_JITTER_FRACTION = 0.25


@dataclass(slots=True)
class OverloadRetry:
    """Waits before retries as long as the refusal asks for, at most `attempts_left` times and `max_wait_s` each time.

    Up to 25 % is added at random, so that clients that were refused together do not retry together.
    """

    attempts_left: int
    max_wait_s: float

    async def wait(self, error: Overloaded, time_left_s: float | None) -> None:
        """Wait until the request may be sent again. `time_left_s`: time until its deadline; None: no deadline.

        Raises:
            Overloaded: `error` itself, if no attempt is left or the wait would be too long.
        """
        wait_s = error.retry_after_s * (1.0 + _JITTER_FRACTION * random.random())
        allowed_s = self.max_wait_s if time_left_s is None else min(self.max_wait_s, time_left_s)
        if self.attempts_left < 1 or wait_s > allowed_s:
            raise error
        self.attempts_left -= 1
        await asyncio.sleep(wait_s)

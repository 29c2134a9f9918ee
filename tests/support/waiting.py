"""Polls conditions that no event signals."""

import asyncio
from collections.abc import Callable


async def soon(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Returns once `holds()` is true; raises TimeoutError after `within_s` seconds."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)

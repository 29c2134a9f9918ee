"""Waiting for what has no event of its own."""

import asyncio
from collections.abc import Callable


async def soon(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    """Returns once `holds`; TimeoutError after `within_s`."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)

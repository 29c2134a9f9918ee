"""Tasks of a service that decisions ask for at any time, also when the service is about to end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Self


class Work(asyncio.TaskGroup):
    """A task group that begins nothing any more once it has begun to end, and leaves nothing behind then.

    Streams and requests end behind the loop that owns this group, and what they tell the core may ask for more work.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        return await super().__aenter__()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            self.create_task(work, name=name)
        except RuntimeError:
            work.close()  # else its never having been awaited is complained about at some other time
            if not self._is_open:
                raise

"""Subscribers to layouts."""

import asyncio

from ballast.common.errors import BallastError, Overloaded
from ballast.common.layout import Layout


class LayoutWatcher:
    """Holds the newest layout that one watcher has not received. Older ones are dropped."""

    def __init__(self, first: Layout) -> None:
        self._newest: Layout | None = first
        self._error: BallastError | None = None
        self._wake = asyncio.Event()

    def offer(self, layout: Layout) -> None:
        self._newest = layout
        self._wake.set()

    def dismiss(self, error: BallastError) -> None:
        self._error = error
        self._wake.set()

    async def next(self) -> Layout:
        """Wait for the next layout and return it. Raises the error with which the watcher was dismissed."""
        while self._newest is None:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        layout, self._newest = self._newest, None
        return layout


class Watchers:
    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._watchers: set[LayoutWatcher] = set()

    def add(self, first: Layout) -> LayoutWatcher:
        """Add a watcher that first gets `first`. Raises Overloaded if there are too many."""
        if len(self._watchers) >= self._max_count:
            raise Overloaded(f"{self._max_count} watchers are already connected", 1.0)
        watcher = LayoutWatcher(first)
        self._watchers.add(watcher)
        return watcher

    def remove(self, watcher: LayoutWatcher) -> None:
        self._watchers.discard(watcher)

    def offer(self, layout: Layout) -> None:
        for watcher in self._watchers:
            watcher.offer(layout)

    def dismiss(self, error: BallastError) -> None:
        for watcher in self._watchers:
            watcher.dismiss(error)

"""Requests that are not on a worker, in order of arrival."""

import bisect
from collections.abc import Iterator

from ballast.common.errors import InvariantViolation
from services.dispatcher.core.tracked import Tracked


def _key(tracked: Tracked) -> int:
    return tracked.serial


class ArrivalOrder:
    """Requests in order of arrival. Replayed requests keep their position."""

    def __init__(self) -> None:
        self.token_count = 0
        self._entries: list[Tracked] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._entries)

    def count_before(self, tracked: Tracked) -> int:
        """Number of requests ahead of this one's current or future position."""
        return bisect.bisect_left(self._entries, _key(tracked), key=_key)

    def add(self, tracked: Tracked) -> None:
        bisect.insort(self._entries, tracked, key=_key)
        self.token_count += tracked.token_count

    def remove(self, tracked: Tracked) -> None:
        at = self.count_before(tracked)
        if at == len(self._entries) or self._entries[at] is not tracked:
            raise InvariantViolation(f"{tracked.request.request_id} does not wait here")
        del self._entries[at]
        self.token_count -= tracked.token_count

    def check(self) -> None:
        """Raise InvariantViolation unless the requests are sorted and none is on a worker."""
        serials = [tracked.serial for tracked in self._entries]
        if serials != sorted(set(serials)):
            raise InvariantViolation(f"requests are out of order: {serials}")
        for tracked in self._entries:
            if tracked.worker is not None or tracked.handle or tracked.moving:
                raise InvariantViolation(f"{tracked.request.request_id} waits, but {tracked.worker} has it")
        if self.token_count != sum(tracked.token_count for tracked in self._entries):
            raise InvariantViolation(f"wrong count of {self.token_count} tokens of {len(self._entries)} requests")

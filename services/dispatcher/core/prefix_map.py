"""Map of the prompt prefixes whose KV workers have cached, according to their reports and the requests sent to them.

Evictions are not reported individually. A worker evicts by LRU, and reports a time since which all used prefixes are
still cached (`LoadReport.prefixes_kept_s`). Prefixes last used before that time are ignored.
"""

from collections import OrderedDict
from collections.abc import Sequence

from ballast.common.errors import InvariantViolation
from ballast.common.marks import MARK_TOKENS, Mark
from services.dispatcher.policy.freeness import Hits, WorkerKey

_MOST_FOUND = 8  # workers with cached prefixes that are considered in addition to the freest
_MOST_SEEN = 4 * _MOST_FOUND  # remembered workers per mark; some may be lost, or may have evicted it


class PrefixMap:
    def __init__(self, most_marks: int) -> None:
        """`most_marks`: maximum number of known marks; LRU."""
        self._most_marks = most_marks
        # Mark -> worker -> time of its last use; both levels in the order of use, the most recent at the end.
        self._used: OrderedDict[Mark, dict[WorkerKey, float]] = OrderedDict()
        self._kept_since_s: dict[WorkerKey, float] = {}  # connected worker -> time passed to `report`

    def __len__(self) -> int:
        return len(self._used)

    def report(self, worker: WorkerKey, kept_since_s: float) -> None:
        """Record that all prefixes used on the worker since `kept_since_s` are still cached there."""
        self._kept_since_s[worker] = kept_since_s

    def forget(self, worker: WorkerKey) -> None:
        self._kept_since_s.pop(worker, None)

    def note(self, worker: WorkerKey, marks: Sequence[Mark], at_s: float) -> None:
        """Record prefixes computed or reused on the worker."""
        for mark in marks if self._most_marks else ():
            used = self._used.get(mark)
            if used is None:
                used = self._used[mark] = {}
                if len(self._used) > self._most_marks:
                    self._used.popitem(last=False)
            else:
                self._used.move_to_end(mark)
                used.pop(worker, None)
            used[worker] = at_s
            if len(used) > _MOST_SEEN:
                del used[next(iter(used))]

    def hits(self, marks: Sequence[Mark]) -> Hits:
        """Return the cached tokens of a prompt on at most `_MOST_FOUND` workers: those that have most of them. A worker
        that has the end of a prefix has all of it, because ends are evicted first.
        """
        found: dict[WorkerKey, int] = {}
        kept_since_s = self._kept_since_s
        for index in range(len(marks) - 1, -1, -1):
            used = self._used.get(marks[index])
            if used is None:
                continue
            for worker in reversed(used):
                since_s = kept_since_s.get(worker)
                if since_s is not None and used[worker] >= since_s and worker not in found:
                    found[worker] = (index + 1) * MARK_TOKENS
                    if len(found) == _MOST_FOUND:
                        return found
        return found

    def check(self) -> None:
        if len(self._used) > self._most_marks or not all(self._used.values()):
            raise InvariantViolation(f"{len(self._used)} marks are known, but at most {self._most_marks} are allowed")

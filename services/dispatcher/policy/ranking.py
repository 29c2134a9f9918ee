"""Chooses a worker according to the rules of `freeness`, incrementally as workers change.

For a request, workers of one shape (`WorkerShape`) differ only in free blocks and freeness. Each shape therefore has a
list of its workers sorted by freeness, and the maximum of their free blocks, so that a worker that runs a request at
once is found without scanning all. A change costs a search in sorted lists; a choice costs one step per shape and per
freer worker with too few blocks.
"""

import bisect
from collections.abc import Iterator
from typing import NamedTuple

from services.dispatcher.policy.freeness import (
    NO_HITS,
    Hits,
    Need,
    RoutingRules,
    WorkerKey,
    WorkerShape,
    WorkerView,
    blocks_for,
    freeness,
    has_room,
    may_queue,
    place_of,
    runs_at_once,
)


class _RankedWorker(NamedTuple):
    """Sort key of a worker: the freest first, then the smallest id."""

    minus_freeness: float
    worker: WorkerKey


class _ShapeRanking:
    __slots__ = ("free_block_counts", "queues", "runs")

    def __init__(self) -> None:
        self.runs: list[_RankedWorker] = []  # workers that could run a request of one block at once
        self.free_block_counts: list[int] = []  # free blocks of the workers in `runs`, ascending
        self.queues: list[_RankedWorker] = []  # workers with a free place in their own queue


class _RankingEntry(NamedTuple):
    """State of a worker in the ranking, with its sort key in `shape`."""

    view: WorkerView
    shape: _ShapeRanking
    place: _RankedWorker
    free_block_count: int
    runs: bool
    queues: bool


class Ranking:
    """The workers that can accept at least a request of one block, sorted."""

    def __init__(self, rules: RoutingRules) -> None:
        self._rules = rules
        self._entries: dict[WorkerKey, _RankingEntry] = {}
        self._shapes: dict[WorkerShape, _ShapeRanking] = {}
        self._computing: dict[WorkerKey, WorkerView] = {}  # workers with room, but still computing earlier prompts

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[WorkerKey]:
        return iter(self._entries)

    def get(self, worker: WorkerKey) -> WorkerView | None:
        entry = self._entries.get(worker)
        return self._computing.get(worker) if entry is None else entry.view

    def update(self, view: WorkerView) -> None:
        """Replace the state of a worker."""
        self.remove(view.worker)
        runs, queues = runs_at_once(view, 1), may_queue(view, self._rules)
        if not runs and has_room(view, 1):
            self._computing[view.worker] = view
        if not runs and not queues:
            return
        key = view.shape
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _ShapeRanking()
        place, free_block_count = _RankedWorker(-freeness(view), view.worker), view.free_block_count
        self._entries[view.worker] = _RankingEntry(view, shape, place, free_block_count, runs, queues)
        if runs:
            bisect.insort(shape.runs, place)
            bisect.insort(shape.free_block_counts, free_block_count)
        if queues:
            bisect.insort(shape.queues, place)

    def remove(self, worker: WorkerKey) -> None:
        self._computing.pop(worker, None)
        entry = self._entries.pop(worker, None)
        if entry is None:
            return
        view, shape, place, free_block_count, runs, queues = entry
        if runs:
            _take(shape.runs, place)
            del shape.free_block_counts[bisect.bisect_left(shape.free_block_counts, free_block_count)]
        if queues:
            _take(shape.queues, place)
        if not shape.runs and not shape.queues:
            del self._shapes[view.shape]

    def choose(self, need: Need, hits: Hits = NO_HITS, *, may_queue_large: bool) -> WorkerKey | None:
        """Return the worker for the request; None: the request stays in the backlog. Ties go to the smallest id."""
        if (at_once := self.at_once(need, hits)) is not None:
            return at_once
        best: _RankedWorker | None = None
        for (block_count, block_tokens, _), shape in self._shapes.items():
            wanted = blocks_for(need.tokens, block_tokens)
            if not shape.queues or wanted > block_count:
                continue
            fits = may_queue_large or wanted <= self._rules.large_fraction * block_count
            if fits and (best is None or shape.queues[0] < best):
                best = shape.queues[0]
        return None if best is None else best.worker

    def at_once(self, need: Need, hits: Hits = NO_HITS) -> WorkerKey | None:
        """Return the worker on which a request runs without waiting, or one with so much of its prefix cached that its
        first token is earlier there, even after other prompts; None: neither exists.
        """
        room = need
        if not (found := self._contenders(room)):
            room = need.now
            found = self._contenders(room)
        if hits and found:
            found += [worker for worker in hits if self._has_room(worker, room)]
        if len(found) < 2:
            return found[0] if found else None
        views = {worker: view for worker in found if (view := self.get(worker)) is not None}
        return min(views, key=lambda worker: place_of(views[worker], need, hits))

    def _has_room(self, worker: WorkerKey, need: Need) -> bool:
        view = self.get(worker)
        if view is None or blocks_for(need.tokens, view.block_tokens) > view.block_count:
            return False
        return has_room(view, min(view.block_count, blocks_for(need.tokens + need.growth_tokens, view.block_tokens)))

    def contenders(self, need: Need) -> list[WorkerKey]:
        """Return, for each shape, the freest worker that would run a request at once. `at_once` chooses among these."""
        return self._contenders(need) or self._contenders(need.now)

    def _contenders(self, need: Need) -> list[WorkerKey]:
        return [
            place.worker
            for (block_count, block_tokens, _), shape in self._shapes.items()
            if (place := self._at_once(shape, need, block_count, block_tokens)) is not None
        ]

    def _at_once(self, shape: _ShapeRanking, need: Need, block_count: int, block_tokens: int) -> _RankedWorker | None:
        if not shape.runs or blocks_for(need.tokens, block_tokens) > block_count:
            return None
        wanted = min(block_count, blocks_for(need.tokens + need.growth_tokens, block_tokens))
        if wanted > shape.free_block_counts[-1]:
            return None
        return next(place for place in shape.runs if wanted <= self._entries[place.worker].free_block_count)


def _take(places: list[_RankedWorker], place: _RankedWorker) -> None:
    del places[bisect.bisect_left(places, place)]

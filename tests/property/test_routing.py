"""The ranking that dispatchers maintain incrementally chooses the same worker as a plain scan over all workers."""

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given

from ballast.common.ids import Incarnation, WorkerId
from services.dispatcher.policy.freeness import (
    Hits,
    Need,
    RoutingRules,
    WorkerKey,
    WorkerShape,
    WorkerView,
    blocks_for,
    freeness,
    has_place,
    has_room,
    may_queue,
    place_of,
    runs_at_once,
)
from services.dispatcher.policy.ranking import Ranking

views = st.builds(
    WorkerView,
    worker=st.builds(WorkerKey, st.sampled_from([WorkerId(f"w{i}") for i in range(7)]), st.just(Incarnation(1))),
    block_tokens=st.sampled_from((16, 64)),
    block_count=st.sampled_from((0, 8, 40)),
    used_block_count=st.integers(0, 40),
    waiting_block_count=st.integers(0, 6),
    unseen_block_count=st.integers(0, 6),
    running_count=st.integers(0, 4),
    waiting_count=st.integers(0, 3),
    unseen_count=st.integers(0, 3),
    max_running_count=st.integers(1, 6),
    max_waiting_count=st.integers(0, 4),
    draining=st.sampled_from((False, False, False, True)),
    kept_block_count=st.integers(0, 6),
    instance_count=st.sampled_from((1, 1, 2, 4)),
    uncomputed_token_count=st.integers(0, 500),
)
needs = st.builds(Need, tokens=st.integers(1, 700), growth_tokens=st.integers(0, 128))
rules = st.builds(
    RoutingRules,
    worker_queue_count=st.integers(0, 3),
    large_fraction=st.sampled_from((0.0, 0.25, 1.0)),
    growth_tokens=st.sampled_from((0, 16, 64)),
)
keys = st.builds(WorkerKey, st.sampled_from([WorkerId(f"w{i}") for i in range(7)]), st.just(Incarnation(1)))
hits = st.just(dict[WorkerKey, int]()) | st.dictionaries(keys, st.sampled_from((256, 512)), max_size=4)
asks = st.lists(st.tuples(needs, hits), max_size=3)
changes = st.lists(st.tuples(views, st.booleans(), asks), min_size=1, max_size=25)


def choose(
    views: Sequence[WorkerView], need: Need, rules: RoutingRules, hits: Hits, *, may_queue_large: bool
) -> WorkerView | None:
    """The routing rule as a scan over every worker. Returns None if the request must stay in the backlog."""
    freest: dict[WorkerShape, WorkerView] = {}  # shape -> freest worker on which it can grow
    tight: dict[WorkerShape, WorkerView] = {}  # per shape: the freest worker where it runs at once
    queue: WorkerView | None = None
    holders: tuple[list[WorkerView], list[WorkerView]] = [], []  # of a prefix, that have room to grow or just room
    for view in views:
        block_count = blocks_for(need.tokens, view.block_tokens)
        if view.draining or block_count > view.block_count:
            continue
        with_growth = min(view.block_count, blocks_for(need.tokens + need.growth_tokens, view.block_tokens))
        shape = view.shape
        for group, wanted in zip(holders, (with_growth, block_count), strict=True):
            group.extend([view] * (view.worker in hits and has_room(view, wanted)))
        if runs_at_once(view, with_growth):
            freest[shape] = _freer(freest.get(shape), view)
        if runs_at_once(view, block_count):
            tight[shape] = _freer(tight.get(shape), view)
        elif may_queue(view, rules) and (may_queue_large or block_count <= rules.large_fraction * view.block_count):
            queue = _freer(queue, view)
    found = [*freest.values(), *holders[0]] if freest else [*tight.values(), *holders[1]] if tight else []
    return min(found, key=lambda view: place_of(view, need, hits), default=queue)


def _freer(one: WorkerView | None, other: WorkerView) -> WorkerView:
    return other if one is None else min(one, other, key=lambda view: (-freeness(view), view.worker))


@given(changes, rules, st.booleans())
def test_the_ranking_chooses_as_the_plain_rule(
    told: list[tuple[WorkerView, bool, list[tuple[Need, dict[WorkerKey, int]]]]],
    rules: RoutingRules,
    may_queue_large: bool,
) -> None:
    ranking, known = Ranking(rules), dict[WorkerKey, WorkerView]()
    for view, stays, asked in told:
        if stays:
            known[view.worker] = view
            ranking.update(view)
        else:
            known.pop(view.worker, None)
            ranking.remove(view.worker)
        assert {key: ranking.get(key) for key in ranking} == {
            key: view for key, view in known.items() if has_place(view, rules)
        }
        for need, hit in asked:
            plain = choose([*known.values()], need, rules, hit, may_queue_large=may_queue_large)
            chosen = ranking.choose(need, hit, may_queue_large=may_queue_large)
            assert chosen == (None if plain is None else plain.worker)

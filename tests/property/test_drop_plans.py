"""Drop plans for arbitrary clusters are complete, contiguous and within memory; splits are as good as brute force."""

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.common.ids import WorkerId
from services.planner.policy.drop import DropPlan, by_need
from services.planner.policy.restore import plan_restore
from services.planner.policy.snapshot import GroupState, InstanceState, Snapshot
from services.planner.policy.split import SplitMember, Splitter, SplitTolerance
from tests.support.drop_plans import acceptable_splits, after, group, kept_bytes, model, parameter_bytes


@st.composite
def clusters(draw: st.DrawFn, max_groups: int = 7) -> Snapshot:
    """Single instances and pipelines of different memory and load; some members hold more layers than they execute."""
    layer_count = draw(st.integers(1, 8))
    shape = model(
        layer_count,
        layer_parameter_bytes=tuple(
            draw(st.lists(st.sampled_from([1000, 1000, 640]), min_size=layer_count, max_size=layer_count))
        ),
        extent_bytes=draw(st.sampled_from([1, 64, 100])),
    )
    kv_bytes = st.sampled_from([4000, 4000, 900, 7777])
    groups: list[GroupState] = []
    for g in range(draw(st.integers(1, max_groups))):
        cuts = sorted(draw(st.sets(st.integers(1, max(1, layer_count - 1)), max_size=2))) if layer_count > 1 else []
        bounds = [0, *draw(st.sampled_from([cuts, []])), layer_count]
        members: list[InstanceState] = []
        for i, (first, last) in enumerate(itertools.pairwise(bounds)):
            extra = draw(st.sets(st.integers(0, layer_count - 1), max_size=1)) if len(bounds) > 2 else set[int]()
            held = tuple(sorted({*range(first, last), *extra}))
            # Room for a full copy, rounded up to extents, so that every drop stays within the budget.
            budget_bytes = shape.copy_bytes + 600 + 64 * layer_count + draw(kv_bytes)
            members.append(InstanceState(WorkerId(f"w{g}{'abc'[i]}"), budget_bytes, first, last, held))
        used = draw(st.integers(0, 30))
        groups.append(group(shape, *members, used=used, waiting=draw(st.integers(0, 30))))
    snapshot = Snapshot(shape, tuple(groups))
    snapshot.check()
    return snapshot


def check_plan(snapshot: Snapshot, done: DropPlan) -> Snapshot:
    then = after(snapshot, done)
    then.check()  # I1: complete, contiguous, in memory, within budget
    assert {m.worker_id for g in then.groups for m in g.members} == {
        m.worker_id for g in snapshot.groups for m in g.members
    }
    assert parameter_bytes(snapshot) - parameter_bytes(then) == done.freed_bytes
    assert done.freed_bytes == sum(m.freed_bytes for g in done.groups for m in g.members)
    assert done.shortfall_bytes == max(0, done.needed_bytes - done.usable_bytes)
    shape = snapshot.model
    held_before = {m.worker_id: set(m.held_layers) for g in snapshot.groups for m in g.members}
    budgets = {m.worker_id: m.budget_bytes for g in snapshot.groups for m in g.members}
    for planned in done.groups:
        for m in planned.members:
            kept = set(range(m.first_layer, m.last_layer))
            assert kept | set(m.dropped_layers) == held_before[m.worker_id]
            assert not kept & set(m.dropped_layers)
            per_layer = -(-m.block_count * shape.block_bytes // shape.extent_bytes) * shape.extent_bytes
            others = -(-shape.other_parameter_bytes // shape.extent_bytes) * shape.extent_bytes
            taken = others + shape.occupied_bytes(tuple(sorted(kept))) + per_layer * len(kept)
            assert taken <= budgets[m.worker_id]
        assert planned.block_count == min(m.block_count for m in planned.members) >= 1
    check_exchange(snapshot, then, done)
    return then


def check_exchange(snapshot: Snapshot, then: Snapshot, done: DropPlan) -> None:
    """Checks `exchange_bytes`: a group sends a layer's KV if another member executes that layer in the new group."""
    new_holder = {
        (m.worker_id, layer): holder.worker_id
        for g in then.groups
        for m in g.members
        for holder in g.members
        for layer in range(holder.first_layer, holder.last_layer)
    }
    moved = sum(
        g.used_block_count * snapshot.model.block_bytes
        for g in snapshot.groups
        for m in g.members
        for layer in range(m.first_layer, m.last_layer)
        if new_holder[m.worker_id, layer] != m.worker_id
    )
    assert moved == done.exchange_bytes


@settings(max_examples=150, deadline=None)
@given(clusters(), st.integers(0, 60_000), st.sampled_from([0.0, 0.65]))
def test_every_plan_is_sound(snapshot: Snapshot, needed_bytes: int, tolerable_shortfall: float) -> None:
    then = check_plan(snapshot, by_need(snapshot, needed_bytes, tolerable_shortfall=tolerable_shortfall))
    check_plan(then, by_need(then, needed_bytes // 2))  # now pipelines are merged further


@settings(max_examples=100, deadline=None)
@given(clusters(), st.integers(0, 60_000), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(snapshot: Snapshot, needed_bytes: int, rng: random.Random) -> None:
    shuffled = list(snapshot.groups)
    rng.shuffle(shuffled)
    assert by_need(Snapshot(snapshot.model, tuple(shuffled)), needed_bytes) == by_need(snapshot, needed_bytes)


@settings(max_examples=100, deadline=None)
@given(clusters(), st.integers(0, 40_000), st.integers(0, 20_000))
def test_a_larger_need_is_met_by_no_fewer_bytes(snapshot: Snapshot, needed_bytes: int, more_bytes: int) -> None:
    little, much = by_need(snapshot, needed_bytes), by_need(snapshot, needed_bytes + more_bytes)
    assert min(little.usable_bytes, needed_bytes) <= much.usable_bytes
    assert little.shortfall_bytes <= much.shortfall_bytes


@settings(max_examples=60, deadline=None)
@given(clusters(max_groups=2))
def test_no_split_sends_less(snapshot: Snapshot) -> None:
    shape = snapshot.model
    candidates = [SplitMember(m, g.used_block_count * shape.block_bytes) for g in snapshot.groups for m in g.members][
        :4
    ]
    found = Splitter(shape).split(candidates)
    acceptable = acceptable_splits(candidates, shape, SplitTolerance())
    assert (found is None) == (not acceptable)
    if found is not None:
        assert kept_bytes(found) == max(kept_bytes(s) for s in acceptable)


@settings(max_examples=100, deadline=None)
@given(clusters(), st.integers(0, 60_000))
def test_a_restore_pulls_exactly_the_missing_layers(snapshot: Snapshot, needed_bytes: int) -> None:
    then = after(snapshot, by_need(snapshot, needed_bytes))
    restore = plan_restore(then)
    holders = {m.worker_id: set(m.held_layers) for g in then.groups for m in g.members}
    pipelines = {g.group_id: g for g in then.groups if len(g.members) > 1}
    assert {d.group_id for d in restore.dissolutions} | {group_id for group_id, _ in restore.kept} == set(pipelines)
    for dissolved in restore.dissolutions:
        for m in pipelines[dissolved.group_id].members:
            pulled = [p.layer for p in dissolved.pulls if p.worker_id == m.worker_id]
            assert sorted([*pulled, *m.held_layers]) == list(range(then.model.layer_count))
        for pull in dissolved.pulls:
            reachable = {w for w, held in holders.items() if pull.layer in held}
            assert {pull.source, *pull.others} - {None} <= reachable
            assert (pull.source is None) == (not reachable)
        assert pipelines[dissolved.group_id].load_blocks <= 0.85 * sum(dissolved.block_counts)

import random
from collections.abc import Sequence

from ballast.common.ids import WorkerId
from services.planner.policy.snapshot import InstanceState, ModelShape
from services.planner.policy.split import (
    TOWARD_MEMORY,
    SplitMember,
    SplitStage,
    Splitter,
    SplitTolerance,
    is_unlike,
    kinds_of,
)
from tests.support.drop_plans import (
    acceptable_splits,
    all_splits,
    blocks_of,
    kept_bytes,
    longest,
    model,
    stage,
)


def ranges(stages: list[SplitStage] | None) -> list[tuple[str, int, int]]:
    assert stages is not None
    return [(s.candidate.instance.worker_id, s.first_layer, s.last_layer) for s in stages]


def full(name: str, shape: ModelShape, kv: int = 0) -> SplitMember:
    return SplitMember(stage(name, 0, shape.layer_count, shape), kv)


def test_two_instances_take_half_each() -> None:
    shape = model(8)
    assert ranges(Splitter(shape).split([full("b", shape), full("a", shape)])) == [("a", 0, 4), ("b", 4, 8)]


def test_seven_layers_on_three_members() -> None:
    shape = model(7)
    found = ranges(Splitter(shape).split([full(name, shape) for name in "abc"]))
    assert [last - first for _, first, last in found] == [3, 2, 2]


def test_the_member_with_most_kv_leads_and_takes_the_larger_part() -> None:
    shape = model(5)
    assert ranges(Splitter(shape).split([full("a", shape, 10), full("b", shape, 90)])) == [("b", 0, 3), ("a", 3, 5)]


def test_capacity_is_traded_for_less_exchange_only_within_the_tolerance() -> None:
    # Five layers leave 1800 bytes for the KV of each layer, six leave 1333 (26 % less), seven 1000 (44 % less).
    shape = model(10)
    members = [full("a", shape, 10), full("b", shape, 90)]
    for capacity, largest in ((0.0, 5), (0.25, 5), (0.27, 6), (0.43, 6), (0.45, 7)):
        found = ranges(Splitter(shape, SplitTolerance(balance=1.0, capacity=capacity)).split(members))
        assert found[0] == ("b", 0, largest)


def test_a_small_device_takes_fewer_layers_when_time_allows() -> None:
    shape = model(8)
    small = SplitMember(stage("a", 0, 8, shape, kv_bytes=100), 0)
    large = SplitMember(stage("b", 0, 8, shape, kv_bytes=9000), 0)
    found = Splitter(shape, SplitTolerance(balance=1.0)).split([small, large])
    assert found is not None
    layers = {s.candidate.instance.worker_id: s.last_layer - s.first_layer for s in found}
    assert layers[WorkerId("a")] < layers[WorkerId("b")]


def test_in_merged_pipelines_members_execute_layers_that_they_hold() -> None:
    shape = model(8)
    members = [stage("a", 0, 4, shape), stage("b", 4, 8, shape), stage("c", 0, 3, shape), stage("d", 3, 8, shape)]
    found = Splitter(shape).split([SplitMember(m, 7) for m in members])
    assert found is not None
    for s in found:
        assert set(range(s.first_layer, s.last_layer)) <= set(s.candidate.instance.held_layers)
    assert [s.last_layer - s.first_layer for s in found] == [2, 2, 2, 2]


def test_a_full_copy_is_placed_between_the_parts_of_a_pipeline() -> None:
    shape = model(6)
    members = [stage("a", 0, 2, shape), stage("b", 2, 6, shape), stage("z", 0, 6, shape)]
    found = ranges(Splitter(shape).split([SplitMember(m, 0) for m in members]))
    assert sorted(last - first for _, first, last in found) == [2, 2, 2]


def test_members_that_share_one_layer_form_no_pipeline() -> None:
    shape = model(4)
    members = [stage("a", 0, 1, shape), stage("b", 1, 4, shape), stage("c", 0, 1, shape), stage("d", 1, 4, shape)]
    assert Splitter(shape).split([SplitMember(m, 0) for m in members]) is None
    assert not Splitter(shape).is_feasible(members)


def test_more_members_than_layers_form_no_pipeline() -> None:
    shape = model(2)
    assert Splitter(shape).split([full(name, shape) for name in "abc"]) is None
    assert not Splitter(shape).is_feasible([stage(name, 0, 2, shape) for name in "abc"])


def random_members(rng: random.Random, shape: ModelShape, count: int) -> list[SplitMember]:
    members: list[SplitMember] = []
    for i in range(count):
        first, last = sorted(rng.sample(range(shape.layer_count + 1), 2))
        if rng.random() < 0.5:
            first, last = 0, shape.layer_count
        held = set(range(first, last))
        if rng.random() < 0.2:
            held |= {rng.randrange(shape.layer_count)}
        kv_bytes = rng.choice([2000, 2000, rng.randint(50, 8000)])
        budget_bytes = shape.copy_bytes + shape.other_parameter_bytes + kv_bytes
        extent_bytes = rng.choice([0, 0, 32, 100])
        budget_bytes += extent_bytes * (shape.layer_count + 1)
        instance = InstanceState(WorkerId(f"w{i}"), budget_bytes, first, last, tuple(sorted(held)), extent_bytes)
        members.append(SplitMember(instance, rng.choice([0, 5, rng.randint(0, 100)])))
    return members


def test_the_split_is_the_best_of_all() -> None:
    rng = random.Random(7)
    found_some = 0
    for _ in range(400):
        layer_count = rng.randint(2, 6)
        shape = model(
            layer_count,
            extent_bytes=rng.choice([1, 64]),
            layer_parameter_bytes=tuple(rng.choice([1000, 1000, 700]) for _ in range(layer_count)),
        )
        candidates = random_members(rng, shape, rng.randint(1, 4))
        tolerance = rng.choice([SplitTolerance(), SplitTolerance(balance=0.5, capacity=0.3)])
        splitter = Splitter(shape, tolerance)
        found = splitter.split(candidates)
        acceptable = acceptable_splits(candidates, shape, tolerance)
        assert (found is None) == (not acceptable)
        assert splitter.is_feasible([c.instance for c in candidates]) == bool(acceptable)
        if found is not None:
            found_some += 1
            assert found in list(all_splits(candidates, shape))
            assert longest(found) <= max(longest(s) for s in acceptable)
            assert blocks_of(found, shape) >= min(blocks_of(s, shape) for s in acceptable)
            assert kept_bytes(found) == max(kept_bytes(s) for s in acceptable)
    assert found_some > 150


def test_many_kinds_of_members_still_find_a_pipeline() -> None:
    shape = model(24)
    members = [stage(f"a{i}", 2 * i, 2 * i + 2, shape, 4000 + i) for i in range(12)]
    members += [stage(f"b{i}", 3 * i, 3 * i + 3, shape, 5000 + i) for i in range(8)]
    found = Splitter(shape).split([SplitMember(m, i) for i, m in enumerate(members)])
    assert found is not None
    assert [s.first_layer for s in found] == [0, *[s.last_layer for s in found][:-1]]
    for s in found:
        assert set(range(s.first_layer, s.last_layer)) <= set(s.candidate.instance.held_layers)


def test_a_member_with_more_kv_never_takes_fewer_layers() -> None:
    shape = model(23)
    found = Splitter(shape).split([full(f"w{i:02d}", shape, i) for i in range(10)])
    assert found is not None
    by_load = sorted((s.candidate.kv_bytes_per_layer, s.last_layer - s.first_layer) for s in found)
    counts = [layers for _, layers in by_load]
    assert counts == sorted(counts)
    assert max(counts) == 3  # as in an even split: no stage becomes slower or gets less KV


def test_many_loads_and_uneven_layers_are_matched_after_the_split() -> None:
    shape = model(23, layer_parameter_bytes=(1000,) * 22 + (1010,))
    found = Splitter(shape).split([full(f"w{i:02d}", shape, i) for i in range(10)])
    assert found is not None
    by_load = sorted((s.candidate.kv_bytes_per_layer, s.last_layer - s.first_layer) for s in found)
    counts = [layers for _, layers in by_load]
    assert counts == sorted(counts)


def unlike_members(rng: random.Random, shape: ModelShape) -> list[SplitMember]:
    """Un-dropped members of different memory, extent size and speed, each with room for some blocks."""
    members: list[SplitMember] = []
    for i in range(rng.randint(2, 4)):
        extent_bytes = rng.choice([1, 32, 100])
        least = shape.at(extent_bytes).copy_bytes + shape.other_parameter_bytes + extent_bytes * (shape.layer_count + 1)
        budget_bytes = least + int(least * rng.choice([0.02, 0.1, 0.5, 1.0, 2.0, 6.0])) + rng.randint(0, 300)
        slowness = rng.choice([1.0, 1.0, 1.21, 1.95])
        held = tuple(range(shape.layer_count))
        instance = InstanceState(
            WorkerId(f"w{i}"), budget_bytes, 0, shape.layer_count, held, extent_bytes, slowness=slowness
        )
        members.append(SplitMember(instance, rng.choice([0, 5, rng.randint(0, 100)])))
    return members


def alone_blocks(members: Sequence[SplitMember], shape: ModelShape) -> int:
    instances = [member.instance for member in members]
    return sum(shape.at(i.extent_bytes).block_count(i.budget_bytes, 0, shape.layer_count) for i in instances)


def slowest(stages: Sequence[SplitStage]) -> float:
    return max((s.last_layer - s.first_layer) * s.candidate.instance.slowness for s in stages)


def test_unlike_members_are_split_between_even_and_most_memory() -> None:
    """Compares the balanced split, the one in the middle, and the one with the most memory with all possible splits."""
    rng = random.Random(11)
    farther = 0
    for _ in range(600):
        shape = model(rng.randint(2, 8))
        members = unlike_members(rng, shape)
        if len(members) > shape.layer_count:
            continue
        splitter = Splitter(shape, SplitTolerance(capacity=0.0))
        every = [s for s in all_splits(members, shape) if blocks_of(s, shape) >= 1]
        even = SplitTolerance().longest(min(map(slowest, every)))
        quick = max(blocks_of(s, shape) for s in every if slowest(s) <= even)
        best = max(blocks_of(s, shape) for s in every)
        balanced, middle, most = (splitter.split(members, toward) for toward in TOWARD_MEMORY)
        assert balanced is not None
        assert middle is not None
        assert most is not None
        assert slowest(balanced) <= even
        assert blocks_of(balanced, shape) == quick
        if is_unlike(kinds_of([member.instance for member in members])):
            assert blocks_of(most, shape) == best
            assert slowest(most) <= max(even, min(slowest(s) for s in every if blocks_of(s, shape) == best))
            assert quick <= blocks_of(middle, shape) <= best
        alone = alone_blocks(members, shape)
        found = splitter.split(members, at_least=alone)
        assert found is not None
        assert blocks_of(found, shape) >= min(alone, blocks_of(most, shape))
        farther += blocks_of(balanced, shape) < alone <= blocks_of(most, shape)
    assert farther > 20

"""Compares dropping with doing nothing, for a model of 14B parameters on a machine like an A100 with 40 GB."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ballast.common.cost import CostModel
from ballast.common.ids import GroupId, WorkerId
from ballast.common.traffic import Pace, Traffic
from services.planner.policy.candidates import Running
from services.planner.policy.compare import Comparison, ComparisonTargets, compare, compare_restore, loss_of
from services.planner.policy.drop import plan_of
from services.planner.policy.fluid_model import (
    FluidMachine,
    Future,
    GroupKind,
    Prediction,
    _Flow,
    bubbles,
    look_ahead,
    token_s,
)
from services.planner.policy.snapshot import GroupState, InstanceState, ModelShape, Snapshot

LAYERS = 48
SHAPE = ModelShape(
    layer_parameter_bytes=(560 << 20,) * LAYERS,
    other_parameter_bytes=3 << 30,
    block_tokens=64,
    block_bytes=256 << 10,
    extent_bytes=16 << 20,
)
BUDGET_BYTES = 38 << 30
COST = CostModel(
    attention_s=8e-9, token_s=0.0, chunk_s=0.028, shared_s=0.028, prefix_s=1.8e-7, many_s=0.0, beyond_s=1.6e-4
)
PACE = Pace(COST, LAYERS, 2048)
MACHINE = FluidMachine(pace=PACE, layer_count=LAYERS, max_running_count=256)
BLOCKS = SHAPE.block_count(BUDGET_BYTES, 0, LAYERS)


def alone(names: Sequence[str], used: int, waiting: int = 0) -> Snapshot:
    layers = tuple(range(LAYERS))
    groups = (
        GroupState(
            GroupId(name), (InstanceState(WorkerId(name), BUDGET_BYTES, 0, LAYERS, layers),), BLOCKS, used, waiting
        )
        for name in names
    )
    return Snapshot(SHAPE, tuple(groups))


def running(snapshot: Snapshot, each: int) -> Snapshot:
    """The snapshot with `each` requests running on every group."""
    return replace(snapshot, groups=tuple(group._replace(running_count=each) for group in snapshot.groups))


def kind(stages: int, count: int, blocks: int, requests: float, used: float) -> GroupKind:
    tokens = SHAPE.block_tokens
    return GroupKind(
        stages=stages,
        group_count=count,
        capacity_tokens=count * blocks * tokens,
        running_count=requests,
        used_tokens=used * tokens,
    )


EIGHT = [f"w{i}" for i in range(8)]
# LONG: short prompts and long answers (500 and 1,700 tokens on average). CODE: the reverse (2,000 and 13).
LONG = Traffic(
    queued_count=30,
    queued_tokens=15_000,
    recent_count=40,
    minute_count=160,
    minute_tokens=80_000,
    calm_per_s=1.0,
    ended_count=100,
    ended_tokens=170_000,
    known_s=300.0,
)
CODE = replace(
    LONG, recent_count=300, minute_count=1500, minute_tokens=3_000_000, ended_count=4000, ended_tokens=52_000
)


def test_groups_are_merged_if_memory_is_short() -> None:
    snapshot = alone(EIGHT, BLOCKS - 5)
    found = compare(running(snapshot, 24), Running(256, 4), LONG, PACE)
    assert len(found.chosen.merges) >= 2
    nothing = found.candidates[0]
    assert nothing.merges == ()
    assert found.chosen.prediction.ttft_p99_s < nothing.prediction.ttft_p99_s / 2


def test_the_first_burst_is_comparable_although_no_answer_has_ended() -> None:
    """No answer has ended yet. Answers are nevertheless not assumed to be endless, since every option would then look
    hopeless.
    """
    snapshot = alone(EIGHT, BLOCKS - 5, waiting=20)
    first = Traffic(
        queued_count=200,
        queued_tokens=135_000,
        recent_count=300,
        minute_count=350,
        minute_tokens=236_000,
        calm_per_s=20.0,
        open_tokens=88_000,
        known_s=12.0,
    )
    found = compare(running(snapshot, 50), Running(256, 2), first, PACE)
    assert len(found.chosen.merges) >= 2
    assert found.chosen.prediction.ttft_p99_s < 60.0


def test_no_groups_are_merged_if_prompts_fill_the_steps() -> None:
    snapshot = alone(EIGHT, BLOCKS // 2)
    found = compare(running(snapshot, 10), Running(256, 0), CODE, PACE)
    assert found.chosen.merges == ()
    assert "nothing" in found.lines()[0]


# Two minutes of chat that just fill the memory of four 80 GB machines. Prompts take most of the steps.
CHAT = Traffic(
    queued_count=26,
    queued_tokens=24_000,
    recent_count=145,
    minute_count=857,
    minute_tokens=1_050_000,
    calm_per_s=12.4,
    ended_count=2766,
    ended_tokens=506_000,
    known_s=280.0,
)
CHAT_COST = CostModel(
    attention_s=9.5e-9, token_s=1.4e-4, chunk_s=0.018, shared_s=0.018, prefix_s=1.4e-7, many_s=0.0, beyond_s=0.0
)


def test_long_answers_that_hold_the_memory_do_not_end_as_soon_as_the_many_short_ones() -> None:
    """Nine answers of ten are short, but each running answer has 2,500 tokens and will have as many again."""
    snapshot = running(alone(EIGHT[:4], BLOCKS - 5), 16)
    mixed = replace(LONG, queued_count=120, queued_tokens=48_000, ended_count=900, ended_tokens=400_000)
    young, old = (compare(snapshot, Running(256, 0), replace(mixed, open_tokens=n), PACE) for n in (20_000, 160_000))
    assert old.candidates[0].prediction.ttft_p99_s > 1.5 * young.candidates[0].prediction.ttft_p99_s
    assert old.chosen.merges


def test_a_long_exchange_does_not_pay_for_a_burst_that_just_fills_memory() -> None:
    """With a quarter of the bytes per token and all else equal, the exchange takes a quarter of the time, and the drop
    pays.
    """

    def found(part: int) -> Comparison:
        shape = ModelShape(
            layer_parameter_bytes=tuple(size // part for size in SHAPE.layer_parameter_bytes),
            other_parameter_bytes=SHAPE.other_parameter_bytes // part,
            block_tokens=SHAPE.block_tokens,
            block_bytes=SHAPE.block_bytes // part,
            extent_bytes=SHAPE.extent_bytes // part,
        )
        budget_bytes, names = (73 << 30) // part, list(map(GroupId, EIGHT[:4]))
        blocks = shape.block_count(budget_bytes, 0, LAYERS)
        layers = tuple(range(LAYERS))
        groups = tuple(
            GroupState(
                n,
                (InstanceState(WorkerId(n), budget_bytes, 0, LAYERS, layers),),
                blocks,
                blocks * 14 // 15,
                0,
                172,
                900,
            )
            for n in names
        )
        return compare(Snapshot(shape, groups), Running(256, 0), CHAT, replace(PACE, cost=CHAT_COST))

    light, heavy = found(4), found(1)
    assert light.candidates[0] == heavy.candidates[0], "doing nothing exchanges no KV"
    assert heavy.chosen.name == "nothing"
    late, early = ({c.name: c.prediction for c in one.candidates}["2 pairs"] for one in (heavy, light))
    assert late.ttft_p99_s > early.ttft_p99_s + 1.0


# A burst of completions that is nearly over. The requests still in the queue have waited long.
COMPLETIONS = Traffic(
    queued_count=22,
    queued_tokens=38_000,
    recent_count=56,
    minute_count=569,
    minute_tokens=1_218_000,
    ended_count=390,
    ended_tokens=40_000,
    open_tokens=35_000,
    known_s=32.0,
)


def completing() -> Snapshot:
    """The cluster that serves COMPLETIONS. Most of its memory holds prompts, longer than most of those in the burst."""
    groups = alone(EIGHT, BLOCKS * 9 // 10, waiting=40).groups
    return Snapshot(SHAPE, tuple(group._replace(running_count=18, uncomputed_tokens=1800) for group in groups))


def test_running_long_prompts_do_not_make_answers_seem_long() -> None:
    """Memory that prompts hold beyond their mean length must not count as answers. Short answers soon make room without
    a drop.
    """
    short = replace(COMPLETIONS, ended_tokens=5440, open_tokens=2000)
    assert compare(completing(), Running(256, 6), short, replace(PACE, cost=CHAT_COST)).chosen.name == "nothing"


def test_a_drop_does_not_help_requests_that_have_waited_long() -> None:
    """A simulation showed that a drop comes too late for the longest waits in the queue, and slows tokens down."""
    snapshot, pace = completing(), replace(PACE, cost=CHAT_COST)
    fresh, late = (
        compare(snapshot, Running(256, 6), replace(COMPLETIONS, oldest_wait_s=waited_s), pace)
        for waited_s in (0.0, 14.0)
    )
    assert fresh.chosen.merges
    assert late.chosen.name == "nothing"
    assert all(one.prediction.ttft_p99_s < 10.0 for one in fresh.candidates)
    assert all(12.0 < one.prediction.ttft_p99_s < 15.0 for one in late.candidates)
    assert [one.prediction.tpot_s for one in fresh.candidates] == [one.prediction.tpot_s for one in late.candidates]
    ahead_s = [one.prediction.ahead_p99_s for one in late.candidates]
    assert ahead_s == [one.prediction.ttft_p99_s for one in fresh.candidates]
    assert late.candidates[0].loss > fresh.candidates[0].loss, "half of the loss counts the time already waited"


def test_while_prompts_wait_a_pipeline_has_a_microbatch_more_than_stages() -> None:
    """Besides bubbles, times between tokens are half as long again with two stages, a quarter longer with four."""
    future = replace(one_prompt(2000.0), rate_per_s=200.0, lasts_s=60.0, waiting_count=400.0, waiting_tokens=8e5)
    alone_s, two_s, four_s = (
        look_ahead(MACHINE, [kind(stages, 8 // stages, stages * 9 * BLOCKS, 160.0, 160 * 20)], future, 30.0).tpot_s
        for stages in (1, 2, 4)
    )
    assert two_s * (1 - bubbles(2)) == pytest.approx(1.5 * alone_s, rel=0.05)
    assert four_s * (1 - bubbles(4)) == pytest.approx(1.25 * alone_s, rel=0.05)


def test_no_groups_are_merged_if_no_request_waits() -> None:
    snapshot = alone(EIGHT, BLOCKS // 4)
    calm = replace(LONG, queued_count=0, queued_tokens=0, recent_count=10, minute_count=60, minute_tokens=30_000)
    found = compare(running(snapshot, 5), Running(256, 0), calm, PACE)
    assert found.chosen.name == "nothing"
    assert found.chosen.prediction.ttft_p99_s < 1.0
    assert found.chosen.prediction.tpot_s == pytest.approx(0.03, rel=0.3)


def test_the_chosen_candidate_is_the_plan() -> None:
    snapshot = alone(EIGHT, BLOCKS - 5)
    chosen = compare(running(snapshot, 24), Running(256, 4), LONG, PACE).chosen
    plan = plan_of(snapshot, chosen.merges, 1)
    assert sorted(tuple(sorted(g.group_id for g in group.merged)) for group in plan.groups) == sorted(
        tuple(sorted(merge)) for merge in chosen.merges
    )
    named = [group_id for merge in chosen.merges for group_id in merge]
    assert len(set(named)) == len(named)


@pytest.mark.parametrize("count", [3, 5])
def test_an_odd_number_of_instances_is_merged_completely(count: int) -> None:
    """With pairs only, the last instance would keep all its parameters and stay short of memory."""
    snapshot = running(alone([f"w{i}" for i in range(count)], BLOCKS - 5), 24)
    much = replace(LONG, queued_count=40 * count, queued_tokens=20_000 * count, minute_count=50 * count)
    found = compare(snapshot, Running(256, 4), replace(much, minute_tokens=25_000 * count), PACE)
    plan = plan_of(snapshot, found.chosen.merges, 1)
    assert sum(len(group.members) for group in plan.groups) == count


def slowed(snapshot: Snapshot, names: set[WorkerId]) -> Snapshot:
    groups = [
        g._replace(members=tuple(m._replace(slowness=3.0 if m.worker_id in names else 1.0) for m in g.members))
        for g in snapshot.groups
    ]
    return Snapshot(snapshot.model, tuple(groups))


def test_unlike_machines_have_their_own_cost_models_and_are_merged_with_equals() -> None:
    snapshot, load = running(alone(EIGHT, BLOCKS - 5), 24), Running(256, 4)
    slow = {WorkerId(name) for name in EIGHT[:4]}
    alike, unlike = (compare(one, load, LONG, PACE) for one in (snapshot, slowed(snapshot, slow)))
    assert unlike.candidates[0].prediction.tpot_s > 1.3 * alike.candidates[0].prediction.tpot_s
    assert unlike.candidates[0].prediction.tpot_s < 3.0 * alike.candidates[0].prediction.tpot_s
    assert unlike.chosen.merges
    for one in unlike.candidates:
        assert all(len({name in slow for name in merge}) == 1 for merge in one.merges)
    assert len({one.name for one in unlike.candidates}) == len(unlike.candidates)


def test_the_only_one_of_its_kind_may_be_merged_with_others() -> None:
    snapshot = running(alone(["w0", "w1"], BLOCKS - 5), 24)
    found = compare(slowed(snapshot, {WorkerId("w0")}), Running(256, 4), LONG, PACE)
    assert {one.name.split(",")[0] for one in found.candidates} == {"nothing", f"1 pair {2.0:.1f} x as slow"}
    plan = plan_of(slowed(snapshot, {WorkerId("w0")}), [[GroupId("w0"), GroupId("w1")]], 1, 0.0)
    layers = {m.worker_id: m.last_layer - m.first_layer for m in plan.groups[0].members}
    assert 2.5 * layers[WorkerId("w0")] < layers[WorkerId("w1")] < 4 * layers[WorkerId("w0")], (
        "both stages take equally long"
    )


def pairs(used: int) -> Snapshot:
    """Eight instances merged into four pairs, each with `used` blocks in use."""
    alike = alone(["a", "b"], used)
    merged = plan_of(alike, [[group.group_id for group in alike.groups]], 1).groups[0]
    half = LAYERS // 2
    groups = [
        GroupState(
            GroupId(f"p{i}a"),
            (
                InstanceState(WorkerId(f"p{i}a"), BUDGET_BYTES, 0, half, tuple(range(half))),
                InstanceState(WorkerId(f"p{i}b"), BUDGET_BYTES, half, LAYERS, tuple(range(half, LAYERS))),
            ),
            merged.block_count,
            used,
            0,
        )
        for i in range(4)
    ]
    return Snapshot(SHAPE, tuple(groups))


def test_pairs_that_are_full_become_fours() -> None:
    full = pairs(0).groups[0].block_count - 5
    much = replace(LONG, queued_count=300, queued_tokens=150_000, minute_count=400, minute_tokens=200_000)
    snapshot = running(pairs(full), 120)
    found = compare(snapshot, Running(256, 4), much, PACE)
    assert found.chosen.name == "2 of 2 + 2"
    plan = plan_of(snapshot, found.chosen.merges, 1)
    assert [len(group.members) for group in plan.groups] == [4, 4]


def test_parameters_are_restored_if_no_request_has_to_wait() -> None:
    snapshot = pairs(BLOCKS // 4)
    restored = {group.group_id: (BLOCKS, BLOCKS) for group in snapshot.groups}
    calm = replace(LONG, queued_count=0, queued_tokens=0, recent_count=10, minute_count=60, minute_tokens=30_000)
    assert compare_restore(running(snapshot, 6), Running(256, 0), calm, PACE, restored).chosen.name == "give back 4"


def test_parameters_stay_dropped_while_the_burst_continues() -> None:
    snapshot = pairs(3 * BLOCKS // 2)
    restored = {group.group_id: (BLOCKS, BLOCKS) for group in snapshot.groups}
    burst = replace(LONG, queued_count=0, open_tokens=190_000)
    found = compare_restore(running(snapshot, 48), Running(256, 0), burst, PACE, restored)
    assert found.chosen.name == "stay"
    assert found.chosen.loss < found.candidates[1].loss


def test_parameters_are_not_restored_under_load_without_a_benefit() -> None:
    """Loading layers and moving requests have costs that predictions do not include."""
    snapshot = running(pairs(BLOCKS // 4), 6)
    restored = {group.group_id: (BLOCKS, BLOCKS) for group in snapshot.groups}
    calm = replace(LONG, queued_count=0, queued_tokens=0, recent_count=10, minute_count=60, minute_tokens=30_000)
    easy = compare_restore(snapshot, Running(256, 0), calm, PACE, restored)
    stay, whole = (one.prediction for one in easy.candidates)
    assert whole.tpot_s == pytest.approx(stay.tpot_s, rel=0.08), "predicted equally good"
    strict = ComparisonTargets(ttft_s=stay.ttft_p99_s / 2, tpot_s=stay.tpot_s / 2)
    assert compare_restore(snapshot, Running(256, 0), calm, PACE, restored, strict).chosen.name == "stay"


def test_no_restore_while_requests_would_wait_for_a_dissolving_pipeline() -> None:
    """After the restore there is room. Until then, dissolving pipelines hold memory that other requests cannot use."""
    snapshot = running(pairs(5 * BLOCKS // 4), 40)
    restored = {group.group_id: (BLOCKS, BLOCKS) for group in snapshot.groups}
    steady = replace(LONG, queued_count=0, queued_tokens=0, recent_count=60, minute_count=300, minute_tokens=150_000)
    found = compare_restore(snapshot, Running(256, 0), steady, PACE, restored)
    assert found.chosen.name == "stay"


def test_a_pipeline_does_not_dissolve_while_it_runs_more_than_its_members_can_hold() -> None:
    """No requests arrive, and the targets would be met, but the long running requests have many tokens to generate."""
    restored = {group.group_id: (BLOCKS, BLOCKS) for group in pairs(0).groups}
    quiet = replace(LONG, queued_count=0, queued_tokens=0, recent_count=0, minute_count=0, minute_tokens=0)
    quiet = replace(quiet, open_tokens=24 * 8000, ended_count=100, ended_tokens=20_000)
    for share, name in ((0.74, "give back 4"), (0.9, "stay")):
        snapshot = running(pairs(round(share * BLOCKS)), 6)
        found = compare_restore(snapshot, Running(256, 0), quiet, PACE, restored)
        assert found.chosen.name == name, found.lines()
    assert re.fullmatch(r"give back 4 over \d+ s", found.candidates[1].name)


def test_a_target_that_is_met_needs_no_improvement() -> None:
    snapshot = running(alone(EIGHT, BLOCKS - 5), 24)
    assert compare(snapshot, Running(256, 4), LONG, PACE, ComparisonTargets(ttft_s=1000.0)).chosen.merges == ()


def test_an_empty_cluster_can_be_compared() -> None:
    snapshot = alone(["w0", "w1"], 0)
    found = compare(running(snapshot, 0), Running(256, 0), Traffic(known_s=1.0), PACE)
    assert found.chosen.name == "nothing"


def test_more_memory_never_makes_waits_longer() -> None:
    future = Future(
        rate_per_s=4.0,
        lasts_s=60.0,
        calm_per_s=1.0,
        prompt_tokens=500.0,
        answer_tokens=1700.0,
        waiting_count=20.0,
        waiting_tokens=10_000.0,
    )
    waits = [
        look_ahead(MACHINE, [kind(1, 8, blocks, 160.0, 160 * 20)], future, 60.0).ttft_p99_s
        for blocks in (420, 500, 700, 1400, 2800)
    ]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 10 * max(waits[-1], 0.1)


def test_a_long_prompt_is_predicted_to_take_long() -> None:
    future = Future(
        rate_per_s=0.0,
        lasts_s=2.0,
        calm_per_s=0.0,
        prompt_tokens=20_000.0,
        answer_tokens=100.0,
        waiting_count=1.0,
        waiting_tokens=20_000.0,
    )
    found = look_ahead(MACHINE, [kind(1, 1, 10 * BLOCKS, 0.0, 0.0)], future, 30.0)
    alone_s = 20_000 / 2048 * token_s(MACHINE.cost_of(1), 0.0, 0.0, 2048.0, 10_000.0)
    assert found.ttft_p99_s == pytest.approx(alone_s, rel=0.25)


def one_prompt(tokens: float) -> Future:
    return Future(
        rate_per_s=0.0,
        lasts_s=2.0,
        calm_per_s=0.0,
        prompt_tokens=tokens,
        answer_tokens=100.0,
        waiting_count=1.0,
        waiting_tokens=tokens,
    )


def test_one_prompt_is_not_computed_by_eight_instances() -> None:
    """With no other requests, eight instances take as long for a single prompt as one instance does."""
    one, eight = (
        look_ahead(MACHINE, [kind(1, count, 10 * BLOCKS, 0.0, 0.0)], one_prompt(16_000.0), 30.0).ttft_p99_s
        for count in (1, 8)
    )
    assert eight > 16_000 * COST.beyond_s
    assert eight == pytest.approx(one, rel=0.25)


def test_requests_with_long_prompts_wait_longest() -> None:
    """Equal prompts, or a few eight times as long at the same mean. Memory and compute suffice in both cases."""
    alike = replace(one_prompt(1000.0), rate_per_s=1.0, calm_per_s=1.0, waiting_count=0.0, waiting_tokens=0.0)
    spread = replace(alike, prompts=(650.0, 650.0, 650.0, 8000.0))
    same, differing = (
        look_ahead(MACHINE, [kind(1, 8, BLOCKS, 40.0, 40 * 20)], future, 60.0).ttft_p99_s for future in (alike, spread)
    )
    assert 1000 * COST.beyond_s < same < 1.0
    assert differing > 8000 * COST.beyond_s


def test_a_rounding_residue_of_old_requests_does_not_count() -> None:
    flow = _Flow(kind(1, 1, BLOCKS, 4.0, 4 * 20), MACHINE, one_prompt(16_000.0))
    flow.running, flow.old, flow.prefills, flow.uncomputed = 0.0, 1e-17, 1.0, 20.0
    begun, made, *_ = flow.advance(0.0, 20.0, 10.0, 40.0, 1.0)
    assert (begun, made) == (1.0, 0.0)


def test_waits_are_distinguished_within_a_step_of_the_prediction() -> None:
    """Two waiting prompts are computed at once, whether the prediction covers 30 s or 120 s."""
    few = replace(one_prompt(500.0), waiting_count=2.0, waiting_tokens=1000.0)
    layout = [replace(kind(1, 8, BLOCKS, 40.0, 40 * 20), stall_s=0.3)]
    near, far = (look_ahead(MACHINE, layout, few, horizon_s).ttft_p99_s for horizon_s in (30.0, 120.0))
    assert far == pytest.approx(near, rel=0.2)
    assert 0.3 < far < 1.0


def test_the_inherent_time_of_a_long_prompt_is_no_reason_to_drop() -> None:
    snapshot = alone(EIGHT, BLOCKS // 3)
    lengths = (0,) * 28 + (40,)  # about 7,500 tokens each
    agents = replace(LONG, queued_count=0, queued_tokens=0, recent_count=6, minute_count=40, minute_tokens=300_000)
    found = compare(running(snapshot, 3), Running(256, 0), replace(agents, prompt_counts=lengths, calm_per_s=0.6), PACE)
    assert found.chosen.name == "nothing"
    assert found.chosen.prediction.ttft_p99_s > 7500 * COST.beyond_s


def test_a_request_is_not_divided_between_groups() -> None:
    """Eight instances that each have room for two and a half long prompts can run sixteen of them, but any number of
    short ones.
    """

    def wait_s(prompt_tokens: float) -> float:
        future = Future(
            rate_per_s=0.0,
            lasts_s=2.0,
            calm_per_s=0.0,
            prompt_tokens=prompt_tokens,
            answer_tokens=1000.0,
            waiting_count=190_000 / prompt_tokens,
            waiting_tokens=190_000.0,
        )
        eight = replace(kind(1, 8, 0, 0.0, 0.0), capacity_tokens=205_000.0)
        return look_ahead(MACHINE, [eight], future, 60.0).ttft_p99_s

    assert wait_s(10_000.0) > 2 * wait_s(1000.0)


def test_bubbles_grow_with_the_stages() -> None:
    shares = [bubbles(stages) for stages in range(1, 12)]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] < 0.3


def test_absurd_costs_take_no_longer_to_compare() -> None:
    """The predicted waits are so long that adjacent floats are more than a millisecond apart."""
    snapshot = alone(["w0", "w1"], used=5, waiting=5)
    endless = replace(PACE, cost=PACE.cost.scaled(1e18))
    assert compare(running(snapshot, 2), Running(256, 0), LONG, endless).chosen.name


def lost(prediction_s: float, share: float, tpot_s: float = 0.04) -> float:
    return loss_of(
        Prediction(prediction_s, prediction_s, tpot_s, share, share), ComparisonTargets(ttft_s=0.5, tpot_s=0.03)
    )


def test_for_waits_far_beyond_the_target_only_their_share_counts() -> None:
    assert lost(4.0, 0.0) > lost(2.0, 0.0)
    assert lost(199.0, 0.9) == lost(157.0, 0.9)
    assert lost(157.0, 0.9) > lost(157.0, 0.5)
    assert lost(157.0, 0.9, 0.08) > lost(199.0, 0.9), "slower tokens do not pay for requests that are lost anyway"


def test_a_longer_limit_loses_fewer_waits() -> None:
    """The waiting requests are admitted one after the other, so fewer of them miss a longer limit."""
    future = Future(
        rate_per_s=0.0,
        lasts_s=0.0,
        calm_per_s=0.0,
        prompt_tokens=500.0,
        answer_tokens=2000.0,
        waiting_count=40.0,
        waiting_tokens=20_000.0,
        waited_s=8.0,
    )
    full = [kind(1, 1, BLOCKS, 40.0, BLOCKS)]
    shares = [look_ahead(MACHINE, full, future, 60.0, limit_s).lost_share for limit_s in (1.0, 10.0, 40.0, 1000.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.9
    assert 0.0 < shares[2] < shares[1]
    assert shares[3] == 0.0


def test_tokens_are_not_slowed_down_if_no_option_shortens_the_waits_enough() -> None:
    """As in a simulation of three instances, prompts need more compute than there is, and memory is full."""
    flood = replace(
        CODE, queued_count=2000, queued_tokens=4_000_000, oldest_wait_s=90.0, ended_tokens=1_200_000, open_tokens=40_000
    )
    found = compare(running(alone(EIGHT[:3], BLOCKS - 5), 30), Running(256, 0), flood, PACE)
    assert all(one.prediction.ttft_p99_s > found.targets.lost_s for one in found.candidates)
    assert found.chosen.name == "nothing", found.lines()


def test_a_burst_is_predicted_to_end_like_earlier_bursts() -> None:
    snapshot = running(alone(EIGHT, BLOCKS - 5), 24)
    burst = replace(LONG, calm_per_s=0.1, recent_count=80, minute_count=120)

    def waits_s(lasts_s: float, since_s: float = 4.0) -> float:
        bursts = replace(burst, burst_since_s=since_s, burst_s=lasts_s, burst_per_s=8.0 if lasts_s else 0.0)
        return compare(snapshot, Running(256, 4), bursts, PACE).candidates[0].prediction.ttft_p99_s

    assert waits_s(6.0) < waits_s(20.0) < waits_s(40.0)
    assert waits_s(0.0) == compare(snapshot, Running(256, 4), burst, PACE).candidates[0].prediction.ttft_p99_s
    assert waits_s(6.0, since_s=8.0) < waits_s(6.0), "the burst is already over"


def test_full_instances_are_predicted_separately_from_large_ones_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are routed to all instances alike, but full instances with little memory cannot compute prompts."""
    layers = tuple(range(LAYERS))
    small = alone(EIGHT[:3], BLOCKS - 5).groups
    member = InstanceState(WorkerId("large"), 2 * BUDGET_BYTES, 0, LAYERS, layers)
    blocks = SHAPE.block_count(2 * BUDGET_BYTES, 0, LAYERS)
    snapshot = running(Snapshot(SHAPE, (*small, GroupState(GroupId("large"), (member,), blocks, 5, 0))), 24)
    burst = replace(LONG, recent_count=80, minute_count=160)

    def nothing_s() -> float:
        return compare(snapshot, Running(256, 4), burst, PACE).candidates[0].prediction.ttft_p99_s

    apart_s = nothing_s()
    monkeypatch.setattr("services.planner.policy.candidates._LIKE_MEMORY", 100.0)
    assert apart_s > 2 * nothing_s()

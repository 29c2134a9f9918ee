"""Which instances migrate running requests, and to which instances."""

from dataclasses import replace

from ballast.common.ids import Epoch, GroupId, Incarnation, WorkerId
from ballast.common.layout import Group, Layout, Member
from ballast.common.load import LoadReport
from services.planner.policy.migrate import MigrationRules, is_round_due, migrations
from tests.support.reporting_worker import load_report

RULES = MigrationRules(balances=True, below_tokens=32, above_tokens=96)
DRAINS_ONLY = replace(RULES, balances=False)
RELIEVES = replace(DRAINS_ONLY, relieves=True)


def load(used: int, running: int = 4, *, waiting: int = 0, draining: bool = False, blocks: int = 100) -> LoadReport:
    """Load of a worker with `blocks` blocks of 16 tokens."""
    return replace(
        load_report(100),
        block_count=blocks,
        block_tokens=16,
        used_block_count=used,
        running_count=running,
        waiting_count=bool(waiting),
        waiting_block_count=waiting,
        max_running_count=64,
        draining=draining,
    )


def moves(loads: dict[str, LoadReport], rules: MigrationRules = RULES) -> list[tuple[str, str, int]]:
    members = [Member(WorkerId(w), Incarnation(1), f"{w}:1", 0, 4, loads[w].draining, f"{w}:2") for w in loads]
    layout = Layout(Epoch(3), 4, tuple(Group(GroupId(m.worker_id), (m,)) for m in members), "test")
    found = migrations(layout, {WorkerId(w): one for w, one in loads.items()}, rules)
    return [(m.source.leader.worker_id, m.target.leader.worker_id, m.block_budget) for m in found]


def test_the_least_free_instance_sends_to_the_freest_until_both_are_even() -> None:
    # Free tokens per request: 16, 400 and 120.
    assert moves({"w1": load(96), "w2": load(0), "w3": load(70)}) == [("w1", "w2", 48)]
    assert moves({"w1": load(96), "w2": load(40), "w3": load(97), "w4": load(20)}) == [
        ("w3", "w4", 38),
        ("w1", "w2", 28),
    ]


def test_nothing_moves_between_instances_that_are_alike() -> None:
    assert moves({"w1": load(80), "w2": load(81)}) == []
    assert moves({"w1": load(97), "w2": load(98)}) == []


def test_an_instance_looks_full_if_a_waiting_request_needs_more_than_its_free_blocks() -> None:
    """w1 has twenty free blocks, but one of its waiting requests needs thirty."""
    assert moves({"w1": load(80, waiting=30), "w2": load(50, running=2)}) == [("w1", "w2", 30)]
    assert moves({"w1": load(80), "w2": load(50, running=2)}) == []


def test_a_targets_reserve_does_not_count_as_room() -> None:
    full = load(98)
    assert moves({"w1": full, "w2": replace(load(60), kept_block_count=5)}) == [("w1", "w2", 19)]
    assert moves({"w1": full, "w2": replace(load(60), kept_block_count=25)}) == [("w1", "w2", 15)]
    assert moves({"w1": full, "w2": replace(load(60), kept_block_count=40)}) == []
    assert moves({"w1": full, "w2": replace(load(0, running=0), kept_block_count=40)}) == [("w1", "w2", 49)]


def test_a_single_request_gains_nothing_by_moving() -> None:
    assert moves({"w1": load(99, running=1), "w2": load(0, running=0)}) == []
    assert moves({"w1": load(99, running=1, waiting=10), "w2": load(0, running=0)}) == [("w1", "w2", 54)]


def test_a_draining_instance_migrates_all_requests_and_takes_none() -> None:
    drained = {"w1": load(10, draining=True), "w2": load(40), "w3": load(60, running=2)}
    assert moves(drained, DRAINS_ONLY) == [("w1", "w3", 40), ("w1", "w2", 60)], "to all workers with room, at once"
    assert moves({"w1": load(97), "w2": load(0, running=0, draining=True)}) == []


def test_without_the_policy_only_drains_move_requests() -> None:
    assert moves({"w1": load(96), "w2": load(0)}, DRAINS_ONLY) == []


def test_an_instance_at_its_maximum_takes_no_requests() -> None:
    full = replace(load(0, running=8), max_running_count=8)
    assert moves({"w1": load(96), "w2": full}) == []


def test_a_pipeline_sends_and_receives_like_an_instance() -> None:
    """The leader reports the blocks of its pipeline. A pipeline drains if any of its members does."""

    def found(pair: LoadReport, alone: LoadReport, *, follower_drains: bool = False) -> list[tuple[str, str]]:
        members = [
            Member(WorkerId("w1"), Incarnation(1), "w1:1", 0, 2, False, "w1:2"),
            Member(WorkerId("w2"), Incarnation(1), "w2:1", 2, 4, follower_drains, "w2:2"),
        ]
        lone = Member(WorkerId("w3"), Incarnation(1), "w3:1", 0, 4, False, "w3:2")
        groups = (Group(GroupId("w1"), tuple(members)), Group(GroupId("w3"), (lone,)))
        loads = {WorkerId("w1"): pair, WorkerId("w2"): load(0, 0), WorkerId("w3"): alone}
        made = migrations(Layout(Epoch(3), 4, groups, "test"), loads, RULES)
        return [(move.source.leader.worker_id, move.target.leader.worker_id) for move in made]

    assert found(load(96), load(0)) == [("w1", "w3")]
    assert found(load(0), load(96)) == [("w3", "w1")]
    assert found(load(10), load(10)) == []
    assert found(load(10), load(10), follower_drains=True) == [("w1", "w3")]


def test_a_nearly_full_instance_sends_its_longest_requests_until_both_are_even() -> None:
    large = load(100, 20, blocks=900)
    assert moves({"w1": load(97), "w2": large}, RELIEVES) == [("w1", "w2", 77)], (
        "leaves 20 of 100 blocks and about 180 of 900 in use"
    )
    assert moves({"w1": load(97), "w2": large}, DRAINS_ONLY) == []
    assert moves({"w1": load(70), "w2": large}, RELIEVES) == [], "each of its requests can still grow by 120 tokens"
    assert moves({"w1": load(97), "w2": replace(large, used_block_count=890)}, RELIEVES) == []
    assert moves({"w1": load(97), "w2": load(10)}, RELIEVES) == [("w1", "w2", 43)]
    assert moves({"w1": load(97), "w2": load(56)}, RELIEVES) == [("w1", "w2", 20)]
    assert moves({"w1": load(97), "w2": load(60)}, RELIEVES) == [], "w2 is not much emptier"
    assert moves({"w1": load(97, 1), "w2": load(0)}, RELIEVES) == [], "a lone request would fill w2 as much"


def test_nearly_full_instances_send_one_after_another() -> None:
    full = {name: load(97) for name in ("w1", "w2", "w3")}
    found = moves({**full, "w4": load(0, 20, blocks=900), "w5": load(9, 20, blocks=900)}, RELIEVES)
    assert [(source, target) for source, target, _ in found] == [("w1", "w4"), ("w2", "w5"), ("w3", "w4")]


def test_migration_rounds_have_a_minimum_interval() -> None:
    members = [Member(WorkerId(w), Incarnation(1), f"{w}:1", 0, 4, False, f"{w}:2") for w in ("w1", "w2")]
    layout = Layout(Epoch(3), 4, tuple(Group(GroupId(m.worker_id), (m,)) for m in members), "test")
    assert is_round_due(layout, RELIEVES, looks=True)
    assert not is_round_due(layout, RELIEVES, looks=False)
    assert not is_round_due(layout, DRAINS_ONLY, looks=True)
    assert is_round_due(layout, RULES, looks=False)

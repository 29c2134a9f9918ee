from hypothesis import given
from hypothesis import strategies as st

from ballast.common.ids import WorkerId
from services.worker.policy.placement import MemberView, PlacementView, place


def members(*blocks: int, running: int = 10) -> list[MemberView]:
    return [MemberView(WorkerId(f"w{i}"), count, running) for i, count in enumerate(blocks)]


def test_the_largest_sequences_are_placed_first_where_most_room_is_left() -> None:
    sequences = [PlacementView(i, blocks, True) for i, blocks in enumerate((5, 1, 4, 2))]
    assert place(sequences, members(10, 10)) == {0: "w0", 2: "w1", 3: "w1", 1: "w0"}


def test_a_member_without_places_gets_no_running_sequence_while_another_has_one() -> None:
    views = [MemberView(WorkerId("w0"), 100, 1), MemberView(WorkerId("w1"), 10, 5)]
    placed = place([PlacementView(i, 3, True) for i in range(4)], views)
    assert sorted(placed.values()) == ["w0", "w1", "w1", "w1"]


def test_waiting_sequences_take_no_place() -> None:
    views = [MemberView(WorkerId("w0"), 10, 1), MemberView(WorkerId("w1"), 5, 1)]
    assert place([PlacementView(1, 4, True), PlacementView(2, 4, False)], views) == {1: "w0", 2: "w0"}


def test_a_sequence_that_fits_nowhere_is_placed_on_the_freest_member() -> None:
    assert place([PlacementView(1, 50, True)], members(3, 8, 5)) == {1: "w1"}


@given(st.lists(st.integers(1, 9), max_size=30), st.integers(1, 4))
def test_equal_members_end_at_most_one_sequence_apart(blocks: list[int], member_count: int) -> None:
    views = members(*[500] * member_count, running=100)
    placed = place([PlacementView(i, count, True) for i, count in enumerate(blocks)], views)
    assert placed.keys() == set(range(len(blocks)))
    held = [sum(b for i, b in enumerate(blocks) if placed[i] == view.worker_id) for view in views]
    assert max(held) - min(held) <= max(blocks, default=0)


def test_a_sequence_is_placed_on_its_chosen_member() -> None:
    sequences = [PlacementView(i, blocks, True) for i, blocks in enumerate((5, 1, 4, 2))]
    chosen = {0: WorkerId("w1"), 2: WorkerId("w1")}
    assert place(sequences, members(10, 10), chosen) == {0: "w1", 2: "w1", 3: "w0", 1: "w0"}


def test_chosen_sequences_are_placed_first_and_elsewhere_if_there_is_no_room() -> None:
    chosen = {0: WorkerId("w0"), 1: WorkerId("w0"), 9: WorkerId("w0")}
    placed = place(
        [PlacementView(0, 6, True), PlacementView(1, 5, True), PlacementView(2, 7, True)], members(10, 13), chosen
    )
    assert placed == {0: "w0", 1: "w1", 2: "w1"}


def test_a_former_member_is_not_chosen() -> None:
    assert place([PlacementView(1, 2, True)], members(3, 8), {1: WorkerId("gone")}) == {1: "w1"}

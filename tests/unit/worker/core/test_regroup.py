"""The first batch after a restore waits for all whose KV is on its way, but not for ever."""

from services.worker.core.regroup import Regroup, Turn


def test_nothing_waits_unless_it_has_begun() -> None:
    regroup = Regroup()
    assert regroup.turn(0.0, 3) is Turn.AS_USUAL
    assert regroup.wakes_at_s is None


def test_the_first_batch_is_formed_when_all_have_come() -> None:
    regroup = Regroup()
    regroup.begin(1.0, 0.03, 0.0)
    assert regroup.wakes_at_s == 1.03
    assert [regroup.turn(1.01, count) for count in (2, 1, 0, 0, 0)] == [
        Turn.WAIT,
        Turn.WAIT,
        Turn.FIRST,
        Turn.OVER,
        Turn.AS_USUAL,
    ]
    assert regroup.wakes_at_s is None
    assert regroup.is_over


def test_prompts_stand_back_for_a_while_after_it() -> None:
    regroup = Regroup()
    assert regroup.is_over
    regroup.begin(1.0, 0.03, 0.5)
    assert not regroup.is_over
    assert [regroup.turn(at_s, 0) for at_s in (1.01, 1.02, 1.5, 1.52, 1.53)] == [
        Turn.FIRST,
        Turn.GENTLY,
        Turn.GENTLY,
        Turn.OVER,
        Turn.AS_USUAL,
    ]
    assert regroup.wakes_at_s is None


def test_who_is_late_is_not_waited_for() -> None:
    regroup = Regroup()
    regroup.begin(1.0, 0.03, 0.0)
    assert regroup.turn(1.02, 1) is Turn.WAIT
    assert regroup.turn(1.03, 1) is Turn.FIRST
    assert regroup.turn(1.04, 1) is Turn.OVER


def test_another_change_of_the_layout_ends_it() -> None:
    regroup = Regroup()
    regroup.begin(1.0, 0.03, 0.0)
    regroup.end()
    assert regroup.turn(1.01, 1) is Turn.AS_USUAL

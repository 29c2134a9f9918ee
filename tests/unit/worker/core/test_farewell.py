"""The last batches of a pipeline: none with prompts, and one of everybody if it has two stages."""

import pytest

from services.worker.core.farewell import Farewell


def test_batches_of_before_land_while_others_are_formed_then_all_drain_and_one_follows() -> None:
    farewell = Farewell()
    farewell.begin(departed_step_id=7, stage_count=2)
    assert not farewell.is_over(5, 2, has_work=False)
    assert not farewell.is_over(6, 1, has_work=True)
    assert farewell.may_form(1)
    assert not farewell.is_over(7, 1, has_work=True)  # number 8 is in flight
    assert not farewell.may_form(1)
    assert not farewell.is_over(8, 0, has_work=True)
    assert farewell.may_form(0)
    assert not farewell.may_form(1)
    assert not farewell.is_over(8, 1, has_work=False)
    assert farewell.is_over(9, 0, has_work=True)


@pytest.mark.parametrize(("stage_count", "has_work"), [(2, False), (3, True)])
def test_there_is_no_last_batch_without_work_or_of_many_stages(stage_count: int, has_work: bool) -> None:
    farewell = Farewell()
    farewell.begin(4, stage_count)
    assert farewell.is_over(4, 0, has_work=has_work)


def test_a_last_batch_that_could_not_be_formed_is_not_waited_for() -> None:
    farewell = Farewell()
    farewell.begin(4, 2)
    assert not farewell.is_over(4, 0, has_work=True)
    assert farewell.is_over(4, 0, has_work=True)


def test_without_a_farewell_the_pipeline_just_drains() -> None:
    farewell = Farewell()
    assert not farewell.may_form(0)
    assert not farewell.is_over(4, 1, has_work=True)
    assert farewell.is_over(4, 0, has_work=True)
    farewell.begin(9, 2)
    farewell.end()
    assert not farewell.may_form(0)

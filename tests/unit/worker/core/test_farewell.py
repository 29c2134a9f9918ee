"""A pipeline that is dissolved forms one batch more, once nothing is in flight."""

from services.worker.core.farewell import Farewell


def test_there_is_one_batch_if_there_is_to_be_one() -> None:
    farewell = Farewell()
    assert not farewell.opens()
    farewell.begin()
    assert not farewell.is_open  # batches are in flight
    assert farewell.opens()
    assert farewell.is_open
    assert not farewell.opens()
    assert not farewell.is_open


def test_it_comes_to_nothing_with_the_group() -> None:
    farewell = Farewell()
    farewell.begin()
    assert farewell.opens()
    farewell.end()
    assert not farewell.is_open
    assert not farewell.opens()

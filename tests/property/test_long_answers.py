"""Long answers fill memory for minutes, so parameters are dropped and come back while much is held: every check, in the
simulator. `BALLAST_LONG_ANSWERS=200 pytest -m slow tests/property/test_long_answers.py` runs more of them.
"""

import os
from dataclasses import replace

import pytest

from sim.hardware import find_model
from sim.results import Outcome
from sim.world import World
from tests.support.simulated import long_answers, options

_MORE = int(os.environ.get("BALLAST_LONG_ANSWERS", "20"))


def judge(seed: int) -> None:
    wanted = replace(options(cluster="4xA100-40G", check_every=200), model=find_model("Qwen2.5-14B"))
    run = World(wanted, long_answers(seed)).run()
    assert all(record.outcome is Outcome.FINISHED for record in run.records)
    assert all(len(record.token_times_s) == record.wanted_tokens for record in run.records)


def test_what_stays_after_a_restore_lies_where_all_layers_have_kv() -> None:
    """This one has a sequence that starts over and was in the way of one that stayed when blocks were arranged."""
    judge(20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(_MORE))
def test_many_more_of_them(seed: int) -> None:
    judge(seed)

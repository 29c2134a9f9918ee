"""Engines that share processors."""

from dataclasses import replace

import pytest

from ballast.common.ids import WorkerId
from sim.clients import Arrival
from sim.processors import Contention, Processors
from sim.world import World
from tests.support.simulated import options

_ONE, _OTHER = WorkerId("w0"), WorkerId("w1")


def test_an_engine_with_its_own_processor_is_not_slowed_down() -> None:
    processors = Processors(Contention(processors=2, step_s=0.004, token_s=0.001))
    assert processors.slowdown(_ONE, 0.0, 0.010, 4) == 1.0  # 1.8 of 2 processors are wanted
    assert processors.slowdown(_ONE, 0.010, 0.010, 4) == 1.0  # its own previous step is over


def test_two_engines_share_processors_with_the_services() -> None:
    processors = Processors(Contention(processors=2, step_s=0.002, token_s=0.001, background=0.1, together=1.2))
    assert processors.slowdown(_ONE, 0.0, 0.010, 4) == 1.0  # it runs alone
    # Wanted: 1 + 0.4 (2 ms + 2 x 1 ms in 10 ms), 1 + 0.6, and 0.1 in the background. Available: 2.
    assert processors.slowdown(_OTHER, 0.005, 0.010, 2) == pytest.approx(1.2 * 3.1 / 2)
    # The first engine's step has ended at 10 ms, and this one lasts until 23.6 ms.
    assert processors.slowdown(_ONE, 0.030, 0.010, 4) == 1.0


def test_a_stage_without_sampled_tokens_has_message_costs_too() -> None:
    processors = Processors(Contention(processors=1, step_s=0.010, token_s=0.005))
    assert processors.slowdown(_ONE, 0.0, 0.010, 0) == pytest.approx(2.0)
    assert processors.slowdown(_ONE, 0.020, 0.010, 1) == pytest.approx(2.5)


def test_a_simulated_cluster_is_slower_where_engines_share() -> None:
    trace = [Arrival(0.0, 100, 30), Arrival(0.0, 100, 30)]
    for fast_forwards in (False, True):
        made = replace(options("recompute"), fast_forwards=fast_forwards)
        alone = World(made, trace).run()
        shared = World(replace(made, contention=Contention(processors=2, together=1.5)), trace).run()
        spans_s = [[r.token_times_s[-1] - r.token_times_s[0] for r in run.records] for run in (alone, shared)]
        # Near the end, one of them runs alone.
        assert spans_s[1] == pytest.approx([1.5 * span_s for span_s in spans_s[0]], rel=0.07)

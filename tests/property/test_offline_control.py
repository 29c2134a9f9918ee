"""Offline work that workers report does not affect the decisions of monitors and planners.

BALLAST_OFFLINE_SEEDS sets the number of histories per policy, BALLAST_OFFLINE_FIRST_SEED the first seed.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from ballast.common.load import LoadReport
from sim.instance import SimInstance
from sim.world import World
from tests.support.reporting_worker import load_report
from tests.support.simulated import options

_LOADS = (5, 40, 80, 97)  # percent of the blocks; the last is an overload
_STEP_S = 4.0
FIRST_SEED = int(os.environ.get("BALLAST_OFFLINE_FIRST_SEED", "0"))
SEEDS = range(FIRST_SEED, FIRST_SEED + int(os.environ.get("BALLAST_OFFLINE_SEEDS", "8")))


def _told(
    policy: str, seed: int, patch: pytest.MonkeyPatch, beside: Callable[[LoadReport], LoadReport]
) -> list[object]:
    """The monitor's signals, the planner's transitions and the layouts, while four workers report random loads."""
    made = replace(options(policy, cluster="4xA100-40G", seed=seed), check_every=0)
    world = World(made, [])

    def load(instance: SimInstance) -> LoadReport:
        period = int(world.clock.now_s / _STEP_S)
        of_all, drawn = random.Random(f"{seed} {period}"), random.Random(f"{seed} {instance.worker_id} {period}")
        used, waiting = (97, 6) if of_all.random() < 0.4 else (drawn.choice(_LOADS), drawn.choice((0, 0, 6)))
        report = replace(load_report(used), waiting_count=waiting, waiting_block_count=3 * waiting)
        return beside(report)

    patch.setattr(SimInstance, "load", load)
    layouts: list[object] = []
    world.state.watch(lambda layout: layouts.append((world.clock.now_s, layout)))
    while world.clock.now_s < world.zero_s + 40.0:
        world.clock.step()
    signals = [(at_s, signal) for node in world.monitors.values() for at_s, signal in node.signals]
    planned = [(record.epoch, record.journal) for node in world.planners.values() for record in node.records]
    return [signals, planned, layouts]


@pytest.mark.parametrize("policy", ["drop", "migrate", "static-pipeline"])
@pytest.mark.parametrize("seed", SEEDS)
def test_offline_work_changes_no_decision_of_the_control_plane(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(-seed)

    def busy(report: LoadReport) -> LoadReport:
        return replace(
            report,
            offline_block_count=rng.randrange(report.block_count),
            offline_running_count=rng.randrange(200),
            offline_waiting_count=rng.randrange(200),
            offline_wanted_tokens=rng.choice((0, 500)),
            offline_tokens_total=rng.randrange(1 << 30),
            offline_lost_tokens_total=rng.randrange(1 << 20),
            offline_yields_total=rng.randrange(1 << 10),
        )

    alone = _told(policy, seed, monkeypatch, lambda report: report)
    assert _told(policy, seed, monkeypatch, busy) == alone
    assert alone[0], "without any signal this history proves nothing"

"""How long the survivors of a pipeline lack layers. `pytest -s tests/unit/sim/test_lost_layers.py` prints the times."""

from dataclasses import replace

import pytest

from services.planner.core.stages import Stage
from sim.clients import Arrival
from sim.faults import Fault, FaultKind
from sim.hardware import find_model
from sim.results import Outcome
from sim.world import World
from tests.support.simulated import options

_CRASH_S = 10.0


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("cluster", "degree", "within_s"),
    [
        ("4xA100-40G", 4, 3.5),  # only disk has a quarter of the layers; reading all missing ones takes 6.6 s
        ("5xA100-40G", 4, 3.0),  # the fifth instance has them
        ("4xA100-40G", 2, 3.0),  # the other pair has them; from disk it takes 4.4 s
    ],
)
def test_survivors_pull_layers_from_their_holders(cluster: str, degree: int, within_s: float) -> None:
    wanted = options("static-pipeline", cluster=cluster, check_every=500)
    transitions = replace(wanted.rules.planner.transitions, pipeline_degree=degree)
    rules = replace(wanted.rules, planner=replace(wanted.rules.planner, transitions=transitions))
    crash = Fault(at_s=_CRASH_S, kind=FaultKind.CRASH, worker=1)
    wanted = replace(wanted, model=find_model("Qwen2.5-14B"), rules=rules, faults=(crash,))
    world = World(wanted, [Arrival(0.2 * i, 500, 300) for i in range(100)])
    run = world.run()
    assert all(record.outcome is Outcome.FINISHED for record in run.records)
    (loss,) = [one for one in run.transitions if one.journal.why.startswith("loss")]
    took_s = loss.reached_at_s[Stage.DONE] - world.zero_s - _CRASH_S
    print(f"{cluster}, pipelines of {degree}: whole {took_s:.2f} s after the crash")
    assert took_s < within_s
